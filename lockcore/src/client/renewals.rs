//! Renewals: when each is due, and how their answers change the lease.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tracing::Level;

use super::calls::Where;
use super::lease::{AlreadyLost, Lease, Renewal};
use super::pace::Outcome;
use super::shared::{Sent, Shared};
use super::tracked::{Cleanup, Kind, Stage};
use crate::backend::{Fault, Renewed, StoreError};
use crate::clock::{Instant, nanos};
use crate::meter;
use crate::pauses::jittered;
use crate::request::{Id, Request};

impl Shared {
    /// When to renew a lease: after a third of its ttl, so that two renewals may fail before the
    /// lease is at risk. Up to a tenth of that third is subtracted at random, so that leases that
    /// were taken together are not all renewed together.
    pub(crate) fn renewal_time(lease: &Lease, valid_for: Duration) -> Instant {
        let (earliest, latest) = Self::renewal_times(lease, valid_for).into_inner();
        Instant::from_nanos(fastrand::u64(earliest.as_nanos()..=latest.as_nanos()))
    }

    pub(super) fn renewal_times(lease: &Lease, valid_for: Duration) -> RangeInclusive<Instant> {
        // In nanoseconds, because dividing a `Duration` takes as long as everything else here
        // together.
        let third = nanos(valid_for) / 3;
        let latest = lease.deadline().as_nanos().saturating_sub(2 * third);
        let earliest = latest.saturating_sub(third / 10);
        Instant::from_nanos(earliest)..=Instant::from_nanos(latest)
    }

    /// How long after a third of the time that the store gave last a lease is renewed. `None` if its
    /// end was set for another reason, so that it was not due then, or if it is over.
    pub(super) fn late(lease: &Lease, now: Instant) -> Option<Duration> {
        let latest = *Self::renewal_times(lease, lease.given()).end();
        let is_due = lease.hold_until() == Instant::FAR_FUTURE && lease.deadline() > now;
        is_due.then(|| latest.until(now))
    }

    /// Applies the answer to a renewal to the lease.
    pub(crate) fn renewed(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        renewal: Renewal,
        sent: Sent,
        answer: Renewed,
        pause: Duration,
    ) {
        let id = lease.request.id;
        let asked = Arc::clone(&renewal);
        let (valid_for, recheck_in) = match answer {
            Renewed::Granted { valid_for } | Renewed::AskedBack { valid_for, .. } => {
                (renewal.answered(valid_for), None)
            }
            Renewed::Waiting {
                valid_for,
                recheck_in,
                ..
            } => (renewal.answered(valid_for), recheck_in),
            Renewed::Failed => {
                let lock = lease.request.name.clone();
                // The keeper logs failures that concern more tickets than this one.
                self.log(Level::DEBUG, move || {
                    tracing::debug!(%lock, "the store cannot renew this ticket, trying again");
                });
                self.renewal_over(id, self.clock.now().after(jittered(pause)));
                return;
            }
            Renewed::Lost => return self.taken(lease),
        };
        let Sent { at: sent, epoch } = sent;
        lease.confirm(epoch);
        if let Some(grace) = asked_back(lease, answer) {
            self.asked_back(lease, grace);
        }
        let now = self.clock.now();
        self.meter.renewal_late(|| Self::late(lease, now));
        if lease.extend(sent, valid_for, now) == Err(AlreadyLost) {
            // An acknowledgement that comes too late leads to a release, never to a revival. The
            // keeper may not have noticed the deadline yet, and after the clean-up it cannot. So
            // the loss is reported here. If a guard has this lease, it releases again when it is
            // dropped; the store answers that second release with "not found".
            if let Some(reason) = lease.lost(self.clock.now())
                && let Some(stage) = self.stage(id)
            {
                self.lost(lease, stage, reason);
            }
            return self.clean_up(Cleanup::of(lease));
        }
        let due = if lease.deadline() < lease.hold_until() {
            Self::renewal_time(lease, valid_for)
        } else {
            Instant::FAR_FUTURE
        };
        let stage = self.renewal_over(
            id,
            recheck_in.map_or(due, |recheck| due.min(sent.after(recheck))),
        );
        // A renewal makes a ticket smaller even if the store says that it waits.
        self.note_acknowledged(lease, &asked);
        if stage == Some(Stage::Waiting) {
            if answer.holds() {
                // The waiter's wake-up was lost, or is in flight.
                lease.grant(lease.ticket(), self.clock.now());
            } else if lease.has_turn() {
                // The turn counts from now on, if it did not because of a gap.
                lease.changed.notify_waiters();
            }
        }
    }

    /// Tells the keeper to renew a held or kept lease at once. If a renewal of it is in flight, the
    /// keeper renews it once more after the answer.
    pub(crate) fn recheck_now(&self, id: Id) {
        let mut table = self.table();
        match table.leases.get_mut(&id) {
            Some(tracked) if !matches!(tracked.stage, Stage::Held | Stage::Kept { .. }) => {}
            Some(tracked) if tracked.is_renewing() => {
                tracked.recheck_after_answer(self.clock.now());
            }
            Some(_) => self.set_recheck(&mut table, id, self.clock.now()),
            None => {}
        }
    }

    /// Renews one ticket at once, on the connection of the caller's runtime, and applies the answer
    /// to the lease. A grant moves its deadline, a loss is final, and an error changes nothing.
    pub(crate) async fn renew_now(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        by: Instant,
    ) -> Result<Renewed, StoreError> {
        let now = self.clock.now();
        let by = by.min(now.after(self.op_timeout));
        let renewal = lease.renewal(now);
        let asked = Arc::clone(&renewal);
        let tickets = vec![Arc::clone(&asked)];
        let (sent, answers) = self
            .operate(Where::Here, by, |connection, patience| {
                connection.renew(tickets, patience)
            })
            .await
            .inspect_err(|error| {
                renewal.refused(error);
                self.meter.renewals(meter::Renewal::Failed, 1);
            })?;
        let renewed = answers.first().copied().unwrap_or(Renewed::Failed);
        self.count_renewals(&[renewed]);
        match renewed {
            Renewed::Granted { valid_for }
            | Renewed::AskedBack { valid_for, .. }
            | Renewed::Waiting { valid_for, .. } => {
                let valid_for = renewal.answered(valid_for);
                lease.confirm(sent.epoch);
                // An `Err` means that the lease ran out meanwhile. The next call that checks the
                // lease notices that.
                let extended = lease.extend(sent.at, valid_for, self.clock.now());
                if extended.is_ok() {
                    self.note_acknowledged(lease, &asked);
                }
                if let Some(grace) = asked_back(lease, renewed) {
                    self.asked_back(lease, grace);
                    // So that the keeper watches the new end.
                    self.ask_at(lease.request.id, lease.deadline());
                }
            }
            Renewed::Lost => self.taken(lease),
            Renewed::Failed => {
                let text = "the store could not renew the ticket";
                return Err(StoreError::new(Fault::Unknown, text));
            }
        }
        Ok(renewed)
    }

    /// The store has acknowledged a renewal. Logs a line if this is the first acknowledgement of a
    /// smaller number of permits.
    fn note_acknowledged(&self, lease: &Lease, renewal: &Request) {
        if lease.acknowledged(renewal) {
            let (lock, grant_id) = (lease.request.name.clone(), lease.grant_id());
            let permits = renewal.permits;
            self.log(Level::DEBUG, move || {
                tracing::debug!(%lock, %grant_id, permits, "ticket made smaller");
            });
        }
    }

    /// Wake-ups may have been missed, or another server may have answered for a while. So every
    /// ticket is renewed, the earliest deadlines first, with a bounded number of batches at a time.
    pub(crate) fn renew_everything(&self) {
        let mut table = self.table();
        // Under the mutex, so that no round of the keeper runs between the two calls.
        self.suspect();
        table.begin_sweep();
        self.wake_keeper_at(&mut table, self.clock.now());
    }

    /// A batch of renewals is over. Wakes the keeper if other renewals wait for its slot.
    pub(crate) fn batch_over(&self, kind: Kind, outcome: Outcome) {
        let others_wait = self.table().renewed(kind, outcome);
        if others_wait {
            self.due_changed.notify_one();
        }
    }
}

/// The grace, if the ticket was asked back from its holder. The store may call a ticket that has its
/// turn a waiter. Nothing is asked of other waiters: each later renewal repeats the ask-back.
fn asked_back(lease: &Lease, answer: Renewed) -> Option<Duration> {
    match answer {
        Renewed::AskedBack { grace, .. } => Some(grace),
        Renewed::Waiting { grace, .. } => grace.filter(|_| lease.has_turn()),
        _ => None,
    }
}
