//! What the user holds: the guard that releases, and the view that looks.

mod counts;
mod departing;
mod guard;
mod held;
mod lifecycle;

pub use guard::Release;
pub use lifecycle::{Guard, Held};
pub(crate) use lifecycle::{INNER_PERMITS, InnerPermits};
