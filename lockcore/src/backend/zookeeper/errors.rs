//! What the failures of requests mean.

use zookeeper_client::Error as ZkError;

use crate::backend::{Fault, StoreError};

/// What an error says about the request. A broken connection is not one of the core's: the
/// session gets over it, or ends, and either is told by the driver.
pub(crate) fn failed(error: ZkError) -> StoreError {
    let fault = match &error {
        // Refused by the server before anything was done; over in a moment.
        ZkError::Throttled | ZkError::NotReadOnly => Fault::Retry,
        // The same, and it needs an operator.
        ZkError::QuotaExceeded => Fault::Refused,
        ZkError::NoAuth
        | ZkError::InvalidAcl
        | ZkError::AuthFailed
        | ZkError::Unimplemented
        | ZkError::BadArguments(_)
        | ZkError::NoChildrenForEphemerals => Fault::Config,
        // Refused because of what is there, or is not.
        ZkError::NoNode
        | ZkError::NodeExists
        | ZkError::NotEmpty
        | ZkError::BadVersion
        | ZkError::NoWatcher => Fault::Retry,
        // The connection, or the session with whatever it had created, went under the request; a
        // reply that makes no sense.
        _ => Fault::Unknown,
    };
    let hint = match &error {
        ZkError::NoAuth | ZkError::InvalidAcl => {
            " (see the rights in the guide of the ZooKeeper store)"
        }
        ZkError::Unimplemented => " (3.6 or later is needed)",
        _ => "",
    };
    StoreError::new(fault, format!("ZooKeeper: {error}{hint}"))
}

/// As [`failed`], while connecting: nothing has been asked yet, so nothing can be unknown. `hint` ends the
/// message.
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
    fn each_error_says_what_became_of_the_request() {
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
