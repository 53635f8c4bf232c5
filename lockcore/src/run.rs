//! Work bound to a lease: a body that is polled only while the lock is held.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::slice;
use std::task::Poll;

use crate::error::Error;
use crate::guard::{Guard, Held};
use crate::lock::OnLost;
use crate::multi::{MultiGuard, MultiHeld};
use crate::scope;

impl Guard {
    /// Runs `body` while the lock is held, then releases it and waits for that.
    ///
    /// Before each poll of the body the deadline is looked at; when the lock is lost the body is
    /// dropped where it stands and the caller gets [`Lost`](crate::ErrorKind::Lost), unless the
    /// lock was asked with [`OnLost::Signal`]. A body that has returned keeps its result, even if
    /// the lock is found lost afterwards: an error then would make callers do the work twice.
    ///
    /// Inside, asking for the same lock again re-enters it: see [`Lock::reentrant`](crate::Lock::reentrant).
    ///
    /// What the body has *spawned*, and what blocks without awaiting, is not stopped; but see
    /// [`Held::scope`].
    ///
    /// # Errors
    ///
    /// The body's own, and `Lost`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body, then hands the release to the keeper.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// # let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("report").acquire().await?;
    /// let pages = guard.run(async { Ok::<_, lockcore::Error>(3) }).await?;
    /// assert_eq!(pages, 3);
    /// # Ok(()) }
    /// ```
    pub async fn run<T, E>(self, body: impl Future<Output = Result<T, E>>) -> Result<T, E>
    where
        E: From<Error>,
    {
        // The body is gone when this ends; the release must not come before that (P2). After a loss
        // there is nothing to wait for: the store may be what is gone.
        let result = self.while_held(body).await?;
        if let Err(error) = self.release().await {
            tracing::warn!(%error, "the work is done; its lock is released in the background");
        }
        result
    }
}

impl Held {
    /// Runs `body` while the lock is held, and does not release: [`Guard::run`] for work that is
    /// one of several parts under the same guard.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost), with the body dropped where it stood. With
    /// [`OnLost::Signal`] there is none.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body; the lock stays with its guard.
    pub async fn while_held<T>(&self, body: impl Future<Output = T>) -> Result<T, Error> {
        let held = slice::from_ref(self);
        while_held(held, || self.lease().changed.notified(), body).await
    }
}

impl MultiGuard {
    /// [`Guard::run`] under several locks: the body is stopped when one of them is lost.
    ///
    /// # Errors
    ///
    /// The body's own, and [`Lost`](crate::ErrorKind::Lost) with the name of the lock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body, then hands the releases to the keepers.
    pub async fn run<T, E>(self, body: impl Future<Output = Result<T, E>>) -> Result<T, E>
    where
        E: From<Error>,
    {
        // As there.
        let result = self.while_held(body).await?;
        if let Err(error) = self.release().await {
            tracing::warn!(%error, "the work is done; its locks are released in the background");
        }
        result
    }
}

impl MultiHeld {
    /// [`Held::while_held`] for several locks.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) with the name of the lock that was lost, and with the body
    /// dropped where it stood. Those with [`OnLost::Signal`] are not looked at.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body; the locks stay with their guard.
    pub async fn while_held<T>(&self, body: impl Future<Output = T>) -> Result<T, Error> {
        while_held(self, || self.changed(), body).await
    }
}

/// Polls `body` as long as all locks are held. `changed` resolves after a change of any of them that
/// comes after its first poll.
async fn while_held<F: Future, C: Future>(
    held: &[Held],
    changed: impl Fn() -> C,
    body: F,
) -> Result<F::Output, Error> {
    let body = scope::inside(held, body);
    let cancels = |held: &&Held| held.on_lost() == OnLost::Cancel;
    if !held.iter().any(|held| cancels(&held)) {
        return Ok(body.await);
    }
    // `body` is declared last, so that it is dropped first when this future is dropped.
    let mut lost = pin!(changed());
    let mut body = pin!(body);
    poll_fn(|cx| {
        // Registers for the loss before looking at it, so that one in between is not missed. It
        // fires for other changes too, which there are none of once the lock is held.
        while lost.as_mut().poll(cx).is_ready() {
            lost.set(changed());
        }
        for held in held.iter().filter(cancels) {
            if let Some(reason) = held.lost_reason() {
                return Poll::Ready(Err(Error::lost(reason).of_name(held.name())));
            }
        }
        body.as_mut().poll(cx).map(Ok)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::backend::memory::Memory;
    use crate::clock::Clock;
    use crate::error::{ErrorKind, LostReason};
    use crate::locks::Locks;

    const LOST: ErrorKind = ErrorKind::Lost(LostReason::Expired);

    /// A client whose lease clock is turned by hand, and whose store has a clock of its own.
    fn locks(clock: &Clock) -> Locks {
        let store = Arc::new(Memory::new(Clock::BOOT));
        Locks::builder()
            .build_with(store, clock.clone())
            .expect("a client")
    }

    /// H5: the machine was suspended for an hour. No timer of the process has moved; the clock has.
    #[tokio::test]
    async fn a_body_is_not_polled_after_the_machine_slept_beyond_the_lease() {
        let clock = Clock::by_hand();
        let lock = locks(&clock).mutex("laptop").renew(false);
        let mut resumed = false;

        let outcome: Result<(), Error> = lock
            .run(async |held| {
                assert!(held.is_valid());
                clock.suspend(Duration::from_secs(3600));
                tokio::task::yield_now().await;
                resumed = true;
                Ok(())
            })
            .await;

        assert_eq!(outcome.expect_err("lost").kind(), LOST);
        assert!(!resumed, "the body went on after its lease had ended");
    }

    /// H5: nobody looks at the clock, so the keeper has to notice by itself that it has jumped.
    #[tokio::test]
    async fn a_loss_during_the_machines_sleep_is_told_soon_after_it() {
        let clock = Clock::by_hand();
        let lock = locks(&clock).mutex("laptop").renew(false);
        let guard = lock.acquire().await.expect("the lock");
        let mut lost = pin!(guard.lost());
        // Waits before the clock jumps.
        assert!(poll_fn(|cx| Poll::Ready(lost.as_mut().poll(cx).is_pending())).await);

        clock.suspend(Duration::from_secs(3600));

        let told = tokio::time::timeout(Duration::from_secs(5), lost).await;
        assert_eq!(told.expect("told soon"), LostReason::Expired);
    }

    #[tokio::test]
    async fn a_body_that_has_returned_keeps_its_result_although_the_lock_was_lost() {
        let clock = Clock::by_hand();
        let lock = locks(&clock).mutex("done").renew(false);

        let outcome: Result<u8, Error> = lock
            .run(async |_| {
                clock.suspend(Duration::from_secs(3600));
                Ok(7)
            })
            .await;

        assert_eq!(outcome.expect("the result"), 7);
    }

    #[tokio::test]
    async fn a_body_that_asked_for_a_signal_goes_on_and_is_told() {
        let clock = Clock::by_hand();
        let lock = locks(&clock)
            .mutex("signal")
            .renew(false)
            .on_lost(OnLost::Signal);

        let outcome: Result<LostReason, Error> = lock
            .run(async |held| {
                clock.suspend(Duration::from_secs(3600));
                Ok(held.lost().await)
            })
            .await;

        assert_eq!(outcome.expect("the result"), LostReason::Expired);
    }

    /// H35: lease truth comes from the OS clock, whatever a test does to tokio's.
    #[tokio::test(start_paused = true)]
    async fn a_paused_and_advanced_tokio_clock_ends_no_lease() {
        let locks = Locks::connect("memory:").expect("a client");
        let guard = locks.mutex("paused").acquire().await.expect("the lock");

        tokio::time::advance(Duration::from_secs(3600)).await;

        assert!(guard.is_valid());
    }

    /// The wait is real time too: a paused clock that jumps to the next timer must not end it.
    #[tokio::test(start_paused = true)]
    async fn a_paused_tokio_clock_does_not_shorten_a_wait() {
        let locks = Locks::connect("memory:").expect("a client");
        let held = locks.mutex("paused").acquire().await.expect("the lock");
        let started = std::time::Instant::now();

        let budget = Duration::from_millis(120);
        let error = locks.mutex("paused").wait(budget).acquire().await;

        assert_eq!(error.expect_err("held").kind(), ErrorKind::Timeout);
        assert!(started.elapsed() >= budget);
        drop(held);
    }

    /// Passed on, and the machine slept before the waiter could look.
    #[tokio::test]
    async fn a_lock_that_is_lost_on_its_way_to_a_waiter_is_asked_for_again() {
        let clock = Clock::by_hand();
        let locks = locks(&clock);
        let guard = locks.mutex("a").acquire().await.expect("the lock");
        let lock = locks.mutex("a").wait(crate::Wait::Forever);
        let mut second = pin!(lock.acquire());
        assert!(poll_fn(|cx| Poll::Ready(second.as_mut().poll(cx).is_pending())).await);

        drop(guard);
        clock.suspend(Duration::from_secs(3600));

        assert!(second.await.expect("the lock").is_valid());
    }

    #[tokio::test]
    async fn a_lock_that_is_lost_while_waiting_for_a_turn_in_it_is_not_handed_out() {
        let clock = Clock::by_hand();
        let locks = locks(&clock);
        let outer = locks.mutex("a").on_lost(OnLost::Signal);
        let inner = locks.mutex("a");
        let outcome: Result<Result<_, Error>, Error> = outer
            .run(async |_| {
                let first = inner.acquire().await?;
                let mut second = pin!(inner.acquire());
                assert!(poll_fn(|cx| Poll::Ready(second.as_mut().poll(cx).is_pending())).await);
                clock.turn(Duration::from_secs(3600));
                drop(first);
                Ok(second.await)
            })
            .await;

        let error = outcome.expect("a result").expect_err("lost");
        assert_eq!(error.kind(), LOST);
    }
}
