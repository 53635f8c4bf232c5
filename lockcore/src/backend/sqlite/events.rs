//! Wake-ups. Inside the process a release wakes the next in line at once. The driver finds releases
//! of other processes by checking the file. This module knows which clients to wake.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::table::Looks;
use crate::backend::{EventSink, Wake};
use crate::request::Id;

/// The longest pause between two checks, used while a lock is held for long. This makes 20 checks
/// per second, and each reads a counter in shared memory. Together they cost about a thousandth of a
/// core, whatever the number of waiters.
const LATEST: Duration = Duration::from_millis(50);

/// The clients of this process on one file, and their tickets that wait.
#[derive(Debug)]
pub(super) struct Wakes {
    clients: HashMap<u64, Client>,
    joined: u64,
    /// The lines are keys of names.
    pub(super) looks: Looks<i64>,
    #[cfg(test)]
    pub(super) told: Vec<Id>,
}

impl Default for Wakes {
    fn default() -> Self {
        Self {
            clients: HashMap::new(),
            joined: 0,
            looks: Looks::new(LATEST),
            #[cfg(test)]
            told: Vec::new(),
        }
    }
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
        self.looks.settled(wake.id);
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

    /// The keys of the names to check, as `json_each` takes them.
    pub(super) fn lines(&self) -> String {
        let names = self.looks.lines();
        let names: Vec<_> = names.iter().map(i64::to_string).collect();
        format!("[{}]", names.join(","))
    }
}
