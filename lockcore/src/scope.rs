//! Re-entry: what the running code holds already, and asking for it again inside.
//!
//! `run`, the macro and the layer poll their work in a task-local scope. It is keyed by client and
//! name, so that a lock of the same name on another store is another lock.

use std::future::Future;
use std::sync::Arc;

use tokio::task::futures::TaskLocalFuture;

use crate::acquire::Budget;
use crate::error::{Error, LostReason};
use crate::guard::{Guard, Held, TURNS, Turn};
use crate::lock::Order;
use crate::locks::Client;
use crate::multi::{MultiGuard, MultiHeld};
use crate::name::Name;
use crate::request::FULL;

tokio::task_local! {
    static SCOPE: Option<Scope>;
}

/// A held lock, and what was held around it: on the heap only where there is something, so that most work
/// under a lock allocates nothing for it.
#[derive(Clone)]
pub(crate) struct Scope {
    held: Held,
    outer: Option<Arc<Scope>>,
    /// Who entered it.
    #[cfg(debug_assertions)]
    runner: Runner,
}

/// What runs code: a task, or a thread that waits for a future.
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

/// What the running code is inside of.
fn around() -> Option<Scope> {
    SCOPE.try_with(Option::clone).ok().flatten()
}

/// The scope of locks that are taken inside of what is [`around`].
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

/// Runs `body` in the scope of the locks that it is run under.
pub(crate) fn inside<F: Future>(held: &[Held], body: F) -> Inside<F> {
    SCOPE.scope(of(held), body)
}

/// The innermost hold of a name that the running code is inside of and that is not over, to `write` under it
/// or to read.
pub(crate) fn find(client: &Arc<Client>, name: &Name, write: bool) -> Option<Guard> {
    SCOPE
        .try_with(|innermost| {
            std::iter::successors(innermost.as_ref(), |scope| scope.outer.as_deref())
                .filter(|scope| scope.held.is_of(client, name))
                .find_map(|scope| scope.held.guard(write))
        })
        .ok()?
}

/// The lock of a name that the running code is inside of, the innermost if there are several: for
/// assertions in code that relies on a lock which its callers take.
///
/// "Inside" is inside of [`Lock::run`](crate::Lock::run) and its like, a function with
/// `#[distributed_lock]`, the layer, [`Held::while_held`], [`Held::scope`] and [`Held::enter`], whatever the
/// lock is: a mutex, a side of a read/write lock, permits of a semaphore. The name is as it was given, without
/// the namespace, and the client may be any: [`Locks::held`](crate::Locks::held) asks for one of its own.
///
/// `None` if there is no such lock, and if it is lost or released by now. Code that has spawned a task is not
/// around that task: there it is `None`, unless the lock was [carried](Held::scope) into it. And `None` of a bare
/// [`Guard`](crate::Guard), which belongs to no code. Asks nobody, and works outside of a runtime too.
///
/// # Examples
///
/// ```
/// use lockcore::{Error, Locks};
///
/// fn set_balance(account: u64, cents: i64) {
///     let lock = lockcore::held(&format!("account:{account}"));
///     assert!(lock.is_some(), "the balance is written under the account's lock only");
///     // … write it, with lock.write_token()
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

/// The innermost that is held at this moment.
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

/// What the running code is inside of and what is held at this moment, the innermost first; and whether the
/// running code itself keeps it so. What is around a scope that was [carried](Held::scope) into another task
/// is not kept by that task.
#[cfg(debug_assertions)]
pub(crate) fn holds() -> Vec<(Held, bool)> {
    let Some(innermost) = around() else {
        return Vec::new();
    };
    let runner = Runner::current();
    std::iter::successors(Some(&innermost), |scope| scope.outer.as_deref())
        .filter(|scope| scope.held.is_valid())
        .map(|scope| (scope.held.clone(), scope.runner == runner))
        .collect()
}

/// Takes a lock that the caller holds already, as `outer`: same ticket, same token, no request.
///
/// # Cancel safety
///
/// The turn that is waited for is a place in a queue of tokio's, which goes with the future.
pub(crate) async fn reenter(
    order: &Order<'_>,
    outer: Guard,
    budget: &Budget,
) -> Result<Guard, Error> {
    if !order.reentrant {
        return Err(Error::would_deadlock(
            "held already by the caller, and not to be taken again (reentrant = false)",
        ));
    }
    if order.is_exclusive() && !outer.writes() {
        return Err(Error::would_deadlock(
            "the caller holds the read side and would wait for himself; release it and take the write side",
        ));
    }
    let turn = match outer.is_exclusive() {
        true => Some(turn(order, &outer, budget).await?),
        // Readers do not keep each other out.
        false => None,
    };
    // Perhaps while waiting for the turn.
    if let Some(error) = outer.loss() {
        return Err(error);
    }
    Ok(Guard::inside(outer, turn, order))
}

/// Two branches of a `join!` that both take the lock again exclude each other as strangers would.
async fn turn(order: &Order<'_>, outer: &Guard, budget: &Budget) -> Result<Turn, Error> {
    let permits = if order.is_exclusive() { TURNS } else { 1 };
    let turns = outer.turns();
    if !budget.waits {
        let turn = turns.try_acquire_many_owned(permits);
        return turn.map_err(|_| Error::busy(None));
    }
    let shared = &order.client.shared;
    let turn = shared.by(budget.give_up, turns.acquire_many_owned(permits));
    match turn.await {
        Some(Ok(turn)) => Ok(turn),
        // It is never closed.
        Some(Err(_)) => Err(Error::lost(LostReason::Released)),
        None => Err(budget.timeout(order)),
    }
}

impl Held {
    /// Carries the lock into work that runs elsewhere, as in a spawned task: inside, asking for it
    /// again re-enters, and it stays held until that work has ended. The work is stopped when the
    /// lock is lost, unless it was asked with [`OnLost::Signal`](crate::OnLost::Signal).
    ///
    /// Without this a spawned task is a stranger: it waits until the lock is released.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost), also when the lock had been released before the call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; if nobody else holds the lock then, it is released.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let lock = locks.mutex("album:9");
    /// let outer = lock.clone();
    /// outer
    ///     .run(async |held| {
    ///         let job = tokio::spawn(held.scope(async move {
    ///             let inner = lock.acquire().await?; // at once: it is held already
    ///             inner.release().await
    ///         }));
    ///         job.await.expect("no panic")??;
    ///         Ok::<_, lockcore::Error>(())
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn scope<F: Future>(
        &self,
        work: F,
    ) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        // Now, and not when the future is polled first: the lock may be released before that.
        let guard = self.carried();
        let around = around();
        async move {
            // Captured in this order and dropped in it if this is never polled: the work before the guard.
            let (work, guard) = (work, guard);
            let guard = guard?;
            let result = SCOPE.scope(around, guard.while_held(work)).await?;
            if let Err(error) = guard.release().await {
                tracing::warn!(%error, "the work is done; its lock is released in the background");
            }
            Ok(result)
        }
    }

    /// A guard for work that runs elsewhere.
    fn carried(&self) -> Result<Guard, Error> {
        let over = || self.lost_for(self.lost_reason().unwrap_or(LostReason::Released));
        self.guard(true).ok_or_else(over)
    }

    /// Runs a piece of code in the scope of this lock, as [`while_held`](Self::while_held) does with
    /// every poll of its work: for futures and streams that are polled by hand.
    pub fn enter<T>(&self, code: impl FnOnce() -> T) -> T {
        SCOPE.sync_scope(of(std::slice::from_ref(self)), code)
    }
}

impl MultiHeld {
    /// [`Held::scope`] for several locks: all of them stay held until the work has ended, which is stopped
    /// when one of them is lost.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) with the name of the lock, also when one had been released before the
    /// call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work; those that nobody else holds then are released.
    pub fn scope<F: Future>(
        &self,
        work: F,
    ) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        // As there: now, and in this order.
        let guards = self.iter().map(Held::carried).collect();
        let guards: Result<Vec<_>, _> = guards;
        let around = around();
        async move {
            let (work, guards) = (work, guards);
            let guard = MultiGuard::of(guards?);
            let result = SCOPE.scope(around, guard.while_held(work)).await?;
            if let Err(error) = guard.release().await {
                tracing::warn!(%error, "the work is done; its locks are released in the background");
            }
            Ok(result)
        }
    }

    /// Runs a piece of code in the scope of these locks: see [`Held::enter`].
    pub fn enter<T>(&self, code: impl FnOnce() -> T) -> T {
        SCOPE.sync_scope(of(self), code)
    }
}

impl Order<'_> {
    /// Whether the lock has a scope to be found in: semaphores count, they are not re-entered.
    pub(crate) fn can_reenter(&self) -> bool {
        self.capacity == FULL
    }
}
