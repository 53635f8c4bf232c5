//! The options of locks and clients that are plain values.

use std::time::Duration;

/// The shortest ttl of a lock. With a shorter one, the allowance for clock drift and one round trip
/// would use up the whole lease.
pub(crate) const SHORTEST_TTL: Duration = Duration::from_millis(50);

/// A ticket that [lingers](crate::Lock::linger) is released this long after its grant, at the latest.
pub(crate) const LONGEST_LINGER: Duration = Duration::from_secs(1);

/// How long to wait for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// At most this long. The time counts for the whole request: to connect, to queue and to get
    /// the answer. With zero the caller does not wait.
    For(Duration),
    /// Until the lock is granted.
    Forever,
}

impl From<Duration> for Wait {
    fn from(duration: Duration) -> Self {
        Self::For(duration)
    }
}

/// What happens to work under a lock when the lock is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// The work is dropped at its current `.await`, and the caller gets
    /// [`Lost`](crate::ErrorKind::Lost).
    #[default]
    Cancel,
    /// The work continues, and can learn of the loss by [`Held::lost`](crate::Held::lost) and
    /// [`Held::is_valid`](crate::Held::is_valid). This is for work that must finish once it has
    /// begun. The resource that it writes to should check the fencing token.
    Signal,
}

/// What happens to work under a lock when somebody asks for the lock: see
/// [`Locks::revoke`](crate::Locks::revoke).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnRevoke {
    /// The work continues until it is done, or until the grace is over: the time that the caller of
    /// `revoke` gives. The work can listen to [`Held::revoked`](crate::Held::revoked). When the
    /// grace is over, the lock is lost, and [`OnLost`] says what happens to the work.
    #[default]
    Finish,
    /// The work is dropped at its current `.await`, as soon as this process learns that somebody
    /// asks for the lock. Then the lock is released, and the caller gets
    /// [`Lost`](crate::ErrorKind::Lost) with [`Revoked`](crate::LostReason::Revoked). Use this for
    /// work that can be repeated, and that must not keep others waiting.
    ///
    /// [`run`](crate::Guard::run), [`scope`](crate::Held::scope), the macro and the layer release
    /// the lock. [`while_held`](crate::Held::while_held) leaves that to its guard.
    Cancel,
}

/// Which waiter gets a lock next, when several tasks of several processes ask for it.
///
/// With both policies every waiter gets the lock in the end. On a [quorum of Redis
/// servers](crate::guide::redis_quorum) there is no line, and this is not so: a waiter of another
/// process may come first any number of times. A hand-over inside the process is more than ten
/// times as fast, because it sends no request to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fair {
    /// The tasks of a process queue inside the process, first come, first served. The process has
    /// only one ticket in the store's line. When it has the lock, it may hand the lock over among
    /// its own tasks, for at most this time, the *bound*. There are about four such hand-overs per
    /// waiting task, and at most 1,000 in all. After that the next process gets the lock. A task that
    /// comes right after a guard was dropped gets its ticket in the same way, if the release has not
    /// begun.
    ///
    /// This applies to mutexes and read/write locks that are renewed and have no `min_hold`, no
    /// `max_hold` and no owner text of their own. For other locks, and for semaphores, each request
    /// takes a ticket of its own.
    Local(Duration),
    /// First come, first served: each request has a place in one line of all processes. Requests of
    /// one process that come close together may share a place, and use it one after the other. If each
    /// request must have its own place, give the locks an [owner text](crate::Lock::owner).
    ///
    /// In detail: if requests of one process for the same mutex or write lock come while the
    /// process asks the store for this lock, they share the next ticket, and use it one after the
    /// other. The same is true of those that come while such tasks pass the lock on. If each had a
    /// ticket, these tickets would be right behind each other. To share one, a request waits for
    /// about one answer of the store before it stands in line. This applies to the locks that
    /// [`Local`](Self::Local) names. A request that shares no ticket, for example one of a reader,
    /// does not wait, so it may come before them.
    ///
    /// If a shared ticket ends early, those that still wait for it go to the end of the line. It ends
    /// early if it is lost, asked back, detached, downgraded or extended, or if less than half of its
    /// ttl is left, or if the connection broke and the store has not confirmed the ticket since. It
    /// ends too if the task that stands in line for it gives up, and the next one is in another
    /// runtime.
    Strict,
}
