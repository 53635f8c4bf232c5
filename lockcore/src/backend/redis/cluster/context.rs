//! The state that all parts of a connection to a cluster share.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;

use super::seeds::Seeds;
use super::whole::Whole;
use crate::backend::EventSink;
use crate::name::Namespace;

#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) seeds: Arc<Seeds>,
    pub(super) namespace: Namespace,
    pub(super) receiver: u64,
    pub(super) op_timeout: Duration,
    pub(super) runtime: Handle,
    /// The sink is owned by a task of the runtime. So the core learns when the runtime has ended.
    pub(super) events: Weak<EventSink>,
    pub(super) whole: Weak<dyn Whole>,
}

impl Context {
    /// If a node has answered nothing for this time, it may be gone. The time is shorter than the
    /// one after which a request is given up.
    pub(super) fn silent(&self) -> Duration {
        self.op_timeout / 2
    }

    /// Whether a ticket of this receiver may wait in a slot.
    pub(super) fn wants(&self, slot: u16) -> bool {
        self.seeds.receivers.wants(self.receiver, slot)
    }
}
