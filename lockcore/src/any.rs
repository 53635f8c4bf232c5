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
    let free = first_free(locks, &mut refused).await?;
    free.ok_or_else(|| refused.error())
}

/// Does what [`try_acquire`] does. If no lock is free, waits at the same time for all locks that
/// somebody holds. A lock that has failed otherwise is not asked for again.
///
/// The futures are polled in the order of the list. When one of them is ready, all others are
/// dropped without a further poll. If the store has granted the lock of another future by then, the
/// drop of this future releases that lock.
pub(crate) async fn acquire(locks: &[Lock]) -> Result<Guard, Error> {
    let mut refused = Refused::default();
    if let Some(guard) = first_free(locks, &mut refused).await? {
        return Ok(guard);
    }
    let busy = std::mem::take(&mut refused.busy).into_iter();
    let mut waiting: Vec<_> = busy.map(|lock| Box::pin(lock.acquire())).collect();
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

/// The first lock that is free. Fails if one of the locks can never be taken.
async fn first_free<'a>(
    locks: &'a [Lock],
    refused: &mut Refused<'a>,
) -> Result<Option<Guard>, Error> {
    for lock in locks {
        lock.check()?;
    }
    for lock in locks {
        match lock.try_acquire().await {
            Ok(guard) => return Ok(Some(guard)),
            Err(error) => {
                if error.kind() == ErrorKind::Busy {
                    refused.busy.push(lock);
                }
                refused.note(error);
            }
        }
    }
    Ok(None)
}

/// The errors so far: why none of the locks was granted.
#[derive(Default)]
struct Refused<'a> {
    /// The locks that somebody holds.
    busy: Vec<&'a Lock>,
    /// The error of the last lock that was not free in time.
    taken: Option<Error>,
    /// The first error of any other kind.
    failed: Option<Error>,
}

impl Refused<'_> {
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
