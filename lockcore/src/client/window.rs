//! How many requests may be in flight, as the store's answers show. This is plain data: it sends no
//! requests and reads no clock.

use std::time::Duration;

/// A limit that rises while answers come soon, and falls when they come late or do not come.
///
/// A store carries out the requests of a connection in order. If it is slow, a request waits behind
/// all those that are in flight. With fewer in flight, the answers come sooner, and the store does
/// as much.
#[derive(Debug)]
pub(super) struct Window {
    least: usize,
    most: usize,
    limit: usize,
    /// The shortest time from a request to its answer.
    shortest: Duration,
    /// The latest answer, or its absence, has shown that no more should be in flight.
    settled: bool,
}

impl Window {
    /// The limit begins with `least`.
    pub(super) fn between(least: usize, most: usize) -> Self {
        let most = most.max(1);
        let least = least.clamp(1, most);
        Self {
            least,
            most,
            limit: least,
            shortest: Duration::MAX,
            settled: false,
        }
    }

    /// The limit begins with `most` instead.
    pub(super) fn wide(self) -> Self {
        Self {
            limit: self.most,
            ..self
        }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether the limit does not rise at present.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// An answer has come after this time. Its caller would have waited for `patience`.
    ///
    /// One request more may be in flight if the answer came long before that time was over, or if
    /// the store is so far away that it could not come earlier. One request less may be if the
    /// answer was late: then the requests only wait for each other.
    pub(super) fn answered(&mut self, after: Duration, patience: Duration) {
        self.shortest = self.shortest.min(after);
        let soon = (patience / 4).max(self.shortest.saturating_mul(2));
        self.limit_to(if after > soon * 2 {
            self.limit - 1
        } else if after > soon {
            self.limit
        } else {
            self.limit + 1
        });
    }

    /// No answer has come in time.
    pub(super) fn missed(&mut self) {
        self.limit_to(self.limit / 2);
    }

    fn limit_to(&mut self, limit: usize) {
        let before = self.limit;
        self.limit = limit.clamp(self.least, self.most);
        self.settled = self.limit <= before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn answer(window: &mut Window, requests: usize, millis: u64) {
        for _ in 0..requests {
            window.answered(Duration::from_millis(millis), PATIENCE);
        }
    }

    #[test]
    fn more_is_tried_with_each_answer_and_half_of_it_after_an_answer_that_does_not_come() {
        let mut window = Window::between(8, 64);
        assert_eq!(window.limit(), 8);
        answer(&mut window, 10, 250);
        assert_eq!((window.limit(), window.is_settled()), (18, false));
        answer(&mut window, 100, 250);
        assert_eq!((window.limit(), window.is_settled()), (64, true));

        window.missed();
        assert_eq!((window.limit(), window.is_settled()), (32, true));
        for _ in 0..10 {
            window.missed();
        }
        assert_eq!(window.limit(), 8);
    }

    #[test]
    fn a_store_that_is_late_gets_less_and_a_store_that_is_far_does_not() {
        let mut late = Window::between(8, 64);
        answer(&mut late, 20, 10);
        answer(&mut late, 1, 251);
        assert_eq!((late.limit(), late.is_settled()), (28, true));
        answer(&mut late, 10, 501);
        assert_eq!(late.limit(), 18);
        answer(&mut late, 100, 501);
        assert_eq!(late.limit(), 8);

        let mut far = Window::between(8, 64);
        answer(&mut far, 20, 450);
        assert_eq!(far.limit(), 28);
        answer(&mut far, 1, 900);
        assert_eq!(far.limit(), 29);
    }

    #[test]
    fn a_store_that_wants_little_gets_little() {
        let mut window = Window::between(8, 2);
        assert_eq!(window.limit(), 2);
        answer(&mut window, 100, 10);
        assert_eq!(window.limit(), 2);
        window.missed();
        assert_eq!(window.limit(), 2);
        assert_eq!(Window::between(8, 0).limit(), 1);
    }
}
