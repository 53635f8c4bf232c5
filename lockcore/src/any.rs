//! One of several locks: the first that is free, or the first that is granted. All of several locks are in `multi`.

use futures_util::future::select_all;

use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;

/// Asks for the locks one after the other, so that never more than one is held.
///
/// If the future is dropped half-way, so is the request that is under way.
pub(crate) async fn try_acquire(locks: &[Lock]) -> Result<Guard, Error> {
    let mut refused = Refused::default();
    for lock in locks {
        lock.check()?;
    }
    for lock in locks {
        match lock.try_acquire().await {
            Ok(guard) => return Ok(guard),
            Err(error) => refused.note(error),
        }
    }
    Err(refused.error())
}

/// As [`try_acquire`], and then waits for all locks at the same time.
///
/// The futures are polled in the order of the list, and the poll in which one is ready ends all others. Another that was
/// granted by then has not been polled since. Dropping it gives its lock back.
pub(crate) async fn acquire(locks: &[Lock]) -> Result<Guard, Error> {
    match try_acquire(locks).await {
        Err(error) if error.kind() == ErrorKind::Busy => {}
        outcome => return outcome,
    }
    let mut waiting: Vec<_> = locks.iter().map(|lock| Box::pin(lock.acquire())).collect();
    let mut refused = Refused::default();
    while !waiting.is_empty() {
        let (outcome, _, rest) = select_all(waiting).await;
        match outcome {
            Ok(guard) => return Ok(guard),
            Err(error) => refused.note(error),
        }
        waiting = rest;
    }
    Err(refused.error())
}

/// Why none of the locks was granted so far.
#[derive(Default)]
struct Refused {
    /// The last lock was not free in time.
    taken: Option<Error>,
    /// Something else was the matter with the first such lock.
    failed: Option<Error>,
}

impl Refused {
    fn note(&mut self, error: Error) {
        match error.kind() {
            ErrorKind::Busy | ErrorKind::Timeout => self.taken = Some(error),
            _ => {
                self.failed.get_or_insert(error);
            }
        }
    }

    fn error(self) -> Error {
        let nothing = || Error::config("one of no locks cannot be taken: the list is empty");
        self.failed.or(self.taken).unwrap_or_else(nothing)
    }
}
