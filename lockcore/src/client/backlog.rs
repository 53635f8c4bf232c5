//! The renewals of one kind that are due and have not begun: which are next, and which are left out
//! because the store cannot answer all of them in time. This is plain data, like the
//! [table](super::table) that it is a part of.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::pace::{BATCH, Pace};
use crate::clock::Instant;
use crate::request::Id;

/// A lease is left out if less than this part of its ttl would be left when its renewal is answered.
/// A lease is due after a third of its ttl. So if the store is near, it has waited for its turn for
/// more than half of its ttl by then.
const MARGIN: u32 = 8;

/// Renewals of one kind that are due.
///
/// The earliest deadline is first, as long as the store answers fast enough. If it does not, the
/// queue grows, until each lease is renewed just before its deadline. With the next delay, all that
/// are in flight and many behind them would be lost, although the store was slow for a moment only.
/// So a lease that is too near to its deadline is left out: it is renewed only when no other lease
/// waits for its turn. The others keep their distance, and only as many leases are lost as the store
/// cannot renew.
///
/// Of those that are left out, the one with the most time is first, because its renewal is the most
/// likely to be answered in time.
#[derive(Debug)]
pub(super) struct Backlog {
    /// By class, and then by deadline. The tickets of one class have similar ttls, and can be in one
    /// batch.
    queued: Queues,
    left_out: Queues,
    pub(super) pace: Pace,
}

type Queues = BTreeMap<u32, BTreeSet<(Instant, Id)>>;

impl Backlog {
    pub(super) fn new(pace: Pace) -> Self {
        Self {
            queued: Queues::new(),
            left_out: Queues::new(),
            pace,
        }
    }

    pub(super) fn insert(&mut self, class: u32, deadline: Instant, id: Id) {
        let queue = self.queued.entry(class).or_default();
        queue.insert((deadline, id));
    }

    pub(super) fn remove(&mut self, class: u32, deadline: Instant, id: Id) {
        for queues in [&mut self.queued, &mut self.left_out] {
            if let Some(queue) = queues.get_mut(&class) {
                queue.remove(&(deadline, id));
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn len(&self) -> usize {
        let queues = self.queued.values().chain(self.left_out.values());
        queues.map(BTreeSet::len).sum()
    }

    /// How many leases are left out.
    pub(super) fn left_out(&self) -> usize {
        self.left_out.values().map(BTreeSet::len).sum()
    }

    /// How many more batches may begin.
    pub(super) fn room(&self, now: Instant) -> usize {
        self.pace.room(self.len().div_ceil(BATCH), self.left(now))
    }

    /// The time until the first deadline. Leases that are left out do not count if there are others.
    fn left(&self, now: Instant) -> Duration {
        let first = first_of(&self.queued).or_else(|| first_of(&self.left_out));
        first.map_or(Duration::MAX, |(deadline, _)| now.until(deadline))
    }

    /// The next batch: tickets of one class.
    pub(super) fn next(&mut self, now: Instant) -> Option<(u32, Vec<Id>)> {
        self.leave_out(now);
        if let Some((_, class)) = first_of(&self.queued) {
            let queue = self.queued.get_mut(&class)?;
            let first = std::iter::from_fn(|| queue.pop_first());
            return Some((class, first.take(BATCH).map(|(_, id)| id).collect()));
        }
        let (class, queue) = self
            .left_out
            .iter_mut()
            .find(|(_, queue)| !queue.is_empty())?;
        let last = std::iter::from_fn(|| queue.pop_last());
        Some((*class, last.take(BATCH).map(|(_, id)| id).collect()))
    }

    /// Leaves out the leases that are too near to their deadlines.
    fn leave_out(&mut self, now: Instant) {
        let answered = now.after(self.pace.round_trip());
        for (class, queue) in &mut self.queued {
            let near = answered.after(shortest_ttl(*class) / MARGIN);
            while let Some(first) = queue.first().filter(|first| first.0 < near).copied() {
                queue.remove(&first);
                self.left_out.entry(*class).or_default().insert(first);
            }
        }
    }
}

/// The class of a ttl. All leases of one batch wait for its answer only as long as the lease with
/// the shortest ttl can. So a batch contains only leases of one class, whose ttls differ by less
/// than a factor of two.
pub(super) fn class(ttl: Duration) -> u32 {
    // All ttls below 64 ms are one class, and so are all ttls of 12 days and more.
    let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    millis.clamp(1 << 5, 1 << 30).ilog2()
}

/// The shortest ttl of a class, unless it is the class of the shortest ttls.
fn shortest_ttl(class: u32) -> Duration {
    Duration::from_millis(1 << class)
}

/// The first deadline, and its class.
fn first_of(queues: &Queues) -> Option<(Instant, u32)> {
    let first = queues
        .iter()
        .filter_map(|(class, queue)| Some((queue.first()?.0, *class)));
    first.min()
}
