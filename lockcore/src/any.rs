//! Taking one of several locks: the first that is free, or the first that is granted. Taking all of
//! several locks is in `multi`.

use futures_util::future::select_all;

use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;

/// Asks for the locks one after the other, so it never holds more than one.
///
/// If the future is dropped, the request that is in flight is dropped with it, and leaves nothing
/// behind.
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

/// Does what [`try_acquire`] does. If no lock is free, waits for all locks at the same time.
///
/// The futures are polled in the order of the list. When one of them is ready, all others are
/// dropped without a further poll. If the store has granted the lock of another future by then, the
/// drop of this future releases that lock.
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

/// The errors so far: why none of the locks was granted.
#[derive(Default)]
struct Refused {
    /// The error of the last lock that was not free in time.
    taken: Option<Error>,
    /// The first error of any other kind.
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
