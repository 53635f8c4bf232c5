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

use super::group::{Group, Verdict};
use super::turn::Patience;
use crate::backend::StoreError;

/// One verb of a group.
#[derive(Clone, Debug)]
pub(super) struct Member {
    group: Arc<Group>,
    patience: Patience,
    /// The verdict on the last command that was sent. An earlier command was not carried out,
    /// because the server did not know the script.
    verdict: Option<Verdict>,
}

impl Member {
    pub(super) fn of(group: &Arc<Group>, patience: Duration) -> Self {
        Self {
            group: Arc::clone(group),
            patience: group.patience(patience),
            verdict: None,
        }
    }

    /// Sends a command when its turn comes. The outer error means that it was not sent.
    pub(super) async fn query(&mut self, command: Cmd) -> Result<RedisResult<Value>, StoreError> {
        let (reply, verdict) = self.group.ask(command, self.patience).await?;
        self.verdict = Some(verdict);
        Ok(reply)
    }

    /// Resolves when the write of this verb counts.
    pub(super) async fn counts(&self) -> Result<(), StoreError> {
        match self.verdict.clone() {
            Some(verdict) => self.group.counts(verdict, self.patience).await,
            None => Ok(()), // nothing was sent
        }
    }
}
