//! The table of the tickets that this process has requested and has not given up: when the keeper
//! must check each ticket, the alarms, and the pending clean-ups. This is plain data: it sends no
//! requests and wakes no task.

mod after_use;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::backlog::{Backlog, class};
use super::lease::Lease;
use super::leftovers::Leftovers;
use super::pace::{BATCH, Outcome, Pace};
use super::tracked::{Cleanup, Kind, RenewalStage, Stage, Tracked};
use super::turns::Turns;
use crate::backend::CountOp;
use crate::clock::Instant;
use crate::hash::Prehashed;
use crate::name::Name;
use crate::request::Id;

/// How many tickets one round checks for the [sweep](Table::sweep). This many take some 100 µs.
const SWEPT: usize = 1_000;

/// How long a warning about an overload is not repeated.
const TOLD_EVERY: Duration = Duration::from_secs(60);

pub(crate) struct Table {
    /// Every ticket that this process has asked for and not finished with.
    pub(crate) leases: Prehashed<Id, Tracked>,
    /// When the keeper must check a lease: never later than its renewal or its deadline.
    pub(crate) due: BTreeSet<(Instant, Id)>,
    /// Tickets whose renewal is due and has not begun.
    held: Backlog,
    waiting: Backlog,
    /// When an overload was told for the last time.
    told: Option<Instant>,
    /// After a gap, the keeper must renew every ticket. The sweep goes through `due` in order, and
    /// this is the entry that it has reached. The sweep skips tickets that were renewed since the
    /// gap. This is a position, because a list of perhaps 100,000 tickets would take too long to
    /// make under the mutex.
    sweep: Option<(Instant, Id)>,
    pub(crate) alarms: BTreeMap<(Instant, u64), Waker>,
    pub(crate) alarms_set: u64,
    /// Tickets that the keeper must remove at the store. No request for this has been sent yet.
    pub(crate) cleanups: Vec<Cleanup>,
    pub(super) leftovers: Leftovers,
    turns: Turns,
    /// The tickets that linger.
    lingering: Prehashed<Name, Id>,
    /// See [`Shared::change_at_end`](super::shared::Shared::change_at_end).
    pub(crate) at_end: Prehashed<Id, AtEnd>,
    /// How many of the leases are kept after their use.
    kept: usize,
    /// How many clean-ups are not finished, both queued and in progress.
    pub(crate) cleanups_open: usize,
    /// Whether a shutdown waits, or has waited, until nothing is in use.
    idle_awaited: bool,
    /// When the keeper will wake by itself. A caller that adds something earlier wakes it.
    pub(crate) next_wake: Instant,
    pub(crate) phase: Phase,
}

/// A change of a counter or a value that is made when a ticket has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AtEnd {
    pub(crate) counter: Name,
    pub(crate) op: CountOp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// `shutdown` was called: new requests are refused.
    ShutDown,
    /// The last handle is gone. The keeper ends when the clean-up is done, but at this time at the
    /// latest.
    Ending(Instant),
}

/// The work that is due in one round of the keeper.
#[derive(Default)]
pub(crate) struct Round {
    /// Batches to renew. At the end of each batch the keeper calls [`Table::renewed`].
    pub(crate) renew: Vec<(Kind, Vec<Arc<Lease>>)>,
    /// How many held leases of `expired` have waited for their turn to the end.
    left_out: usize,
    /// The store cannot renew all held leases in time, and this has not been told lately.
    pub(crate) overload: Option<Overload>,
    pub(crate) expired: Vec<(Arc<Lease>, Stage)>,
    /// Leases that were granted, and whose tasks did not collect the grant. Their clean-ups are in
    /// `cleanups`.
    pub(crate) recalled: Vec<Arc<Lease>>,
    pub(crate) alarms: Vec<Waker>,
    pub(crate) cleanups: Vec<Cleanup>,
    pub(crate) end: bool,
    pub(crate) next: Option<Instant>,
}

/// More leases than the store can renew in time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overload {
    /// How many leases there are.
    pub(crate) leases: usize,
    /// How many of them are left out at this moment, or have just ended because of that.
    pub(crate) left_out: usize,
    /// How many renewals the store answers in a second.
    pub(crate) rate: f64,
}

impl Table {
    /// A table for a store that wants at most this number of renewals in flight.
    pub(crate) fn new(renewals_in_flight: u32) -> Self {
        let batches = renewals_in_flight as usize / BATCH;
        Self {
            leases: Prehashed::default(),
            due: BTreeSet::new(),
            held: Backlog::new(Pace::up_to(batches)),
            // Waiters are renewed beside the holders, but never crowd them out at the store.
            waiting: Backlog::new(Pace::up_to(batches / 4)),
            told: None,
            sweep: None,
            alarms: BTreeMap::new(),
            alarms_set: 0,
            cleanups: Vec::new(),
            leftovers: Leftovers::default(),
            turns: Turns::default(),
            lingering: Prehashed::default(),
            at_end: Prehashed::default(),
            kept: 0,
            cleanups_open: 0,
            idle_awaited: false,
            next_wake: Instant::FAR_FUTURE,
            phase: Phase::Open,
        }
    }

    /// Takes all work that is due at `now`, and computes the time of the next round. During an
    /// outage, its warning is enough, and nothing is told of an overload.
    pub(crate) fn take_round(&mut self, now: Instant, epoch: u64, outage: bool) -> Round {
        let mut round = Round {
            cleanups: std::mem::take(&mut self.cleanups),
            ..Round::default()
        };
        for cleanup in &round.cleanups {
            if let Some(ended) = cleanup.ended {
                // Nobody is known to be behind it, but somebody may come.
                let nobody = self.turns.end(cleanup.request.id, |_| true, ended);
                debug_assert!(nobody.is_none(), "it is not in the table");
            }
        }
        while let Some(entry) = self.alarms.first_entry()
            && entry.key().0 <= now
        {
            round.alarms.push(entry.remove());
        }
        while let Some(&(due, id)) = self.due.first()
            && due <= now
        {
            self.due.pop_first();
            self.check(id, now, &mut round);
        }
        self.sweep_on(now, epoch);
        self.begin_renewals(now, epoch, &mut round);
        if !outage {
            round.overload = self.overload(now, round.left_out);
        }
        let next = [
            self.due.first().map(|due| due.0),
            self.alarms.keys().next().map(|key| key.0),
            // The sweep has not finished, and there is room for more renewals.
            (self.room_to_sweep(now) > 0).then_some(now),
        ];
        let mut next = next.into_iter().flatten().min();
        if let Phase::Ending(at_the_latest) = self.phase {
            let done = self.cleanups_open == 0 && !self.keeps_until(at_the_latest);
            round.end = done || now >= at_the_latest;
            next = Some(next.map_or(at_the_latest, |next| next.min(at_the_latest)));
        }
        // A wake-up time that nothing needs any more is kept. Without it, each new lease would have
        // to wake the keeper. With it, the keeper wakes once at this time, and may find nothing to
        // do.
        if self.next_wake > now && self.next_wake < Instant::FAR_FUTURE {
            next = Some(next.map_or(self.next_wake, |next| next.min(self.next_wake)));
        }
        self.next_wake = next.unwrap_or(Instant::FAR_FUTURE);
        round.next = next;
        round
    }

    fn check(&mut self, id: Id, now: Instant, round: &mut Round) {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return;
        };
        tracked.due = None;
        let deadline = tracked.lease.deadline();
        if let Stage::Kept { until } | Stage::Lingering { until } = tracked.stage
            && until <= now
        {
            let cleanup = Cleanup::of(&tracked.lease);
            round.cleanups.push(self.begin_clean_up(cleanup));
            return;
        }
        if deadline <= now {
            round
                .expired
                .push((Arc::clone(&tracked.lease), tracked.stage));
            if self.unqueue(id) == Some(Kind::Held) {
                round.left_out += 1;
            }
            return;
        }
        if tracked.is_forsaken(now) {
            round.recalled.push(Arc::clone(&tracked.lease));
            let cleanup = tracked.cleanup();
            round.cleanups.push(self.begin_clean_up(cleanup));
            return;
        }
        // While the renewal is queued or in flight, the keeper watches the end of the lease.
        let end = tracked.end();
        tracked.due = Some(end);
        self.due.insert((end, id));
        self.want(id);
    }

    /// Queues a renewal, if one is wanted and none is queued or in flight.
    fn want(&mut self, id: Id) {
        if let Some(tracked) = self.leases.get_mut(&id)
            && tracked.wants_renewal()
            && tracked.renewal == RenewalStage::Idle
        {
            let (kind, deadline) = (tracked.kind(), tracked.lease.deadline());
            let class = class(tracked.lease.request.ttl);
            tracked.renewal = RenewalStage::Queued(kind, deadline);
            self.backlog(kind).insert(class, deadline, id);
        }
    }

    /// Takes a renewal out of its backlog. `None` if it was not in one.
    fn unqueue(&mut self, id: Id) -> Option<Kind> {
        let tracked = self.leases.get_mut(&id)?;
        let RenewalStage::Queued(kind, deadline) = tracked.renewal else {
            return None;
        };
        tracked.renewal = RenewalStage::Idle;
        let class = class(tracked.lease.request.ttl);
        self.backlog(kind).remove(class, deadline, id);
        Some(kind)
    }

    fn backlog(&mut self, kind: Kind) -> &mut Backlog {
        match kind {
            Kind::Held => &mut self.held,
            Kind::Waiting => &mut self.waiting,
        }
    }

    /// Begins to renew every ticket: see [`sweep`](Self::sweep).
    pub(crate) fn begin_sweep(&mut self) {
        self.sweep = self.due.first().copied();
    }

    /// For how many more tickets of the sweep there is room.
    fn room_to_sweep(&self, now: Instant) -> usize {
        let Some((_, id)) = self.sweep else {
            return 0;
        };
        let first = self.leases.get(&id);
        let left = first.map_or(Duration::ZERO, |first| now.until(first.lease.deadline()));
        let all = self.leases.len().div_ceil(BATCH);
        let batches = self.held.pace.room(all, left) + self.waiting.pace.room(all, left);
        let queued = self.held.len() + self.waiting.len();
        (batches * BATCH).saturating_sub(queued)
    }

    /// One step of the sweep: queues as many renewals as there is room for.
    fn sweep_on(&mut self, now: Instant, epoch: u64) {
        let mut room = self.room_to_sweep(now);
        let Some(from) = self.sweep.filter(|_| room > 0) else {
            return;
        };
        let mut swept = Vec::new();
        self.sweep = None;
        for (looked_at, &(due, id)) in self.due.range(from..).enumerate() {
            if looked_at == SWEPT || room == 0 {
                self.sweep = Some((due, id));
                break;
            }
            // A renewal moves its ticket to a new due time, so the sweep may meet the ticket again.
            let to_ask = |tracked: &&Tracked| !tracked.was_asked_in(epoch);
            if self.leases.get(&id).filter(to_ask).is_some() {
                swept.push(id);
                room -= 1;
            }
        }
        for id in swept {
            self.want(id);
        }
    }

    /// Makes batches of the queued renewals, as long as more may be in flight.
    fn begin_renewals(&mut self, now: Instant, epoch: u64, round: &mut Round) {
        self.begin_renewals_of(Kind::Held, now, epoch, round);
        // As long as holders are left out, no waiter is renewed.
        if self.held.left_out() == 0 {
            self.begin_renewals_of(Kind::Waiting, now, epoch, round);
        }
    }

    fn begin_renewals_of(&mut self, kind: Kind, now: Instant, epoch: u64, round: &mut Round) {
        while self.backlog(kind).room(now) > 0
            && let Some((class, ids)) = self.backlog(kind).next(now)
        {
            let mut batch = Vec::with_capacity(BATCH);
            for id in ids {
                if let Some(tracked) = self.leases.get_mut(&id) {
                    tracked.renewal = RenewalStage::Idle;
                }
                batch.extend(self.begin_renewal(id, now, epoch));
            }
            self.fill_batch((kind, class), now, epoch, &mut batch);
            if !batch.is_empty() {
                self.backlog(kind).pace.begin();
                round.renew.push((kind, batch));
            }
        }
        let backlog = self.backlog(kind);
        let they_wait = !backlog.is_empty();
        backlog.pace.wait(now, they_wait);
    }

    /// What is to be told after this number of held leases has ended because they were left out. It
    /// is told once in a while only.
    fn overload(&mut self, now: Instant, ended: usize) -> Option<Overload> {
        let lately = self.told.is_some_and(|told| now < told.after(TOLD_EVERY));
        if ended == 0 || lately {
            return None;
        }
        let rate = self.held.pace.rate(now)?;
        self.told = Some(now);
        let kinds = self.leases.values().map(Tracked::kind);
        Some(Overload {
            leases: kinds.filter(|kind| *kind == Kind::Held).count(),
            left_out: self.held.left_out() + ended,
            rate,
        })
    }

    fn begin_renewal(&mut self, id: Id, now: Instant, epoch: u64) -> Option<Arc<Lease>> {
        let tracked = self.leases.get_mut(&id)?;
        // Since the renewal was queued, the lease may have run out, or its user may be releasing
        // it.
        if tracked.lease.deadline() <= now || tracked.is_renewing() || !tracked.wants_renewal() {
            return None;
        }
        tracked.renewal = RenewalStage::UnderWay;
        tracked.asked = epoch;
        Some(Arc::clone(&tracked.lease))
    }

    /// Adds leases whose renewal is near, so that the batch is full. With many leases this makes
    /// fewer and fuller requests.
    fn fill_batch(
        &mut self,
        of: (Kind, u32),
        now: Instant,
        epoch: u64,
        batch: &mut Vec<Arc<Lease>>,
    ) {
        let room = BATCH - batch.len();
        let soon: Vec<(Instant, Id)> = self
            .due
            .iter()
            .take(room)
            .filter(|(due, id)| {
                self.leases.get(id).is_some_and(|tracked| {
                    let near = now.after(tracked.lease.request.ttl / 10);
                    let free = tracked.renewal == RenewalStage::Idle;
                    let same = (tracked.kind(), class(tracked.lease.request.ttl)) == of;
                    free && same && *due <= near && *due < tracked.end()
                })
            })
            .copied()
            .collect();
        for (_, id) in soon {
            let Some(lease) = self.begin_renewal(id, now, epoch) else {
                continue;
            };
            batch.push(lease);
            let end = self.leases.get(&id).map(Tracked::end);
            self.set_recheck(id, end.unwrap_or(now));
        }
    }

    /// A batch of renewals has ended. Returns whether other renewals wait for their turn.
    pub(crate) fn renewed(&mut self, kind: Kind, outcome: Outcome) -> bool {
        self.backlog(kind).pace.end(outcome);
        // Renewals of waiters may wait because of the held leases.
        !self.held.is_empty() || !self.waiting.is_empty() || self.sweep.is_some()
    }

    /// Sets when a lease is checked next: at `due`, or at its end if that comes first. Returns that
    /// time.
    pub(crate) fn set_recheck(&mut self, id: Id, due: Instant) -> Instant {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return Instant::FAR_FUTURE;
        };
        let due = due.min(tracked.end());
        if let Some(before) = tracked.due.replace(due) {
            self.due.remove(&(before, id));
        }
        self.due.insert((due, id));
        due
    }

    pub(crate) fn remove(&mut self, id: Id) {
        self.unqueue(id);
        let Some(tracked) = self.leases.remove(&id) else {
            return;
        };
        self.turns.forget(id);
        if let Some(due) = tracked.due {
            self.due.remove(&(due, id));
        }
        match tracked.stage {
            Stage::Kept { .. } => self.kept -= 1,
            Stage::Lingering { .. } => drop(self.lingering.remove(&tracked.lease.request.name)),
            _ => {}
        }
    }

    /// Takes a ticket out of the table, and gives it to the keeper for removal at the store.
    pub(crate) fn clean_up(&mut self, cleanup: Cleanup) {
        let cleanup = self.begin_clean_up(cleanup);
        self.cleanups.push(cleanup);
    }

    fn begin_clean_up(&mut self, mut cleanup: Cleanup) -> Cleanup {
        self.remove(cleanup.request.id);
        self.cleanups_open += 1;
        cleanup.leftover = Some(self.leftovers.add(&cleanup.request.name));
        cleanup
    }

    /// Notes that a ticket that may have waited is held now.
    pub(crate) fn hold(&mut self, id: Id) {
        if let Some(tracked) = self.leases.get_mut(&id) {
            tracked.stage = Stage::Held;
            if let RenewalStage::Queued(..) = tracked.renewal {
                // Its renewal changes to the backlog of the held leases.
                self.unqueue(id);
                self.want(id);
            }
        }
    }

    /// Notes that the user of a held lease is releasing it. The time of the next check does not
    /// change, because usually the lease is gone before that time.
    pub(crate) fn leave(&mut self, id: Id) {
        if let Some(tracked) = self.leases.get_mut(&id) {
            tracked.stage = Stage::Leaving;
        }
    }

    /// Notes that the user of a held lease is done with it, and that the ticket is kept until
    /// `until`. Returns when the keeper checks the lease next.
    pub(crate) fn keep(&mut self, id: Id, until: Instant) -> Instant {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return Instant::FAR_FUTURE;
        };
        self.kept += 1;
        tracked.stage = Stage::Kept { until };
        // The next check was set for a renewal, or for the answer to a renewal, so it stays. Only
        // the new end may make it earlier.
        let due = tracked.due.unwrap_or(until);
        self.set_recheck(id, due)
    }

    /// Called when the client ends, because the keeper cannot give back the kept tickets later.
    /// Each of them becomes a clean-up that leaves the ticket at the store until its time. Returns
    /// whether there were any.
    pub(crate) fn settle_kept(&mut self) -> bool {
        if self.kept == 0 {
            return false;
        }
        let kept = self
            .leases
            .values()
            .filter_map(|tracked| match tracked.stage {
                Stage::Kept { until } => Some(Cleanup {
                    keep_until: Some(until),
                    request: tracked.lease.as_it_is(),
                    ..Cleanup::of(&tracked.lease)
                }),
                _ => None,
            });
        let kept: Vec<_> = kept.collect();
        for cleanup in kept {
            self.clean_up(cleanup);
        }
        true
    }

    /// Whether a kept ticket must be given back by `at_the_latest`.
    fn keeps_until(&self, at_the_latest: Instant) -> bool {
        let mut stages = self.leases.values().map(|tracked| tracked.stage);
        self.kept > 0
            && stages.any(|stage| matches!(stage, Stage::Kept { until } if until <= at_the_latest))
    }

    /// Whether any ticket is kept after its use.
    pub(crate) fn keeps(&self) -> bool {
        self.kept > 0
    }

    /// How many tickets a shutdown has to wait for. From now on the client notifies the shutdown
    /// when there are none left.
    pub(crate) fn await_idle(&mut self) -> usize {
        self.idle_awaited = true;
        self.in_use()
    }

    /// Whether a shutdown waits, and nothing is in use.
    pub(crate) fn is_awaited_idle(&self) -> bool {
        self.idle_awaited && self.in_use() == 0
    }

    fn in_use(&self) -> usize {
        self.leases.len() - self.kept + self.cleanups_open
    }

    /// Gives all tickets of these stages to the keeper for removal at the store. Returns their
    /// leases.
    pub(crate) fn clean_up_where(&mut self, wanted: impl Fn(Stage) -> bool) -> Vec<Arc<Lease>> {
        let tickets = self.leases.values();
        let wanted = tickets.filter(|tracked| wanted(tracked.stage));
        let both = wanted.map(|tracked| (tracked.cleanup(), Arc::clone(&tracked.lease)));
        let (cleanups, leases): (Vec<_>, Vec<_>) = both.unzip();
        for cleanup in cleanups {
            self.clean_up(cleanup);
        }
        leases
    }

    pub(crate) fn leases_where(&self, wanted: impl Fn(Stage) -> bool) -> Vec<Arc<Lease>> {
        self.leases
            .values()
            .filter(|tracked| wanted(tracked.stage))
            .map(|tracked| Arc::clone(&tracked.lease))
            .collect()
    }
}

#[cfg(test)]
mod tests;
