//! Releases for a node that cannot be reached now.

use std::collections::VecDeque;
use std::pin::pin;
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
    left: Mutex<VecDeque<Unreleased>>,
    more: Notify,
}

/// A release that a node has not acknowledged.
#[derive(Debug)]
struct Unreleased {
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
        left.extend(departures.iter().take(room).map(|departure| Unreleased {
            departure: departure.clone(),
            until: now.after(match departure.enqueue_may_follow {
                // A server that was stopped may carry out the enqueue when it continues.
                true => LONGEST_TTL,
                false => departure.request.ttl.min(LONGEST_TTL),
            }),
            _on_its_way: on_its_way.cloned(),
        }));
        drop(left);
        self.more.notify_waiters();
    }

    /// Takes out the next releases to be sent. Waits until there are some.
    ///
    /// Several connections of a client may wait here, each in a runtime of its own. A runtime may
    /// be blocked, so all of them are woken, and the first one takes the releases. If that runtime
    /// is blocked before it has sent them, they stay with it until it continues or ends.
    ///
    /// If the future is dropped, no release is lost.
    pub(super) async fn take(&self) -> Taken<'_> {
        loop {
            // This future is enabled before the look at the queue. So releases that are put before
            // the look are found there, and releases that are put after it wake this task.
            let mut more = pin!(self.more.notified());
            more.as_mut().enable();
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
            more.await;
        }
    }

    fn left(&self) -> MutexGuard<'_, VecDeque<Unreleased>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases that are being sent. When this value is dropped, the releases that are left in it go
/// back to the outbox.
pub(super) struct Taken<'a> {
    outbox: &'a Outbox,
    batch: VecDeque<Unreleased>,
}

impl Taken<'_> {
    pub(super) fn departures(&self) -> Vec<Departure> {
        self.batch
            .iter()
            .map(|left| left.departure.clone())
            .collect()
    }

    /// Called when the node has acknowledged all of these releases.
    pub(super) fn acknowledge(&mut self) {
        self.batch.clear();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.batch.is_empty() {
            self.outbox.left().append(&mut self.batch);
            self.outbox.more.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::name::{Name, Namespace};
    use crate::request::{FULL, Id, Request};

    fn departure() -> Departure {
        let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
        let (id, ttl) = (Id::draw().unwrap(), Duration::from_secs(60));
        let request = Request::new(name, id, FULL, FULL, ttl);
        Departure::new(Arc::new(request), false)
    }

    /// Two connections wait. The runtime of the first one is blocked, so its task is never polled
    /// again.
    #[test]
    fn a_connection_in_a_blocked_runtime_keeps_no_release_from_the_others() {
        let outbox = Outbox::default();
        let (mut blocked, mut waits) = (pin!(outbox.take()), pin!(outbox.take()));
        assert!(blocked.as_mut().now_or_never().is_none());
        assert!(waits.as_mut().now_or_never().is_none());

        outbox.put(&[departure()], None);

        let taken = waits.now_or_never().expect("is not woken");
        assert_eq!(taken.departures().len(), 1);
    }

    #[test]
    fn releases_that_were_not_sent_wake_the_connections_that_wait() {
        let outbox = Outbox::default();
        outbox.put(&[departure()], None);
        let taken = outbox.take().now_or_never().unwrap();
        let (mut blocked, mut waits) = (pin!(outbox.take()), pin!(outbox.take()));
        assert!(blocked.as_mut().now_or_never().is_none());
        assert!(waits.as_mut().now_or_never().is_none());

        drop(taken);

        let taken = waits.now_or_never().expect("is not woken");
        assert_eq!(taken.departures().len(), 1);
    }
}
