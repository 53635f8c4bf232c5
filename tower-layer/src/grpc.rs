//! For handlers of tonic's that take locks themselves.

use lockcore::{Error, ErrorKind};
use tonic::{Code, Status};

use crate::response::Problem;

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
    let problem = match error.kind() {
        ErrorKind::Lost(_) => Problem::lost(error),
        _ => Problem::not_taken(error, false),
    };
    let (code, message) = problem.grpc();
    Status::new(Code::from(i32::from(code)), message)
}
