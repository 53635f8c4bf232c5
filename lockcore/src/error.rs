//! The one error of the public API: few kinds, each saying what it did to the lock.

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

/// What happened, and with it what is known about the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing has been taken, nothing is left behind, and nothing has changed:
    ///
    /// - held, or others wait for it, and the caller would not wait;
    /// - the caller would wait, and ten thousand tickets are at the store before him, those that hold
    ///   included, or as many wait in the line of this process;
    /// - another guard stands in the way of a [downgrade](crate::Guard::downgrade).
    Busy,
    /// Waited as long as was allowed, in the store's line or in that of this process. Nothing is held.
    Timeout,
    /// Was held, and is no more: somebody else may hold it now. Or it was asked of a client that is
    /// shut down, and nothing was taken; [`Error::was_held`] tells the two apart.
    Lost(LostReason),
    /// The store is down or refuses. Nothing is held.
    Unavailable,
    /// Asked, and the answer never came: the lock may have been taken for a moment. Its release is
    /// on the way and is tried until it is acknowledged or the lease has run out.
    Unknown,
    /// The name is in use with another capacity. Nothing is held.
    CapacityMismatch,
    /// The caller himself is what stands in the way: he asks for the write side while he holds the
    /// read side, or again for a lock that is not [reentrant](crate::Lock::reentrant). What he held
    /// he still holds.
    WouldDeadlock,
    /// A mistake in URL, credentials, name, or duration, or in what is asked of a shared lock: trying
    /// again will not help.
    Config,
}

/// Why a held lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out: no renewal was acknowledged in time, or it was taken
    /// [without renewal](crate::Lock::renew).
    Expired,
    /// The store does not know the ticket any more: it restarted, lost data, or somebody deleted it.
    Taken,
    /// [`Locks::shutdown`](crate::Locks::shutdown) released it.
    Shutdown,
    /// It was held as long as [`Lock::max_hold`](crate::Lock::max_hold) allows.
    MaxHold,
    /// It was released: this is a [`Held`](crate::Held) that has outlived its guard.
    Released,
    /// This process is a forked child: the lock is its parent's.
    Forked,
}

impl Error {
    /// What happened.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The name of the lock, if the error is about one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Whether this caller may hold the lock all the same: true for [`ErrorKind::Unknown`] only.
    #[must_use]
    pub fn may_hold(&self) -> bool {
        self.0.kind == ErrorKind::Unknown
    }

    /// Whether the lock was held before, so that part of the work under it may be done: true for
    /// [`ErrorKind::Lost`], unless the lock was asked of a client that is shut down, and never taken.
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

    /// When it is sensible to ask again, if that is known: for [`ErrorKind::Busy`] the time after
    /// which the lock is free if nobody renews it.
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

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
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

    /// For a caller who would wait.
    pub(crate) fn crowded(retry_in: Option<Duration>) -> Self {
        let mut error = Self::new(ErrorKind::Busy, "too many wait for it already");
        error.0.retry_after = retry_in;
        error
    }

    pub(crate) fn still_written() -> Self {
        let text = "another guard of this hold, or a lock taken inside of it, still writes; end that first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn timeout(waited: Duration) -> Self {
        let waited = humantime::format_duration(Duration::from_millis(
            waited.as_millis().try_into().unwrap_or(u64::MAX),
        ));
        Self::new(
            ErrorKind::Timeout,
            format!("still not free after waiting {waited}"),
        )
    }

    pub(crate) fn lost(reason: LostReason) -> Self {
        let message = match reason {
            LostReason::Expired => "lost: no renewal was acknowledged before the lease ran out",
            LostReason::Taken => "lost: the store does not know the ticket any more",
            LostReason::Shutdown => "lost: the client was shut down",
            LostReason::MaxHold => "lost: held as long as max_hold allows",
            LostReason::Released => "released: this is a view that has outlived its guard",
            LostReason::Forked => {
                "lost: this process is a forked child, and the lock is its parent's"
            }
        };
        Self::new(ErrorKind::Lost(reason), message)
    }

    /// A lock was asked for, and the client is shut down.
    pub(crate) fn shut_down() -> Self {
        let text = "not taken: the client was shut down";
        let mut error = Self::new(ErrorKind::Lost(LostReason::Shutdown), text);
        error.0.was_held = false;
        error
    }

    /// Of a lease, which the keeper renews or not.
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

    /// The holder, or one of several, is a guard of the client that asked. Whether it is the caller's own,
    /// only the caller knows.
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

    /// The name is in use otherwise than it was asked for.
    pub(crate) fn capacity_mismatch(asked: &str, in_use: &str) -> Self {
        Self::new(
            ErrorKind::CapacityMismatch,
            format!("asked for {asked}, but the name is in use {in_use}; all callers must agree"),
        )
    }

    /// The same trouble as it is for somebody who has not asked yet; `None` if it is not the store's.
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

    /// For what has been done already, as far as it is this process's to do: `Config` would say that it has
    /// not.
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

/// The sentence, because this is what a `main` that returns the error prints, and `unwrap`. `{:#?}` has the
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
