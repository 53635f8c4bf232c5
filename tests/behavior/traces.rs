//! P10: what the library and its driver trace while the suite runs, searched for what must not be in it. And the
//! warnings of order inversions, for the facts about those.

use std::fmt::{Debug, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use tests::watch::SECRET;

/// What no trace may contain, and no output.
pub(crate) const SECRETS: [&str; 2] = [SECRET, WRONG];

/// The wrong password of the facts that offer one.
pub(crate) const WRONG: &str = "hunter2";

static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());
static INVERSIONS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static SEEN: AtomicUsize = AtomicUsize::new(0);

/// Searches the traces of all levels, of the whole process and from now on.
pub(crate) fn search() {
    tracing::subscriber::set_global_default(Search).unwrap();
}

/// The traces that contain a secret.
pub(crate) fn found() -> Vec<String> {
    FOUND.lock().unwrap().clone()
}

/// How many traces of the library have been searched.
pub(crate) fn seen() -> usize {
    SEEN.load(Ordering::Relaxed)
}

/// The warnings of order inversions in whose text `part` is.
pub(crate) fn inversions(part: &str) -> Vec<String> {
    let mut all = INVERSIONS.lock().unwrap().clone();
    all.retain(|text| text.contains(part));
    all
}

struct Search;

impl Search {
    fn look(&self, text: Text) {
        if SECRETS.iter().any(|secret| text.0.contains(secret)) {
            FOUND.lock().unwrap().push(text.0);
        }
    }
}

#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

impl Subscriber for Search {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true // also what the driver traces on our behalf
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut text = Text::default();
        span.record(&mut text);
        self.look(text);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        let mut text = Text::default();
        values.record(&mut text);
        self.look(text);
    }

    fn event(&self, event: &Event<'_>) {
        if event.metadata().target().starts_with("lockcore") {
            SEEN.fetch_add(1, Ordering::Relaxed);
        }
        let mut text = Text::default();
        event.record(&mut text);
        if event.metadata().target() == "lockcore::inversions" {
            INVERSIONS.lock().unwrap().push(text.0.clone());
        }
        self.look(text);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
