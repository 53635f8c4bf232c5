//! For handlers of tonic's that take locks themselves.

use lockcore::Error;
use tonic::{Code, Status};

use crate::refusal::Problem;

/// What the [layer](crate::LockLayer) answers a gRPC request that meets this error: for handlers that
/// take a lock themselves.
///
/// ```
/// use lockcore::Locks;
/// use lockcore_tower::status;
/// use tonic::Status;
///
/// async fn settle(locks: &Locks, id: u64) -> Result<(), Status> {
///     let lock = locks.mutex(format!("order:{id}"));
///     let guard = lock.acquire().await.map_err(|error| status(&error))?;
///     guard.release().await.map_err(|error| status(&error))?;
///     Ok(())
/// }
/// # drop(settle);
/// ```
#[must_use]
pub fn status(error: &Error) -> Status {
    let (code, message) = Problem::met_by_a_handler(error).grpc();
    Status::new(Code::from(i32::from(code)), message)
}
