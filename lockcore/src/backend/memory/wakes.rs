//! The wake-ups of one request. They are sent after the mutex of the store is unlocked.

use std::collections::HashMap;
use std::sync::Weak;

use super::line::{Holder, first_expiry};
use crate::backend::{EventSink, News, Wake};
use crate::clock::Instant;
use crate::queue::{NoTicket, Queue};
use crate::request::Id;

/// The wake-ups and rechecks of one request. The drop of this value sends them. The value is
/// declared before the mutex guard, so it is dropped after the mutex is unlocked.
pub(super) struct Wakes {
    pub(super) to: Vec<(Weak<EventSink>, News)>,
    /// This ticket needs no wake-up: the answer to its own request says that it holds.
    asker: Id,
}

impl Wakes {
    pub(super) fn but(asker: Id) -> Self {
        Self {
            to: Vec::new(),
            asker,
        }
    }

    /// Adds wake-ups for the last `newly` holders.
    pub(super) fn collect(
        &mut self,
        newly: usize,
        queue: &Queue<Holder>,
        receivers: &HashMap<u64, Weak<EventSink>>,
    ) {
        if newly == 0 {
            return;
        }
        let holders = queue.holders();
        let known = holders.len() - newly;
        for ticket in holders.skip(known) {
            if let Some(events) = receivers.get(&ticket.payload.receiver)
                && ticket.id != self.asker
            {
                let wake = Wake {
                    id: ticket.id,
                    ticket: ticket.number,
                };
                self.to.push((Weak::clone(events), News::Granted(wake)));
            }
        }
    }

    /// Adds a recheck for the first waiter, which does not know when a holder's lease ends: it is
    /// the first because another waiter has left, or a holder has asked for a shorter lease.
    pub(super) fn tell_first(
        &mut self,
        queue: &Queue<Holder>,
        receivers: &HashMap<u64, Weak<EventSink>>,
        now: Instant,
    ) {
        if let Some(first) = queue.first_in_line()
            && let Some(events) = receivers.get(&first.payload.receiver)
            && let Some(after) = first_expiry(queue, now)
        {
            let news = News::Recheck(first.id, after);
            self.to.push((Weak::clone(events), news));
        }
    }

    /// Tells the client of the only holder, if it lingers, and the request with this outcome waits behind
    /// it alone, or was refused.
    pub(super) fn tell_lingering(
        &mut self,
        outcome: &Result<(u64, bool), NoTicket>,
        queue: &Queue<Holder>,
        receivers: &HashMap<u64, Weak<EventSink>>,
    ) {
        if !matches!(outcome, Ok((_, true)))
            && queue.tickets().len() <= 2
            && queue.holders().len() == 1
            && let Some(holder) = queue.holders().next()
            && holder.payload.request.lingers
            && let Some(events) = receivers.get(&holder.payload.receiver)
        {
            let news = News::Wanted(holder.id);
            self.to.push((Weak::clone(events), news));
        }
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        for (events, news) in self.to.drain(..) {
            if let Some(events) = events.upgrade() {
                events.tell(news);
            }
        }
    }
}
