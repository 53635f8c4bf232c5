//! Wake-ups. Inside the process a release tells the next in line at once; of releases in other processes the driver
//! learns by looking: this file keeps whom to tell, for whom to look, and how often.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::{Events, Wake};
use crate::request::Id;

/// The first looks after a change come this soon.
const SOONEST: Duration = Duration::from_millis(2);

/// A lock that is held for long is looked at this often: 20 looks a second, each a read of a counter in shared memory,
/// cost about a thousandth of a core, whatever the number of waiters.
const LATEST: Duration = Duration::from_millis(50);

/// In between, an eighth of the time that nothing has changed: who waits for a lock waits at most an eighth longer than
/// it was held. From the first look to the slowest there are about 35.
const PART: u32 = 8;

/// The clients of this process on one file, and those of their tickets that wait.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    clients: HashMap<u64, Client>,
    joined: u64,
    /// And the key of the name that each waits for.
    waiting: HashMap<Id, i64>,
    /// When another process last changed the file, or somebody began to wait for one.
    changed: Option<Instant>,
    #[cfg(test)]
    pub(super) told: Vec<Id>,
}

#[derive(Debug)]
struct Client {
    /// Which of the connections that a receiver has had: one that leaves late must not take its successor along.
    joined: u64,
    events: Events,
}

impl Wakes {
    /// Takes a client in, until it [leaves](Self::leave) with the number that this returns.
    pub(super) fn join(&mut self, events: Events) -> u64 {
        self.joined += 1;
        let joined = self.joined;
        self.clients
            .insert(events.receiver(), Client { joined, events });
        joined
    }

    pub(super) fn leave(&mut self, receiver: u64, joined: u64) {
        if self
            .clients
            .get(&receiver)
            .is_some_and(|client| client.joined == joined)
        {
            self.clients.remove(&receiver);
        }
    }

    /// The ticket holds.
    pub(super) fn granted(&mut self, receiver: u64, wake: Wake) {
        self.waiting.remove(&wake.id);
        #[cfg(test)]
        self.told.push(wake.id);
        // A client between two connections asks after everything when it has the next.
        if let Some(client) = self.clients.get(&receiver) {
            client.events.granted(wake);
        }
    }

    /// The ticket is the first that waits, and may hold without a word when that time is over.
    pub(super) fn first(&self, receiver: u64, id: Id, after: Duration) {
        if let Some(client) = self.clients.get(&receiver) {
            client.events.recheck(id, after);
        }
    }

    /// The ticket waits for a name. If only tickets of this process are ahead, it is let in by a release that passes by
    /// here, and there is no hurry to look: but another process may remove those that have expired.
    pub(super) fn waits(&mut self, id: Id, name: i64, foreign_ahead: bool) {
        if self.waiting.insert(id, name).is_none() && foreign_ahead {
            self.changed = Some(Instant::now());
        }
    }

    /// The ticket holds, or is gone, and its owner knows.
    pub(super) fn settled(&mut self, id: Id) {
        self.waiting.remove(&id);
    }

    pub(super) fn is_waiting(&self, id: Id) -> bool {
        self.waiting.contains_key(&id)
    }

    /// Where to look: the keys of the names, as `json_each` takes them.
    pub(super) fn lines(&self) -> String {
        let names: BTreeSet<i64> = self.waiting.values().copied().collect();
        let names: Vec<_> = names.iter().map(i64::to_string).collect();
        format!("[{}]", names.join(","))
    }

    /// Another process has changed the file.
    pub(super) fn changed(&mut self) {
        self.changed = Some(Instant::now());
    }

    /// When to look next, if there is anybody to look for.
    pub(super) fn look_at(&self, looked: Instant) -> Option<Instant> {
        if self.waiting.is_empty() {
            return None;
        }
        let pause = self.changed.map_or(LATEST, |changed| {
            let unchanged = looked.saturating_duration_since(changed);
            (unchanged / PART).clamp(SOONEST, LATEST)
        });
        Some(looked + pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn looks_become_rarer_the_longer_nothing_changes_and_stop_when_nobody_waits() {
        let mut wakes = Wakes::default();
        let id = Id::draw().unwrap();
        assert_eq!(wakes.look_at(Instant::now()), None);
        wakes.waits(id, 1, true);

        let began = Instant::now();
        let mut looked = began;
        let mut looks = 0;
        while looked < began + Duration::from_millis(400) {
            let next = wakes.look_at(looked).unwrap();
            assert!(next - looked >= SOONEST && next - looked <= LATEST);
            assert!(next - looked <= ((looked - began) / PART).max(SOONEST));
            looked = next;
            looks += 1;
        }
        assert!((30..45).contains(&looks), "{looks}");
        assert_eq!(
            wakes.look_at(looked),
            Some(looked + Duration::from_millis(50))
        );

        wakes.settled(id);
        assert_eq!(wakes.look_at(looked), None);
        wakes.waits(id, 1, false);
        let next = wakes.look_at(looked);
        assert_eq!(next, Some(looked + LATEST), "all ahead are of this process");
    }
}
