//! What the verbs of a connection have in common.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::calls::Calls;
use super::config::{Durability, LOOK, Server, Wakeups};
use super::dial::{Line, Patience};
use super::durable::Flushes;
use super::events::Ears;
use super::upkeep::Upkeep;
use super::waits::Waits;
use crate::backend::StoreError;

/// What the verbs need. Their futures share it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) server: Arc<Server>,
    pub(super) patience: Patience,
    pub(super) line: Line,
    /// `None` with `durability=off`.
    pub(super) flushes: Option<Flushes>,
    pub(super) durability: Durability,
    pub(super) receiver: u64,
    pub(super) waits: Arc<Waits>,
    pub(super) ears: Arc<Ears>,
    pub(super) upkeep: Arc<Upkeep>,
    pub(super) keeps_up: AbortHandle,
    /// The runtime that drives the connection.
    pub(super) runtime: Handle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeps_up.abort();
    }
}

impl Link {
    /// Whether waiters look, because no message comes.
    pub(super) fn looks(&self) -> bool {
        self.server.wakeups == Wakeups::Look
    }

    /// Shortens the time after which a waiter looks again, if it has to look.
    pub(super) fn look_again(&self, recheck_in: &mut Option<Duration>) {
        if self.looks() {
            *recheck_in = Some(recheck_in.map_or(LOOK, |after| after.min(LOOK)));
        }
    }

    pub(super) fn calls(&self) -> &Calls {
        &self.line.calls
    }

    /// Waits until everything that was answered on this connection counts.
    pub(super) async fn counts(&self) -> Result<(), StoreError> {
        match &self.flushes {
            Some(flushes) => flushes.flush().await,
            None => Ok(()),
        }
    }
}
