//! The clock of leases. Timers and the wall clock are not here.
//!
//! It is `CLOCK_BOOTTIME` where this exists, because this clock runs on while the machine is
//! suspended, and nobody can set it. `std::time::Instant` stands still during a suspend on Linux.
//! With that clock, a laptop that has slept for an hour would believe in a ten-second lease.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// A point in time on the lease clock, in nanoseconds since a fixed point of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(u64);

impl Instant {
    /// Later than every instant that the clock will show.
    pub(crate) const FAR_FUTURE: Self = Self(u64::MAX);

    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Saturates, so that `Duration::MAX` means [`Instant::FAR_FUTURE`] and never panics.
    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }

    pub(crate) fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
    }

    /// The time from `self` to `later`. Zero if `later` is before `self`.
    pub(crate) fn until(self, later: Self) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }
}

/// A duration in nanoseconds. It saturates: a duration of more than 584 years counts as endless.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The source of instants. A test uses a clock that it advances by hand.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Boot,
    Hand(Arc<Hand>),
}

/// A clock that a test advances.
#[derive(Debug)]
struct Hand {
    reading: Mutex<Reading>,
    advanced: Notify,
}

#[derive(Clone, Copy, Debug)]
enum Reading {
    Ahead(Duration),
    StandsAt(Instant),
}

impl Clock {
    pub(crate) const BOOT: Self = Self(Source::Boot);

    /// A clock that runs, and that [`advance`](Self::advance) moves ahead.
    pub(crate) fn by_hand() -> Self {
        Self(Source::Hand(Arc::new(Hand {
            reading: Mutex::new(Reading::Ahead(Duration::ZERO)),
            advanced: Notify::new(),
        })))
    }

    pub(crate) fn now(&self) -> Instant {
        match &self.0 {
            Source::Boot => boot_time(),
            Source::Hand(hand) => hand.reading().now(),
        }
    }

    /// For how long a timer must run until this clock shows `at`, if no test advances the clock.
    pub(crate) fn time_to(&self, at: Instant) -> Duration {
        match &self.0 {
            Source::Hand(hand) if matches!(*hand.reading(), Reading::StandsAt(_)) => Duration::MAX,
            _ => self.now().until(at),
        }
    }

    /// Resolves when a test has advanced the clock since this call. A task that sleeps until a time
    /// on this clock uses it to check the time again. A suspend of the machine sends no such
    /// notification.
    pub(crate) fn advanced(&self) -> impl Future<Output = ()> + Send {
        // This call registers for the notification, not the first poll.
        let advanced = match &self.0 {
            Source::Boot => None,
            Source::Hand(hand) => Some(hand.advanced.notified()),
        };
        async {
            match advanced {
                Some(advanced) => advanced.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Moves a clock from [`by_hand`](Self::by_hand) ahead, and notifies. Other clocks do not move.
    pub(crate) fn advance(&self, by: Duration) {
        if let Source::Hand(hand) = &self.0 {
            hand.reading().advance(by);
            hand.advanced.notify_waiters();
        }
    }

    /// From now on, a clock from [`by_hand`](Self::by_hand) moves only by
    /// [`advance`](Self::advance).
    pub(crate) fn stop(&self) {
        if let Source::Hand(hand) = &self.0 {
            let mut reading = hand.reading();
            *reading = Reading::StandsAt(reading.now());
        }
    }

    /// Moves the clock as a suspend of the machine does: without a notification.
    #[cfg(test)]
    pub(crate) fn suspend(&self, by: Duration) {
        if let Source::Hand(hand) = &self.0 {
            hand.reading().advance(by);
        }
    }
}

impl Hand {
    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    fn now(self) -> Instant {
        match self {
            Self::Ahead(by) => boot_time().after(by),
            Self::StandsAt(now) => now,
        }
    }

    fn advance(&mut self, by: Duration) {
        match self {
            Self::Ahead(ahead) => *ahead = ahead.saturating_add(by),
            Self::StandsAt(now) => *now = now.after(by),
        }
    }
}

fn boot_time() -> Instant {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    // Other systems have only the monotonic clock. On macOS it includes the time of a suspend too.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

    let time = rustix::time::clock_gettime(CLOCK);
    Instant(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_duration_saturates_instead_of_panicking() {
        let now = Clock::BOOT.now();

        assert_eq!(now.after(Duration::MAX), Instant::FAR_FUTURE);
        assert_eq!(now.before(Duration::MAX), Instant(0));
        assert_eq!(now.after(Duration::MAX).until(now), Duration::ZERO);
    }

    #[test]
    fn a_clock_that_stands_moves_by_its_advances_alone() {
        let clock = Clock::by_hand();
        clock.stop();
        let stopped_at = clock.now();
        assert_eq!(
            clock.time_to(stopped_at.after(Duration::from_nanos(1))),
            Duration::MAX
        );

        clock.advance(Duration::from_secs(7));

        assert_eq!(clock.now(), stopped_at.after(Duration::from_secs(7)));
    }

    #[test]
    fn a_clock_that_runs_is_ahead_by_its_advances() {
        let clock = Clock::by_hand();
        let before = Clock::BOOT.now();

        clock.advance(Duration::from_secs(7));

        let ahead = before.until(clock.now());
        assert!(
            ahead >= Duration::from_secs(7) && ahead < Duration::from_secs(12),
            "{ahead:?}"
        );
    }
}
