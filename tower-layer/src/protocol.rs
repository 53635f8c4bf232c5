//! The protocol of a client: HTTP, or gRPC and gRPC-Web.

use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method};

/// The protocol of the client, which decides the form of the answer.
#[derive(Clone, Debug)]
pub(crate) enum Protocol {
    Http,
    /// Contains the content type of the request, which is also the content type of the answer.
    Grpc(HeaderValue),
}

impl Protocol {
    pub(crate) fn of(request: &Parts) -> Self {
        match request.headers.get(CONTENT_TYPE) {
            Some(content) if request.method == Method::POST && is_grpc(content) => {
                Self::Grpc(content.clone())
            }
            _ => Self::Http,
        }
    }
}

/// Whether this is a content type of gRPC or gRPC-Web, with or without a message format and
/// parameters. A type that only begins like one of these must not match. A refusal in gRPC has the
/// HTTP status 200, and another kind of client would take it for a success.
fn is_grpc(content: &HeaderValue) -> bool {
    let content = content.as_bytes();
    let end = content.iter().position(|byte| b"+; \t".contains(byte));
    let kind = &content[..end.unwrap_or(content.len())];
    [
        "application/grpc",
        "application/grpc-web",
        "application/grpc-web-text",
    ]
    .iter()
    .any(|grpc| kind.eq_ignore_ascii_case(grpc.as_bytes()))
}

/// Whether a response can carry its status in trailers. In gRPC-Web, trailers are part of the body.
pub(crate) fn has_grpc_trailers(headers: &HeaderMap) -> bool {
    let content = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let behind = content.and_then(|content| content.strip_prefix(b"application/grpc"));
    behind.is_some_and(|behind| matches!(behind.first(), None | Some(b'+' | b';')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailers_are_for_grpc_and_not_for_grpc_web() {
        let has = |content: &'static str| {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content))]);
            has_grpc_trailers(&headers)
        };

        for content in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc;a=b",
        ] {
            assert!(has(content), "{content}");
        }
        for content in ["application/grpc-web+proto", "application/json", ""] {
            assert!(!has(content), "{content}");
        }
    }
}
