//! Leases that are over before their users are done: who finds out, and who is told.

use std::sync::Arc;

use tracing::Level;

use super::events::Event;
use super::lease::Lease;
use super::shared::Shared;
use super::table::Stage;
use crate::error::LostReason;

impl Shared {
    /// The store does not know the ticket.
    pub(super) fn taken(self: &Arc<Self>, lease: &Arc<Lease>) {
        if lease.lose(LostReason::Taken)
            && let Some(stage) = self.stage(lease.request.id)
        {
            self.lost(lease, stage, LostReason::Taken);
        }
    }

    /// A ticket that its holder gave back was not at the store, and should have been: somebody else may have had
    /// the lock at the same time.
    pub(crate) fn missing(self: &Arc<Self>, lease: &Arc<Lease>) {
        lease.lost(self.clock.now()); // what ran out on the way is no news to anybody
        lease.lose(LostReason::Taken);
        // A renewal that was under way may have found it missing before, when nobody held it any more.
        if lease.lost(self.clock.now()) == Some(LostReason::Taken) {
            self.lost(lease, Stage::Held, LostReason::Taken);
        }
    }

    /// The keeper has given a ticket back, because its task is not polled: the task finds that its
    /// place is lost, should it be polled again.
    pub(crate) fn recalled(self: &Arc<Self>, lease: &Arc<Lease>) {
        let lock = lease.request.name.clone();
        self.log(Level::DEBUG, move || {
            tracing::debug!(%lock, "nobody collected a grant: its future is not polled");
        });
        if let Some(observer) = self.observer() {
            observer.recalled(lease);
        }
        lease.lose(LostReason::Expired);
    }

    /// A lease has been found lost: by the keeper, or by its user, who may be faster. What an operator
    /// wants to know is a lock that was lost; a place in line is taken anew.
    pub(crate) fn lost(self: &Arc<Self>, lease: &Arc<Lease>, stage: Stage, reason: LostReason) {
        // A ticket that is being released is expected to go. Whether it was there is known by the answer to
        // its release: see `missing`.
        let is_told = match stage {
            Stage::Leaving => lease.is_told(),
            _ => !lease.tell_loss(),
        };
        if is_told {
            return;
        }
        let (lock, token) = (lease.request.name.clone(), lease.token());
        match stage {
            Stage::Held => {
                self.teller.tell(|| Event::Lost {
                    name: lock.as_str().to_owned(),
                    token,
                    reason,
                });
                self.log(Level::WARN, move || {
                    tracing::warn!(%lock, %token, ?reason, "lock lost");
                });
            }
            // Without renewal it was to end by itself.
            Stage::Kept { .. } if lease.renew => self.log(Level::WARN, move || {
                tracing::warn!(%lock, ?reason, "lock lost before its min_hold was over");
            }),
            Stage::Asked | Stage::Waiting | Stage::Kept { .. } | Stage::Leaving => {
                self.log(Level::DEBUG, move || {
                    tracing::debug!(%lock, ?reason, "ticket lost");
                });
            }
        }
        if let Some(observer) = self.observer() {
            observer.lost(lease);
        }
    }
}
