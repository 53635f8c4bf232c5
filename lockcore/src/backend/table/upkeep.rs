//! What a connection does beside its requests, when there is something to do. It sweeps after so many
//! requests.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::Notify;

/// A step of the sweep follows so many requests that may make a row. It looks at four times as many
/// names, and removes up to twice as many. So the sweep is faster than the growth.
const REQUESTS: u32 = 50;

/// So many steps follow each other at most.
const STEPS: u32 = 100;

/// What there is to do.
#[derive(Debug)]
pub(crate) struct Upkeep {
    begun: Notify,
    requests: AtomicU32,
}

/// The count begins anywhere, so that processes that make few requests each sweep too.
impl Default for Upkeep {
    fn default() -> Self {
        Self {
            begun: Notify::new(),
            requests: AtomicU32::new(fastrand::u32(..REQUESTS)),
        }
    }
}

impl Upkeep {
    /// Resolves when there is something to do.
    pub(crate) async fn begun(&self) {
        self.begun.notified().await;
    }

    /// There is something to do in a moment.
    pub(crate) fn begin(&self) {
        self.begun.notify_one();
    }

    /// A request was sent that may make a row.
    pub(crate) fn count(&self) {
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 == REQUESTS {
            self.begin();
        }
    }

    /// How many steps of the sweep are due.
    pub(crate) fn due(&self) -> u32 {
        let requests = self.requests.swap(0, Ordering::Relaxed);
        (requests / REQUESTS).min(STEPS)
    }
}
