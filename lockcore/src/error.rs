//! The only error type of the public API. It has few kinds. Each kind says what happened to the
//! lock.

use std::fmt;
use std::time::Duration;

/// Why a lock was not taken or was lost, or why an operation on it failed.
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
///
/// The descriptions are about attempts to take a lock. If the lock [was held](Error::was_held), the
/// documentation of the operation says what has become of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing was taken, and nothing was left at the store. The cause is one of these:
    ///
    /// - the lock is held or others wait for it, and the caller has asked not to wait;
    /// - the caller has asked to wait, but the line is full: it has ten thousand tickets at the
    ///   store (holders included), or ten thousand callers in this process (a caller that was in the
    ///   line and has lost its place asks again instead, until its time is over);
    /// - another guard of the same ticket, or another holder of the lock, prevents a
    ///   [downgrade](crate::Guard::downgrade), an [upgrade](crate::Guard::try_upgrade) or a
    ///   [detach](crate::Guard::detach), which changes nothing;
    /// - somebody [asks for](crate::Locks::revoke) the held lock, so its lease cannot be made
    ///   [longer](crate::Guard::extend).
    Busy,
    /// The caller waited as long as allowed, in the store's line or in the lane of this process.
    /// Nothing is held. For a [`Latch`](crate::latch::Latch): the count is not zero yet.
    Timeout,
    /// The lock was held, and was then lost: somebody else may hold it now. Or the client was shut
    /// down before the lock was taken. [`Error::was_held`] tells which of the two it is.
    Lost(LostReason),
    /// The store is down or refuses the request. Nothing is held.
    Unavailable,
    /// The request was sent, and its answer never came, so the store may have granted the lock. The
    /// client sends a release, and repeats it until the store acknowledges it or the lease has run
    /// out. For a [`Counter`](crate::counter::Counter), and for the value of a lock: the change was
    /// made once, or not at all.
    Unknown,
    /// The name is in use with another capacity. Nothing is held.
    CapacityMismatch,
    /// The caller would wait for itself. It has asked for the write side while it holds the read
    /// side, or it has asked again for a lock that is not [reentrant](crate::Lock::reentrant). The
    /// caller keeps the lock that it holds.
    WouldDeadlock,
    /// A mistake in a URL, credentials, a name or a duration, or an operation that a shared lock
    /// does not have. The same call will fail again.
    Config,
}

/// Why a held lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out: no renewal was acknowledged in time, or the lock was taken [without
    /// renewal](crate::Lock::renew).
    Expired,
    /// The store does not have the ticket, and nobody has asked the holder to give the lock up.
    /// Either the store restarted or lost data, or somebody removed the ticket, for example with
    /// [`Locks::force_release`](crate::Locks::force_release).
    Taken,
    /// [`Locks::shutdown`](crate::Locks::shutdown) released the lock.
    Shutdown,
    /// The lock was held for as long as [`Lock::max_hold`](crate::Lock::max_hold) allows.
    MaxHold,
    /// Somebody asked the holder to give the lock up, with [`Locks::revoke`](crate::Locks::revoke).
    /// The lock is lost when the grace is over, or when the ticket is removed before that. With
    /// [`OnRevoke::Cancel`](crate::OnRevoke::Cancel), the work under the lock gets this reason at
    /// once.
    Revoked,
    /// The guard has released or [detached](crate::Guard::detach) the lock. Only a
    /// [`Held`](crate::Held) that lives longer than its guard gives this reason.
    Released,
    /// This process is a forked child: the lock belongs to its parent.
    Forked,
}

impl ErrorKind {
    /// The kind as a word, for metrics and spans.
    pub(crate) const fn code(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::Lost(_) => "lost",
            Self::Unavailable => "unavailable",
            Self::Unknown => "unknown",
            Self::CapacityMismatch => "capacity_mismatch",
            Self::WouldDeadlock => "would_deadlock",
            Self::Config => "config",
        }
    }
}

impl Error {
    /// The kind: what happened.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The name of the lock, if the error is about one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Whether this caller may hold the lock in spite of the error. True only for
    /// [`ErrorKind::Unknown`].
    #[must_use]
    pub fn may_hold(&self) -> bool {
        self.0.kind == ErrorKind::Unknown
    }

    /// Whether the lock was held before, so that part of the work under it may be done. True for:
    ///
    /// - [`ErrorKind::Lost`], except when the client was shut down before the lock was taken;
    /// - every error of an operation on a held lock, whatever its kind. Examples are
    ///   [`Guard::release`](crate::Guard::release), [`Guard::extend`](crate::Guard::extend) and
    ///   [`Held::ensure`](crate::Held::ensure). The lock may be held even now.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("report").acquire().await?;
    /// let too_short = guard.extend(Duration::from_secs(1)).await.unwrap_err();
    /// assert!(too_short.was_held());
    ///
    /// let busy = locks.mutex("report").try_acquire().await.unwrap_err();
    /// assert!(!busy.was_held());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn was_held(&self) -> bool {
        self.0.was_held
    }

    /// How long to wait before a new attempt, if this is known. For [`ErrorKind::Busy`] this is the
    /// time after which the lock is free if its holder does not renew it.
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

    /// An error of the kind [`Unavailable`](ErrorKind::Unavailable). It is for code that needs this
    /// error without a request to a store, such as a layer whose service is not ready, or a test.
    /// The message must contain no secrets.
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

    /// `Busy` for a caller that has asked to wait.
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
        let text = "other guards or tasks of this process, a hold around this one, or an upgrade use the same ticket; \
                    end them first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn still_used() -> Self {
        let text = "not detached: other guards, inner holds or tasks of this process use the same ticket; end them first";
        Self::new(ErrorKind::Busy, text)
    }

    pub(crate) fn still_asked_for(not_done: impl fmt::Display) -> Self {
        let text = format!("{not_done}: somebody asks for the lock (Locks::revoke); release it");
        Self::new(ErrorKind::Busy, text)
    }

    /// The error of an adoption that finds no such grant at the store.
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

    /// The error of work that ends as soon as somebody asks for its lock.
    pub(crate) fn asked_for() -> Self {
        let text = "stopped: somebody asked for the lock (Locks::revoke), and on_revoke = Cancel stops the work at once";
        Self::new(ErrorKind::Lost(LostReason::Revoked), text)
    }

    /// The error of a request for a lock after the shutdown of the client.
    pub(crate) fn shut_down() -> Self {
        let text = "not carried out: the client was shut down";
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

    /// Adds to the message that a guard of the same client holds the lock, or some of its permits.
    /// Only the caller knows whether this guard is its own.
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

    /// The error of a request whose capacity is not the one with which the name is in use.
    pub(crate) fn capacity_mismatch(asked: &str, in_use: &str) -> Self {
        Self::new(
            ErrorKind::CapacityMismatch,
            format!("asked for {asked}, but the name is in use {in_use}; all callers must agree"),
        )
    }

    /// The error for another caller, which has not sent a request yet but would reach the same
    /// store. `None` if the store is not the cause.
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

    /// Whether the store is out of reach or refuses requests, so that another attempt may succeed
    /// later.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unavailable | ErrorKind::Unknown)
    }

    /// Turns the kind `Config` into `Unavailable`. This is for a change that has already happened
    /// in this process, because `Config` would say that nothing was changed.
    pub(crate) fn unavailable_if_config(self) -> Self {
        match self.0.kind {
            ErrorKind::Config => Self::unavailable(self.0.message),
            _ => self,
        }
    }

    /// Marks the error of an operation on a lock that was held.
    pub(crate) fn of_held(mut self) -> Self {
        self.0.was_held = true;
        self
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

/// Shows the message, because `unwrap`, and a `main` that returns the error, print the `Debug`
/// form. `{:#?}` shows the fields.
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
        // The form `{:#?}` also shows the kind and the name.
        let fields = format!("{error:#?}");
        assert!(fields.contains("kind: Timeout"), "{fields}");
        assert!(
            fields.contains("name: Some(\n        \"order:42\""),
            "{fields}"
        );
    }
}
