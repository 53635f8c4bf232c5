//! The reasons why a request or its response ends early, and the answer that its client gets then.

use std::fmt;

use http_body::Frame;

use crate::deadline::Deadline;
use crate::frame::Part;
use crate::refusal::Problem;

/// The end of a body whose lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtLoss {
    /// It ends in an error, which closes the connection or resets the stream.
    Break,
    /// It ends in trailers with a gRPC status.
    Trailers { names_key: bool },
    /// It continues.
    GoOn,
}

/// The limits that can end a body earlier than its own end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) at_loss: AtLoss,
    /// The body also ends when somebody asks for the lock.
    pub(crate) when_asked: bool,
    /// The body also ends at this time.
    pub(crate) deadline: Option<Deadline>,
    /// The body ends on time even if nobody polls it.
    pub(crate) watched: bool,
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
