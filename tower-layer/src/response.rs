//! The answers that the layer gives itself, as problem details (RFC 9457).

use std::borrow::Cow;
use std::fmt::Write;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use lockcore::{Error, ErrorKind};

use crate::body::LockBody;

/// A second: the least that the header can say, and never more than a holder's remaining time
/// rounded up.
const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// Why a request has no ordinary response.
///
/// The texts are fixed: what the store said may name hosts, and is for the logs.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    /// The section of the crate's page that explains it.
    section: &'static str,
    title: &'static str,
    detail: Cow<'static, str>,
    key: Option<String>,
}

impl Problem {
    /// The lock was not taken, and the handler not called.
    pub(crate) fn not_taken(error: &Error) -> Self {
        let problem = match error.kind() {
            ErrorKind::Busy | ErrorKind::Timeout => Self {
                status: StatusCode::CONFLICT,
                section: "lock-held",
                title: "Locked by another request",
                detail: "Another request for the same key is being handled. This one was not; try again.".into(),
                key: None,
            },
            // Lost before it was used: this process is shutting down.
            ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Lost(_) => Self {
                status: StatusCode::SERVICE_UNAVAILABLE,
                section: "lock-unavailable",
                title: "Lock not available",
                detail: "The lock could not be taken. The request was not handled; try again.".into(),
                key: None,
            },
            // Config, CapacityMismatch, and what may come: not the client's doing.
            _ => Self::misconfigured("The lock is not usable as it is configured."),
        };
        problem.of(error)
    }

    /// The lock was lost and the handler stopped.
    pub(crate) fn lost(error: &Error) -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            section: "lock-lost",
            title: "Lock lost",
            detail: "The lock was lost while the request was being handled. The request was stopped; part of it may be done.".into(),
            key: None,
        }
        .of(error)
    }

    /// The client did not say what to lock, or not so that it can be locked.
    pub(crate) fn bad_key(detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            section: "lock-key",
            title: "No key to lock",
            detail: detail.into(),
            key: None,
        }
    }

    /// A mistake on the server's side.
    pub(crate) fn misconfigured(detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            section: "lock-misconfigured",
            title: "Lock misconfigured",
            detail: detail.into(),
            key: None,
        }
    }

    fn of(mut self, error: &Error) -> Self {
        self.key = error.name().map(str::to_owned);
        self
    }

    pub(crate) fn into_response<B>(self) -> Response<LockBody<B>> {
        let mut response = Response::new(LockBody::full(self.json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if matches!(
            self.status,
            StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE
        ) {
            headers.insert(RETRY_AFTER, RETRY_AFTER_SECONDS);
        }
        response
    }

    /// Written by hand: five members, of which two need escaping, are not worth a JSON library in
    /// every service that uses this crate.
    fn json(&self) -> String {
        let mut json =
            String::from("{\"type\":\"https://docs.rs/lockcore-tower/latest/lockcore_tower/#");
        json.push_str(self.section);
        json.push_str("\",\"title\":");
        push_string(&mut json, self.title);
        json.push_str(",\"status\":");
        json.push_str(self.status.as_str());
        json.push_str(",\"detail\":");
        push_string(&mut json, &self.detail);
        if let Some(key) = &self.key {
            json.push_str(",\"key\":");
            push_string(&mut json, key);
        }
        json.push('}');
        json
    }
}

/// RFC 8259, section 7: quotation mark, reverse solidus and control characters are escaped.
fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            c if c < ' ' => {
                // Writing to a string cannot fail.
                let _ = write!(json, "\\u{:04x}", u32::from(c));
            }
            c => json.push(c),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_key_comes_back_from_the_json() {
        for key in [
            "order:42",
            "",
            "\"\\\"",
            "a\r\n\t\0\u{1f}\u{7f}",
            "</script>",
            "ä😀\u{2028}",
        ] {
            let mut problem = Problem::bad_key("a \"detail\"");
            problem.key = Some(key.into());

            let json: serde_json::Value = serde_json::from_str(&problem.json()).unwrap();

            assert_eq!(json["key"], key);
            assert_eq!(json["detail"], "a \"detail\"");
            assert_eq!(json["status"], 400);
            assert_eq!(json["title"], "No key to lock");
            assert_eq!(
                json["type"],
                "https://docs.rs/lockcore-tower/latest/lockcore_tower/#lock-key"
            );
        }
    }
}
