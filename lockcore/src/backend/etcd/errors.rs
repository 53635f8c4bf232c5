//! What the failures of a request mean, by the code and the text of the server:
//! <https://github.com/etcd-io/etcd/blob/main/api/v3rpc/rpctypes/error.go>.

use std::error::Error as _;

use tonic::{Code, Status};

use crate::backend::{Fault, StoreError};

/// What to read about rights.
const GUIDE: &str = "; see the guide of the etcd store (lockcore::guide::etcd)";

/// The failure of a request. A transaction is carried out as a whole or not at all.
///
/// A server whose disk quota is used up refuses most requests before they begin. The one that has
/// used it up is carried out, and gets the same answer
/// (<https://github.com/etcd-io/etcd/issues/16659>).
pub(super) fn failed(status: Status) -> StoreError {
    let said = status.message();
    if status.source().is_some() {
        // Not the server has said this, but the library of the connection.
        return StoreError::broken(format!("etcd: {}", text(&status)));
    }
    let text = format!("etcd: {said}");
    let says = |part: &str| said.contains(part);
    match status.code() {
        // The member refuses this before it begins. Another member may have a leader.
        Code::Unavailable if says("no leader") => StoreError::replace(Fault::Retry, text),
        // The login has ended, and so has the one that was made in its place.
        _ if is_login_forgotten(&status) => StoreError::replace(Fault::Retry, text),
        // The rights were changed since the login.
        Code::InvalidArgument if says("revision of auth store is old") => {
            StoreError::replace(Fault::Retry, text)
        }
        Code::ResourceExhausted if says("space exceeded") => {
            let what = "the disk quota of the server is used up (alarm NOSPACE): compact and defragment it, then disarm the alarm";
            StoreError::halfway(Fault::Refused, format!("{text}: {what}"))
        }
        Code::ResourceExhausted => StoreError::new(Fault::Retry, text),
        Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated => {
            StoreError::new(Fault::Config, format!("{text}{GUIDE}"))
        }
        Code::FailedPrecondition if says("authentication") => {
            StoreError::new(Fault::Config, format!("{text}{GUIDE}"))
        }
        Code::Unimplemented => StoreError::new(
            Fault::Config,
            format!("{text}: the server is not etcd 3.4 or later"),
        ),
        _ => StoreError::new(Fault::Unknown, text),
    }
}

/// Whether the server has refused a request because it does not know the token of its login any more.
pub(super) fn is_login_forgotten(status: &Status) -> bool {
    status.code() == Code::Unauthenticated && status.message().contains("invalid auth token")
}

/// The failure of a request that changes nothing. Its outcome is never unknown.
pub(super) fn not_changed(status: Status) -> StoreError {
    let failed = failed(status);
    match failed.fault() {
        Fault::Unknown if failed.is_broken() => {
            StoreError::replace(Fault::Retry, failed.to_string())
        }
        Fault::Unknown => StoreError::new(Fault::Retry, failed.to_string()),
        Fault::Refused => StoreError::new(Fault::Refused, failed.to_string()),
        Fault::Config | Fault::Retry => failed,
    }
}

/// A failure while connecting. No request has been sent yet, so no outcome can be unknown.
pub(super) fn not_connected(place: &str, failed: &StoreError) -> StoreError {
    let fault = match failed.fault() {
        Fault::Config => Fault::Config,
        Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
    };
    StoreError::new(fault, format!("cannot connect to {place}: {failed}"))
}

/// Whether the server does not know the lease of a request.
pub(super) fn is_without_lease(status: &Status) -> bool {
    status.code() == Code::NotFound && status.message().contains("lease")
}

/// An error of the library, with its causes.
fn text(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = status.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: Code, message: &str) -> (Fault, bool) {
        let error = failed(Status::new(code, message));
        (error.fault(), error.is_broken())
    }

    #[test]
    fn only_what_certainly_was_not_carried_out_is_no_unknown_outcome() {
        for (code, message, fault, is_broken) in [
            (
                Code::Unavailable,
                "etcdserver: no leader",
                Fault::Retry,
                true,
            ),
            (
                Code::Unavailable,
                "etcdserver: leader changed",
                Fault::Unknown,
                false,
            ),
            (
                Code::Unavailable,
                "etcdserver: request timed out",
                Fault::Unknown,
                false,
            ),
            (
                Code::DeadlineExceeded,
                "context deadline exceeded",
                Fault::Unknown,
                false,
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: too many requests",
                Fault::Retry,
                false,
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                Fault::Refused,
                false,
            ),
            (
                Code::PermissionDenied,
                "etcdserver: permission denied",
                Fault::Config,
                false,
            ),
            (
                Code::Unauthenticated,
                "etcdserver: invalid auth token",
                Fault::Retry,
                true,
            ),
            (
                Code::InvalidArgument,
                "etcdserver: user name is empty",
                Fault::Config,
                false,
            ),
            (Code::Unimplemented, "unknown service", Fault::Config, false),
        ] {
            assert_eq!(of(code, message), (fault, is_broken), "{message}");
        }
    }

    #[test]
    fn a_request_that_fills_the_server_may_have_been_carried_out() {
        let full = || {
            let text = "etcdserver: mvcc: database space exceeded";
            Status::new(Code::ResourceExhausted, text)
        };

        assert!(failed(full()).is_halfway());
        let nothing = not_changed(full());
        assert!(!nothing.is_halfway() && nothing.fault() == Fault::Refused);
    }
}
