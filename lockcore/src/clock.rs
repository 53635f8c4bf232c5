//! The clock that leases are judged by, and nothing else: no timers, no wall clock.
//!
//! It is `CLOCK_BOOTTIME` where there is one, because it goes on while the machine is suspended
//! and nobody can set it. `std::time::Instant` stops during suspend on Linux, so a laptop that
//! slept an hour would still believe in a ten-second lease.

use std::time::Duration;

/// A point on the lease clock, in nanoseconds since some fixed point of this boot.
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

    /// The time from `self` to `later`, zero when that has passed.
    pub(crate) fn until(self, later: Self) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Where instants come from; tests put a clock in that they turn by hand.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Boot,
    #[cfg(test)]
    Manual(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    pub(crate) const BOOT: Self = Self(Source::Boot);

    pub(crate) fn now(&self) -> Instant {
        match &self.0 {
            Source::Boot => boot_time(),
            #[cfg(test)]
            Source::Manual(nanos) => Instant(nanos.load(std::sync::atomic::Ordering::SeqCst)),
        }
    }
}

fn boot_time() -> Instant {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    // Elsewhere the monotonic clock is what there is; on macOS it counts suspend as well.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

    let time = rustix::time::clock_gettime(CLOCK);
    Instant(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

#[cfg(test)]
impl Clock {
    /// A clock that starts at `nanos` and moves only through [`Clock::advance`].
    pub(crate) fn manual(nanos: u64) -> Self {
        Self(Source::Manual(std::sync::Arc::new(nanos.into())))
    }

    pub(crate) fn advance(&self, by: Duration) {
        match &self.0 {
            Source::Boot => panic!("only a manual clock can be turned"),
            Source::Manual(now) => {
                now.fetch_add(nanos(by), std::sync::atomic::Ordering::SeqCst);
            }
        }
    }
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
}
