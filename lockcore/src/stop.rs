//! A future that waits for a signal to stop the process. The release of the locks is in `locks`, at
//! `shutdown`.

use std::future::Future;
use std::io;

use futures_util::future::select_all;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
#[cfg(windows)]
use tokio::signal::windows::{CtrlC as Signal, ctrl_c};

/// Resolves when the process gets a signal to stop: Ctrl-C or SIGTERM. Service managers and
/// container runtimes send SIGTERM before they kill a process. On Windows there is only Ctrl-C.
///
/// From this call until the exit of the process, these signals do not end the process by
/// themselves. So stop the work, call [`shutdown`](crate::shutdown) or
/// [`Locks::shutdown`](crate::Locks::shutdown), and return from `main`. If a signal kills the
/// process, its locks stay taken until their leases end.
///
/// A signal that comes after the call and before the first poll is not missed. Each future resolves
/// at the first signal after the call that has made it.
///
/// # Panics
///
/// Outside of a tokio runtime, or in one without its I/O driver (`enable_all`).
///
/// # Cancel safety
///
/// Safe: it only waits. Even after the drop of the future, these signals do not end the process.
///
/// # Examples
///
/// This loop works under a lock. The servers of axum and tonic take the future directly, in
/// `with_graceful_shutdown` and `serve_with_shutdown`.
///
/// ```no_run
/// use std::time::Duration;
/// use lockcore::{Error, distributed_lock};
///
/// #[distributed_lock(key = "report")]
/// async fn report() -> Result<(), Error> {
///     Ok(()) // …
/// }
///
/// #[tokio::main]
/// async fn main() -> Result<(), Error> {
///     let work = async { loop { report().await?; } };
///     let done: Result<(), Error> = tokio::select! {
///         done = work => done,
///         () = lockcore::stop_signal() => Ok(()), // the work is dropped, its lock is on the way back
///     };
///     lockcore::shutdown(Duration::from_secs(5)).await?;
///     done
/// }
/// ```
#[must_use = "it resolves when the process is asked to end"]
pub fn stop_signal() -> impl Future<Output = ()> + Send + 'static {
    let any = select_all(signals().map(|signal| Box::pin(received(signal))));
    async move {
        any.await;
    }
}

#[cfg(unix)]
fn signals() -> [io::Result<Signal>; 2] {
    [SignalKind::interrupt(), SignalKind::terminate()].map(signal)
}

#[cfg(windows)]
fn signals() -> [io::Result<Signal>; 1] {
    [ctrl_c()]
}

async fn received(signal: io::Result<Signal>) {
    let told = match signal {
        Ok(mut signal) => signal.recv().await,
        Err(error) => {
            tracing::warn!(%error, "cannot listen for a signal; if it comes, it ends the process at once");
            None
        }
    };
    if told.is_none() {
        std::future::pending().await
    }
}
