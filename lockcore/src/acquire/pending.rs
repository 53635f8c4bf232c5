//! A ticket before the user has it: asking the store, waiting in the store's line, and giving up
//! without leaving anything behind.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;

use crate::backend::{Adoption, Enqueued, Fault, Renewed, StoreError};
use crate::client::calls::{Reached, Where};
use crate::client::gate::{Asking, Connected, InFlight, Pass, Replaced};
use crate::client::lease::Lease;
use crate::client::shared::{Sent, Shared};
use crate::client::tracked::{Cleanup, Stage};
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::pauses::{Pauses, jittered};
use crate::request::mismatch;

/// How much longer than its time limit a caller waits if the lock is nearly granted.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(50);

/// The result of a step towards a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The ticket holds. At this reading of the clock, its lease had not ended.
    Granted(Instant),
    Waiting,
    /// The store does not know the ticket any more, or the ticket ran out before it could be used.
    Lost,
    /// The lease is renewed, and its ttl is longer than this connection allows. Nothing was sent.
    /// The caller asks again, with this ttl.
    TtlTooLong(Duration),
    /// The store has refused, because it has no line or because the line is full. There is no
    /// ticket. The caller may ask again: see [`Pace`].
    AskAgain {
        /// As in [`Enqueued::Busy`].
        retry_in: Option<Duration>,
    },
}

/// How often this process asks a store [without a queue](crate::backend::Capability::queues), or
/// one whose line is full.
///
/// The pauses have full jitter, and their mean doubles from 5 ms to more than 200 ms. So the store
/// is asked soon if the lock becomes free soon, and in the long run less than five times a second.
/// Two callers that have kept the lock from each other ask at the same moment again only by chance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    mean: Duration,
    /// The store is not asked before this time.
    pub(crate) next: Instant,
}

impl Pace {
    const FIRST: Duration = Duration::from_millis(5);
    const LONGEST: Duration = Duration::from_millis(200);

    /// The pace of a first request, which may be sent at once.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            mean: Self::FIRST,
            next: now,
        }
    }

    /// The pace after the store has refused. A lease of another holder may end in `retry_in`.
    pub(crate) fn slower(self, now: Instant, retry_in: Option<Duration>) -> Self {
        let pause = jittered(self.mean * 2);
        // All waiters know the same end. The jitter keeps them from asking at the same moment.
        let ends = retry_in.map(|ends| ends.saturating_add(jittered(Self::FIRST * 2)));
        Self {
            mean: (self.mean * 2).min(Self::LONGEST),
            next: now.after(ends.map_or(pause, |ends| ends.min(pause))),
        }
    }
}

/// A ticket that the user does not have yet. Dropping it, at any await point, hands to the keeper
/// whatever may be at the store:
///
/// - If nothing was sent, there is nothing to clean up.
/// - If the enqueue was sent and no reply has come, the keeper waits for the reply and then
///   releases. So the release cannot overtake the enqueue.
/// - If an enqueue was given up without a reply, the release leaves a mark at the store. A late
///   enqueue that finds the mark is refused.
/// - If the ticket is in line or granted, the keeper releases it.
pub(crate) struct Pending {
    shared: Arc<Shared>,
    pub(super) lease: Arc<Lease>,
    asked: Asked,
    /// Whether the lease was given to the user, so that the drop does nothing.
    handed_over: bool,
}

/// What was asked of the store for a ticket, and what the store has answered.
#[derive(Default)]
struct Asked {
    /// The ticket of another client that is taken over, instead of asking for a new ticket.
    adopts: Option<Arc<Adoption>>,
    /// The runtime where the ticket was asked for, and where its wake-ups arrive.
    runtime: Option<runtime::Id>,
    /// The enqueue that is in flight.
    asking: Option<Asking>,
    /// Whether the store has answered with a ticket.
    has_ticket: bool,
    /// Whether the store has answered with an error and may have the ticket although it failed.
    left_behind: bool,
}

impl Pending {
    /// Enters a ticket into the table before it is asked for, so that a drop cleans it up.
    pub(crate) fn of(shared: &Arc<Shared>, lease: Arc<Lease>) -> Result<Self, Error> {
        shared.arm(&lease)?;
        Ok(Self {
            shared: Arc::clone(shared),
            lease,
            asked: Asked::default(),
            handed_over: false,
        })
    }

    /// As [`of`](Self::of), but takes over the ticket of another client. `lease` is the record of
    /// this client.
    pub(super) fn adopting(
        shared: &Arc<Shared>,
        lease: Arc<Lease>,
        adoption: Adoption,
    ) -> Result<Self, Error> {
        let mut pending = Self::of(shared, lease)?;
        pending.asked.adopts = Some(Arc::new(adoption));
        Ok(pending)
    }

    /// [Asks](Asked::ask) the store. Ends early if the client is shut down, or if the keeper has
    /// given up the ticket because its task was not polled. A lease that has no ticket yet is lost
    /// for no other reason. An enqueue that is in flight at that moment stays in `asking`, so that
    /// the drop passes it to the keeper.
    pub(super) async fn enqueue(
        &mut self,
        now: Option<Instant>,
        by: Instant,
        give_up: Instant,
    ) -> Result<Progress, Error> {
        let Self {
            shared,
            lease,
            asked,
            ..
        } = self;
        tokio::select! {
            biased;
            progress = asked.ask(shared, lease, now, by, give_up) => progress,
            reason = lease.until_lost(&shared.clock) => match reason {
                LostReason::Shutdown => Err(Error::shut_down()),
                _ => Ok(Progress::Lost),
            },
        }
    }

    #[cfg(test)]
    pub(crate) fn answered(&mut self, answer: Enqueued, sent: Sent) -> Result<Progress, Error> {
        self.asked.answered(&self.shared, &self.lease, answer, sent)
    }

    /// Waits for a wake-up, for a renewal that was answered "granted", or for the
    /// [turn](crate::client::turns) of the ticket. Returns `Waiting` when
    /// `give_up` has come.
    pub(crate) async fn stand_in_line(&mut self, give_up: Instant) -> Progress {
        let shared = Arc::clone(&self.shared);
        let lease = Arc::clone(&self.lease);
        loop {
            let changed = lease.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if lease.lost(shared.clock.now()).is_some() {
                return Progress::Lost;
            }
            if lease.is_granted(shared.epoch()) {
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

    /// Renews a grant before the user gets it, if little of its lease is left or if the keeper will
    /// not renew it later. In all other cases the wake-up is enough, and the store is not asked.
    async fn freshen(&mut self, give_up: Instant) -> Progress {
        let (shared, lease) = (&self.shared, &self.lease);
        let now = shared.clock.now();
        if lease.renew && now.until(lease.deadline()) >= lease.request.ttl / 2 {
            return Progress::Granted(now);
        }
        // Near `give_up`, a lock that is already granted gets a little more time than the caller's
        // limit.
        let by = give_up.max(now.after(LAST_MOMENT));
        let renewed = shared.renew_now(lease, by).await;
        let now = shared.clock.now();
        if let Ok(Renewed::Waiting { .. }) = renewed {
            // A turn stays. The store may not have seen yet that the ticket right ahead has ended.
            lease.ungrant(now);
        }
        // If the outcome is unknown, nothing changes: the user gets what is left of the lease. But a
        // gap may have begun meanwhile, so that a turn does not count yet.
        match lease.lost(now) {
            Some(_) => Progress::Lost,
            None if lease.is_granted(shared.epoch()) => Progress::Granted(now),
            None => Progress::Waiting,
        }
    }

    /// Whether the first request for this ticket is in flight because the caller's time ended
    /// before the answer came.
    pub(super) fn is_cut_short(&self) -> bool {
        let lost = self.lease.lost(self.shared.clock.now());
        self.asked.asking.is_some() && !self.lease.is_ambiguous() && lost.is_none()
    }

    /// Whether this is a ticket in the store's line that another task can take over.
    pub(crate) fn is_in_line(&self) -> bool {
        let lost = self.lease.lost(self.shared.clock.now());
        self.asked.has_ticket && self.asked.asking.is_none() && lost.is_none()
    }

    /// Whether the runtime `here` receives the wake-ups of this ticket.
    pub(crate) fn is_heard(&self, here: Option<runtime::Id>) -> bool {
        self.asked
            .runtime
            .is_none_or(|asked| self.shared.is_heard(asked, here))
    }

    /// Gives the lease to the caller, who is responsible for it from now on. The keeper keeps
    /// renewing it. `None` if the keeper has given the ticket back because its task was not polled.
    pub(crate) fn into_lease(mut self) -> Option<Arc<Lease>> {
        self.handed_over = self.shared.entrust_held(&self.lease);
        self.handed_over.then(|| Arc::clone(&self.lease))
    }
}

impl Asked {
    /// Sends the request until the store answers, until an error comes that another attempt cannot
    /// correct, or until `by`. The id stays the same. If an earlier attempt was carried out and its
    /// answer was lost, the store finds that ticket by the id and makes no second ticket.
    ///
    /// A request waits at the gate of its connection while too many requests of this process are in
    /// flight: see `client::gate`. `by` is the limit for a store that does not answer. The wait at
    /// the gate does not count towards `by`, because the store is working on other requests. It
    /// counts only towards `give_up`, the end of the caller's time. `Waiting` means that `give_up`
    /// came while the request waited at the gate.
    ///
    /// `now` is the present time, if the caller has read the clock and has awaited nothing since.
    /// It saves a reading of the clock.
    async fn ask(
        &mut self,
        shared: &Arc<Shared>,
        lease: &Arc<Lease>,
        now: Option<Instant>,
        mut by: Instant,
        give_up: Instant,
    ) -> Result<Progress, Error> {
        let mut pauses = Pauses::between(Duration::from_millis(5), Duration::from_millis(200));
        let mut fresh = now;
        loop {
            let reached = shared.connection(Where::Here, by).await;
            let Reached {
                connected,
                runtime,
                waited,
            } = reached.map_err(|error| self.failed(lease, error))?;
            self.runtime = Some(runtime);
            let longest = connected.verbs().longest_ttl();
            if lease.renew && lease.request.ttl > longest && !lease.is_ambiguous() {
                return Ok(Progress::TtlTooLong(longest));
            }
            let now = fresh.take().filter(|_| !waited);
            // If the future is dropped here, nothing was sent.
            let pass = match shared.admit(connected.enqueues(), 1, give_up).await {
                Some(Ok(pass)) => pass,
                Some(Err(Replaced)) => {
                    by = by.max(give_up.min(shared.clock.now().after(shared.op_timeout)));
                    continue;
                }
                // An earlier attempt may have been carried out, so the outcome is unknown.
                None if lease.is_ambiguous() => {
                    let text = "too many requests are in front of this one";
                    return Err(self.failed(lease, StoreError::new(Fault::Unknown, text)));
                }
                None if lease.request.wait => return Ok(Progress::Waiting),
                None => {
                    let text = "too many requests of this process are in front of this one";
                    return Err(self.failed(lease, StoreError::new(Fault::Retry, text)));
                }
            };
            // The lease is counted from this moment, which is before the send.
            let sent = shared.sent_since(now.filter(|_| !pass.has_waited));
            let in_flight = connected.answers().asked(sent.at);
            if pass.has_waited {
                // Near `give_up`, the request gets a little more time, because otherwise the
                // outcome would be unknown.
                let last = give_up.max(sent.at.after(LAST_MOMENT));
                by = by.max(last.min(sent.at.after(shared.op_timeout)));
            }
            let attempt = (connected, in_flight, pass);
            let error = match self.send(shared, lease, attempt, sent, by).await {
                Ok(answer) => return self.answered(shared, lease, answer, sent),
                Err(error) => error,
            };
            // The drop of the `Pending` gives back whatever may be at the store.
            self.left_behind |= error.is_halfway();
            match error.fault() {
                // If `asking` is set, the reply may come later. If the caller gives up now, the
                // keeper may get that reply, and then no mark at the store is needed. So the lease
                // is not ambiguous yet.
                Fault::Unknown if self.asking.is_none() => lease.set_ambiguous(),
                Fault::Unknown | Fault::Retry => {}
                Fault::Config | Fault::Refused => return Err(self.failed(lease, error)),
            }
            let again = shared.clock.now().after(pauses.draw());
            if again >= by {
                return Err(self.failed(lease, error));
            }
            if self.asking.take().is_some() {
                lease.set_ambiguous();
            }
            tracing::debug!(%error, "asking the store again");
            shared.alarm(again).await;
        }
    }

    /// Sends the request once, and waits for the answer for one operation timeout, but not longer than
    /// until `by`. If no answer has come, the enqueue stays in `asking`.
    async fn send(
        &mut self,
        shared: &Arc<Shared>,
        lease: &Arc<Lease>,
        (connected, in_flight, pass): (Arc<Connected>, InFlight, Pass),
        sent: Sent,
        by: Instant,
    ) -> Result<Enqueued, StoreError> {
        let answered_by = sent.at.after(shared.op_timeout).after(lease.request.ttl);
        shared.will_be_answered_by(lease.request.id, answered_by);
        let one_operation = by.min(sent.at.after(shared.op_timeout));
        let patience = sent.at.until(one_operation);
        let verbs = connected.verbs();
        let answer = match &self.adopts {
            Some(adoption) => verbs.adopt(Arc::clone(adoption)),
            None => verbs.enqueue(Arc::clone(&lease.request), patience),
        };
        // The request is sent at the first poll. If this future is dropped after that, the keeper
        // takes over this enqueue. If an earlier attempt had no answer, the lease is already marked
        // as ambiguous.
        let asking = self.asking.insert(Asking {
            answer,
            connected,
            in_flight,
            pass,
        });
        let outcome = shared.by(one_operation, &mut asking.answer).await;
        let gate = asking.connected.enqueues();
        match outcome {
            Some(outcome) => {
                shared.learn(gate, sent, outcome.as_ref().err());
                shared.links.ended(&asking.connected, &outcome);
                self.asking = None;
                outcome
            }
            None => {
                shared.unanswered(&asking.connected, asking.in_flight);
                let text = format!("{} did not answer in time", shared.store());
                let error = StoreError::new(Fault::Unknown, text);
                shared.learn(gate, sent, Some(&error));
                Err(error)
            }
        }
    }

    fn answered(
        &mut self,
        shared: &Arc<Shared>,
        lease: &Arc<Lease>,
        answer: Enqueued,
        sent: Sent,
    ) -> Result<Progress, Error> {
        let (ticket, valid_for, recheck_in, ahead) = match answer {
            Enqueued::Granted { ticket, valid_for } => (ticket, valid_for, None, None),
            Enqueued::Waiting {
                ticket,
                valid_for,
                recheck_in,
                ahead,
            } => (ticket, valid_for, recheck_in, ahead),
            Enqueued::Busy { retry_in } if lease.request.wait => {
                return Ok(Progress::AskAgain { retry_in });
            }
            Enqueued::Busy { retry_in } => return Err(Error::busy(retry_in)),
            Enqueued::CapacityMismatch { in_use } => {
                return Err(mismatch(lease.request.capacity, in_use));
            }
            Enqueued::Gone => return Ok(Progress::Lost),
        };
        self.has_ticket = true;
        shared.saw_ticket(ticket);
        lease.confirm(sent.epoch);
        lease.answered(ticket, sent.at, valid_for);
        let now = shared.clock.now();
        if lease.lost(now).is_some() {
            // The reply took longer than the lease.
            return Ok(Progress::Lost);
        }
        if let Enqueued::Granted { .. } = answer {
            lease.note_granted(sent.at);
            return Ok(Progress::Granted(now));
        }
        tracing::debug!(ticket, "in line");
        let due = Shared::renewal_time(lease, valid_for);
        let due = recheck_in.map_or(due, |recheck| due.min(sent.at.after(recheck)));
        // If a gap has begun since the request was sent, a wake-up may have been lost.
        let due = match sent.epoch < shared.epoch() {
            true => now,
            false => due,
        };
        if !shared.entrust(lease.request.id, Stage::Waiting, due) {
            return Ok(Progress::Lost);
        }
        if let Some(ahead) = ahead.filter(|_| lease.request.name_ahead) {
            shared.follow(ahead, lease, now);
        }
        Ok(Progress::Waiting)
    }

    /// Turns an error of the store into an error for the caller. If the store may have carried out
    /// any of the attempts, the outcome is unknown, whatever the last error was.
    fn failed(&self, lease: &Lease, error: StoreError) -> Error {
        let perhaps_carried_out = lease.is_ambiguous() || self.asking.is_some();
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
        let after = self.asked.asking.take();
        let may_be_left = after.is_some() || self.asked.left_behind || ambiguous;
        if !may_be_left && !self.asked.has_ticket {
            self.shared.disarm(self.lease.request.id);
            return;
        }
        let cleanup = Cleanup {
            after,
            ..Cleanup::of(&self.lease)
        };
        match may_be_left {
            true => self.shared.clean_up(cleanup),
            false => self.shared.clean_up_if_known(cleanup),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: u64) -> Instant {
        Instant::from_nanos(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_store_without_a_line_is_asked_soon_and_then_less_than_five_times_a_second() {
        let mut now = after(1);
        let mut pace = Pace::new(now);
        let asks = std::iter::from_fn(|| {
            pace = pace.slower(now, None);
            now = pace.next;
            Some(now)
        });
        let asks: Vec<_> = asks.take_while(|at| *at < after(1_001)).collect();

        assert!(asks[0] <= after(1).after(Duration::from_millis(10)));
        // The mean pause is 220 ms, so this is far from the bound.
        assert!(asks.len() < 5_000, "{}", asks.len());
    }

    /// Two callers that ask within a round trip of each other each get a part of the nodes of a
    /// quorum, and neither gets a majority.
    #[test]
    fn two_that_keep_the_lock_from_each_other_are_parted_by_their_pauses() {
        let round_trip = Duration::from_millis(1);
        let together = |one: Pace, other: Pace| {
            let (first, last) = (one.next.min(other.next), one.next.max(other.next));
            first.until(last) < round_trip
        };
        for _ in 0..100 {
            let (mut one, mut other) = (Pace::new(after(1)), Pace::new(after(1)));
            let mut asked = 0;
            while together(one, other) {
                [one, other] = [one, other].map(|pace| pace.slower(pace.next, None));
                asked += 1;
                assert!(asked < 100, "they still ask at the same time");
            }
        }
    }

    #[test]
    fn the_end_of_a_lease_is_not_waited_past() {
        let mut pace = Pace::new(after(1));
        for _ in 0..100 {
            pace = pace.slower(after(1), Some(Duration::from_millis(3)));
            let pause = after(1).until(pace.next);
            assert!(pause <= Duration::from_millis(13), "{pause:?}");
        }
    }
}
