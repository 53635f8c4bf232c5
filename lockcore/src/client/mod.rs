//! The state that all handles of a client share, and the thread that looks after it.
//!
//! From the bottom: a [lease](lease) record holds what this process knows of one ticket. A
//! [tracked](tracked) entry adds the stage of that ticket. The [table](table) contains all entries,
//! and knows when each is due. [`Shared`](shared::Shared) puts together the table, the clock and
//! the [links](links) to the store. Each file below `shared` in this list does one job on it. The
//! [keeper](keeper) is the thread that runs these jobs.

mod backlog;
pub(crate) mod events;
pub(crate) mod gate;
pub(crate) mod lease;
pub(crate) mod leftovers;
pub(crate) mod links;
mod pace;
pub(crate) mod settings;
pub(crate) mod table;
pub(crate) mod tracked;
mod turns;
mod window;

pub(crate) mod shared;

pub(crate) mod alarms;
mod asking;
pub(crate) mod calls;
pub(crate) mod capacities;
pub(crate) mod counters;
mod listed;
mod losses;
#[cfg(feature = "metrics")]
mod measured;
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
