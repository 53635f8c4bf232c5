//! When to ask where the slots are. All connections of a client share this. Each connection may
//! notice that the map is out of date. One of them asks for a new one, and all of them get the
//! answer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::{Clock, Instant};

/// The shortest time between two requests for the map.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Question {
    state: Mutex<LatestQuestion>,
    /// The number of the latest question that is over.
    over: watch::Sender<u64>,
}

#[derive(Debug)]
struct LatestQuestion {
    /// The number of the latest question.
    latest: u64,
    began: Instant,
    /// Whether a connection wanted a new map when it was too early to ask. No task waits for this:
    /// the next request asks.
    is_wished: bool,
}

/// A question that is not over until this value is dropped.
#[derive(Debug)]
pub(super) struct OpenQuestion {
    question: Arc<Question>,
    number: u64,
}

impl Default for Question {
    fn default() -> Self {
        let state = LatestQuestion {
            latest: 0,
            began: Instant::from_nanos(0),
            is_wished: false,
        };
        Self {
            state: Mutex::new(state),
            over: watch::Sender::default(),
        }
    }
}

impl Question {
    /// Returns `Some` if the caller has to ask now. Returns `None` if somebody asked a moment ago.
    /// In this case a later request asks again.
    ///
    /// If a question has taken longer than a whole operation, it is given up, and the caller asks
    /// another one.
    pub(super) fn begin(self: &Arc<Self>, op_timeout: Duration) -> Option<OpenQuestion> {
        let now = Clock::BOOT.now();
        let mut state = self.state();
        let pause = match self.is_over(&state) {
            true => AGAIN,
            false => AGAIN.max(op_timeout),
        };
        if state.latest > 0 && state.began.until(now) < pause {
            state.is_wished = true;
            return None;
        }
        *state = LatestQuestion {
            latest: state.latest + 1,
            began: now,
            is_wished: false,
        };
        Some(OpenQuestion {
            question: Arc::clone(self),
            number: state.latest,
        })
    }

    /// Whether a connection wanted a new map when it was too early to ask.
    pub(super) fn is_wished(&self) -> bool {
        self.state().is_wished
    }

    /// Resolves when no question is unanswered.
    pub(super) async fn until_over(&self) {
        let mut over = self.over.subscribe();
        loop {
            let latest = self.state().latest;
            if *over.borrow_and_update() >= latest {
                return;
            }
            let _ = over.changed().await; // the sender lives in `self`
        }
    }

    fn is_over(&self, state: &LatestQuestion) -> bool {
        *self.over.borrow() >= state.latest
    }

    fn state(&self) -> MutexGuard<'_, LatestQuestion> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenQuestion {
    /// Whether this is the latest question. If not, it was given up for a later one.
    pub(super) fn is_latest(&self) -> bool {
        self.question.state().latest == self.number
    }
}

/// The drop also runs if the task that asked ends with its runtime. So no waiter of `until_over`
/// hangs.
impl Drop for OpenQuestion {
    fn drop(&mut self) {
        let over = &self.question.over;
        over.send_modify(|over| *over = self.number.max(*over));
    }
}
