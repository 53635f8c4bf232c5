//! The meaning of the server's errors for a request.

use redis::{ErrorKind, RedisError};

use crate::backend::{Fault, StoreError};

/// The end of a message about missing rights.
pub(super) const GUIDE: &str = " (see \"Minimum rights\" in the guide of the Redis store)";

/// Whether an error says that a command of a script was denied. The first text is from Redis 6 and
/// 7.0, the second from Redis 7.2 and Valkey.
pub(super) fn is_stopped(text: &str) -> bool {
    ["user executing the script", "ACL failure in script"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// Returns what an error means for the request.
pub(super) fn failed(error: RedisError) -> StoreError {
    let text = error.to_string();
    // The code of the error that stopped a command of a script. In Redis 6 it is in the middle of
    // the text: "ERR … -OOM …". Later versions report "ERR OOM …" if the script has passed the
    // error on.
    let code = error.code().filter(|code| *code != "ERR").or_else(|| {
        let detail = error.detail().unwrap_or_default();
        let stopped = |code: &&str| {
            text.contains(&format!("-{code} ")) || detail.starts_with(&format!("{code} "))
        };
        let inner = ["OOM", "READONLY", "MISCONF", "NOREPLICAS"];
        inner.into_iter().find(stopped)
    });
    if error.is_io_error() || error.is_unrecoverable_error() {
        return StoreError::broken(format!("Redis: {text}"));
    }
    let fault = match (error.kind(), code) {
        (ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig, _) => Fault::Config,
        // The server has refused the request before anything was written. The client can send it
        // again soon, or on another connection.
        (_, Some("BUSY" | "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY")) => {
            Fault::Retry
        }
        // The server has refused the request before anything was written. An operator must act.
        (_, Some("OOM" | "MISCONF" | "NOREPLICAS")) => Fault::Refused,
        // These errors need another URL, password or access list.
        (
            _,
            Some(
                "NOAUTH" | "WRONGPASS" | "NOPERM" | "WRONGTYPE" | "MOVED" | "ASK" | "CROSSSLOT"
                | "UNFIT",
            ),
        ) => Fault::Config,
        // The reply makes no sense, or a script has failed half-way.
        _ => Fault::Unknown,
    };
    let hint = match code {
        Some("MOVED" | "ASK" | "CROSSSLOT") => {
            " (this is a Redis Cluster; write redis+cluster://, because redis:// is for a single server)"
        }
        Some("READONLY" | "MASTERDOWN") => " (this is a replica; connect to its master)",
        Some("OOM") => " (the server is full; raise maxmemory)",
        Some("NOPERM") => GUIDE,
        Some("WRONGTYPE") => {
            " (something else than this library writes keys of this namespace; remove the key, or choose another LOCK_NAMESPACE)"
        }
        Some("WRONGPASS") => {
            " (check user and password in the URL, where %25 stands for \"%\", %40 for \"@\", %23 for \"#\", %2F for \"/\")"
        }
        Some("NOAUTH") => {
            " (the server asks for a password: write user:password@, or :password@, in front of the host in the URL)"
        }
        // The script may have written something before this.
        _ if is_stopped(&text) => GUIDE,
        _ if text.contains("a non local key") => {
            " (the keys of this name are on their way to another node of the cluster; try again when the slot has arrived)"
        }
        _ => "",
    };
    let text = format!("Redis: {text}{hint}");
    match code {
        // A master that has become a replica refuses every write on this connection from now on.
        // The address may already lead to the new master.
        Some("READONLY" | "MASTERDOWN") => StoreError::replace(fault, text),
        _ => StoreError::new(fault, text),
    }
}

/// Like [`failed`], for an error while connecting. No request has been sent yet, so no outcome can
/// be unknown.
pub(super) fn not_connected(error: RedisError) -> StoreError {
    if error.kind() == ErrorKind::RESP3NotSupported {
        return StoreError::new(
            Fault::Config,
            "Redis: the server does not speak RESP3; update it to Redis 6 or later, or to Valkey",
        );
    }
    // The server's message repeats the command that it does not know. The first command contains
    // the password, so the message is not shown.
    if error.to_string().contains("unknown command") {
        return StoreError::new(
            Fault::Config,
            "Redis: the server, or a proxy in front of it, does not know HELLO, AUTH or SELECT; update it to Redis 6 or \
             later, or to Valkey, and do not rename these commands",
        );
    }
    let failed = failed(error);
    let text = failed.to_string();
    // The driver does not show the code of this error.
    if text.contains("refused to switch database") {
        let denied = text.contains("permissions");
        let hint = if denied { GUIDE } else { "" };
        return StoreError::new(Fault::Config, text + hint);
    }
    let fault = match failed.fault() {
        Fault::Config => Fault::Config,
        Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
    };
    StoreError::new(fault, text)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    fn error(reply: &str) -> StoreError {
        let reply = redis::parse_redis_value(format!("-{reply} said the server\r\n").as_bytes());
        let Ok(Value::ServerError(error)) = reply else {
            panic!("{reply:?} is not an error");
        };
        failed(error.into())
    }

    #[test]
    fn a_server_that_repeats_the_first_command_does_not_make_the_password_known() {
        let reply = "-ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'hunter2' \r\n";
        let Ok(Value::ServerError(error)) = redis::parse_redis_value(reply.as_bytes()) else {
            panic!("not an error");
        };

        let told = not_connected(error.into());

        assert_eq!(told.fault(), Fault::Config);
        assert!(!format!("{told} {told:?}").contains("hunter2"), "{told}");
    }

    /// If a replica refuses a request, the request was not carried out, and the connection must be
    /// replaced.
    #[test]
    fn each_error_says_whether_the_request_was_carried_out_and_the_connection_broke() {
        let (goes_on, replaced) = (false, true);
        let classes: [(Fault, bool, &[&str]); 5] = [
            (
                Fault::Retry,
                goes_on,
                &["BUSY", "LOADING", "TRYAGAIN", "CLUSTERDOWN"],
            ),
            // The second is from Redis 6, when a script is refused. The third is from a script that
            // passes the error on.
            (
                Fault::Retry,
                replaced,
                &[
                    "READONLY",
                    "ERR @user_script: 7: -READONLY",
                    "ERR READONLY",
                    "MASTERDOWN",
                ],
            ),
            (
                Fault::Refused,
                goes_on,
                &[
                    "OOM",
                    "MISCONF",
                    "NOREPLICAS",
                    "ERR OOM",
                    "ERR MISCONF",
                    "ERR NOREPLICAS",
                ],
            ),
            (
                Fault::Config,
                goes_on,
                &[
                    "NOAUTH",
                    "WRONGPASS",
                    "NOPERM",
                    "WRONGTYPE",
                    "MOVED 1 h:1",
                    "ASK 1 h:1",
                    "CROSSSLOT",
                    "UNFIT",
                ],
            ),
            (Fault::Unknown, goes_on, &["ERR", "EXECABORT", "UNKILLABLE"]),
        ];
        for (fault, is_broken, replies) in classes {
            for reply in replies {
                let error = error(reply);
                let found = (error.fault(), error.is_broken());
                assert_eq!(found, (fault, is_broken), "{reply}");
            }
        }
        let reset = failed(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
        assert_eq!((reset.fault(), reset.is_broken()), (Fault::Unknown, true));
    }
}
