//! The process-wide default client, for code that no handle was passed to: the macro without
//! `locks = …`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::locks::Locks;

static DEFAULT: Mutex<Option<Locks>> = Mutex::new(None);

/// Makes `locks` the process-wide default. Call it once, early in `main`.
///
/// # Errors
///
/// [`Config`](crate::ErrorKind::Config) when there is a default already, by an earlier call or
/// because one was used: two defaults would not exclude each other.
pub fn init(locks: Locks) -> Result<(), Error> {
    let mut default = lock();
    if default.is_some() {
        return Err(Error::config(
            "the default client is set already; call lockcore::init before the first annotated function runs, and once",
        ));
    }
    *default = Some(locks);
    Ok(())
}

/// The process-wide default: what [`init`] set, else [`Locks::from_env`] at first use. A failure is
/// not remembered.
///
/// # Errors
///
/// Those of [`Locks::from_env`].
pub fn default_locks() -> Result<Locks, Error> {
    let mut default = lock();
    if let Some(locks) = &*default {
        return Ok(locks.clone());
    }
    let locks = Locks::from_env().map_err(|error| {
        Error::config(format!(
            "there is no default client ({error}); call lockcore::init(…) in main, or set LOCK_URL"
        ))
    })?;
    *default = Some(locks.clone());
    Ok(locks)
}

/// [Shuts down](Locks::shutdown) the process-wide default, if there is one, and forgets it.
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
/// // … serve until SIGTERM …
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
/// As [`Locks::shutdown`]; the default is forgotten all the same.
pub async fn shutdown(deadline: Duration) -> Result<(), Error> {
    let locks = lock().take();
    match locks {
        Some(locks) => locks.shutdown(deadline).await,
        None => Ok(()),
    }
}

fn lock() -> MutexGuard<'static, Option<Locks>> {
    DEFAULT.lock().unwrap_or_else(PoisonError::into_inner)
}
