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
use crate::frame::{BoxError, Part, of_ours};
use crate::guard::{AnyGuard, AnyHeld};
use crate::refusal::Problem;

pin_project! {
    /// A response body that keeps the lock until it ends.
    ///
    /// The lock is released, and the release awaited, *before* the client can see the end: its next
    /// request must not find the key taken by its last one. So whatever the client takes for the
    /// end is held back until then: the last frame, if the inner body knows that it is the last
    /// ([`is_end_stream`](Body::is_end_stream)); the frame that completes the `Content-Length`;
    /// trailers; the end itself; an error. The inner body is gone before the lock is.
    ///
    /// When the lock is lost, the inner body is dropped and this one ends in the
    /// [`lockcore::Error`]; in gRPC, in trailers that say so.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the inner body, then hands the release to the client's keeper.
    pub struct LockBody<B> {
        #[pin]
        state: State<B>,
        // How many bytes the client still waits for, if it was told; at zero it has seen the end.
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
        // With the size that a server asks for, although it sends nothing: the answer to HEAD.
        Ended { size: SizeHint },
        PassThrough { #[pin] inner: B },
    }
}

pin_project! {
    // The inner body and its lock. Fields are dropped in this order: the body goes before the lock.
    struct Holding<B> {
        #[pin]
        inner: B,
        hold: Hold,
    }
}

/// The lock as long as the inner body lives.
struct Hold {
    /// `None` once the last part has come.
    guard: Option<AnyGuard>,
    held: AnyHeld,
    /// Made when the inner body makes us wait for the first time: many bodies never do.
    lost: Option<Pin<Box<dyn Future<Output = lockcore::Error> + Send>>>,
    at_loss: AtLoss,
}

/// An inner body and its lock that end on time although nobody polls the body, as a server does not
/// while the client reads nothing. A task waits for the end, and takes both away then.
struct Watched<B> {
    /// The task refers to it weakly, so that dropping this drops the inner body and the lock at once.
    slot: Arc<Mutex<Slot<B>>>,
    task: AbortHandle,
}

/// Where a watched body is while nobody polls it. The mutex is held for taking it and for putting it
/// back; the body is polled and dropped outside, so that nobody waits for it.
struct Slot<B> {
    /// `None` while it is polled, and after its end.
    holding: Option<Pin<Box<Holding<B>>>>,
    /// The last part, once the task has seen the end of the lock. A body that is being polled then is
    /// dropped by the one that polls it.
    end: Option<Part>,
    /// Of the one that polls, once the body has made it wait.
    waker: Option<Waker>,
}

/// What a poll has made of an inner body.
struct Polled {
    part: Option<Part>,
    /// The lock, if that was the last part.
    to_release: Option<AnyGuard>,
}

/// What becomes of a body whose lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtLoss {
    /// It ends in an error, which breaks off the connection or the stream.
    Break,
    /// It ends in the status of gRPC.
    Trailers { names_key: bool },
    /// It goes on.
    GoOn,
}

/// What ends the hold of a body besides its own end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) at_loss: AtLoss,
    /// It ends then too.
    pub(crate) deadline: Option<Deadline>,
    /// The end comes on time also while nobody polls the body.
    pub(crate) watched: bool,
}

/// Why a request, or its response, is stopped.
#[derive(Debug)]
pub(crate) enum End {
    Lost(lockcore::Error),
    Overdue,
}

impl End {
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::Lost(error) => Problem::lost(error),
            Self::Overdue => Problem::overdue(),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(error) => error.fmt(f),
            Self::Overdue => f.write_str("the deadline of the client has passed"),
        }
    }
}

impl AtLoss {
    /// The last part.
    pub(crate) fn end(self, end: End) -> Part {
        match (self, end) {
            (Self::Trailers { names_key }, end) => {
                let problem = end.problem().with_key_if(names_key);
                Ok(Frame::trailers(problem.grpc_status()))
            }
            (Self::Break | Self::GoOn, End::Lost(error)) => Err(error.into()),
            (Self::Break | Self::GoOn, end) => Err(end.to_string().into()),
        }
    }
}

impl<B> LockBody<B> {
    /// `owed` is how many bytes the client is told to expect; not zero.
    pub(crate) fn holding(inner: B, guard: AnyGuard, owed: Option<u64>, limits: Limits) -> Self
    where
        B: Send + 'static,
    {
        let hold = Hold {
            held: guard.held(),
            guard: Some(guard),
            lost: None,
            at_loss: limits.at_loss,
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

    /// A body whose lock is gone, with what is left to hand out.
    pub(crate) fn ended(size: SizeHint, rest: Option<Part>) -> Self {
        Self::new(State::Ended { size }, rest)
    }

    pub(crate) fn pass_through(inner: B) -> Self {
        Self::new(State::PassThrough { inner }, None)
    }

    pub(crate) fn empty() -> Self {
        Self::new(State::ended(), None)
    }

    /// A body of ours.
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
                    // What was held back would pass for a complete response.
                    *this.next = Some(end);
                    *this.then = None;
                    // Nothing to wait for, as in `Guard::run`: the store may be what is gone.
                    this.state.set(State::ended());
                    continue;
                }
            };
            if let Some(Ok(frame)) = &part {
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                // More than was declared: the declaration is worth nothing, and nothing is held
                // back for it any more, which also bounds what is.
                *this.owed = this.owed.and_then(|owed| owed.checked_sub(length));
            }
            match &this.next {
                None => *this.next = part,
                // All that this can overwrite is an empty frame: after data, nothing is held back.
                Some(_) => *this.then = part,
            }
            if let Some(guard) = to_release {
                // The inner body goes with the state.
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
    /// The error is the last part of a body that was stopped.
    fn poll_part(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Polled, Part>> {
        let mut this = self.project();
        let part = match ready!(this.hold.poll_part(this.inner.as_mut(), cx)) {
            Ok(part) => part,
            Err(error) => {
                tracing::debug!(%error, "response stopped");
                return Poll::Ready(Err(this.hold.at_loss.end(End::Lost(error))));
            }
        };
        let ends = match &part {
            // Servers send trailers and do not ask again.
            Some(Ok(frame)) => frame.is_trailers() || this.inner.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        let to_release = ends.then(|| this.hold.guard.take()).flatten();
        Poll::Ready(Ok(Polled { part, to_release }))
    }
}

impl<B: Send + 'static> Watched<B> {
    fn new(holding: Holding<B>, deadline: Option<Deadline>) -> Self {
        let (held, at_loss) = (holding.hold.held.clone(), holding.hold.at_loss);
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
            // Without an end, its last poll has panicked: that must not look like a complete response.
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
            // A part that was made is handed out, as it was begun under the lock; the end comes next.
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
    // The inner body, and then the lock.
    drop(holding);
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn locked<B>(slot: &Mutex<Slot<B>>) -> MutexGuard<'_, Slot<B>> {
    // Nothing panics under the mutex that would leave it half done.
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hold {
    /// Polls the inner body while the lock is held: the deadline is looked at before each poll. Or
    /// without looking, if it is to go on.
    fn poll_part<B>(
        &mut self,
        inner: Pin<&mut B>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Part>, lockcore::Error>>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        let goes_on = self.at_loss == AtLoss::GoOn;
        if (goes_on || self.held.is_valid())
            // What the body asks for while it is sent is asked for under the lock.
            && let Poll::Ready(part) = self.held.enter(|| inner.poll_frame(cx))
        {
            return Poll::Ready(Ok(of_ours(part)));
        }
        if goes_on {
            return Poll::Pending;
        }
        self.poll_lost(cx).map(Err)
    }

    /// Ready when the lock is lost, and for certain when it is already; otherwise wakes the task
    /// when it happens.
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
