//! The queue inside one process: who of its tasks uses the ticket that the process holds, who waits
//! for it, and who goes to the store for the next one. How to ask there is in `acquire`.
//!
//! Per name there is a [`Lane`]. Its front goes to the store (it has the *errand*), the others wait
//! in memory. Who leaves a ticket passes it on, as long as the bound of [`Fair::Local`] allows; at
//! the bound the next in line is sent to the store, so that other processes get their turn.
//!
//! What is passed on, a [`Share`] of a ticket or an [`Errand`], is a value, and its drop passes it
//! on again. So it does not matter when a waiter is dropped: before it is given anything, the send
//! fails and the next is tried; after that, the value goes with the waiter and passes itself on.
//!
//! [`Fair::Local`]: crate::Fair::Local

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime;

use crate::acquire::Pending;
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::hash::Prehashed;
use crate::lease::Lease;
use crate::name::Name;
use crate::queue::MOST_TICKETS;
use crate::shared::{Alarm, Shared};
use crate::sync::{Mutex, MutexGuard, oneshot};
use crate::table::Cleanup;

/// Hand-overs of one ticket: the low 10 bits of a fencing token count them.
const MOST_HAND_OVERS: usize = 1_000;
/// Fewer would not be worth a ticket: a hand-over in memory takes a microsecond, one at a store a
/// hundred.
const FEWEST_HAND_OVERS: usize = 64;
/// How often each of those who wait in a process is served before the next process has its turn.
/// Measured with 4 processes of 16 tasks that hold for no time: twice each gives 190,000 hand-overs a
/// second and a p99 of 2.6 times the mean wait; 60 times each 590,000 and 34 times the mean.
const TURNS_EACH: usize = 4;

/// The lanes of one client.
pub(crate) struct Lanes {
    bound: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lanes: Prehashed<Name, Lane>,
    /// The client is shut down: nobody joins and nobody waits.
    closed: bool,
}

/// One name's queue. Plain data but for the alarm at the bound.
///
/// Nobody in `line` is served while somebody has the errand, who was here before: first come, first
/// served inside the process.
struct Lane {
    /// Of everybody in it: a ticket is passed on between equals only.
    ttl: Duration,
    /// The ticket that who comes next may use.
    current: Option<Tenure>,
    /// Tickets that nobody joins any more, until their last user leaves.
    draining: Vec<Tenure>,
    /// Somebody is at the store for the next ticket.
    errand: bool,
    /// That is a reader's.
    errand_shared: bool,
    line: VecDeque<Waiter>,
    /// How many of `line` have gone since they were last counted out.
    gone: usize,
}

/// A ticket that the process holds.
struct Tenure {
    lease: Arc<Lease>,
    since: Instant,
    users: u32,
    /// When to let other processes have their turn, whatever the time.
    most_hand_overs: u16,
    /// Rings at the bound, if somebody waits.
    alarm: Option<Alarm>,
}

struct Waiter {
    exclusive: bool,
    since: Instant,
    /// Where it waits, and where the wake-ups of its ticket would have to go.
    runtime: Option<runtime::Id>,
    baton: oneshot::Sender<Baton>,
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
    pub(crate) fn new(bound: Duration) -> Self {
        Self {
            bound,
            state: Mutex::default(),
        }
    }

    /// Joins the ticket that the process holds, goes to the store, or stands in line.
    pub(crate) fn arrive(
        &self,
        shared: &Arc<Shared>,
        name: &Name,
        ttl: Duration,
        exclusive: bool,
        wait: bool,
    ) -> Arrived {
        let mut state = self.state();
        if state.closed {
            return Arrived::Given(Baton::Refused(Error::lost(LostReason::Shutdown)));
        }
        let Some(lane) = state.lanes.get_mut(name) else {
            let lane = Lane::with_errand(ttl, exclusive);
            state.lanes.insert(name.clone(), lane);
            return Arrived::Given(Baton::Errand(Errand::new(shared, name, exclusive)));
        };
        if lane.ttl != ttl {
            return Arrived::Stranger;
        }
        let now = shared.clock.now();
        lane.count_out();
        let first = lane.line.is_empty() && !lane.errand;
        if first && let Some((lease, hand_overs)) = lane.serve(exclusive, now, self.bound) {
            return Arrived::Given(Baton::Share(Share::new(shared, lease, hand_overs)));
        }
        if !wait {
            // What the process itself is known to keep from us need not be asked for.
            if let Some(remaining) = lane.excludes(exclusive, now) {
                return Arrived::Busy(Some(remaining));
            }
            // A reader does not pass a writer, who may not be in line at the store yet.
            let others_wait = lane.errand && (exclusive || !lane.errand_shared);
            if others_wait || !lane.line.is_empty() {
                return Arrived::Busy(None);
            }
            if lane.errand {
                // What will come of that, only the store knows.
                return Arrived::Stranger;
            }
        }
        if first && !lane.is_worth_waiting_for(exclusive, now, self.bound) {
            lane.begin_errand(exclusive);
            return Arrived::Given(Baton::Errand(Errand::new(shared, name, exclusive)));
        }
        // Those who have gone since they were last counted out may be counted twice here; that is near enough.
        if lane.line.len().saturating_sub(lane.gone) >= MOST_TICKETS {
            return Arrived::Crowded;
        }
        let (baton, given) = oneshot::channel();
        lane.line.push_back(Waiter {
            exclusive,
            since: now,
            runtime: runtime::Handle::try_current().ok().map(|here| here.id()),
            baton,
        });
        if !lane.set_alarm(shared, self.bound) {
            // The bound has just been reached.
            drop(state);
            self.change(shared, name, |_| ());
        }
        Arrived::Waits(Waiting {
            shared: Arc::clone(shared),
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
            let waits = |waiter: &&Waiter| !waiter.baton.is_closed();
            lane.line.iter().filter(waits).count() as u32 // far fewer than 2³²
        })
    }

    /// The client is shut down: who waits is told so, and nobody comes any more.
    pub(crate) fn close(&self) {
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

    /// A lease of this process is over: who waits for it need not wait for its user.
    pub(crate) fn lost(&self, shared: &Arc<Shared>, lease: &Arc<Lease>) {
        self.change(shared, &lease.request.name, |lane| lane.retire(lease));
    }

    /// A ticket of this process is on its way to the readers: nobody waits for it to be passed on any more.
    pub(crate) fn mode_changed(&self, shared: &Arc<Shared>, lease: &Arc<Lease>) {
        self.change(shared, &lease.request.name, |_| ());
    }

    /// One use of a ticket is over. Returns whether the ticket has no users any more and is to be
    /// released at the store.
    fn leave(&self, shared: &Arc<Shared>, lease: &Arc<Lease>) -> bool {
        let mut ours = false;
        let leave = |lane: &mut Lane| lane.leave(lease);
        self.change_and_tell(
            shared,
            &lease.request.name,
            leave,
            |unused| match Arc::ptr_eq(&unused, lease) {
                true => ours = true,
                false => shared.clean_up(Cleanup::of(&unused)),
            },
        );
        ours
    }

    /// Changes a lane and gives whoever is next what that makes free.
    fn change(&self, shared: &Arc<Shared>, name: &Name, change: impl FnOnce(&mut Lane)) {
        // A ticket whose last user has left while it was offered to somebody who had gone.
        self.change_and_tell(shared, name, change, |unused| {
            shared.clean_up(Cleanup::of(&unused));
        });
    }

    /// As [`change`](Self::change); tells of the tickets that nobody uses any more.
    ///
    /// A loop, however many of those in line have gone: a chain of drops would recurse (H40).
    fn change_and_tell(
        &self,
        shared: &Arc<Shared>,
        name: &Name,
        change: impl FnOnce(&mut Lane),
        mut tell: impl FnMut(Arc<Lease>),
    ) {
        let mut given = VecDeque::new();
        if let Some(unused) = self.advance_after(shared, name, change, &mut given) {
            tell(unused);
        }
        // The first in line first.
        while let Some((waiter, gift)) = given.pop_front() {
            let baton = match gift {
                Gift::Share(lease, hand_overs) => {
                    Baton::Share(Share::new(shared, lease, hand_overs))
                }
                Gift::Errand => Baton::Errand(Errand::new(shared, name, waiter.exclusive)),
            };
            // Outside of the mutex: this runs wakers.
            let Err(baton) = waiter.baton.send(baton) else {
                continue;
            };
            let take_back = |lane: &mut Lane| match baton {
                Baton::Share(mut share) => {
                    share.open = false;
                    lane.leave(&share.lease);
                }
                Baton::Errand(mut errand) => {
                    errand.open = false;
                    lane.errand = false;
                }
                Baton::Refused(_) => {}
            };
            if let Some(unused) = self.advance_after(shared, name, take_back, &mut given) {
                tell(unused);
            }
        }
    }

    /// Changes a lane, serves those in front who can be served then, and takes out what nobody uses:
    /// returns the ticket.
    fn advance_after(
        &self,
        shared: &Arc<Shared>,
        name: &Name,
        change: impl FnOnce(&mut Lane),
        given: &mut VecDeque<(Waiter, Gift)>,
    ) -> Option<Arc<Lease>> {
        let mut state = self.state();
        let lane = state.lanes.get_mut(name)?;
        change(lane);
        while !lane.line.is_empty() {
            lane.advance(shared.clock.now(), self.bound, given);
            if lane.set_alarm(shared, self.bound) {
                break;
            }
        }
        let unused = lane.take_unused();
        if lane.is_idle() {
            state.lanes.remove(name);
        }
        unused
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex; should that change, the lanes are still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What [`Lane::advance`] has for a waiter.
enum Gift {
    Share(Arc<Lease>, u16),
    Errand,
}

impl Lane {
    fn with_errand(ttl: Duration, exclusive: bool) -> Self {
        Self {
            ttl,
            current: None,
            draining: Vec::new(),
            errand: true,
            errand_shared: !exclusive,
            line: VecDeque::new(),
            gone: 0,
        }
    }

    /// Serves from the front of the line.
    fn advance(&mut self, now: Instant, bound: Duration, given: &mut VecDeque<(Waiter, Gift)>) {
        while !self.errand {
            while self.line.front().is_some_and(|w| w.baton.is_closed()) {
                self.line.pop_front();
            }
            let Some(exclusive) = self.line.front().map(|front| front.exclusive) else {
                return;
            };
            let gift = match self.serve(exclusive, now, bound) {
                Some((lease, hand_overs)) => Gift::Share(lease, hand_overs),
                None if self.is_worth_waiting_for(exclusive, now, bound) => return,
                None => {
                    self.begin_errand(exclusive);
                    Gift::Errand
                }
            };
            given.extend(self.line.pop_front().map(|waiter| (waiter, gift)));
        }
    }

    fn begin_errand(&mut self, exclusive: bool) {
        self.errand = true;
        self.errand_shared = !exclusive;
    }

    /// Lets one more use the ticket that the process holds, if that is possible and fair.
    fn serve(
        &mut self,
        exclusive: bool,
        now: Instant,
        bound: Duration,
    ) -> Option<(Arc<Lease>, u16)> {
        let ttl = self.ttl;
        let tenure = self.current.as_mut()?;
        // A reader could use an exclusive ticket, but would keep the readers elsewhere out. One that is on
        // its way to be a read ticket is nobody's: of others, the store may have let readers in or not.
        let fits = match tenure.lease.is_exclusive() {
            true => exclusive && tenure.users == 0,
            false => !exclusive && tenure.lease.is_shared(),
        };
        // Half of the ttl is what a renewal that is due now, and one more, may still save.
        let fresh = now.until(tenure.lease.deadline()) >= ttl / 2;
        if !fits || !fresh || !tenure.is_within(now, bound) {
            return None;
        }
        tenure.users += 1;
        let hand_overs = tenure.lease.pass_on();
        Some((Arc::clone(&tenure.lease), hand_overs))
    }

    /// Whether who cannot be served now will probably be passed the present ticket: it is exclusive
    /// and in use, and the bound is not reached.
    fn is_worth_waiting_for(&self, exclusive: bool, now: Instant, bound: Duration) -> bool {
        self.current.as_ref().is_some_and(|tenure| {
            exclusive
                && tenure.users > 0
                && tenure.lease.is_exclusive()
                && tenure.lease.deadline() > now
                && tenure.is_within(now, bound)
        })
    }

    /// For how long the process itself keeps a request out, if it does.
    fn excludes(&self, exclusive: bool, now: Instant) -> Option<Duration> {
        let tenure = self.current.as_ref().filter(|tenure| tenure.users > 0)?;
        let excludes = exclusive || tenure.lease.is_exclusive();
        let remaining = now.until(tenure.lease.deadline());
        (excludes && !remaining.is_zero()).then_some(remaining)
    }

    /// The store has granted a ticket to who had the errand.
    fn begin(&mut self, lease: &Arc<Lease>, now: Instant) {
        self.errand = false;
        // Everybody here a few times, so that nobody elsewhere waits for very much longer than these.
        let a_few_each = TURNS_EACH * (self.line.len() + 1);
        let tenure = Tenure {
            lease: Arc::clone(lease),
            since: now,
            users: 1,
            most_hand_overs: a_few_each.clamp(FEWEST_HAND_OVERS, MOST_HAND_OVERS) as u16,
            alarm: None,
        };
        self.draining.extend(self.current.replace(tenure));
    }

    fn leave(&mut self, lease: &Arc<Lease>) {
        let tenures = self.draining.iter_mut().chain(&mut self.current);
        for tenure in tenures {
            if Arc::ptr_eq(&tenure.lease, lease) {
                tenure.users -= 1;
            }
        }
    }

    /// Nobody joins this ticket any more.
    fn retire(&mut self, lease: &Arc<Lease>) {
        let is_it = |tenure: &mut Tenure| Arc::ptr_eq(&tenure.lease, lease);
        self.draining.extend(self.current.take_if(is_it));
    }

    /// A ticket without users; one at most, because every change is followed by this.
    fn take_unused(&mut self) -> Option<Arc<Lease>> {
        let current = self.current.take_if(|tenure| tenure.users == 0);
        let unused = current.or_else(|| {
            let at = self.draining.iter().position(|tenure| tenure.users == 0)?;
            Some(self.draining.swap_remove(at))
        });
        unused.map(|tenure| tenure.lease)
    }

    fn is_idle(&self) -> bool {
        let tickets = self.current.is_some() || !self.draining.is_empty();
        !tickets && !self.errand && self.line.is_empty()
    }

    /// Sees to it that the front does not wait beyond the bound. False when that is reached already.
    fn set_alarm(&mut self, shared: &Arc<Shared>, bound: Duration) -> bool {
        if self.line.is_empty() || self.errand {
            return true;
        }
        let Some(tenure) = self.current.as_mut().filter(|t| t.alarm.is_none()) else {
            return true;
        };
        let mut alarm = shared.alarm(tenure.since.after(bound));
        let waker = Waker::from(Arc::new(AtBound {
            shared: Arc::downgrade(shared),
            name: tenure.lease.request.name.clone(),
        }));
        let reached = Pin::new(&mut alarm).poll(&mut Context::from_waker(&waker));
        tenure.alarm = Some(alarm);
        reached.is_pending()
    }

    /// Forgets those of the line who have gone, now and then: a lock that is held for hours must not
    /// collect all who have given up meanwhile.
    fn count_out(&mut self) {
        if self.gone * 2 > self.line.len() {
            self.line.retain(|waiter| !waiter.baton.is_closed());
            self.gone = 0;
        }
    }
}

impl Tenure {
    fn is_within(&self, now: Instant, bound: Duration) -> bool {
        self.lease.hand_overs() < self.most_hand_overs && now < self.since.after(bound)
    }
}

/// Rung by the keeper when a ticket has been in this process for as long as is fair.
struct AtBound {
    shared: Weak<Shared>,
    name: Name,
}

impl Wake for AtBound {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.lanes.change(&shared, &self.name, |_| ());
        }
    }
}

/// The use of a ticket that this process holds. Dropping it passes the ticket on, or hands it to the
/// keeper for release.
pub(crate) struct Share {
    shared: Arc<Shared>,
    lease: Arc<Lease>,
    hand_overs: u16,
    /// It is not over yet.
    open: bool,
}

impl Share {
    fn new(shared: &Arc<Shared>, lease: Arc<Lease>, hand_overs: u16) -> Self {
        Self {
            shared: Arc::clone(shared),
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

    /// Ends the use. Returns whether the ticket is to be released at the store, which is the
    /// caller's to do then.
    pub(crate) fn leave(mut self) -> bool {
        self.open = false;
        self.shared.lanes.leave(&self.shared, &self.lease)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.open && self.shared.lanes.leave(&self.shared, &self.lease) {
            self.shared.clean_up(Cleanup::of(&self.lease));
        }
    }
}

/// The task of asking the store on behalf of a lane. Dropping it passes it on to the next in line,
/// with the place in the store's line if there is one.
pub(crate) struct Errand {
    shared: Arc<Shared>,
    name: Name,
    exclusive: bool,
    /// The ticket that it is about, as soon as there is one.
    pub(crate) pending: Option<Pending>,
    /// It is neither done nor passed on.
    open: bool,
}

impl Errand {
    fn new(shared: &Arc<Shared>, name: &Name, exclusive: bool) -> Self {
        Self {
            shared: Arc::clone(shared),
            name: name.clone(),
            exclusive,
            pending: None,
            open: true,
        }
    }

    /// It has succeeded: from here on others may join the ticket.
    pub(crate) fn granted(mut self, lease: Arc<Lease>) -> Share {
        self.open = false;
        self.shared.entrust_held(&lease);
        let now = self.shared.clock.now();
        let share = Share::new(&self.shared, Arc::clone(&lease), 0);
        self.shared
            .lanes
            .change(&self.shared, &self.name, |lane| lane.begin(&lease, now));
        share
    }

    /// The store is in trouble. Who has been waiting for as long as an operation may take gets the
    /// same error, as he would have by himself; the others try.
    pub(crate) fn failed(mut self, error: &Error) {
        let Some(error) = error.as_refusal() else {
            return;
        };
        let long_ago = self.shared.clock.now().before(self.shared.op_timeout);
        let mut refused = VecDeque::new();
        self.open = false;
        self.shared.lanes.change(&self.shared, &self.name, |lane| {
            let (old, young) = lane.line.drain(..).partition(|w| w.since <= long_ago);
            (refused, lane.line) = (old, young);
            lane.errand = false;
        });
        for waiter in refused {
            let _ = waiter.baton.send(Baton::Refused(error.clone()));
        }
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        self.open = false;
        // A place in line is worth keeping: who is next would have to begin at its end.
        let mut pending = self.pending.take().filter(Pending::is_in_line);
        let lanes = &self.shared.lanes;
        while let Some(place) = pending.take() {
            let mut state = lanes.state();
            let Some(lane) = state.lanes.get_mut(&self.name) else {
                break;
            };
            // Only for its like: a writer cannot do with a reader's ticket, and in another runtime
            // nobody would hear its wake-up.
            let heir = lane.line.front().is_some_and(|heir| {
                heir.exclusive == self.exclusive && place.is_heard(heir.runtime)
            });
            let Some(heir) = heir.then(|| lane.line.pop_front()).flatten() else {
                break;
            };
            drop(state);
            let mut errand = Errand::new(&self.shared, &self.name, self.exclusive);
            errand.pending = Some(place);
            match heir.baton.send(Baton::Errand(errand)) {
                Ok(()) => return,
                Err(Baton::Errand(mut errand)) => {
                    errand.open = false;
                    pending = errand.pending.take();
                }
                Err(Baton::Share(_) | Baton::Refused(_)) => {}
            }
        }
        lanes.change(&self.shared, &self.name, |lane| lane.errand = false);
    }
}

/// A place in the line of this process. Resolves to what it is given.
///
/// Dropped before that, it leaves the line; with what it was given, that passes itself on.
pub(crate) struct Waiting {
    shared: Arc<Shared>,
    name: Name,
    given: oneshot::Receiver<Baton>,
    over: bool,
}

impl Future for Waiting {
    type Output = Baton;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Baton> {
        let given = Pin::new(&mut self.given).poll(cx);
        given.map(|given| {
            self.over = true;
            // The other end goes without a word when the client is shut down.
            given.unwrap_or_else(|_| Baton::Refused(Error::lost(LostReason::Shutdown)))
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.given.close();
        if let Some(lane) = self.shared.lanes.state().lanes.get_mut(&self.name) {
            lane.gone += 1;
            lane.count_out();
        }
    }
}
