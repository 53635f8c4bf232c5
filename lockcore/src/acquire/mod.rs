//! Acquiring: the acquire loop and its steps.
//!
//! A caller first queues with the other tasks of its process ([`lanes`]). One of these tasks asks
//! the store on behalf of all ([`pending`]). Keeping a lease alive is in `client`. The guards of
//! the user are in `hold`.

pub(crate) mod adopt;
mod groups;
pub(crate) mod handle;
mod lane;
pub(crate) mod lanes;
pub(crate) mod pending;
pub(crate) mod spec;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::client::lease::Lease;
use crate::client::leftovers::Left;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind};
use crate::meter::HandOver;
use crate::options::Wait;
use crate::pauses::Pauses;
use crate::request::Request;
use lanes::{Arrived, Handover, Role, Share};
use pending::{LAST_MOMENT, Pace, Pending, Progress};
use spec::Spec;

/// Takes the lock that `spec` describes.
///
/// If the store is out of reach, this fails within one operation timeout, so that callers do not
/// pile up in front of it. A caller that waits [through outages](crate::Lock::through_outages) asks
/// again.
///
/// Dropping the future at any point leaves nothing behind: see [`Pending`] for what is at the
/// store, and [`lanes`] for callers that wait in memory.
pub(crate) async fn acquire(spec: &Spec<'_>, budget: &Budget) -> Result<Grant, Error> {
    // An early request that fails is no event for the metrics, because the caller asks again.
    let asking = (!budget.early).then(|| spec.meter.asks());
    let outcome = match ask(spec, budget, budget.started).await {
        Err(error) if spec.through_outages && budget.waits && error.is_outage() => {
            budget.note_wait();
            // On the heap, because this happens seldom.
            Box::pin(through_outage(spec, budget, error)).await
        }
        outcome => outcome,
    };
    match (&outcome, asking) {
        (Ok(grant), asking) => {
            let asking = asking.unwrap_or_else(|| spec.meter.asks());
            asking.granted(budget.started.until(grant.since()), grant.handed_over_by());
        }
        (Err(error), Some(asking)) => asking.refused(error),
        (Err(_), None) => {}
    }
    outcome
}

/// Asks again until the outage is over, or until the time of the caller is. In the latter case,
/// returns the last error of the outage. Each attempt queues anew in this process and at the store.
/// If an attempt has no answer, its ticket is given back before or after the next attempt takes
/// another.
async fn through_outage(
    spec: &Spec<'_>,
    budget: &Budget,
    mut error: Error,
) -> Result<Grant, Error> {
    let shared = &spec.client.shared;
    // An attempt at a store that cannot be reached waits for the connection, so it does not come
    // late. These pauses are for a store that refuses at once.
    let mut pauses = Pauses::between(Duration::from_millis(5), Duration::from_millis(200));
    loop {
        tracing::debug!(%error, "waiting for the end of the outage");
        let again = shared.clock.now().after(pauses.draw());
        if again >= budget.give_up {
            return Err(error);
        }
        shared.alarm(again).await;
        match ask(spec, budget, shared.clock.now()).await {
            Err(still) if still.is_outage() => error = still,
            outcome => return outcome,
        }
    }
}

/// One attempt, which begins at `now`. If the store refuses a caller that does not wait, tickets that
/// nobody of this client uses any more may be the reason. When the keeper has removed them, the
/// store is asked once more.
async fn ask(spec: &Spec<'_>, budget: &Budget, now: Instant) -> Result<Grant, Error> {
    let shared = &spec.client.shared;
    let mut left = None;
    let refused = match ask_once(spec, budget, now, &mut left).await {
        Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::CapacityMismatch) => {
            error
        }
        outcome => return outcome,
    };
    let Some(left) = left else {
        return Err(refused);
    };
    // On the heap, because this happens seldom. If the future is dropped here, nothing of it is at
    // the store, and no lane has it.
    let gone = Box::pin(shared.by(budget.give_up, left.gone())).await;
    let now = shared.clock.now();
    if gone.is_none() || now >= budget.give_up {
        return Err(refused);
    }
    match Box::pin(ask_once(spec, budget, now, &mut None)).await {
        // The time was too short for another answer. The earlier one is still true: nothing is held.
        Err(error) if error.is_outage() || error.kind() == ErrorKind::Timeout => Err(refused),
        outcome => outcome,
    }
}

/// Notes in `left` what this client had left at the store when the store was asked, if the caller
/// does not wait.
async fn ask_once(
    spec: &Spec<'_>,
    budget: &Budget,
    now: Instant,
    left: &mut Option<Left>,
) -> Result<Grant, Error> {
    let shared = &spec.client.shared;
    let (handover, began) = in_this_process(spec, budget, now).await?;
    let asks = matches!(handover, None | Some(Handover::Leader(_)));
    if asks && !budget.waits {
        *left = shared.left(spec.name);
    }
    match handover {
        Some(Handover::Share(share)) => Ok(Grant::Share(share, began)),
        Some(Handover::Refused(error)) => Err(error),
        Some(Handover::Leader(mut leader)) => {
            let role = Some(&leader.role);
            match at_the_store(spec, budget, began, role, &mut leader.pending).await {
                Ok((lease, since)) => match leader.granted(lease, since) {
                    Ok(share) => Ok(Grant::Share(share, since)),
                    Err(lease) => Ok(Grant::Ticket(lease, since)),
                },
                Err(error) => {
                    // If the caller's own time was shorter than an operation may take, the error
                    // says nothing about the store. So the waiters behind it do not get the error.
                    if budget.give_up >= began.after(shared.op_timeout) {
                        leader.failed(&error);
                    }
                    Err(error)
                }
            }
        }
        None => {
            let (lease, since) = at_the_store(spec, budget, began, None, &mut None).await?;
            Ok(Grant::Ticket(lease, since))
        }
    }
}

/// A lock that was granted. The caller makes it into a guard in the same poll. No code that can
/// panic runs before that, because a ticket has no drop of its own. The `Instant` is a
/// reading of the clock. Nothing was awaited after it.
pub(crate) enum Grant {
    /// One use of a ticket that other tasks of this process may use as well.
    Share(Share, Instant),
    /// A ticket that nobody else uses.
    Ticket(Arc<Lease>, Instant),
}

impl Grant {
    fn since(&self) -> Instant {
        match self {
            Self::Share(_, since) | Self::Ticket(_, since) => *since,
        }
    }

    /// What the lock came from, if it was not free.
    fn handed_over_by(&self) -> Option<HandOver> {
        let lease = match self {
            Self::Share(share, _) if share.hand_overs() > 0 => return Some(HandOver::Process),
            Self::Share(share, _) => share.lease(),
            Self::Ticket(lease, _) => lease,
        };
        // A ticket that was granted at once has got no report of its grant.
        match lease.has_turn() {
            true => Some(HandOver::Process),
            false => lease.was_reported().then_some(HandOver::Store),
        }
    }
}

/// The time that a caller gives to an acquire.
pub(crate) struct Budget {
    started: Instant,
    pub(crate) give_up: Instant,
    pub(crate) waits: bool,
    /// Whether the caller will wait for the lock later, if it is refused now.
    pub(crate) early: bool,
    /// Told when the caller has to wait for others.
    others: Option<Arc<Notify>>,
}

impl Budget {
    /// The time starts now. With `None` the caller does not wait for a holder.
    pub(crate) fn new(spec: &Spec<'_>, wait: Option<Wait>) -> Self {
        let shared = &spec.client.shared;
        let started = shared.clock.now();
        let wait = wait.filter(|wait| *wait != Wait::For(Duration::ZERO));
        Self {
            started,
            give_up: match wait {
                None => started.after(shared.op_timeout),
                Some(Wait::For(budget)) => started.after(budget),
                Some(Wait::Forever) => Instant::FAR_FUTURE,
            },
            waits: wait.is_some(),
            early: false,
            others: None,
        }
    }

    /// The budget of a request that is sent before the caller's turn has come to wait for the lock.
    pub(crate) fn early(self) -> Self {
        Self {
            early: true,
            ..self
        }
    }

    /// Notifies `others` when the caller has to wait for others.
    pub(crate) fn telling(self, others: Arc<Notify>) -> Self {
        Self {
            others: Some(others),
            ..self
        }
    }

    /// The caller has to wait for others: it stands in a line, or asks again later.
    pub(crate) fn note_wait(&self) {
        if let Some(others) = &self.others {
            others.notify_one();
        }
    }

    /// Ends this time after the start, if it does not end earlier.
    pub(crate) fn at_most(self, time: Duration) -> Self {
        Self {
            give_up: self.give_up.min(self.started.after(time)),
            ..self
        }
    }

    /// When the store must have answered the first request of a caller that begins to ask now.
    ///
    /// If the store is down, the first attempt fails within one operation timeout, so that callers
    /// do not pile up in front of the store. Once the store has answered, later attempts may use all
    /// of the time of the caller. A caller that becomes the leader at the last moment gets a little
    /// more time, because otherwise the outcome would be unknown.
    fn first_answer_by(&self, now: Instant, op_timeout: Duration) -> Instant {
        let waited = now > self.started;
        let at_least = now.after(if waited { LAST_MOMENT } else { Duration::ZERO });
        self.give_up.max(at_least).min(now.after(op_timeout))
    }

    /// The time since the start.
    pub(crate) fn waited(&self, spec: &Spec<'_>) -> Duration {
        self.started.until(spec.client.shared.clock.now())
    }

    pub(crate) fn timeout(&self, spec: &Spec<'_>) -> Error {
        Error::timeout(self.waited(spec))
    }
}

/// Waits in the lane of this lock, behind other tasks of the process. Returns the hand-over that
/// the lane gave to this task, or `None` if the task must take a ticket of its own. The `Instant`
/// is the last reading of the clock: `now`, or the end of the wait in the lane.
async fn in_this_process(
    spec: &Spec<'_>,
    budget: &Budget,
    mut now: Instant,
) -> Result<(Option<Handover>, Instant), Error> {
    let shared = &spec.client.shared;
    if !spec.is_shareable() {
        shared.linger_no_more(spec.name);
        return Ok((None, now));
    }
    let exclusive = spec.is_exclusive();
    loop {
        let arrived = (spec.client.lanes).arrive(spec.name, spec.ttl, exclusive, budget.waits, now);
        let handover = match arrived {
            Arrived::Given(handover) => handover,
            Arrived::OwnTicket => {
                shared.linger_no_more(spec.name);
                return Ok((None, now));
            }
            Arrived::Busy(remaining) => return Err(Error::busy(remaining)),
            Arrived::Crowded => return Err(Error::crowded(None)),
            // If the future is dropped here, or its time is over, it leaves the queue. If the lane
            // had already given it a hand-over, the next waiter gets that.
            Arrived::Waits(waiting) => {
                budget.note_wait();
                let given = shared.by(budget.give_up, waiting).await;
                now = shared.clock.now();
                match given {
                    Some(Some(handover)) => handover,
                    // The lane has taken the hand-over back, because this future was not polled for
                    // most of a ttl.
                    Some(None) if now < budget.give_up => continue,
                    Some(None) | None => return Err(budget.timeout(spec)),
                }
            }
        };
        match &handover {
            // The lease ended before this task got it, for example because the machine slept. The
            // task queues again.
            Handover::Share(share) if share.lease().lost(now).is_some() => now = shared.clock.now(),
            // This task became the leader too late to ask the store. The next waiter may have time.
            Handover::Leader(leader) if leader.pending.is_none() && now >= budget.give_up => {
                return Err(budget.timeout(spec));
            }
            _ => return Ok((Some(handover), now)),
        }
    }
}

/// Takes a ticket at the store, or continues with the one in `place`, and waits until it is
/// granted. Returns also a reading of the clock, after which nothing was awaited. If this ends
/// without a lease, the drop of `place` gives up the ticket in it.
async fn at_the_store(
    spec: &Spec<'_>,
    budget: &Budget,
    began: Instant,
    leader: Option<&Role>,
    place: &mut Option<Pending>,
) -> Result<(Arc<Lease>, Instant), Error> {
    let mut caller = Caller::new(spec, budget, began, leader, place.is_some());
    loop {
        let progress = match place {
            Some(pending) => {
                caller.fresh = None;
                pending.stand_in_line(budget.give_up).await
            }
            None => {
                caller.until_it_may_ask().await?;
                caller.enqueue(place).await?
            }
        };
        match progress {
            Progress::Granted(since) => {
                // `place` is full, because `progress` came from it. If the keeper has recalled the
                // grant, the loop takes a new ticket.
                if let Some(lease) = place.take().and_then(Pending::into_lease) {
                    return Ok((lease, since));
                }
                caller.was_in_line = true;
            }
            // Nothing was sent.
            Progress::TtlTooLong(longest) => {
                *place = None;
                caller.ttl = longest;
                continue;
            }
            Progress::Waiting => caller.waits(place.as_ref()),
            Progress::Lost => {
                *place = None;
                caller.lost();
            }
            Progress::AskAgain { retry_in } => {
                *place = None;
                caller.refused(retry_in)?;
            }
        }
        if spec.client.shared.clock.now() >= budget.give_up {
            return Err(budget.timeout(spec));
        }
        caller.enqueue_by = budget.give_up;
    }
}

/// A caller that asks the store: what it asks for, and what the answers so far mean for the next
/// request. A leader tells its lane of the answers.
struct Caller<'a> {
    spec: &'a Spec<'a>,
    budget: &'a Budget,
    leader: Option<&'a Role>,
    /// When the store must have answered the next request.
    enqueue_by: Instant,
    /// A reading of the clock, if nothing was awaited since it was taken.
    fresh: Option<Instant>,
    ttl: Duration,
    /// Only used if the store has no line, or if the line is full. A leader continues at the pace of
    /// the leader before it.
    pace: Option<Pace>,
    /// The line may be full because of the place that this caller has lost, and others of this
    /// client theirs: the keeper gives them back one after another. So a caller that has been in line
    /// is not refused. It asks again, and so does the next leader of its lane.
    was_in_line: bool,
}

impl<'a> Caller<'a> {
    fn new(
        spec: &'a Spec<'a>,
        budget: &'a Budget,
        began: Instant,
        leader: Option<&'a Role>,
        is_in_line: bool,
    ) -> Self {
        let pace = leader.and_then(|role| spec.client.lanes.pace(role));
        Self {
            spec,
            budget,
            leader,
            enqueue_by: budget.first_answer_by(began, spec.client.shared.op_timeout),
            fresh: Some(began),
            ttl: spec.ttl,
            pace,
            was_in_line: is_in_line || pace.is_some(),
        }
    }

    /// Waits for the time of the next request, and for the group in front. If the future is dropped
    /// here, no ticket of it is at the store.
    async fn until_it_may_ask(&mut self) -> Result<(), Error> {
        let (client, give_up) = (self.spec.client, self.budget.give_up);
        let shared = &client.shared;
        if let Some(pace) = self.pace {
            self.budget.note_wait();
            shared.alarm(pace.next.min(give_up)).await;
            if pace.next >= give_up {
                return Err(self.budget.timeout(self.spec));
            }
            // At the end of the caller's time, the answer gets a little more time.
            self.enqueue_by = self.enqueue_by.max(shared.clock.now().after(LAST_MOMENT));
            self.fresh = None;
        }
        if let Some(role) = self.leader
            && client.lanes.gather_until(role, give_up).await
        {
            let now = shared.clock.now();
            if now >= give_up {
                return Err(self.budget.timeout(self.spec));
            }
            let by = self.budget.first_answer_by(now, shared.op_timeout);
            self.enqueue_by = self.enqueue_by.max(by);
            self.fresh = None;
        }
        Ok(())
    }

    async fn enqueue(&mut self, place: &mut Option<Pending>) -> Result<Progress, Error> {
        let (spec, budget) = (self.spec, self.budget);
        let now = self.fresh.take();
        let pending = place.insert(arm(spec, self.ttl, budget.waits)?);
        let asked = pending.enqueue(now, self.enqueue_by, budget.give_up);
        match asked.await {
            // The store has answered earlier requests of this caller. This request was cut off only
            // because less time was left than an operation may take.
            Err(_) if self.pace.is_some() && pending.is_cut_short() => Err(budget.timeout(spec)),
            progress => progress,
        }
    }

    fn waits(&mut self, place: Option<&Pending>) {
        self.budget.note_wait();
        self.was_in_line |= place.is_some_and(Pending::is_in_line);
        if let (Some(role), Some(pending)) = (self.leader, place) {
            self.spec.client.lanes.in_line(role, &pending.lease);
        }
    }

    fn lost(&mut self) {
        self.was_in_line = true;
        if let Some(role) = self.leader {
            self.spec.client.lanes.out_of_line(role);
        }
    }

    /// The store has no line, or the line is full.
    fn refused(&mut self, retry_in: Option<Duration>) -> Result<(), Error> {
        let shared = &self.spec.client.shared;
        if shared.capability.queues && !self.was_in_line {
            return Err(Error::crowded(retry_in));
        }
        self.budget.note_wait();
        let now = shared.clock.now();
        let slower = self.pace.unwrap_or(Pace::new(now)).slower(now, retry_in);
        self.pace = Some(slower);
        if let Some(role) = self.leader {
            self.spec.client.lanes.asks_again(role, slower);
        }
        Ok(())
    }
}

fn arm(spec: &Spec<'_>, ttl: Duration, wait: bool) -> Result<Pending, Error> {
    let shared = &spec.client.shared;
    let linger = spec.lingers_for();
    let request = Request {
        name: spec.name.clone(),
        id: shared.new_id()?,
        permits: spec.permits,
        capacity: spec.capacity,
        ttl,
        wait,
        name_ahead: false,
        lingers: !linger.is_zero(),
        highest_seen: shared.highest_seen(),
        owner: Arc::clone(spec.owner),
    };
    let request = Request {
        name_ahead: wait && shared.capability.names_ahead && request.wants_all(),
        ..request
    };
    let lease = Lease::new(Arc::new(request), spec.renew);
    let lease = lease.measured_by(spec.meter.clone()).lingering(linger);
    Pending::of(shared, Arc::new(lease))
}

#[cfg(test)]
mod tests;
