//! The lanes of one name, as plain data.
//!
//! With [`Fair::Local`](crate::Fair::Local) a name has one lane, which every task may join.
//!
//! With [`Fair::Strict`](crate::Fair::Strict) each *group* of requests has a lane, and takes one
//! ticket. A request that comes while this process neither asks the store for the name nor passes the
//! name's lock on in memory is a group of its own, and is sent at once. Other requests gather, and are
//! the next group. When the answer is there, or the lock is released, their leader asks for all of
//! them. If each of them took a ticket of its own at that moment, these tickets would follow right
//! behind each other. So one ticket that they use one after the other keeps the same order. To the
//! store and to other processes it is an ordinary ticket, so whatever is lost, it excludes as one.
//!
//! The order is lost with the ticket. If the ticket ends early or may not be used any more, those of
//! the group that still wait take a ticket at the end of the line. Tickets of their own would have
//! kept their places. [`Fair::Strict`](crate::Fair::Strict) lists the reasons.
//!
//! A request that may not join the group that gathers, because the group is full or has another ttl,
//! begins the next one behind it. A request that shares no ticket does not wait for a group, so it may
//! come before it.
//!
//! So a request waits for at most about one answer before it is sent. If this answer takes longer
//! than [`ANSWERED_WITHIN`], for example because the task that waits for it is not polled, the group
//! does not wait for it any more.

use std::collections::VecDeque;
use std::time::Duration;

use super::lane::{Go, Lane, MOST_HAND_OVERS};
use crate::clock::Instant;
use crate::sync::oneshot;

/// How long a group waits for the answer to the group before it. An answer nearly always comes sooner.
/// While a store is slower than this, a few more requests are in flight.
const ANSWERED_WITHIN: Duration = Duration::from_millis(200);

/// How long a group waits while the lock is passed on in memory, and then released. A hand-over in
/// memory takes microseconds, unless the holders keep the lock for longer.
const PASSED_ON_WITHIN: Duration = Duration::from_millis(2);

/// See the [module](self).
pub(super) struct Groups<H> {
    /// The oldest lane, with its number. Most names have one lane, and it is not on the heap.
    oldest: Option<(u64, Lane<H>)>,
    /// The other lanes with their numbers, in order. Empty if there is no oldest one.
    younger: VecDeque<(u64, Lane<H>)>,
    /// What the next group waits for, and until when.
    busy: Option<(Busy, Instant)>,
    /// The group that waits for this, or that is about to ask. Only this one may be joined.
    gathering: Option<Gathering>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Busy {
    /// The leader of this lane asks the store for its first ticket.
    Asks(u64),
    /// The tasks of this lane pass their ticket on, or the last of them releases it.
    PassesOn(u64),
}

struct Gathering {
    number: u64,
    /// Tells its leader that it may ask. `None` until the leader waits for this.
    go: Option<Go>,
}

/// How the leader of a group learns that it may ask the store.
pub(super) struct ToAsk {
    pub(super) told: oneshot::Receiver<()>,
    /// It may ask at this time in any case.
    pub(super) until: Instant,
    /// What an earlier leader of the group waits for. It was replaced.
    pub(super) earlier: Option<Go>,
}

impl<H> Groups<H> {
    /// A name with this lane.
    pub(super) fn of(number: u64, lane: Lane<H>) -> Self {
        Self {
            oldest: Some((number, lane)),
            ..Self::default()
        }
    }

    /// Adds the lane of a new group, which has a leader.
    pub(super) fn begin(&mut self, number: u64, lane: Lane<H>, now: Instant) {
        if self.busy.is_none() {
            // The oldest ticket is the one that may be held.
            let passes_on = self.oldest.as_ref().filter(|(_, lane)| lane.passes_on());
            self.busy = Some(match passes_on {
                Some(&(lane, _)) => (Busy::PassesOn(lane), now.after(PASSED_ON_WITHIN)),
                None => (Busy::Asks(number), now.after(ANSWERED_WITHIN)),
            });
        }
        match self.oldest {
            None => self.oldest = Some((number, lane)),
            Some(_) => self.younger.push_back((number, lane)),
        }
        let asks = self
            .busy
            .is_some_and(|(busy, _)| busy == Busy::Asks(number));
        if self.gathering.is_none() && !asks {
            self.gathering = Some(Gathering { number, go: None });
        }
    }

    /// The group that gathers, if a request with this ttl may join it.
    pub(super) fn gathering(&mut self, ttl: Duration) -> Option<(u64, &mut Lane<H>)> {
        let number = self.gathering.as_ref()?.number;
        let lane = self.lane(number)?;
        let has_room = lane.line.len() + 1 < MOST_HAND_OVERS;
        (has_room && lane.ttl == ttl).then_some((number, lane))
    }

    /// The group that gathers cannot be joined. It asks now, and the next group waits for its answer.
    /// Returns how to tell its leader.
    pub(super) fn close(&mut self, now: Instant) -> Option<Go> {
        let closed = self.gathering.take()?;
        self.busy = Some((Busy::Asks(closed.number), now.after(ANSWERED_WITHIN)));
        closed.go
    }

    /// No group waits any more. Returns how to tell the leader of the one that did.
    pub(super) fn end(&mut self) -> Option<Go> {
        self.gathering.take()?.go
    }

    /// Whether the leader of this lane has not been told yet that it may ask the store.
    pub(super) fn gathers(&self, number: u64) -> bool {
        (self.gathering.as_ref()).is_some_and(|gathering| gathering.number == number)
    }

    /// Whether the leader of this lane has to wait before it asks the store. If not, its group is not
    /// joined any more.
    pub(super) fn wait_to_ask(&mut self, number: u64) -> Option<ToAsk> {
        let gathering = (self.gathering.as_mut()).filter(|next| next.number == number)?;
        match self.busy {
            Some((busy, until)) if busy != Busy::Asks(number) => {
                let (go, told) = oneshot::channel();
                let earlier = gathering.go.replace(go);
                Some(ToAsk {
                    told,
                    until,
                    earlier,
                })
            }
            _ => {
                self.gathering = None;
                None
            }
        }
    }

    /// If what the next group waits for is over, it is the turn of this group. Returns how to tell its
    /// leader.
    pub(super) fn settle(&mut self, now: Instant) -> Option<Go> {
        let (busy, until) = self.busy?;
        let goes_on = match busy {
            Busy::Asks(number) => {
                let leader = self.lane(number).and_then(|lane| lane.leader.as_ref());
                leader.is_some_and(|leader| leader.ticket.is_none())
            }
            Busy::PassesOn(_) => true, // until `passed_on`
        };
        if goes_on && now < until {
            return None;
        }
        self.busy = None;
        let waits = |next: &&mut Gathering| busy != Busy::Asks(next.number);
        match self.gathering.as_mut().filter(waits) {
            Some(next) => {
                self.busy = Some((Busy::Asks(next.number), now.after(ANSWERED_WITHIN)));
                next.go.take()
            }
            None => {
                self.gathering = None;
                None
            }
        }
    }

    /// The last user of this lane's ticket has released it.
    pub(super) fn passed_on(&mut self, number: u64, now: Instant) -> Option<Go> {
        let (busy, until) = self.busy.as_mut()?;
        if *busy == Busy::PassesOn(number) {
            *until = now;
        }
        self.settle(now)
    }

    /// Whether a group may wait, so that a change of a lane may end this.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.is_some()
    }

    pub(super) fn lane(&mut self, number: u64) -> Option<&mut Lane<H>> {
        let at = self.position(number);
        match &mut self.oldest {
            Some((oldest, lane)) if *oldest == number => Some(lane),
            _ => self.younger.get_mut(at?).map(|(_, lane)| lane),
        }
    }

    /// Removes a lane that is not in use. If its group gathers, the next request begins another one.
    pub(super) fn remove(&mut self, number: u64) -> Option<Go> {
        if self
            .oldest
            .as_ref()
            .is_some_and(|(oldest, _)| *oldest == number)
        {
            self.oldest = self.younger.pop_front();
        } else if let Some(at) = self.position(number) {
            self.younger.remove(at);
        }
        let gathered = self.gathering.take_if(|next| next.number == number);
        gathered?.go
    }

    /// The lanes with their numbers, oldest first.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Lane<H>)> {
        let lanes = self.oldest.iter_mut().chain(&mut self.younger);
        lanes.map(|(number, lane)| (*number, lane))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.oldest.is_none()
    }

    /// Where this lane is among the younger ones.
    fn position(&self, number: u64) -> Option<usize> {
        let found = (self.younger).binary_search_by_key(&number, |(number, _)| *number);
        found.ok()
    }
}

impl<H> Default for Groups<H> {
    fn default() -> Self {
        Self {
            oldest: None,
            younger: VecDeque::new(),
            busy: None,
            gathering: None,
        }
    }
}
