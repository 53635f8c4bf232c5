//! The tickets that this process has requested and has not given up: the stage of each ticket, and
//! when the keeper checks it next.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use super::leftovers::Left;
use super::shared::Shared;
use super::table::{AtEnd, Phase, Table};
use super::tracked::{Cleanup, RenewalStage, Stage, Tracked};
use crate::backend::Wake;
use crate::clock::Instant;
use crate::error::Error;
use crate::log::guarded;
use crate::name::Name;
use crate::request::Id;
use crate::sync::MutexGuard;

/// The shortest time between two rechecks of one ticket. Messages that ask for a recheck can be
/// forged or doubled, and must not make the client poll the store.
pub(super) const LEAST_RECHECK: Duration = Duration::from_millis(100);

/// A change that is to be made because a ticket has ended. A shutdown waits for it. If this value is
/// dropped before the store has answered, the keeper makes the change, perhaps once more. That is
/// harmless, because the change only makes others look.
pub(crate) struct Telling {
    shared: Arc<Shared>,
    change: Option<AtEnd>,
}

impl Telling {
    /// Makes the change on the connection of the caller's runtime.
    pub(crate) async fn tell(mut self) {
        if let Some(change) = self.change.clone() {
            self.shared.tell_end_of_ticket(change).await;
        }
        self.change = None;
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            return;
        }
        let Some(change) = self.change.take() else {
            return self.shared.cleaned_up(1);
        };
        let shared = Arc::clone(&self.shared);
        self.shared.keeper.spawn(async move {
            shared.tell_ends_of_tickets(vec![change]).await;
            shared.cleaned_up(1);
        });
    }
}

impl Shared {
    /// Enters a lease into the table before its first request is sent. So a wake-up that arrives
    /// before the reply finds it.
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

    /// The capacity of a name, if one of the first few leases of the table is held under that name.
    /// This is for the text of an error, and must be quick even while many leases are held.
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

    /// Sets the stage of a lease, and lets the keeper check it at `due`. Returns false if the
    /// keeper has given the ticket back meanwhile, because its task was not polled.
    pub(crate) fn entrust(&self, id: Id, stage: Stage, due: Instant) -> bool {
        let mut table = self.table();
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        tracked.stage = stage;
        let due = tracked.due_after_answer(due);
        self.set_recheck(&mut table, id, due);
        true
    }

    /// Marks a lease that was just granted as held, so that the keeper renews it. Returns false if
    /// the keeper has given the ticket back meanwhile, because its task did not collect the grant.
    ///
    /// A lease that has waited keeps the time of its next renewal. A new time would differ only by
    /// the jitter. Setting it could wake the keeper just when the holder begins its work. An
    /// earlier time is kept too, because it may have been set when the ticket was asked back.
    pub(crate) fn entrust_held(&self, lease: &Lease) -> bool {
        let mut table = self.table();
        let id = lease.request.id;
        table.hold(id);
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        if !lease.wants_renewal() {
            // The keeper only watches the deadline.
            self.set_recheck(&mut table, id, Instant::FAR_FUTURE);
            return true;
        }
        let mut latest = *Self::renewal_times(lease, lease.given()).end();
        // While a renewal is in flight, its answer sets the next check.
        if !tracked.is_renewing() {
            latest = tracked.due_after_answer(latest);
        }
        if tracked.due.is_none_or(|due| due > latest) {
            let due = Self::renewal_time(lease, lease.given()).min(latest);
            self.set_recheck(&mut table, id, due);
        }
        true
    }

    /// An enqueue is being sent. At a store with sessions a ticket lasts as long as the session. If
    /// the task is not polled, nobody reads the reply. So the keeper gives the ticket back at `by`,
    /// because a task that is polled has its answer before that time. At other stores the ticket
    /// runs out by itself.
    pub(crate) fn will_be_answered_by(&self, id: Id, by: Instant) {
        if self.capability.sessions {
            let mut table = self.table();
            if let Some(tracked) = table.leases.get_mut(&id) {
                tracked.answer_by = Some(by);
            }
            self.set_recheck(&mut table, id, by);
        }
    }

    /// Keeps a lease after its user is done with it. The keeper renews it in the same way as a held
    /// lease, and gives the ticket back at `until`. A shutdown does not wait for that: see
    /// [`settle_kept`](Self::settle_kept).
    pub(crate) fn keep(&self, lease: &Lease, until: Instant) {
        let mut table = self.table();
        let due = table.keep(lease.request.id, until);
        self.wake_keeper_at(&mut table, due);
        // Under the same mutex. If a shutdown ran between the two steps, it would miss this ticket.
        let settled = table.phase != Phase::Open && self.settle(&mut table);
        let idle = table.is_awaited_idle();
        drop(table);
        if settled {
            self.due_changed.notify_one();
        }
        self.tell_if(idle);
    }

    /// The client ends. It leaves kept tickets to the store, each with a ttl that ends when the
    /// ticket was to be given back. At a store with sessions tickets have no ttl of their own.
    /// There the keeper gives back the tickets that it can, and does not close the session while
    /// any are left.
    pub(super) fn settle_kept(&self) {
        let settled = self.settle(&mut self.table());
        if settled {
            self.due_changed.notify_one();
        }
    }

    pub(super) fn settle(&self, table: &mut Table) -> bool {
        !self.capability.sessions && table.settle_kept()
    }

    /// A renewal has ended, with or without success. The next check of the ticket is at `due`, or
    /// at once if a gap has begun since the renewal was sent.
    ///
    /// Returns the stage of the ticket. `None` if the table does not have it any more.
    pub(crate) fn renewal_over(&self, id: Id, due: Instant) -> Option<Stage> {
        let mut table = self.table();
        let tracked = table.leases.get_mut(&id)?;
        if tracked.is_renewing() {
            tracked.renewal = RenewalStage::Idle;
        }
        let due = match tracked.was_asked_in(self.epoch()) {
            true => due,
            false => self.clock.now(),
        };
        let stage = tracked.stage;
        let due = tracked.due_after_answer(due);
        self.set_recheck(&mut table, id, due);
        Some(stage)
    }

    /// Sets when the keeper checks a lease next.
    pub(crate) fn recheck_at(&self, id: Id, due: Instant) {
        self.set_recheck(&mut self.table(), id, due);
    }

    pub(super) fn set_recheck(&self, table: &mut Table, id: Id, due: Instant) {
        let due = table.set_recheck(id, due);
        self.wake_keeper_at(table, due);
    }

    /// The store asks the client to recheck a ticket after `after`: because a waiter gets no
    /// wake-up, or because the ticket was asked back.
    pub(crate) fn recheck(&self, id: Id, after: Duration) {
        self.wanted(id);
        self.ask_at(id, self.clock.now().after(after.max(LEAST_RECHECK)));
    }

    /// Somebody waits for a ticket, or was refused because of it. If it [lingers](Self::linger), it is
    /// released.
    ///
    /// If this message comes before the answer to the enqueue of the ticket, it is not lost: the
    /// ticket will not linger. If the message is lost, the linger ends by itself.
    pub(crate) fn wanted(&self, id: Id) {
        let table = self.table();
        if let Some(tracked) = table.leases.get(&id) {
            tracked.lease.want();
            self.end_linger(table, id);
        }
    }

    /// Renews a ticket at `due` at the latest.
    pub(super) fn ask_at(&self, id: Id, due: Instant) {
        self.ask_in(&mut self.table(), id, due);
    }

    fn ask_in(&self, table: &mut Table, id: Id, due: Instant) {
        match table.leases.get_mut(&id) {
            // The answer to its enqueue or renewal is in flight, and may be older than this
            // message.
            Some(tracked) if tracked.stage == Stage::Asked || tracked.is_renewing() => {
                tracked.recheck_after_answer(due);
            }
            Some(tracked) if tracked.stage == Stage::Leaving => {}
            Some(tracked) if tracked.due.is_some_and(|before| before <= due) => {}
            Some(_) => self.set_recheck(table, id, due),
            None => {}
        }
    }

    /// A wake-up has come. If this process does not track the ticket, nothing happens.
    pub(crate) fn granted(&self, wake: Wake) {
        if !self.capability.wake_ups_grant {
            let mut table = self.table();
            let tracked = table.leases.get_mut(&wake.id);
            let due = tracked.and_then(|tracked| {
                tracked.confirm_at(wake.ticket, self.clock.now(), LEAST_RECHECK)
            });
            if let Some(due) = due {
                self.ask_in(&mut table, wake.id, due);
            }
            return;
        }
        let lease = self
            .table()
            .leases
            .get(&wake.id)
            .map(|tracked| Arc::clone(&tracked.lease));
        if let Some(lease) = lease {
            guarded(|| lease.grant(wake.ticket, self.clock.now()));
        }
    }

    /// Takes a lease out of the table. No later batch renews it. Returns the change that is to be made
    /// [at its end](Self::change_at_end).
    pub(crate) fn disarm(self: &Arc<Self>, id: Id) -> Option<Telling> {
        let mut table = self.table();
        table.remove(id);
        let change = table.at_end.remove(&id);
        // In the same step, so that a shutdown does not find the client idle in between.
        table.cleanups_open += usize::from(change.is_some());
        let idle = table.is_awaited_idle();
        drop(table);
        self.tell_if(idle);
        self.meter.cleanups_begun(usize::from(change.is_some()));
        change.map(|change| Telling {
            shared: Arc::clone(self),
            change: Some(change),
        })
    }

    /// Takes a held lease out of the table, and leaves its ticket at the store. Returns false if
    /// the keeper has given the ticket back meanwhile, for example because the client was shut
    /// down.
    pub(crate) fn withdraw(&self, id: Id) -> bool {
        let mut table = self.table();
        let tracked = table.leases.get(&id);
        let is_held =
            tracked.is_some_and(|tracked| matches!(tracked.stage, Stage::Held | Stage::Leaving));
        if is_held {
            table.remove(id);
        }
        let idle = table.is_awaited_idle();
        drop(table);
        self.tell_if(idle);
        is_held
    }

    /// A held lease is about to be [withdrawn](Self::withdraw). From now on no batch renews it.
    pub(crate) fn renew_no_more(&self, id: Id) {
        self.table().leave(id);
    }

    /// The lease is not withdrawn after all. If it is over, this reports the loss.
    pub(crate) fn renew_again(self: &Arc<Self>, lease: &Arc<Lease>) {
        let (id, now) = (lease.request.id, self.clock.now());
        let mut table = self.table();
        if table
            .leases
            .get(&id)
            .is_some_and(|tracked| tracked.stage == Stage::Leaving)
        {
            table.hold(id);
            self.set_recheck(&mut table, id, now);
        }
        drop(table);
        if let Some(reason) = lease.lost(now) {
            self.lost(lease, Stage::Held, reason);
        }
    }

    /// Notes that the ticket `ahead` is right ahead of a waiter: see [`turns`](super::turns).
    pub(crate) fn follow(&self, ahead: Id, follower: &Arc<Lease>, now: Instant) {
        let holds = self.table().follow(ahead, follower);
        if holds {
            follower.let_in(now);
        }
    }

    /// The last user of a held ticket is done, and is about to release the ticket on a connection of
    /// its own. From now on no batch renews the ticket.
    pub(crate) fn leave(&self, lease: &Lease) {
        let (id, ends) = (lease.request.id, self.ends(lease));
        let mut table = self.table();
        let next = ends.and_then(|now| table.end(id, now));
        table.leave(id);
        drop(table);
        self.let_in(next);
    }

    /// Hands a ticket to the keeper for removal, and takes it out of the table in the same step. So
    /// at every moment either the table or the list of clean-ups has it.
    pub(crate) fn clean_up(&self, cleanup: Cleanup) {
        let held = cleanup.held.as_ref();
        let ended = held.and_then(|lease| self.ends(lease));
        let next = self.table().give_back(cleanup, ended);
        self.due_changed.notify_one();
        self.let_in(next);
    }

    /// The last user of a ticket is done, and does not wait for the release. With `may_go_on`,
    /// another task of this process may [go on](Self::take_back) with the ticket.
    pub(crate) fn give_back(self: &Arc<Self>, lease: &Arc<Lease>, may_go_on: bool) {
        let mut held = Some(Arc::clone(lease));
        if self.capability.answers_at_once {
            match self.release_at_once(lease) {
                Some(true) => return drop(self.disarm(lease.request.id)),
                // That attempt may have removed the ticket, so it is no loss if the keeper finds
                // none.
                Some(false) => held = None,
                None => {}
            }
        }
        self.clean_up(Cleanup {
            held,
            may_go_on,
            ..Cleanup::of(lease)
        });
    }

    /// The last user of a ticket is done. Returns whether the ticket lingers. If not, the caller
    /// releases it.
    pub(crate) fn linger(&self, lease: &Lease) -> bool {
        let mut table = self.table();
        let lingers = table.linger(lease, self.clock.now(), self.epoch());
        if lingers {
            self.set_recheck(&mut table, lease.request.id, Instant::FAR_FUTURE);
        }
        lingers
    }

    /// A task of this client is about to ask the store for a lock of this name. So a ticket of the
    /// name does not linger any more.
    pub(crate) fn linger_no_more(&self, name: &Name) {
        if self.capability.tells_holders && !self.capability.answers_at_once {
            let table = self.table();
            if let Some(id) = table.lingers(name) {
                self.end_linger(table, id);
            }
        }
    }

    /// Gives a ticket to the keeper, if it lingers.
    pub(super) fn end_linger(&self, mut table: MutexGuard<'_, Table>, id: Id) {
        if table.end_linger(id) {
            drop(table);
            self.due_changed.notify_one();
        }
    }

    /// Takes a ticket of this name back that lingers, or that was given back a moment ago, if its
    /// release has not begun and `goes_on` allows it. Nobody else can have held the lock meanwhile,
    /// because the ticket has never left the line. If there is a clean-up of the ticket, it is
    /// returned, and the caller drops it when it holds no mutex.
    pub(crate) fn take_back(
        &self,
        name: &Name,
        goes_on: impl FnOnce(&Arc<Lease>) -> bool,
    ) -> Option<Cleanup> {
        let mut table = self.table();
        if let Some(id) = table.lingers(name) {
            match table.resume(id, self.clock.now(), self.epoch(), goes_on) {
                Some(lease) => self.renew_as_usual(&mut table, &lease),
                None => self.end_linger(table, id),
            }
            return None;
        }
        let cleanup = table.take_back(name, self.epoch(), goes_on)?;
        if let Some(lease) = &cleanup.held {
            self.renew_as_usual(&mut table, lease);
        }
        Some(cleanup)
    }

    /// Sets the time of the next renewal of a ticket that is in use again.
    fn renew_as_usual(&self, table: &mut Table, lease: &Lease) {
        let due = Self::renewal_time(lease, lease.given());
        self.set_recheck(table, lease.request.id, due);
    }

    /// The tickets of this name that the keeper has to remove at this moment.
    pub(crate) fn left(&self, name: &Name) -> Option<Left> {
        self.table().leftovers.of(name)
    }

    /// The last user of a ticket is done. Returns the time, if the ticket may let the next one in. If
    /// the lease is lost, the store has let the next one in, or will.
    fn ends(&self, lease: &Lease) -> Option<Instant> {
        if !self.capability.names_ahead || !lease.request.wants_all() {
            return None;
        }
        let now = self.clock.now();
        lease.lost(now).is_none().then_some(now)
    }

    /// Called when the mutex of the table is not held, because this runs wakers.
    fn let_in(&self, next: Option<Arc<Lease>>) {
        if let Some(next) = next {
            guarded(|| next.let_in(self.clock.now()));
        }
    }

    /// Makes this change when the ticket has been released, or the keeper has cleaned up after it.
    /// Others who watch the counter learn in this way that the ticket has ended. The change is also
    /// made when the store does not have the ticket any more, because its lease has ended.
    pub(crate) fn change_at_end(&self, id: Id, change: AtEnd) {
        let mut table = self.table();
        // Otherwise the ticket has ended, or is ending, and the caller finds it lost.
        if table.leases.contains_key(&id) {
            table.at_end.insert(id, change);
        }
    }

    /// Takes back a call of [`change_at_end`](Self::change_at_end).
    pub(crate) fn change_nothing_at_end(&self, id: Id) {
        self.table().at_end.remove(&id);
    }

    /// The same as [`clean_up`](Self::clean_up), unless the table does not have the ticket any more.
    /// Then a shutdown or the keeper has handed it over already.
    pub(crate) fn clean_up_if_known(&self, cleanup: Cleanup) {
        let mut table = self.table();
        if table.leases.contains_key(&cleanup.request.id) {
            table.clean_up(cleanup);
            drop(table);
            self.due_changed.notify_one();
        }
    }

    pub(crate) fn cleaned_up(&self, count: usize) {
        self.meter.cleaned_up(count);
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

    /// Whether any work depends on a connection. If so, a broken connection must be replaced before
    /// a caller asks for it.
    pub(crate) fn is_busy(&self) -> bool {
        let asked = |tracked: &Tracked| tracked.stage == Stage::Asked;
        let watches = !self.watches.is_empty();
        let table = self.table();
        watches || table.cleanups_open > 0 || !table.leases.values().all(asked)
    }
}
