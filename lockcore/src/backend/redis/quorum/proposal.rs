//! The ticket number that a client proposes to the nodes, and what the client knows of their
//! clocks. Why the number is safe is explained in `ballot`. If a clock is read wrong, that costs a
//! round trip and nothing else.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use super::ballot::{DAY, highest_sound};
use crate::clock::Instant;

/// How far a proposal is ahead of the clocks, in microseconds. A request may take longer to a node
/// than the `TIME` command took when the clock was read, by up to this much. Clients read the clocks
/// with `TIME` and do not derive them from numbers. So numbers do not run further and further ahead
/// of the clocks, however many clients there are.
const MARGIN: u64 = 100_000;

/// After this time the client reads the clock again. If two clocks differ in speed by 0.1 %, they
/// use up most of the margin by then. Clocks that follow a time server differ by less.
const READING_LASTS: Duration = Duration::from_secs(60);
/// The same, if the node has just assigned another number than the proposal: its clock may have
/// been set.
const AFTER_REFUSAL: Duration = Duration::from_secs(1);

/// The wall clock of a node, as far as the client knows it.
#[derive(Debug)]
pub(super) struct WallClock {
    /// What the node's clock shows, in microseconds, when the lease clock shows 0. It is computed
    /// from the time at which the client sent `TIME`, and not from the time at which the node
    /// received it. So it includes the time that a request takes to the node.
    at_zero: AtomicI64,
    /// When the client sent `TIME`, in nanoseconds of the lease clock.
    asked: AtomicU64,
}

impl WallClock {
    /// Makes a clock from the answer of a node to `TIME`, which was sent at `asked`.
    pub(super) fn new(asked: Instant, answer: (i64, i64)) -> Self {
        Self {
            at_zero: AtomicI64::new(at_zero(asked, answer)),
            asked: AtomicU64::new(asked.as_nanos()),
        }
    }

    /// Sets the clock by another answer to `TIME`.
    pub(super) fn set(&self, asked: Instant, answer: (i64, i64)) {
        self.at_zero
            .store(at_zero(asked, answer), Ordering::Relaxed);
    }

    /// How far the clock is ahead of a time that is the same for all nodes, in microseconds.
    pub(super) fn ahead(&self) -> i64 {
        self.at_zero.load(Ordering::Relaxed)
    }

    /// What the clock will show, in microseconds, when a request that is sent now arrives.
    pub(super) fn on_arrival(&self, now: Instant) -> u64 {
        let shown = self.ahead().saturating_add(micros(now));
        u64::try_from(shown).unwrap_or(0)
    }

    /// Whether the caller has to read the clock again. If several callers ask, only one of them
    /// gets `true`.
    pub(super) fn is_due(&self, now: Instant, is_refused: bool) -> bool {
        let lasts = match is_refused {
            true => AFTER_REFUSAL,
            false => READING_LASTS,
        };
        let asked = self.asked.load(Ordering::Relaxed);
        let order = Ordering::Relaxed;
        Instant::from_nanos(asked).until(now) >= lasts
            && self
                .asked
                .compare_exchange(asked, now.as_nanos(), order, order)
                .is_ok()
    }
}

fn at_zero(asked: Instant, (seconds, of_second): (i64, i64)) -> i64 {
    let shown = seconds.saturating_mul(1_000_000).saturating_add(of_second);
    shown.saturating_sub(micros(asked))
}

fn micros(at: Instant) -> i64 {
    i64::try_from(at.as_nanos() / 1_000).unwrap_or(i64::MAX)
}

/// The number to propose for a request. It is greater than the clocks, and greater than the number
/// that the client has seen. A clock that is a day ahead of the others is ignored. If the nodes
/// would not accept the number that the client has seen, that number is ignored too.
pub(super) fn proposal(clocks: Vec<u64>, highest_seen: u64) -> u64 {
    let floor = highest_sound(clocks).map_or(0, |clock| clock.saturating_add(MARGIN));
    match highest_seen <= floor.saturating_add(DAY) {
        true => floor.max(highest_seen.saturating_add(1)),
        false => floor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_proposal_is_ahead_of_all_clocks_but_those_that_are_wrong() {
        assert_eq!(proposal(vec![5_000, 7_000, 6_000], 0), 7_000 + MARGIN);
        assert_eq!(proposal(vec![5, 10 + DAY, 9], 0), 9 + MARGIN);
    }

    #[test]
    fn a_proposal_is_greater_than_what_the_client_has_seen_unless_that_is_wrong() {
        assert_eq!(proposal(vec![5, 6, 7], 900_000), 900_001);
        let too_great = 8 + MARGIN + DAY;
        assert_eq!(proposal(vec![5, 6, 7], too_great - 1), too_great);
        assert_eq!(proposal(vec![5, 6, 7], too_great), 7 + MARGIN);
    }

    #[test]
    fn a_clock_runs_on_from_its_last_reading() {
        let clock = WallClock::new(at(100), (2_000, 7));
        assert_eq!(clock.on_arrival(at(103)), 2_003_000_007);

        clock.set(at(110), (1_000, 0));

        assert_eq!(clock.on_arrival(at(111)), 1_001_000_000);
    }

    #[test]
    fn one_caller_is_told_to_read_the_clock_again_and_sooner_after_a_refusal() {
        let clock = WallClock::new(at(100), (0, 0));
        assert!(!clock.is_due(at(159), false));
        assert!(clock.is_due(at(160), false));
        assert!(!clock.is_due(at(160), false));

        assert!(!clock.is_due(at(160), true));
        assert!(clock.is_due(at(161), true));
        assert!(!clock.is_due(at(161), true));
    }
}
