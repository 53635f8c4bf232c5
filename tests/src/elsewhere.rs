//! Work on a thread of its own.

use std::thread;

/// Runs the work on another thread. So this can be called inside and outside a runtime.
pub(crate) fn elsewhere<T: Send>(work: impl Future<Output = T> + Send) -> T {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    };
    thread::scope(|scope| {
        let done = scope.spawn(|| runtime().unwrap().block_on(work));
        done.join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
