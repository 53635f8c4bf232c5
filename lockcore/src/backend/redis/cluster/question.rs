//! When to ask where the slots are. All connections of a client share this. Each connection may
//! notice that the map is out of date. One of them asks for a new one, and all of them get the
//! answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::{Clock, Instant};

/// The shortest time between two requests for the map.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Question(watch::Sender<LatestQuestion>);

#[derive(Debug, Default)]
struct LatestQuestion {
    /// The number of the latest question.
    latest: u64,
    /// The number of the latest question that is over.
    over: u64,
    began: Option<Instant>,
    /// Whether a connection wanted a new map when it was too early to ask. No task waits for this:
    /// the next request asks.
    is_wished: bool,
}

impl LatestQuestion {
    fn is_over(&self) -> bool {
        self.over >= self.latest
    }
}

/// A question that is not over until this value is dropped.
#[derive(Debug)]
pub(super) struct OpenQuestion {
    question: Arc<Question>,
    number: u64,
}

impl Question {
    /// Returns `Some` if the caller has to ask now. Returns `None` if somebody asked a moment ago.
    /// In this case a later request asks again.
    ///
    /// If a question has taken longer than a whole operation, it is given up, and the caller asks
    /// another one.
    pub(super) fn begin(self: &Arc<Self>, op_timeout: Duration) -> Option<OpenQuestion> {
        let (now, mut number) = (Clock::BOOT.now(), None);
        self.0.send_if_modified(|state| {
            let pause = match state.is_over() {
                true => AGAIN,
                false => AGAIN.max(op_timeout),
            };
            state.is_wished = state.began.is_some_and(|began| began.until(now) < pause);
            if !state.is_wished {
                state.latest += 1;
                state.began = Some(now);
                number = Some(state.latest);
            }
            false // no task waits for this change
        });
        Some(OpenQuestion {
            question: Arc::clone(self),
            number: number?,
        })
    }

    /// Whether a connection wanted a new map when it was too early to ask.
    pub(super) fn is_wished(&self) -> bool {
        self.0.borrow().is_wished
    }

    /// Resolves when no question is unanswered.
    pub(super) async fn until_over(&self) {
        // The sender lives in `self`, so this cannot fail.
        let _ = self.0.subscribe().wait_for(LatestQuestion::is_over).await;
    }
}

impl OpenQuestion {
    /// Whether this is the latest question. If not, it was given up for a later one.
    pub(super) fn is_latest(&self) -> bool {
        self.question.0.borrow().latest == self.number
    }
}

/// The drop also runs if the task that asked ends with its runtime. So no waiter of `until_over`
/// hangs.
impl Drop for OpenQuestion {
    fn drop(&mut self) {
        let question = &self.question.0;
        question.send_modify(|state| state.over = self.number.max(state.over));
    }
}
