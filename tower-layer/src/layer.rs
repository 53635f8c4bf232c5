//! The layer and its options. `settings` applies them to a request, `service` handles a request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Response, StatusCode};
use lockcore::semaphore::Semaphore;
use lockcore::{Locks, OnLost, OnRevoke, Wait};
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
/// use lockcore_tower::{IdempotencyKey, Key, LockLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let key = Key::header_as::<IdempotencyKey>("idempotency-key").prefix("payment:");
/// let layer = LockLayer::new(locks, key)
///     .wait(Duration::from_secs(2))
///     .ttl(Duration::from_secs(5));
/// # drop(layer);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct LockLayer<R = AsItComes>(Settings, R);

impl LockLayer {
    /// A layer that locks, for each request, the name that `key` finds in the request.
    pub fn new(locks: Locks, key: Key) -> Self {
        Self::by(locks, Keys::one(key))
    }

    /// A layer that locks, for each request, all names that `keys` find in the request. A request
    /// gets all its locks, or none. Use it for requests that work on several things, such as the
    /// two accounts of a transfer.
    ///
    /// A request waits for its locks one after the other, in the order of their names, and this order
    /// is the same in all processes. So two requests never wait for each other in a circle, even if they
    /// name the same things in different orders. While a request waits for one of its locks, it
    /// holds the locks that it already has. If a name is found twice, it is locked once. If a
    /// request has no name, it passes **without a lock**.
    ///
    /// The handler finds a [`lockcore::multi::MultiHeld`] in the extensions of its request (in
    /// axum: the extractor `HeldLocks`). It contains the fencing token of each name. The extensions
    /// contain no [`lockcore::Held`].
    ///
    /// The options apply to all locks together:
    ///
    /// - There is one [wait](Self::wait) for all of them.
    /// - The [longest](Self::max_hold) and the [shortest](Self::min_hold) hold count from the grant
    ///   of the last lock.
    /// - When one lock is lost, the request is stopped, and the others are released in the
    ///   background.
    /// - The request takes its [`permits`](Self::permits) of each name.
    /// - The request counts as [waiting](Self::max_waiting) for each name.
    /// - Each name counts among the [names](Self::max_names). If one name is beyond the limit, the
    ///   names before it stay counted.
    /// - The answers of the layer have all names as `keys`. Their `key` is the name of the lock
    ///   that was not free, or was lost.
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

    /// Reads the body of a request before the layer asks for its lock. It reads at most `limit`
    /// bytes, for at most `within`, and keeps them in memory until the handler reads them. The
    /// answer to a larger body is 413, to a slower body 408, and to a body that breaks off 400. In
    /// these cases the handler is not called.
    ///
    /// A body takes at most `limit` bytes of memory while its request is being read, waits, or is
    /// being handled. So an outer layer should limit the number of requests. If
    /// [`max_waiting`](Self::max_waiting) or [`max_names`](Self::max_names) refuses a request, this
    /// happens before its body is read.
    ///
    /// Without this option, the lock is held while the handler reads the body. This takes long if
    /// the client is slow. There is another problem over HTTP/1. Hyper's server reads only a part
    /// of the body ahead. Until the handler reads the rest, the server does not notice that the
    /// client has gone. So the request stays in line, or keeps the lock. This ends when the
    /// [wait](Self::wait) is over, when the handler continues to read, or with the [longest
    /// hold](Self::max_hold).
    ///
    /// The inner service gets requests with a [`RequestBody`](crate::RequestBody); services of axum
    /// and tonic take any body. Do not use this option if a client waits for a part of the response
    /// before it sends the rest of its body: layer and client would wait for each other.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockcore_tower::{Key, LockLayer};
    ///
    /// # fn example() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let layer = LockLayer::new(locks, Key::header_as::<u64>("order-id"))
    ///     .read_body_first(64 * 1024, Duration::from_secs(10));
    /// # drop(layer);
    /// # Ok(()) }
    /// ```
    pub fn read_body_first(self, limit: usize, within: Duration) -> LockLayer<BodyFirst> {
        LockLayer(self.0, BodyFirst { limit, within })
    }
}

impl<R> LockLayer<R> {
    /// Requests with the same key take the read side of its lock. They do not exclude each other.
    /// They exclude every exclusive holder of the lock, in this service or elsewhere. Default:
    /// exclusive.
    pub fn shared(mut self) -> Self {
        self.0.side = Side::Shared;
        self
    }

    /// Requests with a safe method (GET, HEAD, OPTIONS, TRACE) take the read side of the lock, and
    /// all others take the write side. Default: every request that takes a lock takes it
    /// exclusively.
    pub fn read_on_get(mut self) -> Self {
        self.0.side = Side::SharedIfSafe;
        self
    }

    /// OPTIONS requests pass **without a lock**, whatever their headers and their body are. Set it
    /// if the service itself answers the preflight requests of browsers, which have no
    /// `Idempotency-Key` and no user, and if no handler does work for an OPTIONS request. A handler
    /// of `any(…)` and a gRPC server ignore the method.
    ///
    /// A CORS layer around this layer answers preflight requests itself, so it does not need this
    /// option. Default: an OPTIONS request takes its lock as every other request does.
    pub fn pass_options(mut self) -> Self {
        self.0.pass_options = true;
        self
    }

    /// Each request takes `permits` of the `of` permits that its key has. So at most `of / permits`
    /// requests for a key are handled at once, over all processes. All users of a name must state
    /// the same `of`. A semaphore is not the mutex of the same name: while one of the two is in
    /// use, the answer to requests for the other is 500.
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

    /// How long a request waits for its lock before the layer answers with 409. Default: the wait
    /// of the lock client (`LOCK_WAIT`, 15 s). If the HTTP client goes away, its request stops
    /// waiting as soon as the [server notices](crate#clients-that-go-away).
    ///
    /// A gRPC request may have a deadline (`grpc-timeout`). In this case the wait for the lock ends
    /// before the deadline, so that the answer can reach the client in time. It ends earlier by a
    /// tenth of the remaining time, but by at most 50 ms. The deadline applies to the whole call.
    /// When it has passed, the layer stops the handler or the stream and releases the lock, and the
    /// call ends with DEADLINE_EXCEEDED. With [`OnLost::Signal`](Self::on_lost) the call continues,
    /// and keeps its lock.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.0.wait = Some(wait.into());
        self
    }

    /// Whether the [wait](Self::wait) also covers times in which the store is out of reach or refuses
    /// requests: see [`Lock::through_outages`](lockcore::Lock::through_outages). If `false`, the
    /// answer is 503 within one operation timeout, and requests do not pile up. If `true`, a request
    /// waits until the store is back, for as long as the wait or its client's deadline allows. Default: the setting of the
    /// lock client (`LOCK_THROUGH_OUTAGES`), which is false.
    pub fn through_outages(mut self, yes: bool) -> Self {
        self.0.through_outages = Some(yes);
        self
    }

    /// Answers 409 at once when the lock is not free: a wait of zero.
    pub fn try_only(self) -> Self {
        self.wait(Duration::ZERO)
    }

    /// A header in which HTTP clients say how many milliseconds they will wait for the answer, such
    /// as `x-envoy-expected-rq-timeout-ms`. Like `grpc-timeout`, it bounds the wait for the lock,
    /// but it does not end the hold. A value that is not a number is ignored. Default: none,
    /// because the service must know that its clients, or its own proxy, set the header.
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

    /// How many requests may wait for the same key in this process. A request counts as waiting
    /// from the time at which it asks for the lock until it has the lock. When `most` requests
    /// wait, a further request does not wait: it gets the lock at once, or 409. With
    /// [`read_body_first`](Self::read_body_first), a further request for an exclusive lock always
    /// gets 409, and its body is not read. The exception is a `most` of 0: the body is read even
    /// so. Default: any number.
    pub fn max_waiting(mut self, most: usize) -> Self {
        self.0.waiters = Some(Arc::new(Waiters::at_most(most)));
        self
    }

    /// How many different names requests may lock in each period of `per`, in this process. When
    /// the period has `most` names, a request with another name gets a [503](crate#lock-names).
    /// Requests for the names of this period are not affected. Each period begins without names.
    ///
    /// Set this option where clients choose the names, as in an `Idempotency-Key`. One client that
    /// makes up names can use up the whole number. Then requests of other clients with new names
    /// are refused until the period ends. So put the layer behind authentication, or behind a limit
    /// for each client. Default: any number. The usual number depends on the service, and a number
    /// that is too low refuses clients at the busiest time.
    ///
    /// **The store remembers each name after its lock is released**, because a later holder must
    /// get a greater token. The cost depends on the store:
    ///
    /// | store | cost of a name after its last use |
    /// |---|---|
    /// | memory | nothing |
    /// | Redis | 130 to 200 bytes of memory for names of 16 to 80 bytes, for a day |
    /// | SQLite | a row: about 50 bytes and twice the name, for at least a day; after that its space in the file is used again |
    /// | ZooKeeper | an empty node, until the server removes it: once a minute, at most 10,000 |
    /// | etcd | nothing, after the servers have compacted the revisions of its use |
    /// | PostgreSQL, MySQL | a row with the name, for a day |
    ///
    /// So a store keeps the names of a day, and a client that makes up names can fill the store.
    /// With `max_names(10_000, hour)` in each of 4 processes there are at most a million names,
    /// because a day touches 25 such hours. A million names take 200 MB in Redis.
    ///
    /// Clones of the layer, and all services that they make, share one count. The count takes 4
    /// bytes of memory for each of the `most` names, from the beginning. About one new name in a
    /// million is mistaken for a known name, and is not counted. The first refusal of each period
    /// is logged as a warning.
    ///
    /// # Panics
    ///
    /// Unless both are more than zero, and `most` is at most 100 million.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use lockcore_tower::{IdempotencyKey, Key, LockLayer};
    ///
    /// # fn example(locks: lockcore::Locks) {
    /// let key = Key::header_as::<IdempotencyKey>("idempotency-key").prefix("payment:");
    /// let layer = LockLayer::new(locks, key)
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
    /// ttl of the lock client (`LOCK_TTL`, 10 s). The ttl does not limit the request, because the
    /// lease is renewed until the response has ended.
    ///
    /// If the store does not accept the ttl, the answer to each request is 500.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = Some(ttl);
        self
    }

    /// The shortest time that the lock stays taken after its grant, even if the response ends
    /// before. No request that the lock excludes is handled in this time, in any process. A read
    /// lock stays a read lock, and permits stay permits. The response does not wait for the end of
    /// this time, and the client's deadline does not shorten this time. If this time is longer than
    /// [`max_hold`](Self::max_hold), the answer to each request is 500. See
    /// [`Lock::min_hold`](lockcore::Lock::min_hold). Default: zero.
    pub fn min_hold(mut self, least: Duration) -> Self {
        self.0.min_hold = least;
        self
    }

    /// The longest time that a request keeps the lock after its grant. After this time the lock is
    /// lost, and the request is stopped as after any loss. Use it against clients that read a
    /// response for ever, or stop reading. With [`OnLost::Signal`] the response continues, and the key is free
    /// when the rest of the lease has run out. Default: no limit.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.0.max_hold = Some(limit);
        self
    }

    /// How long the lock stays with this process after the response, if nobody waits for it, so that
    /// the next request with the same key gets it without a request to the store. For keys whose
    /// requests are routed to the same process. If it is longer than a second, the answer to each
    /// request is 500. See [`Lock::linger`](lockcore::Lock::linger), also for what it costs. Default:
    /// that of the lock client (`LOCK_LINGER`), which is zero.
    pub fn linger(mut self, time: Duration) -> Self {
        self.0.linger = Some(time);
        self
    }

    /// Sets what happens to a request whose lock is lost. With [`OnLost::Signal`], handler and body
    /// continue, and can learn of the loss by [`Held::lost`](lockcore::Held::lost). Default:
    /// [`OnLost::Cancel`], which stops handler and body. A body is dropped even if the server does
    /// not poll it, because its client reads nothing. For this, a body with more than two parts has
    /// a separate task.
    pub fn on_lost(mut self, policy: OnLost) -> Self {
        self.0.on_lost = policy;
        self
    }

    /// Sets what happens to a request when somebody asks for its lock with
    /// [`Locks::revoke`](lockcore::Locks::revoke).
    ///
    /// - With [`OnRevoke::Finish`], handler and body may continue for the grace: the time that the
    ///   caller of `revoke` gives. They learn of this by
    ///   [`Held::revoked`](lockcore::Held::revoked). When the grace is over, the lock is lost, and
    ///   [`on_lost`](Self::on_lost) says what happens.
    /// - With [`OnRevoke::Cancel`], handler and body are stopped as soon as this process learns
    ///   that somebody asks for the lock, as after a loss. The HTTP client gets the answer when the
    ///   lock is released, or when the store has not answered for one operation timeout. `Cancel`
    ///   also drops a body that the server does not poll. For this, a body with more than two parts
    ///   has a separate task.
    ///
    /// Default: [`OnRevoke::Finish`].
    pub fn on_revoke(mut self, policy: OnRevoke) -> Self {
        self.0.on_revoke = policy;
        self
    }

    /// Whether a request may re-enter a lock that is already held around it, for example by an
    /// outer layer. If `false`, the answer to a request that would have to re-enter is 500.
    /// Default: true.
    pub fn reentrant(mut self, yes: bool) -> Self {
        self.0.reentrant = yes;
        self
    }

    /// The label of the locks in traces and in [metrics](lockcore::guide::metrics), which is the same
    /// for all requests: see [`Lock::label`](lockcore::Lock::label). Default: the template of the key
    /// without the types of its values, such as `order:{path.id}`, also for
    /// `Key::path_as::<u64>("id").prefix("order:")`. With [several keys](Self::all), their templates
    /// with `, ` between them. There is no label if a function makes a part of a name
    /// ([`Key::from_fn`], [`Key::extension`]), or after 1,000 different templates in one process.
    pub fn label(mut self, label: &'static str) -> Self {
        self.0.label = Some(label);
        self
    }

    /// The status of the answer when another request holds the lock, such as 423 (`LOCKED`) or 429.
    /// gRPC clients always get ABORTED. Default: 409.
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

    /// After how long a client that did not get the lock should try again. The answer has this time
    /// in the header `Retry-After`, in seconds, rounded up. If the layer knows that the lock will
    /// be free sooner, the answer has the shorter time. Default: 1 s, because most locks are held
    /// for less.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.0.answers.retry_after = after;
        self
    }

    /// Removes the names of locks from the answers: there is no member `key` or `keys`, and the
    /// gRPC message does not name the lock. Use this for names that clients should not learn. This
    /// option does not change the answers of handlers that take locks themselves. There, `Problem`
    /// and `status` name the lock; `ProblemWithoutKey` and `status_without_key` do not. Default:
    /// the answers have the names, so that clients know which of their requests excluded each
    /// other.
    pub fn hide_key(mut self) -> Self {
        self.0.answers.name_key = false;
        self
    }

    /// Sets a function that makes the responses to HTTP requests that the layer [refuses or
    /// stops](crate#answers), with a body, headers and a status of your choice. The layer adds
    /// `Retry-After` unless `make` sets it. Do not choose a status of success: the client would
    /// believe that its request was handled. gRPC clients always get a gRPC status. Default: an
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

    /// Adds the fencing token of an exclusive lock to the response, in the header
    /// `lock-fencing-token`. If the handler or an inner layer has set this header, the layer does
    /// not change it. Read locks and permits have no fencing token, so their responses get no
    /// header. A layer that takes [several locks](Self::all) adds no header either, because the
    /// header does not say to which lock a token belongs.
    pub fn token_header(mut self) -> Self {
        self.0.token_header = true;
        self
    }

    /// Until when the lock is kept. Default: [`HoldUntil::BodyEnd`], because a body may read data
    /// that the lock protects while the server sends it.
    pub fn hold_until(mut self, end: HoldUntil) -> Self {
        self.0.hold_until = end;
        self
    }

    /// Sets what happens to a request that takes a lock and may become an upgraded connection: a
    /// request that offers a web socket in the header `Upgrade`, or a CONNECT. The layer ignores
    /// other values of the header, as HTTP demands. If a handler answers 101 to a request with
    /// another value, the layer replaces the answer. Default: [`Upgrades::Refuse`], because the
    /// lock ends with the 101, and the upgraded connection would run without the lock.
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
