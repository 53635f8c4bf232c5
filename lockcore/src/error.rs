//! The one error of the public API. It has few kinds, and each says what happened to the lock.

use std::fmt;
use std::time::Duration;

/// Why a lock was not taken, or was lost.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    name: Option<String>,
    message: String,
    retry_after: Option<Duration>,
    was_held: bool,
}

/// The kind of an [`Error`]: it says what happened, and what is known about the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing has been taken, nothing is left behind, and nothing has changed:
    ///
    /// - the lock is held, or others wait for it, and the caller did not want to wait;
    /// - the caller wanted to wait, but ten thousand tickets of this name are at the store already (holders included),
    ///   or as many callers wait in the line of this process;
    /// - another guard stands in the way of a [downgrade](crate::Guard::downgrade), or of
    ///   [handing the lock over](crate::Guard::detach).
    Busy,
    /// The caller waited as long as allowed, in the store's line or in the line of this process. Nothing is held. For a
    /// [`Latch`](crate::Latch): the count is not zero yet.
    Timeout,
    /// The lock was held, and is not held any more: somebody else may hold it now. Or the client was shut down before
    /// the lock was taken. [`Error::was_held`] tells the two apart.
    Lost(LostReason),
    /// The store is down or refuses. Nothing is held.
    Unavailable,
    /// The lock was asked for, and the answer never came: it may have been taken for a moment. Its release is on the
    /// way, and is tried until the store acknowledges it or the lease has run out. For a [`Counter`](crate::Counter), and
    /// for the value of a lock: the change was made once, or not at all.
    Unknown,
    /// The name is in use with another capacity. Nothing is held.
    CapacityMismatch,
    /// The caller would wait for itself: it asks for the write side while it holds the read side, or asks again for a
    /// lock that is not [reentrant](crate::Lock::reentrant). It still holds what it held before.
    WouldDeadlock,
    /// A mistake in a URL, credentials, a name or a duration, or an operation that a shared lock does not have. Trying
    /// again will not help.
    Config,
}

/// Why a held lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out: no renewal was acknowledged in time, or the lock was taken [without
    /// renewal](crate::Lock::renew).
    Expired,
    /// The store does not know the ticket any more: the store restarted or lost data, or somebody deleted the ticket.
    Taken,
    /// [`Locks::shutdown`](crate::Locks::shutdown) released it.
    Shutdown,
    /// It was held as long as [`Lock::max_hold`](crate::Lock::max_hold) allows.
    MaxHold,
    /// Somebody asked for it with [`Locks::revoke`](crate::Locks::revoke), and the time to give it up is over, or it was
    /// taken away.
    Revoked,
    /// It was released or [detached](crate::Guard::detach), and this is a [`Held`](crate::Held) that exists longer than
    /// its guard.
    Released,
    /// This process is a forked child: the lock belongs to its parent.
    Forked,
}

impl Error {
    /// Returns what happened.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The name of the lock, if the error is about one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Whether this caller may hold the lock all the same. True only for [`ErrorKind::Unknown`].
    #[must_use]
    pub fn may_hold(&self) -> bool {
        self.0.kind == ErrorKind::Unknown
    }

    /// Whether the lock was held before, so that part of the work under it may be done. True for [`ErrorKind::Lost`],
    /// except when the client was shut down before the lock was taken.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// locks.shutdown(Duration::ZERO).await?;
    ///
    /// let refused = locks.mutex("report").acquire().await.unwrap_err();
    /// assert!(!refused.was_held());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn was_held(&self) -> bool {
        self.0.was_held
    }

    /// How long to wait before it makes sense to ask again, if that is known. For [`ErrorKind::Busy`] this is the time
    /// after which the lock is free if its holder does not renew it.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            name: None,
            message: message.into(),
            retry_after: None,
            was_held: matches!(kind, ErrorKind::Lost(_)),
        }))
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    /// An error of the kind [`Unavailable`](ErrorKind::Unavailable), for code around locks that cannot ask for one: a
    /// layer whose service is not ready, a test of what a caller does then. The message must contain no secrets.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unknown, message)
    }

    pub(crate) fn busy(retry_in: Option<Duration>) -> Self {
        let mut error = Self::new(ErrorKind::Busy, "held, or others wait for it");
        error.0.retry_after = retry_in;
        error
    }

    /// For a caller that wanted to wait.
    pub(crate) fn crowded(retry_in: Option<Duration>) -> Self {
        let mut error = Self::new(ErrorKind::Busy, "too many wait for it already");
        error.0.retry_after = retry_in;
        error
    }

    pub(crate) fn still_written() -> Self {
        let text = "another guard of this hold, or a lock taken inside of it, still writes; end that first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn still_read() -> Self {
        let text =
            "other guards or tasks of this process read with the same ticket; end them first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn still_used() -> Self {
        let text = "not detached: other guards, inner holds or tasks of this process use the same ticket; end them first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn still_asked_for() -> Self {
        let text = "not detached: somebody asks for the lock (Locks::revoke); release it";
        Self::new(ErrorKind::Busy, text)
    }

    /// A lock that was detached cannot be adopted.
    pub(crate) fn not_adopted() -> Self {
        let text = "not adopted: the store does not have this grant any more. Its lease has ended, it was released, or \
                    somebody has adopted it before; take the lock anew";
        Self::new(ErrorKind::Lost(LostReason::Taken), text)
    }

    pub(crate) fn timeout(waited: Duration) -> Self {
        Self::still_not("free", waited)
    }

    pub(crate) fn not_zero(waited: Duration) -> Self {
        Self::still_not("at zero", waited)
    }

    pub(crate) fn not_complete(waited: Duration) -> Self {
        Self::still_not("complete", waited)
    }

    pub(crate) fn not_left(waited: Duration) -> Self {
        Self::still_not("left by all", waited)
    }

    fn still_not(what: &str, waited: Duration) -> Self {
        let waited = humantime::format_duration(Duration::from_millis(
            waited.as_millis().try_into().unwrap_or(u64::MAX),
        ));
        Self::new(
            ErrorKind::Timeout,
            format!("still not {what} after waiting {waited}"),
        )
    }

    pub(crate) fn lost(reason: LostReason) -> Self {
        let message = match reason {
            LostReason::Expired => "lost: no renewal was acknowledged before the lease ran out",
            LostReason::Taken => "lost: the store does not know the ticket any more",
            LostReason::Shutdown => "lost: the client was shut down",
            LostReason::MaxHold => "lost: held as long as max_hold allows",
            LostReason::Revoked => {
                "lost: somebody asked for it (Locks::revoke), and the time to give it up is over"
            }
            LostReason::Released => {
                "released or detached: this is a view that has outlived its guard"
            }
            LostReason::Forked => {
                "lost: this process is a forked child, and the lock is its parent's"
            }
        };
        Self::new(ErrorKind::Lost(reason), message)
    }

    /// A lock was asked for after the client was shut down.
    pub(crate) fn shut_down() -> Self {
        let text = "not taken: the client was shut down";
        let mut error = Self::new(ErrorKind::Lost(LostReason::Shutdown), text);
        error.0.was_held = false;
        error
    }

    /// The loss of a lease. `renewed` tells whether the keeper renewed it.
    pub(crate) fn lost_lease(reason: LostReason, renewed: bool) -> Self {
        match (reason, renewed) {
            (LostReason::Expired, false) => {
                let text =
                    "lost: the lease ran out, which was taken without renewal (renew = false)";
                Self::new(ErrorKind::Lost(reason), text)
            }
            _ => Self::lost(reason),
        }
    }

    /// A guard of the same client holds the lock, or some of its permits. Only the caller knows whether that guard is
    /// its own.
    pub(crate) fn held_here(mut self, all_of_it: bool) -> Self {
        self.0.message += match all_of_it {
            true => {
                "; a guard of this client has it: one of your own is shared by Guard::reenter, and inside of run the \
                 lock is taken again at once"
            }
            false => {
                "; a guard of this client has some of it: one of your own is shared by Guard::reenter"
            }
        };
        self
    }

    pub(crate) fn would_deadlock(message: &str) -> Self {
        Self::new(ErrorKind::WouldDeadlock, message)
    }

    /// The name is in use with another capacity than the request's.
    pub(crate) fn capacity_mismatch(asked: &str, in_use: &str) -> Self {
        Self::new(
            ErrorKind::CapacityMismatch,
            format!("asked for {asked}, but the name is in use {in_use}; all callers must agree"),
        )
    }

    /// The same error for a caller that has not sent a request yet. `None` if the store is not the cause.
    pub(crate) fn as_refusal(&self) -> Option<Self> {
        match self.0.kind {
            ErrorKind::Unavailable | ErrorKind::Config => Some(self.clone()),
            ErrorKind::Unknown => Some(Self::unavailable(self.0.message.clone())),
            ErrorKind::Busy
            | ErrorKind::Timeout
            | ErrorKind::Lost(_)
            | ErrorKind::CapacityMismatch
            | ErrorKind::WouldDeadlock => None,
        }
    }

    /// For a change that has already happened in this process: the kind `Config` would say that nothing has changed.
    pub(crate) fn unavailable_if_config(self) -> Self {
        match self.0.kind {
            ErrorKind::Config => Self::unavailable(self.0.message),
            _ => self,
        }
    }

    pub(crate) fn of_name(mut self, name: &str) -> Self {
        self.0.name = Some(name.to_owned());
        self
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.name {
            Some(name) => write!(f, "lock \"{}\": {}", name.escape_debug(), self.0.message),
            None => f.write_str(&self.0.message),
        }
    }
}

/// Shows the sentence, because `unwrap`, and a `main` that returns the error, print this form. `{:#?}` shows the
/// fields.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("name", &self.0.name)
            .field("message", &self.0.message)
            .field("retry_after", &self.0.retry_after)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_main_that_returns_the_error_prints_its_sentence() {
        let error = Error::timeout(Duration::from_secs(2)).of_name("order:42");

        let sentence = "lock \"order:42\": still not free after waiting 2s";
        assert_eq!(format!("{error:?}"), sentence);
        assert_eq!(error.to_string(), sentence);
        // With `{:#?}` the kind and the name are there as well.
        let fields = format!("{error:#?}");
        assert!(fields.contains("kind: Timeout"), "{fields}");
        assert!(
            fields.contains("name: Some(\n        \"order:42\""),
            "{fields}"
        );
    }
}
