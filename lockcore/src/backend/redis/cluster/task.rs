//! Tasks that end with their owner.

use std::future::Future;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

/// A task in the runtime of the connection. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Task(AbortHandle);

impl Task {
    pub(super) fn spawn(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(runtime.spawn(task).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
