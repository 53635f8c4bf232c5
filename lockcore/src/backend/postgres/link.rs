//! What the verbs of a connection have in common.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_postgres::Row;

use super::calls::{Call, Calls, Parameter};
use super::config::{Durability, LOOK, Server, Wakeups};
use super::dial::{self, Line, Patience};
use super::durable::{self, Flushes, Warnings};
use super::events::Ears;
use super::waits::Waits;
use crate::backend::StoreError;
use crate::backend::table::Upkeep;

/// What the verbs need. Their futures share it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) server: Arc<Server>,
    pub(super) patience: Patience,
    pub(super) line: Line,
    /// `None` with `durability=off`, and if each request flushes itself.
    pub(super) flushes: Option<Flushes>,
    /// Of the connection of the verbs, if each request flushes itself.
    pub(super) warnings: Warnings,
    pub(super) durability: Durability,
    pub(super) receiver: u64,
    pub(super) waits: Arc<Waits>,
    pub(super) ears: Arc<Ears>,
    pub(super) upkeep: Arc<Upkeep>,
    pub(super) keeps_up: AbortHandle,
    /// The runtime that drives the connection.
    pub(super) runtime: Handle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeps_up.abort();
    }
}

impl Link {
    /// Whether waiters look, because no message comes.
    pub(super) fn looks(&self) -> bool {
        self.server.wakeups == Wakeups::Look
    }

    /// Shortens the time after which a waiter looks again, if it has to look. The core counts it from
    /// the request, whose answer has taken this long.
    pub(super) fn look_again(&self, recheck_in: &mut Option<Duration>, took: Duration) {
        if self.looks() {
            let look = next_look(took);
            // Not sooner than the pause after a look that took long.
            *recheck_in = Some(recheck_in.map_or(look, |after| after.clamp(3 * took, look)));
        }
    }

    pub(super) fn calls(&self) -> &Calls {
        &self.line.calls
    }

    /// Runs a verb whose answer must last. It counts after [`counts`](Self::counts).
    pub(super) async fn ask(
        self: &Arc<Self>,
        call: &Call,
        parameters: &[Parameter<'_>],
    ) -> Result<Asked, StoreError> {
        let (calls, sent) = (self.calls(), Instant::now());
        if !self.looks() || self.durability == Durability::Off {
            let rows = calls.ask(call, parameters).await?;
            return Ok(Asked {
                rows,
                lasts: Lasts::Later,
                took: sent.elapsed(),
            });
        }
        let mut unanswered = Unanswered(Some(Arc::clone(self)));
        let asked = calls.ask_and_flush(call, parameters, self.durability.setting());
        let asked = durable::in_time(&self.server, &self.line, &self.patience, asked);
        let (rows, doubt) = self.warnings.watch(asked).await;
        unanswered.0 = None;
        Ok(Asked {
            rows: rows?,
            lasts: doubt.map_or(Lasts::Already, Lasts::Perhaps),
            took: sent.elapsed(),
        })
    }

    /// Waits until an answer counts.
    pub(super) async fn counts(&self, lasts: Lasts) -> Result<(), StoreError> {
        match (lasts, &self.flushes) {
            (Lasts::Later, Some(flushes)) => flushes.flush().await,
            (Lasts::Perhaps(doubt), _) => Err(doubt),
            (Lasts::Already, _) | (Lasts::Later, None) => Ok(()),
        }
    }
}

/// Behind its answer, a look leaves a gap of twice its own time. Each look keeps its name locked until
/// the disk has it. So however many waiters a name has, their looks take a third of its time.
fn next_look(took: Duration) -> Duration {
    took + LOOK.max(2 * took)
}

/// The answer of a verb.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) rows: Vec<Row>,
    pub(super) lasts: Lasts,
    pub(super) took: Duration,
}

/// Whether an answer is durable.
#[derive(Debug)]
pub(super) enum Lasts {
    Already,
    /// After the next flush.
    Later,
    Perhaps(StoreError),
}

/// A request that flushes. If its future is dropped before the answer has come, it is ended at the
/// server: it may hang there, and the connection may be closed next. See `durable`.
struct Unanswered(Option<Arc<Link>>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(link) = self.0.take() {
            let runtime = link.runtime.clone();
            runtime.spawn(async move { dial::cancel(&link.server, &link.line).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_take_long_leave_longer_gaps() {
        let gap = |took| next_look(took) - took;

        assert_eq!(gap(Duration::from_millis(1)), LOOK);
        assert_eq!(gap(LOOK), 2 * LOOK);
        assert_eq!(gap(5 * LOOK), 10 * LOOK);
    }
}
