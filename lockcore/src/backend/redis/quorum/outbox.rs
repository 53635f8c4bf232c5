//! Releases for a node that cannot be reached now.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::super::released::BATCH;
use super::leaving::OnItsWay;
use super::node::LONGEST_TTL;
use crate::backend::Departure;
use crate::clock::{Clock, Instant};

/// The most releases that wait for one node. If there is no room for a release, its ticket ends
/// with its ttl.
const MOST_LEFT: usize = 10_000;

/// The releases that a node has not acknowledged, although the caller of the release has its
/// answer. All connections of a client share them, and the first connection that reaches the node
/// sends them.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    left: Mutex<VecDeque<Left>>,
    more: Notify,
}

/// A release that a node has not acknowledged.
#[derive(Debug)]
struct Left {
    departure: Departure,
    /// When the ticket has certainly expired at the node.
    until: Instant,
    _on_its_way: Option<Arc<OnItsWay>>,
}

impl Outbox {
    /// Keeps releases for the node until it can be reached, or until their tickets have expired
    /// there.
    pub(super) fn put(&self, departures: &[Departure], on_its_way: Option<&Arc<OnItsWay>>) {
        let now = Clock::BOOT.now();
        let mut left = self.left();
        let room = MOST_LEFT.saturating_sub(left.len());
        left.extend(departures.iter().take(room).map(|departure| Left {
            departure: departure.clone(),
            until: now.after(match departure.enqueue_may_follow {
                // A server that was stopped may carry out the enqueue when it continues.
                true => LONGEST_TTL,
                false => departure.request.ttl.min(LONGEST_TTL),
            }),
            _on_its_way: on_its_way.cloned(),
        }));
        drop(left);
        self.more.notify_one();
    }

    /// Takes out the next releases to be sent. Waits until there are some.
    ///
    /// If the future is dropped, no release is lost.
    pub(super) async fn take(&self) -> Taken<'_> {
        loop {
            let now = Clock::BOOT.now();
            let batch: VecDeque<_> = {
                let mut left = self.left();
                left.retain(|left| left.until > now);
                let count = left.len().min(BATCH);
                left.drain(..count).collect()
            };
            if !batch.is_empty() {
                return Taken {
                    outbox: self,
                    batch,
                };
            }
            self.more.notified().await;
        }
    }

    fn left(&self) -> MutexGuard<'_, VecDeque<Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases that are being sent. When this value is dropped, the releases that are left in it go
/// back to the outbox.
pub(super) struct Taken<'a> {
    outbox: &'a Outbox,
    batch: VecDeque<Left>,
}

impl Taken<'_> {
    pub(super) fn departures(&self) -> Vec<Departure> {
        self.batch
            .iter()
            .map(|left| left.departure.clone())
            .collect()
    }

    /// Called when the node has acknowledged all of these releases.
    pub(super) fn are_done(&mut self) {
        self.batch.clear();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.batch.is_empty() {
            self.outbox.left().append(&mut self.batch);
            self.outbox.more.notify_one();
        }
    }
}
