//! The service of a fence: finds resource and token, and lets through whoever is not late.

use std::task::{Context, Poll};

use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use lockcore::WriteToken;
use tower_service::Service;

use crate::body::{BoxError, LockBody};
use crate::fence::seen::{Pass, Shut};
use crate::fence::{FenceLayer, TOKEN_HEADER};
use crate::future::ResponseFuture;
use crate::response::{Answers, Problem, Protocol};
use crate::service::{refuse, take_ready};

/// A service that late requests do not reach. Made by [`FenceLayer`].
///
/// A request that waits for one with a lower token leaves without a trace when its client goes away;
/// but that its token was seen stays.
#[derive(Clone, Debug)]
pub struct FenceService<S> {
    inner: S,
    fence: FenceLayer,
}

impl<S> FenceService<S> {
    pub(crate) fn new(inner: S, fence: FenceLayer) -> Self {
        Self { inner, fence }
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

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let pass = match self.fence.pass(&mut parts) {
            Ok(pass) => pass,
            Err(problem) => return refuse(problem, &self.fence.answers, &parts),
        };
        let protocol = Protocol::of(&parts);
        let request = Request::from_parts(parts, body);
        match pass {
            Some(pass) => {
                let ready = take_ready(&mut self.inner);
                let answers = self.fence.answers.clone();
                ResponseFuture::locked(behind_the_fence(pass, protocol, answers, ready, request))
            }
            None => ResponseFuture::pass_through(self.inner.call(request)),
        }
    }
}

impl FenceLayer {
    /// `None`: there is nothing to check.
    fn pass(&self, parts: &mut Parts) -> Result<Option<Pass>, Problem> {
        let Some(resource) = self.key.find(parts)? else {
            return Ok(None);
        };
        let Some(token) = token(parts)? else {
            return match self.optional {
                true => Ok(None),
                false => Err(Problem::no_token("is missing")),
            };
        };
        match self.seen.enter(&resource, token) {
            Ok(pass) => {
                parts.extensions.insert(token);
                Ok(Some(pass))
            }
            Err(Shut::Late) => Err(Problem::late()),
            Err(Shut::Full { room_in }) => Err(Problem::fence_full(room_in)),
        }
    }
}

fn token(parts: &Parts) -> Result<Option<WriteToken>, Problem> {
    let mut values = parts.headers.get_all(TOKEN_HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Problem::no_token("is there more than once"));
    }
    let token = value.to_str().ok().and_then(|text| text.parse().ok());
    token
        .map(Some)
        .ok_or_else(|| Problem::no_token("is not a fencing token"))
}

/// Dropped at any point, this drops the inner future before the pass, which came first.
async fn behind_the_fence<S, B, RB>(
    mut pass: Pass,
    protocol: Protocol,
    answers: Answers,
    mut service: S,
    request: Request<B>,
) -> Result<Response<LockBody<RB>>, S::Error>
where
    S: Service<Request<B>, Response = Response<RB>>,
{
    if pass.begin().await.is_err() {
        return Ok(Problem::late().into_response(&answers, protocol));
    }
    let inner = service.call(request);
    // Whatever it still holds is let go before the next may begin.
    drop(service);
    let response = inner.await?;
    Ok(response.map(LockBody::pass_through))
}
