//! What was released at a master shortly before another server has replaced it. The new master may not have received that,
//! and would keep the name taken until the lease ends. So the release is repeated there.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::Departure;
use crate::clock::{Clock, Instant};

/// How long a release is remembered. From the promotion of a replica until clients leave the old master it takes a second
/// or two.
const RECENT: Duration = Duration::from_secs(3);

/// The most releases that are remembered. A server repeats as many in some tenths of a second.
const MOST: usize = 10_000;

/// The releases of the last seconds, by all connections of a client.
#[derive(Debug, Default)]
pub(super) struct Released(Mutex<VecDeque<Recent>>);

#[derive(Debug)]
struct Recent {
    at: Instant,
    /// The address that has acknowledged it.
    master: String,
    departure: Departure,
}

impl Released {
    pub(super) fn note(&self, master: &str, departures: Vec<Departure>) {
        let at = Clock::BOOT.now();
        let mut all = self.all();
        while all.front().is_some_and(|recent| !recent.is_recent(at)) {
            all.pop_front();
        }
        for departure in departures {
            if all.len() == MOST {
                all.pop_front();
            }
            all.push_back(Recent {
                at,
                master: master.to_owned(),
                departure,
            });
        }
    }

    /// Those that another master than this one has acknowledged. They are forgotten here.
    pub(super) fn elsewhere(&self, master: &str) -> Vec<Departure> {
        let now = Clock::BOOT.now();
        let mut all = self.all();
        let (elsewhere, here): (VecDeque<_>, VecDeque<_>) =
            all.drain(..).partition(|recent| recent.master != master);
        *all = here;
        let elsewhere = elsewhere.into_iter().filter(|recent| recent.is_recent(now));
        elsewhere.map(|recent| recent.departure).collect()
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Recent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recent {
    fn is_recent(&self, now: Instant) -> bool {
        self.at.until(now) <= RECENT
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
    fn what_another_master_has_acknowledged_is_told_once() {
        let released = Released::default();
        released.note("a", vec![departure("x"), departure("y")]);
        released.note("b", vec![departure("z")]);

        assert_eq!(released.elsewhere("b").len(), 2);
        assert_eq!(released.elsewhere("b").len(), 0);
        assert_eq!(released.elsewhere("c").len(), 1);
    }

    #[test]
    fn no_more_than_so_many_are_remembered() {
        let released = Released::default();
        released.note("a", vec![departure("x"); MOST + 1]);
        assert_eq!(released.elsewhere("b").len(), MOST);
    }
}
