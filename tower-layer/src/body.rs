//! The response body that keeps the lock until it ends.

mod holding;
mod watched;

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use self::holding::{Hold, Holding, Polled, Stopped};
use self::watched::Watched;
use crate::ending::Limits;
use crate::frame::{BoxError, Part, of_ours};
use crate::guard::AnyGuard;

pin_project! {
    /// A response body that keeps the lock until it ends.
    ///
    /// The lock is released *before* the client can see the end of the body. Otherwise the client's
    /// next request could find the key taken by this one. So until the store has answered the
    /// release, this body holds back everything that a client takes for the end. These are the
    /// frame that completes the `Content-Length`, trailers, the end itself, and an error. It also
    /// holds back the last frame, if the inner body says that it is the last
    /// ([`is_end_stream`](Body::is_end_stream)). The inner body is dropped before the lock is
    /// released.
    ///
    /// When the lock is lost, the inner body is dropped, even if nobody polls this body: a server
    /// does not poll while its client reads nothing. Then this body ends with the
    /// [`lockcore::Error`]. In gRPC it ends with trailers that contain the error's status.
    ///
    /// # Cancel safety
    ///
    /// Dropping this body drops the inner body first. Then the client's keeper releases the lock.
    pub struct LockBody<B> {
        #[pin]
        state: State<B>,
        // How many more bytes the client expects, if the response declares a length. At zero, the
        // client has seen the end.
        owed: Option<u64>,
        next: Option<Part>,
        then: Option<Part>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<B> {
        Holding { inner: Watched<B> },
        Releasing { release: Pin<Box<dyn Future<Output = ()> + Send>> },
        // The server asks for `size` even if it sends no body, as in the answer to a HEAD request.
        Ended { size: SizeHint },
        PassThrough { #[pin] inner: B },
    }
}

impl<B> LockBody<B> {
    /// `owed` is the declared length of the body in bytes, if there is one. It is not zero.
    ///
    /// The body is polled here, before the server polls it. Most bodies end within two parts: the
    /// data, and perhaps trailers. The lock of such a body does not wait for a client that reads
    /// slowly: a server does not poll for the trailers before the data is sent.
    ///
    /// Dropping the future drops the inner body before the lock.
    pub(crate) async fn holding(
        inner: B,
        guard: AnyGuard,
        owed: Option<u64>,
        limits: Limits,
    ) -> Self
    where
        B: Body + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut hold = Hold {
            held: guard.held(),
            guard: Some(guard),
            lost: None,
            span: None,
            limits,
        };
        // A body that knows its length is often there as a whole, and then has no span.
        if inner.size_hint().exact().is_none() {
            hold.begin_span();
        }
        let mut holding = Box::pin(Holding { inner, hold });
        let mut this = Self {
            owed,
            ..Self::new(State::ended(), None)
        };
        // Until the declared length is complete, no second part may be held back: see `keep`.
        while this.then.is_none() && (this.next.is_none() || !matches!(this.owed, Some(1..))) {
            let polled = poll_fn(|cx| Poll::Ready(holding.as_mut().poll_part(cx))).await;
            let to_release = match polled {
                Poll::Pending => break,
                Poll::Ready(Ok(Polled { part, to_release })) => {
                    keep(part, &mut this.owed, &mut this.next, &mut this.then);
                    match to_release {
                        None => continue,
                        to_release => to_release,
                    }
                }
                Poll::Ready(Err(Stopped { part, to_release })) => {
                    (this.next, this.then) = (Some(part), None);
                    to_release
                }
            };
            drop(holding);
            if let Some(guard) = to_release {
                guard.release().await;
            }
            return this;
        }
        holding.as_mut().begin_span();
        this.state = State::Holding {
            inner: Watched::new(holding),
        };
        this
    }

    /// A body whose lock has been released, with the part that is left to send.
    pub(crate) fn ended(size: SizeHint, rest: Option<Part>) -> Self {
        Self::new(State::Ended { size }, rest)
    }

    pub(crate) fn pass_through(inner: B) -> Self {
        Self::new(State::PassThrough { inner }, None)
    }

    pub(crate) fn empty() -> Self {
        Self::new(State::ended(), None)
    }

    /// A body that the layer makes itself.
    pub(crate) fn full(data: Bytes) -> Self {
        Self::ended(SizeHint::with_exact(0), Some(Ok(Frame::data(data))))
    }

    fn new(state: State<B>, next: Option<Part>) -> Self {
        Self {
            state,
            owed: None,
            next,
            then: None,
        }
    }
}

/// An empty body without a lock. Other layers make one for a response of their own, such as the
/// answer to a preflight request, or to a request that has taken too long.
impl<B> Default for LockBody<B> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<B> State<B> {
    fn ended() -> Self {
        Self::Ended {
            size: SizeHint::with_exact(0),
        }
    }

    fn is_held(&self) -> bool {
        matches!(self, Self::Holding { .. })
    }
}

impl<B> Body for LockBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Part>> {
        let mut this = self.project();
        loop {
            if this.state.is_held()
                && *this.owed != Some(0)
                && let Some(part) = this.next.take().or_else(|| this.then.take())
            {
                return Poll::Ready(Some(part));
            }
            let polled = match this.state.as_mut().project() {
                StateProj::Holding { inner } => ready!(inner.poll_part(cx)),
                StateProj::Releasing { release } => {
                    ready!(release.as_mut().poll(cx));
                    this.state.set(State::ended());
                    continue;
                }
                StateProj::Ended { .. } => {
                    return Poll::Ready(this.next.take().or_else(|| this.then.take()));
                }
                StateProj::PassThrough { inner } => {
                    return inner.poll_frame(cx).map(of_ours);
                }
            };
            let (to_release, is_over) = match polled {
                Ok(Polled { part, to_release }) => {
                    keep(part, this.owed, this.next, this.then);
                    (to_release, false)
                }
                Err(Stopped { part, to_release }) => {
                    // This discards the parts that were held back. With them, an incomplete
                    // response would look complete.
                    (*this.next, *this.then) = (Some(part), None);
                    (to_release, true)
                }
            };
            // The new state drops the inner body.
            if let Some(guard) = to_release {
                this.state.set(State::Releasing {
                    release: Box::pin(guard.release()),
                });
            } else if is_over {
                this.state.set(State::ended());
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Ended { size } => {
                size.exact() == Some(0) && self.next.is_none() && self.then.is_none()
            }
            State::PassThrough { inner } => inner.is_end_stream(),
            // The body does not end before the lock is released.
            State::Holding { .. } | State::Releasing { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let rest = match &self.state {
            State::Holding { inner } => &inner.size_hint(),
            State::PassThrough { inner } => &inner.size_hint(),
            State::Releasing { .. } => &SizeHint::with_exact(0),
            State::Ended { size } => size,
        };
        let held_back = [&self.next, &self.then]
            .into_iter()
            .filter_map(|part| part.as_ref()?.as_ref().ok()?.data_ref())
            .map(|data| data.len() as u64)
            .sum::<u64>();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(held_back));
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(held_back)) {
            hint.set_upper(upper);
        }
        hint
    }
}

/// Stores a part until it may be sent.
fn keep(
    part: Option<Part>,
    owed: &mut Option<u64>,
    next: &mut Option<Part>,
    then: &mut Option<Part>,
) {
    if let Some(Ok(frame)) = &part {
        let length = frame.data_ref().map_or(0, |data| data.len() as u64);
        // If there are more bytes than declared, the declared length is ignored, and no further
        // part is held back because of it. This also bounds the memory for such parts.
        *owed = owed.and_then(|owed| owed.checked_sub(length));
    }
    match next {
        None => *next = part,
        // If `then` has a part already, this overwrites that part. It can only be an empty frame,
        // because parts are polled while `then` is set only after the declared length is complete.
        // There, a frame with further data ends the holding back. Trailers, an error and the end of
        // the body release the lock.
        Some(_) => *then = part,
    }
}

impl<B> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Holding { .. } => "holding the lock",
            State::Releasing { .. } => "releasing the lock",
            State::Ended { .. } => "ended",
            State::PassThrough { .. } => "without a lock",
        };
        f.debug_tuple("LockBody").field(&state).finish()
    }
}
