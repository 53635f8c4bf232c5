//! How fast the store answers renewals, and what follows from this: how many batches are in flight
//! at the same time. This is plain data: it sends no requests and reads no clock.

use std::time::Duration;

use super::window::Window;
use crate::clock::{Instant, nanos};

/// The most tickets in one request. With this number a Redis script takes well below a millisecond.
pub(crate) const BATCH: usize = 100;

/// How many batches may always be in flight. This many keep a store busy that is near.
pub(super) const LEAST: usize = 8;

/// The pace of the renewals of one kind.
#[derive(Debug)]
pub(super) struct Pace {
    /// How many batches may be in flight.
    window: Window,
    in_flight: usize,
    /// The time from a request to its answer, smoothed.
    round_trip: Duration,
    /// Since when renewals wait for their turn, and how many were answered since then.
    busy: Option<(Instant, usize)>,
}

/// How a batch of renewals has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The store has answered.
    Answered {
        tickets: usize,
        after: Duration,
        /// How long the keeper would have waited.
        patience: Duration,
    },
    /// No answer came in time.
    Missed,
    /// The batch was not sent, or the store has refused it. This says nothing about its pace.
    Failed,
}

impl Pace {
    /// A pace for a store that wants at most this number of batches in flight.
    pub(super) fn up_to(batches: usize) -> Self {
        Self {
            window: Window::between(LEAST, batches),
            in_flight: 0,
            round_trip: Duration::ZERO,
            busy: None,
        }
    }

    /// How many more batches may begin. `waiting` is the number of batches that are to be sent, and
    /// the first of their leases ends after `left`.
    pub(super) fn room(&self, waiting: usize, left: Duration) -> usize {
        let width = self
            .needed(waiting, left)
            .max(LEAST)
            .min(self.window.limit());
        width.saturating_sub(self.in_flight)
    }

    /// How many batches must be in flight so that all are sent within a quarter of the time that is
    /// left. If more were in flight, all other requests would wait behind them at the store.
    fn needed(&self, waiting: usize, left: Duration) -> usize {
        let within = u128::from(nanos(left) / 4).max(1);
        let needed = (waiting as u128 * self.round_trip.as_nanos()).div_ceil(within);
        usize::try_from(needed).unwrap_or(usize::MAX)
    }

    /// How long an answer takes.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip
    }

    pub(super) fn begin(&mut self) {
        self.in_flight += 1;
    }

    /// A batch is not in flight any more.
    pub(super) fn end(&mut self, outcome: Outcome) {
        self.in_flight -= 1;
        match outcome {
            Outcome::Answered {
                tickets,
                after,
                patience,
            } => {
                self.window.answered(after, patience);
                self.round_trip = match self.round_trip {
                    Duration::ZERO => after,
                    // A single late answer counts as an eighth.
                    before => before / 8 * 7 + after / 8,
                };
                if let Some((_, answered)) = &mut self.busy {
                    *answered += tickets;
                }
            }
            Outcome::Missed => self.window.missed(),
            Outcome::Failed => {}
        }
    }

    /// Notes whether renewals wait for their turn.
    pub(super) fn wait(&mut self, now: Instant, they_wait: bool) {
        self.busy = they_wait.then(|| self.busy.unwrap_or((now, 0)));
    }

    /// How many renewals the store has answered in a second, since the time from which renewals have
    /// always waited for their turn. `None` if none waits, or if the store has answered none.
    pub(super) fn rate(&self, now: Instant) -> Option<f64> {
        let (since, answered) = self.busy.filter(|(_, answered)| *answered > 0)?;
        Some(answered as f64 / since.until(now).as_secs_f64()).filter(|rate| rate.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    /// Sends and answers this number of batches, one after another.
    fn answer(pace: &mut Pace, batches: usize, after: Duration) {
        for _ in 0..batches {
            pace.begin();
            pace.end(Outcome::Answered {
                tickets: 100,
                after,
                patience: millis(1_000),
            });
        }
    }

    #[test]
    fn a_far_store_gets_more_at_a_time_the_more_is_to_be_sent_and_the_less_time_is_left() {
        let mut pace = Pace::up_to(64);
        let (long, short) = (Duration::from_secs(8), Duration::from_secs(2));
        assert_eq!(pace.room(1_000, short), LEAST);
        answer(&mut pace, 100, millis(100));

        assert_eq!(pace.room(10, long), LEAST);
        assert_eq!(pace.room(400, long), 20);
        assert_eq!(pace.room(400, millis(4_000)), 40);
        assert_eq!(pace.room(400, short), 64);
        assert_eq!(pace.room(400, Duration::ZERO), 64);
        for _ in 0..30 {
            pace.begin();
        }
        assert_eq!(pace.room(400, millis(4_000)), 10);
        assert_eq!(pace.room(400, long), 0);
    }

    #[test]
    fn a_near_store_gets_no_more_than_it_needs() {
        let mut pace = Pace::up_to(64);
        answer(&mut pace, 100, millis(1));

        assert_eq!(pace.room(1_000, Duration::from_secs(6)), LEAST);
    }

    #[test]
    fn the_rate_is_what_was_answered_while_others_waited() {
        let mut pace = Pace::up_to(LEAST);
        answer(&mut pace, 50, millis(1)); // nobody waited
        pace.wait(at(1_000), true);
        assert_eq!(pace.rate(at(1_500)), None);
        answer(&mut pace, 5, millis(1));
        pace.wait(at(1_250), true);
        answer(&mut pace, 5, millis(1));
        assert_eq!(pace.rate(at(1_000)), None, "no time has passed");
        assert_eq!(pace.rate(at(1_500)), Some(2_000.0));

        pace.wait(at(2_000), false);
        assert_eq!(pace.rate(at(2_500)), None);
        pace.wait(at(9_000), true);
        assert_eq!(pace.rate(at(9_500)), None, "the store is silent");
    }
}
