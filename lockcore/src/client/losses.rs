//! Leases that end before their users are done: how the client finds such a loss, and whom it
//! tells.

use std::sync::Arc;
use std::time::Duration;

use tracing::Level;

use super::events::{Event, GrantEvent};
use super::lease::Lease;
use super::shared::Shared;
use super::tracked::Stage;
use crate::error::LostReason;

impl Shared {
    /// The store has answered that it does not know the ticket any more.
    pub(super) fn taken(self: &Arc<Self>, lease: &Arc<Lease>) {
        let reason = lease.why_missing();
        if lease.lose(reason)
            && let Some(stage) = self.stage(lease.request.id)
        {
            self.lost(lease, stage, reason);
        }
    }

    /// A holder has released its ticket, and the store did not have the ticket although it should
    /// have. Somebody else may have held the lock at the same time.
    pub(crate) fn missing(self: &Arc<Self>, lease: &Arc<Lease>) {
        lease.lost(self.clock.now()); // a lease that has run out ended as expected
        let reason = lease.why_missing();
        lease.lose(reason);
        // A renewal in flight may have found the ticket missing earlier, when the holder was
        // already releasing it. That renewal did not report the loss. So the condition is the
        // reason of the loss, and not whether the call of `lose` was the first.
        if lease.lost(self.clock.now()) == Some(reason) {
            self.lost(lease, Stage::Held, reason);
        }
    }

    /// A ticket that this process holds was asked back. The lease ends when `grace` is over. From
    /// now on no other task of this process gets the ticket.
    ///
    /// The grace begins at this call, and not when the ask-back was stored. So a holder whose
    /// client learns of the ask-back late has the same time.
    pub(super) fn asked_back(self: &Arc<Self>, lease: &Arc<Lease>, grace: Duration) {
        let first = lease.ask_back(self.clock.now().after(grace));
        if !first {
            return;
        }
        let (lock, grant_id) = (lease.request.name.clone(), lease.grant_id());
        self.teller
            .tell_grant(&lock, GrantEvent::AskedBack(grant_id));
        self.log(Level::DEBUG, move || {
            tracing::debug!(%lock, %grant_id, ?grace, "somebody asks for the lock");
        });
        if let Some(observer) = self.observer() {
            observer.asked_back(lease);
        }
        self.end_linger(self.table(), lease.request.id);
    }

    /// The keeper is giving a ticket back because its task is not polled. If the task is polled
    /// again, it finds that its ticket is lost.
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

    /// The keeper or the user of a lease has found it lost; the user may be the first to notice. A
    /// lost lock is logged as a warning, because operators want to know of it. A lost position in
    /// line is only a debug line, because the acquire loop takes a new ticket.
    pub(crate) fn lost(self: &Arc<Self>, lease: &Arc<Lease>, stage: Stage, reason: LostReason) {
        // A ticket that is being released is expected to end. The answer to the release tells
        // whether the store had the ticket: see `missing`.
        let is_told = match stage {
            Stage::Leaving => lease.is_told(),
            _ => !lease.tell_loss(),
        };
        if is_told {
            return;
        }
        let (lock, grant_id) = (lease.request.name.clone(), lease.grant_id());
        match stage {
            Stage::Held => {
                lease.meter.lost(reason);
                if !lease.is_read() {
                    let event = GrantEvent::Lost(grant_id, reason);
                    self.teller.tell_grant(&lock, event);
                }
                self.teller.tell(|| Event::Lost {
                    name: lock.as_str().to_owned(),
                    grant_id,
                    reason,
                });
                self.log(Level::WARN, move || {
                    tracing::warn!(%lock, %grant_id, ?reason, "lock lost");
                });
            }
            // Without renewal the lease was meant to end by itself, so its end is no reason for a
            // warning.
            Stage::Kept { .. } if lease.renew => self.log(Level::WARN, move || {
                tracing::warn!(%lock, ?reason, "lock lost before its min_hold was over");
            }),
            Stage::Asked
            | Stage::Waiting
            | Stage::Kept { .. }
            | Stage::Lingering { .. }
            | Stage::Leaving => {
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
