//! The response body that keeps the lock until it ends.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::task::AbortHandle;

use crate::deadline::{Deadline, Overdue};
use crate::ending::{AtLoss, End, Limits};
use crate::frame::{BoxError, Part, of_ours};
use crate::guard::{AnyGuard, AnyHeld};

pin_project! {
    /// A response body that keeps the lock until it ends.
    ///
    /// The lock is released, and the release is awaited, *before* the client can see the end, so that the client's next
    /// request does not find the key taken by its last one. So this body holds back whatever the client would take for
    /// the end, until the lock is released: the last frame, if the inner body knows that it is the last
    /// ([`is_end_stream`](Body::is_end_stream)); the frame that completes the `Content-Length`; trailers; the end
    /// itself; an error. The inner body is dropped before the lock is released.
    ///
    /// When the lock is lost, the inner body is dropped, and this body ends in the [`lockcore::Error`]; in gRPC, in
    /// trailers that say so.
    ///
    /// # Cancel safety
    ///
    /// Dropping this body drops the inner body first. Then the client's keeper releases the lock.
    pub struct LockBody<B> {
        #[pin]
        state: State<B>,
        // How many bytes the client still expects, if it was told a length. At zero, the client has seen the end.
        owed: Option<u64>,
        next: Option<Part>,
        then: Option<Part>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<B> {
        Holding { #[pin] holding: Holding<B> },
        Watched { watched: Watched<B> },
        Releasing { release: Pin<Box<dyn Future<Output = ()> + Send>> },
        // `size` is the size that the server asks for, although it sends nothing: for the answer to a HEAD request.
        Ended { size: SizeHint },
        PassThrough { #[pin] inner: B },
    }
}

pin_project! {
    // The inner body and its lock. Fields are dropped in this order, so the body is dropped before the lock.
    struct Holding<B> {
        #[pin]
        inner: B,
        hold: Hold,
    }
}

/// The lock, for as long as the inner body lives.
struct Hold {
    /// `None` after the last part.
    guard: Option<AnyGuard>,
    held: AnyHeld,
    /// Created when the inner body is pending for the first time, because many bodies never are.
    lost: Option<Pin<Box<dyn Future<Output = lockcore::Error> + Send>>>,
    limits: Limits,
}

/// An inner body and its lock that end on time even if nobody polls the body. A server does not poll while the client
/// reads nothing. A task waits for the end, and then drops both.
struct Watched<B> {
    /// The task holds a weak reference to the slot, so that dropping this drops the inner body and the lock at once.
    slot: Arc<Mutex<Slot<B>>>,
    task: AbortHandle,
}

/// Holds a watched body while nobody polls it. The mutex is locked only to take the body out and to put it back. The
/// body is polled and dropped without the mutex, so that nobody waits for that.
struct Slot<B> {
    /// `None` while the body is polled, and after its end.
    holding: Option<Pin<Box<Holding<B>>>>,
    /// The last part, after the task has seen the end of the lock. If the body is being polled at that moment, the
    /// polling task drops it.
    end: Option<Part>,
    /// The waker of the last poll that was pending.
    waker: Option<Waker>,
}

/// The result of one poll of an inner body.
struct Polled {
    part: Option<Part>,
    /// The lock, if `part` is the last one.
    to_release: Option<AnyGuard>,
}

impl<B> LockBody<B> {
    /// `owed` is the number of bytes that the client is told to expect. It is not zero.
    pub(crate) fn holding(inner: B, guard: AnyGuard, owed: Option<u64>, limits: Limits) -> Self
    where
        B: Send + 'static,
    {
        let hold = Hold {
            held: guard.held(),
            guard: Some(guard),
            lost: None,
            limits,
        };
        let holding = Holding { inner, hold };
        let state = match limits.watched {
            true => State::Watched {
                watched: Watched::new(holding, limits.deadline),
            },
            false => State::Holding { holding },
        };
        Self {
            owed,
            ..Self::new(state, None)
        }
    }

    /// A body whose lock has been released, with the parts that are still to be sent.
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

impl<B> State<B> {
    fn ended() -> Self {
        Self::Ended {
            size: SizeHint::with_exact(0),
        }
    }

    fn is_held(&self) -> bool {
        matches!(self, Self::Holding { .. } | Self::Watched { .. })
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
                StateProj::Holding { holding } => ready!(holding.poll_part(cx)),
                StateProj::Watched { watched } => ready!(watched.poll_part(cx)),
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
            let Polled { part, to_release } = match polled {
                Ok(polled) => polled,
                Err(end) => {
                    // Discard the held-back parts. With them, the response would look complete.
                    *this.next = Some(end);
                    *this.then = None;
                    // Do not wait for a release, as in `Guard::run`: the lock may be lost because the store is gone.
                    this.state.set(State::ended());
                    continue;
                }
            };
            if let Some(Ok(frame)) = &part {
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                // If there are more bytes than declared, ignore the declaration: nothing more is held back because of
                // it. This also bounds the memory for held-back parts.
                *this.owed = this.owed.and_then(|owed| owed.checked_sub(length));
            }
            match &this.next {
                None => *this.next = part,
                // This can only overwrite an empty frame, because nothing is held back after data.
                Some(_) => *this.then = part,
            }
            if let Some(guard) = to_release {
                // The new state drops the inner body.
                this.state.set(State::Releasing {
                    release: Box::pin(guard.release()),
                });
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Ended { size } => {
                size.exact() == Some(0) && self.next.is_none() && self.then.is_none()
            }
            State::PassThrough { inner } => inner.is_end_stream(),
            // Not before the lock is released.
            State::Holding { .. } | State::Watched { .. } | State::Releasing { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let rest = match &self.state {
            State::Holding { holding } => &holding.inner.size_hint(),
            State::Watched { watched } => &watched.size_hint(),
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

impl<B> Holding<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    /// An `Err` contains the last part of a body that was stopped.
    fn poll_part(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Polled, Part>> {
        let mut this = self.project();
        let part = match ready!(this.hold.poll_part(this.inner.as_mut(), cx)) {
            Ok(part) => part,
            Err(error) => {
                tracing::debug!(%error, "response stopped");
                return Poll::Ready(Err(this.hold.limits.at_loss.end(End::Lost(error))));
            }
        };
        let ends = match &part {
            // Servers send trailers and do not poll again.
            Some(Ok(frame)) => frame.is_trailers() || this.inner.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        let to_release = ends.then(|| this.hold.guard.take()).flatten();
        Poll::Ready(Ok(Polled { part, to_release }))
    }
}

impl<B: Send + 'static> Watched<B> {
    fn new(holding: Holding<B>, deadline: Option<Deadline>) -> Self {
        let (held, at_loss) = (holding.hold.held.clone(), holding.hold.limits.at_loss);
        let slot = Arc::new(Mutex::new(Slot {
            holding: Some(Box::pin(holding)),
            end: None,
            waker: None,
        }));
        let task = end_on_time(Arc::downgrade(&slot), held, deadline, at_loss);
        Self {
            slot,
            task: tokio::spawn(task).abort_handle(),
        }
    }
}

impl<B> Watched<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    fn poll_part(&self, cx: &mut Context<'_>) -> Poll<Result<Polled, Part>> {
        let taken = locked(&self.slot).holding.take();
        let Some(mut holding) = taken else {
            let end = locked(&self.slot).end.take();
            // If there is no last part, the last poll has panicked. The response must not look complete.
            return Poll::Ready(Err(end.unwrap_or_else(|| Err("the body panicked".into()))));
        };
        let polled = holding.as_mut().poll_part(cx);
        let goes_on = match &polled {
            Poll::Pending => true,
            Poll::Ready(Ok(polled)) => polled.to_release.is_none(),
            Poll::Ready(Err(_)) => false,
        };
        let waker = polled.is_pending().then(|| cx.waker().clone());
        let mut slot = locked(&self.slot);
        let ended = slot.end.is_some();
        if goes_on && !ended {
            slot.holding = Some(holding);
            slot.waker = waker;
            return polled;
        }
        let end = polled.is_pending().then(|| slot.end.take()).flatten();
        drop(slot);
        drop(holding);
        match end {
            Some(end) => Poll::Ready(Err(end)),
            // If the poll has made a part, that part is sent, because its poll began under the lock. The end follows.
            None => polled,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let slot = locked(&self.slot);
        let holding = slot.holding.as_ref();
        holding.map_or_else(SizeHint::new, |holding| holding.inner.size_hint())
    }
}

impl<B> Drop for Watched<B> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn end_on_time<B>(
    slot: Weak<Mutex<Slot<B>>>,
    held: AnyHeld,
    deadline: Option<Deadline>,
    at_loss: AtLoss,
) {
    let end = match Deadline::end(deadline, lost(held)).await {
        Ok(error) => End::Lost(error),
        Err(Overdue) => End::Overdue,
    };
    let Some(slot) = slot.upgrade() else {
        return;
    };
    tracing::debug!(%end, "response stopped");
    let (holding, waker) = {
        let mut slot = locked(&slot);
        slot.end = Some(at_loss.end(end));
        (slot.holding.take(), slot.waker.take())
    };
    // The inner body is dropped before the lock.
    drop(holding);
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn locked<B>(slot: &Mutex<Slot<B>>) -> MutexGuard<'_, Slot<B>> {
    // No code that runs under the mutex can panic and leave the slot inconsistent.
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hold {
    /// Polls the inner body while the lock is held: the deadline of the lease is checked before each poll. If the body
    /// may continue after a loss, nothing is checked.
    fn poll_part<B>(
        &mut self,
        inner: Pin<&mut B>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Part>, lockcore::Error>>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        // A lock that somebody asks for is still valid. This comes first, because a body that is always ready must end too.
        if self.limits.when_asked
            && let Poll::Ready(error) = self.poll_lost(cx)
        {
            return Poll::Ready(Err(error));
        }
        let signals = self.limits.at_loss == AtLoss::GoOn;
        if (signals || self.limits.when_asked || self.held.is_valid())
            // Locks that the body asks for while it is sent are asked for inside the scope of this lock.
            && let Poll::Ready(part) = self.held.enter(|| inner.poll_frame(cx))
        {
            return Poll::Ready(Ok(of_ours(part)));
        }
        if signals {
            return Poll::Pending;
        }
        self.poll_lost(cx).map(Err)
    }

    /// Ready if a loss of the lock, or a request for it, ends the body. If it does so already, the first poll returns
    /// ready. Otherwise the task is woken when it does.
    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<lockcore::Error> {
        self.lost
            .get_or_insert_with(|| Box::pin(lost(self.held.clone())))
            .as_mut()
            .poll(cx)
    }
}

async fn lost(held: AnyHeld) -> lockcore::Error {
    match held.while_held(pending::<Infallible>()).await {
        Err(error) => error,
    }
}

impl<B> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Holding { .. } | State::Watched { .. } => "holding the lock",
            State::Releasing { .. } => "releasing the lock",
            State::Ended { .. } => "ended",
            State::PassThrough { .. } => "without a lock",
        };
        f.debug_tuple("LockBody").field(&state).finish()
    }
}
