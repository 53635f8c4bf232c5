//! What a connection does beside its requests: it stops to listen when nothing waits, and sweeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::calls::{self, Calls, only};
use super::events::Ears;
use crate::backend::events::Timer;
use crate::backend::table::Row as _;

/// A connection looks so often whether anything waits, and stops to listen if nothing does. So one
/// that often waits does not begin and stop all the time.
const IDLE: Duration = Duration::from_secs(5);

/// A step of the sweep follows so many requests that may make a row. It looks at four times as many
/// names, and removes up to twice as many. So the sweep is faster than the growth.
const REQUESTS: u32 = 50;

/// So many steps follow each other at most.
const STEPS: u32 = 100;

/// What there is to do.
#[derive(Debug)]
pub(super) struct Upkeep {
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
    /// There is something to do in a moment.
    pub(super) fn begin(&self) {
        self.begun.notify_one();
    }

    /// A request was sent that may make a row.
    pub(super) fn count(&self) {
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 == REQUESTS {
            self.begin();
        }
    }

    /// How many steps of the sweep are due.
    fn due(&self) -> u32 {
        let requests = self.requests.swap(0, Ordering::Relaxed);
        (requests / REQUESTS).min(STEPS)
    }
}

/// Runs until it is aborted. If a step fails, the next one goes on behind it: the names that it has
/// left out are swept in the next round.
pub(super) async fn keep_up(calls: Arc<Calls>, ears: Arc<Ears>, upkeep: Arc<Upkeep>, timer: Timer) {
    let mut after = String::new();
    loop {
        upkeep.begun.notified().await;
        timer(IDLE).await;
        ears.stop(calls.client());
        if ears.is_listening() {
            upkeep.begin();
        }
        for _ in 0..upkeep.due() {
            let last = calls.ask(&calls::SWEEP, &[&after]).await;
            let last = last.and_then(only).and_then(|row| row.text("last"));
            after = last.ok().flatten().unwrap_or_default();
        }
    }
}
