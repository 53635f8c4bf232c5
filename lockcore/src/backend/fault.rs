//! The failure of an operation, and what it means for the request.

use crate::counting::MOST_REMEMBERED;
use crate::error::Error;
use crate::request::Id;

/// The meaning of a store's failure for the request.
///
/// A request that *does not count* was not carried out, unless the error is
/// [half-way](StoreError::halfway). After a half-way error, the request or a part of it may have
/// been carried out. An example is a master whose replicas have not acknowledged the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The request does not count, and the same request may succeed in a moment.
    Retry,
    /// The request does not count, and repeating it soon will not help.
    Refused,
    /// The request may have been carried out.
    Unknown,
    /// The request does not count, and will not until somebody changes the configuration.
    Config,
}

/// The failure of an operation.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    fault: Fault,
    message: String,
    broken: bool,
    halfway: bool,
    conflict: bool,
    lost: Vec<Id>,
}

impl StoreError {
    /// A failure with its meaning for the request, and a text, which must contain no secrets.
    #[must_use]
    pub fn new(fault: Fault, message: impl Into<String>) -> Self {
        Self {
            fault,
            message: message.into(),
            broken: false,
            halfway: false,
            conflict: false,
            lost: Vec::new(),
        }
    }

    /// A failure after which the connection cannot be used, so the core opens another connection.
    /// `fault` is its meaning for the request: whether the request was carried out is a separate
    /// question. For example, a server that has become a replica certainly refuses a write, and
    /// will refuse every later write on this connection.
    #[must_use]
    pub fn replace(fault: Fault, message: impl Into<String>) -> Self {
        Self {
            broken: true,
            ..Self::new(fault, message)
        }
    }

    /// The connection broke during the request, so its outcome is unknown. The core opens another
    /// connection.
    #[must_use]
    pub fn broken(message: impl Into<String>) -> Self {
        Self::replace(Fault::Unknown, message)
    }

    /// The request was answered with an error and does not count, but it, or a part of it, may have
    /// been carried out. For example, the user lost a right at the server after the request had
    /// begun. The core gives back the ticket that an enqueue may have left.
    #[must_use]
    pub fn halfway(fault: Fault, message: impl Into<String>) -> Self {
        Self {
            halfway: true,
            ..Self::new(fault, message)
        }
    }

    /// The same failure, of a request that was carried out before, and waited until it counts. If the
    /// connection is usable, the fault is this one. In any case the error must not be a refusal.
    #[cfg(any(feature = "postgres", feature = "redis"))]
    pub(crate) fn carried_out(self, fault: Fault) -> Self {
        match self.broken {
            true => Self {
                fault: Fault::Unknown,
                ..self
            },
            false => Self {
                fault,
                halfway: true,
                ..self
            },
        }
    }

    /// Another client has changed the same counter or capacity at the same moment, so the request
    /// does not count: [`Fault::Retry`]. The store is at work. So the core sends the request again
    /// for as long as its caller waits.
    #[must_use]
    pub fn conflict(message: impl Into<String>) -> Self {
        Self {
            conflict: true,
            ..Self::new(Fault::Retry, message)
        }
    }

    /// A renewal of several tickets has failed, but the tickets of this list are
    /// [lost](super::Renewed::Lost) for certain. The core tells their holders at once. The fault is
    /// about the other tickets of the renewal.
    #[must_use]
    pub fn with_lost(self, tickets: Vec<Id>) -> Self {
        Self {
            lost: tickets,
            ..self
        }
    }

    /// The tickets of a renewal that are lost for certain, whatever became of the others.
    #[must_use]
    pub fn lost(&self) -> &[Id] {
        &self.lost
    }

    /// The store [remembers](MOST_REMEMBERED) as many changes of a counter as it may, so it refuses
    /// another one.
    pub(crate) fn crowded() -> Self {
        let text = format!(
            "more than {MOST_REMEMBERED} changes of this counter are remembered, each for a minute; change it less often, or \
             from fewer processes"
        );
        Self::new(Fault::Refused, text)
    }

    /// The same failure, with the place where it happened in front of its text.
    #[cfg(feature = "redis")]
    pub(crate) fn at(self, place: impl std::fmt::Display) -> Self {
        Self {
            message: format!("{place}: {}", self.message),
            ..self
        }
    }

    /// The meaning of the failure for the request.
    #[must_use]
    pub fn fault(&self) -> Fault {
        self.fault
    }

    /// Whether the connection cannot be used any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether the request of another client was in the way: see [`conflict`](Self::conflict).
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.conflict
    }

    /// Whether a part of the request may have been carried out, although it was answered.
    #[must_use]
    pub fn is_halfway(&self) -> bool {
        self.halfway
    }

    /// The error for the caller of a request that takes no ticket. After [`Fault::Unknown`] the
    /// caller may simply repeat the request, so the kind is `Unavailable`.
    pub(crate) fn unavailable_unless_config(self) -> Error {
        match self.fault {
            Fault::Config => Error::config(self.to_string()),
            Fault::Retry | Fault::Refused | Fault::Unknown => Error::unavailable(self.to_string()),
        }
    }
}

/// The error that a store's failure becomes for the caller. [`Fault::Unknown`] stays unknown: only
/// the acquire loop knows whether a repetition has settled it.
impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error.fault() {
            Fault::Config => Self::config(message),
            Fault::Retry | Fault::Refused => Self::unavailable(message),
            Fault::Unknown => Self::unknown(message),
        }
    }
}
