//! Limits how long a verb and a turn may take on the connection of a group.

use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Clock, Instant};

/// The time that one verb has in total, even if the verb needs several turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    since: Instant,
    /// How long the caller of the verb waits.
    budget: Duration,
}

impl Patience {
    /// The time begins now.
    pub(super) fn of(budget: Duration) -> Self {
        let since = Clock::BOOT.now();
        Self { since, budget }
    }

    /// How long the server may wait for the acknowledgement of this verb, if its turn begins now.
    /// It is half of the verb's time. A verb that has waited long for its turn gets less, so that
    /// an eighth of its time is left for the round trip.
    pub(super) fn at_the_server(self, now: Instant) -> Duration {
        let rest = (self.budget / 8 * 7).saturating_sub(self.since.until(now));
        rest.min(self.budget / 2)
    }

    /// How long the verb itself waits. The caller's time began shortly before this value was made.
    /// So the verb's own limit is a sixteenth shorter, and has passed when the caller's time is
    /// over.
    pub(super) fn for_all(self) -> Duration {
        self.budget / 16 * 15
    }

    /// Returns the result of a future, or `None` if the verb's time ends before the future is
    /// ready. The verb's time is [`for_all`](Self::for_all), which ends before the caller's time.
    /// This function has no timer: it checks the time when it is polled. The core polls once more
    /// at the end of the caller's time. If the future is ready by then, that poll returns its
    /// result, otherwise `None`.
    pub(super) async fn limits<T>(self, future: impl Future<Output = T>) -> Option<T> {
        let until = self.since.after(self.for_all());
        let mut future = pin!(future);
        std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending if Clock::BOOT.now() >= until => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }
}

/// Records whether a turn is in progress, and since when.
#[derive(Debug)]
pub(super) struct Turn {
    op_timeout: Duration,
    /// When the turn that is in progress began. `None` between turns.
    began: Mutex<Option<Instant>>,
}

/// The turn is in progress until this value is dropped.
pub(super) struct UnderWay<'a>(&'a Turn);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *self.0.began() = None;
    }
}

impl Turn {
    pub(super) fn within(op_timeout: Duration) -> Self {
        Self {
            op_timeout,
            began: Mutex::default(),
        }
    }

    #[must_use = "the turn ends when this is dropped"]
    pub(super) fn begin(&self, now: Instant) -> UnderWay<'_> {
        *self.began() = Some(now);
        UnderWay(self)
    }

    /// Whether the connection is dead, even if the main connection works. The server answers a turn
    /// within half of the time of an operation, so a turn without an answer after the whole time is
    /// stuck.
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
        let patience = Patience {
            since: at(7_000),
            budget: millis(1_000),
        };
        for (waited, left) in [(0, 500), (300, 500), (500, 375), (875, 0), (2_000, 0)] {
            let now = at(7_000 + waited);
            assert_eq!(patience.at_the_server(now), millis(left), "{waited} ms");
        }
    }

    #[test]
    fn a_turn_that_lasts_longer_than_an_operation_is_stuck() {
        let turn = turn();
        assert!(!turn.is_stuck(at(5_000)));
        let under_way = turn.begin(at(5_000));
        assert!(!turn.is_stuck(at(6_000)));
        assert!(turn.is_stuck(at(6_001)));
        drop(under_way);
        assert!(!turn.is_stuck(at(9_000)));
    }
}
