//! The service: finds the key of a request, and decides whether the request needs a lock. `future`
//! runs a request under its lock.

use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::UPGRADE;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::LockBody;
use crate::frame::BoxError;
use crate::future::{ResponseFuture, Want, under_lock};
use crate::protocol::Protocol;
use crate::read::{AsItComes, Reading};
use crate::refusal::Problem;
use crate::reserved::Reserved;
use crate::settings::{Settings, Upgrades};

/// A service that locks each request by its key. Made by [`LockLayer`](crate::LockLayer).
#[derive(Clone, Debug)]
pub struct LockService<S, R = AsItComes> {
    inner: S,
    settings: Arc<Settings>,
    reading: R,
}

impl<S, R> LockService<S, R> {
    pub(crate) fn new(inner: S, settings: Arc<Settings>, reading: R) -> Self {
        Self {
            inner,
            settings,
            reading,
        }
    }
}

impl<S, R, B, RB> Service<Request<B>> for LockService<S, R>
where
    R: Reading<B>,
    S: Service<Request<R::Body>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    RB: Body + Send + 'static,
    RB::Error: Into<BoxError>,
{
    type Response = Response<LockBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, RB, S::Error>;

    /// The lock is not taken here, but in the future that `call` returns. The service may be ready
    /// for hours before a call, and the lock depends on the request. The inner service may reserve
    /// a permit when it gets ready, for example that of a concurrency limit. If the request has to
    /// wait for its lock, the permit is given back, and is reserved again under the lock.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = &self.settings;
        if settings.pass_options && request.method() == Method::OPTIONS {
            return ResponseFuture::pass_through(self.inner.call(request.map(R::pass)));
        }
        let (mut parts, body) = request.into_parts();
        let found = match settings.keys.find(&mut parts) {
            Ok(found) => found,
            Err(problem) => return self.refuse(problem, &parts),
        };
        let Some(names) = found else {
            let request = Request::from_parts(parts, R::pass(body));
            return ResponseFuture::pass_through(self.inner.call(request));
        };
        if settings.upgrades == Upgrades::Refuse && is_upgrade(&parts) {
            return self.refuse(Problem::upgrade(names), &parts);
        }
        let protocol = Protocol::of(&parts);
        let deadline = settings.deadline(&parts, &protocol);
        let want = Want {
            names,
            deadline,
            protocol,
            settings: Arc::clone(settings),
        };
        let reserved = Reserved::take(&mut self.inner);
        let reading = self.reading.clone();
        let request = Request::from_parts(parts, body);
        ResponseFuture::locked(under_lock(want, reading, reserved, request))
    }
}

impl<S: Clone, R> LockService<S, R> {
    fn refuse<F, RB, E>(&mut self, problem: Problem, request: &Parts) -> ResponseFuture<F, RB, E> {
        Reserved::give_back(&mut self.inner);
        ResponseFuture::refused(problem, &self.settings.answers, request)
    }
}

/// Whether the connection or the stream may be used for another protocol after the response. Only
/// the header `Upgrade` counts, as in servers; `Connection` is ignored.
fn is_upgrade(request: &Parts) -> bool {
    let mut to = request.headers.get_all(UPGRADE).iter();
    // Over HTTP/2, a web socket is also a CONNECT (RFC 8441).
    request.method == Method::CONNECT || to.any(offers_a_web_socket)
}

/// Whether the header offers a web socket. The header is a list of protocols, some of them with a
/// version.
fn offers_a_web_socket(upgrade: &HeaderValue) -> bool {
    let mut protocols = upgrade.as_bytes().split(|byte| *byte == b',');
    protocols.any(|protocol| {
        let name = protocol.split(|byte| *byte == b'/').next();
        name.is_some_and(|name| name.trim_ascii().eq_ignore_ascii_case(b"websocket"))
    })
}
