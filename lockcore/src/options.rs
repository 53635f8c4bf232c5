//! Options of a lock and of a client that are plain values.

use std::time::Duration;

/// With a shorter ttl, the drift allowance and one round trip would use up the whole lease.
pub(crate) const SHORTEST_TTL: Duration = Duration::from_millis(50);

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// At most this long, for connecting, queueing and everything else together. Zero does not wait.
    For(Duration),
    /// Until it is granted.
    Forever,
}

impl From<Duration> for Wait {
    fn from(duration: Duration) -> Self {
        Self::For(duration)
    }
}

/// Says what happens to work under a lock when the lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// It is dropped where it stands, and the caller gets [`Lost`](crate::ErrorKind::Lost).
    #[default]
    Cancel,
    /// It goes on, and can ask [`Held::lost`](crate::Held::lost) and [`Held::is_valid`](crate::Held::is_valid). For
    /// work that must finish once it has begun, and that checks the fencing token where it writes.
    Signal,
}

/// Says what happens to work under a lock when somebody asks for the lock: see
/// [`Locks::revoke`](crate::Locks::revoke).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnRevoke {
    /// It goes on until it is done or the time to give the lock up is over. It can listen to
    /// [`Held::revoked`](crate::Held::revoked). When the time is over the lock is lost, and [`OnLost`] decides.
    #[default]
    Finish,
    /// It is dropped where it stands, as soon as this process learns of the request, and the caller gets
    /// [`Lost`](crate::ErrorKind::Lost) with [`Revoked`](crate::LostReason::Revoked). For work that can be repeated, and
    /// that others should not wait for.
    Cancel,
}

/// Which waiter gets a lock next, when several tasks of several processes want it.
///
/// With both policies every waiter gets its turn. Handing over inside the process first is more than ten times faster,
/// because such a hand-over does not ask the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fair {
    /// The tasks of a process queue inside the process, first come, first served, and the process takes only one place
    /// in the store's line. When it has the lock, it may hand the lock over among its own tasks for this long, but only
    /// about four times per waiting task, and at most 1,000 times in all. Then the next process has its turn.
    ///
    /// Applies to mutexes and read/write locks that are renewed and have no `min_hold`, no `max_hold` and no owner text
    /// of their own. All others, and semaphores, take a ticket of their own.
    Local(Duration),
    /// One ticket per request: first come, first served over all processes.
    Strict,
}
