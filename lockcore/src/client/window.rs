//! How many requests may be in flight, as the store's answers show. This is plain data: it sends no
//! requests and reads no clock.

use std::time::Duration;

/// After this many slow answers in a row with the fewest requests in flight, the store is farther
/// away than before: a route has changed, or another server answers.
const MOVED: usize = 128;

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
    /// How many answers in a row did not come soon, although no fewer could be in flight.
    slow: usize,
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
            slow: 0,
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

    /// An answer has come after this time. Its caller would have waited for `patience`.
    ///
    /// One request more may be in flight if the answer came long before that time was over, or if
    /// the store is so far away that it could not come earlier. One request less may be if the
    /// answer was late: then the requests only wait for each other.
    pub(super) fn answered(&mut self, after: Duration, patience: Duration) {
        self.shortest = self.shortest.min(after);
        let soon = (patience / 4).max(self.shortest.saturating_mul(2));
        self.slow = match after > soon && self.limit == self.least {
            true => self.slow + 1,
            false => 0,
        };
        if self.slow == MOVED {
            // Never more than a third, so that the answers of a store that is only slow do not come
            // near the end of the patience.
            self.shortest = after.min(patience / 3);
            self.slow = 0;
        }
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
        self.limit = limit.clamp(self.least, self.most);
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
        assert_eq!(window.limit(), 18);
        answer(&mut window, 100, 250);
        assert_eq!(window.limit(), 64);

        window.missed();
        assert_eq!(window.limit(), 32);
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
        assert_eq!(late.limit(), 28);
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
    fn a_store_that_has_moved_away_gets_as_much_as_one_that_was_always_far() {
        let mut window = Window::between(8, 64);
        answer(&mut window, 100, 1);
        answer(&mut window, 400, 600);
        assert_eq!(window.limit(), 64);

        // A store that is slow answers later, the more is in flight.
        let mut slow = Window::between(8, 64);
        answer(&mut slow, 100, 1);
        for _ in 0..1_000 {
            let millis = 100 * slow.limit() as u64;
            answer(&mut slow, 1, millis);
        }
        assert!(slow.limit() <= 10, "{}", slow.limit());
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
