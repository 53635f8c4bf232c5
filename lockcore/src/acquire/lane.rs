//! The queue of one name inside one process, as plain data. `H` is the value that a waiter gets.
//! `lanes` makes these values and sends them.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime;

use super::pending::Pace;
use crate::client::alarms::Alarm;
use crate::client::lease::{COLLECTED_WITHIN, Lease};
use crate::clock::Instant;
use crate::sync::{Mutex, MutexGuard, oneshot};

/// The most hand-overs of one ticket. The low 10 bits of a fencing token count them.
pub(super) const MOST_HAND_OVERS: usize = 1_000;
/// One ticket may always be handed over this many times, because a hand-over in memory takes 1 µs,
/// and one at a store 100 µs.
const FEWEST_HAND_OVERS: usize = 64;
/// How many hand-overs are allowed for each waiter of a process, before the next process is served.
///
/// Measured with 4 processes of 16 tasks that release at once. With 2 per waiter there are 190,000
/// hand-overs per second, and the p99 of the wait is 2.6 times its mean. With 60 per waiter there
/// are 590,000 hand-overs per second, and the p99 is 34 times the mean.
const HAND_OVERS_EACH: usize = 4;

/// The queue of one name.
///
/// The *leader* is the task that asks the store on behalf of the lane. It came before every task in
/// `line`. So the lane serves nobody in `line` while there is a leader: first come, first served.
pub(super) struct Lane<H> {
    /// The ttl of every task in the lane. A ticket is handed over only between tasks that asked for
    /// the same ttl.
    pub(super) ttl: Duration,
    /// How long a leader may take to get a ticket at the store. After that another task becomes the
    /// leader, because a leader that is polled has an answer or an error within one operation
    /// timeout.
    lead_within: Duration,
    /// The ticket that the next task may use.
    pub(super) current: Option<Tenure>,
    /// Tickets that no further task may use. Each stays until its last user leaves.
    draining: Vec<Tenure>,
    /// The task that asks the store for the next ticket.
    pub(super) leader: Option<Leading>,
    /// When the leader may ask the store again, if the store has refused a leader, because it has no
    /// line or because the line is full.
    pub(super) pace: Option<Pace>,
    pub(super) line: VecDeque<Waiter<H>>,
    /// How many waiters of `line` have given up since the line was last cleaned.
    pub(super) gone: usize,
    /// The parcels that waiters have got, oldest first. If a parcel does not exist any more, its
    /// waiter has collected it or was dropped with it.
    pub(super) given: VecDeque<(Instant, Weak<Mutex<Option<H>>>)>,
    /// Rings when the oldest parcel, or the leader, is overdue.
    recall: Option<Alarm>,
}

/// What a lane knows of its leader.
pub(super) struct Leading {
    /// Tells leaders apart. A leader that was late was replaced, and does not act for the lane any
    /// more.
    pub(super) number: u64,
    pub(super) since: Instant,
    /// Whether the leader asks for the read side.
    pub(super) shared: bool,
    /// The leader's ticket in the store's line, if it has one. The keeper recalls this ticket if
    /// the leader is not polled.
    pub(super) ticket: Option<Arc<Lease>>,
}

impl Leading {
    /// The leader has no ticket any more, and asks for a new one.
    pub(super) fn begin_again(&mut self, now: Instant) {
        (self.ticket, self.since) = (None, now);
    }
}

/// The value that a waiter gets. It is in the parcel until the waiter collects it, or the lane
/// takes it back.
pub(super) type Parcel<H> = Arc<Mutex<Option<H>>>;

/// What the decisions of a lane depend on, beside its own state.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    pub(super) now: Instant,
    /// See [`Fair::Local`](crate::Fair::Local).
    pub(super) bound: Duration,
    /// See [`Shared::epoch`](crate::client::shared::Shared::epoch).
    pub(super) epoch: u64,
}

/// A ticket that the process holds.
pub(super) struct Tenure {
    pub(super) lease: Arc<Lease>,
    pub(super) since: Instant,
    pub(super) users: u32,
    /// After this many hand-overs other processes are served, even if the bound is not reached.
    most_hand_overs: u16,
    /// Rings at the bound, if a task waits.
    pub(super) alarm: Option<Alarm>,
}

/// A ticket that has no users any more.
pub(super) struct Unused {
    pub(super) lease: Arc<Lease>,
    /// Whether a task that comes soon may go on with it. Not if the ticket was retired, or if others
    /// of this process ask for the name already: they ask the store.
    pub(super) may_go_on: bool,
}

/// A task that waits in the lane.
pub(super) struct Waiter<H> {
    pub(super) exclusive: bool,
    pub(super) since: Instant,
    /// The runtime in which the task waits. Only that runtime's connection would bring it a
    /// wake-up.
    pub(super) runtime: Option<runtime::Id>,
    pub(super) handover: oneshot::Sender<Parcel<H>>,
}

/// Its drop tells the leader of a group that it may ask the store. It runs a waker, so no mutex may be
/// held.
pub(super) type Go = oneshot::Sender<()>;

/// Work that remains to be done after the mutex is free.
pub(super) enum Next<H> {
    Given(Waiter<H>, Gift<H>),
    /// A value that was not collected in time.
    TakenBack(Option<H>),
    /// The leader of the next group may ask the store.
    Go(Go),
}

/// A decision of [`Lane::advance`] for one waiter.
pub(super) struct Gift<H> {
    pub(super) of: Of,
    /// The parcel for the value, which is empty at first.
    pub(super) parcel: Parcel<H>,
}

pub(super) enum Of {
    Share(Arc<Lease>, u16),
    Leader(u64),
}

pub(super) fn locked<H>(parcel: &Parcel<H>) -> MutexGuard<'_, Option<H>> {
    parcel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes what is in a parcel, if it is still there.
pub(super) fn take<H>(parcel: &Parcel<H>) -> Option<H> {
    locked(parcel).take()
}

impl<H> Lane<H> {
    pub(super) fn new(ttl: Duration, op_timeout: Duration) -> Self {
        Self {
            ttl,
            lead_within: ttl.max(op_timeout.saturating_mul(2)),
            current: None,
            draining: Vec::new(),
            leader: None,
            pace: None,
            line: VecDeque::new(),
            gone: 0,
            given: VecDeque::new(),
            recall: None,
        }
    }

    /// Adds a task to the end of the line. Returns how it gets its hand-over.
    pub(super) fn join(&mut self, exclusive: bool, now: Instant) -> oneshot::Receiver<Parcel<H>> {
        let (handover, given) = oneshot::channel();
        self.line.push_back(Waiter {
            exclusive,
            since: now,
            runtime: runtime::Handle::try_current().ok().map(|here| here.id()),
            handover,
        });
        given
    }

    /// Whether tasks of the lane pass its ticket on to each other.
    pub(super) fn passes_on(&self) -> bool {
        self.current.as_ref().is_some_and(|tenure| {
            tenure.users > 0 && (!self.line.is_empty() || tenure.lease.hand_overs() > 0)
        })
    }

    /// Serves from the front of the line.
    pub(super) fn advance(&mut self, at: Moment, leaders: &mut u64, given: &mut VecDeque<Next<H>>) {
        while self.leader.is_none() {
            let Some(exclusive) = self.front().map(|front| front.exclusive) else {
                return;
            };
            let of = match self.serve(exclusive, at) {
                Some((lease, hand_overs)) => Of::Share(lease, hand_overs),
                None if self.is_worth_waiting_for(exclusive, at) => return,
                None => Of::Leader(self.begin_leader(exclusive, at.now, leaders)),
            };
            let Some(waiter) = self.line.pop_front() else {
                return; // not reached: `front` has just found one
            };
            let parcel = self.new_parcel(at.now);
            given.push_back(Next::Given(waiter, Gift { of, parcel }));
        }
    }

    /// The first waiter of the line that has not given up. Removes the waiters in front of it.
    pub(super) fn front(&mut self) -> Option<&Waiter<H>> {
        while self.line.front().is_some_and(|w| w.handover.is_closed()) {
            self.line.pop_front();
        }
        self.line.front()
    }

    /// An empty parcel for a waiter. The lane takes the parcel back if the waiter does not collect
    /// it in time.
    pub(super) fn new_parcel(&mut self, now: Instant) -> Parcel<H> {
        self.forget_collected();
        let parcel = Parcel::default();
        self.given.push_back((now, Arc::downgrade(&parcel)));
        parcel
    }

    pub(super) fn begin_leader(&mut self, exclusive: bool, now: Instant, leaders: &mut u64) -> u64 {
        *leaders += 1;
        self.leader = Some(Leading {
            number: *leaders,
            since: now,
            shared: !exclusive,
            ticket: None,
        });
        *leaders
    }

    /// The leader with this number, unless another has replaced it.
    pub(super) fn leader_of(&mut self, number: u64) -> Option<&mut Leading> {
        self.leader
            .as_mut()
            .filter(|leader| leader.number == number)
    }

    /// The leader that waits in the store's line with this ticket.
    pub(super) fn leader_with(&mut self, lease: &Arc<Lease>) -> Option<&mut Leading> {
        self.leader.as_mut().filter(|leader| {
            let ticket = leader.ticket.as_ref();
            ticket.is_some_and(|ticket| Arc::ptr_eq(ticket, lease))
        })
    }

    pub(super) fn end_leader(&mut self, number: u64) {
        self.leader.take_if(|leader| leader.number == number);
    }

    /// Forgets the oldest parcels that were collected, up to the first that was not.
    fn forget_collected(&mut self) {
        while self
            .given
            .front()
            .is_some_and(|(_, parcel)| parcel.strong_count() == 0)
        {
            self.given.pop_front();
        }
    }

    /// When the oldest parcel is overdue.
    fn collect_by(&self) -> Option<Instant> {
        let (since, _) = self.given.front()?;
        Some(since.after(self.ttl.mul_f64(COLLECTED_WITHIN)))
    }

    /// When a leader that has no ticket yet is late.
    fn leader_by(&self) -> Option<Instant> {
        let leader = self
            .leader
            .as_ref()
            .filter(|leader| leader.ticket.is_none())?;
        Some(leader.since.after(self.lead_within))
    }

    /// Takes back the parcels that were not collected in time, and ends a leader that is late. The
    /// tasks of these are not polled, and other tasks wait for them.
    pub(super) fn take_back_overdue(&mut self, now: Instant, taken: &mut VecDeque<Next<H>>) {
        self.forget_collected();
        while self.collect_by().is_some_and(|by| by <= now) {
            let overdue = self
                .given
                .pop_front()
                .and_then(|(_, parcel)| parcel.upgrade());
            // The caller drops the value of the parcel after the mutex is free. This drop gives the
            // value to the next waiter.
            taken.extend(overdue.map(|parcel| Next::TakenBack(take(&parcel))));
            self.forget_collected();
        }
        self.end_late_leader(now);
    }

    pub(super) fn end_late_leader(&mut self, now: Instant) {
        if self.leader_by().is_some_and(|by| by <= now) {
            self.leader = None;
        }
    }

    /// Lets one more task use the ticket that the process holds, if that is possible and fair.
    pub(super) fn serve(&mut self, exclusive: bool, at: Moment) -> Option<(Arc<Lease>, u16)> {
        let tenure = self.current.as_mut()?;
        // The session of a store may give less than the lane asks for.
        let ttl = self.ttl.min(tenure.lease.ttl());
        // All users of a ticket use the same permits. So `queue::granted`, the rule that counts
        // permits, does not decide here. A reader does not join an exclusive ticket, because that
        // would keep the readers of other processes out. Nobody joins a ticket that is being
        // downgraded, because the store may or may not have granted the lock to readers of other
        // processes.
        let fits = match tenure.lease.is_exclusive() {
            true => exclusive && tenure.users == 0,
            false => !exclusive && tenure.lease.is_shared(),
        };
        // With half of the ttl left, there is time for two more attempts to renew.
        let fresh = at.now.until(tenure.lease.deadline()) >= ttl / 2;
        if !fits || !fresh || !tenure.is_within(at) {
            return None;
        }
        tenure.users += 1;
        let hand_overs = tenure.lease.pass_on();
        Some((Arc::clone(&tenure.lease), hand_overs))
    }

    /// Whether a task that cannot be served now will probably get the present ticket. This is so if
    /// the ticket is exclusive and in use, and the bound is not reached.
    pub(super) fn is_worth_waiting_for(&self, exclusive: bool, at: Moment) -> bool {
        self.current.as_ref().is_some_and(|tenure| {
            exclusive
                && tenure.users > 0
                && tenure.lease.is_exclusive()
                && tenure.lease.deadline() > at.now
                && tenure.is_within(at)
        })
    }

    /// Whether the ticket of this process excludes a request, and if so, for how long.
    pub(super) fn excludes(&self, exclusive: bool, now: Instant) -> Option<Duration> {
        let tenure = self.current.as_ref().filter(|tenure| tenure.users > 0)?;
        let excludes = exclusive || tenure.lease.is_exclusive();
        let remaining = now.until(tenure.lease.deadline());
        (excludes && !remaining.is_zero()).then_some(remaining)
    }

    /// The store has granted a ticket to the leader with this number. Returns false if another
    /// leader has replaced it. In that case no other task of the lane may use the ticket.
    pub(super) fn begin(&mut self, lease: &Arc<Lease>, number: u64, now: Instant) -> bool {
        if self.leader_of(number).is_none() {
            return false;
        }
        self.end_leader(number);
        self.pace = None;
        // A few hand-overs per waiter, so that other processes do not wait much longer than these
        // waiters.
        let a_few_each = HAND_OVERS_EACH * (self.line.len() + 1);
        let tenure = Tenure {
            lease: Arc::clone(lease),
            since: now,
            users: 1,
            most_hand_overs: a_few_each.clamp(FEWEST_HAND_OVERS, MOST_HAND_OVERS) as u16,
            alarm: None,
        };
        self.draining.extend(self.current.replace(tenure));
        // Somebody may have asked the holder to give the ticket up before the lane knew of the
        // ticket. If somebody asks later, `retire` is called.
        if lease.is_asked_back() {
            self.draining.extend(self.current.take());
        }
        true
    }

    pub(super) fn leave(&mut self, lease: &Arc<Lease>) {
        let tenures = self.draining.iter_mut().chain(&mut self.current);
        for tenure in tenures {
            if Arc::ptr_eq(&tenure.lease, lease) {
                tenure.users -= 1;
            }
        }
    }

    /// No further task may use this ticket.
    pub(super) fn retire(&mut self, lease: &Arc<Lease>) {
        let is_it = |tenure: &mut Tenure| Arc::ptr_eq(&tenure.lease, lease);
        self.draining.extend(self.current.take_if(is_it));
    }

    /// As [`retire`](Self::retire), if the ticket has only one user. Returns whether it has only
    /// one.
    pub(super) fn retire_if_only(&mut self, lease: &Arc<Lease>) -> bool {
        let mut tenures = self.draining.iter().chain(&self.current);
        let used = tenures.find(|tenure| Arc::ptr_eq(&tenure.lease, lease));
        let is_only = used.is_some_and(|tenure| tenure.users == 1);
        if is_only {
            self.retire(lease);
        }
        is_only
    }

    /// Takes out a ticket without users. There is at most one, because this is called after every
    /// change.
    pub(super) fn take_unused(&mut self) -> Option<Unused> {
        let current = self.current.take_if(|tenure| tenure.users == 0);
        let may_go_on = current.is_some() && self.is_idle();
        let unused = current.or_else(|| {
            let at = self.draining.iter().position(|tenure| tenure.users == 0)?;
            Some(self.draining.swap_remove(at))
        });
        unused.map(|tenure| Unused {
            lease: tenure.lease,
            may_go_on,
        })
    }

    /// Lets a task go on with a ticket whose last user was done a moment ago, if a task in line could
    /// have got that ticket from the last user.
    pub(super) fn go_on(
        &mut self,
        lease: &Arc<Lease>,
        exclusive: bool,
        at: Moment,
    ) -> Option<(Arc<Lease>, u16)> {
        // The bound counts from the grant, as for the earlier users of the ticket. The time when the
        // grant was reported is a little earlier than the time that they counted from.
        let (mut since, mut most_hand_overs) = (lease.granted_at()?, FEWEST_HAND_OVERS);
        if lease.lingers_until(at.now).is_some() {
            // Nobody waits, so the bound counts from now.
            let some_more = usize::from(lease.hand_overs()) + FEWEST_HAND_OVERS;
            (since, most_hand_overs) = (at.now, some_more.min(MOST_HAND_OVERS));
        }
        if lease.request.ttl != self.ttl || lease.is_asked_back() {
            return None;
        }
        self.current = Some(Tenure {
            lease: Arc::clone(lease),
            since,
            users: 0,
            most_hand_overs: most_hand_overs as u16,
            alarm: None,
        });
        let served = self.serve(exclusive, at);
        if served.is_none() {
            self.current = None;
        }
        served
    }

    pub(super) fn is_idle(&self) -> bool {
        let tickets = self.current.is_some() || !self.draining.is_empty();
        !tickets && self.leader.is_none() && self.line.is_empty()
    }

    /// Sets the alarms: for the bound, and for tasks that are not polled. Returns false if one of
    /// these times has come already.
    pub(super) fn set_alarms(
        &mut self,
        bound: Duration,
        ring: impl Fn(Instant) -> (Alarm, bool),
    ) -> bool {
        // Only the tasks in line depend on the leader.
        let leader_by = self.leader_by().filter(|_| !self.line.is_empty());
        let overdue = [self.collect_by(), leader_by];
        let mut in_time = true;
        if let Some(by) = overdue.into_iter().flatten().min()
            && self
                .recall
                .as_ref()
                .is_none_or(|alarm| !alarm.will_ring_by(by))
        {
            let (alarm, pending) = ring(by);
            self.recall = Some(alarm);
            in_time = pending;
        }
        if !self.line.is_empty()
            && self.leader.is_none()
            && let Some(tenure) = self.current.as_mut().filter(|t| t.alarm.is_none())
        {
            let at = tenure.since.after(bound);
            // There is no bound with `Fair::Strict`.
            if at < Instant::FAR_FUTURE {
                let (alarm, pending) = ring(at);
                tenure.alarm = Some(alarm);
                in_time &= pending;
            }
        }
        in_time
    }

    /// Removes the waiters that have given up, if they are more than half of the line. Without
    /// this, the line of a lock that is held for hours would grow with every waiter that gives up.
    pub(super) fn count_out(&mut self) {
        if self.gone * 2 > self.line.len() {
            self.line.retain(|waiter| !waiter.handover.is_closed());
            self.gone = 0;
        }
    }
}

impl Tenure {
    /// Whether other tasks of this process may use the ticket. The bound must not be reached, and
    /// the store must have confirmed the ticket since the last gap. Without such a confirmation
    /// another process may hold the lock by now, with higher tokens.
    fn is_within(&self, at: Moment) -> bool {
        self.lease.hand_overs() < self.most_hand_overs
            && at.now < self.since.after(at.bound)
            && self.lease.is_confirmed_in(at.epoch)
    }
}
