//! Re-entry: which locks the running code holds already, and how it takes such a lock again.
//!
//! `run`, the macro and the layer poll their work in a task-local scope. A lock in the scope is
//! found by client and name, because a lock with the same name in another store is another lock.

use std::future::Future;
use std::sync::Arc;

use tokio::task::futures::TaskLocalFuture;

use crate::acquire::Budget;
use crate::acquire::handle::Client;
use crate::acquire::spec::Spec;
use crate::error::{Error, LostReason};
use crate::hold::{Guard, Held, INNER_PERMITS, InnerPermits};
#[cfg(debug_assertions)]
use crate::inversions::{Around, Called, Part};
use crate::name::Name;

tokio::task_local! {
    static SCOPE: Option<Scope>;
}

/// A held lock, and the locks that were held around it when it was taken. Only the outer locks are
/// on the heap, so most work under a lock needs no allocation for its scope.
#[derive(Clone)]
pub(crate) struct Scope {
    held: Held,
    outer: Option<Arc<Scope>>,
    /// The task or thread that entered the scope.
    #[cfg(debug_assertions)]
    runner: Runner,
}

/// The runner of code: a task, or a thread that waits for a future.
#[cfg(debug_assertions)]
#[derive(Clone, PartialEq)]
enum Runner {
    Task(tokio::task::Id),
    Thread(std::thread::ThreadId),
}

#[cfg(debug_assertions)]
impl Runner {
    fn current() -> Self {
        let thread = || Self::Thread(std::thread::current().id());
        tokio::task::try_id().map_or_else(thread, Self::Task)
    }
}

/// The scope of the running code.
pub(crate) fn around() -> Option<Scope> {
    SCOPE.try_with(Option::clone).ok().flatten()
}

/// A scope of these locks, inside of the scope that is [`around`].
fn of(held: &[Held]) -> Option<Scope> {
    held.iter().cloned().fold(around(), |outer, held| {
        let outer = outer.map(Arc::new);
        Some(Scope {
            held,
            outer,
            #[cfg(debug_assertions)]
            runner: Runner::current(),
        })
    })
}

/// A body in a scope.
pub(crate) type Inside<F> = TaskLocalFuture<Option<Scope>, F>;

/// Runs `body` in the scope of these locks.
pub(crate) fn inside<F: Future>(held: &[Held], body: F) -> Inside<F> {
    SCOPE.scope(of(held), body)
}

/// Runs `body` in a scope that [`around`] has returned to other code.
pub(crate) fn within<F: Future>(around: Option<Scope>, body: F) -> Inside<F> {
    SCOPE.scope(around, body)
}

/// Runs `code` in the scope of these locks.
pub(crate) fn enter<T>(held: &[Held], code: impl FnOnce() -> T) -> T {
    SCOPE.sync_scope(of(held), code)
}

/// Finds the holds of a name around the running code, and takes the innermost one that has not
/// ended. Returns a new guard of this hold: a guard that writes if `write` is true, or else one
/// that reads.
pub(crate) fn find(client: &Arc<Client>, name: &Name, write: bool) -> Option<Guard> {
    SCOPE
        .try_with(|innermost| {
            std::iter::successors(innermost.as_ref(), |scope| scope.outer.as_deref())
                .filter(|scope| scope.held.is_of(client, name))
                .find_map(|scope| scope.held.guard(write))
        })
        .ok()?
}

/// The held lock with this name, if the running code is inside of it. If there are several, the
/// innermost. Use it for assertions in code that relies on a lock of its callers.
///
/// "Inside" means inside of [`Lock::run`](crate::Lock::run) and the other `run` methods, a function
/// with `#[distributed_lock]`, the layer, [`Held::while_held`] and [`Held::scope`]. The lock may be
/// a mutex, a side of a read/write lock, or permits of a semaphore. The name is that of the lock
/// without the namespace. The lock may be of any client; [`Locks::held`](crate::Locks::held) looks
/// only for locks of one client.
///
/// Returns `None` if there is no such lock, or if it is lost or released by now. A spawned task is
/// not inside of the code that has spawned it. In such a task this function returns `None`, unless
/// the task runs in [`Held::scope`]. A bare [`Guard`](crate::Guard) does not count, because it
/// belongs to no code. This function sends no request to the store, and also works outside of a
/// runtime.
///
/// # Examples
///
/// ```
/// use lockcore::{Error, Locks};
///
/// fn set_balance(account: u64, cents: i64) {
///     let lock = lockcore::held(&format!("account:{account}"));
///     assert!(lock.is_some(), "the balance is written under the account's lock only");
///     // … write it, with lock.fencing_token()
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Error> {
/// let locks = Locks::connect("memory:")?;
/// locks
///     .mutex("account:7")
///     .run(async |held| {
///         set_balance(7, 100);
///         let elsewhere = tokio::spawn(async { lockcore::held("account:7").is_some() });
///         assert!(!elsewhere.await.expect("no panic"));
///         let carried = tokio::spawn(held.scope(async { set_balance(7, 200) }));
///         carried.await.expect("no panic")
///     })
///     .await?;
/// assert!(lockcore::held("account:7").is_none());
/// # Ok(()) }
/// ```
#[must_use]
pub fn held(name: &str) -> Option<Held> {
    held_that(|held| held.name() == name)
}

/// The innermost lock around the running code that matches and is held at this moment.
pub(crate) fn held_that(wanted: impl Fn(&Held) -> bool) -> Option<Held> {
    SCOPE
        .try_with(|innermost| {
            std::iter::successors(innermost.as_ref(), |scope| scope.outer.as_deref())
                .map(|scope| &scope.held)
                .find(|held| wanted(held) && held.is_valid())
                .cloned()
        })
        .ok()?
}

/// Records that the running code waits for a lock. Warns if code has asked for these locks in
/// another order before.
#[cfg(debug_assertions)]
pub(crate) fn note_wait(spec: &Spec<'_>) {
    let holds = holds();
    let around = holds.iter().map(|(held, keeps)| {
        // If a write hold was downgraded, this request has the permits of the read hold.
        let (lease, request) = (held.lease(), &held.lease().request);
        Around {
            called: Called {
                name: &request.name,
                label: held.label(),
            },
            part: Part {
                name: request.name.clone(),
                permits: lease.permits(),
                capacity: request.capacity.get(),
            },
            // Each client keeps a record of its own locks.
            keeps: *keeps && held.is_of_client(spec.client),
        }
    });
    let around: Vec<_> = around.collect();
    let wanted = Called {
        name: spec.name,
        label: spec.label,
    };
    spec.client.inversions.asked_for(wanted, &around);
}

/// The locks around the running code that are held at this moment, the innermost first. The flag
/// tells whether the running code itself keeps the lock held. A task in a [`Held::scope`] keeps the
/// lock of that scope, but not the locks around it.
#[cfg(debug_assertions)]
fn holds() -> Vec<(Held, bool)> {
    let Some(innermost) = around() else {
        return Vec::new();
    };
    let runner = Runner::current();
    std::iter::successors(Some(&innermost), |scope| scope.outer.as_deref())
        .filter(|scope| scope.held.is_valid())
        .map(|scope| (scope.held.clone(), scope.runner == runner))
        .collect()
}

/// Takes a lock again that the caller holds already as `outer`. The new guard has the same ticket
/// and the same token, and no request is sent to the store.
///
/// # Cancel safety
///
/// If the future is dropped, it leaves the queue of the tokio semaphore. Nothing else has changed.
pub(crate) async fn reenter(
    spec: &Spec<'_>,
    outer: Guard,
    budget: &Budget,
) -> Result<Guard, Error> {
    if !spec.reentrant {
        return Err(Error::would_deadlock(
            "held already by the caller, and not to be taken again (reentrant = false)",
        ));
    }
    if spec.is_exclusive() && !outer.writes() {
        return Err(Error::would_deadlock(
            "the caller holds the read side and would wait for itself; release it and take the write side",
        ));
    }
    let permits = match outer.is_exclusive() {
        true => Some(permits(spec, &outer, budget).await?),
        // Readers do not exclude each other.
        false => None,
    };
    // The lock may have been lost while this waited for the permits.
    if let Some(error) = outer.loss() {
        return Err(error);
    }
    Ok(Guard::inside(outer, permits, spec))
}

/// The permits of an inner hold, from a semaphore inside the process. With them, two branches of a
/// `join!` that both take the lock again exclude each other, like two tasks.
async fn permits(spec: &Spec<'_>, outer: &Guard, budget: &Budget) -> Result<InnerPermits, Error> {
    let permits = if spec.is_exclusive() {
        INNER_PERMITS
    } else {
        1
    };
    let inner_permits = outer.inner_permits();
    if !budget.waits {
        let permits = inner_permits.try_acquire_many_owned(permits);
        return permits.map_err(|_| Error::busy(None));
    }
    budget.note_wait();
    let shared = &spec.client.shared;
    let permits = shared.by(budget.give_up, inner_permits.acquire_many_owned(permits));
    match permits.await {
        Some(Ok(permits)) => Ok(permits),
        // The semaphore is never closed.
        Some(Err(_)) => Err(Error::lost(LostReason::Released)),
        None => Err(budget.timeout(spec)),
    }
}
