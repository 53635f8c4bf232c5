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
//!     let one_per_order = LockLayer::new(locks.clone(), Key::path("id").prefix("order:"))
//!         .wait(Duration::from_secs(2));
//!
//!     let app = Router::new()
//!         .route("/orders/{id}/settle", post(settle))
//!         .route_layer(one_per_order);
//!
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     axum::serve(listener, app)
//!         .with_graceful_shutdown(async {
//!             let _ = tokio::signal::ctrl_c().await;
//!         })
//!         .await?;
//!     locks.shutdown(Duration::from_secs(5)).await?;
//!     Ok(())
//! }
//! ```
//!
//! # How a request goes
//!
//! 1. The [`Key`] finds the name to lock. A request in which it finds none is refused, unless the
//!    key lets it pass.
//! 2. The request waits for the lock, first come first served over all processes, at most as long
//!    as [`LockLayer::wait`] says. A client that goes away leaves the line.
//! 3. The handler runs while the lock is held; `lockcore::Held` is in the request's extensions.
//!    When the lock is lost, the handler is dropped where it stands. What it has *spawned*, and what
//!    blocks without awaiting, is not stopped: pass the fencing token on with every write.
//! 4. The lock is kept until the response body ends, or is dropped because the client went away.
//!    The release comes *before* the client can see the end, so that its next request finds the key
//!    free. If the lock is lost meanwhile the body ends in an error, never silently.
//!
//! An upgraded connection (web socket) is not covered: the lock ends with the `101` response.
//!
//! # Answers
//!
//! When the layer answers itself, the body is an `application/problem+json` (RFC 9457) with `type`,
//! `title`, `status`, `detail`, and, if there was one, `key`, the name of the lock. `type` is one of
//! the following sections. What exactly went wrong with the store is in the traces, at debug.
//!
//! ### Lock held
//!
//! 409 with `Retry-After`: another request held the lock for as long as this one was to wait. The
//! handler was not called.
//!
//! ### Lock unavailable
//!
//! 503 with `Retry-After`: the store is down, did not answer, or this process is shutting down. The
//! handler was not called.
//!
//! ### Lock lost
//!
//! 503 with `Retry-After`: the lock was lost before the handler had answered. The handler was
//! stopped, and may have done part of its work.
//!
//! ### Lock key
//!
//! 400: the request does not say what to lock. See [`Key`].
//!
//! ### Lock misconfigured
//!
//! 500: the ttl, the name, or the route is not usable; trying again will not help.
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
//!     .route_layer(FenceLayer::new(Key::path("id")));
//! # drop(accounts);
//! ```
//!
//! # Features
//!
//! `axum`: `Key::path` and the extractor `Held`. Without it the crate depends on the small crates
//! of tower and hyper only.

mod body;
mod deadline;
#[cfg(feature = "axum")]
mod extract;
mod fence;
mod future;
#[cfg(feature = "tonic")]
mod grpc;
mod key;
mod layer;
mod response;
mod service;
mod source;
mod template;
mod waiters;

pub use body::{BoxError, LockBody};
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use extract::{Held, NotLocked};
pub use fence::{FenceLayer, FenceService, TOKEN_HEADER, TokenFuture, TokenLayer, TokenService};
pub use future::ResponseFuture;
#[cfg(feature = "tonic")]
#[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
pub use grpc::status;
pub use key::Key;
pub use layer::{HoldUntil, LockLayer, Upgrades};
pub use service::LockService;
