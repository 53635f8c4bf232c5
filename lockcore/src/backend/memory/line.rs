//! The tickets of one name: the [rule](crate::queue), and the times that the store adds to it.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::shown::ASK;
use crate::backend::{Enqueued, Renewed, Resize, ResizeOp, ResizeOutcome};
use crate::clock::Instant;
use crate::queue::Queue;
use crate::request::{FULL, Id, Request};

/// The tickets of one name.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) queue: Queue<Holder>,
    /// No ticket expires before this time, so until then the store does not search for expired
    /// tickets. If a renewal moves the end of a ticket to a later time, this time stays. When it
    /// has come, the store computes it again.
    pub(super) first_end: u64,
    /// The last change of the stored capacity.
    pub(super) change: Option<Id>,
}

/// The data of a ticket that the [queue](crate::queue) does not need.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    /// The request of the ticket, for its id and its owner.
    pub(super) request: Arc<Request>,
    pub(super) receiver: u64,
    /// See [`Connection::ask_back`](crate::backend::Connection::ask_back).
    pub(super) ask: Option<Arc<str>>,
}

impl Holder {
    /// The owner of the ticket, and the ask-back behind it.
    pub(super) fn owner(&self) -> String {
        match &self.ask {
            Some(ask) => format!("{}{ASK}{ask}", self.request.owner),
            None => self.request.owner.to_string(),
        }
    }
}

impl Line {
    /// Whether the line can be dropped: there are no tickets, and no capacity is stored.
    pub(super) fn is_over(&self) -> bool {
        self.queue.is_empty() && self.queue.stored().is_none()
    }

    /// Reads or changes the stored capacity. Returns how many waiters hold now because of the
    /// change. Call [`expire`](Self::expire) first.
    pub(super) fn resize(&mut self, resize: &Resize) -> (ResizeOutcome, usize) {
        let tickets = self.queue.tickets().map(|(ticket, _)| ticket.capacity);
        if let Some(outcome) = resize.outcome(self.queue.stored(), self.change, tickets) {
            return (outcome, 0);
        }
        let ResizeOp::Set { capacity, .. } = resize.op else {
            return (ResizeOutcome::Applied, 0);
        };
        self.change = Some(resize.id);
        (ResizeOutcome::Applied, self.queue.resize(capacity))
    }

    /// Whether a ticket may have expired.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.first_end <= now.as_nanos()
    }

    /// Notes the end of a ticket that comes into the line.
    pub(super) fn note_end(&mut self, end: u64) {
        self.first_end = match self.queue.is_empty() {
            true => end,
            false => self.first_end.min(end),
        };
    }

    /// Removes the expired tickets. Returns how many waiters hold now because of the removal.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        if !self.is_due(now) {
            return 0;
        }
        let newly = self.queue.expire(now.as_nanos());
        let ends = self.queue.tickets().map(|(ticket, _)| ticket.expires_at);
        self.first_end = ends.min().unwrap_or(u64::MAX);
        newly
    }

    /// The ticket that a new ticket stands right behind, if its request asks for that. The core does
    /// not ask: a hand-over here is a function call already.
    pub(super) fn ahead_of(&self, request: &Request, receiver: u64) -> Option<Id> {
        let (ahead, _) = self
            .queue
            .tickets()
            .next_back()
            .filter(|_| request.name_ahead)?;
        let ours = ahead.payload.receiver == receiver;
        let full = ahead.permits == FULL.get() && request.wants_all();
        (ours && full).then_some(ahead.id)
    }

    /// Answers an enqueue whose ticket is there, and renews the ticket.
    pub(super) fn ask_again(&mut self, request: &Request, now: Instant) -> Enqueued {
        match self.renew(request, now) {
            Renewed::Granted { valid_for } | Renewed::AskedBack { valid_for, .. } => {
                Enqueued::Granted {
                    ticket: self.number(request),
                    valid_for,
                }
            }
            Renewed::Waiting {
                valid_for,
                recheck_in,
                ..
            } => Enqueued::Waiting {
                ticket: self.number(request),
                valid_for,
                recheck_in,
                ahead: None,
            },
            Renewed::Lost | Renewed::Failed => Enqueued::Gone,
        }
    }

    pub(super) fn renew(&mut self, request: &Request, now: Instant) -> Renewed {
        let Some((ticket, holds)) = self.queue.find(request.id) else {
            return Renewed::Lost;
        };
        ticket.expires_at = now.after(request.ttl).as_nanos();
        // A renewal may also bring the end nearer.
        self.first_end = self.first_end.min(ticket.expires_at);
        let valid_for = request.ttl;
        if holds {
            match &ticket.payload.ask {
                Some(_) => Renewed::holding(valid_for, &ticket.payload.owner()),
                None => Renewed::Granted { valid_for },
            }
        } else {
            Renewed::Waiting {
                valid_for,
                recheck_in: recheck_in(&self.queue, request.id, now),
                grace: None,
            }
        }
    }

    /// Whether the ticket of this request holds, and the request asks for a lease that ends earlier
    /// than the present one. The first waiter does not know this.
    pub(super) fn ends_sooner(&mut self, request: &Request, now: Instant) -> bool {
        let end = now.after(request.ttl).as_nanos();
        let found = self.queue.find(request.id);
        found.is_some_and(|(ticket, holds)| holds && end < ticket.expires_at)
    }

    pub(super) fn number(&mut self, request: &Request) -> u64 {
        self.queue
            .find(request.id)
            .map_or(0, |(ticket, _)| ticket.number)
    }
}

/// How long until a waiter must recheck. Only the first waiter in line must notice that a holder's
/// lease has expired. The recheck of this waiter removes the holder's ticket, and wakes the others.
/// See also [`Wakes::tell_first`](super::wakes::Wakes::tell_first).
pub(super) fn recheck_in(queue: &Queue<Holder>, id: Id, now: Instant) -> Option<Duration> {
    queue
        .is_first_in_line(id)
        .then(|| first_expiry(queue, now))
        .flatten()
}

pub(super) fn first_expiry(queue: &Queue<Holder>, now: Instant) -> Option<Duration> {
    let first = queue.holders().map(|ticket| ticket.expires_at).min()?;
    Some(now.until(Instant::from_nanos(first)))
}
