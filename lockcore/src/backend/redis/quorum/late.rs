//! The enqueues that a majority of the nodes has answered, and slower nodes have not. The caller of
//! such an enqueue has its answer already. Also the releases since a renewal began. All connections
//! of a client share these lists.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::nodes::Links;
use crate::request::Id;

/// The ids that a majority has granted, while slower nodes have not answered the enqueue.
///
/// A release of such an id may be sent on other connections to the nodes. At a slow node it may
/// overtake the enqueue. That node would then keep a ticket that nobody has. So the release is sent
/// to such a node again after it has answered the enqueue: see
/// [`finish_late`](super::background::finish_late). On the connections of the enqueue, the release
/// cannot overtake the enqueue.
#[derive(Clone, Debug, Default)]
pub(super) struct Late(Arc<Mutex<Unfinished>>);

#[derive(Debug, Default)]
struct Unfinished {
    /// The enqueues of each id. There may be several, because the core may repeat a request.
    enqueues: HashMap<Id, Vec<Arc<Pending>>>,
    /// The logs of the renewals that are not finished.
    logs: Vec<Weak<ReleaseLog>>,
}

/// The ids that were released since a renewal began: see [`repair`](super::repair).
#[derive(Debug, Default)]
pub(super) struct ReleaseLog(Mutex<Vec<Id>>);

impl ReleaseLog {
    pub(super) fn has(&self, id: Id) -> bool {
        self.ids().contains(&id)
    }

    fn ids(&self) -> MutexGuard<'_, Vec<Id>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An enqueue that slower nodes have not answered.
#[derive(Debug)]
struct Pending {
    /// The connections on which the enqueue was sent.
    links: Weak<Links>,
    /// Whether a release was sent since then on other connections.
    is_overtaken: AtomicBool,
}

/// An enqueue that some nodes have not answered. It counts as unanswered until this value is
/// dropped.
#[derive(Debug)]
pub(super) struct Unanswered {
    late: Late,
    id: Id,
    pending: Arc<Pending>,
}

impl Late {
    pub(super) fn begin(&self, id: Id, links: &Arc<Links>) -> Unanswered {
        let pending = Arc::new(Pending {
            links: Arc::downgrade(links),
            is_overtaken: AtomicBool::new(false),
        });
        self.unfinished(|it| {
            it.enqueues
                .entry(id)
                .or_default()
                .push(Arc::clone(&pending));
        });
        let late = self.clone();
        Unanswered { late, id, pending }
    }

    /// Starts a log of releases. The log ends when it is dropped.
    pub(super) fn log_releases(&self) -> Arc<ReleaseLog> {
        let log = Arc::default();
        self.unfinished(|it| {
            it.logs.retain(|log| log.strong_count() > 0);
            it.logs.push(Arc::downgrade(&log));
        });
        log
    }

    /// Called before a release of this id is sent on these connections.
    pub(super) fn note_release(&self, id: Id, links: &Arc<Links>) {
        self.unfinished(|it| {
            for log in it.logs.iter().filter_map(Weak::upgrade) {
                log.ids().push(id);
            }
            let elsewhere =
                |it: &&Arc<Pending>| !std::ptr::eq(it.links.as_ptr(), Arc::as_ptr(links));
            for pending in it.enqueues.get(&id).into_iter().flatten().filter(elsewhere) {
                pending.is_overtaken.store(true, Ordering::SeqCst);
            }
        });
    }

    fn unfinished<T>(&self, of: impl FnOnce(&mut Unfinished) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Unanswered {
    /// Whether a release was sent after the enqueue, and may have arrived before it at a node.
    pub(super) fn is_overtaken(&self) -> bool {
        self.pending.is_overtaken.load(Ordering::SeqCst)
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.late.unfinished(|it| {
            let Some(of_id) = it.enqueues.get_mut(&self.id) else {
                return;
            };
            of_id.retain(|other| !Arc::ptr_eq(other, &self.pending));
            if of_id.is_empty() {
                it.enqueues.remove(&self.id);
            }
        });
    }
}
