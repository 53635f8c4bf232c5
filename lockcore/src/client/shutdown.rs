//! The end of a client: shutdown, and the drop of the last handle.

use std::sync::Arc;

use super::shared::Shared;
use super::table::Phase;
use super::tracked::{Cleanup, Stage};
use crate::clock::Instant;
use crate::error::LostReason;

impl Shared {
    /// Refuses new requests and ends the waiting ones. Held leases stay.
    pub(crate) fn refuse_new(&self) {
        let mut table = self.table();
        if table.phase == Phase::Open {
            table.phase = Phase::ShutDown;
        }
        let waiting = table.leases_where(|stage| matches!(stage, Stage::Asked | Stage::Waiting));
        drop(table);
        self.settle_kept();
        self.watches.close();
        for lease in waiting {
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
        self.table().phase = Phase::Ending(self.clock.now().after(self.op_timeout));
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

    /// Releases every held lease, even while a guard of it exists.
    pub(crate) fn release_held(&self) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            self.clean_up(Cleanup::of(&lease));
        }
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
