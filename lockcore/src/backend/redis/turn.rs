//! How long a verb and a turn may take, on the connection of a group.

use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Clock, Instant};

/// The time that one verb has, however many turns it goes through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    since: Instant,
    /// How long its caller waits.
    budget: Duration,
}

impl Patience {
    /// It begins now.
    pub(super) fn of(budget: Duration) -> Self {
        let since = Clock::BOOT.now();
        Self { since, budget }
    }

    /// How long the server may wait for the acknowledgement of this verb, if its turn begins now: half of its time. A verb
    /// that had to wait for its turn gets less, so that an eighth is left for the way there and back.
    pub(super) fn at_the_server(self, now: Instant) -> Duration {
        let rest = (self.budget / 8 * 7).saturating_sub(self.since.until(now));
        rest.min(self.budget / 2)
    }

    /// How long the verb itself waits. The time of its caller began a moment before, so this is a sixteenth less.
    pub(super) fn for_all(self) -> Duration {
        self.budget / 16 * 15
    }

    /// The result of a future. `None` if there is none when the time is over. There is no timer here: the core polls once
    /// more when the time of its caller is over.
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

/// The turn that is under way.
#[derive(Debug)]
pub(super) struct Turn {
    op_timeout: Duration,
    /// When the turn that is under way began.
    began: Mutex<Option<Instant>>,
}

/// A turn is under way until this is dropped.
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
