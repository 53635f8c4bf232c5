//! How a [`LockLayer`](crate::LockLayer) treats the bodies of its requests: types for code that
//! names the type of a layer.
//!
//! The handler gets the body unread, [as it comes](AsItComes). Or the layer [reads the whole body
//! first](BodyFirst), before it asks for the lock. Do not make values of these types: `LockLayer`
//! is a `LockLayer<AsItComes>`, and
//! [`LockLayer::read_body_first`](crate::LockLayer::read_body_first) returns a
//! `LockLayer<BodyFirst>`.

use std::error::Error;
use std::fmt;
use std::future::{Future, ready};
use std::iter;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use pin_project_lite::pin_project;
use tokio::time::timeout;

use crate::frame::{BoxError, of_ours};

/// How a layer treats the bodies of its requests. Only [`AsItComes`] and [`BodyFirst`] implement
/// it.
pub trait Reading<B>: Clone + Send + Sync + 'static {
    /// The body that the inner service gets.
    type Body: Send + 'static;

    /// The body of a request that passes without a lock.
    #[doc(hidden)]
    fn pass(body: B) -> Self::Body;

    /// Whether the body is read before the lock is taken, which may take time.
    #[doc(hidden)]
    const COMES_FIRST: bool;

    /// Reads the body of a request. After this, the request asks for its lock.
    #[doc(hidden)]
    fn read(self, body: B) -> impl Future<Output = Result<Self::Body, Unread>> + Send;
}

/// The handler gets the body unread. This is the default of [`LockLayer`](crate::LockLayer).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AsItComes;

/// The layer reads the body before it asks for the lock: see
/// [`LockLayer::read_body_first`](crate::LockLayer::read_body_first).
#[derive(Clone, Copy, Debug)]
pub struct BodyFirst {
    pub(crate) limit: usize,
    pub(crate) within: Duration,
}

/// Why a body was not read.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    TooLarge,
    TooSlow,
    Broken,
}

impl<B: Send + 'static> Reading<B> for AsItComes {
    type Body = B;

    const COMES_FIRST: bool = false;

    fn pass(body: B) -> B {
        body
    }

    fn read(self, body: B) -> impl Future<Output = Result<B, Unread>> + Send {
        ready(Ok(body))
    }
}

impl<B> Reading<B> for BodyFirst
where
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    type Body = RequestBody<B>;

    const COMES_FIRST: bool = true;

    fn pass(body: B) -> RequestBody<B> {
        RequestBody {
            whole: Whole::No { body },
        }
    }

    async fn read(self, body: B) -> Result<RequestBody<B>, Unread> {
        // If the body declares a larger size, none of it is read.
        if body.size_hint().lower() > self.limit as u64 {
            return Err(Unread::TooLarge);
        }
        let collected = timeout(self.within, Limited::new(body, self.limit).collect()).await;
        match collected.map_err(|_| Unread::TooSlow)? {
            Ok(read) => {
                let trailers = read.trailers().cloned();
                let data = Some(read.to_bytes()).filter(|data| !data.is_empty());
                let whole = Whole::Yes { data, trailers };
                Ok(RequestBody { whole })
            }
            Err(error) if is_of_a_limit(&*error) => Err(Unread::TooLarge),
            Err(error) => {
                tracing::debug!(%error, "the body of a request broke off");
                Err(Unread::Broken)
            }
        }
    }
}

/// Whether the error comes from a limit on the body: the limit of this layer or of an outer layer.
/// The error may be wrapped.
fn is_of_a_limit(error: &(dyn Error + 'static)) -> bool {
    let mut causes = iter::successors(Some(error), |error| Error::source(*error));
    causes.any(|error| error.is::<LengthLimitError>())
}

pin_project! {
    /// The body of a request under a [`LockLayer<BodyFirst>`](crate::LockLayer::read_body_first):
    /// already read, or unread if the request passes without a lock.
    pub struct RequestBody<B> {
        #[pin]
        whole: Whole<B>,
    }
}

pin_project! {
    #[project = WholeProj]
    enum Whole<B> {
        Yes { data: Option<Bytes>, trailers: Option<HeaderMap> },
        No { #[pin] body: B },
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().whole.project() {
            WholeProj::Yes { data, trailers } => {
                let data = data.take().map(Frame::data);
                let next = data.or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(next.map(Ok))
            }
            WholeProj::No { body } => body.poll_frame(cx).map(of_ours),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.whole {
            Whole::Yes { data, trailers } => data.is_none() && trailers.is_none(),
            Whole::No { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.whole {
            Whole::Yes { data, .. } => {
                SizeHint::with_exact(data.as_ref().map_or(0, Buf::remaining) as u64)
            }
            Whole::No { body } => body.size_hint(),
        }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.whole {
            Whole::Yes { .. } => "read",
            Whole::No { .. } => "as it comes",
        };
        f.debug_tuple("RequestBody").field(&state).finish()
    }
}
