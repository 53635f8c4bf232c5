//! The entries of the [table](super::table): a ticket with its stage and the state of its renewal,
//! and the clean-up of a ticket that nobody wants any more.

use std::sync::Arc;
use std::time::Duration;

use super::gate::Asking;
use super::lease::{COLLECTED_WITHIN, Lease};
use super::leftovers::Leftover;
use crate::clock::Instant;
use crate::request::Request;

pub(crate) struct Tracked {
    pub(crate) lease: Arc<Lease>,
    pub(crate) due: Option<Instant>,
    pub(crate) stage: Stage,
    pub(crate) renewal: RenewalStage,
    /// The [epoch](super::shared::Shared::epoch) in which the latest request about the ticket was
    /// sent. If a newer epoch has begun when the answer arrives, the answer may be older than the
    /// gap. Then the keeper renews the ticket again.
    pub(super) asked: u64,
    /// Set when the enqueue of the ticket is sent, at a store with sessions. A task that is polled
    /// has the answer by this time.
    pub(crate) answer_by: Option<Instant>,
    /// By this time the keeper must check the ticket, even if the answer that is in flight sets a
    /// later time. This is not stored in `due`: until the answer comes, `due` is the end of the
    /// ticket, and the answer moves that end.
    pub(super) recheck_by: Instant,
    /// When the store was last asked about the ticket because of a wake-up that does not grant.
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

    /// Whether a request about the ticket was sent in this epoch or later.
    pub(crate) fn was_asked_in(&self, epoch: u64) -> bool {
        self.asked >= epoch
    }

    /// The ticket must be checked at `by`, and an answer is in flight. That answer may be older
    /// than the reason for the check, so the check follows the answer.
    pub(crate) fn recheck_after_answer(&mut self, by: Instant) {
        self.recheck_by = self.recheck_by.min(by);
    }

    /// An answer has come, which sets the next check of the ticket to `due`. Returns when the
    /// keeper checks the ticket: at `due`, or earlier if
    /// [`recheck_after_answer`](Self::recheck_after_answer) asked for that.
    pub(crate) fn due_after_answer(&mut self, due: Instant) -> Instant {
        due.min(std::mem::replace(&mut self.recheck_by, Instant::FAR_FUTURE))
    }

    /// A wake-up that does not grant has come. Returns when to ask the store about the ticket: at
    /// once, but not before `pause` has passed since the last time. `None` if the wake-up names
    /// another ticket number.
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

    /// Whether the task of the ticket is not polled any more: the task has not read the answer to
    /// its enqueue, or has not collected its grant. If the keeper did not give the ticket back, no
    /// task would use the lock, and no other client could get it.
    pub(super) fn is_forsaken(&self, now: Instant) -> bool {
        match self.stage {
            Stage::Asked => self.answer_by.is_some_and(|by| by <= now),
            Stage::Waiting => {
                let patience = self.lease.request.ttl.mul_f64(COLLECTED_WITHIN);
                let granted_at = self.lease.granted_at();
                granted_at.is_some_and(|granted_at| granted_at.after(patience) <= now)
            }
            Stage::Held | Stage::Kept { .. } | Stage::Lingering { .. } | Stage::Leaving => false,
        }
    }

    /// The clean-up of the ticket, for a task that may not be polled any more.
    pub(super) fn cleanup(&self) -> Cleanup {
        Cleanup {
            // The task may not have read the reply to the enqueue.
            ambiguous: self.stage == Stage::Asked || self.lease.is_ambiguous(),
            ..Cleanup::of(&self.lease)
        }
    }

    pub(super) fn wants_renewal(&self) -> bool {
        match self.stage {
            Stage::Waiting => true,
            Stage::Leaving => false,
            Stage::Asked | Stage::Held | Stage::Kept { .. } | Stage::Lingering { .. } => {
                self.lease.wants_renewal()
            }
        }
    }

    /// The kind of the renewals of the ticket.
    pub(super) fn kind(&self) -> Kind {
        match self.stage {
            Stage::Waiting => Kind::Waiting,
            Stage::Asked
            | Stage::Held
            | Stage::Kept { .. }
            | Stage::Lingering { .. }
            | Stage::Leaving => Kind::Held,
        }
    }

    /// The latest time at which the keeper must check the ticket.
    pub(super) fn end(&self) -> Instant {
        let deadline = self.lease.deadline();
        match self.stage {
            Stage::Kept { until } | Stage::Lingering { until } => until.min(deadline),
            _ => deadline,
        }
    }
}

/// How far the next renewal of a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RenewalStage {
    /// No renewal is due, or none is wanted.
    Idle,
    /// A renewal is due and waits to be sent. It is in the backlog of this kind, with this time as
    /// its deadline.
    Queued(Kind, Instant),
    /// The renewal is in flight. Its answer sets the next due time.
    UnderWay,
}

/// The kinds of renewals. Each has a backlog of its own, so that renewals of held tickets never wait
/// behind those of waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Held,
    Waiting,
}

/// How far a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The enqueue is about to be sent, or is in flight. Only the acquire loop handles the ticket.
    Asked,
    /// In line. The keeper always renews the ticket, because otherwise the ticket would lose its
    /// position.
    Waiting,
    /// Held by the user.
    Held,
    /// The user is done with the ticket, and it stays taken until this time (`min_hold`).
    Kept { until: Instant },
    /// The user is done with the ticket, and other tasks of this process may take it until this time
    /// ([`Lock::linger`](crate::Lock::linger)).
    Lingering { until: Instant },
    /// The user is releasing the ticket. No later batch renews it, but it may be at the store until
    /// the store has carried out the release.
    Leaving,
}

/// A ticket that nobody wants any more and that may be at the store.
pub(crate) struct Cleanup {
    pub(crate) request: Arc<Request>,
    /// See [`Departure::enqueue_may_follow`](crate::backend::Departure::enqueue_may_follow).
    pub(crate) ambiguous: bool,
    /// If set, the ticket must not end before this time: the keeper leaves it at the store with the
    /// remaining time as its ttl.
    pub(crate) keep_until: Option<Instant>,
    /// The enqueue, if its caller was dropped before the reply. The release must not overtake the
    /// enqueue, so the keeper awaits the reply first.
    pub(crate) after: Option<Asking>,
    /// Set if the ticket was in use to the end and no release of it has been sent. If the store
    /// does not have the ticket, the keeper reports a loss.
    pub(crate) held: Option<Arc<Lease>>,
    /// Whether another task of this process may go on with the ticket until its release begins: see
    /// [`Table::take_back`](super::table::Table::take_back).
    pub(crate) may_go_on: bool,
    /// When the ticket has ended, if [`turns`](super::turns) is told only when its release begins.
    pub(crate) ended: Option<Instant>,
    /// Set while the keeper has the clean-up.
    pub(crate) leftover: Option<Leftover>,
}

impl Cleanup {
    /// The clean-up of a ticket whose enqueue the store has answered.
    pub(crate) fn of(lease: &Lease) -> Self {
        Self {
            request: lease.as_enqueued(),
            ambiguous: lease.is_ambiguous(),
            keep_until: None,
            after: None,
            held: None,
            may_go_on: false,
            ended: None,
            leftover: None,
        }
    }
}
