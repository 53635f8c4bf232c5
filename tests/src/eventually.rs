//! Waits for something to become true. This is the only place in the tests that polls: where an event can be awaited,
//! await the event. The loop for async code is in the conformance suite, which needs it too.

use std::thread;
use std::time::{Duration, Instant};

use lockcore::testing::conformance::steps::STEP;
/// The same as [`wait_until`] for async code. It does not block the runtime's threads.
pub use lockcore::testing::conformance::steps::eventually;

use crate::stalls;

/// Asks until there is an answer. Returns `None` if there was none within the time, in which stalls of the machine do not
/// count. After a slow answer there is one more try.
pub fn poll<T>(within: Duration, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
    stalls::watch();
    let began = Instant::now();
    loop {
        let over = stalls::awake_since(began) >= within;
        if let Some(answer) = answer() {
            return Some(answer);
        }
        if over {
            return None;
        }
        thread::sleep(STEP);
    }
}

/// Blocks the thread until the condition holds. Panics with `what` if it does not within the time.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    if poll(within, || holds().then_some(())).is_none() {
        panic!("not within {within:?}: {what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_that_holds_at_once_is_asked_once() {
        let mut asked = 0;

        wait_until("asked", Duration::ZERO, || {
            asked += 1;
            true
        });

        assert_eq!(asked, 1);
    }

    #[test]
    fn the_time_in_which_the_machine_stood_still_does_not_count() {
        let (stall, within) = (Duration::from_millis(200), Duration::from_millis(20));
        let began = Instant::now();
        stalls::pretend(began, began + stall);

        let answer: Option<()> = poll(within, || None);

        assert!(answer.is_none());
        assert!(began.elapsed() >= stall + within);
    }

    #[test]
    fn the_time_that_an_answer_takes_counts_in_full() {
        let within = Duration::from_millis(1_200);
        let began = Instant::now();
        let mut asked = Vec::new();

        let answer: Option<()> = poll(within, || {
            asked.push(stalls::awake_since(began));
            thread::sleep(Duration::from_millis(1_500));
            None
        });

        assert!(answer.is_none());
        asked.pop(); // asked once more after the limit
        assert!(asked.iter().all(|at| *at < within), "{asked:?}");
    }

    #[test]
    fn a_condition_that_never_holds_ends_at_the_deadline() {
        let began = Instant::now();

        let answer: Option<()> = poll(Duration::from_millis(20), || None);

        assert!(answer.is_none());
        assert!(began.elapsed() >= Duration::from_millis(20));
    }
}
