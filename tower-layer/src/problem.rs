//! The layer's answers for axum handlers that take locks themselves.

use std::fmt;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use lockcore::Error;

use crate::body::LockBody;
use crate::protocol::Protocol;
use crate::refusal::{self, Answers};

/// The answer that the [layer](crate::LockLayer) gives for an error of a lock. It is for handlers,
/// and the functions that they call, that take a lock themselves. `?` converts a
/// [`lockcore::Error`] into it.
///
/// The answer is one of [these](crate#answers), such as 409 with `Retry-After` when another request
/// holds the lock. It contains **the name of the lock**, but no text of the store.
/// [`ProblemWithoutKey`] does not contain the name.
///
/// Do the work in [`Lock::run`](lockcore::Lock::run), as here, or drop the guard at the end of the
/// work. Then a store that does not answer the release cannot replace the answer of the handler.
/// With `guard.release().await?` it does: the client learns only that the work [may be
/// done](crate#lock-uncertain).
///
/// Take the lock before any other work. If the lock cannot be taken, the answer says that the
/// request was not handled.
///
/// ```
/// use axum::extract::{Path, State};
/// use axum::{Router, routing::post};
/// use lockcore::Locks;
/// use lockcore_tower::Problem;
///
/// async fn settle(State(locks): State<Locks>, Path(id): Path<u64>) -> Result<String, Problem> {
///     let order = locks.mutex(format!("order:{id}"));
///     order
///         .run(async |held| {
///             let token = held.fencing_token()?;
///             Ok(format!("settled under token {token}"))
///         })
///         .await
/// }
/// # let _: Router<Locks> = Router::new().route("/orders/{id}", post(settle));
/// ```
#[derive(Debug)]
pub struct Problem(pub Error);

/// As [`Problem`], without the name of the lock. Use it for names that clients should not learn,
/// together with a layer that [hides](crate::LockLayer::hide_key) them.
///
/// ```
/// use axum::extract::State;
/// use axum::{Router, routing::post};
/// use lockcore::Locks;
/// use lockcore_tower::ProblemWithoutKey;
///
/// async fn rotate(State(locks): State<Locks>) -> Result<String, ProblemWithoutKey> {
///     let key = locks.mutex("signing-key:internal");
///     key.run(async |_| Ok("rotated".to_owned())).await
/// }
/// # let _: Router<Locks> = Router::new().route("/rotate", post(rotate));
/// ```
#[derive(Debug)]
pub struct ProblemWithoutKey(pub Error);

fn answer(error: &Error, name_key: bool) -> Response {
    tracing::debug!(%error, "answered with a problem");
    let answers = Answers {
        name_key,
        ..Answers::default()
    };
    let problem = refusal::Problem::met_by_a_handler(error);
    let response: http::Response<LockBody<Body>> = problem.into_response(&answers, Protocol::Http);
    response.map(Body::new)
}

macro_rules! answers {
    ($problem:ident, name_key: $name_key:literal) => {
        impl From<Error> for $problem {
            fn from(error: Error) -> Self {
                Self(error)
            }
        }

        impl IntoResponse for $problem {
            fn into_response(self) -> Response {
                answer(&self.0, $name_key)
            }
        }

        /// The message of the lock's error, for logs. It names the lock.
        impl fmt::Display for $problem {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl std::error::Error for $problem {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                self.0.source()
            }
        }
    };
}

answers!(Problem, name_key: true);
answers!(ProblemWithoutKey, name_key: false);
