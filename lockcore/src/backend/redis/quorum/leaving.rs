//! The tickets that this store releases by itself, after the caller of the enqueue got its answer.
//! All connections of a client share this list.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::request::Id;

/// The ids whose tickets this store is releasing by itself, because a majority has not granted
/// them.
///
/// The core may send an enqueue with the same id again. If a release were in flight to a slow node,
/// it would remove the new ticket there, and nobody would notice. So this store answers such an
/// enqueue with [`Gone`](crate::backend::Enqueued::Gone), and the core asks with a new id.
///
/// Each id has a count: if a request is repeated, several releases of its id may be unfinished.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving(Arc<Mutex<HashMap<Id, usize>>>);

/// An id whose release is not finished until this value is dropped.
#[derive(Debug)]
pub(super) struct OnItsWay {
    leaving: Leaving,
    id: Id,
}

impl Leaving {
    pub(super) fn has(&self, id: Id) -> bool {
        self.ids(|ids| ids.contains_key(&id))
    }

    pub(super) fn begin(&self, id: Id) -> Arc<OnItsWay> {
        self.ids(|ids| *ids.entry(id).or_default() += 1);
        let leaving = self.clone();
        Arc::new(OnItsWay { leaving, id })
    }

    fn ids<T>(&self, of: impl FnOnce(&mut HashMap<Id, usize>) -> T) -> T {
        of(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.leaving.ids(|ids| {
            if let Some(times) = ids.get_mut(&self.id) {
                *times -= 1;
                if *times == 0 {
                    ids.remove(&self.id);
                }
            }
        });
    }
}
