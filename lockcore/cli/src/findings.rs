//! What the library finds at the store when it checks the server. It logs that. `doctor` shows it,
//! whatever part of the log `RUST_LOG` asks for.

use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// With this the library begins a line about the server.
const ABOUT_THE_STORE: &str = "lock store: ";

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// What an operator should change.
    Warning(String),
    /// What the library could not look at.
    NotLookedAt(String),
}

static FOUND: Mutex<Vec<Finding>> = Mutex::new(Vec::new());

/// What was found since the last call.
pub(crate) fn take() -> Vec<Finding> {
    std::mem::take(&mut FOUND.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether a line of the log may be a finding.
pub(crate) fn may_be_one(line: &Metadata<'_>) -> bool {
    line.target().starts_with("lockcore::") && *line.level() <= Level::INFO
}

/// Keeps the findings until [`take`].
pub(crate) struct Findings;

impl<S: Subscriber> Layer<S> for Findings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let Some(text) = message.0.strip_prefix(ABOUT_THE_STORE) else {
            return;
        };
        let finding = match *event.metadata().level() {
            Level::INFO => Finding::NotLookedAt(text.into()),
            _ => Finding::Warning(text.into()),
        };
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if !found.contains(&finding) {
            found.push(finding);
        }
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}
