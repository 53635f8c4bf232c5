//! A ticket that is asked for and not in the user's hands yet: asking, waiting in the store's line, and
//! giving up cleanly.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;

use crate::backend::{Enqueued, Fault, Renewed, StoreError};
use crate::client::alarms::jittered;
use crate::client::calls::Where;
use crate::client::gate::{Asking, Replaced};
use crate::client::lease::Lease;
use crate::client::shared::{Sent, Shared};
use crate::client::table::{Cleanup, Stage};
use crate::clock::Instant;
use crate::error::{Error, LostReason};

/// What a lock that is nearly ours is worth beyond the budget.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(50);

/// The ticket was granted to a task that did not collect it in time.
#[derive(Debug)]
pub(crate) struct Recalled;

/// How a ticket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Granted,
    Waiting,
    /// The store does not know the ticket any more, or it ran out before it was of use.
    Lost,
}

/// A ticket that is not in the user's hands yet. Dropping it, at whatever await point, hands what
/// may be at the store to the keeper:
///
/// - nothing sent: there is nothing to do;
/// - sent, no reply yet: the keeper waits for the reply, then releases, so that the release cannot
///   overtake the enqueue;
/// - sent, and given up without a reply: the release leaves a mark that a late enqueue obeys;
/// - in line or granted: the keeper releases.
pub(crate) struct Pending {
    shared: Arc<Shared>,
    pub(super) lease: Arc<Lease>,
    /// Where the ticket was asked for, and where its wake-ups go.
    runtime: Option<runtime::Id>,
    /// The enqueue that is under way.
    asking: Option<Asking>,
    /// The store has told of a ticket.
    has_ticket: bool,
    /// The guard has taken over.
    handed_over: bool,
}

impl Pending {
    /// Arms the clean-up of a ticket that has not been asked for.
    pub(crate) fn of(shared: &Arc<Shared>, lease: Arc<Lease>) -> Result<Self, Error> {
        shared.arm(&lease)?;
        Ok(Self {
            shared: Arc::clone(shared),
            lease,
            runtime: None,
            asking: None,
            has_ticket: false,
            handed_over: false,
        })
    }

    /// [Asks](Self::ask), unless the client is shut down, or the keeper has given up a ticket whose task
    /// was not polled: only these lose a lease that has no ticket yet. What is under way then stays in
    /// `asking`, for the drop.
    pub(super) async fn enqueue(
        &mut self,
        by: Instant,
        give_up: Instant,
    ) -> Result<Progress, Error> {
        let (clock, lease) = (self.shared.clock.clone(), Arc::clone(&self.lease));
        tokio::select! {
            biased;
            progress = self.ask(by, give_up) => progress,
            reason = lease.until_lost(&clock) => match reason {
                LostReason::Shutdown => Err(Error::shut_down()),
                _ => Ok(Progress::Lost),
            },
        }
    }

    /// Asks until there is an answer, an error that asking again will not mend, or `by` has come.
    /// The id stays the same, so that a request that was carried out without our knowing is found
    /// instead of doubled.
    ///
    /// Time in front of the gate counts towards `give_up` only, the end of the caller's budget: the
    /// store is at work then, and `by` is about a store that is not. `Waits` means that the budget
    /// ended there.
    async fn ask(&mut self, mut by: Instant, give_up: Instant) -> Result<Progress, Error> {
        let mut pause = Duration::from_millis(5);
        loop {
            let (shared, lease) = (&self.shared, &self.lease);
            let connected = shared.connection(Where::Here, by).await;
            let (runtime, connected) = connected.map_err(|error| self.failed(error))?;
            self.runtime = Some(runtime);
            // Dropped here, nothing was sent.
            let pass = match shared.admit(connected.enqueues(), 1, give_up).await {
                Some(Ok(pass)) => pass,
                Some(Err(Replaced)) => {
                    by = by.max(give_up.min(shared.clock.now().after(shared.op_timeout)));
                    continue;
                }
                // An earlier try may have been carried out.
                None if lease.is_ambiguous() => {
                    let text = "too many requests are in front of this one";
                    return Err(self.failed(StoreError::new(Fault::Unknown, text)));
                }
                None if lease.request.wait => return Ok(Progress::Waiting),
                None => {
                    let text = "too many requests of this process are in front of this one";
                    return Err(self.failed(StoreError::new(Fault::Retry, text)));
                }
            };
            // The lease counts from here, before the send.
            let sent = shared.sent_now();
            connected.asked(sent.at);
            if pass.has_waited {
                // In the last moment, a moment more: or the answer would be "unknown".
                let last = give_up.max(sent.at.after(LAST_MOMENT));
                by = by.max(last.min(sent.at.after(shared.op_timeout)));
            }
            let id = lease.request.id;
            shared.will_be_answered_by(id, sent.at.after(shared.op_timeout + lease.request.ttl));
            // Sent when polled; from then on it is the keeper's if this future is dropped. An
            // earlier try that was not answered has been marked ambiguous.
            let asking = self.asking.insert(Asking {
                answer: connected.verbs().enqueue(Arc::clone(&lease.request)),
                _pass: pass,
            });
            let one_operation = by.min(sent.at.after(shared.op_timeout));
            let error = match shared.by(one_operation, &mut asking.answer).await {
                Some(outcome) => {
                    self.asking = None;
                    shared.links.ended(&connected, &outcome);
                    match outcome {
                        Ok(answer) => return self.answered(answer, sent),
                        Err(error) => error,
                    }
                }
                None => {
                    shared.unanswered(&connected);
                    let text = format!("{} did not answer in time", shared.store());
                    StoreError::new(Fault::Unknown, text)
                }
            };
            match error.fault() {
                // With the reply still to come (`asking` is set) it is not lost yet: if we give
                // up now, the keeper may still see it, and needs no mark at the store then.
                Fault::Unknown if self.asking.is_none() => lease.set_ambiguous(),
                Fault::Unknown | Fault::Retry => {}
                Fault::Config | Fault::Refused => {
                    // The drop gives back what may be there.
                    self.has_ticket |= error.is_halfway();
                    return Err(self.failed(error));
                }
            }
            let again = shared.clock.now().after(jittered(pause));
            if again >= by {
                return Err(self.failed(error));
            }
            if self.asking.take().is_some() {
                lease.set_ambiguous();
            }
            tracing::debug!(%error, "asking the store again");
            shared.alarm(again).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    pub(crate) fn answered(&mut self, answer: Enqueued, sent: Sent) -> Result<Progress, Error> {
        let lease = &self.lease;
        let (ticket, valid_for, recheck_in) = match answer {
            Enqueued::Granted { ticket, valid_for } => (ticket, valid_for, None),
            Enqueued::Waiting {
                ticket,
                valid_for,
                recheck_in,
            } => (ticket, valid_for, recheck_in),
            Enqueued::Busy { retry_in } if lease.request.wait => {
                return Err(Error::crowded(retry_in));
            }
            Enqueued::Busy { retry_in } => return Err(Error::busy(retry_in)),
            Enqueued::CapacityMismatch { in_use } => {
                return Err(lease.request.mismatch(in_use));
            }
            Enqueued::Gone => return Ok(Progress::Lost),
        };
        self.has_ticket = true;
        self.shared.saw_ticket(ticket);
        lease.confirm(sent.epoch);
        lease.answered(ticket, sent.at, valid_for);
        if lease.lost(self.shared.clock.now()).is_some() {
            // The reply took longer than the lease.
            return Ok(Progress::Lost);
        }
        if let Enqueued::Granted { .. } = answer {
            lease.is_granted_since(sent.at);
            return Ok(Progress::Granted);
        }
        tracing::debug!(ticket, "in line");
        let due = Shared::renewal_time(lease, valid_for);
        let due = recheck_in.map_or(due, |recheck| due.min(sent.at.after(recheck)));
        // A wake-up may have been lost since it was sent.
        let due = match sent.epoch < self.shared.epoch() {
            true => self.shared.clock.now(),
            false => due,
        };
        let (id, stage) = (lease.request.id, Stage::Waiting);
        match self.shared.entrust(id, stage, due) {
            true => Ok(Progress::Waiting),
            false => Ok(Progress::Lost),
        }
    }

    /// Waits for a wake-up, or for a renewal that says "granted". `Waits` means that time is up.
    pub(crate) async fn stand_in_line(&mut self, give_up: Instant) -> Progress {
        let shared = Arc::clone(&self.shared);
        let lease = Arc::clone(&self.lease);
        loop {
            let changed = lease.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before looking: what happens in between is not missed.
            changed.as_mut().enable();
            if lease.lost(shared.clock.now()).is_some() {
                return Progress::Lost;
            }
            if lease.is_granted() {
                match self.freshen(give_up).await {
                    Progress::Waiting => continue,
                    progress => return progress,
                }
            }
            if shared.clock.now() >= give_up {
                return Progress::Waiting;
            }
            let _ = shared.by(give_up, changed).await;
        }
    }

    /// Renews a grant that has aged in line, and one that nobody will renew later, before it is
    /// handed out. Otherwise the wake-up alone is the hand-over.
    async fn freshen(&mut self, give_up: Instant) -> Progress {
        let (shared, lease) = (&self.shared, &self.lease);
        let now = shared.clock.now();
        if lease.renew && now.until(lease.deadline()) >= lease.request.ttl / 2 {
            return Progress::Granted;
        }
        // A lock that is ours at the last moment is worth a moment more than the budget.
        let by = give_up.max(now.after(LAST_MOMENT));
        let renewed = shared.renew_now(lease, by).await;
        if let Ok(Renewed::Waiting { .. }) = renewed {
            lease.ungrant();
            return Progress::Waiting;
        }
        // An unknown outcome changes nothing: what is left of the lease is handed out.
        match lease.lost(shared.clock.now()) {
            Some(_) => Progress::Lost,
            None => Progress::Granted,
        }
    }

    /// Whether this is a place in the store's line that somebody else can stand in.
    pub(crate) fn is_in_line(&self) -> bool {
        let lost = self.lease.lost(self.shared.clock.now());
        self.has_ticket && self.asking.is_none() && lost.is_none()
    }

    /// Whether its wake-ups are heard in a runtime.
    pub(crate) fn is_heard(&self, here: Option<runtime::Id>) -> bool {
        self.runtime
            .is_none_or(|asked| self.shared.is_heard(asked, here))
    }

    /// The caller is responsible for the lease from here on; the keeper goes on with its care. Fails
    /// if the keeper has given the ticket back, because its task was not polled.
    pub(crate) fn into_lease(mut self) -> Result<Arc<Lease>, Recalled> {
        match self.shared.entrust_held(&self.lease) {
            true => {
                self.handed_over = true;
                Ok(Arc::clone(&self.lease))
            }
            false => Err(Recalled),
        }
    }

    /// An error of the store as the caller sees it: if any try may have been carried out, its fate
    /// is unknown, whatever the last one said.
    fn failed(&self, error: StoreError) -> Error {
        let perhaps_carried_out = self.lease.is_ambiguous() || self.asking.is_some();
        if perhaps_carried_out {
            Error::unknown(error.to_string())
        } else {
            Error::from(error)
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.handed_over || self.shared.is_forked() {
            return;
        }
        let ambiguous = self.lease.is_ambiguous();
        let after = self.asking.take();
        if after.is_some() || self.has_ticket || ambiguous {
            self.shared.clean_up(Cleanup {
                request: Arc::clone(&self.lease.request),
                ambiguous,
                keep_until: None,
                after,
                held: None,
            });
        } else {
            self.shared.disarm(self.lease.request.id);
        }
    }
}
