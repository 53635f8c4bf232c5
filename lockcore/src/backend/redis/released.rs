//! The releases that a master has acknowledged shortly before another server has replaced it. The
//! new master may not have received them, and would keep the names taken until the leases end. So
//! the client repeats these releases there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::{self, Departure};
use crate::clock::{Clock, Instant};

/// How long a release is remembered. It is forgotten when a later release comes after this time.
/// From the promotion of a replica until clients leave the old master it takes a second or two.
const RECENT: Duration = Duration::from_secs(3);

/// The most releases that are remembered. If there are more, the oldest stay. They are the ones
/// that matter: the new master has the holders of the moment of its promotion, and the first
/// releases after that moment are theirs.
const MOST: usize = 10_000;

/// The latest releases of all connections of a client. It is harmless to repeat a release that has
/// already arrived, because no id is used again.
#[derive(Debug, Default)]
pub(super) struct Released(Mutex<VecDeque<Recent>>);

/// A release that was acknowledged.
#[derive(Debug)]
struct Recent {
    at: Instant,
    /// The address of the master that has acknowledged the release.
    master: Arc<str>,
    departure: Departure,
}

impl Released {
    pub(super) fn note(&self, master: &Arc<str>, departures: Vec<Departure>) {
        let at = Clock::BOOT.now();
        let mut all = self.all();
        while all
            .front()
            .is_some_and(|recent| recent.at.until(at) > RECENT)
        {
            all.pop_front();
        }
        let room = MOST.saturating_sub(all.len());
        all.extend(departures.into_iter().take(room).map(|departure| Recent {
            at,
            master: Arc::clone(master),
            departure,
        }));
    }

    /// Takes out the releases that other masters than this one have acknowledged. Their age does
    /// not count: after a master has died, it takes as long as the sentinels are configured to wait
    /// until another server replaces it.
    pub(super) fn elsewhere(self: &Arc<Self>, master: &str) -> Repetition {
        let mut all = self.all();
        let (elsewhere, here): (VecDeque<_>, VecDeque<_>) =
            all.drain(..).partition(|recent| &*recent.master != master);
        *all = here;
        Repetition {
            released: Arc::clone(self),
            left: elsewhere,
            failed: VecDeque::new(),
        }
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Recent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases that are to be repeated. When this value is dropped, the releases that were not
/// acknowledged are remembered again. So none is lost if the task that repeats them ends.
pub(super) struct Repetition {
    released: Arc<Released>,
    left: VecDeque<Recent>,
    /// The releases that the master could not carry out. The next connection tries them again.
    failed: VecDeque<Recent>,
}

impl Repetition {
    /// The oldest releases that are left, at most `most`. `None` if none is left.
    pub(super) fn next(&self, most: usize) -> Option<Vec<Departure>> {
        let next = self.left.iter().take(most);
        let next: Vec<_> = next.map(|recent| recent.departure.clone()).collect();
        (!next.is_empty()).then_some(next)
    }

    /// Takes the answers to the `most` oldest releases that are left. They were repeated just now.
    pub(super) fn answered(&mut self, most: usize, answers: &[backend::Released]) {
        let answered = self.left.drain(..most.min(self.left.len()));
        for (at, recent) in answered.enumerate() {
            let answer = answers.get(at).unwrap_or(&backend::Released::Failed);
            if *answer == backend::Released::Failed {
                self.failed.push_back(recent);
            }
        }
    }
}

impl Drop for Repetition {
    fn drop(&mut self) {
        let now = Clock::BOOT.now();
        let mut all = self.released.all();
        for mut recent in self.failed.drain(..).chain(self.left.drain(..)).rev() {
            recent.at = now; // or the next release would forget it
            all.push_front(recent);
        }
        all.truncate(MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{Name, Namespace};
    use crate::request::{FULL, Id, Request};

    fn departure(name: &str) -> Departure {
        Departure {
            request: Arc::new(Request {
                name: Name::new(Namespace::new("test").unwrap(), name).unwrap(),
                id: Id::draw().unwrap(),
                permits: FULL,
                capacity: FULL,
                ttl: Duration::from_secs(1),
                wait: false,
                highest_seen: 0,
                owner: "test".into(),
            }),
            enqueue_may_follow: false,
        }
    }

    fn names(again: &Repetition) -> Vec<String> {
        let next = again.next(MOST).unwrap_or_default();
        let names = next.iter().map(|departure| departure.request.name.as_str());
        names.map(str::to_owned).collect()
    }

    #[test]
    fn releases_of_another_master_are_handed_out_once_and_the_rest_comes_back() {
        let released = Arc::<Released>::default();
        let (a, b) = (Arc::from("a"), Arc::from("b"));
        released.note(&a, vec![departure("x"), departure("y")]);
        released.note(&b, vec![departure("z")]);

        let mut again = released.elsewhere("b");
        assert_eq!(names(&again), ["x", "y"]);
        assert!(released.elsewhere("b").next(1).is_none());
        again.answered(1, &[backend::Released::Released]);
        drop(again);

        assert_eq!(names(&released.elsewhere("c")), ["y", "z"]);
    }

    #[test]
    fn releases_that_failed_at_the_new_master_are_repeated_at_the_next_connection() {
        use backend::Released::{Failed, NotFound};

        let released = Arc::<Released>::default();
        let departures = ["w", "x", "y", "z"].map(departure);
        released.note(&Arc::from("a"), departures.to_vec());

        let mut again = released.elsewhere("b");
        // The third of them has no answer.
        again.answered(3, &[Failed, NotFound]);
        assert_eq!(names(&again), ["z"]);
        drop(again);

        assert_eq!(names(&released.elsewhere("b")), ["w", "y", "z"]);
    }

    #[test]
    fn releases_that_are_put_back_stay_and_the_latest_make_room() {
        let released = Arc::<Released>::default();
        released.note(&Arc::from("a"), vec![departure("oldest")]);
        let again = released.elsewhere("b");
        released.note(&Arc::from("b"), vec![departure("x"); MOST]);

        drop(again);

        let names = names(&released.elsewhere("c"));
        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }

    #[test]
    fn the_oldest_releases_are_remembered_if_there_are_too_many() {
        let released = Arc::<Released>::default();
        let master = Arc::from("a");
        released.note(&master, vec![departure("oldest")]);
        released.note(&master, vec![departure("x"); MOST]);

        let names = names(&released.elsewhere("b"));

        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }
}
