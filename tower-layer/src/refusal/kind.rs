//! The kinds of problems. Each has a section of the documentation, a title, a gRPC code, and a flag
//! that tells whether the request may be repeated.

use crate::read::Unread;

/// A kind of problem. A section of the crate's page explains each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Held,
    /// The lock is held, and the client's deadline ended the wait.
    Deadline,
    Unavailable,
    Lost,
    /// An operation on a lock that a handler held has failed.
    #[cfg_attr(
        not(any(feature = "axum", feature = "tonic", test)),
        expect(dead_code, reason = "only the answers for handlers have this kind")
    )]
    Uncertain,
    /// The client's deadline has passed.
    Overdue,
    Key,
    /// There is no room for another name.
    Names,
    Upgrade,
    Body(Unread),
    Misconfigured,
    /// A fence has seen a higher token.
    Late,
    Token,
    Full,
}

/// <https://grpc.github.io/grpc/core/md_doc_statuscodes.html>
#[derive(Clone, Copy, Debug)]
pub(super) enum GrpcCode {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

impl Kind {
    pub(super) fn section(self) -> &'static str {
        match self {
            Self::Held | Self::Deadline => "lock-held",
            Self::Unavailable => "lock-unavailable",
            Self::Lost => "lock-lost",
            Self::Uncertain => "lock-uncertain",
            Self::Overdue => "deadline-passed",
            Self::Key => "lock-key",
            Self::Names => "lock-names",
            Self::Upgrade => "lock-upgrade",
            Self::Body(_) => "request-body",
            Self::Misconfigured => "lock-misconfigured",
            Self::Late => "write-refused",
            Self::Token => "fencing-token",
            Self::Full => "fence-full",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Held | Self::Deadline => "Locked by another request",
            Self::Unavailable => "Lock not available",
            Self::Lost => "Lock lost",
            Self::Uncertain => "Lock uncertain",
            Self::Overdue => "Deadline passed",
            Self::Key => "No key to lock",
            Self::Names => "Too many names",
            Self::Upgrade => "No upgrade under a lock",
            Self::Body(Unread::TooLarge) => "Request body too large",
            Self::Body(Unread::TooSlow) => "Request body too slow",
            Self::Body(Unread::Broken) => "Request body broke off",
            Self::Misconfigured => "Lock misconfigured",
            Self::Late => "Refused: a later holder of the lock was here",
            Self::Token => "No fencing token",
            Self::Full => "Too many resources",
        }
    }

    pub(super) fn grpc_code(self) -> GrpcCode {
        match self {
            Self::Held => GrpcCode::Aborted,
            Self::Deadline | Self::Overdue => GrpcCode::DeadlineExceeded,
            Self::Unavailable | Self::Full => GrpcCode::Unavailable,
            // A part of the work may be done. It is not UNAVAILABLE, because some clients and
            // proxies repeat such calls by themselves. It is not ABORTED, because calls with the
            // status of `Held` may be repeated. UNKNOWN says nothing about a repetition.
            Self::Lost | Self::Uncertain => GrpcCode::Unknown,
            Self::Key | Self::Token => GrpcCode::InvalidArgument,
            // It is not UNAVAILABLE, because clients would repeat the call at once, without being
            // asked.
            Self::Names => GrpcCode::ResourceExhausted,
            Self::Late => GrpcCode::FailedPrecondition,
            Self::Upgrade => GrpcCode::Unimplemented,
            Self::Body(Unread::TooLarge) => GrpcCode::ResourceExhausted,
            Self::Body(Unread::TooSlow) => GrpcCode::DeadlineExceeded,
            Self::Body(Unread::Broken) => GrpcCode::Cancelled,
            Self::Misconfigured => GrpcCode::Internal,
        }
    }

    pub(super) fn may_be_repeated(self) -> bool {
        match self {
            Self::Held | Self::Deadline | Self::Unavailable => true,
            Self::Names | Self::Full => true,
            // A part of the work may be done, so only the client can decide whether to try again.
            Self::Lost | Self::Uncertain | Self::Overdue => false,
            Self::Key
            | Self::Upgrade
            | Self::Body(_)
            | Self::Misconfigured
            | Self::Late
            | Self::Token => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_a_problem_is_a_section_of_the_crates_page() {
        use Kind::*;
        let page = include_str!("../lib.rs");
        let (_, answers) = page.split_once("//! # Answers\n").unwrap();
        let (answers, _) = answers.split_once("//! # ").unwrap();
        // This converts a heading to an anchor in the same way as rustdoc.
        let headings = answers
            .lines()
            .filter_map(|line| line.strip_prefix("//! ### "));
        let anchors: Vec<_> = headings
            .map(|heading| heading.to_lowercase().replace(' ', "-"))
            .collect();

        for kind in [
            Held,
            Deadline,
            Unavailable,
            Lost,
            Uncertain,
            Overdue,
            Key,
            Names,
            Upgrade,
            Body(Unread::TooLarge),
            Misconfigured,
            Late,
            Token,
            Full,
        ] {
            let section = kind.section();
            assert!(anchors.iter().any(|anchor| anchor == section), "{section}");
        }
    }
}
