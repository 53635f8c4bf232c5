//! What `#[distributed_lock]` expands to, beside the public API. Not for any other use.

use crate::Error;

/// What a locked function returns when it did not get its lock, or lost it.
pub fn refused<R: Refused>(error: Error) -> R {
    R::refused(error)
}

/// What a locked function may return: `Result<_, E>` with `E: From<Error>`. Its two halves are two
/// traits, so that the compiler says which one is missing and which line to write.
#[diagnostic::on_unimplemented(
    message = "asking for the lock can fail, so the function returns a `Result`",
    label = "write `Result<{Self}, MyError>` and `impl From<lockcore::Error> for MyError`"
)]
pub trait Refused {
    /// The error as the user's `Err`.
    fn refused(error: Error) -> Self;
}

impl<T, E: FromLockError> Refused for Result<T, E> {
    fn refused(error: Error) -> Self {
        Err(error.into())
    }
}

/// `From<Error>`, with a message of its own.
#[diagnostic::on_unimplemented(
    message = "a locked function returns lock errors too, and `{Self}` cannot be made from one",
    label = "write `impl From<lockcore::Error> for {Self}`"
)]
pub trait FromLockError: From<Error> {}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> FromLockError for E {}
