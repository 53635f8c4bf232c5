//! The entries of the [table](super::table): one ticket and how far it has come, and the clean-up that remains of it.

use std::sync::Arc;
use std::time::Duration;

use super::gate::Asking;
use super::lease::{COLLECTED_WITHIN, Lease};
use crate::clock::Instant;
use crate::request::Request;

pub(crate) struct Tracked {
    pub(crate) lease: Arc<Lease>,
    pub(crate) due: Option<Instant>,
    pub(crate) stage: Stage,
    pub(crate) renewal: RenewalStage,
    /// The [epoch](super::shared::Shared::epoch) of its latest request. If a newer epoch has begun when the answer
    /// arrives, the answer may be older than the gap, so the ticket is renewed again.
    pub(super) asked: u64,
    /// Its enqueue is under way. A task that is polled has the answer by then.
    pub(crate) answer_by: Option<Instant>,
    /// It must be checked by then, even if the answer that is under way sets a later time. This is not `due`: until the
    /// answer comes, that is the end of the ticket, and the answer moves the end.
    pub(super) recheck_by: Instant,
    /// When it was asked about last because of a wake-up that does not grant.
    pub(super) confirmed: Instant,
}

impl Tracked {
    pub(crate) fn new(lease: &Arc<Lease>, epoch: u64) -> Self {
        Self {
            lease: Arc::clone(lease),
            due: None,
            stage: Stage::Asked,
            renewal: RenewalStage::Idle,
            asked: epoch,
            answer_by: None,
            recheck_by: Instant::FAR_FUTURE,
            confirmed: Instant::from_nanos(0),
        }
    }

    pub(crate) fn is_renewing(&self) -> bool {
        self.renewal == RenewalStage::UnderWay
    }

    /// Whether a request for it was sent in this epoch or later.
    pub(crate) fn was_asked_in(&self, epoch: u64) -> bool {
        self.asked >= epoch
    }

    /// It is to be checked at `by`, and an answer is under way that may be older than the reason for this.
    pub(crate) fn recheck_after_answer(&mut self, by: Instant) {
        self.recheck_by = self.recheck_by.min(by);
    }

    /// The answer has come and would have it checked at `due`. Returns when it is to be checked.
    pub(crate) fn due_after_answer(&mut self, due: Instant) -> Instant {
        due.min(std::mem::replace(&mut self.recheck_by, Instant::FAR_FUTURE))
    }

    /// A wake-up that does not grant has come. Returns when to ask the store: at once, but not again before `pause` is
    /// over. `None` if the wake-up is about another number.
    pub(crate) fn confirm_at(
        &mut self,
        number: u64,
        now: Instant,
        pause: Duration,
    ) -> Option<Instant> {
        let known = self.lease.ticket();
        if known != 0 && known != number {
            return None;
        }
        let next = self.confirmed.after(pause);
        if next <= now {
            self.confirmed = now;
        }
        Some(next.max(now))
    }

    /// Whether its task is not polled any more: the task has not looked at the answer to its enqueue, or has not
    /// collected its grant. Without help nobody would hold the lock, and nobody else could get it.
    pub(super) fn is_forsaken(&self, now: Instant) -> bool {
        match self.stage {
            Stage::Asked => self.answer_by.is_some_and(|by| by <= now),
            Stage::Waiting => {
                let patience = self.lease.request.ttl.mul_f64(COLLECTED_WITHIN);
                let granted_at = self.lease.granted_at();
                granted_at.is_some_and(|granted_at| granted_at.after(patience) <= now)
            }
            Stage::Held | Stage::Kept { .. } | Stage::Leaving => false,
        }
    }

    pub(super) fn wants_renewal(&self) -> bool {
        match self.stage {
            Stage::Waiting => true,
            Stage::Leaving => false,
            Stage::Asked | Stage::Held | Stage::Kept { .. } => self.lease.wants_renewal(),
        }
    }

    /// The latest time at which it must be checked.
    pub(super) fn end(&self) -> Instant {
        let deadline = self.lease.deadline();
        match self.stage {
            Stage::Kept { until } => until.min(deadline),
            _ => deadline,
        }
    }
}

/// How far the next renewal of a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RenewalStage {
    /// No renewal is due, or none is wanted.
    Idle,
    /// Due, and waiting to be sent. The time is its key in [`Table::wanted`].
    Queued(Instant),
    /// Sent. Its answer sets the next due time.
    UnderWay,
}

/// How far a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Asked for. Only the acquire loop handles it.
    Asked,
    /// In line. It is always renewed, because otherwise it would lose its position.
    Waiting,
    /// Held by the user.
    Held,
    /// Its user is done with it, and it stays taken until this time (`min_hold`).
    Kept { until: Instant },
    /// Being released by the user. No later batch renews it, but it may still be at the store.
    Leaving,
}

/// A ticket that is not wanted any more and may be at the store.
pub(crate) struct Cleanup {
    pub(crate) request: Arc<Request>,
    /// See [`Departure::enqueue_may_follow`](crate::backend::Departure::enqueue_may_follow).
    pub(crate) ambiguous: bool,
    /// It must not end before this time: it is left at the store with the remaining time as its ttl.
    pub(crate) keep_until: Option<Instant>,
    /// The enqueue whose reply is not awaited any more. The release must not overtake it, so the keeper finishes the
    /// enqueue first.
    pub(crate) after: Option<Asking>,
    /// It was in use to the end, and no release of it has been sent. If the store does not have it, that is a loss to
    /// report.
    pub(crate) held: Option<Arc<Lease>>,
}

impl Cleanup {
    /// The clean-up of a ticket that the store has answered for.
    pub(crate) fn of(lease: &Lease) -> Self {
        Self {
            request: lease.as_enqueued(),
            ambiguous: lease.is_ambiguous(),
            keep_until: None,
            after: None,
            held: None,
        }
    }

    /// The clean-up of a ticket that its last user has given back.
    pub(crate) fn of_held(lease: &Arc<Lease>) -> Self {
        Self {
            held: Some(Arc::clone(lease)),
            ..Self::of(lease)
        }
    }
}
