//! What the user has of a held lock: the guard, which releases it, and the view, which only reads.

mod counts;
mod departing;
mod detach;
mod guard;
mod held;
mod lifecycle;
mod value;
mod warned;

pub use detach::DetachError;
pub use guard::Release;
pub use lifecycle::{Guard, Held};
pub(crate) use lifecycle::{INNER_PERMITS, InnerPermits};
