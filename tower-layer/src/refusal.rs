//! Requests that the layer itself answers: the reasons, and their texts in problem details (RFC
//! 9457) and in gRPC. `response` makes the responses.

mod json;
mod kind;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use lockcore::{Error, ErrorKind};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use self::json::push_string;
use self::kind::Kind;
use crate::guard::LockNames;
use crate::header::TOKEN_HEADER;
use crate::read::Unread;

/// The options for the layer's answers.
#[derive(Clone)]
pub(crate) struct Answers {
    pub(crate) busy_status: StatusCode,
    pub(crate) retry_after: Duration,
    /// Whether the answers contain the name of the lock.
    pub(crate) name_key: bool,
    /// The function of the user that makes the HTTP response, if there is one.
    pub(crate) own: Option<Arc<Own>>,
}

type Own = dyn Fn(Refusal<'_>) -> Response<Bytes> + Send + Sync;

impl Default for Answers {
    fn default() -> Self {
        Self {
            busy_status: StatusCode::CONFLICT,
            retry_after: Duration::from_secs(1),
            name_key: true,
            own: None,
        }
    }
}

impl Answers {
    pub(crate) fn make_with<B: Into<Bytes>>(
        &mut self,
        make: impl Fn(Refusal<'_>) -> Response<B> + Send + Sync + 'static,
    ) {
        self.own = Some(Arc::new(move |refusal| make(refusal).map(Into::into)));
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers")
            .field("busy_status", &self.busy_status)
            .field("retry_after", &self.retry_after)
            .field("name_key", &self.name_key)
            .field("own", &self.own.as_ref().map(|_| "a function"))
            .finish()
    }
}

/// A request that a layer refuses or stops, for a function that makes the response:
/// [`LockLayer::refuse_with`](crate::LockLayer::refuse_with),
/// [`FenceLayer::refuse_with`](crate::FenceLayer::refuse_with).
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    problem: &'a Problem,
    answers: &'a Answers,
}

impl<'a> Refusal<'a> {
    pub(crate) fn of(problem: &'a Problem, answers: &'a Answers) -> Self {
        Self { problem, answers }
    }

    /// The reason, as the anchor of a section among [the answers](crate#answers), for example
    /// `lock-held` if another request holds the lock.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.problem.kind.section()
    }

    /// The status of the layer's own answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.problem.status(self.answers)
    }

    /// A title, which is the same for every refusal of this kind, such as `Locked by another
    /// request`.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.problem.kind.title()
    }

    /// A sentence that says what happened, and what the client can do. It may contain text that the
    /// client has sent.
    #[must_use]
    pub fn detail(&self) -> &'a str {
        &self.problem.detail
    }

    /// The name of the lock, if it is known and not [hidden](crate::LockLayer::hide_key). If the
    /// request takes several locks, this is the lock that another request holds, or that was lost;
    /// see [`keys`](Self::keys).
    #[must_use]
    pub fn key(&self) -> Option<&'a str> {
        self.problem.key.as_deref()
    }

    /// The names of all locks that the request takes, in order, if they are known and not hidden.
    /// There are several under a layer that takes [several locks](crate::LockLayer::all), or else
    /// one.
    #[must_use]
    pub fn keys(&self) -> &'a [String] {
        match &*self.problem.keys {
            [] => self.problem.key.as_slice(),
            several => several,
        }
    }

    /// After how many whole seconds the client may try again. `None` if a new attempt cannot
    /// succeed.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let seconds = || self.problem.retry_after(self.answers);
        let may_be_repeated = self.problem.may_be_repeated();
        may_be_repeated.then(|| Duration::from_secs(seconds()))
    }

    /// The body of the layer's own answer, as JSON. Use it for a response that differs only in its
    /// headers.
    #[must_use]
    pub fn to_json(&self) -> String {
        self.problem.json(self.status())
    }
}

/// Why a request has no ordinary response.
///
/// The texts contain nothing from the store's error, because this may name hosts. The store's error
/// is only logged. The texts of [`Kind::Key`] may quote the client, or come from a function of the
/// service.
#[derive(Debug)]
pub(crate) struct Problem {
    kind: Kind,
    detail: Cow<'static, str>,
    /// The lock that the problem is about.
    key: Option<String>,
    /// All locks of the request, if it takes several.
    keys: Vec<String>,
    /// The time until the lock is free if it is not renewed. `None` if it is not known.
    free_in: Option<Duration>,
}

/// The longest text, in bytes, with which a function of the service can refuse a request. The limit
/// exists because the text goes into a gRPC header, and may quote the client.
const LONGEST_REFUSAL: usize = 1_000;

/// The detail of [`Kind::Held`] and [`Kind::Deadline`].
const HELD: &str =
    "Another request for the same key is being handled. This one was not; try again.";

impl Problem {
    /// The lock was not taken, and the handler was not called.
    pub(crate) fn not_taken(error: &Error, deadline_was_the_bound: bool) -> Self {
        let (kind, detail) = match error.kind() {
            ErrorKind::Busy | ErrorKind::Timeout => (
                match deadline_was_the_bound {
                    true => Kind::Deadline,
                    false => Kind::Held,
                },
                HELD,
            ),
            // `Lost` means here that the lock was lost before it was used, because this process is
            // shutting down.
            ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Lost(_) => (
                Kind::Unavailable,
                "The lock could not be taken. The request was not handled; try again.",
            ),
            ErrorKind::WouldDeadlock => (
                Kind::Misconfigured,
                "The handler of this request holds the key already, and would wait for itself.",
            ),
            // Config, CapacityMismatch, and kinds that may be added: the client is not the cause.
            _ => (
                Kind::Misconfigured,
                "The lock is not usable as it is configured.",
            ),
        };
        let mut problem = Self::new(kind, detail).of(error);
        problem.free_in = error.retry_after();
        problem
    }

    /// As many requests as allowed are already waiting for the lock.
    pub(crate) fn crowded(key: String) -> Self {
        let mut problem = Self::new(Kind::Held, HELD);
        problem.key = Some(key);
        problem
    }

    /// The inner service was not ready in time, although the lock was granted.
    pub(crate) fn not_ready() -> Self {
        let detail = "The service was not ready in time. The request was not handled; try again.";
        Self::new(Kind::Unavailable, detail)
    }

    /// A handler has taken a lock itself, and returns this error of the lock. If the lock was held,
    /// the handler may have done a part of its work, so the answer does not invite the client to
    /// repeat the request.
    #[cfg(any(feature = "axum", feature = "tonic"))]
    pub(crate) fn met_by_a_handler(error: &Error) -> Self {
        let (kind, detail) = match error.kind() {
            _ if !error.was_held() => return Self::not_taken(error, false),
            ErrorKind::Lost(_) => return Self::lost(error),
            ErrorKind::Config | ErrorKind::CapacityMismatch | ErrorKind::WouldDeadlock => (
                Kind::Misconfigured,
                "The lock or its store does not allow an operation of the handler. Part of the request may be done, or all of it.",
            ),
            _ => (
                Kind::Uncertain,
                "An operation on the lock failed while the request was being handled. Part of the request may be done, or all of it.",
            ),
        };
        Self::new(kind, detail).of(error)
    }

    /// The lock was lost, and the handler was stopped.
    pub(crate) fn lost(error: &Error) -> Self {
        let detail = "The lock was lost while the request was being handled. The request was stopped; part of it may be done.";
        Self::new(Kind::Lost, detail).of(error)
    }

    /// The client's own deadline has passed, and the handler was not called.
    pub(crate) fn overdue_before() -> Self {
        let detail = "The client's deadline passed before the request was handled. The request was not handled.";
        Self::new(Kind::Overdue, detail)
    }

    /// The client's own deadline has passed, and the handler was stopped.
    pub(crate) fn overdue() -> Self {
        let detail = "The client's deadline passed while the request was being handled. The request was stopped; part of it may be done.";
        Self::new(Kind::Overdue, detail)
    }

    /// The request does not say what to lock, or its value cannot be used.
    pub(crate) fn bad_key(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Key, detail)
    }

    /// A function of the service that finds names has refused the request with this text.
    pub(crate) fn refused_by_a_function(mut text: Cow<'static, str>) -> Self {
        if text.len() > LONGEST_REFUSAL {
            let mut ends = (0..=LONGEST_REFUSAL).rev();
            let end = ends.find(|&end| text.is_char_boundary(end));
            text = text[..end.unwrap_or(0)].to_owned().into();
        }
        Self::bad_key(text)
    }

    /// The layer has seen as many names as allowed.
    pub(crate) fn too_many_names(room_in: Duration) -> Self {
        let detail = "Requests have named too many different locks, and this one names another. It was not handled; try again later.";
        let mut problem = Self::new(Kind::Names, detail);
        problem.free_in = Some(room_in);
        problem
    }

    /// The upgraded connection would continue without the lock.
    pub(crate) fn upgrade(names: LockNames) -> Self {
        let detail = "This request is handled under a lock, which cannot be kept over an upgraded connection.";
        Self::new(Kind::Upgrade, detail).about(names)
    }

    /// The body could not be read, so the layer has not asked for the lock.
    pub(crate) fn unread(unread: Unread, names: LockNames) -> Self {
        let detail = match unread {
            Unread::TooLarge => {
                "The body of the request is larger than what is read under this lock. The request was not handled."
            }
            Unread::TooSlow => {
                "The body of the request did not arrive in time. The request was not handled; send it faster."
            }
            Unread::Broken => "The body of the request broke off. The request was not handled.",
        };
        Self::new(Kind::Body(unread), detail).about(names)
    }

    /// A mistake on the server's side.
    pub(crate) fn misconfigured(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Misconfigured, detail)
    }

    /// A fence has seen a higher token.
    pub(crate) fn late() -> Self {
        let detail = "The fencing token is lower than one that was seen before. The lock has gone to another; trying again will not help.";
        Self::new(Kind::Late, detail)
    }

    /// The request has no usable token. `how` completes a sentence such as "the header … is
    /// missing".
    pub(crate) fn no_token(how: &str) -> Self {
        let detail = format!(
            "The header \"{TOKEN_HEADER}\" {how}; it carries the token of the lock that the request is made under."
        );
        Self::new(Kind::Token, detail)
    }

    /// A fence cannot remember another resource.
    pub(crate) fn fence_full(room_in: Duration) -> Self {
        let detail = "The service cannot remember the fencing token of another resource now. The request was not handled; try again.";
        let mut problem = Self::new(Kind::Full, detail);
        problem.free_in = Some(room_in);
        problem
    }

    fn new(kind: Kind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            key: None,
            keys: Vec::new(),
            free_in: None,
        }
    }

    fn of(mut self, error: &Error) -> Self {
        self.key = error.name().map(str::to_owned);
        self
    }

    fn about(mut self, names: LockNames) -> Self {
        match names {
            LockNames::One(name) => self.key = Some(name),
            LockNames::All(names) => self.keys = names,
        }
        self
    }

    /// Adds the names of the request's locks. With several locks, `key` stays the name of the lock
    /// that was not free.
    pub(crate) fn with_names(mut self, names: &LockNames) -> Self {
        match names {
            LockNames::One(name) => self.key = Some(name.clone()),
            LockNames::All(names) => self.keys = names.clone(),
        }
        self
    }

    /// Adds the names of the request's locks, if it takes several.
    pub(crate) fn with_several(mut self, keys: Vec<String>) -> Self {
        self.keys = keys;
        self
    }

    pub(crate) fn with_key_if(mut self, yes: bool) -> Self {
        if !yes {
            self.key = None;
            self.keys.clear();
        }
        self
    }

    /// The gRPC status at the end of a response.
    pub(crate) fn grpc_status(&self) -> HeaderMap {
        // `Percent-Encoded` in gRPC over HTTP/2: all characters except printable ASCII, and the
        // percent sign.
        const ENCODED: &AsciiSet = &CONTROLS.add(b'%');
        let (code, message) = self.grpc();
        let message = utf8_percent_encode(&message, ENCODED).to_string();
        let mut trailers = HeaderMap::with_capacity(4);
        trailers.insert("grpc-status", code.into());
        if let Ok(message) = message.try_into() {
            trailers.insert("grpc-message", message);
        }
        trailers
    }

    /// The status code and its message. The message becomes a header. So if a request takes several
    /// locks, the message does not name all of them.
    pub(crate) fn grpc(&self) -> (u16, String) {
        let message = match &self.key {
            Some(key) => format!("{}: {} (key: {key})", self.kind.title(), self.detail),
            None => format!("{}: {}", self.kind.title(), self.detail),
        };
        (self.kind.grpc_code() as u16, message)
    }

    pub(crate) fn status(&self, answers: &Answers) -> StatusCode {
        match self.kind {
            Kind::Held | Kind::Deadline => answers.busy_status,
            Kind::Unavailable | Kind::Lost | Kind::Names | Kind::Full => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            // It is not 503, because some clients and proxies repeat a request with that status by
            // themselves. After a loss the work was stopped before its end. Here all of it may be
            // done.
            Kind::Uncertain => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::Key | Kind::Token => StatusCode::BAD_REQUEST,
            Kind::Late => StatusCode::PRECONDITION_FAILED,
            Kind::Upgrade => StatusCode::NOT_IMPLEMENTED,
            Kind::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::Body(Unread::TooLarge) => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::Body(Unread::TooSlow) => StatusCode::REQUEST_TIMEOUT,
            Kind::Body(Unread::Broken) => StatusCode::BAD_REQUEST,
            // Only gRPC has this kind.
            Kind::Overdue => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    pub(crate) fn may_be_repeated(&self) -> bool {
        self.kind.may_be_repeated()
    }

    /// The time is in whole seconds, because the header has no fractions. It is rounded up, so that
    /// no client repeats its request too early.
    pub(crate) fn retry_after(&self, answers: &Answers) -> u64 {
        let wait = match (self.kind, self.free_in) {
            // There is room only after this time, so the answer has at least this time. A lock may
            // be released at any time, so the answer has at most its rest.
            (Kind::Names | Kind::Full, Some(room_in)) => room_in.max(answers.retry_after),
            (_, Some(free_in)) => free_in.min(answers.retry_after),
            (_, None) => answers.retry_after,
        };
        wait.as_secs()
            .saturating_add(u64::from(wait.subsec_nanos() > 0))
    }

    /// The JSON is written by hand. There are six members, and only three need escaping, so a JSON
    /// library is not worth its cost.
    pub(crate) fn json(&self, status: StatusCode) -> String {
        let mut json =
            String::from("{\"type\":\"https://docs.rs/lockcore-tower/latest/lockcore_tower/#");
        json.push_str(self.kind.section());
        json.push_str("\",\"title\":");
        push_string(&mut json, self.kind.title());
        json.push_str(",\"status\":");
        json.push_str(status.as_str());
        json.push_str(",\"detail\":");
        push_string(&mut json, &self.detail);
        if let Some(key) = &self.key {
            json.push_str(",\"key\":");
            push_string(&mut json, key);
        }
        for (index, key) in self.keys.iter().enumerate() {
            json.push_str(if index == 0 { ",\"keys\":[" } else { "," });
            push_string(&mut json, key);
        }
        if !self.keys.is_empty() {
            json.push(']');
        }
        json.push('}');
        json
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 6] = [
        "order:42",
        "",
        "\"\\\"",
        "a\r\n\t\0\u{1f}\u{7f}",
        "</script>",
        "100%25 ä😀\u{2028}",
    ];

    #[test]
    fn any_key_can_be_read_back_from_the_json() {
        for key in KEYS {
            let mut problem = Problem::bad_key("a \"detail\"");
            problem.key = Some(key.into());

            let json = problem.json(StatusCode::BAD_REQUEST);
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();

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

    #[test]
    fn any_key_can_be_read_back_from_the_grpc_status() {
        for key in KEYS {
            let mut problem = Problem::bad_key("a detail");
            problem.key = Some(key.into());

            let status = problem.grpc_status();

            assert_eq!(status["grpc-status"], "3");
            let message = status["grpc-message"].to_str().unwrap();
            let message = percent_encoding::percent_decode_str(message);
            assert_eq!(
                message.decode_utf8().unwrap(),
                format!("No key to lock: a detail (key: {key})")
            );
        }
    }

    #[test]
    fn retry_after_is_the_shorter_time_in_whole_seconds() {
        let seconds = |configured, free_in| {
            let mut problem = Problem::new(Kind::Held, "");
            problem.free_in = free_in;
            problem.retry_after(&Answers {
                retry_after: configured,
                ..Answers::default()
            })
        };
        let (s, ms) = (Duration::from_secs, Duration::from_millis);
        let full = Problem::fence_full(s(2_000));
        assert_eq!(full.retry_after(&Answers::default()), 2_000);

        assert_eq!(seconds(s(1), None), 1);
        assert_eq!(seconds(s(1), Some(s(9))), 1);
        assert_eq!(seconds(s(10), Some(ms(3_001))), 4);
        assert_eq!(seconds(s(10), Some(s(3))), 3);
        assert_eq!(seconds(s(10), Some(ms(2))), 1);
        assert_eq!(seconds(ms(1), None), 1);
        assert_eq!(seconds(Duration::MAX, None), u64::MAX);
    }
}
