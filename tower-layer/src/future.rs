//! A request under its lock: waits for the lock, runs the handler while the lock is held, and keeps
//! the lock until the body ends. If the body is sent later, `body` keeps the lock.

use std::fmt;
use std::future::{Future, Ready, poll_fn, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::request::Parts as RequestParts;
use http::response::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use lockcore::{OnLost, OnRevoke};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::body::LockBody;
use crate::deadline::{Deadline, Overdue};
use crate::ending::{AtLoss, End, Limits};
use crate::frame::{BoxError, in_bytes};
use crate::guard::{AnyGuard, LockNames};
use crate::header::TOKEN_HEADER;
use crate::protocol::{Protocol, has_grpc_trailers};
use crate::read::{Reading, Unread};
use crate::refusal::{Answers, Problem};
use crate::reserved::{NotReady, Reserved};
use crate::settings::{HoldUntil, Order, Settings, Upgrades};

pin_project! {
    /// The future of a [`LockService`](crate::LockService), and of a
    /// [`FenceService`](crate::FenceService).
    ///
    /// # Cancel safety
    ///
    /// Dropping this future drops the inner service's future first, and leaves nothing behind. A
    /// request that waits leaves the line. A request that holds the lock releases it.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, B, E> {
        #[pin]
        way: Way<F, B, E>,
    }
}

pin_project! {
    #[project = WayProj]
    enum Way<F, B, E> {
        PassThrough { #[pin] inner: F },
        Locked { work: Work<B, E> },
        Answered { answer: Ready<Result<Response<LockBody<B>>, E>> },
    }
}

/// The future is boxed, because the types of lockcore's futures have no name. This is one
/// allocation for each locked request; `tests/cost.rs` counts the others.
type Work<B, E> = Pin<Box<dyn Future<Output = Result<Response<LockBody<B>>, E>> + Send>>;

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(crate) fn pass_through(inner: F) -> Self {
        Self {
            way: Way::PassThrough { inner },
        }
    }

    pub(crate) fn locked(
        work: impl Future<Output = Result<Response<LockBody<B>>, E>> + Send + 'static,
    ) -> Self {
        Self {
            way: Way::Locked {
                work: Box::pin(work),
            },
        }
    }

    /// Answers a request without a call of the handler.
    pub(crate) fn refused(problem: Problem, answers: &Answers, request: &RequestParts) -> Self {
        tracing::debug!(?problem, "request refused");
        Self::answered(problem.into_response(answers, Protocol::of(request)))
    }

    fn answered(response: Response<LockBody<B>>) -> Self {
        Self {
            way: Way::Answered {
                answer: ready(Ok(response)),
            },
        }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<LockBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().way.project() {
            WayProj::PassThrough { inner } => {
                let response = ready!(inner.poll(cx))?;
                Poll::Ready(Ok(response.map(LockBody::pass_through)))
            }
            WayProj::Locked { work } => work.as_mut().poll(cx),
            WayProj::Answered { answer } => Pin::new(answer).poll(cx),
        }
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// The locks that a request asks for.
pub(crate) struct Want {
    pub(crate) names: LockNames,
    pub(crate) deadline: Option<Deadline>,
    pub(crate) protocol: Protocol,
    pub(crate) settings: Arc<Settings>,
}

/// Reads the body if the option says to read it first, takes the lock, and calls the service.
///
/// If this future is dropped at any point, the inner future is dropped before the guard, so the
/// handler never runs without the lock. The reason is that the inner future lives inside of
/// [`while_held`](lockcore::Held::while_held), and the guard was created before it.
pub(crate) async fn under_lock<S, R, B, RB>(
    want: Want,
    reading: R,
    mut reserved: Reserved<S>,
    request: Request<B>,
) -> Result<Response<LockBody<RB>>, S::Error>
where
    R: Reading<B>,
    S: Service<Request<R::Body>, Response = Response<RB>> + Clone,
    RB: Body + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let Want {
        names,
        deadline,
        protocol,
        settings,
    } = want;
    // If a lost lock does not stop the request, the deadline does not stop it either.
    let end_by = deadline.filter(|it| it.ends_the_hold && settings.on_lost == OnLost::Cancel);
    let refuse = |problem: Problem, protocol| {
        tracing::debug!(?problem, "request refused");
        Ok(problem.into_response(&settings.answers, protocol))
    };
    if R::COMES_FIRST
        && let Err(problem) = settings.foresee(&names, request.method())
    {
        return refuse(problem.with_names(&names), protocol);
    }
    let (parts, body) = request.into_parts();
    let read = reserved
        .until(pin!(Deadline::end(end_by, pin!(reading.read(body)))))
        .await;
    let body = match read.unwrap_or(Err(Unread::TooSlow)) {
        Ok(body) => body,
        Err(unread) => return refuse(Problem::unread(unread, names), protocol),
    };
    if let Err(problem) = settings.admit(&names) {
        return refuse(problem.with_names(&names), protocol);
    }
    let mut request = Request::from_parts(parts, body);
    let Order {
        lock,
        keys,
        exclusive,
        deadline_is_the_bound,
        waiters,
    } = settings.order(names, request.method(), deadline);
    let refusal = |problem: Problem, protocol| {
        let problem = problem.with_several(keys);
        problem.into_response(&settings.answers, protocol)
    };
    let taken = reserved.until(pin!(lock.acquire())).await;
    drop(waiters);
    let guard = match taken {
        Ok(guard) => guard,
        Err(error) => {
            tracing::debug!(%error, "request refused");
            let problem = Problem::not_taken(&error, deadline_is_the_bound);
            return Ok(refusal(problem, protocol));
        }
    };
    if end_by.is_some_and(Deadline::has_passed) {
        guard.release().await;
        let problem = Problem::overdue_before();
        tracing::debug!(?problem, "request refused");
        return Ok(refusal(problem, protocol));
    }
    let held = guard.held();
    held.insert_into(request.extensions_mut());
    let method = request.method().clone();
    let ready_within = settings.ready_within(deadline);
    let called = AtomicBool::new(false);
    let calls = || called.store(true, Ordering::Relaxed);
    let work = reserved.call_within(ready_within, request, calls);
    // The pinned future is dropped at the end of this statement, before the guard.
    let answer = Deadline::end(end_by, pin!(held.while_held(work))).await;
    let end = match answer {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(lost)) => Err(End::Lost(lost)),
        Err(Overdue) => Err(End::Overdue),
    };
    let mut response = match end {
        Ok(Ok(Ok(response))) => response,
        Ok(Ok(Err(NotReady(_)))) => {
            guard.release().await;
            let problem = Problem::not_ready();
            tracing::debug!(?problem, "request refused");
            return Ok(refusal(problem, protocol));
        }
        Ok(Err(error)) => {
            guard.release().await;
            return Err(error);
        }
        Err(end) => {
            match &end {
                End::Lost(error) => guard.give_up(error).await,
                End::Overdue => guard.release().await,
            }
            tracing::debug!(%end, "request stopped");
            let problem = match &end {
                _ if called.into_inner() => end.problem(),
                End::Lost(error) => Problem::not_taken(error, false),
                End::Overdue => Problem::overdue_before(),
            };
            return Ok(refusal(problem, protocol));
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS && settings.upgrades == Upgrades::Refuse
    {
        // The request did not ask for this upgrade, and the connection would continue without its
        // lock.
        let problem = Problem::upgrade(held.names());
        drop(response);
        guard.release().await;
        return Ok(problem.into_response(&settings.answers, protocol));
    }
    if settings.token_header
        && exclusive
        && let Some(token) = held.grant_id()
    {
        let header = response.headers_mut().entry(TOKEN_HEADER);
        header.or_insert_with(|| token.into());
    }
    let (parts, body) = response.into_parts();
    let body = match settings.hold_until {
        HoldUntil::Headers => {
            guard.release().await;
            LockBody::pass_through(body)
        }
        HoldUntil::BodyEnd => {
            let when_asked = settings.on_revoke == OnRevoke::Cancel;
            let at_loss = match &protocol {
                _ if settings.on_lost == OnLost::Signal && !when_asked => AtLoss::GoOn,
                Protocol::Grpc(_) if has_grpc_trailers(&parts.headers) => AtLoss::Trailers {
                    names_key: settings.answers.name_key,
                },
                _ => AtLoss::Break,
            };
            let limits = Limits {
                at_loss,
                when_asked,
                deadline: end_by,
            };
            hold_until_end(guard, &method, limits, &parts, body).await
        }
    };
    Ok(Response::from_parts(parts, body))
}

/// Gives the lock to the body. If the client can see the end of the response before any poll of the
/// body, the lock is released here instead.
async fn hold_until_end<B>(
    guard: AnyGuard,
    method: &Method,
    limits: Limits,
    parts: &Parts,
    body: B,
) -> LockBody<B>
where
    B: Body + Send + 'static,
    B::Error: Into<BoxError>,
{
    let size = body.size_hint();
    if body.is_end_stream() || is_never_sent(method, parts.status) {
        // A server does not send this body, and only asks for its size.
        drop(body);
        guard.release().await;
        return LockBody::ended(size, None);
    }
    let declared = parts
        .headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let owed = declared.or(size.exact());
    if owed == Some(0) {
        // Over HTTP/1 the headers are the whole response, and the server drops the body without
        // polling it. Over HTTP/2 trailers may follow. So the end of the body is awaited here.
        let held = guard.held();
        let rest = after_the_data(body);
        // The pinned future is dropped at the end of this statement, before the guard.
        let rest = Deadline::end(limits.deadline, pin!(held.while_held(rest))).await;
        let end = match rest {
            Ok(Ok(rest)) => {
                guard.release().await;
                return LockBody::ended(size, rest);
            }
            Ok(Err(lost)) => {
                guard.give_up(&lost).await;
                End::Lost(lost)
            }
            Err(Overdue) => End::Overdue,
        };
        return LockBody::ended(size, Some(limits.at_loss.end(end)));
    }
    LockBody::holding(body, guard, owed, limits).await
}

/// Whether a response with this method and this status is only a head (RFC 9110, section 6.4.1),
/// even if its value has a body.
fn is_never_sent(method: &Method, status: StatusCode) -> bool {
    method == Method::HEAD
        || method == Method::CONNECT && status.is_success()
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}

/// Waits for the end of a body that has no data to send. The result is its trailers or its error,
/// if any.
async fn after_the_data<B>(body: B) -> Option<Result<Frame<Bytes>, BoxError>>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    let mut body = pin!(body);
    loop {
        match poll_fn(|cx| body.as_mut().poll_frame(cx)).await? {
            Ok(frame) if frame.is_trailers() => return Some(Ok(in_bytes(frame))),
            // This data is beyond the declared length, so the server would not send it.
            Ok(_) if body.is_end_stream() => return None,
            Ok(_) => {}
            Err(error) => return Some(Err(error.into())),
        }
    }
}
