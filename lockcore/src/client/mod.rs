//! The state that all handles of a client share, and the thread that looks after it.
//!
//! From the bottom: a [lease](lease) holds what this process knows of one ticket, and a [tracked](tracked) one
//! says how far it has come. The [table](table) contains all of them and says when each is due. [`Shared`](shared::Shared) puts the table, the clock and the [links](links) to the
//! store together. The files after it in this list are its jobs, one each. The [keeper](keeper) is the thread that does
//! them.

pub(crate) mod events;
pub(crate) mod gate;
pub(crate) mod lease;
pub(crate) mod links;
pub(crate) mod settings;
pub(crate) mod table;
pub(crate) mod tracked;

pub(crate) mod shared;

pub(crate) mod alarms;
mod answered;
mod asking;
pub(crate) mod calls;
pub(crate) mod capacities;
mod counters;
mod losses;
mod renewals;
mod reports;
mod shutdown;
mod tickets;
pub(crate) mod watched;
mod watches;

pub(crate) mod keeper;
mod supervise;

#[cfg(test)]
mod tests;
