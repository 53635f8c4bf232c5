//! How long the verbs of one turn may take, on the connection whose writes are acknowledged.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Instant;

/// How long the server may wait for the acknowledgement of a verb whose caller waits for this long, and which has
/// `waited` for its turn: half of that time. A verb that had to wait for its turn gets less, so that an eighth is left
/// for the way there and back. The least patient verb of a turn decides for all.
pub(super) fn patience(budget: Duration, waited: Duration) -> Duration {
    let rest = (budget / 8 * 7).saturating_sub(waited);
    rest.min(budget / 2)
}

/// The turn that is under way.
#[derive(Debug)]
pub(super) struct Turn {
    op_timeout: Duration,
    /// When the turn that is under way began.
    began: Mutex<Option<Instant>>,
}

impl Turn {
    pub(super) fn within(op_timeout: Duration) -> Self {
        Self {
            op_timeout,
            began: Mutex::default(),
        }
    }

    pub(super) fn begin(&self, now: Instant) {
        *self.began() = Some(now);
    }

    pub(super) fn end(&self) {
        *self.began() = None;
    }

    /// The server answers within half of an operation. If it has not after a whole one, this connection is dead, even
    /// if the other one works.
    pub(super) fn is_stuck(&self, now: Instant) -> bool {
        let began = *self.began();
        began.is_some_and(|began| began.until(now) > self.op_timeout)
    }

    fn began(&self) -> MutexGuard<'_, Option<Instant>> {
        self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(0).after(Duration::from_millis(millis))
    }

    fn turn() -> Turn {
        Turn::within(Duration::from_secs(1))
    }

    #[test]
    fn a_verb_that_has_waited_for_its_turn_is_answered_within_its_operation_all_the_same() {
        let millis = Duration::from_millis;
        for (waited, left) in [(0, 500), (300, 500), (500, 375), (875, 0), (2_000, 0)] {
            let patience = patience(millis(1_000), millis(waited));
            assert_eq!(patience, millis(left), "{waited} ms");
        }
    }

    #[test]
    fn a_turn_that_lasts_longer_than_an_operation_is_stuck() {
        let turn = turn();
        assert!(!turn.is_stuck(at(5_000)));
        turn.begin(at(5_000));
        assert!(!turn.is_stuck(at(6_000)));
        assert!(turn.is_stuck(at(6_001)));
        turn.end();
        assert!(!turn.is_stuck(at(9_000)));
    }
}
