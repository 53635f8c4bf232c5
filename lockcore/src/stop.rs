//! Waits until the process is asked to end. The end of its locks is in `locks`, at `shutdown`.

use std::future::Future;
use std::io;

use futures_util::future::select_all;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
#[cfg(windows)]
use tokio::signal::windows::{CtrlC as Signal, ctrl_c};

/// Resolves when the process is asked to end: by Ctrl-C, or by SIGTERM, which service managers and container runtimes
/// send before they kill. On Windows only by Ctrl-C.
///
/// From this call on, these signals do not end the process by themselves any more, until it exits. So stop the work,
/// call [`shutdown`](crate::shutdown) or [`Locks::shutdown`](crate::Locks::shutdown), and return from `main`. A process
/// that is killed by a signal leaves its locks taken until their leases are over.
///
/// A signal that comes after the call and before the first poll is not missed. Each future is resolved by the first
/// signal after its call.
///
/// # Panics
///
/// Outside of a tokio runtime, or in one without its I/O driver (`enable_all`).
///
/// # Cancel safety
///
/// Safe: it only waits. The signals stay caught.
///
/// # Examples
///
/// A loop that works under a lock. The servers of axum and tonic take this future directly, in `with_graceful_shutdown`
/// and `serve_with_shutdown`.
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
