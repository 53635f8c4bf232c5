//! The tickets that are being given back although their verb has its answer. All connections of a client share them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::request::Id;

/// The ids whose tickets this store is giving back by itself, because a majority has not granted them.
///
/// The core may ask again with the same id. A release that is still on its way to a slow node would remove the new
/// ticket there without anybody's notice. So such a request is answered with [`Gone`](crate::backend::Enqueued::Gone), and
/// the core asks with a new id.
///
/// With each id, how many times it is leaving: a request that is repeated may be given back several times.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaving(Arc<Mutex<HashMap<Id, usize>>>);

/// An id that is leaving until this is dropped.
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
