//! The renewals of a lease that the store has not answered.

use std::time::Duration;

use crate::clock::Instant;

/// The requests of a lease whose answers have not come: renewals, and attempts to enqueue. They
/// matter only after the ttl has risen. Then the store may carry out an older request, with the
/// shorter ttl, after a newer one. That would cut the ticket's time short, and no message would
/// tell this process.
#[derive(Debug)]
pub(super) struct Asked {
    /// How many renewals have the present ttl, and how many have a shorter one.
    pub(super) now: u32,
    pub(super) shorter: u32,
    /// The shortest ttl of the requests whose callers gave up, and until when those requests may
    /// arrive.
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
