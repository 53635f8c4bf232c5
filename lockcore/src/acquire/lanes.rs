//! The queue inside one process: which of its tasks uses the ticket that the process holds, which
//! tasks wait for it, and which task asks the store for the next ticket. How to ask the store is in
//! `pending`.
//!
//! There is a [`Lane`] per name, or with [`Fair::Strict`] one per group of requests: see
//! [`groups`](super::groups). The task at its front asks the store: it is the *leader*. The other
//! tasks wait in memory. A task that is done hands the ticket over to the next task. With
//! [`Fair::Local`] this goes on until its bound. Then the next task becomes the leader and asks the
//! store, so that other processes are served.
//!
//! A waiter gets either a [`Share`] of a ticket, or the role of [`Leader`]. Both are values: when
//! such a value is dropped, the next waiter gets it. So a waiter may be dropped at any time. If a
//! dropped waiter has got nothing yet, sending to it fails, and the lane tries the next waiter. If
//! it has got a value, the value is dropped with it, and the next waiter gets the value.
//!
//! A waiter may also exist without ever being polled again: `select!` over `&mut future` does that.
//! The lane takes back a share after [a part of the ttl](crate::client::lease::COLLECTED_WITHIN).
//! It replaces a leader that has no ticket after a ttl, or after two operation timeouts if that is
//! longer.
//!
//! [`Fair::Local`]: crate::Fair::Local
//! [`Fair::Strict`]: crate::Fair::Strict

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::groups::{Groups, ToAsk};
use super::lane::{Lane, MOST_HAND_OVERS, Moment, Next, Of, Parcel, Unused, Waiter, locked, take};
use super::pending::{Pace, Pending};
use crate::client::alarms::Alarm;
use crate::client::lease::Lease;
use crate::client::shared::{LeaseObserver, Shared};
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
    /// See [`Fair::Local`](crate::Fair::Local). `None` with [`Fair::Strict`].
    bound: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    names: Prehashed<Name, Groups<Handover>>,
    /// How many lanes there have been so far.
    lanes: u64,
    /// How many leaders there have been so far.
    leaders: u64,
    /// Set when the client is shut down: no task joins a lane or waits in one.
    closed: bool,
}

impl State {
    fn lane(&mut self, which: Which<'_>) -> Option<&mut Lane<Handover>> {
        self.names.get_mut(which.name)?.lane(which.lane)
    }
}

/// Which lane.
#[derive(Clone, Copy)]
struct Which<'a> {
    name: &'a Name,
    lane: u64,
}

/// Which leader of which lane.
pub(crate) struct Role {
    name: Name,
    lane: u64,
    number: u64,
}

impl Role {
    fn which(&self) -> Which<'_> {
        let Self { name, lane, .. } = self;
        Which { name, lane: *lane }
    }
}

/// The value that a waiter gets.
pub(crate) enum Handover {
    /// A use of the lock.
    Share(Share),
    /// The role of leader: the waiter must ask the store.
    Leader(Leader),
    /// An error: the leader before this waiter has found the store in trouble.
    Refused(Error),
}

/// The result of the arrival of a task in its lane.
pub(crate) enum Arrived {
    Given(Handover),
    Waits(Waiting),
    /// This process holds the lock, or other tasks of this process are in front. If this process
    /// holds the lock, the time is how long the lease lasts without another renewal.
    Busy(Option<Duration>),
    /// The lane has as many waiters as it may have.
    Crowded,
    /// The task must take a ticket of its own: because it asks for another ttl than the lane, or
    /// because it does not wait for the leader's answer.
    OwnTicket,
}

impl Lanes {
    pub(crate) fn new(shared: &Arc<Shared>) -> Arc<Self> {
        let bound = match shared.defaults.fair {
            Fair::Local(bound) => Some(bound),
            Fair::Strict => None,
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

    /// Gives the task a use of the ticket that the process holds, or makes it the leader, or puts
    /// it in line.
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
        if self.bound.is_none() {
            return match wait {
                true => self.gather(guard, name, ttl, exclusive, now),
                false => Arrived::OwnTicket,
            };
        }
        let at = self.moment(now);
        let state = &mut *guard;
        let leaders = &mut state.leaders;
        let lanes = state.names.get_mut(name);
        let Some((number, lane)) = lanes.and_then(|lanes| lanes.iter_mut().next()) else {
            let lane = Lane::new(ttl, self.shared.op_timeout);
            return Arrived::Given(self.begin(guard, name, lane, exclusive, at));
        };
        let which = Which { name, lane: number };
        if lane.ttl != ttl {
            return Arrived::OwnTicket;
        }
        lane.count_out();
        lane.end_late_leader(at.now);
        let first = lane.line.is_empty() && lane.leader.is_none();
        if first && let Some((lease, hand_overs)) = lane.serve(exclusive, at) {
            return Arrived::Given(Handover::Share(Share::new(
                self, which.lane, lease, hand_overs,
            )));
        }
        if !wait {
            // While this process holds the lock, the store need not be asked.
            if let Some(remaining) = lane.excludes(exclusive, at.now) {
                return Arrived::Busy(Some(remaining));
            }
            // A reader must not overtake a writer, which may not be in the store's line yet.
            let leader = lane.leader.as_ref();
            let others_wait = leader.is_some_and(|leader| exclusive || !leader.shared);
            if others_wait || !lane.line.is_empty() {
                return Arrived::Busy(None);
            }
            if leader.is_some() {
                // The leader is asking the store. Only the store knows whether it can grant this
                // request as well.
                return Arrived::OwnTicket;
            }
        }
        if first && !lane.is_worth_waiting_for(exclusive, at) {
            let number = lane.begin_leader(exclusive, at.now, leaders);
            let leader = Leader::new(self, which, exclusive, number);
            return Arrived::Given(Handover::Leader(leader));
        }
        // `gone` may count a waiter that gave up twice, so the line may seem shorter than it is.
        // That is exact enough for this bound.
        if lane.line.len().saturating_sub(lane.gone) >= MOST_TICKETS {
            return Arrived::Crowded;
        }
        let given = lane.join(exclusive, at.now);
        if !lane.set_alarms(at.bound, |at| self.ring(which, at)) {
            // The time of an alarm has just come, so the lane is served now.
            drop(guard);
            self.change(which, |_| ());
        }
        Arrived::Waits(self.waiting_in(which, given))
    }

    /// As [`arrive`](Self::arrive), with [`Fair::Strict`]: see [`groups`](super::groups).
    fn gather(
        self: &Arc<Self>,
        mut guard: MutexGuard<'_, State>,
        name: &Name,
        ttl: Duration,
        exclusive: bool,
        now: Instant,
    ) -> Arrived {
        let state = &mut *guard;
        let groups = state.names.entry(name.clone()).or_default();
        let mut go = groups.settle(now);
        let (arrived, late) = match groups.gathering(ttl) {
            Some((number, lane)) => {
                let given = lane.join(exclusive, now);
                let which = Which { name, lane: number };
                let in_time = lane.set_alarms(Duration::MAX, |at| self.ring(which, at));
                let late = (!in_time).then_some(which);
                (Arrived::Waits(self.waiting_in(which, given)), late)
            }
            None => {
                state.lanes += 1;
                let mut lane = Lane::new(ttl, self.shared.op_timeout);
                let leader = lane.begin_leader(exclusive, now, &mut state.leaders);
                let closed = groups.close(now);
                go = go.or(closed); // one group gathers, so one of the two is `None`
                groups.begin(state.lanes, lane, now);
                let lane = state.lanes;
                let leader = Leader::new(self, Which { name, lane }, exclusive, leader);
                (Arrived::Given(Handover::Leader(leader)), None)
            }
        };
        drop(guard);
        // These run wakers.
        guarded(|| drop(go));
        if let Some(which) = late {
            self.change(which, |_| ());
        }
        arrived
    }

    fn waiting_in(
        self: &Arc<Self>,
        which: Which<'_>,
        given: oneshot::Receiver<Parcel<Handover>>,
    ) -> Waiting {
        Waiting {
            lanes: Arc::clone(self),
            name: which.name.clone(),
            lane: which.lane,
            given,
            over: false,
        }
    }

    /// Begins a lane. Its first task goes on with a ticket that was given back a moment ago, or it is
    /// the leader.
    fn begin(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        name: &Name,
        mut lane: Lane<Handover>,
        exclusive: bool,
        at: Moment,
    ) -> Handover {
        state.lanes += 1;
        let which = Which {
            name,
            lane: state.lanes,
        };
        let mut served = None;
        let taken_back = self.shared.take_back(name, |lease| {
            served = lane.go_on(lease, exclusive, at);
            if served.is_some() {
                lease.set_lane(which.lane);
            }
            served.is_some()
        });
        let Some((lease, hand_overs)) = served else {
            let number = lane.begin_leader(exclusive, at.now, &mut state.leaders);
            let groups = Groups::of(which.lane, lane);
            state.names.insert(name.clone(), groups);
            return Handover::Leader(Leader::new(self, which, exclusive, number));
        };
        let groups = Groups::of(which.lane, lane);
        state.names.insert(name.clone(), groups);
        drop(state);
        let share = Share::new(self, which.lane, lease, hand_overs);
        // This runs the wakers of those that wait for the release, which are users' code.
        drop(taken_back);
        Handover::Share(share)
    }

    /// Whether no task holds, asks for or waits for any lock.
    #[cfg(all(test, lockcore_loom))]
    pub(crate) fn is_empty(&self) -> bool {
        self.state().names.is_empty()
    }

    /// How many tasks wait in memory for a name.
    pub(crate) fn waiting(&self, name: &Name) -> u32 {
        let mut state = self.state();
        let lanes = state.names.get_mut(name).map(Groups::iter_mut);
        let waits = |waiter: &&mut Waiter<Handover>| !waiter.handover.is_closed();
        let lines = lanes.into_iter().flatten();
        let waiters = lines.flat_map(|(_, lane)| &mut lane.line).filter(waits);
        waiters.count() as u32 // far fewer than 2³²
    }

    /// No further task may use the ticket of this lease. The tasks in line do not wait any more
    /// until the present user of the ticket is done.
    pub(crate) fn retire(self: &Arc<Self>, lease: &Arc<Lease>) {
        let now = self.shared.clock.now();
        self.change_with(lease, |lane| {
            lane.retire(lease);
            // If the leader had this ticket in the store's line, it has lost the ticket. It asks
            // for a new one when it is polled.
            if let Some(leader) = lane.leader_with(lease) {
                leader.begin_again(now);
            }
        });
    }

    /// If the ticket of this lease has only one user now, no further task may use it. Returns
    /// whether it has only one user.
    pub(crate) fn retire_if_only(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        let mut is_only = false;
        self.change_with(lease, |lane| {
            is_only = lane.retire_if_only(lease);
        });
        is_only
    }

    /// Waits until a leader may ask the store, at most until `give_up`. Returns whether it has waited.
    ///
    /// Cancel safety: safe. The role of the leader passes to the next task of the lane.
    pub(crate) async fn gather_until(self: &Arc<Self>, role: &Role, give_up: Instant) -> bool {
        let mut waited = false;
        while let Some((told, until)) = self.wait_to_ask(role) {
            waited = true;
            let until = until.min(give_up);
            let _ = self.shared.by(until, told).await;
            if until == give_up && self.shared.clock.now() >= give_up {
                break;
            }
        }
        waited
    }

    fn wait_to_ask(&self, role: &Role) -> Option<(oneshot::Receiver<()>, Instant)> {
        if self.bound.is_some() {
            return None; // only the requests of a strict order gather
        }
        let mut state = self.state();
        let groups = state.names.get_mut(&role.name)?;
        if !groups.gathers(role.lane) {
            return None;
        }
        // A leader that was replaced asks for itself alone.
        groups.lane(role.lane)?.leader_of(role.number)?;
        let now = self.shared.clock.now();
        let go = groups.settle(now);
        let waits = groups.wait_to_ask(role.lane);
        if waits.is_none()
            && let Some(leader) = groups
                .lane(role.lane)
                .and_then(|lane| lane.leader_of(role.number))
        {
            // It could not ask earlier, so it is not late.
            leader.since = now;
        }
        drop(state);
        let (waits, earlier) = match waits {
            Some(ToAsk {
                told,
                until,
                earlier,
            }) => (Some((told, until)), earlier),
            None => (None, None),
        };
        guarded(|| drop((go, earlier))); // runs wakers
        waits
    }

    /// The last user of a lane's ticket has released it, or has given it to the keeper.
    fn passed_on(&self, lane: u64, lease: &Arc<Lease>) {
        if self.bound.is_some() || self.shared.is_forked() {
            return;
        }
        let mut state = self.state();
        let groups = state.names.get_mut(&lease.request.name);
        let go = groups.and_then(|groups| groups.passed_on(lane, self.shared.clock.now()));
        drop(state);
        guarded(|| drop(go)); // runs a waker
    }

    /// Notes that a leader has a ticket in the store's line.
    pub(crate) fn in_line(&self, role: &Role, lease: &Arc<Lease>) {
        let mut state = self.state();
        let Some(groups) = state.names.get_mut(&role.name) else {
            return;
        };
        let lane = groups.lane(role.lane);
        if let Some(leader) = lane.and_then(|lane| lane.leader_of(role.number)) {
            lease.set_lane(role.lane);
            leader.ticket = Some(Arc::clone(lease));
        }
        let go = match groups.is_busy() {
            true => groups.settle(self.shared.clock.now()),
            false => None,
        };
        drop(state);
        guarded(|| drop(go)); // runs a waker
    }

    /// Notes that a leader has lost its ticket in the store's line, and asks for a new one. So it
    /// is late again if it gets no answer in time.
    pub(crate) fn out_of_line(self: &Arc<Self>, role: &Role) {
        let now = self.shared.clock.now();
        self.change(role.which(), |lane| {
            if let Some(leader) = lane.leader_of(role.number) {
                leader.begin_again(now);
            }
        });
    }

    /// When this leader may ask the store, if the store has refused the leader before it, because it has
    /// no line or because the line is full.
    pub(crate) fn pace(&self, role: &Role) -> Option<Pace> {
        let mut state = self.state();
        let lane = state.lane(role.which())?;
        lane.leader_of(role.number)?;
        lane.pace
    }

    /// Notes that a store without a line, or with a full line, has refused a leader, and that the
    /// leader asks again at this pace.
    pub(crate) fn asks_again(&self, role: &Role, pace: Pace) {
        let mut state = self.state();
        if let Some(lane) = state.lane(role.which())
            && let Some(leader) = lane.leader_of(role.number)
        {
            // The leader has had an answer, so it does not count as late.
            leader.since = pace.next;
            lane.pace = Some(pace);
        }
    }

    /// A ticket of this process is being downgraded. The tasks in line do not wait any more for a
    /// hand-over of this ticket.
    pub(crate) fn mode_changed(self: &Arc<Self>, lease: &Arc<Lease>) {
        self.change_with(lease, |_| ());
    }

    /// Ends one use of a ticket. If that was the last use, the caller must release the ticket at the
    /// store.
    fn leave(self: &Arc<Self>, lane: u64, lease: &Arc<Lease>) -> Option<Unused> {
        let name = &lease.request.name;
        let mut ours = None;
        let leave = |lane: &mut Lane<Handover>| lane.leave(lease);
        self.change_and_tell(Which { name, lane }, leave, |unused| {
            match Arc::ptr_eq(&unused.lease, lease) {
                true => ours = Some(unused),
                false => self.give_back(&unused),
            }
        });
        ours
    }

    fn give_back(&self, unused: &Unused) {
        if self.lingers(unused) {
            return;
        }
        // With `Fair::Strict` the next task is behind those of other processes.
        let may_go_on = unused.may_go_on && self.bound.is_some();
        self.shared.give_back(&unused.lease, may_go_on);
    }

    /// Whether a ticket without users stays with this process for a moment.
    fn lingers(&self, unused: &Unused) -> bool {
        let more = usize::from(unused.lease.hand_overs()) < MOST_HAND_OVERS;
        unused.may_go_on && more && self.shared.linger(&unused.lease)
    }

    /// Changes a lane, and gives to the next waiters what became free.
    fn change(self: &Arc<Self>, which: Which<'_>, change: impl FnOnce(&mut Lane<Handover>)) {
        // A ticket may have no users now, if the lane offered it to a waiter that had given up.
        self.change_and_tell(which, change, |unused| self.give_back(&unused));
    }

    /// Changes the lane that has the ticket of this lease, as [`change`](Self::change) does.
    fn change_with(self: &Arc<Self>, lease: &Arc<Lease>, change: impl FnOnce(&mut Lane<Handover>)) {
        let name = &lease.request.name;
        let lane = {
            // The lane is noted under the mutex.
            let _state = self.state();
            lease.lane()
        };
        self.change(Which { name, lane }, change);
    }

    /// As [`change`](Self::change), but calls `tell` with each ticket that has no users any more.
    ///
    /// This is a loop and not a recursion, because a chain of drops would be as deep as the number
    /// of waiters that gave up.
    fn change_and_tell(
        self: &Arc<Self>,
        which: Which<'_>,
        change: impl FnOnce(&mut Lane<Handover>),
        mut tell: impl FnMut(Unused),
    ) {
        let mut given = VecDeque::new();
        if let Some(unused) = self.advance_after(which, change, &mut given) {
            tell(unused);
        }
        // Waiters are served in the order of the line.
        while let Some(next) = given.pop_front() {
            let (waiter, gift) = match next {
                Next::Given(waiter, gift) => (waiter, gift),
                // The drop of the hand-over gives it to the next waiter.
                Next::TakenBack(handover) => {
                    drop(handover);
                    continue;
                }
                Next::Go(go) => {
                    guarded(|| drop(go)); // runs a waker
                    continue;
                }
            };
            let handover = match gift.of {
                Of::Share(lease, hand_overs) => {
                    Handover::Share(Share::new(self, which.lane, lease, hand_overs))
                }
                Of::Leader(number) => {
                    Handover::Leader(Leader::new(self, which, waiter.exclusive, number))
                }
            };
            *locked(&gift.parcel) = Some(handover);
            // The mutex is not held here, because this runs wakers, which are users' code. If a
            // waker panics, the waiter has its parcel already, or the lane takes the parcel back.
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
                    lane.end_leader(leader.role.number);
                }
                Handover::Refused(_) => {}
            };
            if let Some(unused) = self.advance_after(which, take_back, &mut given) {
                tell(unused);
            }
        }
    }

    /// Changes a lane, takes back parcels and leaders that are overdue, and serves the line from
    /// its front. Returns a ticket that has no users any more.
    fn advance_after(
        self: &Arc<Self>,
        which: Which<'_>,
        change: impl FnOnce(&mut Lane<Handover>),
        given: &mut VecDeque<Next<Handover>>,
    ) -> Option<Unused> {
        let mut state = self.state();
        let state = &mut *state;
        let groups = state.names.get_mut(which.name)?;
        let lane = groups.lane(which.lane)?;
        change(lane);
        while !lane.line.is_empty() || !lane.given.is_empty() {
            let at = self.moment(self.shared.clock.now());
            lane.take_back_overdue(at.now, given);
            lane.advance(at, &mut state.leaders, given);
            if lane.set_alarms(at.bound, |at| self.ring(which, at)) {
                break;
            }
        }
        let unused = lane.take_unused();
        if lane.is_idle() {
            given.extend(groups.remove(which.lane).map(Next::Go));
        }
        if groups.is_busy() {
            let go = groups.settle(self.shared.clock.now());
            given.extend(go.map(Next::Go));
        }
        if groups.is_empty() {
            state.names.remove(which.name);
        }
        unused
    }

    fn moment(&self, now: Instant) -> Moment {
        Moment {
            now,
            bound: self.bound.unwrap_or(Duration::MAX),
            epoch: self.shared.epoch(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex. If such code is added one day, the lanes are
        // consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets an alarm that serves a lane again. Returns the alarm, and whether it has not rung yet.
    fn ring(self: &Arc<Self>, which: Which<'_>, at: Instant) -> (Alarm, bool) {
        let mut alarm = self.shared.alarm(at);
        let waker = Waker::from(Arc::new(AtBound {
            lanes: Arc::downgrade(self),
            name: which.name.clone(),
            lane: which.lane,
        }));
        let rung = Pin::new(&mut alarm).poll(&mut Context::from_waker(&waker));
        (alarm, rung.is_pending())
    }
}

impl LeaseObserver for Lanes {
    fn close(self: Arc<Self>) {
        let mut state = self.state();
        state.closed = true;
        let (mut lines, mut gathering) = (Vec::new(), Vec::new());
        for groups in state.names.values_mut() {
            gathering.extend(groups.end());
            lines.extend(
                groups
                    .iter_mut()
                    .map(|(_, lane)| std::mem::take(&mut lane.line)),
            );
        }
        drop(state);
        // Dropping the senders ends the wait of their waiters. It runs wakers, so the mutex must be
        // free.
        drop((lines, gathering));
    }

    fn lost(self: Arc<Self>, lease: &Arc<Lease>) {
        self.retire(lease);
    }

    fn asked_back(self: Arc<Self>, lease: &Arc<Lease>) {
        self.retire(lease);
    }

    // If the recalled ticket is the leader's, the next task in line becomes the leader.
    fn recalled(self: Arc<Self>, lease: &Arc<Lease>) {
        self.change_with(lease, |lane| {
            if lane.leader_with(lease).is_some() {
                lane.leader = None;
            }
        });
    }
}

/// Serves a lane again. The keeper calls it when the bound is reached, or when a parcel or a leader
/// is overdue.
struct AtBound {
    lanes: Weak<Lanes>,
    name: Name,
    lane: u64,
}

impl Wake for AtBound {
    fn wake(self: Arc<Self>) {
        if let Some(lanes) = self.lanes.upgrade() {
            let (name, lane) = (&self.name, self.lane);
            lanes.change(Which { name, lane }, |_| ());
        }
    }
}

/// One use of a ticket that this process holds. Dropping it hands the ticket over to the next task,
/// or to the keeper for release.
pub(crate) struct Share {
    lanes: Arc<Lanes>,
    /// The number of the lane.
    lane: u64,
    lease: Arc<Lease>,
    hand_overs: u16,
    /// Whether the use has not ended yet.
    open: bool,
}

impl Share {
    fn new(lanes: &Arc<Lanes>, lane: u64, lease: Arc<Lease>, hand_overs: u16) -> Self {
        Self {
            lanes: Arc::clone(lanes),
            lane,
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

    /// Ends the use without any effect, in a forked child: the use belongs to the parent process.
    pub(crate) fn disown(mut self) {
        self.open = false;
    }

    /// Ends the use. If the caller has to release the ticket at the store, it keeps the returned value
    /// until the store has answered.
    pub(crate) fn leave(mut self) -> Option<Leaving> {
        self.open = false;
        let unused = self.lanes.leave(self.lane, &self.lease)?;
        match self.lanes.lingers(&unused) {
            true => None,
            false => Some(Leaving(self)),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.open
            && !self.lanes.shared.is_forked()
            && let Some(unused) = self.lanes.leave(self.lane, &self.lease)
        {
            self.lanes.give_back(&unused);
            self.lanes.passed_on(self.lane, &self.lease);
        }
    }
}

/// The last user of a ticket releases it at the store. A [group](super::groups) that gathers goes on
/// to do so meanwhile.
pub(crate) struct Leaving(Share);

impl Drop for Leaving {
    fn drop(&mut self) {
        let Share {
            lanes, lane, lease, ..
        } = &self.0;
        lanes.passed_on(*lane, lease);
    }
}

/// The role of asking the store on behalf of a lane. Dropping it makes the next task in line the
/// leader. That task gets the ticket in the store's line, if there is one and the task can use it.
pub(crate) struct Leader {
    lanes: Arc<Lanes>,
    pub(crate) role: Role,
    exclusive: bool,
    /// The ticket, after it was asked for.
    pub(crate) pending: Option<Pending>,
    /// Whether the role has not ended and has not gone to another task.
    open: bool,
}

impl Leader {
    fn new(lanes: &Arc<Lanes>, which: Which<'_>, exclusive: bool, number: u64) -> Self {
        Self {
            lanes: Arc::clone(lanes),
            role: Role {
                name: which.name.clone(),
                lane: which.lane,
                number,
            },
            exclusive,
            pending: None,
            open: true,
        }
    }

    /// The store has granted the ticket, and from now on other tasks may use it as well. If this
    /// leader was late and was replaced, the lease is returned as `Err`: only the caller may use
    /// its ticket.
    pub(crate) fn granted(mut self, lease: Arc<Lease>, now: Instant) -> Result<Share, Arc<Lease>> {
        self.open = false;
        let (number, mut begun) = (self.role.number, false);
        let which = self.role.which();
        self.lanes.change(which, |lane| {
            lease.set_lane(which.lane);
            begun = lane.begin(&lease, number, now);
        });
        match begun {
            true => Ok(Share::new(&self.lanes, self.role.lane, lease, 0)),
            false => Err(lease),
        }
    }

    /// Reports that the store is in trouble. A waiter that has waited for an operation timeout gets
    /// the same error, because it would have got that error by asking the store itself. The next of
    /// the other waiters becomes the leader.
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
        let number = self.role.number;
        self.lanes.change(self.role.which(), |lane| {
            // A leader that was replaced must not fail the waiters of the lane.
            if lane.leader_of(number).is_some() {
                let (old, young) = lane.line.drain(..).partition(|w| w.since <= long_ago);
                (refused, lane.line) = (old, young);
                lane.end_leader(number);
            }
        });
        for waiter in refused {
            let refusal = Parcel::new(Mutex::new(Some(Handover::Refused(error.clone()))));
            // This runs wakers. If a waker panics, the waiters behind it get the error all the
            // same.
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
        // The next task gets the ticket too, because a new ticket would begin at the end of the
        // store's line.
        let mut pending = self.pending.take().filter(Pending::is_in_line);
        let lanes = &self.lanes;
        let (which, number) = (self.role.which(), self.role.number);
        while let Some(place) = pending.take() {
            let now = self.lanes.shared.clock.now();
            let mut state = lanes.state();
            let Some(lane) = state.lane(which) else {
                break;
            };
            // The ticket goes only to a waiter that can use it. A writer cannot use a reader's
            // ticket. A waiter in another runtime would not get the wake-up of the ticket.
            let heir = lane.front().is_some_and(|heir| {
                heir.exclusive == self.exclusive && place.is_heard(heir.runtime)
            });
            let is_ours = lane.leader_of(number).is_some();
            let Some(heir) = (heir && is_ours).then(|| lane.line.pop_front()).flatten() else {
                break;
            };
            let parcel = lane.new_parcel(now);
            drop(state);
            let mut leader = Leader::new(&self.lanes, which, self.exclusive, number);
            leader.pending = Some(place);
            *locked(&parcel) = Some(Handover::Leader(leader));
            let mut unsent = None;
            guarded(|| unsent = heir.handover.send(parcel).err());
            let Some(parcel) = unsent else {
                // Sets the alarm that replaces the new leader if the new leader is not polled.
                return lanes.change(which, |_| ());
            };
            if let Some(Handover::Leader(mut leader)) = take(&parcel) {
                leader.open = false;
                pending = leader.pending.take();
            }
        }
        let end = |lane: &mut Lane<Handover>| lane.end_leader(number);
        lanes.change(which, end);
    }
}

/// A position in the line of this process. Resolves to the hand-over that the waiter gets.
///
/// If this value is dropped before it has a hand-over, the waiter leaves the line. If it is dropped
/// with a hand-over, the next waiter gets that hand-over.
pub(crate) struct Waiting {
    lanes: Arc<Lanes>,
    name: Name,
    lane: u64,
    given: oneshot::Receiver<Parcel<Handover>>,
    over: bool,
}

impl Future for Waiting {
    /// `None` if the lane has taken the hand-over back, because this future was not polled for too
    /// long.
    type Output = Option<Handover>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Handover>> {
        let given = Pin::new(&mut self.given).poll(cx);
        given.map(|given| {
            self.over = true;
            match given {
                Ok(parcel) => take(&parcel),
                // The client drops the sender when it is shut down.
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
        let (name, lane) = (&self.name, self.lane);
        if let Some(lane) = self.lanes.state().lane(Which { name, lane }) {
            lane.gone += 1;
            lane.count_out();
        }
    }
}
