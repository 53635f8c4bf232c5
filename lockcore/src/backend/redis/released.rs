//! The releases that a master has acknowledged shortly before another server replaced it. The new master may not have
//! received them, and would keep the names taken until the leases end. So the releases are repeated there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::Departure;
use crate::clock::{Clock, Instant};

/// A release is remembered until one comes that is later by more than this. From the promotion of a replica until clients
/// leave the old master it takes a second or two.
const RECENT: Duration = Duration::from_secs(3);

/// The most releases that are remembered. Later ones are not, because the new master has the holders of the moment of its
/// promotion: their releases are the oldest.
const MOST: usize = 10_000;

/// The latest releases, by all connections of a client. To repeat one that has arrived changes nothing, because no id is
/// used again.
#[derive(Debug, Default)]
pub(super) struct Released(Mutex<VecDeque<Recent>>);

/// A release that was acknowledged.
#[derive(Clone, Debug)]
pub(super) struct Recent {
    at: Instant,
    /// The address that has acknowledged it.
    master: Arc<str>,
    pub(super) departure: Departure,
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

    /// Those that another master than this one has acknowledged. They are forgotten here. Their age does not count: a
    /// master that has died is replaced after as long as its sentinels are told to wait.
    pub(super) fn elsewhere(&self, master: &str) -> Vec<Recent> {
        let mut all = self.all();
        let (elsewhere, here): (VecDeque<_>, VecDeque<_>) =
            all.drain(..).partition(|recent| &*recent.master != master);
        *all = here;
        elsewhere.into()
    }

    /// These were not repeated, because the connection broke.
    pub(super) fn put_back(&self, recent: &[Recent]) {
        let mut all = self.all();
        let room = MOST.saturating_sub(all.len());
        for recent in recent.iter().take(room).rev() {
            all.push_front(recent.clone());
        }
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Recent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn releases_of_another_master_are_handed_out_once_and_can_be_put_back() {
        let released = Released::default();
        let (a, b) = (Arc::from("a"), Arc::from("b"));
        released.note(&a, vec![departure("x"), departure("y")]);
        released.note(&b, vec![departure("z")]);

        let again = released.elsewhere("b");
        assert_eq!(again.len(), 2);
        assert_eq!(released.elsewhere("b").len(), 0);
        released.put_back(&again[1..]);
        let left = released.elsewhere("c");
        let names: Vec<_> = left
            .iter()
            .map(|recent| recent.departure.request.name.as_str())
            .collect();
        assert_eq!(names, ["y", "z"]);
    }

    #[test]
    fn the_oldest_releases_are_remembered_if_there_are_too_many() {
        let released = Released::default();
        let master = Arc::from("a");
        released.note(&master, vec![departure("oldest")]);
        released.note(&master, vec![departure("x"); MOST]);

        let again = released.elsewhere("b");
        assert_eq!(again.len(), MOST);
        assert_eq!(again[0].departure.request.name.as_str(), "oldest");
    }
}
