//! Tests of the layer among the layers that services use beside it: those of `tower_http` and of
//! `tower`, outside of the lock and inside of it. Each test runs requests through the whole stack.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod axum;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/text.rs"]
mod text;
mod tonic;

use std::future::{Ready, ready};
use std::time::Duration;

use ::axum::body::Body;
use http::{Method, Request, Response, StatusCode};
use tower::retry::Policy;
use tower_http::cors::{Any, CorsLayer};
use tower_http::timeout::TimeoutLayer;

const NAME: &str = "order:42";

/// A time that is over soon, for requests that never end.
const SHORT: Duration = Duration::from_millis(20);

/// The largest body of a request that the stacks accept, in bytes.
const MOST: usize = 64;

fn cors() -> CorsLayer {
    let layer = CorsLayer::new().allow_origin(Any);
    layer.allow_methods([Method::GET, Method::POST])
}

fn timeout(after: Duration) -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, after)
}

/// Sends a request once more if its answer is an error of the server. It must have no body.
#[derive(Clone, Debug)]
struct OnceMore {
    done: bool,
}

impl OnceMore {
    fn new() -> Self {
        Self { done: false }
    }
}

impl<B, E> Policy<Request<Body>, Response<B>, E> for OnceMore {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<Response<B>, E>,
    ) -> Option<Self::Future> {
        let failed = (result.as_ref()).is_ok_and(|response| response.status().is_server_error());
        (failed && !std::mem::replace(&mut self.done, true)).then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        let mut clone = Request::new(Body::empty());
        *clone.method_mut() = request.method().clone();
        *clone.uri_mut() = request.uri().clone();
        *clone.extensions_mut() = request.extensions().clone();
        Some(clone)
    }
}
