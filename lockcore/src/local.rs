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

use crate::acquire::Pending;
use crate::clock::Instant;
use crate::error::Error;
use crate::hash::Prehashed;
use crate::lease::Lease;
use crate::log::guarded;
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
    /// Errands that were given out so far.
    errands: u64,
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
    /// How long an errand may take to get a place in the store's line before it is given to another
    /// task as well. One whose task is polled has an answer, or an error, within an operation timeout.
    errand_within: Duration,
    /// The ticket that who comes next may use.
    current: Option<Tenure>,
    /// Tickets that nobody joins any more, until their last user leaves.
    draining: Vec<Tenure>,
    /// A task is at the store for the next ticket.
    errand: Option<AtTheStore>,
    line: VecDeque<Waiter>,
    /// How many of `line` have gone since they were last counted out.
    gone: usize,
    /// What waiters were given and have perhaps not collected, the oldest first. One that is gone was
    /// collected, or its waiter has gone with it.
    given: VecDeque<(Instant, Weak<Mutex<Option<Baton>>>)>,
    /// Rings when the oldest of `given`, or the errand, is overdue.
    recall: Option<Alarm>,
}

/// An errand that was given out and is neither done nor passed on.
struct AtTheStore {
    /// Which: an errand that was taken from its task for being late is not the lane's any more.
    number: u64,
    since: Instant,
    shared: bool,
    /// Its place in the store's line, once it has one. The keeper looks after that.
    ticket: Option<Arc<Lease>>,
}

/// What a waiter was given, until it collects it or it is taken back.
type Parcel = Arc<Mutex<Option<Baton>>>;

/// Of the ttl, how long a grant may wait for its task to collect it. A task that is polled does so in
/// microseconds. The keeper looks every third of the ttl, so that a grant that nobody collects is
/// kept for one ttl at most.
pub(crate) const COLLECTED_WITHIN: f64 = 2.0 / 3.0;

/// When something is judged, and by what.
#[derive(Clone, Copy)]
struct Moment {
    now: Instant,
    /// See [`Fair::Local`](crate::Fair::Local).
    bound: Duration,
    /// See [`Shared::epoch`].
    epoch: u64,
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
    baton: oneshot::Sender<Parcel>,
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
        now: Instant,
    ) -> Arrived {
        let mut guard = self.state();
        if guard.closed {
            return Arrived::Given(Baton::Refused(Error::shut_down()));
        }
        let at = self.moment(shared, now);
        let state = &mut *guard;
        let errands = &mut state.errands;
        let Some(lane) = state.lanes.get_mut(name) else {
            let mut lane = Lane::new(ttl, shared.op_timeout);
            let number = lane.begin_errand(exclusive, at.now, errands);
            state.lanes.insert(name.clone(), lane);
            let errand = Errand::new(shared, name, exclusive, number);
            return Arrived::Given(Baton::Errand(errand));
        };
        if lane.ttl != ttl {
            return Arrived::Stranger;
        }
        lane.count_out();
        lane.end_late_errand(at.now);
        let first = lane.line.is_empty() && lane.errand.is_none();
        if first && let Some((lease, hand_overs)) = lane.serve(exclusive, at) {
            return Arrived::Given(Baton::Share(Share::new(shared, lease, hand_overs)));
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
            let errand = Errand::new(shared, name, exclusive, number);
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
        if !lane.set_alarms(shared, name, self.bound) {
            // The time has just come.
            drop(guard);
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
        let now = shared.clock.now();
        self.change(shared, &lease.request.name, |lane| {
            lane.retire(lease);
            // Its place in line is lost: its task asks anew, if it is polled.
            if let Some(errand) = lane.errand_with(lease) {
                (errand.ticket, errand.since) = (None, now);
            }
        });
    }

    /// A ticket that an errand waits with was granted, and nobody has collected it: it is being given
    /// back, and the errand goes to the next in line.
    pub(crate) fn recalled(&self, shared: &Arc<Shared>, lease: &Arc<Lease>) {
        self.change(shared, &lease.request.name, |lane| {
            if lane.errand_with(lease).is_some() {
                lane.errand = None;
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
                false => shared.clean_up(Cleanup::of_held(&unused)),
            },
        );
        ours
    }

    /// Changes a lane and gives whoever is next what that makes free.
    fn change(&self, shared: &Arc<Shared>, name: &Name, change: impl FnOnce(&mut Lane)) {
        // A ticket whose last user has left while it was offered to somebody who had gone.
        self.change_and_tell(shared, name, change, |unused| {
            shared.clean_up(Cleanup::of_held(&unused));
        });
    }

    /// As [`change`](Self::change); tells of the tickets that nobody uses any more.
    ///
    /// A loop, however many of those in line have gone: a chain of drops would recurse.
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
                Of::Share(lease, hand_overs) => Baton::Share(Share::new(shared, lease, hand_overs)),
                Of::Errand(number) => {
                    Baton::Errand(Errand::new(shared, name, waiter.exclusive, number))
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
            let take_back = |lane: &mut Lane| match baton {
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
            if let Some(unused) = self.advance_after(shared, name, take_back, &mut given) {
                tell(unused);
            }
        }
    }

    /// Changes a lane, takes back what is overdue, serves those in front that can be served then, and
    /// takes out what nobody uses: returns the ticket.
    fn advance_after(
        &self,
        shared: &Arc<Shared>,
        name: &Name,
        change: impl FnOnce(&mut Lane),
        given: &mut VecDeque<Next>,
    ) -> Option<Arc<Lease>> {
        let mut state = self.state();
        let state = &mut *state;
        let lane = state.lanes.get_mut(name)?;
        change(lane);
        while !lane.line.is_empty() || !lane.given.is_empty() {
            let at = self.moment(shared, shared.clock.now());
            lane.take_back_overdue(at.now, given);
            lane.advance(at, &mut state.errands, given);
            if lane.set_alarms(shared, name, self.bound) {
                break;
            }
        }
        let unused = lane.take_unused();
        if lane.is_idle() {
            state.lanes.remove(name);
        }
        unused
    }

    fn moment(&self, shared: &Shared, now: Instant) -> Moment {
        Moment {
            now,
            bound: self.bound,
            epoch: shared.epoch(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex; should that change, the lanes are still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is to be done outside of the mutex.
enum Next {
    Given(Waiter, Gift),
    /// Nobody has collected it.
    TakenBack(Option<Baton>),
}

/// What [`Lane::advance`] has for a waiter.
struct Gift {
    of: Of,
    /// Still empty.
    parcel: Parcel,
}

enum Of {
    Share(Arc<Lease>, u16),
    Errand(u64),
}

fn locked(parcel: &Parcel) -> MutexGuard<'_, Option<Baton>> {
    parcel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes out what is in a parcel, if it is still there.
fn take(parcel: &Parcel) -> Option<Baton> {
    locked(parcel).take()
}

impl Lane {
    fn new(ttl: Duration, op_timeout: Duration) -> Self {
        Self {
            ttl,
            errand_within: ttl.max(2 * op_timeout),
            current: None,
            draining: Vec::new(),
            errand: None,
            line: VecDeque::new(),
            gone: 0,
            given: VecDeque::new(),
            recall: None,
        }
    }

    /// Serves from the front of the line.
    fn advance(&mut self, at: Moment, errands: &mut u64, given: &mut VecDeque<Next>) {
        while self.errand.is_none() {
            while self.line.front().is_some_and(|w| w.baton.is_closed()) {
                self.line.pop_front();
            }
            let Some(exclusive) = self.line.front().map(|front| front.exclusive) else {
                return;
            };
            let of = match self.serve(exclusive, at) {
                Some((lease, hand_overs)) => Of::Share(lease, hand_overs),
                None if self.is_worth_waiting_for(exclusive, at) => return,
                None => Of::Errand(self.begin_errand(exclusive, at.now, errands)),
            };
            let Some(waiter) = self.line.pop_front() else {
                return; // it was there just now
            };
            let parcel = Parcel::default();
            self.forget_collected();
            self.given.push_back((at.now, Arc::downgrade(&parcel)));
            given.push_back(Next::Given(waiter, Gift { of, parcel }));
        }
    }

    fn begin_errand(&mut self, exclusive: bool, now: Instant, errands: &mut u64) -> u64 {
        *errands += 1;
        self.errand = Some(AtTheStore {
            number: *errands,
            since: now,
            shared: !exclusive,
            ticket: None,
        });
        *errands
    }

    /// The errand with this number, unless it has been taken from its task.
    fn errand_of(&mut self, number: u64) -> Option<&mut AtTheStore> {
        self.errand
            .as_mut()
            .filter(|errand| errand.number == number)
    }

    /// The errand that waits with a ticket.
    fn errand_with(&mut self, lease: &Arc<Lease>) -> Option<&mut AtTheStore> {
        self.errand.as_mut().filter(|errand| {
            let ticket = errand.ticket.as_ref();
            ticket.is_some_and(|ticket| Arc::ptr_eq(ticket, lease))
        })
    }

    fn end_errand(&mut self, number: u64) {
        self.errand.take_if(|errand| errand.number == number);
    }

    /// What was collected, the oldest first, needs no looking after any more.
    fn forget_collected(&mut self) {
        while self
            .given
            .front()
            .is_some_and(|(_, parcel)| parcel.strong_count() == 0)
        {
            self.given.pop_front();
        }
    }

    /// When the oldest that was given has to be collected.
    fn collect_by(&self) -> Option<Instant> {
        let (since, _) = self.given.front()?;
        Some(since.after(self.ttl.mul_f64(COLLECTED_WITHIN)))
    }

    /// When an errand that has no place in the store's line is late.
    fn errand_by(&self) -> Option<Instant> {
        let errand = self
            .errand
            .as_ref()
            .filter(|errand| errand.ticket.is_none())?;
        Some(errand.since.after(self.errand_within))
    }

    /// Takes back what waiters were given and have not collected, and an errand that has come to
    /// nothing: their tasks are not polled, and others wait.
    fn take_back_overdue(&mut self, now: Instant, taken: &mut VecDeque<Next>) {
        self.forget_collected();
        while self.collect_by().is_some_and(|by| by <= now) {
            let overdue = self
                .given
                .pop_front()
                .and_then(|(_, parcel)| parcel.upgrade());
            // Dropped outside of the mutex, where it passes itself on.
            taken.extend(overdue.map(|parcel| Next::TakenBack(take(&parcel))));
            self.forget_collected();
        }
        self.end_late_errand(now);
    }

    fn end_late_errand(&mut self, now: Instant) {
        if self.errand_by().is_some_and(|by| by <= now) {
            self.errand = None;
        }
    }

    /// Lets one more use the ticket that the process holds, if that is possible and fair.
    fn serve(&mut self, exclusive: bool, at: Moment) -> Option<(Arc<Lease>, u16)> {
        let ttl = self.ttl;
        let tenure = self.current.as_mut()?;
        // A reader could use an exclusive ticket, but would keep the readers elsewhere out. One that is on
        // its way to be a read ticket is nobody's: of others, the store may have let readers in or not.
        let fits = match tenure.lease.is_exclusive() {
            true => exclusive && tenure.users == 0,
            false => !exclusive && tenure.lease.is_shared(),
        };
        // Half of the ttl is what a renewal that is due now, and one more, may still save.
        let fresh = at.now.until(tenure.lease.deadline()) >= ttl / 2;
        if !fits || !fresh || !tenure.is_within(at) {
            return None;
        }
        tenure.users += 1;
        let hand_overs = tenure.lease.pass_on();
        Some((Arc::clone(&tenure.lease), hand_overs))
    }

    /// Whether who cannot be served now will probably be passed the present ticket: it is exclusive
    /// and in use, and the bound is not reached.
    fn is_worth_waiting_for(&self, exclusive: bool, at: Moment) -> bool {
        self.current.as_ref().is_some_and(|tenure| {
            exclusive
                && tenure.users > 0
                && tenure.lease.is_exclusive()
                && tenure.lease.deadline() > at.now
                && tenure.is_within(at)
        })
    }

    /// For how long the process itself keeps a request out, if it does.
    fn excludes(&self, exclusive: bool, now: Instant) -> Option<Duration> {
        let tenure = self.current.as_ref().filter(|tenure| tenure.users > 0)?;
        let excludes = exclusive || tenure.lease.is_exclusive();
        let remaining = now.until(tenure.lease.deadline());
        (excludes && !remaining.is_zero()).then_some(remaining)
    }

    /// The store has granted a ticket to the task that had the errand. False if the errand is not
    /// the lane's any more, and the ticket none that others here may use.
    fn begin(&mut self, lease: &Arc<Lease>, number: u64, now: Instant) -> bool {
        if self.errand_of(number).is_none() {
            return false;
        }
        self.end_errand(number);
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
        true
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
        !tickets && self.errand.is_none() && self.line.is_empty()
    }

    /// Sees to it that the front waits neither beyond the bound nor for a task that is not polled.
    /// False when one of these times has come already.
    fn set_alarms(&mut self, shared: &Arc<Shared>, name: &Name, bound: Duration) -> bool {
        // Only those who wait here depend on the errand.
        let errand_by = self.errand_by().filter(|_| !self.line.is_empty());
        let overdue = [self.collect_by(), errand_by];
        let mut in_time = true;
        if let Some(by) = overdue.into_iter().flatten().min()
            && self
                .recall
                .as_ref()
                .is_none_or(|alarm| !alarm.will_ring_by(by))
        {
            let (alarm, pending) = ring(shared, name, by);
            self.recall = Some(alarm);
            in_time = pending;
        }
        if !self.line.is_empty()
            && self.errand.is_none()
            && let Some(tenure) = self.current.as_mut().filter(|t| t.alarm.is_none())
        {
            let (alarm, pending) = ring(shared, name, tenure.since.after(bound));
            tenure.alarm = Some(alarm);
            in_time &= pending;
        }
        in_time
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
    /// Whether others of this process may still have it: within the bound, and only if the store has
    /// said since the last gap that the ticket stands. Before that it may be another's, with higher
    /// tokens.
    fn is_within(&self, at: Moment) -> bool {
        self.lease.hand_overs() < self.most_hand_overs
            && at.now < self.since.after(at.bound)
            && self.lease.is_confirmed_in(at.epoch)
    }
}

/// An alarm that has a lane looked at again, and whether it is still to ring.
fn ring(shared: &Arc<Shared>, name: &Name, at: Instant) -> (Alarm, bool) {
    let mut alarm = shared.alarm(at);
    let waker = Waker::from(Arc::new(AtBound {
        shared: Arc::downgrade(shared),
        name: name.clone(),
    }));
    let rung = Pin::new(&mut alarm).poll(&mut Context::from_waker(&waker));
    (alarm, rung.is_pending())
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

    /// Forgets the use, which is another process's.
    pub(crate) fn disown(mut self) {
        self.open = false;
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
        if self.open
            && !self.shared.is_forked()
            && self.shared.lanes.leave(&self.shared, &self.lease)
        {
            self.shared.clean_up(Cleanup::of_held(&self.lease));
        }
    }
}

/// The task of asking the store on behalf of a lane. Dropping it passes it on to the next in line,
/// with the place in the store's line if there is one.
pub(crate) struct Errand {
    shared: Arc<Shared>,
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
    fn new(shared: &Arc<Shared>, name: &Name, exclusive: bool, number: u64) -> Self {
        Self {
            shared: Arc::clone(shared),
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
        let now = self.shared.clock.now();
        let (number, mut begun) = (self.number, false);
        self.shared.lanes.change(&self.shared, &self.name, |lane| {
            begun = lane.begin(&lease, number, now);
        });
        match begun {
            true => Ok(Share::new(&self.shared, lease, 0)),
            false => Err(lease),
        }
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
        let number = self.number;
        self.shared.lanes.change(&self.shared, &self.name, |lane| {
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
        if !self.open || self.shared.is_forked() {
            return;
        }
        self.open = false;
        // A place in line is worth keeping: the next would have to begin at its end.
        let mut pending = self.pending.take().filter(Pending::is_in_line);
        let lanes = &self.shared.lanes;
        while let Some(place) = pending.take() {
            let now = self.shared.clock.now();
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
            let mut errand = Errand::new(&self.shared, &self.name, self.exclusive, self.number);
            errand.pending = Some(place);
            *locked(&parcel) = Some(Baton::Errand(errand));
            let mut unsent = None;
            guarded(|| unsent = heir.baton.send(parcel).err());
            let Some(parcel) = unsent else {
                // Sets the alarm for an heir that is not polled.
                return lanes.change(&self.shared, &self.name, |_| ());
            };
            if let Some(Baton::Errand(mut errand)) = take(&parcel) {
                errand.open = false;
                pending = errand.pending.take();
            }
        }
        let number = self.number;
        let end = |lane: &mut Lane| lane.end_errand(number);
        lanes.change(&self.shared, &self.name, end);
    }
}

/// A place in the line of this process. Resolves to what it is given.
///
/// Dropped before that, it leaves the line; with what it was given, that passes itself on.
pub(crate) struct Waiting {
    shared: Arc<Shared>,
    name: Name,
    given: oneshot::Receiver<Parcel>,
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
        if self.over || self.shared.is_forked() {
            return;
        }
        self.given.close();
        if let Some(lane) = self.shared.lanes.state().lanes.get_mut(&self.name) {
            lane.gone += 1;
            lane.count_out();
        }
    }
}
