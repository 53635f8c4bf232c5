//! Requests about the stored capacity of a semaphore, and their answers. Its effect on the tickets is in `queue`.

use std::num::NonZeroU32;

use crate::name::Name;
use crate::request::Id;

/// A request about the capacity that is stored for a name.
///
/// While one is stored, the capacities of the tickets of that name do not count. A request for permits is not refused
/// because of its capacity then, unless it is [`FULL`](crate::backend::FULL): a mutex is no semaphore.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Resize {
    /// The name.
    pub name: Name,
    /// The identity of the request. A store keeps it with the capacity, and answers a repetition as carried out.
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
}

/// An operation on the stored capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResizeOp {
    /// Only answer.
    Read,
    /// Store another capacity, if nobody else has changed it since it was read.
    Set {
        /// The capacity from then on. With `None` there is none any more, and the tickets decide again.
        capacity: Option<u32>,
        /// The [last change](Resized::change) that was read.
        after: Option<Id>,
        /// The capacity that the caller has in mind for a name without a stored one. If live tickets have another, nothing
        /// is changed: the oldest, if none is stored yet, and any of them, if none is to be stored any more. So tickets
        /// without a stored capacity all have the same one.
        stated: NonZeroU32,
    },
}

/// The answer to a [`Resize`]: what is stored after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Resized {
    /// The capacity.
    pub capacity: Option<u32>,
    /// The [identity](Resize::id) of the last change. A store may know it although no capacity is stored any more, and
    /// should for a minute, so that a change that comes late does nothing.
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
    /// It was carried out.
    Applied,
    /// Somebody else has changed the capacity since. Nothing was changed.
    Kept,
    /// The name is in use with another capacity. Nothing was changed.
    Mismatch {
        /// The capacity of a live ticket.
        in_use: u32,
    },
}
