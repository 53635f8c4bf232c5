//! Waiting for something to become true. The only place in the tests that polls: where an event can be awaited
//! instead, await the event.

use std::thread;
use std::time::{Duration, Instant};

/// Short against anything that a test measures, long enough not to keep one of two cores busy.
const STEP: Duration = Duration::from_millis(2);

/// Asks until there is an answer; `None` when there was none within the time.
pub fn poll<T>(within: Duration, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + within;
    loop {
        // Judged after the deadline was read, so that a slow answer still counts once more.
        let over = Instant::now() >= deadline;
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
    let deadline = Instant::now() + within;
    loop {
        let over = Instant::now() >= deadline;
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
    fn what_never_holds_ends_at_the_deadline() {
        let began = Instant::now();

        let answer: Option<()> = poll(Duration::from_millis(20), || None);

        assert!(answer.is_none());
        assert!(began.elapsed() >= Duration::from_millis(20));
    }
}
