//! What a connection does beside its requests: it stops to listen when nothing waits, and sweeps.

use std::sync::Arc;
use std::time::Duration;

use super::calls::{self, Calls, only};
use super::events::Ears;
use crate::backend::events::Timer;
use crate::backend::table::{Row as _, Upkeep};

/// A connection looks so often whether anything waits, and stops to listen if nothing does. So one
/// that often waits does not begin and stop all the time.
const IDLE: Duration = Duration::from_secs(5);

/// Runs until it is aborted. If a step fails, the next one goes on behind it: the names that it has
/// left out are swept in the next round.
pub(super) async fn keep_up(calls: Arc<Calls>, ears: Arc<Ears>, upkeep: Arc<Upkeep>, timer: Timer) {
    let mut after = String::new();
    loop {
        upkeep.begun().await;
        timer(IDLE).await;
        ears.stop(calls.client());
        if ears.is_listening() {
            upkeep.begin();
        }
        for _ in 0..upkeep.due() {
            let last = calls.ask(&calls::SWEEP, &[&after]).await;
            let last = last.and_then(only).and_then(|row| row.text("last"));
            after = last.ok().flatten().unwrap_or_default();
            // The round is over.
            if after.is_empty() {
                break;
            }
        }
    }
}
