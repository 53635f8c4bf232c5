//! The table: every ticket that this process has asked for and not finished with, when the keeper
//! must look at it, the alarms, and what is to be cleaned up. Plain data: it sends nothing and wakes
//! nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::Waker;

use crate::backend::{Answer, Enqueued};
use crate::clock::Instant;
use crate::hash::Prehashed;
use crate::lease::Lease;
use crate::request::{Id, Request};

/// Tickets in one request: keeps a Redis script well below a millisecond.
pub(crate) const BATCH: usize = 100;

pub(crate) struct Table {
    /// Every ticket that this process has asked for and not finished with.
    pub(crate) leases: Prehashed<Id, Tracked>,
    /// When the keeper must look at a lease: never later than its renewal or its deadline.
    pub(crate) due: BTreeSet<(Instant, Id)>,
    pub(crate) alarms: BTreeMap<(Instant, u64), Waker>,
    pub(crate) alarms_set: u64,
    /// Tickets to be removed that no request carries yet.
    pub(crate) cleanups: Vec<Cleanup>,
    /// Of the leases, those that are kept after their use.
    kept: usize,
    /// Clean-ups that are not finished, queued or under way.
    pub(crate) cleanups_open: usize,
    /// A shutdown waits, or has waited, until nothing is in use.
    idle_awaited: bool,
    /// When the keeper will wake by itself; whoever puts in something earlier wakes it.
    pub(crate) next_wake: Instant,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// `shutdown` was called: nothing new is taken.
    ShutDown,
    /// The last handle is gone: the keeper ends when the clean-up is done, at this time at the latest.
    Ending(Instant),
}

pub(crate) struct Tracked {
    pub(crate) lease: Arc<Lease>,
    pub(crate) due: Option<Instant>,
    pub(crate) stage: Stage,
    /// A renewal is under way; its answer sets the next due time.
    pub(crate) renewing: bool,
    /// Its answer may be older than what is asked now: renew again when it is here.
    pub(crate) again: bool,
    /// It waits, and is to be looked at then at the latest, whatever the answer that is under way says.
    pub(crate) look_by: Option<Instant>,
}

impl Tracked {
    /// When it has to be looked at, whatever else is due.
    fn end(&self) -> Instant {
        let deadline = self.lease.deadline();
        match self.stage {
            Stage::Kept { until } => until.min(deadline),
            _ => deadline,
        }
    }
}

/// How far a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Asked for; the acquire loop looks after it alone.
    Asked,
    /// In line: renewed whatever the lease says, else it would lose its place.
    Waiting,
    /// In the user's hands.
    Held,
    /// Its user is done with it, and it stays taken until a time (`min_hold`).
    Kept { until: Instant },
    /// Being released by the user: no later batch renews it, and it is not gone yet.
    Leaving,
}

/// A ticket that nobody wants any more and that may be at the store.
pub(crate) struct Cleanup {
    pub(crate) request: Arc<Request>,
    /// See [`Departure::enqueue_may_follow`].
    pub(crate) ambiguous: bool,
    /// The enqueue whose reply nobody waits for any more. The release must not overtake it: the
    /// keeper finishes it first.
    pub(crate) after: Option<Answer<Enqueued>>,
}

impl Cleanup {
    /// Of a ticket that the store has told of.
    pub(crate) fn of(lease: &Lease) -> Self {
        Self {
            request: lease.as_enqueued(),
            ambiguous: lease.is_ambiguous(),
            after: None,
        }
    }
}

/// What was due when the keeper looked.
#[derive(Default)]
pub(crate) struct Round {
    pub(crate) renew: Vec<Arc<Lease>>,
    pub(crate) expired: Vec<(Arc<Lease>, Stage)>,
    pub(crate) alarms: Vec<Waker>,
    pub(crate) cleanups: Vec<Cleanup>,
    pub(crate) end: bool,
    pub(crate) next: Option<Instant>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            leases: Prehashed::default(),
            due: BTreeSet::new(),
            alarms: BTreeMap::new(),
            alarms_set: 0,
            cleanups: Vec::new(),
            kept: 0,
            cleanups_open: 0,
            idle_awaited: false,
            next_wake: Instant::FAR_FUTURE,
            phase: Phase::Open,
        }
    }
}

impl Table {
    /// Everything that is due at `now`, and when to look next.
    pub(crate) fn take_round(&mut self, now: Instant) -> Round {
        let mut round = Round {
            cleanups: std::mem::take(&mut self.cleanups),
            ..Round::default()
        };
        while let Some(entry) = self.alarms.first_entry()
            && entry.key().0 <= now
        {
            round.alarms.push(entry.remove());
        }
        while let Some(&(due, id)) = self.due.first()
            && due <= now
        {
            self.due.remove(&(due, id));
            self.look_at(id, now, &mut round);
        }
        self.fill_batch(now, &mut round);
        let next = [
            self.due.first().map(|due| due.0),
            self.alarms.keys().next().map(|key| key.0),
        ];
        let mut next = next.into_iter().flatten().min();
        if let Phase::Ending(at_the_latest) = self.phase {
            round.end = self.cleanups_open == 0 || now >= at_the_latest;
            next = Some(next.map_or(at_the_latest, |next| next.min(at_the_latest)));
        }
        // A time that is given up is slept until all the same: else a lease that comes and goes
        // would wake the keeper each time, who finds nothing, and forgets when he would have looked.
        if self.next_wake > now && self.next_wake < Instant::FAR_FUTURE {
            next = Some(next.map_or(self.next_wake, |next| next.min(self.next_wake)));
        }
        self.next_wake = next.unwrap_or(Instant::FAR_FUTURE);
        round.next = next;
        round
    }

    fn look_at(&mut self, id: Id, now: Instant, round: &mut Round) {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return;
        };
        tracked.due = None;
        let deadline = tracked.lease.deadline();
        if let Stage::Kept { until } = tracked.stage
            && until <= now
        {
            round.cleanups.push(Cleanup::of(&tracked.lease));
            self.cleanups_open += 1;
            self.remove(id);
            return;
        }
        if deadline <= now {
            round
                .expired
                .push((Arc::clone(&tracked.lease), tracked.stage));
            return;
        }
        let wanted = match tracked.stage {
            Stage::Waiting => true,
            Stage::Leaving => false,
            Stage::Asked | Stage::Held | Stage::Kept { .. } => tracked.lease.wants_renewal(),
        };
        if wanted && !tracked.renewing {
            tracked.renewing = true;
            round.renew.push(Arc::clone(&tracked.lease));
        }
        // The end is watched while the renewal is under way.
        let end = tracked.end();
        tracked.due = Some(end);
        self.due.insert((end, id));
    }

    /// Takes leases along whose renewal is near, so that the last batch goes out full: fewer, fuller
    /// requests when many leases are held.
    fn fill_batch(&mut self, now: Instant, round: &mut Round) {
        let room = round.renew.len().next_multiple_of(BATCH) - round.renew.len();
        let soon: Vec<(Instant, Id)> = self
            .due
            .iter()
            .take(room)
            .filter(|(due, id)| {
                self.leases.get(id).is_some_and(|tracked| {
                    let near = now.after(tracked.lease.request.ttl / 10);
                    !tracked.renewing && *due <= near && *due < tracked.end()
                })
            })
            .copied()
            .collect();
        for entry in soon {
            self.due.remove(&entry);
            self.look_at(entry.1, now, round);
        }
    }

    /// Sets when a lease is looked at next: at `due`, or at its end if that comes first. Returns
    /// which.
    pub(crate) fn look_again_at(&mut self, id: Id, due: Instant) -> Instant {
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
        let Some(tracked) = self.leases.remove(&id) else {
            return;
        };
        if let Some(due) = tracked.due {
            self.due.remove(&(due, id));
        }
        if let Stage::Kept { .. } = tracked.stage {
            self.kept -= 1;
        }
    }

    /// Notes that the user of a held lease is releasing it. When it is looked at next stays as it is:
    /// mostly it is gone before that.
    pub(crate) fn leave(&mut self, id: Id) {
        if let Some(tracked) = self.leases.get_mut(&id) {
            tracked.stage = Stage::Leaving;
        }
    }

    /// Notes that the user of a held lease is done with it. Returns when it is looked at next.
    pub(crate) fn keep(&mut self, id: Id, until: Instant) -> Instant {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return Instant::FAR_FUTURE;
        };
        self.kept += 1;
        tracked.stage = Stage::Kept { until };
        // As before, a renewal or the end of one; only the new end may come sooner.
        let due = tracked.due.unwrap_or(until);
        self.look_again_at(id, due)
    }

    /// What a shutdown has to wait for; from now on it is told when that is nothing.
    pub(crate) fn await_idle(&mut self) -> usize {
        self.idle_awaited = true;
        self.in_use()
    }

    /// Whether there is nothing that a shutdown would have to wait for, and one waits.
    pub(crate) fn is_awaited_idle(&self) -> bool {
        self.idle_awaited && self.in_use() == 0
    }

    fn in_use(&self) -> usize {
        self.leases.len() - self.kept + self.cleanups_open
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
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lease;

    #[test]
    fn a_ticket_that_is_being_released_is_watched_and_not_renewed() {
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let lease = Arc::new(lease::tests::lease());
        lease.answered(7, at(100), Duration::from_secs(10));
        let id = lease.request.id;
        let mut table = Table::default();
        let tracked = Tracked {
            lease: Arc::clone(&lease),
            due: None,
            stage: Stage::Held,
            renewing: false,
            again: false,
            look_by: None,
        };
        table.leases.insert(id, tracked);
        table.look_again_at(id, at(103));

        table.leave(id);

        let round = table.take_round(at(103));
        assert!(round.renew.is_empty(), "renewed");
        assert_eq!(round.next, Some(lease.deadline()));
        let round = table.take_round(at(110));
        assert_eq!(round.expired.len(), 1, "not watched any more");
    }
}
