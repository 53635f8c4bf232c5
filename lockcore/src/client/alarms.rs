//! Timers on the lease clock. The keeper rings them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::shared::Shared;
use crate::clock::Instant;

impl Shared {
    /// A timer on the lease clock. It does not depend on the caller's runtime: the time driver of
    /// that runtime may be off, and a test may have paused its clock.
    pub(crate) fn alarm(self: &Arc<Self>, at: Instant) -> Alarm {
        Alarm {
            shared: Arc::clone(self),
            at,
            set: None,
        }
    }

    /// The result of a future, or `None` when the lease clock has reached `at` first.
    pub(crate) async fn by<T>(
        self: &Arc<Self>,
        at: Instant,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::select! {
            biased;
            result = future => Some(result),
            // The alarm is made only when this branch is polled, because most futures here are
            // ready at the first poll.
            () = async { self.alarm(at).await } => None,
        }
    }
}

/// Resolves when the lease clock has reached a time. The keeper rings it.
pub(crate) struct Alarm {
    shared: Arc<Shared>,
    at: Instant,
    /// The second part of the key of its entry in the table. The first poll that returns `Pending`
    /// sets it.
    set: Option<u64>,
}

impl Alarm {
    /// Whether the alarm has not rung yet, and will ring at `at` or earlier.
    pub(crate) fn will_ring_by(&self, at: Instant) -> bool {
        self.at <= at && self.shared.clock.now() < self.at
    }
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // A wait without end needs no entry in the table.
        if self.at == Instant::FAR_FUTURE {
            return Poll::Pending;
        }
        if self.shared.clock.now() >= self.at {
            return Poll::Ready(());
        }
        let this = &mut *self;
        let waker = cx.waker().clone();
        let mut table = this.shared.table();
        let number = *this.set.get_or_insert_with(|| {
            table.alarms_set += 1;
            table.alarms_set
        });
        let before = table.alarms.insert((this.at, number), waker);
        this.shared.wake_keeper_at(&mut table, this.at);
        drop(table);
        drop(before); // dropping a waker runs the user's code
        Poll::Pending
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(number) = self.set
            && !self.shared.is_forked()
        {
            let waker = self.shared.table().alarms.remove(&(self.at, number));
            drop(waker);
        }
    }
}
