//! A recorder of metrics that does no more than any recorder must: it adds to numbers in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

pub(crate) struct InMemory;

impl Recorder for InMemory {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(AtomicU64::new(0)))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(AtomicU64::new(0)))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Buckets::default()))
    }
}

/// How many values were less than 1 µs, 2 µs, 4 µs, and so on.
#[derive(Default)]
struct Buckets([AtomicU64; 32]);

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let micros = (seconds * 1e6) as u32;
        let bucket = micros.checked_ilog2().map_or(0, |log| log as usize + 1);
        self.0[bucket.min(31)].fetch_add(1, Ordering::Relaxed);
    }
}
