//! The axum extractors for the lock, or the locks, that a handler runs under.

use std::convert::Infallible;
use std::fmt;
use std::ops::Deref;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

/// Extracts the lock that the request holds, with its fencing token and its remaining time.
///
/// With several lock layers, this is the lock of the innermost layer. If the key lets requests pass
/// without a lock, extract `Option<HeldLock>`. Under a layer that takes [several
/// locks](crate::LockLayer::all), extract [`HeldLocks`].
///
/// ```
/// use lockcore_tower::HeldLock;
///
/// async fn settle(held: HeldLock) -> String {
///     format!("settled by grant {}", held.grant_id())
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(settle));
/// ```
#[derive(Clone, Debug)]
pub struct HeldLock(pub lockcore::Held);

/// Extracts the locks that the request holds under a layer that takes
/// [several](crate::LockLayer::all): the fencing token of each, and their remaining time.
///
/// With several such layers, these are the locks of the innermost layer. If the keys let requests
/// pass without a lock, extract `Option<HeldLocks>`.
///
/// ```
/// use lockcore_tower::HeldLocks;
///
/// async fn transfer(held: HeldLocks) -> String {
///     let grants = held.iter().map(|lock| format!("{} by grant {}", lock.name(), lock.grant_id()));
///     grants.collect::<Vec<_>>().join(", ")
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(transfer));
/// ```
#[derive(Clone, Debug)]
pub struct HeldLocks(pub lockcore::multi::MultiHeld);

macro_rules! extracts {
    ($extractor:ident, $held:ty) => {
        impl Deref for $extractor {
            type Target = $held;

            fn deref(&self) -> &$held {
                &self.0
            }
        }

        impl<S: Sync> FromRequestParts<S> for $extractor {
            type Rejection = NotLocked;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NotLocked> {
                parts.extensions.get().cloned().map(Self).ok_or(NotLocked)
            }
        }

        impl<S: Sync> OptionalFromRequestParts<S> for $extractor {
            type Rejection = Infallible;

            async fn from_request_parts(
                parts: &mut Parts,
                _: &S,
            ) -> Result<Option<Self>, Infallible> {
                Ok(parts.extensions.get().cloned().map(Self))
            }
        }
    };
}

extracts!(HeldLock, lockcore::Held);
extracts!(HeldLocks, lockcore::multi::MultiHeld);

/// The rejection of [`HeldLock`] and [`HeldLocks`] for a request without a lock. The answer is 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotLocked;

impl fmt::Display for NotLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "this request holds no lock: its route has no LockLayer, or the layer's key let it pass; \
             extract Option<HeldLock> if that is meant. Under LockLayer::all extract HeldLocks instead of HeldLock, under \
             LockLayer::new HeldLock",
        )
    }
}

impl std::error::Error for NotLocked {}

impl IntoResponse for NotLocked {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
