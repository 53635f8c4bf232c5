//! What the verbs of a connection have in common.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::calls::Calls;
use super::config::{Durability, Server};
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
