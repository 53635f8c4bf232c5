//! Operations at the store, with their deadlines: on which connection, when it is their turn, and what
//! becomes of the connection when there is no answer.

use std::sync::Arc;

use tokio::runtime;

use super::gate::{Connected, Gate, Pass, Replaced};
use super::links::{Link, NotConnected};
use super::shared::{FORKED, Sent, Shared};
use crate::backend::{Answer, Connection, Departure, Fault, Released, StoreError};
use crate::clock::Instant;

/// Whose connection an operation goes out on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Where {
    /// That of the runtime that the caller runs in.
    Here,
    /// The keeper's.
    Keeper,
}

impl Shared {
    /// One operation that passes no gate, and the moment before it was sent: a lease is counted from
    /// then. Fails when it has not been answered by `by`, connecting included.
    pub(crate) async fn operate<T>(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
        verb: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        if self.is_forked() {
            return Err(StoreError::new(Fault::Config, FORKED));
        }
        let (_, connected) = self.connection(whose, by).await?;
        self.send(&connected, by, verb).await
    }

    /// Releases tickets in one request, from `now` on, when it is its turn. Fails when it has not been sent by
    /// `turn_by`, or not been answered within one operation timeout.
    pub(crate) async fn release(
        self: &Arc<Self>,
        whose: Where,
        now: Instant,
        turn_by: Instant,
        departures: Vec<Departure>,
    ) -> Result<Vec<Released>, StoreError> {
        let mut by = now.after(self.op_timeout);
        loop {
            let (_, connected) = self.connection(whose, by).await?;
            // In flight until the answer is here. Dropped before that, the store may be working on
            // it all the same: then one request more than it carries is in flight for a moment.
            let admitted = self.admit(connected.releases(), departures.len(), turn_by);
            let pass = match admitted.await {
                Some(Ok(pass)) => pass,
                Some(Err(Replaced)) => {
                    by = self.clock.now().after(self.op_timeout).min(turn_by);
                    continue;
                }
                None => {
                    let text = "too many releases are in front of this one";
                    return Err(StoreError::new(Fault::Retry, text));
                }
            };
            if pass.has_waited {
                by = self.clock.now().after(self.op_timeout);
            }
            let sent = self.send(&connected, by, |verbs| verbs.release(departures));
            return sent.await.map(|(_, answers)| answers);
        }
    }

    pub(super) async fn send<T>(
        self: &Arc<Self>,
        connected: &Connected,
        by: Instant,
        verb: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        let sent = self.sent_now();
        connected.asked(sent.at);
        match self.by(by, verb(connected.verbs())).await {
            Some(outcome) => {
                self.links.ended(connected, &outcome);
                outcome.map(|answer| (sent, answer))
            }
            None => {
                self.unanswered(connected);
                let text = format!("{} did not answer in time", self.store());
                Err(StoreError::new(Fault::Unknown, text))
            }
        }
    }

    /// Resolves when so many tickets may pass a gate, at `give_up` at the latest. Before that it waits
    /// for its turn, however long that takes, because the store is at work. If nothing passes the gate
    /// for an operation timeout, it is not the store that the others wait for: then they are passed.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        gate: &Gate,
        tickets: usize,
        give_up: Instant,
    ) -> Option<Result<Pass, Replaced>> {
        match gate.try_pass(tickets) {
            Some(pass) => Some(Ok(pass)),
            // On the heap, because it is seldom.
            None => Box::pin(self.wait_at(gate, tickets, give_up)).await,
        }
    }

    pub(super) async fn wait_at(
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

    /// A connection that is up, and the runtime that it is of.
    pub(crate) async fn connection(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
    ) -> Result<(runtime::Id, Arc<Connected>), StoreError> {
        let here = runtime::Handle::try_current().ok();
        let runtime = match whose {
            Where::Here => self.serving(here.as_ref()),
            Where::Keeper => &self.keeper,
        };
        let connection = match self.links.up(runtime) {
            Some(connection) => connection,
            // On the heap, because it is seldom: every future that asks a store would have the room.
            None => Box::pin(self.connected(runtime, by)).await?,
        };
        Ok((runtime.id(), connection))
    }

    pub(super) async fn connected(
        self: &Arc<Self>,
        runtime: &runtime::Handle,
        by: Instant,
    ) -> Result<Arc<Connected>, StoreError> {
        loop {
            let link = self.link(runtime);
            match self.by(by, link.connection()).await {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(NotConnected::Failed(error))) => return Err(error),
                // Nobody looks after it any more; the next one is another.
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

    /// The link of a runtime; opened if there is none.
    pub(super) fn link(self: &Arc<Self>, runtime: &runtime::Handle) -> Arc<Link> {
        let open = |link| (self.supervise)(Arc::clone(self), link);
        self.links.of(runtime, open)
    }

    /// The runtime whose connection serves callers in `here`. At a store with sessions that is the
    /// keeper's for all: what a session holds must not end with the runtime that asked. Outside of any
    /// runtime it is the keeper's as well: slower by a change of threads, and good enough for a release
    /// in an odd place.
    pub(super) fn serving<'a>(&'a self, here: Option<&'a runtime::Handle>) -> &'a runtime::Handle {
        let sessions = self.backend.capability().sessions;
        here.filter(|_| !sessions).unwrap_or(&self.keeper)
    }

    /// Whether the wake-ups of what was asked on the connection of a runtime are heard `here`.
    pub(crate) fn is_heard(&self, asked: runtime::Id, here: Option<runtime::Id>) -> bool {
        let sessions = self.backend.capability().sessions;
        asked == here.filter(|_| !sessions).unwrap_or(self.keeper.id())
    }

    /// A request was not answered in time. That is the connection's fault only if nothing at all was
    /// answered on it for an operation timeout (a caller's budget, and a renewal's patience, may be
    /// shorter than what a sound one needs). A store with much to do is late, and another connection
    /// would only add to it.
    pub(crate) fn unanswered(&self, connected: &Connected) {
        if connected.silent_for(self.clock.now()) >= self.op_timeout {
            self.links.replace(connected);
        }
    }
}
