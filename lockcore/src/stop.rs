//! Signals to stop the process: a future that waits for one, and a server that runs until one comes.
//! The release of the locks is in `locks`, at `shutdown`.

use std::future::{Future, IntoFuture};
use std::io;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use crate::error::Error;
use crate::locks::Locks;

/// Two signals within this time are one.
const DOUBLED: Duration = Duration::from_millis(500);

/// Resolves when the process gets a signal to stop: Ctrl-C or SIGTERM. Service managers and
/// container runtimes send SIGTERM before they kill a process.
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
/// `with_graceful_shutdown` and `serve_with_shutdown`: see [`Locks::run_until_stopped`].
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

impl Locks {
    /// Runs a server until it ends, and then [shuts this client down](Self::shutdown). After the
    /// first [signal to stop](stop_signal), both have at most the time `within`. A second signal, half a
    /// second later or more, ends both at once.
    ///
    /// A signal that comes after this call and before the first poll is not missed. The server must
    /// end by itself after the first signal, when the requests that it has taken
    /// are answered. It can wait for a client that never reads its response, so it needs a bound.
    /// The client is shut down beside the server: shortly before the end of the time, the requests
    /// that still hold locks are stopped, and their locks are released.
    ///
    /// Returns the output of the server, or `None` if the server has not ended in time. Then return
    /// from `main`, which ends the connections that are left. If the server ends by itself without a
    /// signal, the shutdown of the client follows, within the same time.
    ///
    /// # Errors
    ///
    /// The errors of [`shutdown`](Self::shutdown);
    /// [`Unavailable`](crate::ErrorKind::Unavailable) after a second signal. Locks that were not
    /// released stay taken until their leases end.
    ///
    /// # Panics
    ///
    /// As [`stop_signal`]. The signal makes it panic in a runtime whose timers are not enabled
    /// (`enable_time` of tokio's builder).
    ///
    /// # Cancel safety
    ///
    /// The server is dropped with the future. Locks that are held stay held.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::{future::Future, io, time::Duration};
    /// # struct Server; impl Server {
    /// #     async fn serve_with_shutdown(self, stop: impl Future<Output = ()>) -> io::Result<()> { Ok(stop.await) }
    /// # }
    /// # async fn example(server: Server) -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = lockcore::Locks::from_env()?;
    /// let server = server.serve_with_shutdown(lockcore::stop_signal());
    /// locks.run_until_stopped(server, Duration::from_secs(5)).await?.transpose()?;
    /// # Ok(()) }
    /// ```
    pub fn run_until_stopped<T>(
        &self,
        server: impl IntoFuture<Output = T>,
        within: Duration,
    ) -> impl Future<Output = Result<Option<T>, Error>> {
        let first = stop_signal();
        async move {
            let (mut first, mut server) = (pin!(first), pin!(server.into_future()));
            // The signal comes first, because it may end the server at once. All listeners of this
            // process learn of a signal at the same time. So if the server has ended because of a
            // signal, this branch sees the signal too.
            let ended = tokio::select! {
                biased;
                () = &mut first => None,
                output = &mut server => Some(output),
            };
            let is_stopped = ended.is_none();
            let second = async {
                if !is_stopped {
                    first.await;
                }
                // `timeout` and some service managers send the signal twice, at once.
                tokio::time::sleep(DOUBLED).await;
                stop_signal().await;
            };
            let server = async {
                match ended {
                    Some(output) => Some(output),
                    None => timeout(within, server).await.ok(),
                }
            };
            tokio::select! {
                (released, output) = async { tokio::join!(self.shutdown(within), server) } => {
                    released.map(|()| output)
                }
                () = second => Err(Error::unavailable(
                    "a second signal has ended the shutdown; locks that are still held end with their leases",
                )),
            }
        }
    }
}

fn signals() -> [io::Result<Signal>; 2] {
    [SignalKind::interrupt(), SignalKind::terminate()].map(signal)
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
