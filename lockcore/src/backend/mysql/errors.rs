//! What the errors of the server mean for a request, by their codes.
//! <https://mariadb.com/kb/en/mariadb-error-codes/>

use super::config::Server;
use super::wire::Failure;
use crate::backend::{Fault, StoreError};

/// What to read about rights and about the tables.
pub(super) const GUIDE: &str = "; see the guide of the MySQL store (lockcore::guide::mysql)";

/// The failure of a call. Every verb is one transaction, and the procedure rolls it back before it
/// fails. So where the code of an error is known here, the verb was not carried out, except where
/// this says otherwise.
pub(super) fn failed(failure: Failure) -> StoreError {
    match failure {
        Failure::Ended(error) => StoreError::broken(format!("MySQL: {error}")),
        Failure::Odd(what) => StoreError::broken(format!("MySQL: {what}")),
        Failure::Mistake(what) => StoreError::replace(Fault::Config, format!("MySQL: {what}")),
        Failure::Refused { code, text } => answered(code, &text),
    }
}

fn answered(code: u16, text: &str) -> StoreError {
    let text = format!("MySQL: {text} ({code})");
    match code {
        // A row or a table is locked for too long, a deadlock, a row that is locked or was changed.
        1205 | 1213 | 3572 | 1020 => StoreError::new(Fault::Retry, text),
        // The server takes no writes any more: it is a replica by now. Or a procedure is missing, or
        // has other parameters: somebody replaces the procedures, or has dropped them. The next
        // connection finds out.
        1290 | 1792 | 1836 | 1305 | 1318 => StoreError::replace(Fault::Retry, text),
        // The disk is full, or a table space has its largest size.
        1021 | 1114 => StoreError::new(
            Fault::Refused,
            format!("{text}; free disk space there, or let the table space grow"),
        ),
        // The memory, or the table of locks, is full.
        1041 | 1206 => StoreError::new(Fault::Refused, text),
        // Among them: the server does not understand the file with the procedures (1064), or somebody
        // runs another file at the same time (1304).
        1044 | 1045 | 1064 | 1142 | 1146 | 1227 | 1304 | 1370 | 1449 | 1665 => {
            StoreError::new(Fault::Config, format!("{text}{GUIDE}"))
        }
        1153 => StoreError::replace(
            Fault::Config,
            format!("{text}: set max_allowed_packet to at least 4M{GUIDE}"),
        ),
        // Behind the commit, but in front of the answer, the server may notice that it is to end,
        // or that somebody has ended the connection or the call.
        1053 | 1317 | 1927 | 1969 | 4031 => StoreError::broken(text),
        _ => StoreError::new(Fault::Unknown, text),
    }
}

/// A failure while connecting. No request has been sent yet, so no outcome can be unknown.
pub(super) fn not_connected(server: &Server, failure: Failure) -> StoreError {
    let place = server.place();
    let (fault, text) = match failure {
        Failure::Ended(error) => (Fault::Retry, error.to_string()),
        Failure::Odd(what) => (Fault::Config, what.to_owned()),
        Failure::Mistake(what) => (Fault::Config, what),
        Failure::Refused { code, text } => {
            let fault = match code {
                // No right, no such user or database, this host is blocked or not allowed, another
                // way to log in, TLS is demanded, the password has expired, the account is locked.
                1044 | 1045 | 1049 | 1129 | 1130 | 1251 | 1524 | 1698 | 1820 | 1862 | 3118
                | 3159 | 4151 => Fault::Config,
                _ => Fault::Retry,
            };
            let hint = match (code, server.is_encrypted()) {
                (1045, false) => "; if it wants TLS, write mysql+tls://",
                (1045, true) => {
                    "; if it demands a client certificate, set LOCK_CERT_FILE and LOCK_KEY_FILE"
                }
                _ => "",
            };
            (fault, format!("{text} ({code}){hint}"))
        }
    };
    let guide = if fault == Fault::Config { GUIDE } else { "" };
    StoreError::new(fault, format!("cannot connect to {place}: {text}{guide}"))
}
