//! How many guards a hold has, and how many of them write.

use crate::sync::atomic::{AtomicU64, Ordering};

/// How many guards a hold has, and how many of them write. Both counts are in one word. So exactly
/// one guard is the last to end, and exactly one writer is the last to stop writing.
///
/// A hold without guards is over. A hold without writers is a read hold. A count that is zero never
/// rises again. When the last guard of an exclusive hold ends, the count of writers does not fall.
/// So the hold counts as exclusive after its end too.
pub(super) struct Guards(AtomicU64);

/// Low half: guards. High half: writers.
const WRITER: u64 = 1 << 32;

/// What remains of the hold after a guard has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nobody,
    /// The guard was the last writer. Readers remain.
    Readers,
    /// Other guards remain, and the hold is what it was before: a write hold or a read hold.
    Others,
}

impl Guards {
    /// The count of a new hold: one guard.
    pub(super) fn new(exclusive: bool) -> Self {
        Self(AtomicU64::new(if exclusive { WRITER | 1 } else { 1 }))
    }

    pub(super) fn are_gone(&self) -> bool {
        self.0.load(Ordering::SeqCst) as u32 == 0
    }

    pub(super) fn are_exclusive(&self) -> bool {
        self.0.load(Ordering::SeqCst) >= WRITER
    }

    pub(super) fn are_one(&self) -> bool {
        self.0.load(Ordering::SeqCst) as u32 == 1
    }

    /// Adds a guard, if the hold has at least one. The new guard writes if `write` is true and
    /// another guard writes. Returns whether it writes.
    pub(super) fn one_more(&self, write: bool) -> Option<bool> {
        let writer = |guards: u64| if write && guards >= WRITER { WRITER } else { 0 };
        let one_more = |guards: u64| {
            let room = !matches!(guards as u32, 0 | u32::MAX);
            room.then(|| guards + writer(guards) + 1)
        };
        let order = Ordering::SeqCst;
        let before = self.0.fetch_update(order, order, one_more).ok()?;
        Some(writer(before) > 0)
    }

    pub(super) fn one_less(&self, writes: bool) -> Left {
        let left = |guards: u64| match (guards as u32, guards < 2 * WRITER) {
            (1, _) => (Left::Nobody, guards - 1),
            (_, true) if writes => (Left::Readers, guards - WRITER - 1),
            _ if writes => (Left::Others, guards - WRITER - 1),
            _ => (Left::Others, guards - 1),
        };
        let one_less = |guards| Some(left(guards).1);
        let order = Ordering::SeqCst;
        match self.0.fetch_update(order, order, one_less) {
            Ok(before) | Err(before) => left(before).0,
        }
    }

    /// Ends the only guard of a hold. Returns whether there was only one. If there were more,
    /// nothing changes.
    pub(super) fn end_only(&self) -> bool {
        let ended = |guards: u64| (guards as u32 == 1).then(|| guards - 1);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, ended).is_ok()
    }

    /// Makes a writer a reader. Returns whether it was the last writer.
    pub(super) fn one_writer_less(&self) -> bool {
        self.0.fetch_sub(WRITER, Ordering::SeqCst) < 2 * WRITER
    }

    /// Makes a writer a reader, but only if no other guard writes. Returns whether this was done.
    pub(super) fn only_writer_less(&self) -> bool {
        let only = |guards: u64| (guards < 2 * WRITER).then(|| guards - WRITER);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, only).is_ok()
    }
}
