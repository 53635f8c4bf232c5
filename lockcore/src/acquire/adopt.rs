//! Taking over the ticket of another client, instead of asking for a new ticket.

use std::sync::Arc;

use super::Budget;
use super::pending::{Pending, Progress};
use super::spec::Spec;
use crate::backend::Adoption;
use crate::client::lease::Lease;
use crate::detached::Detached;
use crate::error::Error;
use crate::request::Request;

/// Takes the lock that another client has detached. `spec` describes it.
///
/// If the future is dropped before its first poll, nothing was sent. If it is dropped later and the
/// store has given the ticket to this client, [`Pending`] releases the ticket. If the store has not
/// done so, the ticket stays as it was detached.
pub(crate) async fn adopt(
    spec: &Spec<'_>,
    budget: &Budget,
    detached: &Detached,
) -> Result<Arc<Lease>, Error> {
    let shared = &spec.client.shared;
    let mut ttl = spec.ttl;
    loop {
        let request = Arc::new(Request {
            name: spec.name.clone(),
            id: shared.new_id()?,
            permits: spec.permits,
            capacity: spec.capacity,
            ttl,
            wait: false,
            name_ahead: false,
            lingers: false,
            highest_seen: 0,
            owner: Arc::clone(spec.owner),
        });
        let adoption = Adoption::new(
            detached.id,
            detached.grant.ticket(),
            detached.enqueue_may_follow,
            Arc::clone(&request),
        );
        let lease = Lease::adopted(request, detached.grant.hand_overs());
        let lease = Arc::new(lease.measured_by(spec.meter.clone()));
        let mut pending = Pending::adopting(shared, lease, adoption)?;
        let asked = pending.enqueue(None, budget.give_up, budget.give_up);
        match asked.await? {
            Progress::Granted(_) => return pending.into_lease().ok_or_else(Error::not_adopted),
            // The session of this client allows no longer ttl. Nothing was sent.
            Progress::TtlTooLong(longest) => ttl = longest,
            Progress::Lost | Progress::Waiting | Progress::AskAgain { .. } => {
                return Err(Error::not_adopted());
            }
        }
    }
}
