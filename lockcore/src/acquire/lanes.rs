//! The queue inside one process: who of its tasks uses the ticket that the process holds, who waits
//! for it, and who goes to the store for the next one. How to ask there is in `pending`.
//!
//! Per name there is a [`Lane`]. Its front goes to the store (it has the *errand*), the others wait
//! in memory. Who leaves a ticket passes it on, as long as the bound of [`Fair::Local`] allows; at
//! the bound the next in line is sent to the store, so that other processes get their turn.
//!
//! What is passed on, a [`Share`] of a ticket or an [`Errand`], is a value, and its drop passes it
//! on again. So it does not matter when a waiter is dropped: before it is given anything, the send
//! fails and the next is tried; after that, the value goes with the waiter and passes itself on.
//!
//! A waiter may also stay and never be polled again: `select!` over `&mut future` does that. What it
//! was given is then taken back after [a while](COLLECTED_WITHIN) and passed on, and an errand that
//! comes to nothing for a ttl is given to the next in line as well.
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
use super::pending::Pending;
use crate::client::alarms::Alarm;
use crate::client::lease::Lease;
use crate::client::shared::{LeaseObserver, Shared};
use crate::client::table::Cleanup;
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
    lanes: Prehashed<Name, Lane<Baton>>,
    /// Errands that were given out so far.
    errands: u64,
    /// The client is shut down: nobody joins and nobody waits.
    closed: bool,
}

/// What a waiter is given.
pub(crate) enum Baton {
    /// The lock.
    Share(Share),
    /// The store is to be asked.
    Errand(Errand),
    /// The store is in trouble; who asked before has found out.
    Refused(Error),
}

/// What happened to who came.
pub(crate) enum Arrived {
    Given(Baton),
    Waits(Waiting),
    /// Held by this process, for so long at most if nobody renews it.
    Busy(Option<Duration>),
    /// As many wait as may.
    Crowded,
    /// Takes a ticket of its own: unlike those in the lane, or not to wait for what they will find.
    Stranger,
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
            return Arrived::Given(Baton::Refused(Error::shut_down()));
        }
        let at = self.moment(now);
        let state = &mut *guard;
        let errands = &mut state.errands;
        let Some(lane) = state.lanes.get_mut(name) else {
            let mut lane = Lane::new(ttl, self.shared.op_timeout);
            let number = lane.begin_errand(exclusive, at.now, errands);
            state.lanes.insert(name.clone(), lane);
            let errand = Errand::new(self, name, exclusive, number);
            return Arrived::Given(Baton::Errand(errand));
        };
        if lane.ttl != ttl {
            return Arrived::Stranger;
        }
        lane.count_out();
        lane.end_late_errand(at.now);
        let first = lane.line.is_empty() && lane.errand.is_none();
        if first && let Some((lease, hand_overs)) = lane.serve(exclusive, at) {
            return Arrived::Given(Baton::Share(Share::new(self, lease, hand_overs)));
        }
        if !wait {
            // What the process itself is known to keep from us need not be asked for.
            if let Some(remaining) = lane.excludes(exclusive, at.now) {
                return Arrived::Busy(Some(remaining));
            }
            // A reader does not pass a writer, who may not be in line at the store yet.
            let errand = lane.errand.as_ref();
            let others_wait = errand.is_some_and(|errand| exclusive || !errand.shared);
            if others_wait || !lane.line.is_empty() {
                return Arrived::Busy(None);
            }
            if errand.is_some() {
                // What will come of that, only the store knows.
                return Arrived::Stranger;
            }
        }
        if first && !lane.is_worth_waiting_for(exclusive, at) {
            let number = lane.begin_errand(exclusive, at.now, errands);
            let errand = Errand::new(self, name, exclusive, number);
            return Arrived::Given(Baton::Errand(errand));
        }
        // Those who have gone since they were last counted out may be counted twice here; that is near enough.
        if lane.line.len().saturating_sub(lane.gone) >= MOST_TICKETS {
            return Arrived::Crowded;
        }
        let (baton, given) = oneshot::channel();
        lane.line.push_back(Waiter {
            exclusive,
            since: at.now,
            runtime: runtime::Handle::try_current().ok().map(|here| here.id()),
            baton,
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

    /// Whether nobody has, asks for or waits for anything.
    #[cfg(all(test, lockcore_loom))]
    pub(crate) fn is_empty(&self) -> bool {
        self.state().lanes.is_empty()
    }

    /// How many wait in memory for a name.
    pub(crate) fn waiting(&self, name: &Name) -> u32 {
        self.state().lanes.get(name).map_or(0, |lane| {
            let waits = |waiter: &&Waiter<Baton>| !waiter.baton.is_closed();
            lane.line.iter().filter(waits).count() as u32 // far fewer than 2³²
        })
    }

    /// A lease of this process is over, or not to be passed on any more: those that wait for it need not wait for
    /// its user.
    pub(crate) fn retire(self: &Arc<Self>, lease: &Arc<Lease>) {
        let now = self.shared.clock.now();
        self.change(&lease.request.name, |lane| {
            lane.retire(lease);
            // Its place in line is lost: its task asks anew, if it is polled.
            if let Some(errand) = lane.errand_with(lease) {
                (errand.ticket, errand.since) = (None, now);
            }
        });
    }

    /// An errand has a place in the store's line.
    pub(crate) fn in_line(&self, number: u64, lease: &Arc<Lease>) {
        let mut state = self.state();
        let lane = state.lanes.get_mut(&lease.request.name);
        if let Some(errand) = lane.and_then(|lane| lane.errand_of(number)) {
            errand.ticket = Some(Arc::clone(lease));
        }
    }

    /// A ticket of this process is on its way to the readers: nobody waits for it to be passed on any more.
    pub(crate) fn mode_changed(self: &Arc<Self>, lease: &Arc<Lease>) {
        self.change(&lease.request.name, |_| ());
    }

    /// One use of a ticket is over. Returns whether the ticket has no users any more and is to be
    /// released at the store.
    fn leave(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        let mut ours = false;
        let leave = |lane: &mut Lane<Baton>| lane.leave(lease);
        self.change_and_tell(&lease.request.name, leave, |unused| {
            match Arc::ptr_eq(&unused, lease) {
                true => ours = true,
                false => self.shared.clean_up(Cleanup::of_held(&unused)),
            }
        });
        ours
    }

    /// Changes a lane and gives whoever is next what that makes free.
    fn change(self: &Arc<Self>, name: &Name, change: impl FnOnce(&mut Lane<Baton>)) {
        // A ticket whose last user has left while it was offered to somebody who had gone.
        self.change_and_tell(name, change, |unused| {
            self.shared.clean_up(Cleanup::of_held(&unused));
        });
    }

    /// As [`change`](Self::change); tells of the tickets that nobody uses any more.
    ///
    /// A loop, however many of those in line have gone: a chain of drops would recurse.
    fn change_and_tell(
        self: &Arc<Self>,
        name: &Name,
        change: impl FnOnce(&mut Lane<Baton>),
        mut tell: impl FnMut(Arc<Lease>),
    ) {
        let mut given = VecDeque::new();
        if let Some(unused) = self.advance_after(name, change, &mut given) {
            tell(unused);
        }
        // The first in line first.
        while let Some(next) = given.pop_front() {
            let (waiter, gift) = match next {
                Next::Given(waiter, gift) => (waiter, gift),
                // Its drop passes it on.
                Next::TakenBack(baton) => {
                    drop(baton);
                    continue;
                }
            };
            let baton = match gift.of {
                Of::Share(lease, hand_overs) => Baton::Share(Share::new(self, lease, hand_overs)),
                Of::Errand(number) => {
                    Baton::Errand(Errand::new(self, name, waiter.exclusive, number))
                }
            };
            *locked(&gift.parcel) = Some(baton);
            // Outside of the mutex: this runs wakers. They are users' code; if one panics, the
            // parcel is there all the same, or is taken back.
            let mut unsent = None;
            guarded(|| unsent = waiter.baton.send(gift.parcel).err());
            let Some(baton) = unsent.and_then(|parcel| take(&parcel)) else {
                continue;
            };
            let take_back = |lane: &mut Lane<Baton>| match baton {
                Baton::Share(mut share) => {
                    share.open = false;
                    lane.leave(&share.lease);
                }
                Baton::Errand(mut errand) => {
                    errand.open = false;
                    lane.end_errand(errand.number);
                }
                Baton::Refused(_) => {}
            };
            if let Some(unused) = self.advance_after(name, take_back, &mut given) {
                tell(unused);
            }
        }
    }

    /// Changes a lane, takes back what is overdue, serves those in front that can be served then, and
    /// takes out what nobody uses: returns the ticket.
    fn advance_after(
        self: &Arc<Self>,
        name: &Name,
        change: impl FnOnce(&mut Lane<Baton>),
        given: &mut VecDeque<Next<Baton>>,
    ) -> Option<Arc<Lease>> {
        let mut state = self.state();
        let state = &mut *state;
        let lane = state.lanes.get_mut(name)?;
        change(lane);
        while !lane.line.is_empty() || !lane.given.is_empty() {
            let at = self.moment(self.shared.clock.now());
            lane.take_back_overdue(at.now, given);
            lane.advance(at, &mut state.errands, given);
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
        // No code that can panic runs under the mutex; should that change, the lanes are still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An alarm that has a lane looked at again, and whether it is still to ring.
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
    /// The client is shut down: who waits is told so, and nobody comes any more.
    fn close(self: Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        let lines: Vec<_> = state
            .lanes
            .values_mut()
            .map(|lane| std::mem::take(&mut lane.line))
            .collect();
        drop(state);
        // Their ends of the channels; dropped outside of the mutex, because that runs wakers.
        drop(lines);
    }

    fn lost(self: Arc<Self>, lease: &Arc<Lease>) {
        self.retire(lease);
    }

    /// A ticket that an errand waits with was granted, and nobody has collected it: it is being given
    /// back, and the errand goes to the next in line.
    fn recalled(self: Arc<Self>, lease: &Arc<Lease>) {
        self.change(&lease.request.name, |lane| {
            if lane.errand_with(lease).is_some() {
                lane.errand = None;
            }
        });
    }
}

/// Rung by the keeper when a ticket has been in this process for as long as is fair.
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

/// The use of a ticket that this process holds. Dropping it passes the ticket on, or hands it to the
/// keeper for release.
pub(crate) struct Share {
    lanes: Arc<Lanes>,
    lease: Arc<Lease>,
    hand_overs: u16,
    /// It is not over yet.
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

    /// Which use of the ticket this is, from 0.
    pub(crate) fn hand_overs(&self) -> u16 {
        self.hand_overs
    }

    /// Forgets the use, which is another process's.
    pub(crate) fn disown(mut self) {
        self.open = false;
    }

    /// Ends the use. Returns whether the ticket is to be released at the store, which is the
    /// caller's to do then.
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

/// The task of asking the store on behalf of a lane. Dropping it passes it on to the next in line,
/// with the place in the store's line if there is one.
pub(crate) struct Errand {
    lanes: Arc<Lanes>,
    name: Name,
    exclusive: bool,
    /// Which of the lane's.
    pub(crate) number: u64,
    /// The ticket that it is about, as soon as there is one.
    pub(crate) pending: Option<Pending>,
    /// It is neither done nor passed on.
    open: bool,
}

impl Errand {
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

    /// It has succeeded: from here on others may join the ticket. Gives the lease back if it was
    /// late, so that the errand was given to another task: then the ticket is the caller's own.
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

    /// The store is in trouble. Who has been waiting for as long as an operation may take gets the
    /// same error, as he would have by himself; the others try.
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
            // A late one does not speak for those who wait for another.
            if lane.errand_of(number).is_some() {
                let (old, young) = lane.line.drain(..).partition(|w| w.since <= long_ago);
                (refused, lane.line) = (old, young);
                lane.end_errand(number);
            }
        });
        for waiter in refused {
            let refusal = Parcel::new(Mutex::new(Some(Baton::Refused(error.clone()))));
            let _ = waiter.baton.send(refusal);
        }
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        if !self.open || self.lanes.shared.is_forked() {
            return;
        }
        self.open = false;
        // A place in line is worth keeping: the next would have to begin at its end.
        let mut pending = self.pending.take().filter(Pending::is_in_line);
        let lanes = &self.lanes;
        while let Some(place) = pending.take() {
            let now = self.lanes.shared.clock.now();
            let mut state = lanes.state();
            let Some(lane) = state.lanes.get_mut(&self.name) else {
                break;
            };
            // Only for its like: a writer cannot do with a reader's ticket, and in another runtime
            // nobody would hear its wake-up.
            let heir = lane.line.front().is_some_and(|heir| {
                heir.exclusive == self.exclusive && place.is_heard(heir.runtime)
            });
            let is_ours = lane.errand_of(self.number).is_some();
            let Some(heir) = (heir && is_ours).then(|| lane.line.pop_front()).flatten() else {
                break;
            };
            let parcel = Parcel::default();
            lane.forget_collected();
            lane.given.push_back((now, Arc::downgrade(&parcel)));
            drop(state);
            let mut errand = Errand::new(&self.lanes, &self.name, self.exclusive, self.number);
            errand.pending = Some(place);
            *locked(&parcel) = Some(Baton::Errand(errand));
            let mut unsent = None;
            guarded(|| unsent = heir.baton.send(parcel).err());
            let Some(parcel) = unsent else {
                // Sets the alarm for an heir that is not polled.
                return lanes.change(&self.name, |_| ());
            };
            if let Some(Baton::Errand(mut errand)) = take(&parcel) {
                errand.open = false;
                pending = errand.pending.take();
            }
        }
        let number = self.number;
        let end = |lane: &mut Lane<Baton>| lane.end_errand(number);
        lanes.change(&self.name, end);
    }
}

/// A place in the line of this process. Resolves to what it is given.
///
/// Dropped before that, it leaves the line; with what it was given, that passes itself on.
pub(crate) struct Waiting {
    lanes: Arc<Lanes>,
    name: Name,
    given: oneshot::Receiver<Parcel<Baton>>,
    over: bool,
}

impl Future for Waiting {
    /// `None`: what it was given was taken back, because it was not polled for so long.
    type Output = Option<Baton>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Baton>> {
        let given = Pin::new(&mut self.given).poll(cx);
        given.map(|given| {
            self.over = true;
            match given {
                Ok(parcel) => take(&parcel),
                // The other end goes without a word when the client is shut down.
                Err(_) => Some(Baton::Refused(Error::shut_down())),
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
