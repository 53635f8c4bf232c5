//! The layer and its options. `settings` applies them to a request, `service` handles a request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Response, StatusCode};
use lockcore::{Locks, OnLost, OnRevoke, Semaphore, Wait};
use tower_layer::Layer;

use crate::header;
use crate::key::Key;
use crate::keys::Keys;
use crate::names::Names;
use crate::read::{AsItComes, BodyFirst};
use crate::refusal::Refusal;
use crate::service::LockService;
use crate::settings::{HoldUntil, Settings, Side, Upgrades};
use crate::waiters::Waiters;

/// Takes a lock for every request of a service: see the [crate's page](crate).
///
/// ```
/// use std::time::Duration;
///
/// use lockcore_tower::{Key, LockLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let layer = LockLayer::new(locks, Key::header("idempotency-key").prefix("payment:"))
///     .wait(Duration::from_secs(2))
///     .ttl(Duration::from_secs(5));
/// # drop(layer);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct LockLayer<R = AsItComes>(Settings, R);

impl LockLayer {
    /// Locks, for each request, the name that `key` finds in it.
    pub fn new(locks: Locks, key: Key) -> Self {
        Self::by(locks, Keys::one(key))
    }

    /// Locks, for each request, all names that `keys` find in it, or none of them. For requests that work on several
    /// things, such as the two accounts of a transfer.
    ///
    /// The locks are taken one after the other, in the order of their names, in all processes: two requests that want
    /// some of the same names in different orders do not wait for each other in a circle. A request that waits for one
    /// of its locks keeps those that it already has. A name that is found twice is locked once. A request with no name
    /// passes **without a lock**.
    ///
    /// The handler finds a [`lockcore::MultiHeld`] in the extensions of its request (in axum: the extractor
    /// `MultiHeld`), which has the fencing token of each name; there is no [`lockcore::Held`].
    ///
    /// The options apply to all locks together. The [wait](Self::wait) is one for all. The [longest](Self::max_hold)
    /// and the [shortest](Self::min_hold) hold count from when the last was granted. When one lock is lost, the request
    /// is stopped, and the others are given back in the background. [`permits`](Self::permits) are taken of each. A
    /// request counts as [waiting](Self::max_waiting) for each of its names, and each counts among the
    /// [names](Self::max_names). If there is no room for one of the names, the names before it stay counted. The
    /// answers of the layer have all names as `keys`, and as `key` the one that was not free, or was lost.
    ///
    /// See [`Locks::all`].
    ///
    /// # Panics
    ///
    /// If `keys` is an empty list.
    ///
    /// ```
    /// use lockcore_tower::{Key, LockLayer};
    ///
    /// # fn example() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// // POST /transfers?from=7&to=3
    /// let accounts = ["from", "to"].map(|id| Key::query_as::<u64>(id).prefix("account:"));
    /// let both_accounts = LockLayer::all(locks, accounts);
    /// # drop(both_accounts);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn all(locks: Locks, keys: impl Into<Keys>) -> Self {
        let keys = keys.into();
        assert!(
            !keys.are_none(),
            "a layer without keys would let every request pass without a lock"
        );
        Self::by(locks, keys)
    }

    fn by(locks: Locks, keys: Keys) -> Self {
        Self(Settings::new(locks, keys), AsItComes)
    }

    /// Reads the body of a request before the layer asks for its lock. It reads at most `limit` bytes, for at most
    /// `within`, and keeps them in memory until the handler reads them. A larger body is answered with 413, a slower
    /// one with 408, and one that breaks off with 400. The handler is not called then.
    ///
    /// The bodies take at most `limit` bytes of memory for each request that is being read, waits, or is being handled.
    /// A layer further out should limit the number of requests. A request is refused before its body is read if
    /// [`max_waiting`](Self::max_waiting) or [`max_names`](Self::max_names) will refuse it.
    ///
    /// Without this option, the lock is held while the handler reads the body, and a slow client makes that long.
    /// And over HTTP/1 a client that goes away stays in line, or keeps the lock: hyper's server reads some
    /// of the body ahead, and does not look at the connection while the rest is not read. This ends when the
    /// [wait](Self::wait) is over, when the handler reads on, or with the [longest hold](Self::max_hold).
    ///
    /// The inner service gets requests with a [`RequestBody`](crate::RequestBody); services of axum and tonic take any
    /// body. Do not use this for calls whose client waits for a part of the response before it sends the rest of its
    /// body: layer and client would wait for each other.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockcore_tower::{Key, LockLayer};
    ///
    /// # fn example() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let layer = LockLayer::new(locks, Key::header("idempotency-key"))
    ///     .read_body_first(64 * 1024, Duration::from_secs(10));
    /// # drop(layer);
    /// # Ok(()) }
    /// ```
    pub fn read_body_first(self, limit: usize, within: Duration) -> LockLayer<BodyFirst> {
        LockLayer(self.0, BodyFirst { limit, within })
    }
}

impl<R> LockLayer<R> {
    /// Requests with the same key take the read side of its lock. They do not exclude each other; they do exclude
    /// whatever takes the lock exclusively, here or elsewhere. Default: exclusive.
    pub fn shared(mut self) -> Self {
        self.0.side = Side::Shared;
        self
    }

    /// Requests with a safe method (GET, HEAD, TRACE) take the read side of the lock, all others the
    /// write side. OPTIONS takes no lock, as always. Default: all are exclusive.
    pub fn read_on_get(mut self) -> Self {
        self.0.side = Side::SharedIfSafe;
        self
    }

    /// Each request takes `permits` of the `of` permits that its key has, so that at most
    /// `of / permits` of them are handled at once, over all processes. All users of a name must
    /// give the same `of`. A semaphore is not the mutex of the same name: while one of the two is in
    /// use, requests for the other are answered with 500.
    ///
    /// # Panics
    ///
    /// Unless `permits` is 1 to `of`, and `of` at most [`Semaphore::MAX_PERMITS`].
    #[track_caller]
    pub fn permits(mut self, permits: u32, of: u32) -> Self {
        assert!(
            (1..=of).contains(&permits) && of <= Semaphore::MAX_PERMITS,
            "{permits} of {of} permits: the first is 1 to the second, and that at most {}",
            Semaphore::MAX_PERMITS
        );
        self.0.side = Side::Permits(permits, of);
        self
    }

    /// How long a request waits in line before it is answered with 409. Default: the client's
    /// (`LOCK_WAIT`, 15 s). A client that goes away leaves the line as soon as the
    /// [server notices](crate#clients-that-go-away).
    ///
    /// A gRPC request with a deadline (`grpc-timeout`) waits no longer than that, less the time in which the answer can
    /// still reach the client: a tenth of the deadline, at most 50 ms. The deadline is for the whole call. Once it has
    /// passed, the handler or the stream is stopped, the lock is released, and the call ends with DEADLINE_EXCEEDED.
    /// With [`OnLost::Signal`](Self::on_lost) the call goes on, and keeps its lock.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.0.wait = Some(wait.into());
        self
    }

    /// Answers 409 at once when the lock is not free: a wait of zero.
    pub fn try_only(self) -> Self {
        self.wait(Duration::ZERO)
    }

    /// A header in which HTTP clients say how many milliseconds they will wait for the answer, such as
    /// `x-envoy-expected-rq-timeout-ms`. It bounds the wait for the lock, as `grpc-timeout` does, but it does not end
    /// the hold. A value that is not a number is ignored. Default: none, because the service must know that its
    /// clients, or its own proxy, set the header.
    ///
    /// # Panics
    ///
    /// If `name` cannot be the name of a header.
    #[track_caller]
    pub fn deadline_header<N>(mut self, name: N) -> Self
    where
        N: TryInto<HeaderName, Error: std::fmt::Display>,
    {
        match header::named(name) {
            Ok(name) => self.0.deadline_header = Some(name),
            Err(mistake) => panic!("{mistake}"),
        }
        self
    }

    /// How many requests may wait for the same key in this process. Further requests do not wait: they
    /// get the lock at once, or 409. A request counts from when it asks until it has the lock. Where bodies are
    /// [read first](Self::read_body_first), a further request that wants the lock exclusively always gets 409, and its
    /// body is not read; with a `most` of 0 it is read. Default: any number.
    pub fn max_waiting(mut self, most: usize) -> Self {
        self.0.waiters = Some(Arc::new(Waiters::at_most(most)));
        self
    }

    /// How many different names requests may lock in each period of `per`, in this process. A request that names a
    /// further one is answered with [503](crate#lock-names); requests for names that were locked before in this period
    /// are not affected. Each period begins with no names. Set this where clients choose the names, as in an
    /// `Idempotency-Key`. A client that makes up names can use up the whole number, and so keep out new names of others
    /// until the period ends: put the layer behind authentication, or behind a limit for each client. Default: any
    /// number, because how many are usual depends on the service, and too low a number refuses clients at the busiest
    /// time.
    ///
    /// **Each name costs the store something after its lock is released**, so that a later holder gets a greater
    /// token:
    ///
    /// | store | a name that nobody uses any more |
    /// |---|---|
    /// | memory | nothing |
    /// | Redis | 130 to 200 bytes of memory for names of 16 to 80 bytes, for a day |
    /// | SQLite | a row: about 50 bytes and twice the name, for a day at least; its space in the file is used again |
    /// | ZooKeeper | an empty node, until the server removes it: once a minute, at most 10,000 |
    ///
    /// So a store keeps the names of a day, and a client that makes up names can fill it. With `max_names(10_000,
    /// hour)` in each of 4 processes there are a million names at most, because a day touches 25 such hours: 200 MB of
    /// a Redis.
    ///
    /// Clones of the layer, and all services that are made by them, count together. The count takes 4 bytes of memory
    /// for each of the `most` names, from the beginning on. About one new name of a million is taken for a known one,
    /// and is not counted. The first refusal of each period is logged as a warning.
    ///
    /// # Panics
    ///
    /// Unless both are more than zero, and `most` is at most 100 million.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockcore_tower::{Key, LockLayer};
    ///
    /// # fn example(locks: lockcore::Locks) {
    /// let layer = LockLayer::new(locks, Key::header("idempotency-key").prefix("payment:"))
    ///     .max_names(10_000, Duration::from_secs(3600));
    /// # drop(layer);
    /// # }
    /// ```
    #[track_caller]
    pub fn max_names(mut self, most: usize, per: Duration) -> Self {
        self.0.names = Some(Arc::new(Names::at_most(most, per)));
        self
    }

    /// The length of the lease: how long the key stays locked if this process dies. Default: the
    /// client's (`LOCK_TTL`, 10 s). It does not limit the request: the lease is renewed as long as
    /// the response lasts.
    ///
    /// With a ttl that the store does not take, requests are answered with 500.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = Some(ttl);
        self
    }

    /// The shortest time that the lock stays taken after it was granted, even if the response ends before: no request
    /// that it excludes is handled in this time, in any process. A read side or permits stay taken as such. The
    /// response does not wait for this time, and the client's deadline does not end it. If it is longer than
    /// [`max_hold`](Self::max_hold), requests are answered with 500. See [`Lock::min_hold`](lockcore::Lock::min_hold).
    /// Default: zero.
    pub fn min_hold(mut self, least: Duration) -> Self {
        self.0.min_hold = least;
        self
    }

    /// The longest time that a request keeps the lock after it was granted. Then the lock is lost, and the
    /// request is stopped as by any loss. This is for clients that read a response for ever, and for those that
    /// stop reading: a body that the server does not poll any more is dropped by a task of its own. With
    /// [`OnLost::Signal`] the response goes on, and the key is free when the rest of the lease has run
    /// out. Default: no limit.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.0.max_hold = Some(limit);
        self
    }

    /// Sets what happens to a request whose lock is lost. With [`OnLost::Signal`], handler and body go on,
    /// and learn of the loss by [`Held::lost`](lockcore::Held::lost). Default: [`OnLost::Cancel`], they are stopped.
    pub fn on_lost(mut self, policy: OnLost) -> Self {
        self.0.on_lost = policy;
        self
    }

    /// Sets what happens to a request when somebody asks for its lock ([`Locks::revoke`](lockcore::Locks::revoke)).
    /// With [`OnRevoke::Finish`], handler and body go on for the time that they are given, and learn of it by
    /// [`Held::revoked`](lockcore::Held::revoked). Then the lock is lost, and [`on_lost`](Self::on_lost) decides. With
    /// [`OnRevoke::Cancel`] they are stopped as soon as this process learns of it, as by a loss. The client gets the
    /// answer when the lock is released, or when the store has not answered for one operation timeout. This also drops
    /// a body that the server does not poll: if it has not ended within its first two parts, a task of its own waits
    /// for the request. Default: [`OnRevoke::Finish`].
    pub fn on_revoke(mut self, policy: OnRevoke) -> Self {
        self.0.on_revoke = policy;
        self
    }

    /// Whether a request may re-enter a lock that is already held around it, by an outer layer for example. If not,
    /// such a request is answered with 500. Default: true.
    pub fn reentrant(mut self, yes: bool) -> Self {
        self.0.reentrant = yes;
        self
    }

    /// A name for traces that is the same for all keys, such as `order:{id}`. Default: none.
    pub fn label(mut self, label: &'static str) -> Self {
        self.0.label = Some(label);
        self
    }

    /// The status of the answer when another request holds the lock, such as 423 (`LOCKED`) or 429. gRPC clients always
    /// get ABORTED. Default: 409.
    ///
    /// # Panics
    ///
    /// If the status is not 4xx or 5xx: the request has not been handled.
    #[track_caller]
    pub fn busy_status(mut self, status: StatusCode) -> Self {
        assert!(
            status.is_client_error() || status.is_server_error(),
            "{status} does not tell the client that its request was not handled"
        );
        self.0.answers.busy_status = status;
        self
    }

    /// When a client that did not get the lock should try again: the header `Retry-After`, in
    /// seconds, rounded up. It is less if the lock is known to be free sooner. Default: 1 s, because most locks
    /// are held for less.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.0.answers.retry_after = after;
        self
    }

    /// Keeps the names of locks out of the answers: there is no member `key` or `keys`, and the message of gRPC does
    /// not name the lock. For names that clients should not learn. This does not change the answers of handlers that
    /// take locks themselves: `Problem` and `status` name the lock, `ProblemWithoutKey` and `status_without_key` do
    /// not. Default: answers have the names, so that clients know which of their requests excluded each other.
    pub fn hide_key(mut self) -> Self {
        self.0.answers.name_key = false;
        self
    }

    /// Makes the responses to HTTP requests that the layer [refuses or stops](crate#answers), with a body, headers and
    /// a status of your choice. The layer adds `Retry-After` unless `make` sets it. Do not choose a status of success:
    /// the client would believe that its request was handled. gRPC clients always get the status of gRPC. Default: an
    /// `application/problem+json`.
    ///
    /// ```
    /// use http::Response;
    /// use lockcore_tower::{Key, LockLayer};
    ///
    /// # fn example(locks: lockcore::Locks) {
    /// let layer = LockLayer::new(locks, Key::header_as::<u64>("order-id")).refuse_with(|refusal| {
    ///     let mut response = Response::new(format!("<h1>{}</h1>", refusal.title()));
    ///     *response.status_mut() = refusal.status();
    ///     response
    /// });
    /// # drop(layer);
    /// # }
    /// ```
    pub fn refuse_with<B: Into<Bytes>>(
        mut self,
        make: impl Fn(Refusal<'_>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        self.0.answers.make_with(make);
        self
    }

    /// Adds the fencing token to the response, as `lock-fencing-token`, where the lock is exclusive
    /// (tokens of shared locks and permits cannot fence), unless the handler or an inner layer has set that header. A
    /// layer that takes [several locks](Self::all) adds none, because the header would not say which lock it is of.
    pub fn token_header(mut self) -> Self {
        self.0.token_header = true;
        self
    }

    /// Until when the lock is kept. Default: [`HoldUntil::BodyEnd`], because a body may still read data that
    /// the lock protects while it is sent.
    pub fn hold_until(mut self, end: HoldUntil) -> Self {
        self.0.hold_until = end;
        self
    }

    /// Sets what happens to a request that would be locked and may become an upgraded connection: one that
    /// offers a web socket in the header `Upgrade`, or a CONNECT. Other values of the header are
    /// ignored, as HTTP demands; if a handler answers such a request with 101, the layer replaces the answer.
    /// Default: [`Upgrades::Refuse`], because the lock ends with the 101, and what follows would run without it.
    pub fn upgrades(mut self, policy: Upgrades) -> Self {
        self.0.upgrades = policy;
        self
    }
}

impl<S, R: Clone> Layer<S> for LockLayer<R> {
    type Service = LockService<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, Arc::new(self.0.clone()), self.1.clone())
    }
}
