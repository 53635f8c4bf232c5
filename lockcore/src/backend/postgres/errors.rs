//! What the errors of the server mean for a request, by their SQLSTATE.
//! <https://www.postgresql.org/docs/current/errcodes-appendix.html>

use std::error::Error as _;

use tokio_postgres::Error as PgError;
use tokio_postgres::error::{DbError, Severity};

use crate::backend::{Fault, StoreError};

/// What to read about rights and about the schema.
pub(super) const GUIDE: &str =
    "; see the guide of the PostgreSQL store (lockcore::guide::postgres)";

/// What is wrong with the address, and what to do.
pub(super) const POOLER: &str = "the address is that of a pooler, which gives connections of the \
    server to others after each transaction; name the address of the server, let the pooler work in session \
    mode, or write ?wakeups=look";

/// The failure of a request. Every verb is one transaction. So where the code of an error is known
/// here, the verb was not carried out, except where this says otherwise.
pub(super) fn failed(error: PgError) -> StoreError {
    match error.as_db_error() {
        Some(error) => answered(error),
        None => broken(&error),
    }
}

/// The connection has ended, or sends what the driver does not understand.
fn broken(error: &PgError) -> StoreError {
    StoreError::broken(format!("PostgreSQL: {}", text(error)))
}

fn answered(error: &DbError) -> StoreError {
    let code = error.code().code();
    // A hint says what to do, for example when the disk is full.
    let hint = error.hint().map(|hint| format!("; {hint}"));
    let text = format!(
        "PostgreSQL: {} ({code}){}",
        error.message(),
        hint.unwrap_or_default()
    );
    let class = &code[..2.min(code.len())];
    match (code, class) {
        // A row is changed by another transaction, or the request waited for too long.
        ("40001" | "40P01" | "55P03" | "57014", _) => StoreError::new(Fault::Retry, text),
        // The server is a standby by now. Every later request on this connection would fail, too.
        ("25006", _) => StoreError::replace(Fault::Retry, text),
        // The functions were made anew since this connection has prepared its calls. The message is
        // in the language of the server.
        ("0A000", _) if error.routine() == Some("RevalidateCachedQuery") => {
            StoreError::replace(Fault::Retry, text)
        }
        // Another client has prepared its statements on this connection, or this one has prepared its
        // own on another.
        ("42P05" | "26000", _) => StoreError::new(Fault::Config, format!("{text}: {POOLER}")),
        // Behind the commit, but in front of the answer, the server may notice that it is to end.
        ("57P01" | "57P02" | "57P05", _) => StoreError::broken(text),
        ("57P03", _) => StoreError::replace(Fault::Retry, text),
        ("54000", _) | (_, "53") => StoreError::new(Fault::Refused, text),
        // The name has characters that the encoding of the database does not have (22021, 22P05).
        ("22023" | "22021" | "22P05", _) | (_, "28" | "3D" | "3F" | "42") => {
            StoreError::new(Fault::Config, format!("{text}{GUIDE}"))
        }
        _ if is_fatal(error) => StoreError::broken(text),
        _ => StoreError::new(Fault::Unknown, text),
    }
}

fn is_fatal(error: &DbError) -> bool {
    matches!(
        error.parsed_severity(),
        Some(Severity::Fatal | Severity::Panic)
    )
}

/// A failure while connecting. No request has been sent yet, so no outcome can be unknown.
pub(super) fn not_connected(place: &str, error: PgError) -> StoreError {
    let because =
        |fault, text: String| StoreError::new(fault, format!("cannot connect to {place}: {text}"));
    if let Some(error) = error.as_db_error() {
        let failed = answered(error);
        let fault = match failed.fault() {
            Fault::Config => Fault::Config,
            // Among them: too many connections (53300).
            Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
        };
        return because(fault, failed.to_string());
    }
    let text = text(&error);
    // The driver says these when the server asks for a password that the URL does not have, or for
    // an encryption that was not asked for.
    let is_mistake = ["authentication error", "invalid configuration"]
        .iter()
        .any(|mistake| text.starts_with(mistake));
    because(
        if is_mistake {
            Fault::Config
        } else {
            Fault::Retry
        },
        text,
    )
}

/// The error of the driver with its cause. Neither contains the password.
fn text(error: &PgError) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
