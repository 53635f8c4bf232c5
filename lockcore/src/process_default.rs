//! The process-wide default client. It is for code that gets no client from its caller: annotated
//! functions without `locks = …`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::race::OnceBox;

use crate::error::{Error, ErrorKind};
use crate::fork::Process;
use crate::locks::Locks;

tokio::task_local! {
    /// The client of the innermost [`with_default`].
    static SCOPED: Locks;
}

/// Whether this process has ever called [`with_default`]. If so, a task without a client was probably
/// spawned inside of one. It may run longer than the call.
static HAS_SCOPED: AtomicBool = AtomicBool::new(false);

const LOST: &str =
    "with_default does not apply to tasks that its future spawns: call it in the spawned task too";

/// The default of the process that was the first to ask for one. This may be a parent of the
/// present process.
static FIRST: OnceBox<Default> = OnceBox::new();

/// The default of one process.
///
/// A forked child has a default of its own, and does not use that of its parent. The parent's
/// client does not work in the child. Besides, a thread of the parent may have held the mutex at
/// the fork; in the child nobody ever releases that mutex. A `OnceLock` would have the same
/// problem; a `OnceBox` does not wait for other threads. The child's copy of the parent's default
/// is a static, so it is never dropped.
struct Default {
    process: Process,
    /// No code of a user runs while this mutex is held. So no client is made or dropped under it,
    /// because both write log lines.
    state: Mutex<State>,
    /// Whether the environment has chosen the store, and not [`set_default`].
    is_of_environment: AtomicBool,
    /// How many threads are making a client. It changes only under the mutex.
    makers: AtomicUsize,
    /// The default of a forked child of this process.
    of_child: OnceBox<Default>,
}

enum State {
    Unset,
    /// The default was shut down while a thread was making the first client. This client is shut
    /// down before any caller gets it.
    Late,
    Set(Locks),
    /// The default was shut down. The client stays here and refuses requests. Otherwise a request
    /// at the end of the process would make a new client, and nobody would wait for the releases of
    /// that client.
    ShutDown(Locks),
}

/// Makes `locks` the process-wide default. Call it once, early in `main`.
///
/// # Errors
///
/// [`Config`](crate::ErrorKind::Config) when there is a default already, which an earlier call has
/// set or the first use has made. Code with two different defaults might use two stores, and would
/// not exclude each other. A default that was shut down may be replaced. A forked child has no
/// default until it sets or makes one.
pub fn set_default(locks: Locks) -> Result<(), Error> {
    let default = Default::of_this_process()?;
    let mut state = default.state();
    if let State::Set(_) = *state {
        return Err(Error::config(
            "the default client is set already; call lockcore::set_default before the first annotated function runs, and once",
        ));
    }
    let former = std::mem::replace(&mut *state, State::Set(locks));
    default.is_of_environment.store(false, Ordering::Relaxed);
    drop(state);
    drop(former);
    Ok(())
}

/// Runs a future with `locks` as its default, in place of the process-wide default. For example, a
/// test of annotated code can use a client of its own.
///
/// Calls may be nested; the innermost counts. It does not apply to tasks that the future *spawns*,
/// as with every task-local value: such a task gets the process-wide default, which may be another
/// store. Then locks of the task and locks of the future exclude nobody of the other. If the
/// process-wide default comes from `LOCK_URL`, this is a warning in the log, once in a process.
/// Call `with_default` in the spawned task too, with a clone of the client.
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
    HAS_SCOPED.store(true, Ordering::Relaxed);
    SCOPED.scope(locks, future).await
}

/// The default client: that of the innermost [`with_default`], or else the process-wide default.
/// The process-wide default is the client that [`set_default`] has set. If none is set, the first
/// use makes one by [`Locks::from_env`]. If this fails, the next call tries again.
///
/// # Errors
///
/// The errors of [`Locks::from_env`].
pub fn default_locks() -> Result<Locks, Error> {
    if let Ok(locks) = SCOPED.try_with(Locks::clone) {
        return Ok(locks);
    }
    let default = Default::of_this_process()?;
    let locks = default.locks()?;
    default.warn_of_a_lost_scope();
    Ok(locks)
}

/// [Shuts down](Locks::shutdown) the process-wide default, if there is one. It refuses later
/// requests. If another thread is making the default at this moment, the new client is shut down
/// before any request can use it.
///
/// The default is a static, which is not dropped when `main` returns. So without this call, the
/// process may end before the keeper has sent the release of a guard that was just dropped. That
/// lock ends only with its lease.
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
    // After an error this process cannot have a default, so there is nothing to shut down.
    let Ok(default) = Default::of_this_process() else {
        return Ok(());
    };
    let locks = {
        let mut state = default.state();
        match &*state {
            State::Set(locks) | State::ShutDown(locks) => {
                let locks = locks.clone();
                *state = State::ShutDown(locks.clone());
                locks
            }
            State::Unset | State::Late => {
                if default.makers.load(Ordering::SeqCst) > 0 {
                    *state = State::Late;
                }
                return Ok(());
            }
        }
    };
    locks.shutdown(deadline).await
}

impl Default {
    fn of_this_process() -> Result<&'static Self, Error> {
        let mut place = &FIRST;
        loop {
            let default = place.get_or_try_init(|| Self::unset().map(Box::new))?;
            if default.process.is_this() {
                return Ok(default);
            }
            place = &default.of_child;
        }
    }

    fn unset() -> Result<Self, Error> {
        Ok(Self {
            process: Process::this()?,
            state: Mutex::new(State::Unset),
            is_of_environment: AtomicBool::new(false),
            makers: AtomicUsize::new(0),
            of_child: OnceBox::new(),
        })
    }

    /// The client. The first call makes it, if [`set_default`] has not set one.
    fn locks(&self) -> Result<Locks, Error> {
        let _making = match self.make() {
            Ok(making) => making,
            Err(locks) => return Ok(locks),
        };
        let made = Locks::from_env().map_err(|error| match error.kind() {
            ErrorKind::Config => {
                let lost = match HAS_SCOPED.load(Ordering::Relaxed) {
                    true => format!("; {LOST}"),
                    false => String::new(),
                };
                Error::config(format!(
                    "there is no default client ({error}); call lockcore::set_default(…) in main, or set LOCK_URL{lost}"
                ))
            }
            _ => error,
        })?;
        let mut is_ended = false;
        loop {
            let mut state = self.state();
            match &*state {
                // Another thread was faster. `made` is declared before the mutex guard, so it is
                // dropped after the mutex is free.
                State::Set(locks) | State::ShutDown(locks) => return Ok(locks.clone()),
                State::Unset => *state = State::Set(made.clone()),
                State::Late if is_ended => *state = State::ShutDown(made.clone()),
                State::Late => {
                    drop(state);
                    made.end_unused();
                    is_ended = true;
                    continue;
                }
            }
            self.is_of_environment.store(true, Ordering::Relaxed);
            return Ok(made);
        }
    }

    /// Warns once in a process, when a task that is not inside of a [`with_default`] uses the store
    /// that the environment names, although this process has called `with_default`. A process that
    /// means this calls [`set_default`].
    fn warn_of_a_lost_scope(&self) {
        static WARNED: AtomicBool = AtomicBool::new(false);
        if HAS_SCOPED.load(Ordering::Relaxed)
            && self.is_of_environment.load(Ordering::Relaxed)
            && !WARNED.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "a task without with_default locks at the store of LOCK_URL, and its locks do not exclude those of another \
                 store; {LOST}, or say by lockcore::set_default(Locks::from_env()?) in main that LOCK_URL is meant"
            );
        }
    }

    /// The right to make a client. If there is a client already, returns it as the error.
    fn make(&self) -> Result<Making<'_>, Locks> {
        let state = self.state();
        if let State::Set(locks) | State::ShutDown(locks) = &*state {
            return Err(locks.clone());
        }
        self.makers.fetch_add(1, Ordering::SeqCst);
        Ok(Making(self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While this exists, a thread is making a client.
struct Making<'a>(&'a Default);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        let others = self.0.makers.fetch_sub(1, Ordering::SeqCst) - 1;
        // No client was made. The next request may try again, as after a shutdown without a client.
        if others == 0 && matches!(*state, State::Late) {
            *state = State::Unset;
        }
    }
}
