//! The gRPC status of a lock error, for handlers of tonic that take locks themselves.

use lockcore::Error;
use tonic::{Code, Status};

use crate::refusal::Problem;

/// The gRPC status with which the [layer](crate::LockLayer) answers this error. It is for handlers
/// that take a lock themselves. The message **names the lock**; the message of
/// [`status_without_key`] does not.
///
/// Do the work in [`Lock::run`](lockcore::Lock::run), or drop the guard at the end of the work, as
/// here. Then a store that does not answer the release cannot replace the answer of the handler. If
/// the handler returns an error of [`Guard::release`](lockcore::Guard::release), the client learns
/// only that the work [may be done](crate#lock-uncertain).
///
/// Take the lock before any other work. If the lock cannot be taken, the answer says that the
/// request was not handled.
///
/// ```
/// use lockcore::Locks;
/// use lockcore_tower::status;
/// use tonic::Status;
///
/// async fn settle(locks: &Locks, id: u64) -> Result<(), Status> {
///     let lock = locks.mutex(format!("order:{id}"));
///     let guard = lock.acquire().await.map_err(|error| status(&error))?;
///     let token = guard.fencing_token().map_err(|error| status(&error))?;
///     println!("order {id} settled under token {token}");
///     drop(guard); // releases in the background
///     Ok(())
/// }
/// # drop(settle);
/// ```
#[must_use]
pub fn status(error: &Error) -> Status {
    status_of(Problem::met_by_a_handler(error))
}

/// As [`status`], without the name of the lock. Use it for names that clients should not learn,
/// together with a layer that [hides](crate::LockLayer::hide_key) them.
///
/// ```
/// use lockcore::Locks;
/// use lockcore_tower::status_without_key;
/// use tonic::Status;
///
/// async fn rotate(locks: &Locks) -> Result<(), Status> {
///     let lock = locks.mutex("signing-key:internal");
///     let rotated = lock.run(async |_| Ok::<_, lockcore::Error>(()));
///     rotated.await.map_err(|error| status_without_key(&error))
/// }
/// # drop(rotate);
/// ```
#[must_use]
pub fn status_without_key(error: &Error) -> Status {
    status_of(Problem::met_by_a_handler(error).with_key_if(false))
}

fn status_of(problem: Problem) -> Status {
    let (code, message) = problem.grpc();
    Status::new(Code::from(i32::from(code)), message)
}
