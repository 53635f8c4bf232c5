//! Requests to the store about a hold that ends or becomes smaller. If the future of a request is
//! dropped before the answer, the keeper finishes the request.

use super::lifecycle::Held;
use crate::backend::{Departure, Released};
use crate::client::calls::Where;
use crate::client::tracked::Cleanup;
use crate::clock::Instant;
use crate::error::Error;

/// A ticket that should have fewer permits than the store counts, because the last writer has ended
/// or some permits were given back. If this value is dropped before the store has acknowledged the
/// smaller number, the keeper asks the store again.
pub(super) struct Shrinking<'a>(pub(super) &'a Held);

impl Shrinking<'_> {
    pub(super) async fn ask(self) -> Result<(), Error> {
        let held = self.0;
        let to_have = held.lease().permits();
        // The hold has changed in this process already, and no answer of the store undoes this
        // change.
        held.renew().await.map_err(Error::unavailable_if_config)?;
        let text = "the store could not say whether the ticket is smaller now";
        match held.lease().counted() > to_have {
            true => Err(Error::unknown(text)),
            false => Ok(()),
        }
    }
}

impl Drop for Shrinking<'_> {
    fn drop(&mut self) {
        // In a forked child, the table belongs to the parent.
        let lease = self.0.lease();
        if lease.is_shrinking() && !self.0.shared().is_forked() {
            self.0.shared().recheck_now(lease.request.id);
        }
    }
}

/// A ticket that its last user is releasing at the store. If this value is dropped before the store
/// has acknowledged the release, the keeper releases the ticket.
pub(super) struct Departing<'a> {
    held: &'a Held,
    acknowledged: bool,
}

impl<'a> Departing<'a> {
    pub(super) fn of(held: &'a Held) -> Self {
        held.shared().leave(&held.0.lease);
        Self {
            held,
            acknowledged: false,
        }
    }

    /// Returns whether the ticket was at the store.
    pub(super) async fn release(mut self, now: Instant) -> Result<bool, Error> {
        let (shared, lease) = (self.held.shared(), &self.held.0.lease);
        let departure = Departure {
            request: lease.as_enqueued(),
            enqueue_may_follow: lease.is_ambiguous(),
        };
        // The request waits at the gate of the connection at most until the lease ends. After that
        // there is nothing to release.
        let turn_by = lease.deadline().max(now);
        let answer = shared
            .release(Where::Here, now, turn_by, vec![departure])
            .await;
        let error = match answer.map(|answers| answers.first().copied()) {
            Ok(Some(released @ (Released::Released | Released::NotFound))) => {
                self.acknowledged = true;
                if let Some(telling) = shared.disarm(lease.request.id) {
                    telling.tell().await;
                }
                return Ok(released == Released::Released);
            }
            Ok(Some(Released::Failed) | None) => {
                Error::unknown("the store could not say whether the lock is released")
            }
            Err(error) => Error::from(error),
        };
        Err(self.held.failed(error))
    }
}

impl Drop for Departing<'_> {
    fn drop(&mut self) {
        // In a forked child, the ticket belongs to the parent.
        if !self.acknowledged && !self.held.shared().is_forked() {
            // The keeper sends another release. If the first one has arrived at the store, the
            // second finds no ticket, which is harmless.
            let lease = &self.held.0.lease;
            self.held.shared().clean_up(Cleanup::of(lease));
        }
    }
}
