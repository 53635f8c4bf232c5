//! Tests of the label that the macro gives each acquisition in the traces.
//!
//! This program has only one test. `tracing` remembers for each place in the code whether anybody
//! listens. If another test ran the same place just when this test begins to listen, the place
//! could stay silent for the whole program.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use lockcore::{Error, Locks, distributed_lock};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

#[distributed_lock(key = "secret:{user}", locks = locks)]
async fn with_key(locks: &Locks, user: &str) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["secret:{user}", user.to_owned()], locks = locks)]
async fn with_keys(locks: &Locks, user: &str) -> Result<(), Error> {
    Ok(())
}

struct Daily;

impl Daily {
    fn name(&self) -> String {
        "daily".to_owned()
    }
}

#[async_trait::async_trait]
trait Report {
    async fn write(&self, locks: &Locks) -> Result<(), Error>;
}

#[async_trait::async_trait]
impl Report for Daily {
    #[distributed_lock(key = self.name(), locks = locks)]
    async fn write(&self, locks: &Locks) -> Result<(), Error> {
        Ok(())
    }
}

/// Collects the label of each acquisition.
#[derive(Clone, Default)]
struct Labels(Arc<Mutex<Vec<String>>>);

impl Visit for Labels {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "label" {
            self.0.lock().unwrap().push(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl Subscriber for Labels {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut self.clone());
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn the_label_is_the_template_and_never_the_key() {
    let ours = Locks::connect("memory:").unwrap();
    let labels = Labels::default();
    tracing::subscriber::set_global_default(labels.clone()).unwrap();

    with_key(&ours, "ann").await.unwrap();
    with_keys(&ours, "ann").await.unwrap();
    Daily.write(&ours).await.unwrap();

    let mut labels = labels.0.lock().unwrap().clone();
    labels.dedup();
    let expected = [
        "secret:{user}",
        "secret:{user}, user.to_owned()",
        "self.name()",
    ];
    assert_eq!(labels, expected);
}
