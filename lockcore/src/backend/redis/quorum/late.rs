//! The enqueues that slow nodes have not answered although their verb has its answer. All connections of a client share
//! them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::nodes::Links;
use crate::request::Id;

/// The ids that were granted by a majority, while slower nodes have not answered the enqueue.
///
/// A release of such an id may come on other connections to the nodes, and overtake the enqueue at such a node. That node
/// would then keep a ticket that nobody has. So it is told of the release again when it has answered: see
/// [`finish_late`](super::background::finish_late). On the connections of the enqueue the release cannot overtake it.
#[derive(Clone, Debug, Default)]
pub(super) struct Late(Arc<Mutex<HashMap<Id, Pending>>>);

/// An enqueue that slower nodes have not answered.
#[derive(Debug)]
struct Pending {
    /// The connections that it was sent on.
    links: Weak<Links>,
    /// Whether a release was sent since then on other connections.
    is_overtaken: bool,
}

/// An enqueue that has no answer from all nodes until this is dropped.
#[derive(Debug)]
pub(super) struct Unanswered {
    late: Late,
    id: Id,
}

impl Late {
    pub(super) fn begin(&self, id: Id, links: &Arc<Links>) -> Unanswered {
        let pending = Pending {
            links: Arc::downgrade(links),
            is_overtaken: false,
        };
        self.ids(|ids| ids.insert(id, pending));
        let late = self.clone();
        Unanswered { late, id }
    }

    /// A release of this id is about to be sent on these connections.
    pub(super) fn note_release(&self, id: Id, links: &Arc<Links>) {
        self.ids(|ids| {
            if let Some(pending) = ids.get_mut(&id) {
                pending.is_overtaken |= !std::ptr::eq(pending.links.as_ptr(), Arc::as_ptr(links));
            }
        });
    }

    fn ids<T>(&self, of: impl FnOnce(&mut HashMap<Id, Pending>) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Unanswered {
    /// Whether a release was sent since the enqueue, and may have come before it at a node.
    pub(super) fn is_overtaken(&self) -> bool {
        self.late
            .ids(|ids| ids.get(&self.id).is_some_and(|it| it.is_overtaken))
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.late.ids(|ids| ids.remove(&self.id));
    }
}
