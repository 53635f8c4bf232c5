//! Measures time without the time in which the machine stood still. A virtual machine can stop for
//! half a minute. Work that takes too long only because of such a stop is not a fault of the
//! library.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(50);

/// A tick that is later than this means that the machine stood still. On two saturated cores a tick
/// is late by tens of milliseconds only.
const STALL: Duration = Duration::from_millis(500);

static SEEN: Mutex<Seen> = Mutex::new(Seen {
    last_tick: None,
    stalls: Vec::new(),
});

struct Seen {
    last_tick: Option<Instant>,
    /// The begin and the end of each stall.
    stalls: Vec<(Instant, Instant)>,
}

impl Seen {
    /// Records a tick. If it is late, there was a stall.
    fn tick(&mut self, now: Instant) {
        if let Some(last) = self.last_tick.replace(now)
            && now.saturating_duration_since(last) > STALL
        {
            self.stalls.push((last, now));
        }
    }

    fn stalled_between(&self, began: Instant, now: Instant) -> Duration {
        let stalled = |(from, to): &(Instant, Instant)| {
            now.min(*to).saturating_duration_since(began.max(*from))
        };
        self.stalls.iter().map(stalled).sum()
    }
}

/// Starts a thread that watches for stalls, at the first call. The thread runs to the end of the
/// process.
pub fn watch() {
    static WATCHES: Once = Once::new();
    WATCHES.call_once(|| {
        seen().tick(Instant::now()); // shows a stall before the thread runs, too
        thread::spawn(|| {
            loop {
                thread::sleep(TICK);
                seen().tick(Instant::now());
            }
        });
    });
}

/// How long the machine has run since `began`: the elapsed time without the stalls. It knows only
/// the stalls that happened after the call of [`watch`]. Use it where a test demands that something
/// takes at most a certain time.
pub fn awake_since(began: Instant) -> Duration {
    let (elapsed, stalled) = split(began);
    elapsed.saturating_sub(stalled)
}

/// How long the machine has stood still since `began`. It knows only the stalls that happened after
/// the call of [`watch`].
pub fn stalled_since(began: Instant) -> Duration {
    split(began).1
}

/// The time that has elapsed since `began`, and the part of it in which the machine stood still.
fn split(began: Instant) -> (Duration, Duration) {
    let mut seen = seen();
    let now = Instant::now();
    // After a stall, this thread may run before the thread that watches, so it records the stall
    // itself. If no thread watches, there is no tick to compare with.
    if seen.last_tick.is_some() {
        seen.tick(now);
    }
    let elapsed = now.saturating_duration_since(began);
    (elapsed, seen.stalled_between(began, now))
}

/// Records a stall that did not happen, for tests of code that leaves out such time.
#[doc(hidden)]
pub fn pretend(from: Instant, to: Instant) {
    seen().stalls.push((from, to));
}

fn seen() -> MutexGuard<'static, Seen> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_that_comes_late_is_the_end_of_a_stall() {
        let began = Instant::now();
        let after = |millis| began + Duration::from_millis(millis);
        let mut seen = Seen {
            last_tick: None,
            stalls: Vec::new(),
        };
        for tick in [0, 50, 100, 20_100, 20_150, 20_500, 31_000] {
            seen.tick(after(tick));
        }

        let stalled = |from, to| seen.stalled_between(after(from), after(to)).as_millis();

        assert_eq!(stalled(0, 31_050), 20_000 + 10_500);
        assert_eq!(
            stalled(10_000, 20_200),
            10_100,
            "the time begins in a stall"
        );
        assert_eq!(stalled(20_150, 20_450), 0, "no stall in that time");
    }
}
