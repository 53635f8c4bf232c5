//! Using a held lock in work that runs elsewhere, for example in another task.

use std::future::Future;

use tracing::Span;

use crate::error::{Error, LostReason};
use crate::hold::{Guard, Held};
use crate::multi::{MultiGuard, MultiHeld};
use crate::run::{self, then_release};
use crate::scope;

impl Held {
    /// Runs work under this lock in another task, for example in a spawned one. The lock stays held
    /// until the work has ended. If code inside the work asks for the same lock, it re-enters the
    /// lock. The work is stopped when the lock is lost, unless the lock was taken with
    /// [`OnLost::Signal`](crate::OnLost::Signal). The future releases its guard after the work, as
    /// [`Guard::run`] does.
    ///
    /// A spawned task is outside of the scope of the lock. Without this function, it would wait for
    /// the lock until the lock is released.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost), also when the lock had been released before the call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work. If the lock has no other guard at that time, it is
    /// released.
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
        // The guard is made here and not at the first poll, because the lock may be released before
        // the first poll.
        let guard = self.carried();
        let around = scope::around();
        async move {
            // If the future is never polled, these captured values are dropped in this order: first
            // the work, then the guard.
            let (work, guard) = (work, guard);
            let guard = guard?;
            let result = scope::within(around, guard.while_held(work)).await;
            then_release(result.map(Ok), guard.release()).await
        }
    }

    /// A guard for work that runs elsewhere.
    fn carried(&self) -> Result<Guard, Error> {
        let over = || self.lost_for(self.lost_reason().unwrap_or(LostReason::Released));
        self.guard(true).ok_or_else(over)
    }

    /// Runs code in the scope of this lock. [`while_held`](Self::while_held) does the same with
    /// every poll of its work. This is for futures and streams that are polled by hand.
    #[doc(hidden)] // for the macro and the layer, which poll by hand
    pub fn enter<T>(&self, code: impl FnOnce() -> T) -> T {
        scope::enter(std::slice::from_ref(self), code)
    }
}

impl MultiHeld {
    /// [`Held::scope`] for several locks: all of them stay held until the work has ended. The work
    /// is stopped when one of them is lost.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) with the name of the lock, also when one of the locks had
    /// been released before the call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work. Locks that have no other guard at that time are
    /// released.
    pub fn scope<F: Future>(
        &self,
        work: F,
    ) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        // As in [`Held::scope`]: the guards are made here, and the values are captured in this
        // order.
        let guards = self.iter().map(Held::carried).collect();
        let guards: Result<Vec<_>, _> = guards;
        let around = scope::around();
        async move {
            let (work, guards) = (work, guards);
            let guard = MultiGuard::of(guards?);
            let result = scope::within(around, guard.while_held(work)).await;
            then_release(result.map(Ok), guard.release()).await
        }
    }

    /// A span for work under these locks: see [`Held::span`].
    #[doc(hidden)] // for the layer, which polls bodies by hand
    pub fn span(&self) -> Span {
        run::span(self)
    }

    /// Runs code in the scope of these locks: see [`Held::enter`].
    #[doc(hidden)] // for the macro and the layer, which poll by hand
    pub fn enter<T>(&self, code: impl FnOnce() -> T) -> T {
        scope::enter(self, code)
    }
}
