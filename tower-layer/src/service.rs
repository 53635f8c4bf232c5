//! The service: finds the key and decides whether there is anything to lock. The way of a request
//! under its lock is in `future`.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{CONNECTION, UPGRADE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::{BoxError, LockBody};
use crate::future::{ResponseFuture, under_lock};
use crate::layer::{Settings, Upgrades};
use crate::response::{Problem, Protocol};

/// A service whose requests are locked by key. Made by [`LockLayer`](crate::LockLayer).
#[derive(Clone, Debug)]
pub struct LockService<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> LockService<S> {
    pub(crate) fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }
}

impl<S, B, RB> Service<Request<B>> for LockService<S>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    RB: Body + Send + 'static,
    RB::Error: Into<BoxError>,
{
    type Response = Response<LockBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, RB, S::Error>;

    /// The lock is not taken here: a caller may stay ready for hours before it calls, and the lock
    /// depends on the request.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = &self.settings;
        let (mut parts, body) = request.into_parts();
        let found = match settings.key.find(&mut parts) {
            Ok(found) => found,
            Err(problem) => return self.refuse(problem, &parts),
        };
        let to_lock = match (found, settings.upgrades) {
            (Some(name), Upgrades::Refuse) if is_upgrade(&parts) => {
                return self.refuse(Problem::upgrade(name), &parts);
            }
            (Some(_), Upgrades::PassThrough) if is_upgrade(&parts) => None,
            (found, _) => found,
        };
        let Some(name) = to_lock else {
            let request = Request::from_parts(parts, body);
            return ResponseFuture::pass_through(self.inner.call(request));
        };
        let protocol = Protocol::of(&parts.headers);
        let order = settings.order(name, &parts, &protocol);
        let settings = Arc::clone(settings);
        // The one that was made ready goes along; its clone may not be ready.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        let request = Request::from_parts(parts, body);
        ResponseFuture::locked(under_lock(order, protocol, settings, ready, request))
    }
}

impl<S> LockService<S> {
    fn refuse<F, RB, E>(&self, problem: Problem, request: &Parts) -> ResponseFuture<F, RB, E> {
        tracing::debug!(?problem, "request refused");
        let protocol = Protocol::of(&request.headers);
        ResponseFuture::answered(problem.into_response(&self.settings.answers, protocol))
    }
}

/// Whether the connection, or the stream, would go on as something else after the response.
fn is_upgrade(request: &Parts) -> bool {
    // Over HTTP/2 a web socket is a CONNECT too (RFC 8441).
    request.method == Method::CONNECT
        || has_token(&request.headers, CONNECTION, "upgrade")
            // No server of today goes over to HTTP/2 like that; `curl --http2` offers it all the same.
            && request.headers.get_all(UPGRADE).iter().any(|to| to != "h2c")
}

/// Whether a header, which is a list, has an entry.
fn has_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    let values = headers.get_all(name).into_iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|entry| entry.trim().eq_ignore_ascii_case(token))
}
