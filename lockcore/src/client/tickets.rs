//! The tickets that this process has asked for and not finished with: which stage each is at, and when
//! the keeper looks at it next.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use super::shared::Shared;
use super::table::{Cleanup, Phase, RenewalStage, Stage, Table, Tracked};
use crate::backend::Wake;
use crate::clock::Instant;
use crate::error::Error;
use crate::log::guarded;
use crate::name::Name;
use crate::request::Id;

/// However often a message says so, which somebody may have forged, nobody looks again more often.
pub(super) const LEAST_RECHECK: Duration = Duration::from_millis(100);

impl Shared {
    /// Enters a lease before its first request is sent, so that a wake-up that overtakes the
    /// reply finds it.
    ///
    /// # Errors
    ///
    /// [`LostReason::Shutdown`] once the client is shut down.
    pub(crate) fn arm(&self, lease: &Arc<Lease>) -> Result<(), Error> {
        let mut table = self.table();
        if table.phase != Phase::Open {
            return Err(Error::shut_down());
        }
        let tracked = Tracked::new(lease, self.epoch());
        table.leases.insert(lease.request.id, tracked);
        Ok(())
    }

    /// The capacity of a name that a guard of this client has, if that is one of the few that it has at
    /// all: for the text of an error, which must not take its time while many are held.
    pub(crate) fn held_among_few(&self, name: &Name) -> Option<NonZeroU32> {
        const FEW: usize = 100;
        let table = self.table();
        let mut few = table.leases.values().take(FEW);
        let held = few.find(|held| held.stage == Stage::Held && held.lease.request.name == *name);
        held.map(|held| held.lease.request.capacity)
    }

    pub(super) fn stage(&self, id: Id) -> Option<Stage> {
        self.table().leases.get(&id).map(|tracked| tracked.stage)
    }

    /// Puts a lease into the keeper's care at a stage: it is looked at again at `due`. False if the
    /// keeper has given the ticket back meanwhile, because its task was not polled.
    pub(crate) fn entrust(&self, id: Id, stage: Stage, due: Instant) -> bool {
        let mut table = self.table();
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        tracked.stage = stage;
        let due = tracked.recheck_by.take().map_or(due, |by| due.min(by));
        self.set_recheck(&mut table, id, due);
        true
    }

    /// Puts a lease that was just granted into the keeper's care. False if the keeper has given the
    /// ticket back meanwhile, because nobody collected it.
    ///
    /// One that has waited has its time for the next renewal. Another, which would differ by the jitter,
    /// could only wake the keeper, at the very moment that the holder wants to go on.
    pub(crate) fn entrust_held(&self, lease: &Lease) -> bool {
        let mut table = self.table();
        let id = lease.request.id;
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        tracked.stage = Stage::Held;
        let due = if lease.wants_renewal() {
            let times = Self::renewal_times(lease, lease.ttl());
            if tracked.due.is_some_and(|due| times.contains(&due)) {
                return true;
            }
            Self::renewal_time(lease, lease.ttl())
        } else {
            Instant::FAR_FUTURE // the keeper only watches the deadline
        };
        self.set_recheck(&mut table, id, due);
        true
    }

    /// An enqueue is being sent. At a store with sessions a ticket stays for as long as the session,
    /// so one whose reply is not looked at, because its task is not polled, is given back by the
    /// keeper when no task that is polled would still be waiting for it. Elsewhere it runs out.
    pub(crate) fn will_be_answered_by(&self, id: Id, by: Instant) {
        if self.backend.capability().sessions {
            let mut table = self.table();
            if let Some(tracked) = table.leases.get_mut(&id) {
                tracked.answer_by = Some(by);
            }
            self.set_recheck(&mut table, id, by);
        }
    }

    /// Leaves a lease that its user is done with in the keeper's care: renewed as before, and given
    /// back at `until`. No shutdown waits for that: see [`settle_kept`](Self::settle_kept).
    pub(crate) fn keep(&self, lease: &Lease, until: Instant) {
        let mut table = self.table();
        let due = table.keep(lease.request.id, until);
        self.wake_keeper_at(&mut table, due);
        // Under the same mutex: a shutdown must not find it kept by nobody.
        let settled = table.phase != Phase::Open && self.settle(&mut table);
        let idle = table.is_awaited_idle();
        drop(table);
        if settled {
            self.due_changed.notify_one();
        }
        self.tell_if(idle);
    }

    /// The client comes to its end: what it keeps is left to the store, with a ttl that ends when it
    /// was to be given back. At a store with sessions tickets have no ttl of their own; there the
    /// keeper gives back what it can, and the session is not closed over what is left.
    pub(super) fn settle_kept(&self) {
        let settled = self.settle(&mut self.table());
        if settled {
            self.due_changed.notify_one();
        }
    }

    pub(super) fn settle(&self, table: &mut Table) -> bool {
        !self.backend.capability().sessions && table.settle_kept()
    }

    /// A renewal has come to its end, whichever; the next look is at `due`.
    pub(crate) fn renewal_over(&self, id: Id, due: Instant) {
        let mut table = self.table();
        if let Some(tracked) = table.leases.get_mut(&id) {
            if tracked.is_renewing() {
                tracked.renewal = RenewalStage::Idle;
            }
            let due = match tracked.was_asked_in(self.epoch()) {
                true => due,
                false => self.clock.now(),
            };
            let due = tracked.recheck_by.take().map_or(due, |by| due.min(by));
            self.set_recheck(&mut table, id, due);
        }
    }

    /// Has the keeper look at a lease at a time.
    pub(crate) fn recheck_at(&self, id: Id, due: Instant) {
        self.set_recheck(&mut self.table(), id, due);
    }

    pub(super) fn set_recheck(&self, table: &mut Table, id: Id, due: Instant) {
        let due = table.set_recheck(id, due);
        self.wake_keeper_at(table, due);
    }

    /// Who waits for this ticket is to ask again then, as nobody will tell.
    pub(crate) fn recheck(&self, id: Id, after: Duration) {
        let due = self.clock.now().after(after.max(LEAST_RECHECK));
        let mut table = self.table();
        match table.leases.get_mut(&id) {
            // The answer that is on its way, to its enqueue or a renewal, may not know of this.
            Some(tracked)
                if tracked.stage == Stage::Asked
                    || tracked.stage == Stage::Waiting && tracked.is_renewing() =>
            {
                let by = tracked.recheck_by.map_or(due, |before| before.min(due));
                tracked.recheck_by = Some(by);
            }
            Some(tracked) if tracked.stage != Stage::Waiting => {}
            Some(tracked) if tracked.due.is_some_and(|before| before <= due) => {}
            Some(_) => self.set_recheck(&mut table, id, due),
            None => {}
        }
    }

    /// A wake-up. One for a ticket that is not ours, or not any more, grants nothing.
    pub(crate) fn granted(&self, wake: Wake) {
        let lease = self
            .table()
            .leases
            .get(&wake.id)
            .map(|tracked| Arc::clone(&tracked.lease));
        if let Some(lease) = lease {
            guarded(|| lease.grant(wake.ticket, self.clock.now()));
        }
    }

    /// Tells a waiter that its renewal says "granted": its wake-up was lost or is on its way.
    pub(super) fn grant_if_waiting(&self, id: Id) {
        let table = self.table();
        let Some(tracked) = table.leases.get(&id) else {
            return;
        };
        if tracked.stage != Stage::Waiting {
            return;
        }
        let lease = Arc::clone(&tracked.lease);
        drop(table);
        lease.grant(lease.ticket(), self.clock.now());
    }

    /// Takes a lease out of the keeper's care; no later batch renews it.
    pub(crate) fn disarm(&self, id: Id) {
        let mut table = self.table();
        table.remove(id);
        let idle = table.is_awaited_idle();
        drop(table);
        self.tell_if(idle);
    }

    /// Hands a ticket to the keeper for removal, and takes it out of its care in the same step, so
    /// that there is no moment in which nobody is responsible for it.
    pub(crate) fn clean_up(&self, cleanup: Cleanup) {
        let mut table = self.table();
        table.remove(cleanup.request.id);
        table.cleanups.push(cleanup);
        table.cleanups_open += 1;
        drop(table);
        self.due_changed.notify_one();
    }

    pub(crate) fn cleaned_up(&self, count: usize) {
        let mut table = self.table();
        table.cleanups_open -= count;
        let idle = table.is_awaited_idle();
        let ending = matches!(table.phase, Phase::Ending(_));
        drop(table);
        self.tell_if(idle);
        if ending {
            self.due_changed.notify_one();
        }
    }

    /// Whether anything depends on a connection, so that a broken one must be replaced unasked.
    pub(crate) fn is_busy(&self) -> bool {
        let table = self.table();
        let asked = |tracked: &Tracked| tracked.stage == Stage::Asked;
        table.cleanups_open > 0 || !table.leases.values().all(asked)
    }
}
