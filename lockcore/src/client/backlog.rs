//! The renewals of one kind that are due and have not begun: which are next, and which are left out
//! because the store cannot answer all of them in time. This is plain data, like the
//! [table](super::table) that it is a part of.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::pace::{BATCH, Pace};
use crate::clock::Instant;
use crate::request::Id;

/// How long a warning about leases that are left out is not repeated.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// If the store answers this part of the renewals that are necessary, no lease is left out. The rate
/// is never the same in two measurements, and there is some room in what is necessary.
const ENOUGH: f64 = 0.9;

/// Renewals of one kind that are due.
///
/// The earliest deadline is first, as long as the store answers fast enough. If it does not, this
/// order alone would be the worst: each lease would be renewed just before its deadline, and with
/// the next delay nearly all would be lost. So only as many leases are renewed as can be, and the
/// others are left out. An id decides whether a lease is left out, so it is always the same leases.
///
/// A lease that is left out is not given up. It is renewed when nothing else is to be renewed, or
/// when the store has turned out to be fast enough for all.
#[derive(Debug)]
pub(super) struct Backlog {
    /// By class, and then by deadline. The tickets of one class have similar ttls, and can be in one
    /// batch.
    queued: BTreeMap<u32, BTreeSet<(Instant, Id)>>,
    left_out: BTreeMap<u32, BTreeSet<(Instant, Id)>>,
    pub(super) pace: Pace,
    /// The part of the leases that can be kept.
    share: f64,
    told: Option<Instant>,
}

/// More leases than the store can keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overload {
    /// How many leases there are.
    pub(crate) leases: usize,
    pub(crate) left_out: usize,
    /// How many renewals the store answers in a second.
    pub(crate) rate: f64,
}

/// What it takes to keep all leases of a kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    pub(super) leases: f64,
    /// Renewals in a second.
    pub(super) rate: f64,
}

impl Backlog {
    pub(super) fn new(pace: Pace) -> Self {
        Self {
            queued: BTreeMap::new(),
            left_out: BTreeMap::new(),
            pace,
            share: 1.0,
            told: None,
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
        let mut queues = self.queued.values().chain(self.left_out.values());
        queues.all(BTreeSet::is_empty)
    }

    pub(super) fn len(&self) -> usize {
        let queues = self.queued.values().chain(self.left_out.values());
        queues.map(BTreeSet::len).sum()
    }

    /// Whether leases are left out.
    pub(super) fn is_too_long(&self) -> bool {
        self.share < 1.0
    }

    /// How many more batches may begin.
    pub(super) fn room(&self, now: Instant) -> usize {
        self.pace.room(self.batches(), self.left(now))
    }

    fn batches(&self) -> usize {
        self.len().div_ceil(BATCH)
    }

    /// The time until the first deadline. Leases that are left out are the latest, so they do not
    /// count if there are others.
    fn left(&self, now: Instant) -> Duration {
        let first = first_of(&self.queued).or_else(|| first_of(&self.left_out));
        first.map_or(Duration::MAX, |(deadline, _)| now.until(deadline))
    }

    /// The next batch: tickets of one class, the earliest deadline first.
    pub(super) fn next(&mut self) -> Option<(u32, Vec<Id>)> {
        while let Some((_, class)) = first_of(&self.queued) {
            let mut batch = Vec::with_capacity(BATCH);
            let queue = self.queued.get_mut(&class)?;
            while batch.len() < BATCH
                && let Some((deadline, id)) = queue.pop_first()
            {
                if id.lot() < self.share {
                    batch.push(id);
                } else {
                    let left_out = self.left_out.entry(class).or_default();
                    left_out.insert((deadline, id));
                }
            }
            if !batch.is_empty() {
                return Some((class, batch));
            }
        }
        let (_, class) = first_of(&self.left_out)?;
        let queue = self.left_out.get_mut(&class)?;
        let batch = std::iter::from_fn(|| queue.pop_first()).take(BATCH);
        Some((class, batch.map(|(_, id)| id).collect()))
    }

    /// No renewal waits for its turn.
    pub(super) fn rest(&mut self) {
        self.pace.idle();
        self.share = 1.0;
    }

    /// Renewals wait for their turn. Finds out from time to time whether all of them can be made in
    /// time, and leaves out as many leases as necessary. Returns what is to be told about this.
    ///
    /// `demand` is computed only if it is needed.
    pub(super) fn weigh(
        &mut self,
        now: Instant,
        demand: impl FnOnce() -> Demand,
    ) -> Option<Overload> {
        let left = self.left(now);
        let rate = self.pace.busy(now, self.batches(), left)?;
        let queued: usize = self.queued.values().map(BTreeSet::len).sum();
        if queued as f64 * self.share / rate < left.as_secs_f64() / 2.0 {
            self.include_more();
            return None;
        }
        let demand = demand();
        // Once is not enough: a server or a machine may have stalled.
        let again = self.is_too_long();
        let share = rate / demand.rate;
        self.share = if share < ENOUGH { share } else { 1.0 };
        let lately = self.told.is_some_and(|told| now < told.after(TOLD_EVERY));
        if !again || !self.is_too_long() || lately {
            return None;
        }
        self.told = Some(now);
        Some(Overload {
            leases: demand.leases as usize,
            left_out: (demand.leases * (1.0 - self.share)) as usize,
            rate,
        })
    }

    /// Leaves out fewer leases. This is done in steps: those that were left out are the latest, so
    /// all of them at once would be in front of all others.
    fn include_more(&mut self) {
        self.share = (self.share + 0.1).min(1.0);
        if !self.is_too_long() {
            for (class, mut queue) in std::mem::take(&mut self.left_out) {
                self.queued.entry(class).or_default().append(&mut queue);
            }
        }
    }
}

/// The first deadline, and its class.
fn first_of(queues: &BTreeMap<u32, BTreeSet<(Instant, Id)>>) -> Option<(Instant, u32)> {
    let first = queues
        .iter()
        .filter_map(|(class, queue)| Some((queue.first()?.0, *class)));
    first.min()
}
