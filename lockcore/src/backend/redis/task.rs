//! Tasks that end with their owner.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinSet};

/// A task that ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Task(AbortHandle);

impl Task {
    pub(super) fn spawn(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(runtime.spawn(task).abort_handle())
    }

    /// Returns a handle that can end the task earlier.
    pub(super) fn end(&self) -> AbortHandle {
        self.0.clone()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Tasks in the runtime of a connection. They end when this value is dropped.
#[derive(Debug)]
pub(super) struct Tasks {
    running: Mutex<JoinSet<()>>,
    pub(super) runtime: Handle,
}

impl Tasks {
    /// The tasks will run in this runtime.
    pub(super) fn in_runtime(runtime: Handle) -> Self {
        Self {
            running: Mutex::default(),
            runtime,
        }
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut running = self.running();
        while running.try_join_next().is_some() {}
        running.spawn_on(task, &self.runtime);
    }

    /// Waits until all tasks have ended. If this future is dropped, the rest of them ends.
    pub(super) async fn joined(&self) {
        let mut running = std::mem::take(&mut *self.running());
        while running.join_next().await.is_some() {}
    }

    fn running(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
