//! The releases that a master has acknowledged shortly before another server has replaced it. The
//! new master may not have received them, and would keep the names taken until the leases end. So
//! the client repeats these releases there.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::{self, Departure};
use crate::clock::{Clock, Instant};

/// The most releases in one request that a store sends by itself. The core has the same limit for
/// its batches.
pub(super) const BATCH: usize = 100;

/// How long a release is remembered. It is forgotten when the same master acknowledges a later one
/// after this time. From the promotion of a replica until clients leave the old master it takes a
/// second or two.
const RECENT: Duration = Duration::from_secs(3);

/// The most releases of one master that are remembered. If there are more, the oldest stay. They are
/// the ones that matter: the new master has the holders of the moment of its promotion, and the
/// first releases after that moment are theirs.
const MOST: usize = 10_000;

/// The latest releases of all connections of a client. It is harmless to repeat a release that has
/// already arrived, because no id is used again.
#[derive(Debug, Default)]
pub(super) struct Released(Mutex<Masters>);

/// The releases of each master, by its address. The oldest come first.
type Masters = BTreeMap<Arc<str>, VecDeque<Recent>>;

/// A release that was acknowledged.
#[derive(Debug)]
struct Recent {
    at: Instant,
    /// When the ticket has expired at every server. The holder has not renewed it since `at`.
    until: Instant,
    /// The address of the master that has acknowledged the release.
    master: Arc<str>,
    departure: Departure,
}

impl Released {
    pub(super) fn note(&self, master: &Arc<str>, departures: impl Iterator<Item = Departure>) {
        let at = Clock::BOOT.now();
        let mut all = self.all();
        let recent = all.entry(Arc::clone(master)).or_default();
        while recent
            .front()
            .is_some_and(|recent| recent.at.until(at) > RECENT)
        {
            recent.pop_front();
        }
        let room = MOST.saturating_sub(recent.len());
        recent.extend(departures.take(room).map(|departure| Recent {
            at,
            until: at.after(departure.request.ttl),
            master: Arc::clone(master),
            departure,
        }));
    }

    /// Takes out at most this many of the releases that were acknowledged by a master that does not
    /// have their names any more. `has` tells this of a master and a release. How long ago a release
    /// was does not count, unless its ticket has expired: after a master has died, it takes as long
    /// as the operators have configured until another server replaces it.
    pub(super) fn elsewhere(
        self: &Arc<Self>,
        most: usize,
        mut has: impl FnMut(&str, &Departure) -> bool,
    ) -> Repetition {
        let now = Clock::BOOT.now();
        let mut left = VecDeque::new();
        self.all().retain(|master, recent| {
            for _ in 0..recent.len() {
                let Some(next) = recent.pop_front().filter(|next| now < next.until) else {
                    continue;
                };
                match left.len() < most && !has(master, &next.departure) {
                    true => left.push_back(next),
                    false => recent.push_back(next),
                }
            }
            !recent.is_empty()
        });
        Repetition {
            released: Arc::clone(self),
            left,
            failed: VecDeque::new(),
        }
    }

    fn all(&self) -> MutexGuard<'_, Masters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The latest releases that other masters than this one have acknowledged.
pub(super) struct Elsewhere {
    pub(super) released: Arc<Released>,
    pub(super) master: Arc<str>,
}

impl Elsewhere {
    /// Takes out at most this many of them.
    pub(super) fn some(&self, most: usize) -> Repetition {
        self.released
            .elsewhere(most, |master, _| *master == *self.master)
    }
}

/// Releases that are to be repeated. When this value is dropped, the releases that were not
/// acknowledged are remembered again. So none is lost if the task that repeats them ends.
pub(super) struct Repetition {
    released: Arc<Released>,
    left: VecDeque<Recent>,
    /// The releases that the master could not carry out. They are remembered again.
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
    /// Returns whether all of them were carried out.
    pub(super) fn answered(&mut self, most: usize, answers: &[backend::Released]) -> bool {
        let failed_before = self.failed.len();
        let answered = self.left.drain(..most.min(self.left.len()));
        for (at, recent) in answered.enumerate() {
            let answer = answers.get(at).unwrap_or(&backend::Released::Failed);
            if *answer == backend::Released::Failed {
                self.failed.push_back(recent);
            }
        }
        self.failed.len() == failed_before
    }
}

impl Drop for Repetition {
    fn drop(&mut self) {
        let now = Clock::BOOT.now();
        let mut all = self.released.all();
        for mut recent in self.failed.drain(..).chain(self.left.drain(..)).rev() {
            recent.at = now; // or a later release at the same master would forget it
            let of_master = all.entry(Arc::clone(&recent.master)).or_default();
            of_master.push_front(recent);
            of_master.truncate(MOST);
        }
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
                ttl: Duration::from_secs(60),
                wait: false,
                name_ahead: false,
                lingers: false,
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
        released.note(&a, ["x", "y"].map(departure).into_iter());
        released.note(&b, ["z"].map(departure).into_iter());

        let mut again = released.elsewhere(usize::MAX, |master, _| master == "b");
        assert_eq!(names(&again), ["x", "y"]);
        assert!(
            released
                .elsewhere(usize::MAX, |master, _| master == "b")
                .next(1)
                .is_none()
        );
        again.answered(1, &[backend::Released::Released]);
        drop(again);

        assert_eq!(
            names(&released.elsewhere(usize::MAX, |master, _| master == "c")),
            ["y", "z"]
        );
    }

    #[test]
    fn releases_that_failed_at_the_new_master_are_repeated_at_the_next_connection() {
        use backend::Released::{Failed, NotFound};

        let released = Arc::<Released>::default();
        let departures = ["w", "x", "y", "z"].map(departure);
        released.note(&Arc::from("a"), departures.into_iter());

        let mut again = released.elsewhere(usize::MAX, |master, _| master == "b");
        // The third of them has no answer.
        again.answered(3, &[Failed, NotFound]);
        assert_eq!(names(&again), ["z"]);
        drop(again);

        assert_eq!(
            names(&released.elsewhere(usize::MAX, |master, _| master == "b")),
            ["w", "y", "z"]
        );
    }

    #[test]
    fn releases_that_are_put_back_stay_and_the_latest_make_room() {
        let released = Arc::<Released>::default();
        released.note(&Arc::from("a"), ["oldest"].map(departure).into_iter());
        let again = released.elsewhere(usize::MAX, |master, _| master == "b");
        released.note(&Arc::from("a"), std::iter::repeat_n(departure("x"), MOST));

        drop(again);

        let names = names(&released.elsewhere(usize::MAX, |master, _| master == "c"));
        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }

    #[test]
    fn a_part_is_handed_out_and_what_has_expired_is_forgotten() {
        let released = Arc::<Released>::default();
        let expired = departure("expired");
        let short = Arc::new(Request {
            ttl: Duration::ZERO,
            ..Request::clone(&expired.request)
        });
        let expired = Departure::new(short, false);
        let rest = ["x", "y", "z"].map(departure);
        released.note(&Arc::from("a"), std::iter::once(expired).chain(rest));

        let part = released.elsewhere(2, |_, _| false);
        assert_eq!(names(&part), ["x", "y"]);
        assert_eq!(names(&released.elsewhere(2, |_, _| false)), ["z"]);
        drop(part);

        assert_eq!(
            names(&released.elsewhere(MOST, |_, _| false)),
            ["x", "y", "z"]
        );
    }

    #[test]
    fn the_oldest_releases_are_remembered_if_there_are_too_many() {
        let released = Arc::<Released>::default();
        let master = Arc::from("a");
        released.note(&master, ["oldest"].map(departure).into_iter());
        released.note(&master, std::iter::repeat_n(departure("x"), MOST));

        let names = names(&released.elsewhere(usize::MAX, |master, _| master == "b"));

        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }
}
