//! The items that the generated code of `#[distributed_lock]` uses, in addition to the public API.
//! Nothing else may use them.
//!
//! There are traits here where a function of the public API would be enough. The reason is that a
//! trait can set the message of the compiler: what is missing, and which line to write.

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

/// A part of a template's key: the expression between the braces.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be part of a key, because it does not implement `Display`",
    label = "write a field or a method of it, as in `{{order.id}}`; of an `Option`, say which key `None` has, as in \
             `{{id.unwrap_or(0)}}`",
    note = "if it is a type parameter, give it the bound `std::fmt::Display`"
)]
pub trait KeyPart<N>: Display {}

#[diagnostic::do_not_recommend]
impl<T: Display + ?Sized, N> KeyPart<N> for T {}

/// The value that `format!` gets for a part. It hides the type from `format!`, because for a type
/// that is not [`Display`] the compiler would suggest `{:?}`.
///
/// `N` is the type of a closure. Nobody can write such a type in a bound. So for a type parameter
/// the compiler does not suggest the bound `KeyPart`, which is private.
pub fn key_part<'a, N, T: KeyPart<N> + ?Sized>(part: &'a &T, _unnameable: N) -> &'a dyn Display {
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

/// The keys without duplicates. With a duplicate key, the permits of one semaphore would be added
/// up.
#[must_use]
pub fn each_once(keys: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    keys.into_iter().collect()
}

/// A variable, or a part of a variable, that is the key. The key is a copy, so that the body can
/// use the variable. If the value is not [`Clone`], it is moved: see [`OrMoved`].
#[derive(Debug)]
pub struct Place<'a, T>(pub &'a T);

impl<T: Clone> Place<'_, T> {
    /// Never returns an error. The compiler knows this from the type [`Infallible`]. So it treats
    /// the code after an error as unreachable, and sees no move there.
    pub fn copy(&self) -> Result<T, Infallible> {
        Ok(self.0.clone())
    }
}

/// The method that the compiler finds for a [`Place`] that has no `copy` of its own.
pub trait OrMoved<T> {
    /// Always returns an error, because there is no copy.
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
    /// How long to wait.
    fn into_wait(self) -> Wait;
}

#[diagnostic::do_not_recommend]
impl<T: Into<Wait>> IntoWait for T {
    fn into_wait(self) -> Wait {
        self.into()
    }
}

/// Turns the body of a function into a body for `run` that cannot fail. The errors of the body are
/// part of its output, because the user's error type need not be made from an error of this crate.
pub fn infallible<F: Future>(body: F) -> impl Future<Output = Result<F::Output, Error>> {
    body.map(Ok)
}

/// Whether the error says that another caller holds the lock. For these errors the macro uses
/// `on_busy`.
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
    /// The value to return when the body was skipped.
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

/// The types that a locked function may return without `on_error`: `Result<_, E>` with `E:
/// From<Error>`. There is one trait for `Result` and one for `From<Error>`, so that the compiler
/// says which of the two is missing.
#[diagnostic::on_unimplemented(
    message = "taking the lock can fail, and a function that returns `{Self}` cannot return the error",
    label = "write `Result<{Self}, MyError>` and `impl From<lockcore::Error> for MyError`, or `on_error = …` above"
)]
pub trait Refused {
    /// The return value when the lock was not taken, or was lost.
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

/// `From<Error>` for a return type whose name is that of a type of another crate. The user cannot
/// write an `impl` for such a type.
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
        "write `on_busy = Err(StatusCode::CONFLICT), on_error = Err(StatusCode::SERVICE_UNAVAILABLE)` above, or, in a \
         handler of axum, return `lockcore_tower::Problem` as the error";
    /// Text.
    TextFromLockError: "write `on_error = Err(error.to_string())` above, or return an error type of your own";
    /// Text that may be borrowed.
    CowFromLockError: "write `on_error = Err(error.to_string().into())` above, or return an error type of your own";
    /// `&'static str`
    StaticTextFromLockError: "write `on_error = Err(\"try again later\")` above, or return an error type of your own";
    /// `()`
    UnitFromLockError: "write `on_error = Err(())` above, or return an error type of your own";
    /// A tuple, which axum accepts as a response.
    TupleFromLockError:
        "write `on_error = {{ tracing::error!(%error); Err((StatusCode::SERVICE_UNAVAILABLE, \"try again later\".into())) \
         }}` above, or return `lockcore_tower::Problem` or an error type of your own as the error; the text of `error` is for operators, not for clients";
}
