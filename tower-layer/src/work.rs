//! The layer for any service, and the types of its answers. You need the names of these types only
//! to write the type of a layer.
//!
//! [`WorkLayer`] locks the requests of a queue's worker, of a client, or of any other service. Do
//! not make values of the other types: [`WorkLayer::on_busy`] and [`WorkLayer::on_error`] turn
//! [`AsError`], the default, into [`By`].

// The layer for HTTP, which keeps the lock until the body ends, is in `layer`. The layer for HTTP
// takes the lock in `future`, and this layer takes the lock here.

use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use lockcore::{Error, ErrorKind, Lock, Locks, Wait};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::guard::AnyGuard;
use crate::names::Names;
use crate::reserved::{NotReady, Reserved};

/// The default of `LOCK_WAIT`: the time that a client waits for a lock.
const READY_WITHIN: Duration = Duration::from_secs(15);

/// Takes a lock for every request of any service: the worker of a job queue, or a client of another
/// service.
///
/// The layer takes the lock in the future that `call` returns, and keeps it until the service's
/// future has ended or was dropped. The service finds the held lock by [`lockcore::held`]. If the
/// service asks for the same lock again, it re-enters the lock. When the lock is lost, the
/// service's future is dropped, at the `.await` that it has reached. Before a request waits for its
/// lock, it gives back the permit that the inner service has reserved for it. When it has the lock,
/// it waits until the service is ready again, for at most [`ready_within`](Self::ready_within).
///
/// Two closures make the answers. [`on_busy`](Self::on_busy) makes the answer to a request that has
/// not reached the service because others have its lock; such a request can be repeated later.
/// [`on_error`](Self::on_error) makes the answer to a request whose lock cannot be taken or is
/// lost. Without these closures, both answers are the service's own error, which must be
/// `From<lockcore::Error>`, as `Box<dyn Error + Send + Sync>` is.
///
/// For HTTP, use [`LockLayer`](crate::LockLayer): `LockLayer` makes the answers, and keeps the lock
/// until the body of the response has ended. `WorkLayer` releases the lock before the body is sent.
///
/// # Cancel safety
///
/// Dropping the future of a request drops the service's future first, and leaves nothing behind. A
/// request that waits leaves the line. A request that holds the lock releases it.
///
/// # Examples
///
/// ```
/// use lockcore_tower::WorkLayer;
/// use tower::{BoxError, Layer, ServiceExt, service_fn};
///
/// struct Job {
///     order: u64,
/// }
///
/// #[derive(Debug, PartialEq)]
/// enum Outcome {
///     Done,
///     Later,
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let one_per_order = WorkLayer::with_lock({
///     let locks = locks.clone();
///     move |job: &Job| {
///         let lock = locks.mutex(format!("order:{}", job.order));
///         Ok::<_, BoxError>(Some(lock.wait(std::time::Duration::ZERO)))
///     }
/// })
/// .on_busy(|_: Job, _| Ok::<_, BoxError>(Outcome::Later));
/// let worker = one_per_order.layer(service_fn(async |_: Job| Ok::<_, BoxError>(Outcome::Done)));
///
/// let other = locks.mutex("order:7").acquire().await?;
/// assert_eq!(worker.clone().oneshot(Job { order: 7 }).await?, Outcome::Later);
/// other.release().await?;
/// assert_eq!(worker.oneshot(Job { order: 7 }).await?, Outcome::Done);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct WorkLayer<K, B = AsError, F = AsError> {
    lock: K,
    ready_within: Wait,
    names: Option<Arc<Names>>,
    on_busy: B,
    on_error: F,
}

/// The answer is the service's own error, made from the lock's error.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AsError;

/// A closure makes the answer from the lock's error.
#[derive(Clone, Copy)]
pub struct By<F>(F);

impl WorkLayer<()> {
    /// A layer that locks, for each request, the name that `key` finds in the request. The lock is
    /// exclusive, with the wait and the ttl of the client. If `key` returns `None`, the request
    /// passes without a lock. If `key` returns an error, this error is the answer.
    ///
    /// ```
    /// use lockcore_tower::WorkLayer;
    /// use tower::BoxError;
    ///
    /// # fn example(locks: lockcore::Locks) {
    /// let layer = WorkLayer::new(locks, |line: &String| {
    ///     let (customer, _) = line.split_once(';').ok_or("no customer")?;
    ///     Ok::<_, BoxError>(Some(format!("customer:{customer}")))
    /// });
    /// # drop(layer);
    /// # }
    /// ```
    pub fn new<Q, E>(
        locks: Locks,
        key: impl Fn(&Q) -> Result<Option<String>, E> + Clone,
    ) -> WorkLayer<impl Fn(&Q) -> Result<Option<Lock>, E> + Clone> {
        let wait = locks.default_wait();
        Self::with_lock(move |request: &Q| Ok(key(request)?.map(|name| locks.mutex(name))))
            .ready_within(wait)
    }

    /// A layer that takes, for each request, the lock that `lock` makes for the request. It may be
    /// a mutex, a side of a read/write lock, or permits of a semaphore, with all options of a
    /// [`Lock`]. If `lock` returns `None`, the request passes without a lock. If `lock` returns an
    /// error, this error is the answer.
    pub fn with_lock<Q, E, K>(lock: K) -> WorkLayer<K>
    where
        K: Fn(&Q) -> Result<Option<Lock>, E>,
    {
        WorkLayer {
            lock,
            ready_within: READY_WITHIN.into(),
            names: None,
            on_busy: AsError,
            on_error: AsError,
        }
    }
}

impl<K, B, F> WorkLayer<K, B, F> {
    /// A request that had to wait for its lock then waits, under the lock, until the service is
    /// ready again. This is how long it waits for that. After this time the lock is released, and
    /// the request is [given back](Self::on_busy).
    ///
    /// Without this bound there could be a deadlock: a job that keeps the service busy may ask for
    /// this lock. It would wait for this request, and this request waits for the job. Default: 15
    /// s; with [`new`](WorkLayer::new), the time that the client waits for locks.
    pub fn ready_within(mut self, wait: impl Into<Wait>) -> Self {
        self.ready_within = wait.into();
        self
    }

    /// How many different names requests may lock in each period of `per`, in this process. When
    /// the period has `most` names, a request with another name is [given back](Self::on_busy),
    /// without a request to the store. Set this where others choose the names:
    /// [`LockLayer::max_names`](crate::LockLayer::max_names) has the details, and the cost of a
    /// name at each store. Default: any number.
    ///
    /// # Panics
    ///
    /// Unless both are more than zero, and `most` is at most 100 million.
    #[track_caller]
    pub fn max_names(mut self, most: usize, per: Duration) -> Self {
        self.names = Some(Arc::new(Names::at_most(most, per)));
        self
    }

    /// The answer to a request that has not reached the service, and can be repeated later. The
    /// closure gets the request back. A queue should do such a job later, and not count it as
    /// failed. The error says why:
    ///
    /// - [`Busy`](ErrorKind::Busy), [`Timeout`](ErrorKind::Timeout): others have the lock;
    /// - [`Unavailable`](ErrorKind::Unavailable) without a [name](Error::name): the service was not
    ///   [ready in time](Self::ready_within), or there are [too many names](Self::max_names).
    ///
    /// Default: the answer to [other errors](Self::on_error).
    pub fn on_busy<Q, T, E, G>(self, answer: G) -> WorkLayer<K, By<G>, F>
    where
        G: Fn(Q, Error) -> Result<T, E>,
    {
        WorkLayer {
            lock: self.lock,
            ready_within: self.ready_within,
            names: self.names,
            on_busy: By(answer),
            on_error: self.on_error,
        }
    }

    /// The answer to a request whose lock could not be taken for another reason, or was
    /// [lost](ErrorKind::Lost) while the service was at work. After a loss, [`Error::was_held`] is
    /// true: the service was stopped, and may have done a part of its work. Default: the service's
    /// own error, `From<lockcore::Error>`.
    pub fn on_error<T, E, G>(self, answer: G) -> WorkLayer<K, B, By<G>>
    where
        G: Fn(Error) -> Result<T, E>,
    {
        WorkLayer {
            lock: self.lock,
            ready_within: self.ready_within,
            names: self.names,
            on_busy: self.on_busy,
            on_error: By(answer),
        }
    }
}

/// Makes the answer to a request whose lock others have. Only [`AsError`] and [`By`] implement it.
pub trait OnBusy<Q, T, E, F> {
    #[doc(hidden)]
    fn busy(&self, request: Q, error: Error, otherwise: &F) -> Result<T, E>;
}

/// Makes the answer to a request whose lock cannot be taken, or is lost. Only [`AsError`] and
/// [`By`] implement it.
pub trait OnError<T, E> {
    #[doc(hidden)]
    fn error(&self, error: Error) -> Result<T, E>;
}

impl<Q, T, E, F: OnError<T, E>> OnBusy<Q, T, E, F> for AsError {
    fn busy(&self, _: Q, error: Error, otherwise: &F) -> Result<T, E> {
        otherwise.error(error)
    }
}

impl<Q, T, E, F, G: Fn(Q, Error) -> Result<T, E>> OnBusy<Q, T, E, F> for By<G> {
    fn busy(&self, request: Q, error: Error, _: &F) -> Result<T, E> {
        (self.0)(request, error)
    }
}

impl<T, E: From<Error>> OnError<T, E> for AsError {
    fn error(&self, error: Error) -> Result<T, E> {
        Err(error.into())
    }
}

impl<T, E, G: Fn(Error) -> Result<T, E>> OnError<T, E> for By<G> {
    fn error(&self, error: Error) -> Result<T, E> {
        (self.0)(error)
    }
}

impl<S, K: Clone, B: Clone, F: Clone> Layer<S> for WorkLayer<K, B, F> {
    type Service = WorkService<S, K, B, F>;

    fn layer(&self, inner: S) -> Self::Service {
        WorkService {
            inner,
            layer: self.clone(),
        }
    }
}

/// A service that runs each request under a lock. Made by [`WorkLayer`].
#[derive(Clone)]
pub struct WorkService<S, K, B = AsError, F = AsError> {
    inner: S,
    layer: WorkLayer<K, B, F>,
}

impl<S, Q, E, K, B, F> Service<Q> for WorkService<S, K, B, F>
where
    S: Service<Q> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send + 'static,
    S::Error: From<E> + Send + 'static,
    Q: Send + 'static,
    K: Fn(&Q) -> Result<Option<Lock>, E>,
    B: OnBusy<Q, S::Response, S::Error, F> + Clone + Send + 'static,
    F: OnError<S::Response, S::Error> + Clone + Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = WorkFuture<S::Future, S::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Q) -> Self::Future {
        let way = match (self.layer.lock)(&request) {
            Err(error) => {
                Reserved::give_back(&mut self.inner);
                Way::Answered {
                    answer: ready(Err(error.into())),
                }
            }
            Ok(None) => Way::PassThrough {
                inner: self.inner.call(request),
            },
            Ok(Some(lock)) => match self.layer.admit(&lock) {
                Ok(()) => {
                    let reserved = Reserved::take(&mut self.inner);
                    let answers = (self.layer.on_busy.clone(), self.layer.on_error.clone());
                    let wait = self.layer.ready_within;
                    Way::Locked {
                        work: Box::pin(under_lock(lock, reserved, wait, request, answers)),
                    }
                }
                Err(error) => {
                    Reserved::give_back(&mut self.inner);
                    let WorkLayer {
                        on_busy, on_error, ..
                    } = &self.layer;
                    Way::Answered {
                        answer: ready(on_busy.busy(request, error, on_error)),
                    }
                }
            },
        };
        WorkFuture { way }
    }
}

impl<K, B, F> WorkLayer<K, B, F> {
    /// Counts the name, if there is room for it. A name that is not valid is not counted, because
    /// the attempt to take its lock fails.
    fn admit(&self, lock: &Lock) -> Result<(), Error> {
        let (Some(names), Some(name)) = (&self.names, lock.name()) else {
            return Ok(());
        };
        names.admit(name).map_err(|room_in| {
            Error::unavailable(format!(
                "requests have named too many different locks, and this one names another; there is room in {}s",
                room_in.as_secs() + 1
            ))
        })
    }
}

/// If this future is dropped at any point, the inner future is dropped before the guard, because
/// the guard was created first. So the service never runs without the lock.
async fn under_lock<S, Q, B, F>(
    lock: Lock,
    mut reserved: Reserved<S>,
    ready_within: Wait,
    request: Q,
    (on_busy, on_error): (B, F),
) -> Result<S::Response, S::Error>
where
    S: Service<Q> + Clone,
    B: OnBusy<Q, S::Response, S::Error, F>,
    F: OnError<S::Response, S::Error>,
{
    let taken = reserved.until(pin!(lock.acquire())).await;
    let guard = match taken {
        Ok(guard) => guard,
        Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Timeout) => {
            return on_busy.busy(request, error, &on_error);
        }
        Err(error) => return on_error.error(error),
    };
    let work = reserved.call_within(ready_within, request, || ());
    let result = match guard.while_held(work).await {
        Ok(result) => result,
        Err(lost) => {
            AnyGuard::One(guard).give_up(&lost).await;
            return on_error.error(lost);
        }
    };
    AnyGuard::One(guard).release().await;
    match result? {
        Ok(response) => Ok(response),
        Err(NotReady(request)) => {
            let error = Error::unavailable("the service was not ready in time".to_owned());
            on_busy.busy(request, error, &on_error)
        }
    }
}

pin_project! {
    /// The future of a [`WorkService`].
    ///
    /// # Cancel safety
    ///
    /// Dropping this future drops the inner service's future first, and leaves nothing behind.
    #[must_use = "futures do nothing unless polled"]
    pub struct WorkFuture<F, T, E> {
        #[pin]
        way: Way<F, T, E>,
    }
}

pin_project! {
    #[project = WayProj]
    enum Way<F, T, E> {
        PassThrough { #[pin] inner: F },
        Locked { work: Pin<Box<dyn Future<Output = Result<T, E>> + Send>> },
        Answered { answer: Ready<Result<T, E>> },
    }
}

impl<F, T, E> Future for WorkFuture<F, T, E>
where
    F: Future<Output = Result<T, E>>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().way.project() {
            WayProj::PassThrough { inner } => inner.poll(cx),
            WayProj::Locked { work } => work.as_mut().poll(cx),
            WayProj::Answered { answer } => Pin::new(answer).poll(cx),
        }
    }
}

impl<K, B, F> fmt::Debug for WorkLayer<K, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkLayer").finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, K, B, F> fmt::Debug for WorkService<S, K, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut service = f.debug_struct("WorkService");
        service.field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for By<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("By(a function)")
    }
}

impl<F, T, E> fmt::Debug for WorkFuture<F, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkFuture").finish_non_exhaustive()
    }
}
