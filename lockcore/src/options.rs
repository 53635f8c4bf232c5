//! What a lock, and a client, can be told: choices that are plain values.

use std::time::Duration;

/// Below this the drift allowance and one round trip leave nothing of the lease.
pub(crate) const SHORTEST_TTL: Duration = Duration::from_millis(50);

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Connecting, queueing and everything else together. Zero does not wait.
    For(Duration),
    /// Until it is granted.
    Forever,
}

impl From<Duration> for Wait {
    fn from(duration: Duration) -> Self {
        Self::For(duration)
    }
}

/// What happens to work that runs under a lock when the lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLost {
    /// It is dropped where it stands, and the caller gets [`Lost`](crate::ErrorKind::Lost).
    #[default]
    Cancel,
    /// It goes on; [`Held::lost`](crate::Held::lost) and [`Held::is_valid`](crate::Held::is_valid) tell. For work that must come to an end
    /// once begun, and checks the fencing token where it writes.
    Signal,
}

/// Who gets a lock next when several processes, and several tasks of each, want it.
///
/// Either way nobody waits for ever. Serving one's own is faster by more than an order of magnitude,
/// because a hand-over inside a process asks no store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fair {
    /// The tasks of a process queue in it, first come, first served, and the process stands in line
    /// at the store once. When it has the lock it may serve its own for this long, but each of those
    /// that wait in it only about four times (and at most 1,000 in all); then the next process has its
    /// turn.
    ///
    /// Applies to exclusive and shared locks that are renewed and have no `max_hold`; others, and
    /// semaphores, have a ticket of their own.
    Local(Duration),
    /// One ticket per request: first come, first served over all processes.
    Strict,
}
