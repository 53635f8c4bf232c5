//! Operations at the store, with their deadlines. This file chooses the connection, waits until the
//! gate lets the operation pass, and decides what happens to the connection when no answer comes.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime;

use super::gate::{Connected, Gate, InFlight, Pass, Replaced};
use super::lease::Lease;
use super::links::{Link, NotConnected};
use super::shared::{FORKED, Sent, Shared};
use crate::backend::{Answer, Connection, Departure, Fault, Released, StoreError, TicketInfo};
use crate::clock::Instant;
use crate::error::Error;
use crate::log::guarded;
use crate::name::Name;

/// How long a request of the keeper waits for the keeper's own connection before it uses one that is
/// lent.
pub(super) const OWN: Duration = Duration::from_millis(50);

/// The connection on which an operation is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Where {
    /// The connection of the runtime that the caller runs in.
    Here,
    /// The keeper's connection.
    Keeper,
}

/// A connection that is up.
pub(crate) struct Reached {
    pub(crate) connected: Arc<Connected>,
    /// The runtime to which the connection belongs.
    pub(crate) runtime: runtime::Id,
    /// Whether the caller had to wait for the connection, so that time has passed.
    pub(crate) waited: bool,
}

impl Shared {
    /// Carries out one operation that passes no gate. Also returns the moment before it was sent,
    /// because a lease is counted from that moment. Fails if the answer has not come by `by`; the
    /// time for connecting counts. The verb gets as its second argument how long this call waits
    /// for the answer.
    pub(crate) async fn operate<T>(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
        verb: impl FnOnce(&dyn Connection, Duration) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        if self.is_forked() {
            return Err(StoreError::new(Fault::Config, FORKED));
        }
        let reached = self.connection(whose, by).await?;
        let sent = self.sent_now();
        self.send(&reached.connected, by, sent, verb).await
    }

    /// [`operate`](Self::operate) for a task of the keeper whose result callers wait for. A panic of
    /// the store is an error here. Otherwise it would end the task, and the callers would wait for
    /// ever.
    pub(super) async fn operate_for_callers<T>(
        self: &Arc<Self>,
        by: Instant,
        verb: impl FnOnce(&dyn Connection, Duration) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        let operation = AssertUnwindSafe(self.operate(Where::Keeper, by, verb));
        let panicked = |_| {
            let text = format!("{} panicked: this is a bug in it", self.store());
            Err(StoreError::new(Fault::Unknown, text))
        };
        operation.catch_unwind().await.unwrap_or_else(panicked)
    }

    /// The longest ttl that a ticket can have. At a store with sessions only the connection knows
    /// it, so this waits for the connection.
    pub(crate) async fn longest_ttl(self: &Arc<Self>, by: Instant) -> Result<Duration, StoreError> {
        let longest = self.capability.longest_ttl;
        if !self.capability.sessions {
            return Ok(longest);
        }
        let reached = self.connection(Where::Here, by).await?;
        Ok(longest.min(reached.connected.verbs().longest_ttl()))
    }

    /// The tickets of a name, oldest first, as the store shows them.
    pub(crate) async fn inspect(self: &Arc<Self>, name: &Name) -> Result<Vec<TicketInfo>, Error> {
        let by = self.clock.now().after(self.op_timeout);
        let looked_at = name.clone();
        let answer = self.operate(Where::Here, by, |connection, _| {
            connection.inspect(looked_at)
        });
        // The request only reads, so an unknown outcome is impossible.
        let (_, places) = answer
            .await
            .map_err(|error| error.unavailable_unless_config().of_name(name.as_str()))?;
        Ok(places)
    }

    /// Releases tickets in one request. The time limit of the request counts from `now`. Fails if
    /// the request has not passed the gate by `turn_by`, or if the store has not answered within
    /// one operation timeout.
    pub(crate) async fn release(
        self: &Arc<Self>,
        whose: Where,
        now: Instant,
        turn_by: Instant,
        departures: Vec<Departure>,
    ) -> Result<Vec<Released>, StoreError> {
        let mut by = now.after(self.op_timeout);
        let mut at_once = true;
        loop {
            let Reached {
                connected, waited, ..
            } = self.connection(whose, by).await?;
            // The pass is kept until the answer has come. If this future is dropped before that,
            // the pass comes back although the store may be working on the request. Then, for a
            // moment, one request more is in flight than the store allows.
            let admitted = self.admit(connected.releases(), departures.len(), turn_by);
            let pass = match admitted.await {
                Some(Ok(pass)) => pass,
                Some(Err(Replaced)) => {
                    by = self.clock.now().after(self.op_timeout).min(turn_by);
                    at_once = false;
                    continue;
                }
                None => {
                    let text = "too many releases are in front of this one";
                    return Err(StoreError::new(Fault::Retry, text));
                }
            };
            at_once &= !waited && !pass.has_waited;
            let sent = self.sent_since(at_once.then_some(now));
            if pass.has_waited {
                by = sent.at.after(self.op_timeout);
            }
            let answer = self.send(&connected, by, sent, |verbs, _| verbs.release(departures));
            let outcome = answer.await;
            self.learn(connected.releases(), sent, outcome.as_ref().err());
            return outcome.map(|(_, answers)| answers);
        }
    }

    /// Releases a held ticket at a store that [answers at
    /// once](crate::backend::Capability::answers_at_once). Returns whether the store has released
    /// it, or `None` if nothing was sent.
    pub(super) fn release_at_once(self: &Arc<Self>, lease: &Arc<Lease>) -> Option<bool> {
        let here = runtime::Handle::try_current().ok();
        let connected = self.links.up(self.serving(here.as_ref()))?;
        let _pass = connected.releases().try_pass(1)?;
        self.leave(lease);
        let departure = Departure::new(lease.as_enqueued(), lease.is_ambiguous());
        let mut released = None;
        // This may run in the drop of a guard during a panic.
        guarded(|| {
            let answer = connected.verbs().release(vec![departure]);
            let answers = answer.now_or_never().and_then(Result::ok);
            released = answers.and_then(|answers| answers.first().copied());
        });
        if released == Some(Released::NotFound) {
            self.missing(lease);
        }
        Some(matches!(
            released,
            Some(Released::Released | Released::NotFound)
        ))
    }

    /// As [`release`](Self::release), for the keeper on a connection that [another runtime
    /// drives](super::links::Links::lent).
    pub(super) async fn release_lent(
        self: &Arc<Self>,
        connected: &Connected,
        turn_by: Instant,
        departures: Vec<Departure>,
    ) -> Result<Vec<Released>, StoreError> {
        let admitted = self.admit(connected.releases(), departures.len(), turn_by);
        let Some(Ok(_pass)) = admitted.await else {
            let text = "the connection of a caller was replaced, or has no room for this release";
            return Err(StoreError::new(Fault::Retry, text));
        };
        let by = self.clock.now().after(self.op_timeout);
        let verb = |verbs: &dyn Connection, _| verbs.release(departures);
        let outcome = self.send_lent(connected, by, verb).await;
        outcome.map(|(_, answers)| answers)
    }

    /// Lets a gate learn from the outcome of a request that has passed it.
    pub(crate) fn learn(&self, gate: &Gate, sent: Sent, error: Option<&StoreError>) {
        // This saves a reading of the clock for most requests.
        if !gate.is_full() {
            return;
        }
        let after = sent.at.until(self.clock.now());
        match error.filter(|error| error.fault() == Fault::Unknown) {
            None => gate.learn(Some(after), self.op_timeout),
            // A caller that has waited for a moment only says nothing about the store.
            Some(_) if after < self.op_timeout / 2 => {}
            Some(_) => gate.learn(None, self.op_timeout),
        }
    }

    pub(super) async fn send<T>(
        self: &Arc<Self>,
        connected: &Connected,
        by: Instant,
        sent: Sent,
        verb: impl FnOnce(&dyn Connection, Duration) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        let in_flight = connected.answers().asked(sent.at);
        let answer = verb(connected.verbs(), sent.at.until(by));
        match self.by(by, answer).await {
            Some(outcome) => {
                self.links.ended(connected, &outcome);
                outcome.map(|answer| (sent, answer))
            }
            None => {
                self.unanswered(connected, in_flight);
                Err(self.silence())
            }
        }
    }

    /// As [`send`](Self::send), for the keeper on a connection that [another runtime
    /// drives](super::links::Links::lent). If that runtime is blocked, the absence of an answer says
    /// nothing about the connection.
    pub(super) async fn send_lent<T>(
        self: &Arc<Self>,
        connected: &Connected,
        by: Instant,
        verb: impl FnOnce(&dyn Connection, Duration) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        let sent = self.sent_now();
        let in_flight = connected.answers().asked(sent.at);
        let answer = verb(connected.verbs(), sent.at.until(by));
        let Some(outcome) = self.by(by, answer).await else {
            if self.links.is_driven(connected).await {
                self.unanswered(connected, in_flight);
            }
            return Err(self.silence());
        };
        self.links.ended(connected, &outcome);
        outcome.map(|answer| (sent, answer))
    }

    fn silence(&self) -> StoreError {
        let text = format!("{} did not answer in time", self.store());
        StoreError::new(Fault::Unknown, text)
    }

    /// Resolves with a pass when this number of tickets may pass the gate, or with `None` at
    /// `give_up`. As long as other requests pass, this waits however long that takes, because the
    /// store is at work. If no pass moves for one operation timeout, the store is not the cause:
    /// the passes belong to futures that are not polled. Then the gate makes new passes.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        gate: &Gate,
        tickets: usize,
        give_up: Instant,
    ) -> Option<Result<Pass, Replaced>> {
        match gate.try_pass(tickets) {
            Some(pass) => Some(Ok(pass)),
            // On the heap, because this happens seldom.
            None => Box::pin(self.wait_at(gate, tickets, give_up)).await,
        }
    }

    async fn wait_at(
        self: &Arc<Self>,
        gate: &Gate,
        tickets: usize,
        give_up: Instant,
    ) -> Option<Result<Pass, Replaced>> {
        let mut turn = std::pin::pin!(gate.wait_for_pass(tickets));
        loop {
            let moves = gate.moves();
            let look = self.clock.now().after(self.op_timeout);
            if let Some(pass) = self.by(look.min(give_up), turn.as_mut()).await {
                return Some(pass);
            }
            if give_up <= look {
                return None;
            }
            gate.write_off(moves);
        }
    }

    /// A connection that is up.
    pub(crate) async fn connection(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
    ) -> Result<Reached, StoreError> {
        let here = runtime::Handle::try_current().ok();
        let runtime = match whose {
            Where::Here => self.serving(here.as_ref()),
            Where::Keeper => &self.keeper,
        };
        let (connected, waited) = match self.links.up(runtime) {
            Some(connected) => (connected, false),
            // On the heap, because this happens seldom. Otherwise every future that asks a store
            // would need the space for it.
            None => (Box::pin(self.connected(runtime, by)).await?, true),
        };
        Ok(Reached {
            connected,
            runtime: runtime.id(),
            waited,
        })
    }

    /// The connection of a caller that the keeper may use. `None` if the keeper has its own, or gets
    /// it within `patience`, and if no runtime lends one.
    pub(super) async fn lent(self: &Arc<Self>, patience: Duration) -> Option<Arc<Connected>> {
        let by = self.clock.now().after(patience);
        match self.by(by, self.keeper_is_up()).await {
            Some(()) => None,
            None => self.links.lent(&self.keeper).await,
        }
    }

    /// Resolves when the keeper's connection is up. Opens it if it is not.
    pub(super) async fn keeper_is_up(self: &Arc<Self>) {
        let keepers = self.connection(Where::Keeper, Instant::FAR_FUTURE);
        if keepers.await.is_err() {
            std::future::pending().await
        }
    }

    /// Runs a future inside of the keeper's runtime, if the caller is in none: some stores open
    /// connections of their own in the middle of a request, and these need a runtime. The future
    /// stays on the thread of the caller, and is dropped with it.
    pub(crate) async fn inside_of_a_runtime<F: Future>(&self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|context| {
            let is_outside = runtime::Handle::try_current().is_err();
            let _inside = is_outside.then(|| self.keeper.enter());
            future.as_mut().poll(context)
        })
        .await
    }

    async fn connected(
        self: &Arc<Self>,
        runtime: &runtime::Handle,
        by: Instant,
    ) -> Result<Arc<Connected>, StoreError> {
        loop {
            let link = self.link(runtime);
            match self.by(by, link.connection()).await {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(NotConnected::Failed(error))) => return Err(error),
                // The link is closed. The next iteration of the loop makes another link.
                Some(Err(NotConnected::Closed)) => {}
                None => {
                    return Err(link.trouble().unwrap_or_else(|| {
                        let (store, hint) = (self.store(), self.backend.silence());
                        let text = format!("{store} could not be reached in time{hint}");
                        StoreError::new(Fault::Retry, text)
                    }));
                }
            }
        }
    }

    /// The link of a runtime. Opens one if there is none.
    pub(super) fn link(self: &Arc<Self>, runtime: &runtime::Handle) -> Arc<Link> {
        let open = |link| (self.supervise)(Arc::clone(self), link);
        self.links.of(runtime, open)
    }

    /// The runtime whose connection serves callers in `here`.
    ///
    /// At a store with sessions the keeper's connection serves all callers, because a session must
    /// not end with the runtime of the caller. The keeper's connection also serves callers outside
    /// of any runtime. That costs a change of threads, which is acceptable for a release outside of
    /// a runtime.
    fn serving<'a>(&'a self, here: Option<&'a runtime::Handle>) -> &'a runtime::Handle {
        let sessions = self.capability.sessions;
        here.filter(|_| !sessions).unwrap_or(&self.keeper)
    }

    /// Whether the runtime `here` receives the wake-ups of a request that was sent on the
    /// connection of the runtime `asked`.
    pub(crate) fn is_heard(&self, asked: runtime::Id, here: Option<runtime::Id>) -> bool {
        let sessions = self.capability.sessions;
        asked == here.filter(|_| !sessions).unwrap_or(self.keeper.id())
    }

    /// A request was not answered in time. The connection is replaced only if callers have waited
    /// for one operation timeout and no request on it was answered. A single late answer does not
    /// show that a connection is broken: the time limit of a caller or of a renewal may be very
    /// short. A busy store answers late, and another connection would only give it more work.
    pub(crate) fn unanswered(&self, connected: &Connected, request: InFlight) {
        let (now, long) = (self.clock.now(), self.op_timeout);
        if connected.answers().missed(request, now, long) >= long {
            self.links.replace(connected);
        }
    }
}
