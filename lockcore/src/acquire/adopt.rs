//! Taking over the ticket of another client, instead of asking for a new ticket.

use std::sync::Arc;
use std::time::Duration;

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
    let mut ttl = spec.ttl;
    loop {
        match adopt_for(spec, budget, detached, ttl).await? {
            Ok(lease) => return Ok(lease),
            Err(longest) => ttl = longest,
        }
    }
}

/// Takes the lock with this ttl. Returns the longest ttl that the session of this client allows, if
/// this one is longer. Nothing was sent then.
async fn adopt_for(
    spec: &Spec<'_>,
    budget: &Budget,
    detached: &Detached,
    ttl: Duration,
) -> Result<Result<Arc<Lease>, Duration>, Error> {
    let shared = &spec.client.shared;
    let request = Arc::new(Request {
        name: spec.name.clone(),
        id: shared.new_id()?,
        permits: spec.permits,
        capacity: spec.capacity,
        ttl,
        wait: false,
        name_ahead: false,
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
    let mut pending = Pending::adopting(
        shared,
        Arc::new(lease.measured_by(spec.meter.clone())),
        adoption,
    )?;
    match pending
        .enqueue(None, budget.give_up, budget.give_up)
        .await?
    {
        Progress::Granted(_) => match pending.into_lease() {
            Some(lease) => Ok(Ok(lease)),
            None => Err(Error::not_adopted()),
        },
        Progress::TtlTooLong(longest) => Ok(Err(longest)),
        Progress::Lost | Progress::Waiting | Progress::AskAgain { .. } => Err(Error::not_adopted()),
    }
}
