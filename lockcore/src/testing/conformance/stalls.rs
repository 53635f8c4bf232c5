//! Time without that in which the machine stood still. A virtual machine can stop for half a minute, and what took no
//! longer than allowed otherwise is no fault of the library then.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(50);

/// A tick that comes later than this was kept from coming. On two saturated cores it comes later by tens of milliseconds.
const STALL: Duration = Duration::from_millis(500);

static SEEN: Mutex<Seen> = Mutex::new(Seen {
    last_tick: None,
    stalls: Vec::new(),
});

struct Seen {
    last_tick: Option<Instant>,
    /// When each began, and ended.
    stalls: Vec<(Instant, Instant)>,
}

impl Seen {
    /// The stall that goes on, or has just ended and was not seen yet.
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

/// Watches from the first call on, to the end of the process.
pub fn watch() {
    static WATCHES: Once = Once::new();
    WATCHES.call_once(|| {
        seen().tick(Instant::now()); // so that even a stall that begins before the thread does is seen
        thread::spawn(|| {
            loop {
                thread::sleep(TICK);
                seen().tick(Instant::now());
            }
        });
    });
}

/// How long the machine has run since then, as far as it was [watched](watch). For upper bounds: it is never more than
/// what has elapsed.
pub fn awake_since(began: Instant) -> Duration {
    let (elapsed, stalled) = split(began);
    elapsed.saturating_sub(stalled)
}

/// For how long the machine has stood still since then, as far as it was [watched](watch).
pub fn stalled_since(began: Instant) -> Duration {
    split(began).1
}

/// How long ago it was, and for how long of that the machine stood still.
fn split(began: Instant) -> (Duration, Duration) {
    let mut seen = seen();
    let now = Instant::now();
    // After a stall this thread may run before the one that watches, so it notes the stall itself. If none watches, there
    // are no ticks to compare with.
    if seen.last_tick.is_some() {
        seen.tick(now);
    }
    let elapsed = now.saturating_duration_since(began);
    (elapsed, seen.stalled_between(began, now))
}

/// Notes a stall that there was not, for a test of what does not count such time.
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
            "began in the middle of one"
        );
        assert_eq!(stalled(20_150, 20_450), 0, "between two");
    }
}
