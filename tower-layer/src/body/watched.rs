//! A body that ends on time even if nobody polls it.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use http_body::{Body, SizeHint};
use tokio::task::AbortHandle;

use super::holding::{Holding, Polled, Stopped, lost};
use crate::deadline::{Deadline, Overdue};
use crate::ending::{AtLoss, End, Limits};
use crate::frame::{BoxError, Part};
use crate::guard::{AnyHeld, is_asked_back};

/// An inner body and its lock, which end on time even if nobody polls the body. A server does not
/// poll while the client reads nothing. So a task waits for the end of the lock, and then drops
/// both.
pub(super) struct Watched<B> {
    /// The task holds a weak reference to the slot. So the drop of this value drops the inner body
    /// and the lock at once.
    slot: Arc<Mutex<Slot<B>>>,
    /// `None` if the body continues after a loss.
    task: Option<AbortHandle>,
}

/// Holds a watched body while nobody polls it. The mutex is locked only to take the body out and to
/// put it back. The body is polled and dropped without the mutex, so that no other thread waits for
/// a poll or a drop.
struct Slot<B> {
    /// `None` while the body is polled, and after its end.
    holding: Option<Pin<Box<Holding<B>>>>,
    /// The end of the lock, after the task has seen it. If the body is being polled at that moment,
    /// the polling task drops the body.
    end: Option<Seen>,
    /// Whether the task has taken the body out and is releasing the lock. Until the release is
    /// done, a poll is pending.
    is_ending: bool,
    /// The waker of the last poll that was pending.
    waker: Option<Waker>,
}

/// The end of a lock, as the task of a watched body has seen it.
struct Seen {
    part: Part,
    /// Whether the lock was lost, and not the deadline of the client over.
    is_loss: bool,
    /// Whether the lock was asked back. If so, the last part is sent only after the release.
    asked_back: bool,
}

impl<B: Send + 'static> Watched<B> {
    pub(super) fn new(holding: Pin<Box<Holding<B>>>) -> Self {
        let (held, limits) = (holding.hold.held.clone(), holding.hold.limits);
        let slot = Arc::new(Mutex::new(Slot {
            holding: Some(holding),
            end: None,
            is_ending: false,
            waker: None,
        }));
        let task = (limits.at_loss != AtLoss::GoOn).then(|| {
            let task = end_on_time(Arc::downgrade(&slot), held, limits);
            tokio::spawn(task).abort_handle()
        });
        Self { slot, task }
    }
}

impl<B> Watched<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    pub(super) fn poll_part(&self, cx: &mut Context<'_>) -> Poll<Result<Polled, Stopped>> {
        let taken = locked(&self.slot).holding.take();
        let Some(mut holding) = taken else {
            let waker = cx.waker().clone();
            let mut slot = locked(&self.slot);
            if slot.is_ending {
                slot.waker = Some(waker);
                return Poll::Pending;
            }
            let seen = slot.end.take().map(|seen| seen.part);
            return Poll::Ready(Err(Stopped {
                // If there is no last part, the last poll has panicked. The response must not look
                // complete.
                part: seen.unwrap_or_else(|| Err("the body panicked".into())),
                to_release: None,
            }));
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
        let is_loss = slot.end.as_ref().is_some_and(|seen| seen.is_loss);
        let end = polled.is_pending().then(|| slot.end.take()).flatten();
        drop(slot);
        if is_loss {
            holding.hold.show_loss();
        }
        let Some(Seen {
            part, asked_back, ..
        }) = end
        else {
            // If the poll has made a part, this part is sent, because its poll began under the
            // lock. The end follows at the next poll. The lock is released in the background,
            // because the next poll may come late or never.
            return polled;
        };
        let guard = asked_back.then(|| holding.as_mut().take_guard());
        drop(holding);
        Poll::Ready(Err(Stopped {
            part,
            to_release: guard.flatten(),
        }))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let slot = locked(&self.slot);
        let holding = slot.holding.as_ref();
        holding.map_or_else(SizeHint::new, |holding| holding.inner.size_hint())
    }
}

impl<B> Drop for Watched<B> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn end_on_time<B>(slot: Weak<Mutex<Slot<B>>>, held: AnyHeld, limits: Limits) {
    let lost = Deadline::end(limits.deadline, pin!(lost(held))).await;
    let end = match lost {
        Ok(error) => End::Lost(error),
        Err(Overdue) => End::Overdue,
    };
    let Some(slot) = slot.upgrade() else {
        return;
    };
    tracing::debug!(%end, "response stopped");
    let is_loss = matches!(&end, End::Lost(_));
    let asked_back = matches!(&end, End::Lost(lost) if is_asked_back(lost));
    let part = limits.at_loss.end(end);
    let holding = {
        let mut slot = locked(&slot);
        slot.end = Some(Seen {
            part,
            is_loss,
            asked_back,
        });
        slot.is_ending = slot.holding.is_some();
        slot.holding.take()
    };
    let _ending = Ending(slot);
    let Some(mut holding) = holding else {
        return;
    };
    if is_loss {
        holding.hold.show_loss();
    }
    let guard = holding.as_mut().take_guard();
    // The inner body is dropped before the lock.
    drop(holding);
    if let Some(guard) = guard
        && asked_back
    {
        guard.release().await;
    }
}

/// Exists while the task ends a body. When this is dropped, the task has ended the body, or has
/// panicked.
struct Ending<B>(Arc<Mutex<Slot<B>>>);

impl<B> Drop for Ending<B> {
    fn drop(&mut self) {
        let waker = {
            let mut slot = locked(&self.0);
            slot.is_ending = false;
            slot.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

fn locked<B>(slot: &Mutex<Slot<B>>) -> MutexGuard<'_, Slot<B>> {
    // No code that runs under the mutex can panic and leave the slot inconsistent.
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
