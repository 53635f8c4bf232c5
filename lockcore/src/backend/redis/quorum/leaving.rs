//! The ids of requests that are still on their way to some nodes although their verb has its answer: tickets that are
//! given back, and enqueues that slow nodes have not answered. All connections of a client share them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::request::Id;

/// The ids whose tickets this store is giving back by itself, because a majority has not granted them.
///
/// The core may ask again with the same id. A release that is still on its way to a slow node would remove the new
/// ticket there without anybody's notice. So such a request is answered with [`Gone`](crate::backend::Enqueued::Gone), and
/// the core asks with a new id.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving(Arc<Mutex<HashSet<Id>>>);

/// An id that is leaving until this is dropped.
#[derive(Debug)]
pub(super) struct OnItsWay {
    leaving: Leaving,
    id: Id,
}

impl Leaving {
    pub(super) fn has(&self, id: Id) -> bool {
        self.ids(|ids| ids.contains(&id))
    }

    pub(super) fn begin(&self, id: Id) -> Arc<OnItsWay> {
        self.ids(|ids| ids.insert(id));
        let leaving = self.clone();
        Arc::new(OnItsWay { leaving, id })
    }

    fn ids<T>(&self, of: impl FnOnce(&mut HashSet<Id>) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.leaving.ids(|ids| ids.remove(&self.id));
    }
}

/// The ids that were granted by a majority, while slower nodes have not answered the enqueue.
///
/// A release of such an id may come on another connection, and overtake the enqueue at such a node. That node would then
/// keep a ticket that nobody has. So it is told of the release again when it has answered: see
/// [`finish_late`](super::background::finish_late).
#[derive(Clone, Debug, Default)]
pub(super) struct Late(Arc<Mutex<HashMap<Id, bool>>>);

/// An enqueue that has no answer from all nodes until this is dropped.
#[derive(Debug)]
pub(super) struct Unanswered {
    late: Late,
    id: Id,
}

impl Late {
    pub(super) fn begin(&self, id: Id) -> Unanswered {
        self.ids(|ids| ids.insert(id, false));
        let late = self.clone();
        Unanswered { late, id }
    }

    /// A release of this id is about to be sent.
    pub(super) fn note_release(&self, id: Id) {
        self.ids(|ids| {
            if let Some(is_released) = ids.get_mut(&id) {
                *is_released = true;
            }
        });
    }

    fn ids<T>(&self, of: impl FnOnce(&mut HashMap<Id, bool>) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Unanswered {
    /// Whether a release was sent since the enqueue.
    pub(super) fn is_released(&self) -> bool {
        self.late.ids(|ids| ids.get(&self.id) == Some(&true))
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.late.ids(|ids| ids.remove(&self.id));
    }
}
