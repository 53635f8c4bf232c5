#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, missing_debug_implementations, unreachable_pub)]
//! A tower layer that takes a distributed lock per request: for axum, and for any other service
//! over HTTP.
//!
#![cfg_attr(feature = "axum", doc = "```no_run")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use std::time::Duration;
//!
//! use axum::Router;
//! use axum::extract::Path;
//! use axum::routing::post;
//! use lockcore::Locks;
//! use lockcore_tower::{Held, Key, LockLayer};
//!
//! async fn settle(Path(id): Path<u64>, held: Held) -> String {
//!     // No other request for this order is being handled, in any process.
//!     format!("order {id} settled under token {}", held.token())
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let locks = Locks::connect("memory:")?; // or Locks::from_env(), with LOCK_URL=redis://…
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
//!     // Beside the server, which waits for its last client: after five seconds what is held is given back.
//!     let end = async {
//!         lockcore::stop_signal().await;
//!         locks.shutdown(Duration::from_secs(5)).await.map_err(std::io::Error::other)
//!     };
//!     tokio::try_join!(server.into_future(), end)?;
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
//! use lockcore_tower::{Key, LockLayer};
//! use tower::{Layer, service_fn};
//!
//! # fn example() -> Result<(), lockcore::Error> {
//! let locks = lockcore::Locks::connect("memory:")?;
//! let one_per_payment = LockLayer::new(locks, Key::header("idempotency-key").prefix("payment:"));
//! let service = one_per_payment.layer(service_fn(async |request: Request<String>| {
//!     let held = request.extensions().get::<lockcore::Held>();
//!     let token = held.map(|held| held.token());
//!     Ok::<_, Infallible>(Response::new(format!("paid under token {token:?}")))
//! }));
//! # drop(service);
//! # Ok(()) }
//! ```
//!
//! For services that are not of HTTP, as the worker of a job queue, there is [`WorkLayer`].
//!
//! # How a request goes
//!
//! 1. The [`Key`] finds the name to lock. A request in which it finds none is refused, unless the
//!    key lets it pass. OPTIONS without a content passes in any case: a service that does not look at the
//!    method must stand behind one that does.
//! 2. The request waits for the lock, first come first served over all processes, but that a process
//!    may serve its own first for a moment (`LOCK_FAIR`); at most as long as [`LockLayer::wait`] and the
//!    client's own deadline say. A client that [goes away](#clients-that-go-away) leaves the line as soon as
//!    the server notices; over HTTP/1 it may not while there is something left to read.
//! 3. The handler runs while the lock is held. Asking for the same lock inside re-enters it. When the
//!    lock is lost, the handler is dropped where it stands. What it has *spawned*, and what blocks
//!    without awaiting, is not stopped: pass the fencing token on with every write.
//! 4. The lock is kept until the response body ends, or is dropped because the client went away.
//!    The release comes *before* the client can see the end, so that its next request finds the key
//!    free. If the lock is lost meanwhile the body ends in an error, never silently: over HTTP/1 the
//!    connection is cut, over HTTP/2 the stream is reset.
//!
//! The lock is taken after the call and not while the service is made ready: what is ready may wait for
//! its call for hours, and a lease would age meanwhile. A request that has to wait for its lock gives back
//! what readiness had reserved inside, as the permit of a `ConcurrencyLimit`, and asks for it again under
//! the lock: so those that wait for one key keep out none for another. Handlers that take further locks, and a
//! limit inside, can then wait for each other; the layer gives up after its wait, with 503. Such a limit
//! belongs further out.
//!
//! # Keys
//!
//! | the name comes from | |
//! |---|---|
//! | path parameter, read as the type that the handler extracts | `Key::path_as` (feature `axum`) |
//! | query parameter, header, gRPC metadata, read as a type | [`Key::query_as`], [`Key::header_as`], [`Key::metadata_as`] |
//! | the same as they are | `Key::path`, [`Key::query`], [`Key::header`], [`Key::metadata`] |
//! | route, gRPC method | `Key::matched_path` (feature `axum`), [`Key::grpc_method`] |
//! | what a layer further out has found, as who has logged in | [`Key::extension`] |
//! | several of these | [`Key::template`] |
//! | anything in the head of the request | [`Key::from_fn`] |
//! | nowhere: one request at a time | [`Key::template`] with a constant |
//!
//! A handler that extracts a number takes `/orders/12`, `/orders/012` and `/orders/%31%32` for one order. The
//! keys that read a type lock it once; those that take the value as it is lock each spelling apart. See
//! [one thing, one name](Key#one-thing-one-name).
//!
//! # Several locks
//!
//! [`LockLayer::all`] takes several locks for one request, all or none of them. They are taken in the order of their
//! names, so requests that name the same things in different orders do not wait for each other in a circle:
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::{Router, routing::post};
//! use lockcore_tower::{Key, LockLayer, MultiHeld};
//!
//! async fn transfer(held: MultiHeld) -> Result<String, lockcore_tower::Problem> {
//!     // No other request that names one of the two accounts is being handled.
//!     let mut booked = String::new();
//!     for account in held.iter() {
//!         let token = account.write_token()?; // each account has its own
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
//! Where the request says how many things it is about, [`Keys::from_fn`] finds the names, and bounds their number.
//!
//! # Options
//!
//! | option | default | why that |
//! |---|---|---|
//! | [`shared`](LockLayer::shared), [`read_on_get`](LockLayer::read_on_get), [`permits`](LockLayer::permits) | exclusive | who forgets to say it gets the safe one |
//! | [`wait`](LockLayer::wait), [`try_only`](LockLayer::try_only) | the client's, 15 s | less than the 30 s or 60 s after which proxies give up |
//! | [`deadline_header`](LockLayer::deadline_header) | none; `grpc-timeout` for gRPC | gRPC has one by its standard, HTTP has not |
//! | [`max_waiting`](LockLayer::max_waiting) | any number | how many are too many depends on the handler; say it where clients can make them |
//! | [`max_names`](LockLayer::max_names) | any number | how many are ordinary depends on the service; say it where clients choose them |
//! | [`ttl`](LockLayer::ttl) | the client's, 10 s | three renewals fit in; a dead process blocks a key no longer |
//! | [`min_hold`](LockLayer::min_hold) | zero | who waits should get the lock as soon as it is free |
//! | [`max_hold`](LockLayer::max_hold) | no limit | a long response is no mistake |
//! | [`read_body_first`](LockLayer::read_body_first) | no | only the service knows how much memory a body is worth |
//! | [`on_lost`](LockLayer::on_lost) | the request is stopped | somebody else may hold the lock |
//! | [`reentrant`](LockLayer::reentrant) | yes | two layers on the same key are the same lock |
//! | [`hold_until`](LockLayer::hold_until) | the end of the body | bodies may still read what the lock protects |
//! | [`upgrades`](LockLayer::upgrades) | refused | the lock would end with the `101`, and protect nothing |
//! | [`busy_status`](LockLayer::busy_status) | 409 | the request is in conflict with another; 423 is WebDAV's, 429 blames the client |
//! | [`retry_after`](LockLayer::retry_after) | 1 s | most locks are held for less |
//! | [`hide_key`](LockLayer::hide_key) | the key is told | clients see which of their requests met |
//! | [`refuse_with`](LockLayer::refuse_with) | problem details | a standard that clients have libraries for |
//! | [`token_header`](LockLayer::token_header) | no | clients that do not pass it on need not know it |
//! | [`label`](LockLayer::label) | none | |
//!
//! # Answers
//!
//! When the layer answers itself, the body is an `application/problem+json` (RFC 9457) with `type`,
//! `title`, `status`, `detail`, and, if there was one, `key`, the name of the lock. A layer that takes
//! [several locks](#several-locks) adds `keys`, the names of all, and `key` is the one that was not free, or was
//! lost. `type` is one of the following sections. What exactly went wrong with the store is in the traces, at debug.
//!
//! [`LockLayer::refuse_with`] makes other responses, and [`LockLayer::hide_key`] keeps the key out of them.
//! Handlers that take locks themselves answer the same with `Problem` (feature `axum`) and `status`
//! (feature `tonic`), or without the key with `ProblemWithoutKey` and `status_without_key`.
//!
//! A POST with a content type of gRPC or gRPC-Web (`application/grpc`, `application/grpc+proto` and so on) is
//! answered with a gRPC status instead, whose message says the same.
//!
//! ### Lock held
//!
//! 409 with `Retry-After`, gRPC ABORTED: another request held the lock for as long as this one was to
//! wait. The handler was not called. gRPC DEADLINE_EXCEEDED if it would have waited longer but for the
//! client's deadline.
//!
//! ### Lock unavailable
//!
//! 503 with `Retry-After`, gRPC UNAVAILABLE: the store is down, did not answer, or this process is
//! shutting down; or the inner service was not ready in time. The handler was not called.
//!
//! ### Lock lost
//!
//! 503, gRPC UNAVAILABLE: the lock was lost before the handler had answered. The handler was stopped, and
//! may have done part of its work. So there is no `Retry-After`: the client has to know what doing it
//! twice means.
//!
//! ### Deadline passed
//!
//! gRPC DEADLINE_EXCEEDED: the client's `grpc-timeout` was over before the response had ended. The handler
//! was stopped, and may have done part of its work.
//!
//! ### Lock key
//!
//! 400, gRPC INVALID_ARGUMENT: the request does not say what to lock. See [`Key`].
//!
//! ### Lock names
//!
//! 503 with `Retry-After`, gRPC RESOURCE_EXHAUSTED: requests have named as many different locks as
//! [`LockLayer::max_names`] allows for this time, and this one names another. The handler was not called.
//!
//! ### Lock upgrade
//!
//! 501, gRPC UNIMPLEMENTED: the request asks for a web socket or a tunnel, over which the lock could not be
//! kept. The handler was not called; it was if it answered with 101 to something else. See
//! [`LockLayer::upgrades`].
//!
//! ### Request body
//!
//! Where the body is [read first](LockLayer::read_body_first): 413, gRPC RESOURCE_EXHAUSTED, if it is too
//! large; 408, gRPC DEADLINE_EXCEEDED, if it takes too long; 400, gRPC CANCELLED, if it breaks off. No lock
//! was asked for, and the handler was not called.
//!
//! ### Lock misconfigured
//!
//! 500, gRPC INTERNAL: the ttl, the name, or the route is not usable, or the request would wait for a
//! lock that it holds itself; trying again will not help.
//!
//! ### Write refused
//!
//! 412, from a [`FenceLayer`]: a request with a higher fencing token was here first. The handler was
//! not called, and never will be for this token.
//!
//! ### Fencing token
//!
//! 400, from a [`FenceLayer`]: the header `lock-fencing-token` is missing, there twice, or no token.
//!
//! ### Fence full
//!
//! 503 with `Retry-After`, from a [`FenceLayer`] that has no room to remember another resource. The
//! handler was not called.
//!
//! # gRPC
//!
//! Calls of all four kinds can be locked; the lock is kept until the status is sent. A stream whose lock
//! is lost ends in UNAVAILABLE; one of gRPC-Web, whose status is part of its body, breaks off.
//!
//! ```no_run
//! use lockcore_tower::{Key, LockLayer};
//! use tonic::service::Routes;
//! use tonic::transport::{Error, Server};
//!
//! async fn serve(locks: lockcore::Locks, services: Routes) -> Result<(), Error> {
//!     let one_per_order = LockLayer::new(locks, Key::metadata_as::<u64>("order-id").prefix("order:"));
//!     let server = Server::builder().layer(one_per_order).add_routes(services);
//!     server.serve(([127, 0, 0, 1], 3000).into()).await
//! }
//! ```
//!
//! A layer for gRPC-Web stands further out than this one.
//!
//! # Where it may stand
//!
//! Around anything that is a `tower_service::Service` of HTTP requests and can be cloned. In axum:
//!
//! | added by | covers | path parameters | matched path |
//! |---|---|---|---|
//! | `MethodRouter::route_layer` | the methods added before; best | yes | yes |
//! | `MethodRouter::layer` | the same, and the 405 to other methods | yes | yes |
//! | `Router::route_layer` | the routes added before, with their 405 | yes | yes |
//! | `Router::layer` | the same, and the fallback, which has no parameters: 500 | yes | yes |
//! | these in a router that is nested | | yes, also those of the outer | yes, whole |
//! | around a service for `Router::nest_service` | | those of the outer | no |
//! | `layer.layer(router)`, around a whole router | all | no | no |
//!
//! A route of `any(…)` has no methods of its own: `MethodRouter::layer` there. Where the layer covers a 405, a
//! request for a method that has no handler stands in line to be told so.
//!
//! Put it further in than what may refuse a request (authentication, limits): who is refused should not
//! have stood in line.
//!
//! Two layers are two locks, the outer taken first. Where two routes take the same two in different
//! orders they can wait for each other until a wait is over; one layer that takes [both](#several-locks) does not.
//!
//! # Cancel safety
//!
//! A server drops a request's future, or its body, when it notices that the client has gone. Then the
//! handler or the body is dropped first, and then nothing stays behind: not the place in line, not the
//! lock, not a count of [`LockLayer::max_waiting`]. That includes a handler that panics.
//!
//! # Clients that go away
//!
//! The layer learns it from the server, and the server must have noticed:
//!
//! | the client has sent | HTTP/1 | HTTP/2 |
//! |---|---|---|
//! | a request without a body, or one whose body has been read | at once | at once |
//! | a body that is larger than what the server reads ahead, and that nobody reads | when somebody reads on | at once |
//! | another request behind it (pipelining) | when it is answered | |
//!
//! With [`LockLayer::read_body_first`] the second line is the first. For what is left, and for a machine that
//! vanishes without closing its connections, there are the wait, [`LockLayer::max_hold`], and the keep-alive
//! options of the server.
//!
//! # Between services
//!
//! A service that holds a lock and has another one write under it sends the lock's fencing token
//! along ([`TokenLayer`]), and the other one refuses tokens that come late ([`FenceLayer`]). The
//! handler writes with the token that it finds in the extensions:
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::extract::{Extension, Path};
//! use axum::{Router, routing::post};
//! use lockcore::WriteToken;
//! use lockcore_tower::{FenceLayer, Key};
//!
//! async fn book(Path(account): Path<u64>, Extension(token): Extension<WriteToken>) -> String {
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
//! `axum`: `Key::path_as`, `Key::path`, `Key::matched_path`, the same in templates, the extractors `Held` and
//! `MultiHeld`, and `Problem` for handlers that take locks themselves. `tonic`: the function `status`, for the same. Neither
//! changes what the layer does. Beside `lockcore`, the crate depends on the small crates that tower and hyper are
//! made of, and on a Bloom filter.

// The floors of this crate, from the top. A file uses files of its own floor and of those below, never of one above, and
// there is no circle.

// What users add to a service, and what their handlers take.
#[cfg(feature = "axum")]
mod extract;
mod fence;
#[cfg(feature = "tonic")]
mod grpc;
mod layer;
#[cfg(feature = "axum")]
mod problem;
pub mod work;

// What happens to a request, and to its response.
mod body;
mod future;
mod reserved;
mod response;
mod service;

// What is asked for a request: its names, the options, the reasons to refuse it.
mod key;
mod keys;
mod refusal;
mod settings;
mod source;
mod template;

// What stands on its own.
mod deadline;
mod frame;
mod guard;
mod header;
mod names;
pub mod read;
mod waiters;

pub use body::LockBody;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use extract::{Held, MultiHeld, NotLocked};
pub use fence::{FenceLayer, FenceService, TokenFuture, TokenLayer, TokenService};
pub use frame::BoxError;
pub use future::ResponseFuture;
#[cfg(feature = "tonic")]
#[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
pub use grpc::{status, status_without_key};
pub use header::TOKEN_HEADER;
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
