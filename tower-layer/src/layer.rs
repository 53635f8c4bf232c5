//! The layer: what users tell it. What that means for a request is in `settings`, what happens to one in `service`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Response, StatusCode};
use lockcore::{FULL, Locks, OnLost, Wait};
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

/// Puts a lock around every request of a service: see the [crate's page](crate).
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

    /// Locks, for each request, all names that `keys` find in it, or none of them: for work on several things at once,
    /// such as the two accounts of a transfer.
    ///
    /// The locks are taken one after the other, in the order of their names, in all processes: two requests that want
    /// some of the same names in different orders do not wait for each other in a circle. A request that waits for one
    /// of its locks keeps those that it already has. A name that is found twice is locked once. A request with no name
    /// passes **without a lock**.
    ///
    /// The handler finds a [`lockcore::MultiHeld`] in the extensions of its request (in axum: the extractor `MultiHeld`),
    /// which has the fencing token of each name; there is no [`lockcore::Held`].
    ///
    /// The options apply to all locks together. The [wait](Self::wait) is one for all. The [longest](Self::max_hold) and
    /// the [shortest](Self::min_hold) hold count from when the last was granted. When one lock is lost, the request is
    /// stopped and the others are given back. [`permits`](Self::permits) are taken of each. A request counts as
    /// [waiting](Self::max_waiting) for each of its names, and each counts among the [names](Self::max_names). The answers
    /// of the layer have all names as `keys`, and as `key` the one that was not free, or was lost.
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

    /// Reads the body of a request before its lock is asked for: up to `limit` bytes, which are kept in
    /// memory until the handler reads them, and for as long as `within`. A longer body is answered with
    /// 413, a slower one with 408, and one that breaks off with 400; the handler is not called then.
    ///
    /// At most, the bodies take `limit` bytes for each request under way: being read, waiting, or being handled. Limit
    /// how many there are further out. A request is refused before its body is read if [as many wait](Self::max_waiting)
    /// for its key as may, or if its key is [one too many](Self::max_names).
    ///
    /// Without this, the lock is held while the handler reads the body, as slowly as the client sends it.
    /// And over HTTP/1 a client that goes away stays in line, or keeps the lock: hyper's server reads some
    /// of the body ahead, and does not look at the connection while there is more that nobody reads. That is
    /// so until the [wait](Self::wait) is over, the handler reads on, or the [longest hold](Self::max_hold)
    /// ends it.
    ///
    /// The service that is locked gets its requests with a [`RequestBody`](crate::RequestBody); those of axum and tonic take
    /// any. Not for calls whose client sends and receives in turns: they would wait for each other.
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
    /// Requests with the same key take the read side of its lock: they do not exclude each other, but
    /// those that take it exclusively, here or elsewhere. Default: exclusive.
    pub fn shared(mut self) -> Self {
        self.0.side = Side::Shared;
        self
    }

    /// Requests with a safe method (GET, HEAD, TRACE) take the read side of the lock, all others the
    /// write side; OPTIONS takes none, as ever. Default: all are exclusive.
    pub fn read_on_get(mut self) -> Self {
        self.0.side = Side::SharedIfSafe;
        self
    }

    /// Each request takes `permits` of the `of` permits that its key has, so that at most
    /// `of / permits` of them are handled at once, over all processes. Everybody who uses the name must
    /// state the same `of`; it is another lock than the mutex on that name, and while one of them is in
    /// use the other is answered with 500.
    ///
    /// # Panics
    ///
    /// Unless `permits` is 1 to `of`, and `of` is less than 2³⁰.
    #[track_caller]
    pub fn permits(mut self, permits: u32, of: u32) -> Self {
        assert!(
            (1..=of).contains(&permits) && of < FULL.get(),
            "{permits} of {of} permits: the first is 1 to the second, and that less than {FULL}"
        );
        self.0.side = Side::Permits(permits, of);
        self
    }

    /// How long a request waits in line before it is answered with 409. Default: the client's
    /// (`LOCK_WAIT`, 15 s). A client that goes away leaves the line as soon as the
    /// [server notices](crate#clients-that-go-away).
    ///
    /// A gRPC request that comes with a deadline (`grpc-timeout`) waits no longer than that, less a
    /// tenth, 50 ms at most, in which the answer can still reach the client. The deadline is for the
    /// whole call: once it has passed, the call keeps no lock. A handler, or a stream, that goes on then
    /// is stopped and answered with DEADLINE_EXCEEDED, unless it is to [go on](Self::on_lost) without
    /// its lock.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.0.wait = Some(wait.into());
        self
    }

    /// Answers 409 at once when the lock is not free: a wait of zero.
    pub fn try_only(self) -> Self {
        self.wait(Duration::ZERO)
    }

    /// A header in which HTTP clients say how many milliseconds they will wait for the answer, as
    /// `x-envoy-expected-rq-timeout-ms`; it bounds the wait as `grpc-timeout` does, and nothing else. What is no
    /// number is no deadline. Default: none, because only a header that the client or a proxy of yours
    /// sets is to be trusted with it.
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

    /// How many requests may wait for the same key in this process; those beyond it do not wait: they
    /// get the lock at once, or 409. A request counts from when it asks until it has the lock. Where bodies are
    /// [read first](Self::read_body_first), one beyond them that wants the lock exclusively gets 409 in any case, and its
    /// body is not read; if nobody may wait (`most` is 0), it is read. Default: any number.
    pub fn max_waiting(mut self, most: usize) -> Self {
        self.0.waiters = Some(Arc::new(Waiters::at_most(most)));
        self
    }

    /// How many different names requests may lock in each stretch of `per`, in this process. Requests that name a
    /// further one are answered with [503](crate#lock-names), and those with names that were there before go on as
    /// ever; until the next stretch begins, with no name in it. A client that makes up names can use all of them up, and
    /// keep those of others out that long: put the layer behind authentication, or a limit for each client. Say it where clients choose the names, as in an
    /// `Idempotency-Key`. Default: any number, because how many are ordinary depends on the service, and too few would
    /// turn clients away when there are most of them.
    ///
    /// **Each name costs the store something after its lock is released**, so that a later holder gets a greater
    /// token:
    ///
    /// | store | a name that nobody uses any more |
    /// |---|---|
    /// | memory | nothing |
    /// | Redis | 340 to 370 bytes of memory for names of 16 to 80 bytes, for a day |
    /// | SQLite | a row: about 50 bytes and twice the name, for a day at least; its space in the file is used again |
    /// | ZooKeeper | an empty node, until the server removes it: once a minute, at most 10,000 |
    ///
    /// So a store is left with what requests name in a day, and a client that makes up names can fill it. With
    /// `max_names(10_000, hour)` in each of 4 processes it is left with a million names at most, as a day touches 25 such
    /// hours: at a Redis these are 370 MB.
    ///
    /// Clones of the layer, and all services that are made by them, count together. A name takes 4 bytes, which are
    /// there from the beginning, and no mutex. One new name of a million is taken for one that was there before,
    /// and is not counted. When requests are refused for the first time in a stretch, that is told at the level of
    /// warnings.
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
    /// One that the store does not take is answered with 500.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = Some(ttl);
        self
    }

    /// The lock stays taken for this long from when it was granted, even if the response has ended before: no request
    /// that it excludes is handled in this time, in any process. Where requests share the lock or take permits of it,
    /// that is what stays taken. The response does not wait for it, nor does the client's deadline end it. See
    /// [`Lock::min_hold`](lockcore::Lock::min_hold); one that is longer than [`max_hold`](Self::max_hold) is answered with 500. Default: zero.
    pub fn min_hold(mut self, least: Duration) -> Self {
        self.0.min_hold = least;
        self
    }

    /// The longest time that a request keeps the lock, from when it gets it; then it is lost, and the
    /// request is stopped as by any loss. For clients that read a response for ever, and for those that
    /// stop reading: a body that nobody asks for more is dropped too, by a task of its own. With
    /// [`OnLost::Signal`] the response goes on, and the key is free when the rest of the lease has run
    /// out. Default: no limit.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.0.max_hold = Some(limit);
        self
    }

    /// What happens to a request whose lock is lost. With [`OnLost::Signal`] handler and body go on,
    /// and `Held::lost` tells them. Default: [`OnLost::Cancel`], they are stopped.
    pub fn on_lost(mut self, policy: OnLost) -> Self {
        self.0.on_lost = policy;
        self
    }

    /// Whether a request whose caller holds the same lock already, as another layer around this one
    /// does, is handled under that. If not, it is answered with 500. Default: true.
    pub fn reentrant(mut self, yes: bool) -> Self {
        self.0.reentrant = yes;
        self
    }

    /// A name for traces that does not vary with the key, as `order:{id}`. Default: none.
    pub fn label(mut self, label: &'static str) -> Self {
        self.0.label = Some(label);
        self
    }

    /// The status of the answer when the lock is held by another, as 423 (`LOCKED`) or 429. Default:
    /// 409. gRPC clients are told ABORTED in any case.
    ///
    /// # Panics
    ///
    /// If the status is not one of an error: the request has not been handled.
    #[track_caller]
    pub fn busy_status(mut self, status: StatusCode) -> Self {
        assert!(
            status.is_client_error() || status.is_server_error(),
            "{status} does not tell the client that its request was not handled"
        );
        self.0.answers.busy_status = status;
        self
    }

    /// When a client should try again that is refused for want of the lock: the header `Retry-After`, in
    /// seconds, rounded up; less if the lock is known to be free before. Default: 1 s, because most locks
    /// are held for less, and nobody is woken.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.0.answers.retry_after = after;
        self
    }

    /// Keeps the names of locks out of the answers: no member `key` or `keys`, and none in the message of gRPC. For names
    /// that clients should not learn. It does not reach what handlers answer themselves: `Problem` and `status` name the
    /// lock, `ProblemWithoutKey` and `status_without_key` do not. Default: they are told, so that they know which of their requests met.
    pub fn hide_key(mut self) -> Self {
        self.0.answers.name_key = false;
        self
    }

    /// Makes the responses to HTTP requests that the layer [refuses](crate#answers), or whose handler it has
    /// stopped: another body, other headers, another status. `Retry-After` is added unless `make` sets it. A status
    /// of success would tell the client that its request was handled. gRPC clients get the status of gRPC in any
    /// case. Default: an `application/problem+json`.
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
    /// (others have none that fences), unless the handler or a layer inside has set that header. A layer that takes
    /// [several locks](Self::all) adds none: it would not say which lock it is of.
    pub fn token_header(mut self) -> Self {
        self.0.token_header = true;
        self
    }

    /// Until when the lock is kept. Default: [`HoldUntil::BodyEnd`], because a body may still read what
    /// the lock protects while it is sent.
    pub fn hold_until(mut self, end: HoldUntil) -> Self {
        self.0.hold_until = end;
        self
    }

    /// What happens to a request that would be locked and may become an upgraded connection: one that
    /// offers a web socket in the header `Upgrade`, or a CONNECT. Other values of the header are
    /// ignored, as HTTP has it; a handler that answers one of them with 101 has its answer replaced.
    /// Default: [`Upgrades::Refuse`], because a lock that is silently not there protects nothing.
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
