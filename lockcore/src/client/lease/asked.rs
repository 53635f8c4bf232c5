//! The renewals of a lease that the store has not answered.

use std::time::Duration;

use crate::clock::Instant;

/// Renewals whose answers have not come. They matter only once the ttl has risen: if the store carries out an older
/// renewal, with the shorter ttl, after a newer one, then the ticket's time is cut short and no one is told.
#[derive(Debug)]
pub(super) struct Asked {
    /// How many with the present ttl, and how many with a shorter one.
    pub(super) now: u32,
    pub(super) shorter: u32,
    /// The shortest ttl of the renewals whose callers gave up, and until when these may still arrive.
    pub(super) late: Duration,
    pub(super) late_until: Instant,
}

impl Asked {
    pub(super) fn nothing() -> Self {
        Self {
            now: 0,
            shorter: 0,
            late: Duration::MAX,
            late_until: Instant::from_nanos(0),
        }
    }
}
