//! What becomes of a ticket whose last user is done: the keeper releases it, a task of this process
//! takes it back, it lingers, or the waiter right behind it holds by its end. No other method of the
//! table calls these.

use std::sync::Arc;

use super::{Phase, Table};
use crate::client::lease::Lease;
use crate::client::tracked::{Cleanup, Stage, Tracked};
use crate::clock::Instant;
use crate::name::Name;
use crate::request::Id;

/// How many clean-ups are searched for a ticket that was given back a moment ago. A caller that comes
/// right after that finds it, and others do not wait for the search.
const FEW: usize = 16;

impl Table {
    /// The last user of a ticket is done at `ended`, if the ticket may let the next one in. Gives the
    /// ticket to the keeper. Returns the lease that holds because of this.
    ///
    /// If the ticket may go on, it has not ended yet. So it must not let anybody in before its
    /// release begins.
    #[must_use]
    pub(crate) fn give_back(
        &mut self,
        mut cleanup: Cleanup,
        ended: Option<Instant>,
    ) -> Option<Arc<Lease>> {
        let id = cleanup.request.id;
        let tracked = self.leases.get(&id);
        let is_held = tracked.is_some_and(|tracked| tracked.stage == Stage::Held);
        cleanup.may_go_on &= is_held && !self.turns.is_followed(id);
        let mut next = None;
        match cleanup.may_go_on {
            true => cleanup.ended = ended,
            false => next = ended.and_then(|now| self.end(id, now)),
        }
        self.clean_up(cleanup);
        next
    }

    /// Takes a ticket of this name back from the clean-ups, if its release has not begun and
    /// `goes_on` allows it. The ticket is held again. Returns the clean-up, whose drop runs wakers.
    /// So the caller drops it when no mutex is held.
    ///
    /// This looks at [a few](FEW) clean-ups only, the latest first.
    pub(crate) fn take_back(
        &mut self,
        name: &Name,
        epoch: u64,
        goes_on: impl FnOnce(&Arc<Lease>) -> bool,
    ) -> Option<Cleanup> {
        if self.phase != Phase::Open || self.cleanups.is_empty() || !self.leftovers.has(name) {
            return None;
        }
        let few = self.cleanups.len().saturating_sub(FEW);
        let is_it = |cleanup: &Cleanup| cleanup.may_go_on && cleanup.request.name == *name;
        let at = few + self.cleanups[few..].iter().rposition(is_it)?;
        let lease = Arc::clone(self.cleanups[at].held.as_ref()?);
        if !lease.is_confirmed_in(epoch) || !goes_on(&lease) {
            return None;
        }
        // A message about a waiter finds no ticket while it is among the clean-ups.
        lease.want();
        self.cleanups_open -= 1;
        let mut tracked = Tracked::new(&lease, epoch);
        tracked.stage = Stage::Held;
        self.leases.insert(lease.request.id, tracked);
        Some(self.cleanups.remove(at))
    }

    /// The last user of a held ticket is done at `now`. Returns whether the ticket lingers. If so, the
    /// keeper releases it at the end of the linger, unless a task [resumes](Self::resume) it before.
    ///
    /// A ticket with a waiter of this client right behind it does not linger.
    pub(crate) fn linger(&mut self, lease: &Lease, now: Instant, epoch: u64) -> bool {
        let id = lease.request.id;
        let may = self.phase == Phase::Open
            && lease.is_confirmed_in(epoch)
            && !self.turns.is_followed(id)
            && !self.lingering.contains_key(&lease.request.name);
        // Under the mutex, so that a message of the store finds the ticket in use, or lingering.
        let until = lease.lingers_until(now).filter(|_| may);
        let tracked = self
            .leases
            .get_mut(&id)
            .filter(|tracked| tracked.stage == Stage::Held);
        let (Some(until), Some(tracked)) = (until, tracked) else {
            return false;
        };
        tracked.stage = Stage::Lingering { until };
        self.lingering.insert(lease.request.name.clone(), id);
        true
    }

    /// The ticket of this name that lingers.
    pub(crate) fn lingers(&self, name: &Name) -> Option<Id> {
        self.lingering.get(name).copied()
    }

    /// Lets a task use a ticket that lingers, if it may still linger and `goes_on` allows it. Returns
    /// its lease.
    pub(crate) fn resume(
        &mut self,
        id: Id,
        now: Instant,
        epoch: u64,
        goes_on: impl FnOnce(&Arc<Lease>) -> bool,
    ) -> Option<Arc<Lease>> {
        let lease = Arc::clone(&self.leases.get(&id)?.lease);
        let lingers = lease.is_confirmed_in(epoch) && lease.lingers_until(now).is_some();
        if self.phase != Phase::Open || !lingers || !goes_on(&lease) {
            return None;
        }
        self.lingering.remove(&lease.request.name);
        self.hold(id);
        Some(lease)
    }

    /// Gives a ticket to the keeper for removal, if it lingers. Returns whether it does.
    pub(crate) fn end_linger(&mut self, id: Id) -> bool {
        let tracked = self.leases.get(&id);
        let lingers = tracked.filter(|it| matches!(it.stage, Stage::Lingering { .. }));
        let Some(cleanup) = lingers.map(Tracked::cleanup) else {
            return false;
        };
        self.clean_up(cleanup);
        true
    }

    /// Notes that a waiter is right behind the ticket `ahead`: see [`turns`](crate::client::turns). Returns
    /// whether the waiter holds because of that.
    #[must_use]
    pub(crate) fn follow(&mut self, ahead: Id, follower: &Arc<Lease>) -> bool {
        // The ticket ahead may have been given back a moment ago. Then nobody goes on with it, because
        // it ends now.
        let few = self.cleanups.len().saturating_sub(FEW);
        let is_it = |cleanup: &&mut Cleanup| cleanup.may_go_on && cleanup.request.id == ahead;
        if let Some(cleanup) = self.cleanups[few..].iter_mut().find(is_it)
            && cleanup.ended.take().is_some()
        {
            cleanup.may_go_on = false;
            return true;
        }
        let is_known = |id| self.leases.contains_key(&id);
        self.turns.follow(ahead, is_known, follower)
    }

    /// Notes that the last user of a held ticket is done. Returns the lease that holds because of
    /// that.
    #[must_use]
    pub(crate) fn end(&mut self, id: Id, now: Instant) -> Option<Arc<Lease>> {
        let tracked = self.leases.get(&id)?;
        // A ticket that was given back by the keeper, for example in a shutdown, is not here any
        // more. It may be in use by a job that does not stop.
        let is_held = tracked.stage == Stage::Held;
        let is_known = |id| self.leases.contains_key(&id);
        is_held.then(|| self.turns.end(id, is_known, now)).flatten()
    }
}
