//! The end of a client: shutdown, and the drop of the last handle.

use std::sync::Arc;

use super::shared::Shared;
use super::table::Phase;
use super::tracked::Stage;
use crate::clock::Instant;
use crate::error::LostReason;

impl Shared {
    /// Refuses new requests and ends the waiting ones. Held leases stay.
    ///
    /// Tickets in line are released here, because their tasks may not be polled. So are those that
    /// linger.
    pub(crate) fn refuse_new(&self) {
        let mut table = self.table();
        if table.phase == Phase::Open {
            table.phase = Phase::ShutDown;
        }
        let asked = table.leases_where(|stage| stage == Stage::Asked);
        let unused = |stage| matches!(stage, Stage::Waiting | Stage::Lingering { .. });
        let unused = table.clean_up_where(unused);
        let leftovers = table.leftovers.clone();
        drop(table);
        leftovers.close();
        self.due_changed.notify_one();
        self.settle_kept();
        self.watches.close();
        for lease in unused {
            lease.lose(LostReason::Shutdown);
        }
        for lease in asked {
            // If the ticket was granted in this moment, it is left to end like other held leases.
            let stage = self.stage(lease.request.id);
            if stage != Some(Stage::Held) {
                lease.lose(LostReason::Shutdown);
            }
        }
        if let Some(observer) = self.observer() {
            observer.close();
        }
    }

    /// The last handle is gone.
    pub(crate) fn end(&self) {
        let mut table = self.table();
        table.phase = Phase::Ending(self.clock.now().after(self.op_timeout));
        table.clean_up_where(|stage| matches!(stage, Stage::Lingering { .. }));
        drop(table);
        self.settle_kept();
        self.ends.notify_waiters();
        self.due_changed.notify_one();
    }

    /// Marks the held leases as lost, so that the work on them stops.
    pub(crate) fn lose_held(self: &Arc<Self>) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            if lease.lose(LostReason::Shutdown) {
                self.lost(&lease, Stage::Held, LostReason::Shutdown);
            }
        }
    }

    /// Releases every ticket that is left, even while a guard of it exists. This includes the
    /// tickets of tasks that are not polled, and that have asked for a lock or were releasing one.
    pub(crate) fn release_the_rest(&self) {
        let left = |stage| !matches!(stage, Stage::Kept { .. });
        let tickets = self.table().leases_where(left);
        for lease in tickets {
            // Before the release. If a task that was releasing its ticket is polled again, the
            // store may not have the ticket any more. That is no loss to report.
            lease.lose(LostReason::Shutdown);
        }
        self.table().clean_up_where(left);
        self.due_changed.notify_one();
    }

    /// Waits until no ticket is in use, in line, or being cleaned up, but at most until `until`.
    /// Returns how many tickets are left.
    pub(crate) async fn idle(self: &Arc<Self>, until: Instant) -> usize {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            // Registered before the check, so that a change in between is not missed.
            idle.as_mut().enable();
            let left = self.table().await_idle();
            if left == 0 || self.clock.now() >= until {
                return left;
            }
            let _ = self.by(until, idle).await;
        }
    }

    /// Resolves when the last handle is gone.
    pub(crate) async fn ending(&self) {
        loop {
            let ends = self.ends.notified();
            let mut ends = std::pin::pin!(ends);
            // Registered before the check, so that a change in between is not missed.
            ends.as_mut().enable();
            if let Phase::Ending(_) = self.table().phase {
                return;
            }
            ends.await;
        }
    }
}
