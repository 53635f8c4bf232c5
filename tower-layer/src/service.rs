//! The service: finds the key and decides whether there is anything to lock. The way of a request
//! under its lock is in `future`.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::UPGRADE;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::{BoxError, LockBody};
use crate::future::{ResponseFuture, under_lock};
use crate::layer::{Settings, Upgrades};
use crate::response::{Answers, Problem, Protocol};

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
        let Some(name) = found else {
            let request = Request::from_parts(parts, body);
            return ResponseFuture::pass_through(self.inner.call(request));
        };
        if settings.upgrades == Upgrades::Refuse && is_upgrade(&parts) {
            return self.refuse(Problem::upgrade(name), &parts);
        }
        let protocol = Protocol::of(&parts.headers);
        let order = settings.order(name, &parts, &protocol);
        let settings = Arc::clone(settings);
        let ready = take_ready(&mut self.inner);
        let request = Request::from_parts(parts, body);
        ResponseFuture::locked(under_lock(order, protocol, settings, ready, request))
    }
}

impl<S> LockService<S> {
    fn refuse<F, RB, E>(&self, problem: Problem, request: &Parts) -> ResponseFuture<F, RB, E> {
        refuse(problem, &self.settings.answers, request)
    }
}

/// The service that was made ready: it goes along with its request. What is left is a clone, which may
/// not be ready.
pub(crate) fn take_ready<S: Clone>(service: &mut S) -> S {
    let clone = service.clone();
    mem::replace(service, clone)
}

pub(crate) fn refuse<F, RB, E>(
    problem: Problem,
    answers: &Answers,
    request: &Parts,
) -> ResponseFuture<F, RB, E> {
    tracing::debug!(?problem, "request refused");
    let protocol = Protocol::of(&request.headers);
    ResponseFuture::answered(problem.into_response(answers, protocol))
}

/// Whether the connection, or the stream, may go on as something else after the response. By the
/// header `Upgrade` alone: that is what servers go by, whatever `Connection` says of it.
fn is_upgrade(request: &Parts) -> bool {
    let mut to = request.headers.get_all(UPGRADE).iter();
    // Over HTTP/2 a web socket is a CONNECT too (RFC 8441).
    request.method == Method::CONNECT || to.any(|to| !is_never_followed(to))
}

/// No server of today goes over to HTTP/2 like that; `curl --http2` offers it all the same.
fn is_never_followed(to: &HeaderValue) -> bool {
    to.as_bytes().eq_ignore_ascii_case(b"h2c")
}
