//! The counters of the memory store.

use std::collections::HashSet;

use crate::backend::{Count, Counted, StoreError};
use crate::clock::Instant;
use crate::counting::{Carried, Record};
use crate::hash::Prehashed;
use crate::name::Name;

/// With fewer counters than this, the store does not look for unused ones.
const FEW: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Counters {
    /// The counters, and when each was used last.
    records: Prehashed<Name, (Record, Instant)>,
    /// The receivers that watch a counter, whether or not it exists.
    watchers: Prehashed<Name, HashSet<u64>>,
    /// When there are this many counters, and at least [`FEW`], the store removes the unused ones.
    room: usize,
}

impl Counters {
    /// Reads or changes a counter. Also returns the receivers that must be told of the change.
    pub(super) fn carry_out(
        &mut self,
        count: &Count,
        now: Instant,
        micros: u64,
    ) -> Result<(Counted, impl Iterator<Item = &u64>), StoreError> {
        let is_live = |record: &Record, used: Instant| used.after(record.keep()) > now;
        if self.records.len() >= self.room.max(FEW) {
            let watchers = &self.watchers;
            self.records.retain(|name, (record, used)| {
                watchers.contains_key(name) || is_live(record, *used)
            });
            self.room = 2 * self.records.len();
        }
        let is_watched = self.watchers.contains_key(&count.name);
        let (record, used) = self
            .records
            .entry(count.name.clone())
            .or_insert_with(|| (Record::default(), now));
        if !is_watched && !is_live(record, *used) {
            *record = Record::default();
        }
        *used = now;
        let millis = now.as_nanos() / 1_000_000;
        let (answer, news) = match record.carry_out(count, millis, micros) {
            Carried::Answered(answer) => (answer, false),
            Carried::Changed { answer, news } => (answer, news),
            Carried::Crowded => return Err(StoreError::crowded()),
        };
        // A read of a counter that does not exist leaves nothing behind.
        if *record == Record::default() {
            self.records.remove(&count.name);
        }
        let watchers = self.watchers.get(&count.name).filter(|_| news);
        Ok((answer, watchers.into_iter().flatten()))
    }

    pub(super) fn watch(&mut self, name: Name, receiver: u64) {
        self.watchers.entry(name).or_default().insert(receiver);
    }

    pub(super) fn unwatch(&mut self, name: &Name, receiver: u64) {
        if let Some(watchers) = self.watchers.get_mut(name) {
            watchers.remove(&receiver);
            if watchers.is_empty() {
                self.watchers.remove(name);
            }
        }
    }

    /// Keeps the watches of the receivers for which `of` is true, and ends all others.
    pub(super) fn keep_watches(&mut self, of: impl Fn(u64) -> bool) {
        self.watchers.retain(|_, watchers| {
            watchers.retain(|receiver| of(*receiver));
            !watchers.is_empty()
        });
    }

    /// The watches without the counters.
    pub(super) fn without_data(&mut self) -> Self {
        Self {
            watchers: std::mem::take(&mut self.watchers),
            ..Self::default()
        }
    }
}
