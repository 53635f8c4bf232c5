#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, missing_debug_implementations, unreachable_pub)]
//! A tower layer that takes a distributed lock for each request: for axum, tonic, and any other
//! HTTP service.
//!
#![cfg_attr(feature = "axum", doc = "```no_run")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use std::time::Duration;
//!
//! use axum::Router;
//! use axum::extract::Path;
//! use axum::routing::post;
//! use lockcore::Locks;
//! use lockcore_tower::{HeldLock, Key, LockLayer};
//!
//! async fn settle(Path(id): Path<u64>, held: HeldLock) -> String {
//!     // No other request for this order is being handled, in any process.
//!     format!("order {id} settled by grant {}", held.grant_id())
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let locks = Locks::connect("memory:")?; // or Locks::from_env(), with LOCK_URL=redis://…
//!     locks.ready(Duration::from_secs(5)).await?; // a wrong URL or password fails here
//!     let one_per_order = LockLayer::new(locks.clone(), Key::path_as::<u64>("id").prefix("order:"))
//!         .wait(Duration::from_secs(2));
//!
//!     let app = Router::new().route(
//!         "/orders/{id}/settle",
//!         post(settle).route_layer(one_per_order),
//!     );
//!
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     // Ctrl-C or SIGTERM
//!     let server = axum::serve(listener, app).with_graceful_shutdown(lockcore::stop_signal());
//!     // After a signal, requests that hold their lock may end within five seconds. Then they are
//!     // stopped, and their locks are released. Those in line get 503 at once. A second signal ends all.
//!     locks.run_until_stopped(server, Duration::from_secs(5)).await?.transpose()?;
//!     Ok(())
//! }
//! ```
//!
//! Without axum the key comes from somewhere else, and the handler finds `lockcore::Held` in the
//! extensions of its request:
//!
//! ```
//! use std::convert::Infallible;
//!
//! use http::{Request, Response};
//! use lockcore_tower::{IdempotencyKey, Key, LockLayer};
//! use tower::{Layer, service_fn};
//!
//! # fn example() -> Result<(), lockcore::Error> {
//! let locks = lockcore::Locks::connect("memory:")?;
//! let key = Key::header_as::<IdempotencyKey>("idempotency-key").prefix("payment:");
//! let one_per_payment = LockLayer::new(locks, key);
//! let service = one_per_payment.layer(service_fn(async |request: Request<String>| {
//!     let held = request.extensions().get::<lockcore::Held>();
//!     let grant = held.map(|held| held.grant_id());
//!     Ok::<_, Infallible>(Response::new(format!("paid by grant {grant:?}")))
//! }));
//! # drop(service);
//! # Ok(()) }
//! ```
//!
//! For services that do not speak HTTP, such as the worker of a job queue, there is [`WorkLayer`].
//!
//! # How a request goes
//!
//! 1. The [`Key`] finds the name to lock. If the key finds no name, the layer refuses the request,
//!    or lets it pass without a lock if the key says so. This applies to all methods, also to
//!    OPTIONS: a handler may ignore the method. Put a CORS layer around this layer. It answers the
//!    preflight requests of browsers, so they need no lock. If the service itself answers them, see
//!    [`LockLayer::pass_options`].
//! 2. The request waits for the lock. Requests get the lock in the order in which they came, over
//!    all processes. The exception is `LOCK_FAIR`: for a short time, a process may serve its own
//!    requests first. A request waits at most as long as [`LockLayer::wait`] and the client's own
//!    deadline allow. If the client [goes away](#clients-that-go-away), the request stops waiting
//!    as soon as the server notices.
//! 3. The handler runs while the lock is held. If code inside the handler asks for the same lock,
//!    it re-enters the lock. If the lock is lost, the layer drops the handler's future, at the
//!    `.await` that it has reached. Tasks that the handler has *spawned*, and code that blocks
//!    without awaiting, are not stopped. So send the fencing token with every write.
//! 4. The lock is kept until the response body ends, or is dropped because the client went away.
//!    The layer releases the lock *before* the client can see the end of the response. So the
//!    client's next request finds the lock free. If the body is complete when the handler returns,
//!    the lock is released before the head of the response is sent. If the lock is lost while the
//!    body is sent, the handler's body is dropped, even if the client has stopped reading. The
//!    response ends in an error: over HTTP/1 the connection is cut, over HTTP/2 the stream is reset.
//!
//! The layer takes the lock in the future that `call` returns, and not in `poll_ready`. The lock
//! depends on the request. And a service may be ready for hours before it is called: a lock that
//! was taken in `poll_ready` would be held for all of this time.
//!
//! If a request has to wait for its lock, it first gives back what `poll_ready` has reserved in the
//! inner service, such as the permit of a `ConcurrencyLimit`. It reserves this again when it has
//! the lock. So requests that wait for one key do not block requests for other keys.
//!
//! Put such a limit around this layer, not inside it, if handlers take further locks. Otherwise two
//! requests can wait for each other:
//!
//! 1. Request A has the last permit of the limit. Its handler asks for a second lock.
//! 2. Request B holds that second lock, and waits under it for a permit of the limit.
//!
//! The layer ends this with a 503 for request B, when B has waited for its permit as long as it may
//! wait for a lock, or until its client's deadline. (A layer that does not wait for locks waits for
//! the permit as long as [`Builder::wait`](lockcore::Builder::wait) says.)
//!
//! # Keys
//!
//! | the name comes from | |
//! |---|---|
//! | path parameter, read as the type that the handler extracts | `Key::path_as` (feature `axum`) |
//! | query parameter, header, gRPC metadata, read as a type | [`Key::query_as`], [`Key::header_as`], [`Key::metadata_as`] |
//! | the same, without reading a type | `Key::path`, [`Key::query`], [`Key::header`], [`Key::metadata`] |
//! | the header `Idempotency-Key`, with or without quotation marks | [`Key::header_as`] with [`IdempotencyKey`] |
//! | route, gRPC method | `Key::matched_path` (feature `axum`), [`Key::grpc_method`] |
//! | an extension that an outer layer has put into the request, such as the user | [`Key::extension`] |
//! | several of these | [`Key::template`] |
//! | anything in the head of the request | [`Key::from_fn`] |
//! | nowhere: one request at a time | [`Key::template`] with a constant |
//!
//! For a handler that extracts a number, `/orders/12`, `/orders/012` and `/orders/%31%32` are one
//! order. A key that reads a type locks one name for all three. A key that reads no type takes the
//! text as the name, after percent-decoding, so `12` and `012` are two locks. See [one thing, one
//! name](Key#one-thing-one-name).
//!
//! # Several locks
//!
//! [`LockLayer::all`] takes several locks for one request, all or none of them. It takes them in
//! the order of their names. So two requests that name the same things in different orders do not
//! wait for each other in a circle:
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::{Router, routing::post};
//! use lockcore_tower::{Key, LockLayer, HeldLocks};
//!
//! async fn transfer(held: HeldLocks) -> Result<String, lockcore_tower::Problem> {
//!     // No other request that names one of the two accounts is being handled.
//!     let mut booked = String::new();
//!     for account in held.iter() {
//!         let token = account.fencing_token()?; // each account has its own
//!         booked += &format!("{} under token {token}\n", account.name());
//!     }
//!     Ok(booked)
//! }
//!
//! # fn example() -> Result<(), lockcore::Error> {
//! let locks = lockcore::Locks::connect("memory:")?;
//! let accounts = ["from", "to"].map(|id| Key::path_as::<u64>(id).prefix("account:"));
//! let app: Router = Router::new().route(
//!     "/transfers/{from}/{to}",
//!     post(transfer).route_layer(LockLayer::all(locks, accounts)),
//! );
//! # drop(app);
//! # Ok(()) }
//! ```
//!
//! If the number of names depends on the request, use [`Keys::from_fn`], which finds the names and
//! limits their number.
//!
//! # Options
//!
//! | option | default | why |
//! |---|---|---|
//! | [`shared`](LockLayer::shared), [`read_on_get`](LockLayer::read_on_get), [`permits`](LockLayer::permits) | exclusive | an exclusive lock is safe for every handler |
//! | [`pass_options`](LockLayer::pass_options) | OPTIONS takes the lock | a handler may ignore the method; an outer CORS layer answers preflights |
//! | [`wait`](LockLayer::wait), [`try_only`](LockLayer::try_only) | the client's, 15 s | this is less than the 30 s or 60 s after which proxies give up |
//! | [`through_outages`](LockLayer::through_outages) | the client's, which is no | requests do not pile up while the store is down |
//! | [`deadline_header`](LockLayer::deadline_header) | none; `grpc-timeout` for gRPC | gRPC has a standard header for it, HTTP has none |
//! | [`max_waiting`](LockLayer::max_waiting) | any number | the right number depends on the handler; set it where clients can send many requests |
//! | [`max_names`](LockLayer::max_names) | any number | the right number depends on the service; set it where clients choose the names |
//! | [`ttl`](LockLayer::ttl) | the client's, 10 s | the lease is renewed after a third of the ttl, so two renewals may fail; a dead process blocks a key for at most this time |
//! | [`min_hold`](LockLayer::min_hold) | zero | the next request should get the lock as soon as it is free |
//! | [`max_hold`](LockLayer::max_hold) | no limit | a response may take long |
//! | [`linger`](LockLayer::linger) | the client's, which is zero | if the process is killed while the lock lingers, the key stays taken for the rest of the ttl |
//! | [`read_body_first`](LockLayer::read_body_first) | no | only the service knows how much memory it can spend on bodies |
//! | [`on_lost`](LockLayer::on_lost) | the request is stopped | another request may hold the lock |
//! | [`on_revoke`](LockLayer::on_revoke) | the request may use the time that the caller of `revoke` gives | most requests are done before this time is over |
//! | [`reentrant`](LockLayer::reentrant) | yes | two layers with the same key take the same lock |
//! | [`hold_until`](LockLayer::hold_until) | the end of the body | a body may read data that the lock protects |
//! | [`upgrades`](LockLayer::upgrades) | refused | the lock would end with the `101`, and protect nothing |
//! | [`busy_status`](LockLayer::busy_status) | 409 | the request is in conflict with another; 423 belongs to WebDAV, 429 blames the client |
//! | [`retry_after`](LockLayer::retry_after) | 1 s | most locks are held for less |
//! | [`hide_key`](LockLayer::hide_key) | the key is in the answer | clients can see which of their requests excluded each other |
//! | [`refuse_with`](LockLayer::refuse_with) | problem details | it is a standard, and clients have libraries for it |
//! | [`token_header`](LockLayer::token_header) | no | most clients do not send the token on |
//! | [`label`](LockLayer::label) | the template of the key | traces and metrics need a text that is the same for all keys |
//!
//! # Answers
//!
//! When the layer itself answers a request, the body is an `application/problem+json` (RFC 9457)
//! with `type`, `title`, `status` and `detail`. The `type` is a link to one of the following
//! sections. If the name of the lock is known, it is in `key`. A layer that takes [several
//! locks](#several-locks) adds `keys`, the names of all of them. In this case `key` is the name of
//! the lock that was not free, or was lost. The error of the store is in the traces, at debug
//! level.
//!
//! [`LockLayer::refuse_with`] makes other responses, and [`LockLayer::hide_key`] keeps the names
//! out of them. Handlers that take locks themselves can give the same answers: with `Problem`
//! (feature `axum`) and `status` (feature `tonic`), or without the name with `ProblemWithoutKey`
//! and `status_without_key`.
//!
//! A POST with a content type of gRPC or gRPC-Web (`application/grpc`, `application/grpc+proto` and
//! so on) gets an answer with a gRPC status instead. The message of the status says the same.
//!
//! ### Lock held
//!
//! 409 with `Retry-After`, gRPC ABORTED: the wait of the request ended before the lock was free.
//! The handler was not called. If the client's deadline ended the wait, the gRPC status is
//! DEADLINE_EXCEEDED.
//!
//! ### Lock unavailable
//!
//! 503 with `Retry-After`, gRPC UNAVAILABLE: the store is down or did not answer, this process is
//! shutting down, the inner service was not ready in time, or the lock was lost before it was. The
//! handler was not called.
//!
//! ### Lock lost
//!
//! 503, gRPC UNKNOWN: the lock was lost, or was [asked back](LockLayer::on_revoke), before the
//! handler had answered. The layer has stopped the handler, which may have done part of its work.
//! There is no `Retry-After`, because only the client knows whether the request may be repeated.
//! For the same reason the gRPC status is not UNAVAILABLE: some clients and proxies repeat calls
//! with that status by themselves.
//!
//! ### Lock uncertain
//!
//! 500, gRPC UNKNOWN, from handlers that take locks themselves: the handler held the lock, and an
//! operation on it has failed, such as its release when the store does not answer. The handler may
//! have done its work, or a part of it. As after a [loss](#lock-lost), only the client knows
//! whether the request may be repeated. The status is not 503, because some clients and proxies
//! repeat a request with that status by themselves, and all of its work may be done.
//!
//! ### Deadline passed
//!
//! gRPC DEADLINE_EXCEEDED: the client's `grpc-timeout` was over before the response had ended. The
//! handler was stopped, and may have done part of its work. If the handler had not been called, the
//! message says so.
//!
//! ### Lock key
//!
//! 400, gRPC INVALID_ARGUMENT: the key finds no usable name in the request. See [`Key`].
//!
//! ### Lock names
//!
//! 503 with `Retry-After`, gRPC RESOURCE_EXHAUSTED: this request names a lock that no earlier
//! request of the period has named, and the period has as many names as [`LockLayer::max_names`]
//! allows. The handler was not called.
//!
//! ### Lock upgrade
//!
//! 501, gRPC UNIMPLEMENTED: the request asks for a web socket or a tunnel, and the layer cannot
//! keep the lock for such a connection. The handler was not called. If a handler answers any other
//! request with a 101, the layer replaces the 101 by this answer. See [`LockLayer::upgrades`].
//!
//! ### Request body
//!
//! Only with [`read_body_first`](LockLayer::read_body_first): 413, gRPC RESOURCE_EXHAUSTED, if the
//! body is too large; 408, gRPC DEADLINE_EXCEEDED, if it takes too long; 400, gRPC CANCELLED, if it
//! breaks off. The layer has not asked for the lock, and the handler was not called.
//!
//! ### Lock misconfigured
//!
//! 500, gRPC INTERNAL: the ttl, the name, or the route cannot be used, or the request would wait
//! for a lock that it holds itself. The same request will fail again.
//!
//! Handlers that take locks themselves also give this answer if a lock that they held, or its
//! store, does not allow an operation: a shared lock has no fencing token, and a store may deny a
//! release. The detail then says that the handler may have done its work, or a part of it.
//!
//! ### Write refused
//!
//! 412, from a [`FenceLayer`]: the fence has seen a request with a higher fencing token. The
//! handler was not called. The fence will refuse every request with this token.
//!
//! ### Fencing token
//!
//! 400, from a [`FenceLayer`]: the header `lock-fencing-token` is missing, is there twice, or is
//! not a token.
//!
//! ### Fence full
//!
//! 503 with `Retry-After`, from a [`FenceLayer`] that has no room to remember another resource. The
//! handler was not called.
//!
//! # gRPC
//!
//! All four kinds of calls can be locked, unary and streaming. The lock of a stream is kept until
//! the status is sent. A stream that loses its lock ends with the status UNKNOWN. A stream of gRPC-Web breaks off,
//! because its status is a part of its body.
//!
//! ```no_run
//! use std::error::Error;
//! use std::time::Duration;
//!
//! use lockcore_tower::{Key, LockLayer};
//! use tonic::service::Routes;
//! use tonic::transport::Server;
//!
//! async fn serve(locks: lockcore::Locks, services: Routes) -> Result<(), Box<dyn Error>> {
//!     let order = Key::metadata_as::<u64>("order-id").prefix("order:");
//!     let one_per_order = LockLayer::new(locks.clone(), order);
//!     let server = Server::builder().layer(one_per_order).add_routes(services);
//!     let address = ([127, 0, 0, 1], 3000).into();
//!     let server = server.serve_with_shutdown(address, lockcore::stop_signal());
//!     locks.run_until_stopped(server, Duration::from_secs(5)).await?.transpose()?;
//!     Ok(())
//! }
//! ```
//!
//! Put a layer that translates gRPC-Web around this layer, not inside it.
//!
//! # Where it may stand
//!
//! The layer can stand around every `tower_service::Service` of HTTP requests that can be cloned.
//! In axum:
//!
//! | added by | covers | path parameters | matched path |
//! |---|---|---|---|
//! | `MethodRouter::route_layer` | the methods added before; this is the best place | yes | yes |
//! | `MethodRouter::layer` | these methods, and the 405 for other methods | yes | yes |
//! | `Router::route_layer` | the routes added before, and their 405 | yes | yes |
//! | `Router::layer` | these routes, and the fallback; the fallback has no parameters, so its answer is 500 | yes | yes |
//! | one of these in a nested router | | yes, also those of the outer router | yes, the whole path |
//! | around a service for `Router::nest_service` | | those of the outer router | no |
//! | `layer.layer(router)`, around a whole router | all | no | no |
//!
//! A route of `any(…)` has no methods of its own: use `MethodRouter::layer` there. If the layer
//! covers the 405, a request with a method that has no handler first waits for the lock, and then
//! gets its 405.
//!
//! Put the layers that may answer a request themselves (authentication, limits, CORS) around this
//! layer. Otherwise a request waits for its lock, and is answered only after that.
//!
//! The layers of `tower_http` and of `tower` can stand on both sides of this layer, in one
//! `ServiceBuilder` or one by one. The side matters: a timeout outside includes the wait for the
//! lock, and a retry outside takes the lock again for each attempt. Inside, a timeout counts only
//! the work, and a retry keeps the lock.
//!
//! Two layers take two locks. The outer layer takes its lock first. If two routes take the same two
//! locks in different orders, their requests can wait for each other until a wait is over. To avoid
//! this, use one layer that takes [both locks](#several-locks).
//!
//! # Cancel safety
//!
//! When a server notices that the client has gone, it drops the future of the request, or the body
//! of the response. The layer then drops the handler or the inner body first. After that, it gives
//! up the waiting request, or releases the lock. Nothing is left at the store. The same happens
//! when a handler panics.
//!
//! # Clients that go away
//!
//! The layer can only react after the server has noticed that the client has gone. How soon the
//! server notices depends on what the client has sent:
//!
//! | the client has sent | HTTP/1 | HTTP/2 |
//! |---|---|---|
//! | a request without a body, or one whose body has been read | at once | at once |
//! | a body that is larger than the part that the server reads ahead, and that the handler does not read | when the handler continues to read | at once |
//! | another request after it (pipelining) | when the first request is answered | |
//!
//! With [`LockLayer::read_body_first`], the second case is like the first. In the other cases, and
//! when the client's machine fails without closing its connections, these options end the request:
//! [`LockLayer::wait`], [`LockLayer::max_hold`] and the keep-alive options of the server.
//!
//! # Between services
//!
//! A service may hold a lock and ask another service to write under it. The first service then
//! sends the lock's fencing token with the request ([`TokenLayer`]). The other service remembers
//! the highest token that it has seen, and refuses requests with a lower one ([`FenceLayer`]). Its
//! handler writes with the token that it finds in the extensions of the request:
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::extract::{Extension, Path};
//! use axum::{Router, routing::post};
//! use lockcore::FencingToken;
//! use lockcore_tower::{FenceLayer, Key};
//!
//! async fn book(Path(account): Path<u64>, Extension(token): Extension<FencingToken>) -> String {
//!     // UPDATE accounts SET …, lock_token = token WHERE id = account AND lock_token <= token
//!     format!("account {account} booked under token {token}")
//! }
//!
//! let accounts: Router = Router::new()
//!     .route("/accounts/{id}/book", post(book))
//!     .route_layer(FenceLayer::new(Key::path_as::<u64>("id")));
//! # drop(accounts);
//! ```
//!
//! # Features
//!
//! `axum` adds `Key::path_as`, `Key::path`, `Key::matched_path`, the same in templates, and the
//! extractors `HeldLock` and `HeldLocks`. It also adds `Problem` and `ProblemWithoutKey`, for handlers
//! that take locks themselves. `tonic` adds the functions `status` and `status_without_key`, for
//! the same purpose. No feature changes what the layer does. Apart from `lockcore`, the crate
//! depends on the small crates that tower and hyper are made of, and on a Bloom filter.

// The floors of this crate, from the top. A file uses only files on its own floor or on lower
// floors, and never in a circle.

// Types that users add to a service, and types that their handlers take.
#[cfg(feature = "dashboard")]
mod dashboard;
#[cfg(feature = "axum")]
mod extract;
mod fence;
#[cfg(feature = "tonic")]
mod grpc;
mod layer;
#[cfg(feature = "axum")]
mod problem;
pub mod work;

// How a request and its response are handled.
mod body;
mod future;
mod reserved;
mod response;
mod service;

// The parts of a locked request: its names, its options, and the reasons to refuse it.
mod ending;
mod key;
mod keys;
mod refusal;
mod settings;
mod source;
mod template;

// Files that do not depend on the other files of this crate.
mod deadline;
mod frame;
mod guard;
mod header;
mod idempotency;
mod label;
mod names;
mod protocol;
pub mod read;
mod waiters;

pub use body::LockBody;
#[cfg(feature = "dashboard")]
#[cfg_attr(docsrs, doc(cfg(feature = "dashboard")))]
pub use dashboard::Dashboard;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use extract::{HeldLock, HeldLocks, NotLocked};
pub use fence::{FenceLayer, FenceService, TokenFuture, TokenLayer, TokenService};
pub use frame::BoxError;
pub use future::ResponseFuture;
#[cfg(feature = "tonic")]
#[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
pub use grpc::{status, status_without_key};
pub use header::TOKEN_HEADER;
pub use idempotency::{IdempotencyKey, NotAnIdempotencyKey};
pub use key::Key;
pub use keys::Keys;
pub use layer::LockLayer;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use problem::{Problem, ProblemWithoutKey};
#[doc(inline)]
pub use read::RequestBody;
pub use refusal::Refusal;
pub use service::LockService;
pub use settings::{HoldUntil, Upgrades};
#[doc(inline)]
pub use work::{WorkFuture, WorkLayer, WorkService};

#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../README.md")]
struct Readme;
