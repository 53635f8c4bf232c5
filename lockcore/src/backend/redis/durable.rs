//! Verbs that count only when replicas, or the disk, have acknowledged their writes: `?durability=…`.
//!
//! The server answers before anything else has the write. `WAIT` tells when others do. It is about the earlier writes of
//! its own connection, and that connection stands still until it is answered. So these verbs have a connection of their
//! own, that of their `group`, and wait there in turn: the verbs that come while one `WAIT` is under way go out together
//! behind it, with one `WAIT` at their end. It lasts as long as the most patient of them. A verb with less time gives up
//! before that by itself, in line or behind its script, and its caller hears which of the two it was.
//!
//! Enqueue, adopt and renew are such verbs, if their answer says that the ticket is there, and so is every request about a
//! counter or a stored capacity. Nothing else is:
//!
//! - **A refusal** (busy, gone, lost, another capacity) gives nothing that could be lost.
//! - **A release** that a promoted server has not received keeps a name taken until the lease ends. Nobody else gets in.
//! - **A wake-up** tells a waiter that the master has granted its ticket. Every promoted server that has what was
//!   acknowledged has that ticket, in its place in line. If a *release* let the waiter in, all tickets in front of it
//!   have been given up by their clients. A promoted server that has not received the releases still counts these
//!   tickets, so it lets nobody past, neither the waiter nor anyone behind it, until they expire there. That is safe.
//!   But the ticket in front may instead have *expired* at the master. A master that was cut off expires the tickets of
//!   clients that renew them at the server that has replaced it. If its wake-up were believed, the waiter would hold
//!   beside them. A wake-up does not tell which of the two it was. So with durability a wake-up
//!   [grants nothing](crate::backend::Capability::wake_ups_grant): the waiter renews, here, and holds when that is
//!   acknowledged. Then the replicas have the state in which it holds, with all that came before.
//!
//! A ticket whose enqueue is not acknowledged in time is given back by the core, because the error is
//! [half-way](StoreError::halfway). It is not released here: if the caller were gone in the middle of that, the core
//! could ask again with the same id, and the release could arrive after that. The core asks no more with an id that it
//! has released.
//!
//! A release goes out on the other connection, so it can overtake the enqueue of its ticket only if that was not
//! answered. In that case the core says that the enqueue may follow, and the release leaves a mark. An enqueue that is
//! still waiting for its turn when its caller goes away is not sent at all.
//!
//! Both connections lead to the same server, which is checked when they are made, and end together.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};

use super::adopt;
use super::capacities;
use super::connection::{RedisConnection, Socket};
use super::counters::{self, Publish};
use super::group::{Group, Verdict};
use super::tickets;
use super::turn::Patience;
use crate::backend::{
    Adoption, Count, Counted, Enqueued, Fault, Renewed, Resize, Resized, StoreError,
};
use crate::request::Request;

/// Takes a ticket that counts when its write does. The caller waits for `patience`.
pub(super) async fn enqueue(
    group: Arc<Group>,
    connection: RedisConnection,
    request: Arc<Request>,
    patience: Duration,
) -> Result<Enqueued, StoreError> {
    let mut member = Member::new(group, connection, patience);
    let answer = tickets::enqueue(&mut member, request).await?;
    match answer {
        Enqueued::Granted { .. } | Enqueued::Waiting { .. } => member.counts().await?,
        Enqueued::Busy { .. } | Enqueued::CapacityMismatch { .. } | Enqueued::Gone => {}
    }
    Ok(answer)
}

/// Adopts a ticket. If that does not count in time, the core releases the ticket, because the error is
/// [half-way](StoreError::halfway): a promoted server may still have it under the id that it had before.
pub(super) async fn adopt(
    group: Arc<Group>,
    connection: RedisConnection,
    adoption: Arc<Adoption>,
) -> Result<Enqueued, StoreError> {
    let mut member = Member::new(group, connection, Duration::MAX);
    let answer = adopt::adopt(&mut member, &adoption).await?;
    if let Enqueued::Granted { .. } = answer {
        member.counts().await?;
    }
    Ok(answer)
}

/// Renews tickets. A renewal that does not count in time is unknown. The caller waits for `patience`.
pub(super) async fn renew(
    group: Arc<Group>,
    connection: RedisConnection,
    tickets: Vec<Arc<Request>>,
    patience: Duration,
) -> Result<Vec<Renewed>, StoreError> {
    let mut member = Member::new(group, connection, patience);
    let answers = tickets::renew(&mut member, tickets.clone()).await?;
    let is_there = |answer: &Renewed| answer.holds() || matches!(answer, Renewed::Waiting { .. });
    if !answers.iter().any(is_there) {
        return Ok(answers);
    }
    let Err(error) = member.counts().await else {
        return Ok(answers);
    };
    // A ticket that is lost needs no acknowledgement, and its holder must learn it now.
    let lost = tickets.iter().zip(&answers);
    let lost = lost.filter(|(_, answer)| **answer == Renewed::Lost);
    let lost = lost.map(|(request, _)| request.id).collect();
    // The master has carried it out, so it must not count as refused.
    let error = match error.is_broken() {
        true => error,
        false => StoreError::halfway(Fault::Unknown, error.to_string()),
    };
    Err(error.with_lost(lost))
}

/// Reads or changes a counter. A read writes too, because what it has read may not count yet, and a caller that acts on it
/// must not find it gone. For the same reason a repetition writes. A change that does not count in time is unknown: the
/// core asks again with the same id.
pub(super) async fn count(
    group: Arc<Group>,
    connection: RedisConnection,
    request: Arc<Count>,
) -> Result<Counted, StoreError> {
    let mut member = Member::new(group, connection, Duration::MAX);
    let answer = counters::count(&mut member, &request, true, Publish::Plain).await?;
    member.counts_or_is_unknown().await?;
    Ok(answer)
}

/// Reads or changes a stored capacity, as [`count`] does a counter.
pub(super) async fn resize(
    group: Arc<Group>,
    connection: RedisConnection,
    request: Arc<Resize>,
) -> Result<Resized, StoreError> {
    let mut member = Member::new(group, connection, Duration::MAX);
    let answer = capacities::resize(&mut member, &request, true).await?;
    member.counts_or_is_unknown().await?;
    Ok(answer)
}

/// One verb of a group.
struct Member {
    group: Arc<Group>,
    connection: RedisConnection,
    patience: Patience,
    /// About the last command that was sent. An earlier one was not carried out: the server did not know the script.
    verdict: Option<Verdict>,
}

impl Member {
    fn new(group: Arc<Group>, connection: RedisConnection, patience: Duration) -> Self {
        let patience = group.patience(patience);
        Self {
            group,
            connection,
            patience,
            verdict: None,
        }
    }

    /// As [`counts`](Self::counts), for a request that the core repeats with the same id.
    async fn counts_or_is_unknown(self) -> Result<(), StoreError> {
        self.counts()
            .await
            .map_err(|error| match error.is_broken() {
                true => error,
                false => StoreError::halfway(Fault::Unknown, error.to_string()),
            })
    }

    /// Resolves when its write counts.
    async fn counts(self) -> Result<(), StoreError> {
        match self.verdict {
            Some(verdict) => self.group.counts(verdict, self.patience).await,
            None => Ok(()), // nothing was sent
        }
    }
}

impl Socket for Member {
    fn connection(&self) -> &RedisConnection {
        &self.connection
    }

    async fn query(&mut self, command: Cmd) -> Result<RedisResult<Value>, StoreError> {
        let (reply, verdict) = self.group.ask(command, self.patience).await?;
        self.verdict = Some(verdict);
        Ok(reply)
    }
}
