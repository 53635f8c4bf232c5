//! Work under a lock: a body, which is polled only while the lock is held.
//!
//! The futures here are written by hand. An `async fn` would store the body twice: as its argument,
//! and as the future that it awaits. If functions under locks call each other, the size would
//! double at each call. A future that is written by hand stores the body once.

use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::slice;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use pin_project_lite::pin_project;
use tracing::instrument::Instrumented;
use tracing::{Instrument, Span};

use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::{Guard, Held, Release};
use crate::lock::Lock;
use crate::multi::{MultiGuard, MultiHeld, MultiLock};
use crate::scope::{self, Inside};

impl Lock {
    /// Takes the lock, runs `body` under it, and releases it. The body is stopped when the lock is
    /// lost: see [`Guard::run`].
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire) and of [`Guard::run`], turned into the body's error
    /// type.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body first, and then leaves nothing behind.
    pub async fn run<T, E, F>(&self, body: F) -> Result<T, E>
    where
        F: AsyncFnOnce(Held) -> Result<T, E>,
        E: From<Error>,
    {
        let guard = self.acquire().await?;
        let held = guard.held();
        guard.run(body(held)).await
    }
}

impl MultiLock {
    /// Takes all locks, runs `body` under them, and releases them: see [`Lock::run`]. The body is
    /// stopped when one of them is lost.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire) and of [`MultiGuard::run`], turned into the body's
    /// error type.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body first, and then leaves nothing behind.
    pub async fn run<T, E, F>(&self, body: F) -> Result<T, E>
    where
        F: AsyncFnOnce(MultiHeld) -> Result<T, E>,
        E: From<Error>,
    {
        let guard = self.acquire().await?;
        let held = guard.held();
        guard.run(body(held)).await
    }
}

impl Guard {
    /// Runs `body` while the lock is held, then releases the lock and waits for the answer.
    ///
    /// The call checks the deadline before each poll of the body. When the lock is lost, the body
    /// is dropped at its current `.await`, and the caller gets [`Lost`](crate::ErrorKind::Lost).
    /// There are two options:
    ///
    /// - If the lock was taken with [`OnLost::Signal`](crate::OnLost::Signal), the body continues
    ///   after a loss.
    /// - If the lock was taken with [`OnRevoke::Cancel`](crate::OnRevoke::Cancel), the body is also
    ///   dropped as soon as somebody asks for the lock, and the caller gets `Lost`.
    ///
    /// If somebody has asked for the lock, the call waits for the release before it returns `Lost`,
    /// as long as [`release`](Self::release) does. After any other loss it does not wait, because
    /// the store may be out of reach.
    ///
    /// If the body has returned, the caller gets its result, even if the call finds after that that
    /// the lock was lost. With an error in place of the result, callers would do the work twice.
    ///
    /// If the body asks for the same lock again, it re-enters the lock: see
    /// [`Lock::reentrant`](crate::Lock::reentrant).
    ///
    /// Tasks that the body has *spawned*, and code that blocks without awaiting, are not stopped.
    /// For spawned tasks see [`Held::scope`].
    ///
    /// # Errors
    ///
    /// The errors of the body, and `Lost`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body first. After that the keeper releases the lock.
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
    pub fn run<T, E>(
        self,
        body: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>>
    where
        E: From<Error>,
    {
        one_held(&self, body).then(|result| then_release(result, self.release()))
    }
}

impl Held {
    /// Runs `body` while the lock is held, and does not release the lock. Use it in place of
    /// [`Guard::run`] for one of several parts of work under the same guard.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) when the lock is lost: the body is dropped at its current
    /// `.await`. With [`OnLost::Signal`](crate::OnLost::Signal) there is no error, and the body
    /// continues.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body; the lock stays with its guard.
    pub fn while_held<T>(
        &self,
        body: impl Future<Output = T>,
    ) -> impl Future<Output = Result<T, Error>> {
        one_held(self, body)
    }
}

impl MultiGuard {
    /// [`Guard::run`] under several locks: the body is stopped when one of them is lost.
    ///
    /// # Errors
    ///
    /// The errors of the body, and [`Lost`](crate::ErrorKind::Lost) with the name of the lock.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body first. After that the keepers release the locks.
    pub fn run<T, E>(
        self,
        body: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>>
    where
        E: From<Error>,
    {
        all_held(&self, body).then(|result| then_release(result, self.release()))
    }
}

impl MultiHeld {
    /// [`Held::while_held`] for several locks.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) with the name of the lock that was lost: the body is
    /// dropped at its current `.await`. Locks with [`OnLost::Signal`](crate::OnLost::Signal) are
    /// not checked.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body; the locks stay with their guard.
    pub fn while_held<T>(
        &self,
        body: impl Future<Output = T>,
    ) -> impl Future<Output = Result<T, Error>> {
        all_held(self, body)
    }
}

/// Releases the lock after the end of the body. The body has been dropped before this call, so
/// nothing of it runs after the release.
///
/// If the lock was asked back, the store may still have the ticket, so this function waits for the
/// release also in this case: a caller that asks again at once finds the lock free. After any other
/// loss it does not wait, because the store may be out of reach. It drops the future `release`
/// before its first poll. This drops the guard, and the keeper releases the lock.
pub(crate) async fn then_release<T, E: From<Error>>(
    result: Result<Result<T, E>, Error>,
    release: impl Future<Output = Result<Release, Error>>,
) -> Result<T, E> {
    let asked_back = ErrorKind::Lost(LostReason::Revoked);
    let waits = result
        .as_ref()
        .map_or_else(|lost| lost.kind() == asked_back, |_| true);
    if waits && let Err(error) = release.await {
        tracing::warn!(%error, "the work has ended; its lock is released in the background");
    }
    result?
}

fn one_held<F: Future>(
    held: &Held,
    body: F,
) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
    let changed = |held: &One| {
        let held = held.0.clone();
        async move { held.lease().changed.notified().await }
    };
    WhileHeld::new(One(held.clone()), changed, body)
}

fn all_held<F: Future>(
    held: &MultiHeld,
    body: F,
) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
    let changed = |held: &MultiHeld| {
        let held = held.clone();
        async move { held.changed().await }
    };
    WhileHeld::new(held.clone(), changed, body)
}

/// One lock, as a slice of locks.
struct One(Held);

impl Deref for One {
    type Target = [Held];

    fn deref(&self) -> &[Held] {
        slice::from_ref(&self.0)
    }
}

pin_project! {
    /// Polls its body as long as all locks are held.
    struct WhileHeld<H, N, C, F> {
        // This is the first field, so that the body is dropped before the locks.
        #[pin]
        body: Body<F>,
        // Resolves after a change of any lock that comes after the first poll of this future. It is
        // made when the body waits, if the loss of a lock ends the body.
        #[pin]
        changed: Option<C>,
        next_change: N,
        held: H,
    }
}

pin_project! {
    #[project = BodyProj]
    enum Body<F> {
        // `None` after the end of the body, or after a panic in its first step.
        Ahead { body: Option<F> },
        Begun { #[pin] body: Instrumented<Inside<F>> },
    }
}

impl<H, N, C, F> WhileHeld<H, N, C, F>
where
    H: Deref<Target = [Held]>,
    N: Fn(&H) -> C,
{
    fn new(held: H, next_change: N, body: F) -> Self {
        Self {
            body: Body::Ahead { body: Some(body) },
            changed: None,
            next_change,
            held,
        }
    }
}

impl<H, N, C, F> Future for WhileHeld<H, N, C, F>
where
    H: Deref<Target = [Held]>,
    N: Fn(&H) -> C,
    C: Future,
    F: Future,
{
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let BodyProj::Ahead { body } = this.body.as_mut().project()
            && let Some(body) = body.take()
        {
            // The scope is made at the first poll, because it contains the locks around that poll.
            let body = scope::inside(this.held, body).instrument(span(this.held));
            this.body.set(Body::Begun { body });
        }
        let polled = match (lost(this.held), this.body.as_mut().project()) {
            (Some(error), _) => Poll::Ready(Err(error)),
            (None, BodyProj::Begun { body }) => body.poll(cx).map(Ok),
            (None, BodyProj::Ahead { .. }) => return Poll::Pending,
        };
        let result = match polled {
            Poll::Ready(result) => result,
            Poll::Pending if !this.held.iter().any(Held::stops_work) => return Poll::Pending,
            Poll::Pending => {
                // A loss must wake a task that waits. This registers for a change and then checks
                // the locks again, so a change in between is not missed. `changed` also resolves for
                // changes other than a loss, for example when somebody asks for the lock.
                while this
                    .changed
                    .as_mut()
                    .as_pin_mut()
                    .is_none_or(|changed| changed.poll(cx).is_ready())
                {
                    this.changed.set(Some((this.next_change)(this.held)));
                }
                match lost(this.held) {
                    Some(error) => Err(error),
                    None => return Poll::Pending,
                }
            }
        };
        if let (Err(error), BodyProj::Begun { body }) = (&result, this.body.as_mut().project()) {
            body.span().record("error.type", error.kind().code());
        }
        // The body is dropped here, before the caller sees the result. The caller may keep this
        // future for longer.
        this.body.set(Body::Ahead { body: None });
        Poll::Ready(result)
    }
}

/// The span of work: one for each lock, one inside of the other. The work runs in the innermost.
pub(crate) fn span(held: &[Held]) -> Span {
    let Some((first, others)) = held.split_first() else {
        return Span::none();
    };
    let inside = |around: Span, held: &Held| around.in_scope(|| held.span());
    others.iter().fold(first.span(), inside)
}

/// The loss that ends the body, if there is one.
fn lost(held: &[Held]) -> Option<Error> {
    held.iter().find_map(Held::stop)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::backend::memory::Memory;
    use crate::clock::Clock;
    use crate::locks::Locks;
    use crate::options::OnLost;

    const LOST: ErrorKind = ErrorKind::Lost(LostReason::Expired);

    /// A client whose lease clock the test moves, and whose store has a clock of its own.
    fn locks(clock: &Clock) -> Locks {
        let store = Arc::new(Memory::new(Clock::BOOT));
        Locks::builder()
            .build_with(store, String::new(), clock.clone())
            .expect("a client")
    }

    /// The machine was suspended for an hour. No timer of the process has moved, but the lease
    /// clock has.
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

    /// No code of the test reads the clock, so the keeper has to notice by itself that the clock
    /// has jumped.
    #[tokio::test]
    async fn a_loss_during_the_machines_sleep_is_told_soon_after_it() {
        let clock = Clock::by_hand();
        let lock = locks(&clock).mutex("laptop").renew(false);
        let guard = lock.acquire().await.expect("the lock");
        let mut lost = pin!(guard.lost());
        // The wait begins before the clock jumps.
        assert!(poll_fn(|cx| Poll::Ready(lost.as_mut().poll(cx).is_pending())).await);

        clock.suspend(Duration::from_secs(3600));

        let told = tokio::time::timeout(Duration::from_secs(5), lost).await;
        assert_eq!(told.expect("told soon"), LostReason::Expired);
    }

    #[tokio::test]
    async fn a_body_that_nothing_else_wakes_is_stopped_by_the_loss() {
        let ttl = Duration::from_millis(50);
        let lock = locks(&Clock::BOOT).mutex("a").ttl(ttl).renew(false);

        // The work runs in another task, so that the end of the timeout does not wake it.
        let waits = tokio::spawn(async move {
            lock.run(async |_| std::future::pending::<Result<(), Error>>().await)
                .await
        });

        let outcome = tokio::time::timeout(Duration::from_secs(10), waits).await;
        let outcome = outcome.expect("woken").expect("no panic");
        assert_eq!(outcome.expect_err("lost").kind(), LOST);
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

    /// Leases use the clock of the operating system. A test that pauses or advances tokio's clock
    /// does not change it.
    #[tokio::test(start_paused = true)]
    async fn a_paused_and_advanced_tokio_clock_ends_no_lease() {
        let locks = Locks::connect("memory:").expect("a client");
        let guard = locks.mutex("paused").acquire().await.expect("the lock");

        tokio::time::advance(Duration::from_secs(3600)).await;

        assert!(guard.is_valid());
    }

    /// The wait is measured in real time too. A paused tokio clock that jumps to the next timer
    /// must not end the wait.
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

    /// The lock was handed over to the waiter. Then the machine was suspended, before the waiter
    /// was polled.
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
                clock.advance(Duration::from_secs(3600));
                drop(first);
                Ok(second.await)
            })
            .await;

        let error = outcome.expect("a result").expect_err("lost");
        assert_eq!(error.kind(), LOST);
    }

    /// If each lock doubled the size of the future, locked functions that call locked functions
    /// would become huge.
    #[tokio::test]
    async fn work_under_a_lock_is_not_much_larger_than_the_work() {
        const LARGE: usize = 100_000;
        let locks = Locks::connect("memory:").expect("a client");
        let guard = locks.mutex("large").acquire().await.expect("the lock");
        let several = Locks::all([locks.mutex("a")]);
        let several = several.acquire().await.expect("the locks");
        let body = || async {
            let large = [0_u8; LARGE];
            tokio::task::yield_now().await;
            Ok::<_, Error>(large[0])
        };

        assert!(size_of_val(&guard.while_held(body())) < LARGE + 5_000);
        assert!(size_of_val(&guard.run(body())) < LARGE + 5_000);
        assert!(size_of_val(&several.run(body())) < LARGE + 5_000);
    }

    #[tokio::test]
    async fn a_body_is_inside_of_the_lock_that_is_around_where_it_runs() {
        let locks = Locks::connect("memory:").expect("a client");
        let outer = locks.mutex("outer").acquire().await.expect("the lock");
        let inner = locks.mutex("inner").acquire().await.expect("the lock");

        // This future is made before the body of the outer lock begins.
        let work = inner.run(async { locks.mutex("outer").try_acquire().await.map(drop) });

        outer.run(work).await.expect("taken again");
    }
}
