//! In which slots the connections of a client wait for messages: for wake-ups of its waiters, and for
//! ask-backs of its holders.
//!
//! A wake-up goes to the connection that has asked for the ticket. But the keeper renews the ticket
//! on a connection of its own. If a slot has moved to another node, the answers to these renewals
//! are the first to show it. So this module passes the news to the connection that must now listen
//! at the new node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::whole::Whole;
use crate::backend::redis::views::Address;
use crate::clock::{Clock, Instant};

/// How long a subscription stays, at least, after the last ticket that needed it has ended. So a
/// name that callers often wait for does not cost a subscription each time. After that, it ends
/// when the same connection subscribes in other slots.
const LINGER: Duration = Duration::from_secs(30);

/// The receivers of a client, by their numbers. A connection that replaces another has the same
/// number.
#[derive(Debug, Default)]
pub(super) struct Receivers {
    all: Mutex<HashMap<u64, Receiver>>,
}

#[derive(Debug, Default)]
struct Receiver {
    /// The latest connection of the receiver.
    whole: Option<Weak<dyn Whole>>,
    /// Until when a ticket in this slot may get a message.
    wanted: HashMap<u16, Instant>,
}

impl Receiver {
    fn connection(&self) -> Option<Arc<dyn Whole>> {
        self.whole.as_ref()?.upgrade()
    }
}

impl Receivers {
    /// Makes this connection the latest connection of its receiver.
    pub(super) fn begin(&self, receiver: u64, whole: Weak<dyn Whole>) {
        let now = Clock::BOOT.now();
        let mut all = self.all();
        all.retain(|_, other| {
            other.wanted.retain(|_, until| *until > now);
            other.connection().is_some() || !other.wanted.is_empty()
        });
        all.entry(receiver).or_default().whole = Some(whole);
    }

    /// The connections of all receivers.
    pub(super) fn connections(&self) -> Vec<Arc<dyn Whole>> {
        self.all()
            .values()
            .filter_map(Receiver::connection)
            .collect()
    }

    /// Notes that a ticket of this receiver may be in this slot. `ticket` is the time that the
    /// ticket lives without a further renewal.
    pub(super) fn want(&self, receiver: u64, slot: u16, ticket: Duration) {
        let until = Clock::BOOT.now().after(ticket).after(LINGER);
        let mut all = self.all();
        let wanted = &mut all.entry(receiver).or_default().wanted;
        let known = wanted.entry(slot).or_insert(until);
        *known = until.max(*known);
    }

    pub(super) fn wants(&self, receiver: u64, slot: u16) -> bool {
        let now = Clock::BOOT.now();
        let all = self.all();
        let until = all.get(&receiver).and_then(|of| of.wanted.get(&slot));
        until.is_some_and(|until| *until > now)
    }

    /// Notes that a ticket of this client is in `slot`. `ticket` is the time that the ticket
    /// lives without a further renewal. `at` is the node that serves the slot, or `None` if no
    /// connection can listen there yet. Returns whether every connection that may have sent the
    /// ticket's request listens at this node. If a connection does not listen there, this call
    /// starts its subscription.
    pub(super) fn still_wants(&self, slot: u16, ticket: Duration, at: Option<&Address>) -> bool {
        let now = Clock::BOOT.now();
        let until = now.after(ticket).after(LINGER);
        let mut connections = Vec::new();
        for receiver in self.all().values_mut() {
            if let Some(wanted) = receiver.wanted.get_mut(&slot)
                && *wanted > now
            {
                *wanted = until.max(*wanted);
                connections.extend(receiver.connection());
            }
        }
        let Some(at) = at else { return false };
        // The mutex is not locked during these calls, because they run other code.
        let mut all_hear = true;
        for connection in connections {
            all_hear &= connection.hears_at(slot, at);
        }
        all_hear
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, Receiver>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
