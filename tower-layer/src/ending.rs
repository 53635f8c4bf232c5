//! The reasons why a request or its response ends early, and the answer that the client gets in
//! each case.

use std::fmt;

use http_body::Frame;

use crate::deadline::Deadline;
use crate::frame::Part;
use crate::refusal::Problem;

/// What happens to a body whose lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtLoss {
    /// The body ends with an error, which closes the connection or resets the stream.
    Break,
    /// The body ends with trailers that have a gRPC status.
    Trailers { names_key: bool },
    /// The body continues.
    GoOn,
}

/// The limits that can end a body earlier than its own end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) at_loss: AtLoss,
    /// Whether the body also ends as soon as the lock is asked back.
    pub(crate) when_asked: bool,
    /// The time at which the body must end, if there is one.
    pub(crate) deadline: Option<Deadline>,
}

/// Why a request or its response is stopped.
#[derive(Debug)]
pub(crate) enum End {
    Lost(lockcore::Error),
    Overdue,
}

impl End {
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::Lost(error) => Problem::lost(error),
            Self::Overdue => Problem::overdue(),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(error) => error.fmt(f),
            Self::Overdue => f.write_str("the deadline of the client has passed"),
        }
    }
}

impl AtLoss {
    /// Makes the last part of a body that is stopped.
    pub(crate) fn end(self, end: End) -> Part {
        match (self, end) {
            (Self::Trailers { names_key }, end) => {
                let problem = end.problem().with_key_if(names_key);
                Ok(Frame::trailers(problem.grpc_status()))
            }
            (Self::Break | Self::GoOn, End::Lost(error)) => Err(error.into()),
            (Self::Break | Self::GoOn, end) => Err(end.to_string().into()),
        }
    }
}
