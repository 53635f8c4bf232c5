//! Verbs that count only when replicas, or the disk, have acknowledged their writes:
//! `?durability=…`.
//!
//! The server answers a verb before any replica or the disk has the write. `WAIT` (or `WAITAOF`) is
//! answered when they have it, or when its time is over. It is about the earlier writes of its own
//! connection, and the server runs nothing else on this connection until it is answered. So these
//! verbs have a connection of their own, that of their `group`, and wait there in turns. All verbs
//! that come during one turn are sent together in the next turn, with one `WAIT` at the end.
//!
//! A turn lasts as long as its most patient verb allows. A verb with less time gives up earlier by
//! itself, before or after its script is sent. Its error tells the caller which of the two it was.
//!
//! An enqueue, an adoption or a renewal is such a verb if its answer says that the ticket is at the
//! server. Every request about a counter or a stored capacity is such a verb too. All else does not
//! wait:
//!
//! - **A refusal** (busy, gone, lost, another capacity) grants nothing that could be lost.
//! - **A release** that a promoted server has not received keeps a name taken until the lease ends.
//!   Nobody else gets in.
//! - **A wake-up** tells a waiter that the master has granted its ticket. With durability, a
//!   wake-up [grants nothing](crate::backend::Capability::wake_ups_grant): the waiter renews on the
//!   connection of the group, and holds when this renewal is acknowledged. Then the replicas have
//!   the state in which the waiter holds, and all earlier writes.
//!
//! A wake-up must grant nothing, because it does not say why the waiter was granted. There are two
//! cases:
//!
//! - The tickets in front of the waiter were *released*. Then their clients have given them up. A
//!   promoted server that has every acknowledged write has the waiter's ticket at its place in
//!   line. If this server has not received the releases, it counts the tickets in front as holders.
//!   It grants nothing to the waiter, or to anyone behind the waiter, until these tickets expire
//!   there. So it would be safe to believe this wake-up.
//! - A ticket in front of the waiter has *expired* at the master. The master may have been cut off
//!   and replaced, and clients renew their tickets at the server that has replaced it. If the
//!   waiter believed this wake-up, it would hold beside these clients.
//!
//! If an enqueue is not acknowledged in time, its error is [half-way](StoreError::halfway), and the
//! core releases the ticket. This module does not release it, because the caller may drop the
//! future in the middle of the release. The core could then send the same id again, and the release
//! could arrive after that enqueue. The core never sends an id again that it has released itself.
//!
//! A release is sent on the main connection. So it can overtake the enqueue of its ticket, but only
//! while that enqueue is not answered. In this case the core says that the enqueue may follow, and
//! the release leaves a mark. If the caller of an enqueue drops its future before the turn of the
//! enqueue, the enqueue is not sent at all.
//!
//! Both connections lead to the same server. This is checked when they are made. If one ends, the
//! other ends too.

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

/// Takes a ticket. The ticket counts when its write is acknowledged. The caller waits for
/// `patience`.
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

/// Adopts a ticket. If the adoption does not count in time, the error is
/// [half-way](StoreError::halfway), and the core releases the ticket: a promoted server may have
/// the ticket under its earlier id.
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

/// Renews tickets. If the renewal does not count in time, its outcome is unknown. The caller waits
/// for `patience`.
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
    // The loss of a ticket needs no acknowledgement, and the holder must learn of it now.
    let lost = tickets.iter().zip(&answers);
    let lost = lost.filter(|(_, answer)| **answer == Renewed::Lost);
    let lost = lost.map(|(request, _)| request.id).collect();
    // The master has carried out the renewal, so the error must not be a refusal.
    Err(error.carried_out(Fault::Unknown).with_lost(lost))
}

/// Reads or changes a counter. A read writes too: what it has read may not count yet, and must not
/// be lost after a caller has acted on it. A repetition writes for the same reason. If a change
/// does not count in time, its outcome is unknown, and the core sends the same id again.
pub(super) async fn count(
    group: Arc<Group>,
    connection: RedisConnection,
    request: Arc<Count>,
) -> Result<Counted, StoreError> {
    let mut member = Member::new(group, connection, Duration::MAX);
    let answer = counters::count(&mut member, &request, true, Publish::Plain).await?;
    member.counts_or_is_unknown().await?;
    Ok(answer.counted)
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
    /// The verdict on the last command that was sent. An earlier command was not carried out,
    /// because the server did not know the script.
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
        let counts = self.counts().await;
        counts.map_err(|error| error.carried_out(Fault::Unknown))
    }

    /// Resolves when the write of this verb counts.
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
