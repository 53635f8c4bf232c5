//! The process-wide default client, for code that gets no handle from its caller: the macro without `locks = …`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::locks::Locks;

tokio::task_local! {
    /// The client of the innermost [`with_default`].
    static SCOPED: Locks;
}

static DEFAULT: Mutex<Default> = Mutex::new(Default::Unset);

enum Default {
    Unset,
    Set(Locks),
    /// The client stays here and refuses. Otherwise a request at the end of the process would make a new client, and
    /// nobody would wait for its releases.
    ShutDown(Locks),
}

/// Makes `locks` the process-wide default. Call it once, early in `main`.
///
/// # Errors
///
/// [`Config`](crate::ErrorKind::Config) when there is a default already, set by an earlier call or made at first use:
/// two defaults would not exclude each other. A default that was shut down may be replaced.
pub fn set_default(locks: Locks) -> Result<(), Error> {
    let mut default = lock();
    if let Default::Set(_) = *default {
        return Err(Error::config(
            "the default client is set already; call lockcore::set_default before the first annotated function runs, and once",
        ));
    }
    *default = Default::Set(locks);
    Ok(())
}

/// Runs a future with `locks` as its default, whatever the process-wide default is. With this, a test of annotated code
/// has a client of its own.
///
/// Calls may be nested; the innermost counts. Tasks that the future *spawns* are outside of it, as with every
/// task-local.
///
/// ```
/// use lockcore::{Error, Locks, distributed_lock};
///
/// #[distributed_lock(key = "report", try)]
/// async fn report() -> Result<&'static str, Error> {
///     Ok("written")
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Error> {
/// let locks = Locks::connect("memory:")?;
/// let written = lockcore::with_default(locks.clone(), report()).await?;
/// assert_eq!(written, "written");
///
/// let _guard = locks.mutex("report").acquire().await?;
/// assert!(lockcore::with_default(locks, report()).await.is_err());
/// # Ok(()) }
/// ```
///
/// # Cancel safety
///
/// The same as that of the future.
pub async fn with_default<F: Future>(locks: Locks, future: F) -> F::Output {
    SCOPED.scope(locks, future).await
}

/// The default client: the one of the innermost [`with_default`], else the process-wide one. That is the client that
/// [`set_default`] has set, else one made by [`Locks::from_env`] at first use. If making it fails, the next call tries again.
///
/// # Errors
///
/// The errors of [`Locks::from_env`].
pub fn default_locks() -> Result<Locks, Error> {
    if let Ok(locks) = SCOPED.try_with(Locks::clone) {
        return Ok(locks);
    }
    let mut default = lock();
    if let Default::Set(locks) | Default::ShutDown(locks) = &*default {
        return Ok(locks.clone());
    }
    let locks = Locks::from_env().map_err(|error| {
        Error::config(format!(
            "there is no default client ({error}); call lockcore::set_default(…) in main, or set LOCK_URL"
        ))
    })?;
    *default = Default::Set(locks.clone());
    Ok(locks)
}

/// [Shuts down](Locks::shutdown) the process-wide default, if there is one. Later requests to it are refused.
///
/// A static is not dropped when `main` returns. So without this call, a release that a guard has just given to its
/// keeper may not leave the process, and then the lock ends only with its lease.
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// lockcore::set_default(lockcore::Locks::connect("memory:").unwrap()).unwrap();
/// # async fn serve() { std::future::pending().await }
/// tokio::select! {
///     () = serve() => {}
///     () = lockcore::stop_signal() => {} // Ctrl-C or SIGTERM
/// #   () = std::future::ready(()) => {}
/// }
/// lockcore::shutdown(Duration::from_secs(5)).await.unwrap();
/// # }
/// ```
///
/// # Errors
///
/// The errors of [`Locks::shutdown`].
///
/// # Cancel safety
///
/// As [`Locks::shutdown`].
pub async fn shutdown(deadline: Duration) -> Result<(), Error> {
    let locks = {
        let mut default = lock();
        let (Default::Set(locks) | Default::ShutDown(locks)) = &*default else {
            return Ok(());
        };
        let locks = locks.clone();
        *default = Default::ShutDown(locks.clone());
        locks
    };
    locks.shutdown(deadline).await
}

fn lock() -> MutexGuard<'static, Default> {
    DEFAULT.lock().unwrap_or_else(PoisonError::into_inner)
}
