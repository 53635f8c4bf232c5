//! The requests of a client that are unfinished although their caller has its answer: enqueues that
//! slower nodes have not answered, and renewals that may still repair nodes. A release asks here
//! what it has to reckon with. All connections of a client share this.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::super::owed::UntilDone;
use super::node::LONGEST_TTL;
use super::nodes::{Links, Nodes};
use crate::backend::Departure;
use crate::clock::{Clock, Instant};
use crate::request::{Id, Request};

#[derive(Clone, Debug, Default)]
pub(super) struct Late(Arc<Mutex<Unfinished>>);

#[derive(Debug, Default)]
struct Unfinished {
    /// The enqueues of each id. There may be several, because the core may repeat a request.
    enqueues: HashMap<Id, Vec<Arc<OpenEnqueue>>>,
    /// Ids with an enqueue that will never be answered, and until when a node may still carry it
    /// out.
    open: HashMap<Id, Instant>,
    renewals: Vec<Weak<Renewing>>,
    /// The ids whose tickets this store is releasing by itself, because a majority has not granted
    /// them. Each has a count: if a request is repeated, several releases of its id may be
    /// unfinished.
    leaving: HashMap<Id, usize>,
}

/// An id whose release is not finished until this value is dropped.
#[derive(Debug)]
struct Leaving {
    late: Late,
    id: Id,
}

/// An enqueue that some nodes have not answered.
#[derive(Debug)]
struct OpenEnqueue {
    /// The connections on which the enqueue was sent. On these, a release cannot overtake it.
    links: Weak<Links>,
    release: Mutex<ReleaseSent>,
}

/// What is known of the release of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseSent {
    NotSent,
    /// It was sent behind the enqueue, on the same connections.
    Behind,
    /// It was sent on other connections, and may have arrived before the enqueue at a node.
    Elsewhere,
}

/// An enqueue that some nodes have not answered. `open` are these nodes.
///
/// Such a node may have the ticket, or may take it at any time, even after the release: its server
/// may have been stopped for a while. So when this value is dropped, for example because the
/// runtime ends, and some nodes are still open:
/// - If the ticket was released meanwhile, these nodes get another release, which leaves a mark. A
///   later enqueue finds the mark and takes no ticket.
/// - If not, nothing is sent: the ticket is held, and a renewal may count it at such a node. The
///   release of the ticket will leave a mark.
#[derive(Debug)]
pub(super) struct Unanswered {
    late: Late,
    nodes: Arc<Nodes>,
    request: Arc<Request>,
    open: Vec<usize>,
    pending: Arc<OpenEnqueue>,
}

/// The tickets of a renewal that may still be repaired: nobody has released them or renewed them
/// again.
#[derive(Debug)]
pub(super) struct Renewing(Mutex<HashSet<Id>>);

impl Late {
    /// Called before an enqueue is sent on these connections, or before its caller gets the answer.
    /// `links` is `None` if a release may overtake the enqueue on its own connections too, because
    /// the enqueue is not sent yet.
    pub(super) fn begin(
        &self,
        nodes: &Arc<Nodes>,
        links: Option<&Arc<Links>>,
        request: &Arc<Request>,
        open: Vec<usize>,
    ) -> Unanswered {
        let pending = Arc::new(OpenEnqueue {
            links: links.map_or_else(Weak::new, Arc::downgrade),
            release: Mutex::new(ReleaseSent::NotSent),
        });
        self.unfinished(|it| {
            let of_id = it.enqueues.entry(request.id).or_default();
            of_id.push(Arc::clone(&pending));
        });
        Unanswered {
            late: self.clone(),
            nodes: Arc::clone(nodes),
            request: Arc::clone(request),
            open,
            pending,
        }
    }

    /// Called before a renewal of these tickets is sent. Earlier renewals no longer repair them.
    pub(super) fn renew(&self, ids: impl Iterator<Item = Id>) -> Arc<Renewing> {
        let ids: HashSet<Id> = ids.collect();
        self.unfinished(|it| {
            it.renewals.retain(|renewal| renewal.strong_count() > 0);
            for renewal in it.renewals.iter().filter_map(Weak::upgrade) {
                renewal.ids().retain(|id| !ids.contains(id));
            }
            let renewal = Arc::new(Renewing(Mutex::new(ids)));
            it.renewals.push(Arc::downgrade(&renewal));
            renewal
        })
    }

    /// Called before a release of this id is sent on these connections. Returns whether the release
    /// must leave a mark, because a node may carry out an enqueue later.
    pub(super) fn release(&self, id: Id, links: &Arc<Links>) -> bool {
        self.unfinished(|it| {
            for renewal in it.renewals.iter().filter_map(Weak::upgrade) {
                renewal.ids().remove(&id);
            }
            for pending in it.enqueues.get(&id).into_iter().flatten() {
                let is_here = std::ptr::eq(pending.links.as_ptr(), Arc::as_ptr(links));
                let mut release = pending.release();
                if !is_here {
                    *release = ReleaseSent::Elsewhere;
                } else if *release == ReleaseSent::NotSent {
                    *release = ReleaseSent::Behind;
                }
            }
            // The entry stays, because the core may have to repeat the release.
            let until = it.open.get(&id);
            until.is_some_and(|until| Clock::BOOT.now() < *until)
        })
    }

    /// Whether this store is releasing the tickets of this id by itself.
    ///
    /// The core may send an enqueue with the same id again. If a release were in flight to a slow
    /// node, it would remove the new ticket there, and nobody would notice. So this store answers
    /// such an enqueue with [`Gone`](crate::backend::Enqueued::Gone), and the core asks with a new
    /// id.
    pub(super) fn is_leaving(&self, id: Id) -> bool {
        self.unfinished(|it| it.leaving.contains_key(&id))
    }

    /// Called when this store begins to release the tickets of this id by itself.
    pub(super) fn leave(&self, id: Id) -> UntilDone {
        self.unfinished(|it| *it.leaving.entry(id).or_default() += 1);
        let late = self.clone();
        Arc::new(Leaving { late, id })
    }

    fn unfinished<T>(&self, of: impl FnOnce(&mut Unfinished) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.late.unfinished(|it| {
            if let Entry::Occupied(mut times) = it.leaving.entry(self.id) {
                *times.get_mut() -= 1;
                if *times.get() == 0 {
                    times.remove();
                }
            }
        });
    }
}

impl Unfinished {
    fn leave_open(&mut self, id: Id) {
        let now = Clock::BOOT.now();
        if self.open.len().is_power_of_two() {
            self.open.retain(|_, until| *until > now);
        }
        self.open.insert(id, now.after(LONGEST_TTL));
    }
}

impl OpenEnqueue {
    fn release(&self) -> MutexGuard<'_, ReleaseSent> {
        self.release.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Renewing {
    pub(super) fn is_current(&self, id: Id) -> bool {
        self.ids().contains(&id)
    }

    fn ids(&self) -> MutexGuard<'_, HashSet<Id>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unanswered {
    /// Whether a release was sent after the enqueue, and may have arrived before it at a node.
    pub(super) fn is_overtaken(&self) -> bool {
        *self.pending.release() == ReleaseSent::Elsewhere
    }

    pub(super) fn request(&self) -> &Arc<Request> {
        &self.request
    }

    /// This node has answered the enqueue, or will never carry it out.
    pub(super) fn settle(&mut self, at: usize) {
        self.open.retain(|open| *open != at);
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let id = self.request.id;
        // Under the lock of the list, so that a release comes before this or after it.
        let is_released = self.late.unfinished(|it| {
            if let Some(of_id) = it.enqueues.get_mut(&id) {
                of_id.retain(|other| !Arc::ptr_eq(other, &self.pending));
                if of_id.is_empty() {
                    it.enqueues.remove(&id);
                }
            }
            let is_released = *self.pending.release() != ReleaseSent::NotSent;
            if !is_released && !self.open.is_empty() {
                it.leave_open(id);
            }
            is_released
        });
        if is_released {
            let departure = [Departure::new(Arc::clone(&self.request), true)];
            for at in &self.open {
                self.nodes.owe(*at, &departure, None);
            }
        }
    }
}
