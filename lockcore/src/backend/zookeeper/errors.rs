//! The meaning of failed requests.

use zookeeper_client::Error as ZkError;

use crate::backend::{Fault, StoreError};

/// The meaning of an error for the request. If a ZooKeeper connection breaks, the session continues
/// at another server, or it ends. `session` reports both to the core, so none of these errors says
/// that the connection of the core is broken.
pub(crate) fn failed(error: ZkError) -> StoreError {
    let fault = match &error {
        // The server refused the request before it did anything, and may accept it in a moment.
        ZkError::Throttled | ZkError::NotReadOnly => Fault::Retry,
        // The server refused the request before it did anything, and accepts it only after an
        // operator has acted.
        ZkError::QuotaExceeded => Fault::Refused,
        ZkError::NoAuth
        | ZkError::InvalidAcl
        | ZkError::AuthFailed
        | ZkError::Unimplemented
        | ZkError::BadArguments(_)
        | ZkError::NoChildrenForEphemerals => Fault::Config,
        // The server refused the request because a node exists, or does not exist.
        ZkError::NoNode
        | ZkError::NodeExists
        | ZkError::NotEmpty
        | ZkError::BadVersion
        | ZkError::NoWatcher => Fault::Retry,
        // The connection broke during the request, or the session ended with everything in it, or
        // the reply makes no sense.
        _ => Fault::Unknown,
    };
    let hint = match &error {
        ZkError::NoAuth | ZkError::InvalidAcl => {
            " (see the rights in the guide of the ZooKeeper store)"
        }
        ZkError::Unimplemented => " (update the server to 3.6 or later)",
        _ => "",
    };
    let text = format!("ZooKeeper: {error}{hint}");
    match error {
        ZkError::BadVersion | ZkError::NodeExists => StoreError::conflict(text),
        _ => StoreError::new(fault, text),
    }
}

/// Like [`failed`], for a request about a ticket that has just been created. The ticket exists, so
/// the core must release it, even if this request had no effect.
pub(crate) fn failed_after_create(error: ZkError) -> StoreError {
    let failed = failed(error);
    StoreError::halfway(failed.fault(), failed.to_string())
}

/// Like [`failed`], for an error while connecting. The client has sent no request before, so no
/// outcome is unknown. `hint` is appended to the message.
pub(crate) fn not_connected(hosts: &str, error: ZkError, hint: &str) -> StoreError {
    let failed = failed(error);
    let fault = match failed.fault() {
        Fault::Config => Fault::Config,
        Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
    };
    StoreError::new(fault, format!("cannot connect to {hosts}: {failed}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_whether_the_request_was_carried_out() {
        for error in [
            ZkError::NoNode,
            ZkError::NodeExists,
            ZkError::Throttled,
            ZkError::NotReadOnly,
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Retry, "{error}");
        }
        for error in [
            ZkError::NoAuth,
            ZkError::AuthFailed,
            ZkError::InvalidAcl,
            ZkError::Unimplemented,
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Config, "{error}");
        }
        for error in [
            ZkError::ConnectionLoss,
            ZkError::SessionExpired,
            ZkError::SessionMoved,
            ZkError::ClientClosed,
            ZkError::Timeout,
            ZkError::UnexpectedErrorCode(-1),
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Unknown, "{error}");
        }
        assert_eq!(failed(ZkError::QuotaExceeded).fault(), Fault::Refused);
        assert_eq!(
            not_connected("h", ZkError::NoHosts, "").fault(),
            Fault::Retry
        );
        assert_eq!(
            not_connected("h", ZkError::AuthFailed, "").fault(),
            Fault::Config
        );
    }
}
