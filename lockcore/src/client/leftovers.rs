//! The tickets that nobody of this client uses any more and that may still be at the store, by name.
//! A caller that does not wait for holders must not be refused because of them. So when the store has
//! refused it, it waits until they are gone, and asks again. Removing them is the work of the
//! [keeper](super::keeper).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use crate::hash::Prehashed;
use crate::log::guarded;
use crate::name::Name;

#[derive(Clone, Default)]
pub(super) struct Leftovers(Arc<Mutex<Prehashed<Name, Vec<Arc<Semaphore>>>>>);

/// One ticket that the keeper has to remove. It ends, with or without success, when this is dropped.
pub(crate) struct Leftover {
    all: Leftovers,
    name: Name,
    /// Closed at the end.
    over: Arc<Semaphore>,
}

/// The tickets of a name that were left at one moment.
pub(crate) struct Left(Vec<Arc<Semaphore>>);

impl Leftovers {
    /// Notes a ticket of this name.
    pub(super) fn add(&self, name: &Name) -> Leftover {
        let over = Arc::new(Semaphore::new(0));
        let mut names = self.names();
        names
            .entry(name.clone())
            .or_default()
            .push(Arc::clone(&over));
        Leftover {
            all: self.clone(),
            name: name.clone(),
            over,
        }
    }

    pub(super) fn of(&self, name: &Name) -> Option<Left> {
        self.names().get(name).cloned().map(Left)
    }

    /// Ends all waits for what is there, because the client is being shut down.
    pub(super) fn close(&self) {
        let all: Vec<_> = self.names().values().flatten().cloned().collect();
        for over in all {
            guarded(|| over.close());
        }
    }

    pub(super) fn has(&self, name: &Name) -> bool {
        self.names().contains_key(name)
    }

    fn names(&self) -> MutexGuard<'_, Prehashed<Name, Vec<Arc<Semaphore>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Left {
    /// Resolves when all these tickets are gone, the keeper has given up on them, or the client is
    /// being shut down. Dropping the future has no effect.
    pub(crate) async fn gone(self) {
        for over in self.0 {
            // There are no permits, so this resolves when the semaphore is closed.
            let _ = over.acquire().await;
        }
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let mut names = self.all.names();
        if let Some(left) = names.get_mut(&self.name) {
            left.retain(|other| !Arc::ptr_eq(other, &self.over));
            if left.is_empty() {
                names.remove(&self.name);
            }
        }
        drop(names);
        // This runs wakers, which are users' code.
        guarded(|| self.over.close());
    }
}
