//! What has happened to the client of this process since its page was made: the latest events.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use lockcore::Locks;
use lockcore::events::{Event, EventListener};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// How many events are kept.
const MOST: usize = 20;

#[derive(Clone, Debug)]
pub(super) struct Happened {
    pub(super) at: Instant,
    pub(super) event: Event,
}

/// Listens until it is dropped.
#[derive(Debug)]
pub(super) struct Latest {
    events: Arc<Mutex<VecDeque<Happened>>>,
    /// Taken by the task that listens. It begins with the first request if the page was made outside
    /// of a runtime.
    listener: Mutex<Option<EventListener>>,
    task: OnceLock<AbortHandle>,
}

impl Latest {
    pub(super) fn of(locks: &Locks) -> Self {
        let latest = Self {
            events: Arc::default(),
            listener: Mutex::new(Some(locks.events())),
            task: OnceLock::new(),
        };
        if Handle::try_current().is_ok() {
            latest.listen();
        }
        latest
    }

    /// The latest events, the newest first. To be called in a runtime.
    pub(super) fn events(&self) -> Vec<Happened> {
        self.listen();
        locked(&self.events).iter().rev().cloned().collect()
    }

    fn listen(&self) {
        let Some(mut listener) = locked(&self.listener).take() else {
            return;
        };
        let events = Arc::clone(&self.events);
        let task = tokio::spawn(async move {
            while let Some(event) = listener.recv().await {
                let mut events = locked(&events);
                if events.len() == MOST {
                    events.pop_front();
                }
                let at = Instant::now();
                events.push_back(Happened { at, event });
            }
        });
        // It is set once, because the listener is taken once.
        let _ = self.task.set(task.abort_handle());
    }
}

impl Drop for Latest {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
