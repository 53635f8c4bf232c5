//! For handlers of axum's that take locks themselves.

use std::fmt;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use lockcore::Error;

use crate::body::LockBody;
use crate::refusal::{self, Answers, Protocol};

/// An error of a lock as the [layer](crate::LockLayer) answers it: for handlers, and functions that they call,
/// that take a lock themselves. `?` makes one of a [`lockcore::Error`].
///
/// The answer is one of [these](crate#answers), such as 409 with `Retry-After` when another holds the lock. It
/// **names the lock**, and nothing that the store said.
///
/// ```
/// use axum::extract::{Path, State};
/// use axum::{Router, routing::post};
/// use lockcore::Locks;
/// use lockcore_tower::Problem;
///
/// async fn settle(State(locks): State<Locks>, Path(id): Path<u64>) -> Result<String, Problem> {
///     let guard = locks.mutex(format!("order:{id}")).acquire().await?;
///     let token = guard.token();
///     guard.release().await?;
///     Ok(format!("settled under token {token}"))
/// }
/// # let _: Router<Locks> = Router::new().route("/orders/{id}", post(settle));
/// ```
#[derive(Debug)]
pub struct Problem(pub Error);

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        tracing::debug!(error = %self.0, "answered with a problem");
        let problem = refusal::Problem::met_by_a_handler(&self.0);
        let response: http::Response<LockBody<Body>> =
            problem.into_response(&Answers::default(), Protocol::Http);
        response.map(Body::new)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Problem {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
