//! The service of a fence: lets a request wait until it may begin.

use std::pin::pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::gate::Gate;
use super::seen::Pass;
use crate::body::LockBody;
use crate::frame::BoxError;
use crate::future::ResponseFuture;
use crate::protocol::Protocol;
use crate::refusal::{Answers, Problem};
use crate::reserved::Reserved;

/// A service that refuses late requests. Made by [`FenceLayer`](crate::FenceLayer).
///
/// When the client of a waiting request goes away, the request leaves nothing behind except its
/// token, which stays the highest token seen.
#[derive(Clone, Debug)]
pub struct FenceService<S> {
    inner: S,
    gate: Gate,
}

impl<S> FenceService<S> {
    pub(super) fn new(inner: S, gate: Gate) -> Self {
        Self { inner, gate }
    }
}

impl<S, B, RB> Service<Request<B>> for FenceService<S>
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

    /// Readiness may reserve something in the inner service, such as the permit of a limit. If a
    /// request has to wait for requests with lower tokens, it gives this permit back. When these
    /// requests have ended, the waiting request reserves a permit again.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let pass = match self.gate.pass(&mut parts) {
            Ok(pass) => pass,
            Err(problem) => {
                Reserved::give_back(&mut self.inner);
                return ResponseFuture::refused(problem, &self.gate.answers, &parts);
            }
        };
        let protocol = Protocol::of(&parts);
        let request = Request::from_parts(parts, body);
        match pass {
            Some(pass) => {
                let reserved = Reserved::take(&mut self.inner);
                let answers = self.gate.answers.clone();
                ResponseFuture::locked(behind_the_fence(pass, protocol, answers, reserved, request))
            }
            None => ResponseFuture::pass_through(self.inner.call(request)),
        }
    }
}

/// If this future is dropped at any point, the inner future is dropped before the pass, because the
/// pass was created first. So no later request begins before the handler is gone.
async fn behind_the_fence<S, B, RB>(
    mut pass: Pass,
    protocol: Protocol,
    answers: Answers,
    mut reserved: Reserved<S>,
    request: Request<B>,
) -> Result<Response<LockBody<RB>>, S::Error>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone,
{
    let late = || {
        let problem = Problem::late();
        tracing::debug!(?problem, "request refused");
        Ok(problem.into_response(&answers, protocol))
    };
    loop {
        let first = reserved.until(pin!(pass.until_first())).await;
        if first.is_err() {
            return late();
        }
        // The request has not begun yet. So while the inner service is busy, this request does not
        // block the request of the next holder.
        reserved.ready().await?;
        match pass.begin() {
            Ok(true) => break,
            Ok(false) => {}
            Err(_late) => return late(),
        }
    }
    let response = reserved.call(request).await?;
    Ok(response.map(LockBody::pass_through))
}
