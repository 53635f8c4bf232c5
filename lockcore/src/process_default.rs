//! The process-wide default client, for code that no handle was passed to: the macro without
//! `locks = …`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::locks::Locks;

tokio::task_local! {
    /// What [`with_default`] set, of the innermost.
    static SCOPED: Locks;
}

static DEFAULT: Mutex<Default> = Mutex::new(Default::Unset);

enum Default {
    Unset,
    Set(Locks),
    /// Stays, and refuses: a request that comes while the process ends must not make a new client,
    /// whose releases nobody would wait for.
    ShutDown(Locks),
}

/// Makes `locks` the process-wide default. Call it once, early in `main`.
///
/// # Errors
///
/// [`Config`](crate::ErrorKind::Config) when there is a default already, by an earlier call or
/// because one was used: two defaults would not exclude each other. One that was shut down may be
/// followed by another.
pub fn init(locks: Locks) -> Result<(), Error> {
    let mut default = lock();
    if let Default::Set(_) = *default {
        return Err(Error::config(
            "the default client is set already; call lockcore::init before the first annotated function runs, and once",
        ));
    }
    *default = Default::Set(locks);
    Ok(())
}

/// Runs a future for which `locks` is the default, whatever the process has: so that a test of
/// annotated code has a client to itself.
///
/// Nests; the innermost counts. What the future *spawns* is outside of it, as with every task-local.
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
/// That of the future.
pub async fn with_default<F: Future>(locks: Locks, future: F) -> F::Output {
    SCOPED.scope(locks, future).await
}

/// The default: what the innermost [`with_default`] says, else the process-wide one: what [`init`]
/// set, else [`Locks::from_env`] at first use. A failure is not remembered.
///
/// # Errors
///
/// Those of [`Locks::from_env`].
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
            "there is no default client ({error}); call lockcore::init(…) in main, or set LOCK_URL"
        ))
    })?;
    *default = Default::Set(locks.clone());
    Ok(locks)
}

/// [Shuts down](Locks::shutdown) the process-wide default, if there is one. What asks for it from
/// then on is refused.
///
/// A static is not dropped when `main` returns, so without this call what a guard gave to its
/// keeper in the last moment may not leave the process, and its lock ends with its lease only.
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// lockcore::init(lockcore::Locks::connect("memory:").unwrap()).unwrap();
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
/// Those of [`Locks::shutdown`].
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
