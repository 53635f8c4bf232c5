//! Tasks that end with their owner.

use std::future::Future;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

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
