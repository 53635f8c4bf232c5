//! Remembers the last warning of a view, so that it warns once for each deadline.

use std::sync::atomic::AtomicU64;

/// The [deadline](crate::client::lease::Lease::deadline) of which a view has
/// [warned](crate::Held::in_danger), in nanoseconds of the lease clock.
pub(super) struct Warned(pub(super) AtomicU64);

impl Warned {
    /// The deadline of a lease that is lost.
    pub(super) const OF_THE_LOSS: u64 = 0;
}

impl Default for Warned {
    /// No lease that is held has this deadline.
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl Clone for Warned {
    /// A clone of a view has not warned anybody.
    fn clone(&self) -> Self {
        Self::default()
    }
}
