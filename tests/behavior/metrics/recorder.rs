//! A recorder for the whole suite. The facts about metrics read it. All facts run with it, so that
//! none of them depends on metrics that go nowhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

/// The numbers of one series. A counter and a gauge are the sum; the count is that of
/// the changes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Number {
    pub(super) sum: f64,
    pub(super) count: u64,
}

/// The name of a metric, and its labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
}

impl Series {
    pub(super) fn has(&self, label: &str, value: &str) -> bool {
        self.labels.get(label).is_some_and(|has| has == value)
    }
}

static ALL: Mutex<BTreeMap<Series, Arc<Cell>>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Default)]
struct Cell(Mutex<Number>);

/// All series for which a condition holds, with their numbers at this moment.
pub(super) fn series(wanted: impl Fn(&Series) -> bool) -> Vec<(Series, Number)> {
    let all = ALL.lock().unwrap();
    let wanted = all.iter().filter(|(series, _)| wanted(series));
    wanted
        .map(|(series, cell)| (series.clone(), *cell.0.lock().unwrap()))
        .collect()
}

/// Installs the recorder.
pub(crate) fn record() {
    metrics::set_global_recorder(InMemory).unwrap();
}

struct InMemory;

impl InMemory {
    fn cell(key: &Key) -> Arc<Cell> {
        let labels = key.labels();
        let series = Series {
            name: key.name().to_owned(),
            labels: labels
                .map(|label| (label.key().to_owned(), label.value().to_owned()))
                .collect(),
        };
        Arc::clone(ALL.lock().unwrap().entry(series).or_default())
    }
}

impl Recorder for InMemory {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Self::cell(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Self::cell(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Self::cell(key))
    }
}

impl Cell {
    fn add(&self, value: f64) {
        let mut number = self.0.lock().unwrap();
        number.sum += value;
        number.count += 1;
    }
}

impl CounterFn for Cell {
    fn increment(&self, value: u64) {
        self.add(value as f64);
    }

    fn absolute(&self, _: u64) {
        unreachable!("lockcore only counts up");
    }
}

impl GaugeFn for Cell {
    fn increment(&self, value: f64) {
        self.add(value);
    }

    fn decrement(&self, value: f64) {
        self.add(-value);
    }

    fn set(&self, _: f64) {
        unreachable!("several clients share a gauge, so none may set it");
    }
}

impl HistogramFn for Cell {
    fn record(&self, value: f64) {
        self.add(value);
    }
}
