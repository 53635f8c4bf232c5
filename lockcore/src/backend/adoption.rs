//! The request of a client that takes over the ticket of another.

use std::sync::Arc;

use crate::request::{Id, Request};

/// The request to make a ticket the ticket of another client: see
/// [`Connection::adopt`](super::Connection::adopt). The ticket holds its permits, and the client
/// that had it so far has detached it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Adoption {
    /// The id that the ticket has had so far.
    pub from: Id,
    /// The number of the ticket.
    pub ticket: u64,
    /// Whether an enqueue of the id `from` may arrive at the store later. If so, the store leaves a
    /// mark, and the late enqueue answers [`Enqueued::Gone`](super::Enqueued::Gone), as for a
    /// [release](super::Departure::enqueue_may_follow).
    pub enqueue_may_follow: bool,
    /// The request of the new client, with an id, an owner and a ttl of its own. The name, the
    /// permits and the capacity are those of the ticket.
    pub request: Arc<Request>,
}

impl Adoption {
    /// The adoption of the ticket with this id and this number.
    #[must_use]
    pub fn new(from: Id, ticket: u64, enqueue_may_follow: bool, request: Arc<Request>) -> Self {
        Self {
            from,
            ticket,
            enqueue_may_follow,
            request,
        }
    }
}
