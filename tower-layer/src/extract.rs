//! The axum extractor of the lock that a handler runs under.

use std::fmt;
use std::ops::Deref;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

/// Extracts the lock that the request holds: its fencing token, how long it is still held.
///
/// With several lock layers it is the innermost one's. Under a key that lets requests pass without
/// a lock, extract `Option<Held>`.
///
/// ```
/// use lockcore_tower::Held;
///
/// async fn settle(held: Held) -> String {
///     format!("settled under token {}", held.token())
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(settle));
/// ```
#[derive(Clone, Debug)]
pub struct Held(pub lockcore::Held);

impl Deref for Held {
    type Target = lockcore::Held;

    fn deref(&self) -> &lockcore::Held {
        &self.0
    }
}

impl<S: Sync> FromRequestParts<S> for Held {
    type Rejection = NotLocked;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, NotLocked> {
        parts.extensions.get().cloned().map(Self).ok_or(NotLocked)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Held {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        parts: &mut Parts,
        _state: &S,
    ) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned().map(Self))
    }
}

/// A handler asked for [`Held`] in a request that holds no lock. Answered with 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotLocked;

impl fmt::Display for NotLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "this request holds no lock: its route has no LockLayer, or the layer's key let it pass; \
             extract Option<Held> if that is meant",
        )
    }
}

impl std::error::Error for NotLocked {}

impl IntoResponse for NotLocked {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
