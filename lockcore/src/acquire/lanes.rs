//! The queue inside one process: which of its tasks uses the ticket that the process holds, which tasks wait for it, and
//! which one asks the store for the next ticket. How to ask the store is in `pending`.
//!
//! There is a [`Lane`] per name. The task at its front asks the store: it is the *leader*. The others wait in memory. A
//! task that is done passes the ticket on to the next, as long as the bound of [`Fair::Local`] allows. At the bound the
//! next task becomes the leader and asks the store, so that other processes are served.
//!
//! A waiter is handed a [`Share`] of a ticket, or the part of the [`Leader`]. Both are values, and dropping one passes it
//! on. So a waiter may be dropped at any time: if it was handed nothing yet, sending to it fails and the next waiter is
//! tried; if it was handed something, that is dropped with it and passed on.
//!
//! A waiter may also stay and never be polled again: `select!` over `&mut future` does that. The lane takes back
//! a share after [a part of the ttl](crate::client::lease::COLLECTED_WITHIN), and replaces a leader that has no ticket
//! after a ttl.
//!
//! [`Fair::Local`]: crate::Fair::Local

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime;

use super::lane::{Lane, Moment, Next, Of, Parcel, Waiter, locked, take};
use super::pending::{Pace, Pending};
use crate::client::alarms::Alarm;
use crate::client::lease::Lease;
use crate::client::shared::{LeaseObserver, Shared};
use crate::client::tracked::Cleanup;
use crate::clock::Instant;
use crate::error::Error;
use crate::hash::Prehashed;
use crate::log::guarded;
use crate::name::Name;
use crate::options::Fair;
use crate::queue::MOST_TICKETS;
use crate::sync::{Mutex, MutexGuard, oneshot};

/// The lanes of one client.
pub(crate) struct Lanes {
    shared: Arc<Shared>,
    /// See [`Fair::Local`](crate::Fair::Local).
    bound: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lanes: Prehashed<Name, Lane<Handover>>,
    /// How many leaders there were so far.
    leaders: u64,
    /// The client is shut down: nobody joins and nobody waits.
    closed: bool,
}

/// The thing that a waiter is handed.
pub(crate) enum Handover {
    /// The lock.
    Share(Share),
    /// It is to ask the store.
    Leader(Leader),
    /// The store is in trouble, as the leader before it has found out.
    Refused(Error),
}

/// The part that a task gets when it arrives.
pub(crate) enum Arrived {
    Given(Handover),
    Waits(Waiting),
    /// This process holds the lock, for so long at most if the lease is not renewed.
    Busy(Option<Duration>),
    /// As many tasks wait as may.
    Crowded,
    /// It takes a ticket of its own: it asks for another ttl than the lane, or does not wait for the leader's answer.
    OwnTicket,
}

impl Lanes {
    pub(crate) fn new(shared: &Arc<Shared>) -> Arc<Self> {
        let bound = match shared.defaults.fair {
            Fair::Local(bound) => bound,
            Fair::Strict => Duration::ZERO,
        };
        Arc::new_cyclic(|lanes: &Weak<Self>| {
            shared.observe(lanes.clone());
            Self {
                shared: Arc::clone(shared),
                bound,
                state: Mutex::default(),
            }
        })
    }

    /// Joins the ticket that the process holds, goes to the store, or stands in line.
    pub(crate) fn arrive(
        self: &Arc<Self>,
        name: &Name,
        ttl: Duration,
        exclusive: bool,
        wait: bool,
        now: Instant,
    ) -> Arrived {
        let mut guard = self.state();
        if guard.closed {
            return Arrived::Given(Handover::Refused(Error::shut_down()));
        }
        let at = self.moment(now);
        let state = &mut *guard;
        let leaders = &mut state.leaders;
        let Some(lane) = state.lanes.get_mut(name) else {
            let mut lane = Lane::new(ttl, self.shared.op_timeout);
            let number = lane.begin_leader(exclusive, at.now, leaders);
            state.lanes.insert(name.clone(), lane);
            let leader = Leader::new(self, name, exclusive, number);
            return Arrived::Given(Handover::Leader(leader));
        };
        if lane.ttl != ttl {
            return Arrived::OwnTicket;
        }
        lane.count_out();
        lane.end_late_leader(at.now);
        let first = lane.line.is_empty() && lane.leader.is_none();
        if first && let Some((lease, hand_overs)) = lane.serve(exclusive, at) {
            return Arrived::Given(Handover::Share(Share::new(self, lease, hand_overs)));
        }
        if !wait {
            // The store need not be asked when this process holds the lock.
            if let Some(remaining) = lane.excludes(exclusive, at.now) {
                return Arrived::Busy(Some(remaining));
            }
            // A reader does not pass a writer, which may not be in the store's line yet.
            let leader = lane.leader.as_ref();
            let others_wait = leader.is_some_and(|leader| exclusive || !leader.shared);
            if others_wait || !lane.line.is_empty() {
                return Arrived::Busy(None);
            }
            if leader.is_some() {
                // Only the store knows whether there is room for both.
                return Arrived::OwnTicket;
            }
        }
        if first && !lane.is_worth_waiting_for(exclusive, at) {
            let number = lane.begin_leader(exclusive, at.now, leaders);
            let leader = Leader::new(self, name, exclusive, number);
            return Arrived::Given(Handover::Leader(leader));
        }
        // A waiter that gave up may be counted twice here. That is near enough.
        if lane.line.len().saturating_sub(lane.gone) >= MOST_TICKETS {
            return Arrived::Crowded;
        }
        let (handover, given) = oneshot::channel();
        lane.line.push_back(Waiter {
            exclusive,
            since: at.now,
            runtime: runtime::Handle::try_current().ok().map(|here| here.id()),
            handover,
        });
        if !lane.set_alarms(self.bound, |at| self.ring(name, at)) {
            // The time has just come.
            drop(guard);
            self.change(name, |_| ());
        }
        Arrived::Waits(Waiting {
            lanes: Arc::clone(self),
            name: name.clone(),
            given,
            over: false,
        })
    }

    /// Whether no task holds, asks for or waits for anything.
    #[cfg(all(test, lockcore_loom))]
    pub(crate) fn is_empty(&self) -> bool {
        self.state().lanes.is_empty()
    }

    /// How many wait in memory for a name.
    pub(crate) fn waiting(&self, name: &Name) -> u32 {
        self.state().lanes.get(name).map_or(0, |lane| {
            let waits = |waiter: &&Waiter<Handover>| !waiter.handover.is_closed();
            lane.line.iter().filter(waits).count() as u32 // far fewer than 2³²
        })
    }

    /// No further task may use the ticket of this lease. Tasks that wait for it need not wait for its user.
    pub(crate) fn retire(self: &Arc<Self>, lease: &Arc<Lease>) {
        let now = self.shared.clock.now();
        self.change(&lease.request.name, |lane| {
            lane.retire(lease);
            // The leader has lost its ticket. It asks anew, if it is polled.
            if let Some(leader) = lane.leader_with(lease) {
                (leader.ticket, leader.since) = (None, now);
            }
        });
    }

    /// No further task may use the ticket of this lease, if it has only one user now. Returns whether it has.
    pub(crate) fn retire_if_only(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        let mut is_only = false;
        self.change(&lease.request.name, |lane| {
            is_only = lane.retire_if_only(lease);
        });
        is_only
    }

    /// A leader has a ticket in the store's line.
    pub(crate) fn in_line(&self, number: u64, lease: &Arc<Lease>) {
        let mut state = self.state();
        let lane = state.lanes.get_mut(&lease.request.name);
        if let Some(leader) = lane.and_then(|lane| lane.leader_of(number)) {
            leader.ticket = Some(Arc::clone(lease));
        }
    }

    /// When the leader with this number may ask a store that has refused the one before it.
    pub(crate) fn pace(&self, name: &Name, number: u64) -> Option<Pace> {
        let mut state = self.state();
        let lane = state.lanes.get_mut(name)?;
        lane.leader_of(number)?;
        lane.pace
    }

    /// A leader was refused by a store that has no line, and asks again at this pace.
    pub(crate) fn asks_again(&self, name: &Name, number: u64, pace: Pace) {
        let mut state = self.state();
        let lane = state.lanes.get_mut(name);
        if let Some(lane) = lane
            && let Some(leader) = lane.leader_of(number)
        {
            // It is not late, because it has had an answer.
            leader.since = pace.next;
            lane.pace = Some(pace);
        }
    }

    /// A ticket of this process is being downgraded: waiters need not wait for it to be passed on.
    pub(crate) fn mode_changed(self: &Arc<Self>, lease: &Arc<Lease>) {
        self.change(&lease.request.name, |_| ());
    }

    /// One use of a ticket is over. Returns whether that was the last, so that the ticket is to be released at the store.
    fn leave(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        let mut ours = false;
        let leave = |lane: &mut Lane<Handover>| lane.leave(lease);
        self.change_and_tell(&lease.request.name, leave, |unused| {
            match Arc::ptr_eq(&unused, lease) {
                true => ours = true,
                false => self.shared.clean_up(Cleanup::of_held(&unused)),
            }
        });
        ours
    }

    /// Changes a lane, and hands to the next waiters what became free.
    fn change(self: &Arc<Self>, name: &Name, change: impl FnOnce(&mut Lane<Handover>)) {
        // A ticket can be left without users when it was offered to a waiter that had given up.
        self.change_and_tell(name, change, |unused| {
            self.shared.clean_up(Cleanup::of_held(&unused));
        });
    }

    /// As [`change`](Self::change); calls `tell` with each ticket that has no users any more.
    ///
    /// This is a loop, because a chain of drops would recurse as deep as there are waiters that gave up.
    fn change_and_tell(
        self: &Arc<Self>,
        name: &Name,
        change: impl FnOnce(&mut Lane<Handover>),
        mut tell: impl FnMut(Arc<Lease>),
    ) {
        let mut given = VecDeque::new();
        if let Some(unused) = self.advance_after(name, change, &mut given) {
            tell(unused);
        }
        // In the order of the line.
        while let Some(next) = given.pop_front() {
            let (waiter, gift) = match next {
                Next::Given(waiter, gift) => (waiter, gift),
                // Its drop passes it on.
                Next::TakenBack(handover) => {
                    drop(handover);
                    continue;
                }
            };
            let handover = match gift.of {
                Of::Share(lease, hand_overs) => {
                    Handover::Share(Share::new(self, lease, hand_overs))
                }
                Of::Leader(number) => {
                    Handover::Leader(Leader::new(self, name, waiter.exclusive, number))
                }
            };
            *locked(&gift.parcel) = Some(handover);
            // Outside of the mutex, because this runs wakers, which are users' code. If one panics, the waiter has its
            // parcel all the same, or the parcel is taken back.
            let mut unsent = None;
            guarded(|| unsent = waiter.handover.send(gift.parcel).err());
            let Some(handover) = unsent.and_then(|parcel| take(&parcel)) else {
                continue;
            };
            let take_back = |lane: &mut Lane<Handover>| match handover {
                Handover::Share(mut share) => {
                    share.open = false;
                    lane.leave(&share.lease);
                }
                Handover::Leader(mut leader) => {
                    leader.open = false;
                    lane.end_leader(leader.number);
                }
                Handover::Refused(_) => {}
            };
            if let Some(unused) = self.advance_after(name, take_back, &mut given) {
                tell(unused);
            }
        }
    }

    /// Changes a lane, takes back what is overdue, and serves the line from its front. Returns a ticket that has no
    /// users any more.
    fn advance_after(
        self: &Arc<Self>,
        name: &Name,
        change: impl FnOnce(&mut Lane<Handover>),
        given: &mut VecDeque<Next<Handover>>,
    ) -> Option<Arc<Lease>> {
        let mut state = self.state();
        let state = &mut *state;
        let lane = state.lanes.get_mut(name)?;
        change(lane);
        while !lane.line.is_empty() || !lane.given.is_empty() {
            let at = self.moment(self.shared.clock.now());
            lane.take_back_overdue(at.now, given);
            lane.advance(at, &mut state.leaders, given);
            if lane.set_alarms(self.bound, |at| self.ring(name, at)) {
                break;
            }
        }
        let unused = lane.take_unused();
        if lane.is_idle() {
            state.lanes.remove(name);
        }
        unused
    }

    fn moment(&self, now: Instant) -> Moment {
        Moment {
            now,
            bound: self.bound,
            epoch: self.shared.epoch(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex. If that changes, the lanes are still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets an alarm that serves a lane again. Returns whether it is still to ring.
    fn ring(self: &Arc<Self>, name: &Name, at: Instant) -> (Alarm, bool) {
        let mut alarm = self.shared.alarm(at);
        let waker = Waker::from(Arc::new(AtBound {
            lanes: Arc::downgrade(self),
            name: name.clone(),
        }));
        let rung = Pin::new(&mut alarm).poll(&mut Context::from_waker(&waker));
        (alarm, rung.is_pending())
    }
}

impl LeaseObserver for Lanes {
    fn close(self: Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        let lines: Vec<_> = state
            .lanes
            .values_mut()
            .map(|lane| std::mem::take(&mut lane.line))
            .collect();
        drop(state);
        // Dropping the senders tells the waiters. It runs wakers, so the mutex must be free.
        drop(lines);
    }

    fn lost(self: Arc<Self>, lease: &Arc<Lease>) {
        self.retire(lease);
    }

    fn asked_back(self: Arc<Self>, lease: &Arc<Lease>) {
        self.retire(lease);
    }

    // The next in line becomes the leader.
    fn recalled(self: Arc<Self>, lease: &Arc<Lease>) {
        self.change(&lease.request.name, |lane| {
            if lane.leader_with(lease).is_some() {
                lane.leader = None;
            }
        });
    }
}

/// Serves a lane again. The keeper rings it when the bound is reached, or something is overdue.
struct AtBound {
    lanes: Weak<Lanes>,
    name: Name,
}

impl Wake for AtBound {
    fn wake(self: Arc<Self>) {
        if let Some(lanes) = self.lanes.upgrade() {
            lanes.change(&self.name, |_| ());
        }
    }
}

/// One use of a ticket that this process holds. Dropping it passes the ticket on, or hands it to the keeper for
/// release.
pub(crate) struct Share {
    lanes: Arc<Lanes>,
    lease: Arc<Lease>,
    hand_overs: u16,
    /// It has not ended yet.
    open: bool,
}

impl Share {
    fn new(lanes: &Arc<Lanes>, lease: Arc<Lease>, hand_overs: u16) -> Self {
        Self {
            lanes: Arc::clone(lanes),
            lease,
            hand_overs,
            open: true,
        }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// How many uses of the ticket there were before this one.
    pub(crate) fn hand_overs(&self) -> u16 {
        self.hand_overs
    }

    /// Ends the use without any effect: it belongs to the process that was forked.
    pub(crate) fn disown(mut self) {
        self.open = false;
    }

    /// Ends the use. Returns whether the caller has to release the ticket at the store.
    pub(crate) fn leave(mut self) -> bool {
        self.open = false;
        self.lanes.leave(&self.lease)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.open && !self.lanes.shared.is_forked() && self.lanes.leave(&self.lease) {
            self.lanes.shared.clean_up(Cleanup::of_held(&self.lease));
        }
    }
}

/// The part of asking the store on behalf of a lane. Dropping it makes the next in line the leader, with the ticket in
/// the store's line if there is one.
pub(crate) struct Leader {
    lanes: Arc<Lanes>,
    name: Name,
    exclusive: bool,
    /// Which leader of the lane this is.
    pub(crate) number: u64,
    /// The ticket, once it was asked for.
    pub(crate) pending: Option<Pending>,
    /// It has neither ended nor been passed on.
    open: bool,
}

impl Leader {
    fn new(lanes: &Arc<Lanes>, name: &Name, exclusive: bool, number: u64) -> Self {
        Self {
            lanes: Arc::clone(lanes),
            name: name.clone(),
            exclusive,
            number,
            pending: None,
            open: true,
        }
    }

    /// The store has granted the ticket: from here on other tasks may use it as well. Gives the lease back if this
    /// leader was late and has been replaced: then the ticket is the caller's alone.
    pub(crate) fn granted(mut self, lease: Arc<Lease>) -> Result<Share, Arc<Lease>> {
        self.open = false;
        let now = self.lanes.shared.clock.now();
        let (number, mut begun) = (self.number, false);
        self.lanes.change(&self.name, |lane| {
            begun = lane.begin(&lease, number, now);
        });
        match begun {
            true => Ok(Share::new(&self.lanes, lease, 0)),
            false => Err(lease),
        }
    }

    /// The store is in trouble. A waiter that has waited for an operation timeout gets the same error, as it would have
    /// by asking itself. The others go on: the next becomes the leader.
    pub(crate) fn failed(mut self, error: &Error) {
        let Some(error) = error.as_refusal() else {
            return;
        };
        let long_ago = self
            .lanes
            .shared
            .clock
            .now()
            .before(self.lanes.shared.op_timeout);
        let mut refused = VecDeque::new();
        self.open = false;
        let number = self.number;
        self.lanes.change(&self.name, |lane| {
            // A leader that was replaced does not speak for the line.
            if lane.leader_of(number).is_some() {
                let (old, young) = lane.line.drain(..).partition(|w| w.since <= long_ago);
                (refused, lane.line) = (old, young);
                lane.end_leader(number);
            }
        });
        for waiter in refused {
            let refusal = Parcel::new(Mutex::new(Some(Handover::Refused(error.clone()))));
            // This runs wakers. If one panics, the waiters behind it get the error all the same.
            guarded(|| drop(waiter.handover.send(refusal)));
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.open || self.lanes.shared.is_forked() {
            return;
        }
        self.open = false;
        // The ticket is passed on too, because a new one would begin at the end of the store's line.
        let mut pending = self.pending.take().filter(Pending::is_in_line);
        let lanes = &self.lanes;
        while let Some(place) = pending.take() {
            let now = self.lanes.shared.clock.now();
            let mut state = lanes.state();
            let Some(lane) = state.lanes.get_mut(&self.name) else {
                break;
            };
            // Only to a waiter that can use it: a writer has no use for a reader's ticket, and a waiter in another
            // runtime would not hear its wake-up.
            let heir = lane.line.front().is_some_and(|heir| {
                heir.exclusive == self.exclusive && place.is_heard(heir.runtime)
            });
            let is_ours = lane.leader_of(self.number).is_some();
            let Some(heir) = (heir && is_ours).then(|| lane.line.pop_front()).flatten() else {
                break;
            };
            let parcel = lane.new_parcel(now);
            drop(state);
            let mut leader = Leader::new(&self.lanes, &self.name, self.exclusive, self.number);
            leader.pending = Some(place);
            *locked(&parcel) = Some(Handover::Leader(leader));
            let mut unsent = None;
            guarded(|| unsent = heir.handover.send(parcel).err());
            let Some(parcel) = unsent else {
                // Sets the alarm for the case that the heir is not polled.
                return lanes.change(&self.name, |_| ());
            };
            if let Some(Handover::Leader(mut leader)) = take(&parcel) {
                leader.open = false;
                pending = leader.pending.take();
            }
        }
        let number = self.number;
        let end = |lane: &mut Lane<Handover>| lane.end_leader(number);
        lanes.change(&self.name, end);
    }
}

/// A place in the line of this process. Resolves to what the waiter is handed.
///
/// If it is dropped before that, it leaves the line. If it is dropped after that, the next waiter gets the hand-over.
pub(crate) struct Waiting {
    lanes: Arc<Lanes>,
    name: Name,
    given: oneshot::Receiver<Parcel<Handover>>,
    over: bool,
}

impl Future for Waiting {
    /// `None`: what it was handed was taken back, because it was not polled for too long.
    type Output = Option<Handover>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Handover>> {
        let given = Pin::new(&mut self.given).poll(cx);
        given.map(|given| {
            self.over = true;
            match given {
                Ok(parcel) => take(&parcel),
                // The sender is dropped when the client is shut down.
                Err(_) => Some(Handover::Refused(Error::shut_down())),
            }
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.over || self.lanes.shared.is_forked() {
            return;
        }
        self.given.close();
        if let Some(lane) = self.lanes.state().lanes.get_mut(&self.name) {
            lane.gone += 1;
            lane.count_out();
        }
    }
}
