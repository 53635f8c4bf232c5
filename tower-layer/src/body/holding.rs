//! An inner body and its lock, for as long as the body is sent.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::Body;
use pin_project_lite::pin_project;
use tracing::Span;

use crate::ending::{AtLoss, End, Limits};
use crate::frame::{BoxError, Part, of_ours};
use crate::guard::{AnyGuard, AnyHeld, is_asked_back};

pin_project! {
    // The inner body and its lock. Fields are dropped in this order, so the body is dropped before
    // the lock.
    pub(super) struct Holding<B> {
        #[pin]
        pub(super) inner: B,
        pub(super) hold: Hold,
    }
}

/// The lock, for as long as the inner body lives.
pub(super) struct Hold {
    /// `None` after the last part.
    pub(super) guard: Option<AnyGuard>,
    pub(super) held: AnyHeld,
    /// Resolves when the lock is lost. It is created when the inner body is pending for the first
    /// time, because many bodies are never pending.
    pub(super) lost: Option<Pin<Box<dyn Future<Output = lockcore::Error> + Send>>>,
    /// The body runs in this span. `None` while it may be there at once, as most bodies are.
    pub(super) span: Option<Span>,
    pub(super) limits: Limits,
}

/// The result of one poll of an inner body.
pub(super) struct Polled {
    pub(super) part: Option<Part>,
    /// The lock, if `part` is the last part.
    pub(super) to_release: Option<AnyGuard>,
}

/// An inner body that is stopped.
pub(super) struct Stopped {
    /// The last part.
    pub(super) part: Part,
    /// The lock, if the last part must be sent only after its release.
    pub(super) to_release: Option<AnyGuard>,
}

impl<B> Holding<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    pub(super) fn poll_part(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Polled, Stopped>> {
        let mut this = self.project();
        let part = match ready!(this.hold.poll_part(this.inner.as_mut(), cx)) {
            Ok(part) => part,
            Err(error) => {
                tracing::debug!(%error, "response stopped");
                this.hold.show_loss();
                let asked_back = is_asked_back(&error);
                let part = this.hold.limits.at_loss.end(End::Lost(error));
                // If the lock was not asked back, the guard stays in this value, and is dropped
                // after the inner body.
                let to_release = asked_back.then(|| this.hold.guard.take()).flatten();
                return Poll::Ready(Err(Stopped { part, to_release }));
            }
        };
        let ends = match &part {
            // A server does not poll again after trailers.
            Some(Ok(frame)) => frame.is_trailers() || this.inner.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        let to_release = ends.then(|| this.hold.guard.take()).flatten();
        Poll::Ready(Ok(Polled { part, to_release }))
    }
}

impl<B> Holding<B> {
    pub(super) fn begin_span(self: Pin<&mut Self>) {
        self.project().hold.begin_span();
    }

    pub(super) fn take_guard(self: Pin<&mut Self>) -> Option<AnyGuard> {
        self.project().hold.guard.take()
    }
}

impl Hold {
    /// A span around the time in which the body is sent. It is made where the request is handled, so
    /// that it is inside of the span of the request.
    pub(super) fn begin_span(&mut self) {
        self.span.get_or_insert_with(|| self.held.span());
    }

    /// Shows in the span that the lock was lost.
    pub(super) fn show_loss(&self) {
        if let Some(span) = &self.span {
            span.record("error.type", "lost");
        }
    }

    /// Polls the inner body while the lock is held: checks the deadline of the lease before each
    /// poll. If the body may continue after a loss, there is no check.
    fn poll_part<B>(
        &mut self,
        inner: Pin<&mut B>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Part>, lockcore::Error>>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        // When the lock is asked back, it stays valid for a time, so this is a separate check. It
        // comes before the poll, because a body that is always ready must end too.
        if self.limits.when_asked
            && let Poll::Ready(error) = self.poll_lost(cx)
        {
            return Poll::Ready(Err(error));
        }
        let signals = self.limits.at_loss == AtLoss::GoOn;
        let span = self.span.clone().unwrap_or_else(Span::none);
        if (signals || self.limits.when_asked || self.held.is_valid())
            // The body is polled in the scope of this lock, so that it can re-enter the lock.
            && let Poll::Ready(part) = self.held.enter(|| span.in_scope(|| inner.poll_frame(cx)))
        {
            return Poll::Ready(Ok(of_ours(part)));
        }
        if signals {
            return Poll::Pending;
        }
        self.poll_lost(cx).map(Err)
    }

    /// Ready if the body must end, because the lock is lost or asked back. If it must end already,
    /// the first poll returns ready. Otherwise the task is woken as soon as it must end.
    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<lockcore::Error> {
        self.lost
            .get_or_insert_with(|| Box::pin(lost(self.held.clone())))
            .as_mut()
            .poll(cx)
    }
}

pub(super) async fn lost(held: AnyHeld) -> lockcore::Error {
    match held.while_held(pending::<Infallible>()).await {
        Err(error) => error,
    }
}
