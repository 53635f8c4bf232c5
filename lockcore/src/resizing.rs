//! Requests about the stored capacity of a semaphore, and their answers. The effect of a stored
//! capacity on tickets is in `queue`.

use std::num::NonZeroU32;

use crate::name::Name;
use crate::request::Id;

/// A request about the capacity that is stored for a name.
///
/// While a capacity is stored, the capacities of the tickets of this name do not count. So a
/// request for permits is not refused because of its capacity. The exception is a request with the
/// capacity [`FULL`](crate::backend::FULL), because a mutex or a read/write lock is no semaphore.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Resize {
    /// The name.
    pub name: Name,
    /// The identity of the request. A store keeps the id with the capacity. If the same request is
    /// sent again, the store does not change the capacity again, and answers `Applied`.
    pub id: Id,
    /// The operation.
    pub op: ResizeOp,
}

impl Resize {
    /// A request.
    #[must_use]
    pub fn new(name: Name, id: Id, op: ResizeOp) -> Self {
        Self { name, id, op }
    }

    /// The outcome at a store that has this capacity and this last change, and these capacities of
    /// live tickets, the oldest first. `None` if the change is still to be made.
    pub(crate) fn outcome(
        &self,
        stored: Option<u32>,
        change: Option<Id>,
        tickets: impl Iterator<Item = u32>,
    ) -> Option<ResizeOutcome> {
        let ResizeOp::Set {
            capacity,
            after,
            stated,
        } = self.op
        else {
            return Some(ResizeOutcome::Applied);
        };
        if change == Some(self.id) {
            return Some(ResizeOutcome::Applied);
        }
        if change != after {
            return Some(ResizeOutcome::Kept);
        }
        let looked_at = match (stored, capacity) {
            (None, _) => 1,
            (Some(_), Some(_)) => 0,
            (Some(_), None) => usize::MAX,
        };
        let in_use = tickets.take(looked_at).find(|of| *of != stated.get())?;
        Some(ResizeOutcome::Mismatch { in_use })
    }
}

/// An operation on the stored capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeOp {
    /// Only answer.
    Read,
    /// Store another capacity, if nobody has changed the stored capacity since the caller read it.
    Set {
        /// The new stored capacity. With `None` the stored capacity is removed, and the capacities
        /// of the tickets count again.
        capacity: Option<u32>,
        /// The id of the [last change](Resized::change) that the caller has read.
        after: Option<Id>,
        /// The capacity that the caller states for this name. It guards two changes. When a first
        /// capacity is stored, nothing is changed if the oldest live ticket has another capacity
        /// than `stated`. When the stored capacity is removed, nothing is changed if any live
        /// ticket has another one. So without a stored capacity, all tickets of a name have the
        /// same capacity.
        stated: NonZeroU32,
    },
}

/// The answer to a [`Resize`]: what is stored after the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Resized {
    /// The stored capacity, if there is one.
    pub capacity: Option<u32>,
    /// The [identity](Resize::id) of the last change. A store keeps this id for at least a minute
    /// after the stored capacity was removed or [forgotten](crate::backend::Connection::forget), so
    /// that a change that arrives late, or once more, does nothing. ZooKeeper keeps it only until the
    /// server removes the empty node of the name, which may be earlier.
    pub change: Option<Id>,
    /// The effect of the request.
    pub outcome: ResizeOutcome,
}

impl Resized {
    /// An answer with this outcome, this stored capacity and this last change.
    pub const fn new(capacity: Option<u32>, change: Option<Id>, outcome: ResizeOutcome) -> Self {
        Self {
            capacity,
            change,
            outcome,
        }
    }
}

/// The effect of a request on a stored capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeOutcome {
    /// The request was carried out.
    Applied,
    /// Nothing was changed, because somebody else has changed the capacity since the caller read
    /// it.
    Kept,
    /// Nothing was changed, because the name is in use with another capacity.
    Mismatch {
        /// The capacity of a live ticket.
        in_use: u32,
    },
}
