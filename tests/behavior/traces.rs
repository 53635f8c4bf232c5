//! Provides a search for secrets in all traces of the library and of its driver while the suite
//! runs. It also collects the lines that the library logs for operators, for the facts about logs.

use std::fmt::{Debug, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use tests::watch::SECRET;

/// The secrets that no trace and no output may contain.
pub(crate) const SECRETS: [&str; 2] = [SECRET, WRONG];

/// The wrong password that some facts use.
pub(crate) const WRONG: &str = "hunter2";

/// A fact about log lines below `INFO` puts this text into its names and owners, and finds its
/// lines by them. The suite keeps a line below `INFO` only if the line contains this text, because
/// all lines would take too much memory.
pub(crate) const LOGGED: &str = "logged:";

static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());
static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());
static SEEN: AtomicUsize = AtomicUsize::new(0);

/// Starts the search. It covers the traces of all levels in the whole process.
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

/// A log line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) level: Level,
    target: &'static str,
    /// `field=value` for each field, the message included.
    pub(crate) text: String,
}

/// The log lines that contain `part`. Lines below `INFO` are kept only if they contain [`LOGGED`].
pub(crate) fn lines(part: &str) -> Vec<Line> {
    let lines = LINES.lock().unwrap();
    let lines = lines.iter().filter(|line| line.text.contains(part));
    lines.cloned().collect()
}

/// The warnings about lock orders that contain `part`.
pub(crate) fn inversions(part: &str) -> Vec<String> {
    let mut all = lines(part);
    all.retain(|line| line.target == "lockcore::inversions");
    all.into_iter().map(|line| line.text).collect()
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
        true // the driver's traces are searched too
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
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let ours = target.starts_with("lockcore");
        let mut text = Text::default();
        event.record(&mut text);
        if ours {
            SEEN.fetch_add(1, Ordering::Relaxed);
        }
        if ours && (level <= Level::INFO || text.0.contains(LOGGED)) {
            LINES.lock().unwrap().push(Line {
                level,
                target,
                text: text.0.clone(),
            });
        }
        self.look(text);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
