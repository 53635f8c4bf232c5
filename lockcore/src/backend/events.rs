//! The sink that a store's connection tells its news to.

use std::sync::{Arc, Weak};

use tokio::sync::oneshot;

use super::Wake;
use crate::name::Namespace;
use crate::shared::Shared;

/// Where a connection tells what the store says unasked. Dropping it says that the connection is
/// of no use any more.
pub struct Events {
    shared: Weak<Shared>,
    receiver: u64,
    namespace: Namespace,
    _closed: oneshot::Sender<()>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events")
            .field("receiver", &self.receiver)
            .finish_non_exhaustive()
    }
}

impl Events {
    /// A sink, and what resolves when it has been dropped.
    pub(crate) fn new(shared: &Arc<Shared>, receiver: u64) -> (Self, oneshot::Receiver<()>) {
        let (closed, when_closed) = oneshot::channel();
        let events = Self {
            shared: Arc::downgrade(shared),
            receiver,
            namespace: shared.namespace.clone(),
            _closed: closed,
        };
        (events, when_closed)
    }

    /// A number that no other receiver of wake-ups has, and that stays the same when the connection
    /// is replaced: tickets that were enqueued before are woken on the new one.
    #[must_use]
    pub fn receiver(&self) -> u64 {
        self.receiver
    }

    /// The namespace of all names that the client uses.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// A ticket is granted. Callable from any thread; wakes the waiter without blocking.
    pub fn granted(&self, wake: Wake) {
        if let Some(shared) = self.shared.upgrade() {
            shared.granted(wake);
        }
    }

    /// Wake-ups may have been missed: everything is asked after.
    pub fn gap(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.renew_everything();
        }
    }
}
