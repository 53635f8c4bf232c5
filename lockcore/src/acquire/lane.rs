//! The queue of one name inside one process: plain data. What is handed over, `B`, and who is told, is
//! in `lanes`.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime;

use crate::client::alarms::Alarm;
use crate::client::lease::{COLLECTED_WITHIN, Lease};
use crate::clock::Instant;
use crate::sync::{Mutex, MutexGuard, oneshot};

/// Hand-overs of one ticket: the low 10 bits of a fencing token count them.
const MOST_HAND_OVERS: usize = 1_000;
/// Fewer would not be worth a ticket: a hand-over in memory takes a microsecond, one at a store a
/// hundred.
const FEWEST_HAND_OVERS: usize = 64;
/// How often each of those who wait in a process is served before the next process has its turn.
/// Measured with 4 processes of 16 tasks that hold for no time: twice each gives 190,000 hand-overs a
/// second and a p99 of 2.6 times the mean wait; 60 times each 590,000 and 34 times the mean.
const TURNS_EACH: usize = 4;

/// One name's queue. Plain data but for the alarm at the bound.
///
/// Nobody in `line` is served while somebody has the errand, who was here before: first come, first
/// served inside the process.
pub(super) struct Lane<B> {
    /// Of everybody in it: a ticket is passed on between equals only.
    pub(super) ttl: Duration,
    /// How long an errand may take to get a place in the store's line before it is given to another
    /// task as well. One whose task is polled has an answer, or an error, within an operation timeout.
    pub(super) errand_within: Duration,
    /// The ticket that who comes next may use.
    pub(super) current: Option<Tenure>,
    /// Tickets that nobody joins any more, until their last user leaves.
    pub(super) draining: Vec<Tenure>,
    /// A task is at the store for the next ticket.
    pub(super) errand: Option<AtTheStore>,
    pub(super) line: VecDeque<Waiter<B>>,
    /// How many of `line` have gone since they were last counted out.
    pub(super) gone: usize,
    /// What waiters were given and have perhaps not collected, the oldest first. One that is gone was
    /// collected, or its waiter has gone with it.
    pub(super) given: VecDeque<(Instant, Weak<Mutex<Option<B>>>)>,
    /// Rings when the oldest of `given`, or the errand, is overdue.
    pub(super) recall: Option<Alarm>,
}

/// An errand that was given out and is neither done nor passed on.
pub(super) struct AtTheStore {
    /// Which: an errand that was taken from its task for being late is not the lane's any more.
    pub(super) number: u64,
    pub(super) since: Instant,
    pub(super) shared: bool,
    /// Its place in the store's line, once it has one. The keeper looks after that.
    pub(super) ticket: Option<Arc<Lease>>,
}

/// What a waiter was given, until it collects it or it is taken back.
pub(super) type Parcel<B> = Arc<Mutex<Option<B>>>;

/// When something is judged, and by what.
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
    /// When to let other processes have their turn, whatever the time.
    pub(super) most_hand_overs: u16,
    /// Rings at the bound, if somebody waits.
    pub(super) alarm: Option<Alarm>,
}

pub(super) struct Waiter<B> {
    pub(super) exclusive: bool,
    pub(super) since: Instant,
    /// Where it waits, and where the wake-ups of its ticket would have to go.
    pub(super) runtime: Option<runtime::Id>,
    pub(super) baton: oneshot::Sender<Parcel<B>>,
}

/// What is to be done outside of the mutex.
pub(super) enum Next<B> {
    Given(Waiter<B>, Gift<B>),
    /// Nobody has collected it.
    TakenBack(Option<B>),
}

/// What [`Lane::advance`] has for a waiter.
pub(super) struct Gift<B> {
    pub(super) of: Of,
    /// Still empty.
    pub(super) parcel: Parcel<B>,
}

pub(super) enum Of {
    Share(Arc<Lease>, u16),
    Errand(u64),
}

pub(super) fn locked<B>(parcel: &Parcel<B>) -> MutexGuard<'_, Option<B>> {
    parcel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes out what is in a parcel, if it is still there.
pub(super) fn take<B>(parcel: &Parcel<B>) -> Option<B> {
    locked(parcel).take()
}

impl<B> Lane<B> {
    pub(super) fn new(ttl: Duration, op_timeout: Duration) -> Self {
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
    pub(super) fn advance(&mut self, at: Moment, errands: &mut u64, given: &mut VecDeque<Next<B>>) {
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

    pub(super) fn begin_errand(&mut self, exclusive: bool, now: Instant, errands: &mut u64) -> u64 {
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
    pub(super) fn errand_of(&mut self, number: u64) -> Option<&mut AtTheStore> {
        self.errand
            .as_mut()
            .filter(|errand| errand.number == number)
    }

    /// The errand that waits with a ticket.
    pub(super) fn errand_with(&mut self, lease: &Arc<Lease>) -> Option<&mut AtTheStore> {
        self.errand.as_mut().filter(|errand| {
            let ticket = errand.ticket.as_ref();
            ticket.is_some_and(|ticket| Arc::ptr_eq(ticket, lease))
        })
    }

    pub(super) fn end_errand(&mut self, number: u64) {
        self.errand.take_if(|errand| errand.number == number);
    }

    /// What was collected, the oldest first, needs no looking after any more.
    pub(super) fn forget_collected(&mut self) {
        while self
            .given
            .front()
            .is_some_and(|(_, parcel)| parcel.strong_count() == 0)
        {
            self.given.pop_front();
        }
    }

    /// When the oldest that was given has to be collected.
    pub(super) fn collect_by(&self) -> Option<Instant> {
        let (since, _) = self.given.front()?;
        Some(since.after(self.ttl.mul_f64(COLLECTED_WITHIN)))
    }

    /// When an errand that has no place in the store's line is late.
    pub(super) fn errand_by(&self) -> Option<Instant> {
        let errand = self
            .errand
            .as_ref()
            .filter(|errand| errand.ticket.is_none())?;
        Some(errand.since.after(self.errand_within))
    }

    /// Takes back what waiters were given and have not collected, and an errand that has come to
    /// nothing: their tasks are not polled, and others wait.
    pub(super) fn take_back_overdue(&mut self, now: Instant, taken: &mut VecDeque<Next<B>>) {
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

    pub(super) fn end_late_errand(&mut self, now: Instant) {
        if self.errand_by().is_some_and(|by| by <= now) {
            self.errand = None;
        }
    }

    /// Lets one more use the ticket that the process holds, if that is possible and fair.
    pub(super) fn serve(&mut self, exclusive: bool, at: Moment) -> Option<(Arc<Lease>, u16)> {
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
    pub(super) fn is_worth_waiting_for(&self, exclusive: bool, at: Moment) -> bool {
        self.current.as_ref().is_some_and(|tenure| {
            exclusive
                && tenure.users > 0
                && tenure.lease.is_exclusive()
                && tenure.lease.deadline() > at.now
                && tenure.is_within(at)
        })
    }

    /// For how long the process itself keeps a request out, if it does.
    pub(super) fn excludes(&self, exclusive: bool, now: Instant) -> Option<Duration> {
        let tenure = self.current.as_ref().filter(|tenure| tenure.users > 0)?;
        let excludes = exclusive || tenure.lease.is_exclusive();
        let remaining = now.until(tenure.lease.deadline());
        (excludes && !remaining.is_zero()).then_some(remaining)
    }

    /// The store has granted a ticket to the task that had the errand. False if the errand is not
    /// the lane's any more, and the ticket none that others here may use.
    pub(super) fn begin(&mut self, lease: &Arc<Lease>, number: u64, now: Instant) -> bool {
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

    pub(super) fn leave(&mut self, lease: &Arc<Lease>) {
        let tenures = self.draining.iter_mut().chain(&mut self.current);
        for tenure in tenures {
            if Arc::ptr_eq(&tenure.lease, lease) {
                tenure.users -= 1;
            }
        }
    }

    /// Nobody joins this ticket any more.
    pub(super) fn retire(&mut self, lease: &Arc<Lease>) {
        let is_it = |tenure: &mut Tenure| Arc::ptr_eq(&tenure.lease, lease);
        self.draining.extend(self.current.take_if(is_it));
    }

    /// A ticket without users; one at most, because every change is followed by this.
    pub(super) fn take_unused(&mut self) -> Option<Arc<Lease>> {
        let current = self.current.take_if(|tenure| tenure.users == 0);
        let unused = current.or_else(|| {
            let at = self.draining.iter().position(|tenure| tenure.users == 0)?;
            Some(self.draining.swap_remove(at))
        });
        unused.map(|tenure| tenure.lease)
    }

    pub(super) fn is_idle(&self) -> bool {
        let tickets = self.current.is_some() || !self.draining.is_empty();
        !tickets && self.errand.is_none() && self.line.is_empty()
    }

    /// Sees to it that the front waits neither beyond the bound nor for a task that is not polled.
    /// False when one of these times has come already.
    pub(super) fn set_alarms(
        &mut self,
        bound: Duration,
        ring: impl Fn(Instant) -> (Alarm, bool),
    ) -> bool {
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
            let (alarm, pending) = ring(by);
            self.recall = Some(alarm);
            in_time = pending;
        }
        if !self.line.is_empty()
            && self.errand.is_none()
            && let Some(tenure) = self.current.as_mut().filter(|t| t.alarm.is_none())
        {
            let (alarm, pending) = ring(tenure.since.after(bound));
            tenure.alarm = Some(alarm);
            in_time &= pending;
        }
        in_time
    }

    /// Forgets those of the line who have gone, now and then: a lock that is held for hours must not
    /// collect all who have given up meanwhile.
    pub(super) fn count_out(&mut self) {
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
    pub(super) fn is_within(&self, at: Moment) -> bool {
        self.lease.hand_overs() < self.most_hand_overs
            && at.now < self.since.after(at.bound)
            && self.lease.is_confirmed_in(at.epoch)
    }
}
