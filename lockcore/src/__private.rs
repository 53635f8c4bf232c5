//! The items that the code of `#[distributed_lock]` uses beside the public API. Not for any other use.
//!
//! Traits where a function of the public API would do, because a trait has its say about the message of
//! the compiler: what is missing, and which line to write.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt::Display;
use std::future::Future;

use futures_util::FutureExt;

use crate::{Error, ErrorKind, Wait};

/// A key that is an expression.
#[diagnostic::on_unimplemented(
    message = "a key is text, and `{Self}` does not turn into a `String`",
    label = "write `format!(…)`, or a template such as `\"order:{{id}}\"`"
)]
pub trait IntoKey {
    /// The name of the lock.
    fn into_key(self) -> String;
}

#[diagnostic::do_not_recommend]
impl<T: Into<String>> IntoKey for T {
    fn into_key(self) -> String {
        self.into()
    }
}

/// A part of a template's key: what stands between the braces.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be part of a key, because it does not implement `Display`",
    label = "write a field or a method of it, as in `{{order.id}}`; of an `Option`, say which key `None` has, as in \
             `{{id.unwrap_or(0)}}`"
)]
pub trait KeyPart: Display {}

#[diagnostic::do_not_recommend]
impl<T: Display + ?Sized> KeyPart for T {}

/// The value that `format!` gets for a part. It does not see the type: the compiler would suggest `{:?}` for one that
/// is not [`Display`].
pub fn key_part<'a, T: KeyPart + ?Sized>(part: &'a &T) -> &'a dyn Display {
    part
}

/// Keys that are an expression.
#[diagnostic::on_unimplemented(
    message = "keys are an iterator of text, which `{Self}` is not",
    label = "write `[\"…\", \"…\"]`, or an iterator of `String`s"
)]
pub trait IntoKeys {
    /// The names of the locks.
    fn into_keys(self) -> Vec<String>;
}

#[diagnostic::do_not_recommend]
impl<T: IntoIterator<Item: Into<String>>> IntoKeys for T {
    fn into_keys(self) -> Vec<String> {
        self.into_iter().map(Into::into).collect()
    }
}

/// Keys of which none is there twice: permits of one semaphore would be added up.
#[must_use]
pub fn each_once(keys: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    keys.into_iter().collect()
}

/// A variable or a part of one, of which a copy is a key: the body can still use it. A value that is not [`Clone`] is
/// moved, see [`OrMoved`].
#[derive(Debug)]
pub struct Place<'a, T>(pub &'a T);

impl<T: Clone> Place<'_, T> {
    /// Never an error: the compiler sees that what follows after one is not reached, so nothing is moved there.
    pub fn copy(&self) -> Result<T, Infallible> {
        Ok(self.0.clone())
    }
}

/// The method that is found for a [`Place`] that has no `copy` of its own.
pub trait OrMoved<T> {
    /// Always an error: there is no copy.
    fn copy(&self) -> Result<T, Moved> {
        Err(Moved)
    }
}

impl<T> OrMoved<T> for Place<'_, T> {}

/// The value cannot be cloned, so it must be moved.
#[derive(Debug)]
pub struct Moved;

/// A wait that is an expression.
#[diagnostic::on_unimplemented(
    message = "a wait is a `Duration` or a `lockcore::Wait`, not `{Self}`",
    label = "write `\"2s\"`, or an expression such as `Duration::from_secs(2)`"
)]
pub trait IntoWait {
    /// How long to stand in line.
    fn into_wait(self) -> Wait;
}

#[diagnostic::do_not_recommend]
impl<T: Into<Wait>> IntoWait for T {
    fn into_wait(self) -> Wait {
        self.into()
    }
}

/// The body of a function as `run` takes it. To `run` it cannot fail: its errors are the user's, who need
/// not be able to make one of ours.
pub fn infallible<F: Future>(body: F) -> impl Future<Output = Result<F::Output, Error>> {
    body.map(Ok)
}

/// Whether another holds the lock: what `on_busy` is for.
#[must_use]
pub fn is_busy(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Busy | ErrorKind::Timeout)
}

/// The types that a function with `on_busy = skip` may return.
#[diagnostic::on_unimplemented(
    message = "`skip` needs a function that returns `()`, `Option<_>` or `Result<(), _>`, and this one returns `{Self}`",
    label = "write a value of that type: `on_busy = …`"
)]
pub trait Skipped {
    /// As if there had been nothing to do.
    fn skipped() -> Self;
}

impl Skipped for () {
    fn skipped() -> Self {}
}

impl<T> Skipped for Option<T> {
    fn skipped() -> Self {
        None
    }
}

impl<E> Skipped for Result<(), E> {
    fn skipped() -> Self {
        Ok(())
    }
}

/// The types that a locked function may return without `on_error`: `Result<_, E>` with `E: From<Error>`. The two
/// halves are two traits, so that the compiler says which one is missing.
#[diagnostic::on_unimplemented(
    message = "taking the lock can fail, and a function that returns `{Self}` cannot return the error",
    label = "write `Result<{Self}, MyError>` and `impl From<lockcore::Error> for MyError`, or `on_error = …` above"
)]
pub trait Refused {
    /// Of a lock that was not to be had, or is lost.
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
    label = "write `impl From<lockcore::Error> for {Self}`, or, if it is a type of another crate, `on_error = Err(…)` \
             above"
)]
pub trait FromLockError: From<Error> {}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> FromLockError for E {}

/// `From<Error>` for a type that has the name of one of another crate, where no `impl` can be written.
macro_rules! from_lock_error {
    ($(#[doc = $name:literal] $trait:ident: $label:literal;)*) => {$(
        #[doc = $name]
        #[diagnostic::on_unimplemented(
            message = "a locked function returns lock errors too, and `{Self}` cannot be made from one",
            label = $label,
            note = "`impl From<lockcore::Error>` can be written for a type of your own only"
        )]
        pub trait $trait {
            /// The error as this type.
            fn from_lock_error(error: Error) -> Self;
        }

        #[diagnostic::do_not_recommend]
        impl<E: From<Error>> $trait for E {
            fn from_lock_error(error: Error) -> Self {
                error.into()
            }
        }
    )*};
}

from_lock_error! {
    /// `std::io::Error`
    IoFromLockError: "write `on_error = Err(io::Error::other(error))` above";
    /// `tonic::Status`
    StatusFromLockError: "write `on_error = Err(lockcore_tower::status(&error))` above";
    /// `http::StatusCode`
    StatusCodeFromLockError:
        "write `on_busy = Err(StatusCode::CONFLICT), on_error = Err(StatusCode::SERVICE_UNAVAILABLE)` above";
    /// Text.
    TextFromLockError: "write `on_error = Err(error.to_string())` above, or return an error type of your own";
    /// Several values, as axum takes them for a response.
    TupleFromLockError:
        "write `on_error = {{ tracing::error!(%error); Err((StatusCode::SERVICE_UNAVAILABLE, \"try again later\".into())) \
         }}` above, or return an error type of your own; the text of `error` is for operators, not for clients";
}
