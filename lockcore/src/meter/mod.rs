//! The metrics of a client. The guide's page `metrics` describes them.
//!
//! With the feature `metrics`, the numbers go to the recorder of the program, through the crate
//! `metrics`. Without it, the types here have no size and their methods do nothing.
//!
//! The code that takes, holds and loses locks calls the methods here. Nothing here decides
//! anything, and no call waits.

#[cfg(not(feature = "metrics"))]
mod off;
#[cfg(feature = "metrics")]
mod on;

#[cfg(not(feature = "metrics"))]
pub(crate) use off::{LockMeter, Meter, Up};
#[cfg(feature = "metrics")]
pub(crate) use on::{Asked, LockMeter, Meter, Requests, Up, Verb};

/// What the store has answered to the renewal of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "metrics"),
    allow(dead_code, reason = "without the feature, nobody reads it")
)]
pub(crate) enum Renewal {
    /// The ticket has another ttl.
    Renewed,
    /// The store does not have the ticket.
    Lost,
    /// There was no answer, or the store has refused.
    Failed,
}

/// What has given the lock to a caller that waited for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "metrics"),
    allow(dead_code, reason = "without the feature, nobody reads it")
)]
pub(crate) enum HandOver {
    /// Another task of this process, without a request to the store.
    Process,
    /// The store, to the ticket in its line.
    Store,
}
