//! Waiting for something to become true. The only place in the tests that polls: where an event can be awaited
//! instead, await the event.

use std::thread;
use std::time::{Duration, Instant};

/// Short against anything that a test measures, long enough not to keep one of two cores busy.
const STEP: Duration = Duration::from_millis(2);

/// What one step uses up at most. Far more than one takes while the machine runs: the rest of a longer one is the machine
/// standing still, in which nothing can come true.
const LONGEST_STEP: Duration = Duration::from_secs(1);

/// The time that is left, without that in which the machine stood still.
struct Patience {
    left: Duration,
    seen: Instant,
}

impl Patience {
    fn new(within: Duration) -> Self {
        Self {
            left: within,
            seen: Instant::now(),
        }
    }

    /// Asked once before each step, so that a slow answer still counts once more.
    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        let step = now - self.seen;
        self.seen = now;
        self.left = self.left.saturating_sub(step.min(LONGEST_STEP));
        self.left.is_zero()
    }
}

/// Asks until there is an answer; `None` when there was none within the time.
pub fn poll<T>(within: Duration, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
    let mut patience = Patience::new(within);
    loop {
        let over = patience.is_over();
        if let Some(answer) = answer() {
            return Some(answer);
        }
        if over {
            return None;
        }
        thread::sleep(STEP);
    }
}

/// Blocks the thread until it holds; panics with `what` when it does not within the time.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    if poll(within, || holds().then_some(())).is_none() {
        panic!("not within {within:?}: {what}");
    }
}

/// The same for async code: the runtime's threads stay free.
pub async fn eventually(what: &str, within: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let mut patience = Patience::new(within);
    loop {
        let over = patience.is_over();
        if holds().await {
            return;
        }
        assert!(!over, "not within {within:?}: {what}");
        tokio::time::sleep(STEP).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_at_once_is_asked_once() {
        let mut asked = 0;

        wait_until("asked", Duration::ZERO, || {
            asked += 1;
            true
        });

        assert_eq!(asked, 1);
    }

    #[test]
    fn a_machine_that_stands_still_uses_up_one_step() {
        let mut patience = Patience::new(3 * LONGEST_STEP);
        let stand_still = |patience: &mut Patience| patience.seen -= 20 * LONGEST_STEP;

        stand_still(&mut patience);
        assert!(!patience.is_over());
        stand_still(&mut patience);
        assert!(!patience.is_over());
        stand_still(&mut patience);
        assert!(patience.is_over(), "asked for ever");
    }

    #[test]
    fn what_never_holds_ends_at_the_deadline() {
        let began = Instant::now();

        let answer: Option<()> = poll(Duration::from_millis(20), || None);

        assert!(answer.is_none());
        assert!(began.elapsed() >= Duration::from_millis(20));
    }
}
