//! Waits until something is true. Only this module polls in the tests: where an event can be
//! awaited, await the event. The loop for async code is in the conformance suite, which also needs
//! it.

use std::thread;
use std::time::{Duration, Instant};

use lockcore::testing::conformance::steps::STEP;
/// Like [`wait_until`], for async code. It does not block the threads of the runtime.
pub use lockcore::testing::conformance::steps::eventually;

use crate::stalls;

/// Calls `answer` until it returns `Some`. Returns `None` if this does not happen within the time.
/// Stalls of the machine do not count as time. After a slow answer, `answer` is called once more.
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

/// Blocks the thread until the condition holds. Panics with `what` if it does not hold within the
/// time.
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
        asked.pop(); // removes the call after the limit
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
