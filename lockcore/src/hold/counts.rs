//! How many guards a hold has.

use crate::sync::atomic::{AtomicU64, Ordering};

/// How many guards a hold has, and how many of them write: in one word, so that there is one who ended
/// last, and one after whom nobody writes.
///
/// Without guards it is over. Without writers, of which an exclusive hold keeps the last beyond its end,
/// it is a reader's. Both are final.
pub(super) struct Guards(AtomicU64);

/// Below are the guards, from here on those that write.
const WRITER: u64 = 1 << 32;

/// What a guard has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nobody,
    /// It was the last that wrote.
    Readers,
    /// Whoever writes, or reads where nobody has written.
    Others,
}

impl Guards {
    /// The first.
    pub(super) fn new(exclusive: bool) -> Self {
        Self(AtomicU64::new(if exclusive { WRITER | 1 } else { 1 }))
    }

    pub(super) fn are_gone(&self) -> bool {
        self.0.load(Ordering::SeqCst) as u32 == 0
    }

    pub(super) fn are_exclusive(&self) -> bool {
        self.0.load(Ordering::SeqCst) >= WRITER
    }

    /// One more, while there is one: it writes if it wants to and others do. Returns whether it does.
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

    /// One that writes reads on. Returns whether it was the last that wrote.
    pub(super) fn one_writer_less(&self) -> bool {
        self.0.fetch_sub(WRITER, Ordering::SeqCst) < 2 * WRITER
    }

    /// The same if no other writes. Returns whether that is so.
    pub(super) fn only_writer_less(&self) -> bool {
        let only = |guards: u64| (guards < 2 * WRITER).then(|| guards - WRITER);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, only).is_ok()
    }
}
