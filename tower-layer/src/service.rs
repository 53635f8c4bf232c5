//! The service: finds the key and decides whether there is anything to lock. The way of a request
//! under its lock is in `future`.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::{BoxError, LockBody};
use crate::future::{ResponseFuture, under_lock};
use crate::layer::Settings;

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
        let (mut parts, body) = request.into_parts();
        let name = self.settings.key.find(&mut parts);
        let request = Request::from_parts(parts, body);
        match name {
            Ok(Some(name)) => {
                let lock = self.settings.lock(name);
                // The one that was made ready goes along; its clone may not be ready.
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                ResponseFuture::locked(under_lock(lock, ready, request))
            }
            Ok(None) => ResponseFuture::pass_through(self.inner.call(request)),
            Err(problem) => ResponseFuture::refused(problem),
        }
    }
}
