//! The values that the user holds: the guard, which releases, and the view, which only reads.

mod counts;
mod departing;
mod detach;
mod guard;
mod held;
mod lifecycle;
mod value;

pub use detach::NotDetached;
pub use guard::Release;
pub use lifecycle::{Guard, Held};
pub(crate) use lifecycle::{INNER_PERMITS, InnerPermits};
