//! A resource for tests, to be protected by a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A resource that records whether visits overlap. It does not know about locks. Visits overlap if
/// the permits of all visits at one time are more than the capacity.
///
/// Enter after the lock was granted, and leave before the lock is released. Then each recorded
/// overlap is a real overlap.
#[derive(Debug)]
pub struct Witness {
    capacity: u64,
    seen: Mutex<Seen>,
}

/// The events that a witness has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Visits that began.
    pub visits: u64,
    /// Visits that began without enough free permits.
    pub overlaps: u64,
    /// The most visits at the same time.
    pub most_at_once: u64,
    /// The most permits at the same time.
    pub most_permits: u64,
    now: u64,
    permits_now: u64,
}

/// A visit to the resource. It ends when this value is dropped.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct Visit<'a> {
    witness: &'a Witness,
    permits: u64,
}

impl Witness {
    /// One visit at a time. Enter with one permit.
    pub fn exclusive() -> Self {
        Self::of(1)
    }

    /// Allows many [`readers`](Self::read) or one [`writer`](Self::write).
    pub fn readers_and_writers() -> Self {
        Self::of(u32::MAX)
    }

    /// At most `capacity` permits at the same time.
    pub fn of(capacity: u32) -> Self {
        Self {
            capacity: capacity.into(),
            seen: Mutex::default(),
        }
    }

    /// Enters with this many permits. An overlap is recorded and does not panic, because a panic in
    /// a spawned task can stay unseen.
    pub fn enter(&self, permits: u32) -> Visit<'_> {
        self.begin(permits.into())
    }

    /// Enters as a reader.
    pub fn read(&self) -> Visit<'_> {
        self.begin(1)
    }

    /// Enters as a writer.
    pub fn write(&self) -> Visit<'_> {
        self.begin(self.capacity)
    }

    /// The events that the witness has seen so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        *self.lock()
    }

    /// Returns the events that the witness has seen.
    ///
    /// # Panics
    ///
    /// If visits overlapped.
    pub fn assert_no_overlap(&self) -> Seen {
        let seen = self.seen();
        assert_eq!(
            seen.overlaps, 0,
            "visits overlapped at capacity {}: {seen:?}",
            self.capacity
        );
        seen
    }

    fn begin(&self, permits: u64) -> Visit<'_> {
        let mut seen = self.lock();
        seen.visits += 1;
        seen.now += 1;
        seen.permits_now += permits;
        seen.most_at_once = seen.most_at_once.max(seen.now);
        seen.most_permits = seen.most_permits.max(seen.permits_now);
        if seen.permits_now > self.capacity {
            seen.overlaps += 1;
        }
        Visit {
            witness: self,
            permits,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut seen = self.witness.lock();
        seen.now -= 1;
        seen.permits_now -= self.permits;
    }
}
