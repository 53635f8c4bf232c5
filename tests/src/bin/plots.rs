//! Draws the rows that the program `bench` has written.
//!
//! ```text
//! cargo build --release -p tests --bin load --bin bench --bin plots
//! target/release/bench redis zookeeper --csv rows.csv
//! target/release/plots rows.csv
//! ```
//!
//! | picture | what it shows |
//! |---|---|
//! | `hand-overs-STORE.svg` | hand-overs to another task per second, by processes with 16 tasks each (W4) |
//! | `latency-STORE.svg` | the time from a release to the grant in another process (W5) |
//! | `server-time.svg` | processor time of the servers for a lock that nobody else wants (W1) |
//! | `requests.svg` | requests for a release, by waiters (W6) |

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use serde::Deserialize;

/// Draws the rows that the program bench has written.
#[derive(Parser)]
#[command(name = "plots")]
struct Arguments {
    /// Files that `bench --csv` has written
    #[arg(required = true)]
    rows: Vec<PathBuf>,
    /// The folder of the pictures
    #[arg(long, default_value = "tests/plots")]
    out: PathBuf,
}

#[derive(Deserialize)]
struct Row {
    store: String,
    workload: String,
    figure: String,
    value: Option<f64>,
    floor: String,
    #[serde(rename = "floor value")]
    floor_value: Option<f64>,
}

impl Row {
    /// The store without its address, for example `redis` or `redis?durability=replicas:1`.
    fn name(&self) -> String {
        self.store
            .replace("://127.0.0.1", "")
            .trim_end_matches(':')
            .to_owned()
    }

    /// The name as a part of a file's name.
    fn file(&self) -> String {
        self.name()
            .replace(|letter: char| !letter.is_ascii_alphanumeric(), "-")
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match draw_all(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plots: {error}");
            ExitCode::FAILURE
        }
    }
}

fn draw_all(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut rows: Vec<Row> = Vec::new();
    for path in &arguments.rows {
        let of_file = |error| format!("{}: {error}", path.display());
        let mut file = csv::Reader::from_path(path).map_err(of_file)?;
        for row in file.deserialize() {
            rows.push(row.map_err(of_file)?);
        }
    }
    fs::create_dir_all(&arguments.out)
        .map_err(|error| format!("{}: {error}", arguments.out.display()))?;
    let mut stores: Vec<&str> = rows.iter().map(|row| &*row.store).collect();
    stores.dedup();
    for store in stores {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.store == store).collect();
        hand_overs(&rows, &arguments.out)?;
        latency(&rows, &arguments.out)?;
    }
    server_time(&rows, &arguments.out)?;
    requests(&rows, &arguments.out)
}

/// A line in a picture.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The lines for some rows, each row at its x: one for each policy of lockcore, and one for each
/// floor and peer.
fn lines<'a>(rows: impl Iterator<Item = (f64, &'a Row)>) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut add = |name: String, x: f64, y: Option<f64>| {
        let Some(y) = y else { return };
        let line = match lines.iter().position(|line| line.name == name) {
            Some(known) => &mut lines[known],
            None => {
                let points = Vec::new();
                lines.push(Line { name, points });
                lines.last_mut().expect("it was added")
            }
        };
        // The rows of each policy have their own measurement of the floor. The first one is used.
        if line.points.iter().all(|point| point.0 != x) {
            line.points.push((x, y));
        }
    };
    for (x, row) in rows {
        let policy = row.workload.rsplit(' ').next().unwrap_or_default();
        add(format!("lockcore, {policy}"), x, row.value);
        if !row.floor.is_empty() {
            add(row.floor.clone(), x, row.floor_value);
        }
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines.sort_by(|a, b| {
        b.name
            .starts_with("lockcore")
            .cmp(&a.name.starts_with("lockcore"))
    });
    lines
}

/// The number in a name, for example in `W4 of 8 strict` or `p99`.
fn number_in(name: &str) -> Option<f64> {
    name.split([' ', 'p']).find_map(|word| word.parse().ok())
}

fn hand_overs(rows: &[&Row], out: &Path) -> Result<(), Box<dyn Error>> {
    let here = rows
        .iter()
        .filter(|row| row.workload.starts_with("W4") && row.figure.starts_with("true hand-overs"));
    // The workload is for example "W4 of 2 strict". The number of processes that has bars is not
    // named: "W4 strict".
    let lines = lines(here.map(|row| (number_in(&row.workload).unwrap_or(4.0), *row)));
    let Some(first) = rows.first().filter(|_| !lines.is_empty()) else {
        return Ok(());
    };
    let picture = Picture {
        title: format!("{}: hand-overs to another task", first.name()),
        x: "processes with 16 tasks each, all at one lock",
        y: "hand-overs per second",
        y_is_log: true,
        ticks: &[1.0, 2.0, 4.0, 8.0],
    };
    picture.draw(
        &out.join(format!("hand-overs-{}.svg", first.file())),
        &lines,
    )
}

fn latency(rows: &[&Row], out: &Path) -> Result<(), Box<dyn Error>> {
    let here = rows
        .iter()
        .filter(|row| row.figure.starts_with("release → waiter, p"));
    let percent = |row: &Row| number_in(row.figure.rsplit(' ').next()?);
    let lines = lines(here.filter_map(|row| Some((percent(row)?, *row))));
    let Some(first) = rows.first().filter(|_| !lines.is_empty()) else {
        return Ok(());
    };
    let picture = Picture {
        title: format!(
            "{}: from a release to the grant in another process",
            first.name()
        ),
        x: "percent of the hand-overs that take at most this time",
        y: "µs",
        y_is_log: false,
        ticks: &[1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 99.0],
    };
    picture.draw(&out.join(format!("latency-{}.svg", first.file())), &lines)
}

fn server_time(rows: &[Row], out: &Path) -> Result<(), Box<dyn Error>> {
    let here = rows
        .iter()
        .filter(|row| row.workload == "W1 strict" && row.figure == "server CPU per pair");
    let bars: Vec<(String, f64)> = here
        .filter_map(|row| Some((row.name(), row.value?)))
        .collect();
    if bars.is_empty() {
        return Ok(());
    }
    draw_bars(
        &out.join("server-time.svg"),
        "Processor time of the servers for one acquire and release",
        "µs",
        &bars,
    )
}

fn requests(rows: &[Row], out: &Path) -> Result<(), Box<dyn Error>> {
    let mut found: Vec<Line> = Vec::new();
    let is_asked = |row: &&Row| {
        let each = ["scripts per release", "requests per release"];
        row.workload.starts_with("W6")
            && row.workload.ends_with("strict")
            && each.contains(&&*row.figure)
    };
    for row in rows.iter().filter(is_asked) {
        let name = row.name();
        let Some(point) = number_in(&row.workload).zip(row.value) else {
            continue;
        };
        match found.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => found.push(Line {
                name,
                points: vec![point],
            }),
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    let picture = Picture {
        title: "Requests for a release, whatever the number of waiters".into(),
        x: "waiters",
        y: "requests to the server",
        y_is_log: false,
        ticks: &[10.0, 100.0, 1_000.0],
    };
    picture.draw(&out.join("requests.svg"), &found)
}

const SIZE: (u32, u32) = (800, 450);
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 90, 181),
    RGBColor(26, 152, 80),
    RGBColor(220, 50, 32),
    RGBColor(150, 80, 160),
    RGBColor(230, 140, 20),
    RGBColor(90, 90, 90),
];

/// The colours for readers who use dark mode: the background, the text and the lines. A browser
/// applies them also to a picture in a page.
const DARK: &str = r##"<style>@media (prefers-color-scheme: dark) {
[fill="#FFFFFF"] { fill: #0D1117 } [stroke="#FFFFFF"] { stroke: #0D1117 }
[fill="#000000"] { fill: #E6EDF3 } [stroke="#000000"] { stroke: #E6EDF3 }
[fill="#005AB5"] { fill: #58A6FF } [stroke="#005AB5"] { stroke: #58A6FF }
[fill="#1A9850"] { fill: #3FB950 } [stroke="#1A9850"] { stroke: #3FB950 }
[fill="#DC3220"] { fill: #FF7B72 } [stroke="#DC3220"] { stroke: #FF7B72 }
[fill="#9650A0"] { fill: #D2A8FF } [stroke="#9650A0"] { stroke: #D2A8FF }
[fill="#E68C14"] { fill: #F0B060 } [stroke="#E68C14"] { stroke: #F0B060 }
[fill="#5A5A5A"] { fill: #A0A0A0 } [stroke="#5A5A5A"] { stroke: #A0A0A0 }
}</style>
"##;

/// Writes a picture that was drawn for a light background, with colours for a dark one.
fn write(path: &Path, drawn: &str) -> Result<(), Box<dyn Error>> {
    let begins = drawn.find('\n').map_or(0, |end| end + 1);
    let (head, rest) = drawn.split_at(begins);
    fs::write(path, format!("{head}{DARK}{rest}"))?;
    println!("{}", path.display());
    Ok(())
}

/// A picture of lines. The ticks of the x axis are at equal distances.
struct Picture<'a> {
    title: String,
    x: &'a str,
    y: &'a str,
    y_is_log: bool,
    ticks: &'a [f64],
}

impl Picture<'_> {
    fn draw(&self, path: &Path, lines: &[Line]) -> Result<(), Box<dyn Error>> {
        let points = || lines.iter().flat_map(|line| &line.points);
        let most = points().fold(0.0_f64, |most, point| most.max(point.1));
        let least = points().fold(f64::MAX, |least, point| least.min(point.1));
        let last = (self.ticks.len() - 1) as f64;
        let mut drawn = String::new();
        let root = SVGBackend::with_string(&mut drawn, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut builder = ChartBuilder::on(&root);
        builder
            .caption(&self.title, ("sans-serif", 20))
            .margin(16)
            .x_label_area_size(46)
            .y_label_area_size(84);
        let across = -0.1 * last..1.4 * last; // with room for the names
        match self.y_is_log {
            true => {
                let up = (least / 2.0..most * 2.0).log_scale();
                self.fill(builder.build_cartesian_2d(across, up)?, lines)?;
            }
            false => self.fill(builder.build_cartesian_2d(across, 0.0..most * 1.15)?, lines)?,
        }
        root.present()?;
        drop(root);
        write(path, &drawn)
    }

    fn fill<'a, Y>(
        &self,
        mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, Y>>,
        lines: &[Line],
    ) -> Result<(), Box<dyn Error>>
    where
        Y: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
    {
        let label = |at: &f64| {
            let tick = at.round();
            let is_tick = (at - tick).abs() < 0.01 && tick >= 0.0;
            let tick = is_tick.then(|| self.ticks.get(tick as usize)).flatten();
            tick.map_or(String::new(), f64::to_string)
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_labels(2 * self.ticks.len() + 2)
            .x_label_formatter(&label)
            .x_desc(self.x)
            .y_label_formatter(&|value| grouped(*value))
            .y_desc(self.y)
            .label_style(("sans-serif", 13))
            .draw()?;
        for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
            let points: Vec<_> = line
                .points
                .iter()
                .map(|(x, y)| (self.position(*x), *y))
                .collect();
            let drawn = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
            chart
                .draw_series(drawn)?
                .label(&line.name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 2), (x + 16, y + 2)], colour.filled())
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 13))
            .draw()?;
        Ok(())
    }

    /// The position of a value of x: on its tick, or between two ticks.
    fn position(&self, x: f64) -> f64 {
        let after = self.ticks.iter().position(|tick| *tick >= x);
        match after {
            None => (self.ticks.len() - 1) as f64,
            Some(0) => 0.0,
            Some(after) => {
                let (low, high) = (self.ticks[after - 1], self.ticks[after]);
                (after - 1) as f64 + (x - low) / (high - low)
            }
        }
    }
}

fn draw_bars(
    path: &Path,
    title: &str,
    unit: &str,
    bars: &[(String, f64)],
) -> Result<(), Box<dyn Error>> {
    let most = bars.iter().fold(0.0_f64, |most, bar| most.max(bar.1));
    let mut drawn = String::new();
    let root = SVGBackend::with_string(&mut drawn, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(30)
        .y_label_area_size(84)
        .build_cartesian_2d(-0.5..bars.len() as f64 - 0.5, 0.0..most * 1.15)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .y_label_formatter(&|value| grouped(*value))
        .y_desc(unit)
        .label_style(("sans-serif", 13))
        .draw()?;
    for (at, ((name, value), colour)) in bars.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let at = at as f64;
        chart.draw_series([Rectangle::new(
            [(at - 0.3, 0.0), (at + 0.3, *value)],
            colour.filled(),
        )])?;
        let text = format!("{name}: {}", grouped(*value));
        chart.draw_series([Text::new(
            text,
            (at - 0.3, *value + most * 0.06),
            ("sans-serif", 13),
        )])?;
    }
    root.present()?;
    drop(chart);
    drop(root);
    write(path, &drawn)
}

/// A number with commas between thousands, or with a decimal if it is small.
fn grouped(value: f64) -> String {
    if value.fract() != 0.0 && value < 100.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| str::from_utf8(group).unwrap_or(""))
        .collect();
    groups.join(",")
}
