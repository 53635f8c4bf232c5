//! Medians of runs, bars, and the table that shows them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;

/// The values of each figure, one for each run.
#[derive(Default)]
pub(crate) struct Samples(BTreeMap<&'static str, Vec<f64>>);

impl Samples {
    pub(crate) fn add(&mut self, figure: &'static str, value: f64) {
        self.0.entry(figure).or_default().push(value);
    }

    /// The median of a figure. `None` if it has no values, for example if there is no floor.
    pub(crate) fn median(&self, figure: &str) -> Option<f64> {
        let mut values = self.0.get(figure)?.clone();
        values.sort_by(f64::total_cmp);
        Some((values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0)
    }

    /// The largest value, for figures that must stay zero.
    pub(crate) fn most(&self, figure: &str) -> f64 {
        let values = self.0.get(figure).into_iter().flatten();
        values.copied().fold(0.0, f64::max)
    }
}

/// The value that a figure must reach.
#[derive(Clone, Copy)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// At most this many times the floor.
    OfFloor(f64),
    /// At least this many times the floor.
    TimesFloor(f64),
    /// The value differs from this number by less than 0.005. This bar is for counts per hand-over
    /// or pair. Their value is not exact, because the first and the last hand-over of a run are
    /// incomplete.
    Exactly(f64),
    /// Zero. Any other value means that a lock failed.
    Never,
}

pub(crate) struct Row {
    workload: String,
    figure: String,
    value: f64,
    unit: &'static str,
    floor: Option<(&'static str, f64)>,
    bar: Option<Bar>,
    is_shown: bool,
}

impl Row {
    pub(crate) fn floor(&mut self, name: &'static str, value: Option<f64>) -> &mut Self {
        self.floor = value.map(|value| (name, value));
        self
    }

    pub(crate) fn bar(&mut self, bar: impl Into<Option<Bar>>) -> &mut Self {
        self.bar = bar.into();
        self
    }

    /// Leaves the row out of the table that is printed.
    pub(crate) fn only_in_the_file(&mut self) -> &mut Self {
        self.is_shown = false;
        self
    }

    fn reached(&self) -> Option<bool> {
        let floor = self.floor.map(|(_, value)| value);
        Some(match self.bar? {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
            Bar::OfFloor(times) => self.value <= floor? * times,
            Bar::TimesFloor(times) => self.value >= floor? * times,
            Bar::Exactly(bar) => (self.value - bar).abs() < 0.005,
            Bar::Never => self.value == 0.0,
        })
    }

    fn cells(&self) -> [String; 6] {
        let Self {
            value, unit, floor, ..
        } = self;
        [
            self.workload.clone(),
            self.figure.clone(),
            format!("{} {unit}", number(*value)),
            floor.map_or(String::new(), |(name, value)| {
                format!("{name} {}", number(value))
            }),
            floor.map_or(String::new(), |(_, floor)| format!("{:.2}", value / floor)),
            self.bar.map_or(String::new(), |bar| match bar {
                Bar::AtLeast(bar) => format!("≥ {}", number(bar)),
                Bar::AtMost(bar) => format!("≤ {}", number(bar)),
                Bar::OfFloor(times) => format!("≤ {times} ×"),
                Bar::TimesFloor(times) => format!("≥ {times} ×"),
                Bar::Exactly(bar) => format!("= {}", number(bar)),
                Bar::Never => "0".into(),
            }),
        ]
    }
}

/// Formats a large number in thousands, and a small one with decimals.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        small if small < 10.0 => format!("{value:.2}"),
        middle if middle < 1000.0 => format!("{value:.1}"),
        _ => {
            let digits = format!("{value:.0}");
            let mut grouped = String::new();
            for (i, digit) in digits.chars().enumerate() {
                if i > 0 && (digits.len() - i).is_multiple_of(3) {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            grouped
        }
    }
}

#[derive(Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    /// Adds a row, unless the figure was not measured.
    pub(crate) fn row(
        &mut self,
        workload: impl Into<String>,
        figure: impl Into<String>,
        value: impl Into<Option<f64>>,
        unit: &'static str,
    ) -> &mut Row {
        self.0.push(Row {
            workload: workload.into(),
            figure: figure.into(),
            value: value.into().unwrap_or(f64::NAN),
            unit,
            floor: None,
            bar: None,
            is_shown: true,
        });
        self.0.last_mut().unwrap()
    }

    /// Writes one record for each row, for spreadsheets and for the program `plots`. The columns
    /// are those of the heading. A value that was not measured is empty.
    pub(crate) fn write(&self, store: &str, file: &mut csv::Writer<File>) -> csv::Result<()> {
        for row in &self.0 {
            let text = |value: f64| {
                if value.is_nan() {
                    String::new()
                } else {
                    value.to_string()
                }
            };
            let (floor, floor_value) = row
                .floor
                .map_or(("", String::new()), |(name, value)| (name, text(value)));
            let value = text(row.value);
            let Row {
                workload,
                figure,
                unit,
                ..
            } = row;
            file.write_record([store, workload, figure, &value, unit, floor, &floor_value])?;
        }
        file.flush()?;
        Ok(())
    }

    /// Whether no lock has failed.
    pub(crate) fn is_sound(&self) -> bool {
        let never = |row: &&Row| matches!(row.bar, Some(Bar::Never));
        self.0
            .iter()
            .filter(never)
            .all(|row| row.reached() == Some(true))
    }
}

/// A workload that fails ends the program. What was measured until then is not lost.
impl Drop for Table {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("\nuntil this failure:\n\n{self}");
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heading = ["workload", "figure", "value", "floor", "ratio", "bar"].map(String::from);
        let shown: Vec<&Row> = self.0.iter().filter(|row| row.is_shown).collect();
        let cells: Vec<_> = shown.iter().map(|row| row.cells()).collect();
        let width = |column: usize| {
            let all = cells.iter().chain([&heading]);
            all.map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; 6] = std::array::from_fn(width);
        let verdicts = shown.iter().map(|row| match row.reached() {
            Some(true) => "PASS",
            Some(false) => "below",
            None => "",
        });
        for (row, verdict) in [&heading]
            .into_iter()
            .chain(&cells)
            .zip(std::iter::once("").chain(verdicts))
        {
            let line: Vec<String> = row
                .iter()
                .zip(widths)
                .enumerate()
                // Words are aligned to the left, numbers to the right.
                .map(|(column, (cell, width))| match column {
                    2 | 4 => format!("{cell:>width$}"),
                    _ => format!("{cell:<width$}"),
                })
                .chain([verdict.to_owned()])
                .collect();
            writeln!(f, "{}", line.join("  ").trim_end())?;
        }
        Ok(())
    }
}
