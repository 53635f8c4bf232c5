//! Wake-ups. Inside the process a release wakes the next in line at once. The driver finds releases
//! of other processes by checking the file. This module knows which clients to wake, which tickets
//! wait, and how often to check.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::{EventSink, Wake};
use crate::request::Id;

/// The shortest pause between two checks, used after a change.
const SOONEST: Duration = Duration::from_millis(2);

/// The longest pause, used while a lock is held for long. This makes 20 checks per second, and each
/// reads a counter in shared memory. Together they cost about a thousandth of a core, whatever the
/// number of waiters.
const LATEST: Duration = Duration::from_millis(50);

/// Between the shortest and the longest pause, the pause is an eighth of the time since the last
/// change. So a waiter waits at most an eighth longer than the lock was held. It takes about 35
/// checks from the shortest pause to the longest.
const PART: u32 = 8;

/// The clients of this process on one file, and their tickets that wait.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    clients: HashMap<u64, Client>,
    joined: u64,
    waiting: HashMap<Id, Waiting>,
    /// No ticket in `waiting` ends before this time, in milliseconds of the boot clock.
    none_ends_before: i64,
    /// When another process last changed the file, or a ticket began to wait for another process.
    changed: Option<Instant>,
    #[cfg(test)]
    pub(super) told: Vec<Id>,
}

/// A ticket that waits.
#[derive(Debug)]
struct Waiting {
    /// The key of its name.
    name: i64,
    /// When it ends if it is not renewed, in milliseconds of the boot clock.
    ends: i64,
}

#[derive(Debug)]
struct Client {
    /// Tells the connections of one receiver apart, because a connection that leaves late must not
    /// remove its successor.
    joined: u64,
    events: EventSink,
}

impl Wakes {
    /// Adds a client, until it [leaves](Self::leave) with the number that this returns.
    pub(super) fn join(&mut self, events: EventSink) -> u64 {
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

    /// Tells the client of a ticket that the ticket holds now.
    pub(super) fn granted(&mut self, receiver: u64, wake: Wake) {
        self.waiting.remove(&wake.id);
        #[cfg(test)]
        self.told.push(wake.id);
        // A client that has no connection needs no wake-up: it renews every ticket as soon as it
        // has the next connection.
        if let Some(client) = self.clients.get(&receiver) {
            client.events.granted(wake);
        }
    }

    /// Tells the client of a ticket to renew it after this time. Either the ticket is the first
    /// that waits, and may be granted then without a wake-up, or it was asked back.
    pub(super) fn recheck(&self, receiver: u64, id: Id, after: Duration) {
        if let Some(client) = self.clients.get(&receiver) {
            client.events.recheck(id, after);
        }
    }

    /// Notes that a ticket waits for a name until `ends`, if it is not renewed. If only tickets of
    /// this process are ahead of it, a release in this process will wake it, so frequent checks are
    /// not needed. Slow checks are needed even then, because another process may remove tickets
    /// that have expired.
    pub(super) fn waits(&mut self, id: Id, name: i64, ends: i64, foreign_ahead: bool) {
        self.none_ends_before = self.none_ends_before.min(ends);
        let before = self.waiting.insert(id, Waiting { name, ends });
        if before.is_none() && foreign_ahead {
            self.changed = Some(Instant::now());
        }
    }

    /// Notes that the ticket does not wait any more: it holds or is gone, and its client knows
    /// that.
    pub(super) fn settled(&mut self, id: Id) {
        self.waiting.remove(&id);
    }

    /// Forgets the tickets that have ended. Usually an answer [settles](Self::settled) a ticket
    /// before its end. But if the file cannot be used until then, no answer comes, and after that
    /// the client does not ask for this ticket any more.
    pub(super) fn forget_ended(&mut self, now: i64) {
        if now < self.none_ends_before {
            return;
        }
        self.waiting.retain(|_, ticket| ticket.ends > now);
        let ends = self.waiting.values().map(|ticket| ticket.ends);
        self.none_ends_before = ends.min().unwrap_or(i64::MAX);
    }

    pub(super) fn is_waiting(&self, id: Id) -> bool {
        self.waiting.contains_key(&id)
    }

    /// The keys of the names to check, as `json_each` takes them.
    pub(super) fn lines(&self) -> String {
        let names: BTreeSet<i64> = self.waiting.values().map(|ticket| ticket.name).collect();
        let names: Vec<_> = names.iter().map(i64::to_string).collect();
        format!("[{}]", names.join(","))
    }

    /// Another process has changed the file.
    pub(super) fn changed(&mut self) {
        self.changed = Some(Instant::now());
    }

    /// The time of the next check, if any ticket waits.
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
        wakes.waits(id, 1, 60_000, true);

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
        wakes.waits(id, 1, 60_000, false);
        let next = wakes.look_at(looked);
        assert_eq!(next, Some(looked + LATEST), "all ahead are of this process");
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_that_nothing_settles_is_forgotten_at_its_end() {
        let mut wakes = Wakes::default();
        let [renewed, other] = [(); 2].map(|()| Id::draw().unwrap());
        let looks = |wakes: &Wakes| wakes.look_at(Instant::now()).is_some();
        wakes.waits(renewed, 1, 1000, true);
        wakes.waits(other, 2, 1500, true);

        wakes.forget_ended(999);
        wakes.waits(renewed, 1, 2000, true);
        wakes.forget_ended(1499);
        assert_eq!(wakes.lines(), "[1,2]");

        wakes.forget_ended(1500);
        assert_eq!(wakes.lines(), "[1]");
        wakes.forget_ended(1999);
        assert!(looks(&wakes));
        wakes.forget_ended(2000);
        assert!(!looks(&wakes));
    }
}
