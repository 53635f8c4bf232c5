//! The parts of a request from which a name is built: where each part is found, and which error is
//! returned if the part is missing. `key` builds the name, `template` parses the template.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use http::request::Parts;
use http::{Extensions, HeaderName};

use crate::refusal::Problem;

/// The longest name that [`lockcore::backend::Name`] accepts. If a client sends a longer name, it
/// gets 400 and not 500, because the configuration of the service is not wrong in this case.
const LONGEST_NAME: usize = 4096;

/// One part of a request.
#[derive(Clone)]
pub(crate) enum Source {
    Fn(Arc<Find>),
    Extension(Arc<FindExtension>, &'static str),
    Header(HeaderName),
    Metadata(HeaderName),
    Query(Arc<str>),
    GrpcMethod,
    #[cfg(feature = "axum")]
    Path(Arc<str>),
    #[cfg(feature = "axum")]
    MatchedPath,
}

pub(crate) type Find = dyn Fn(&Parts) -> Result<Option<String>, Cow<'static, str>> + Send + Sync;

/// Writes an extension into the name; `None` if the request has no extension of this type.
pub(crate) type FindExtension =
    dyn Fn(&Extensions, &mut String) -> Option<fmt::Result> + Send + Sync;

/// The type as which a value is parsed before it is written into the name. So all spellings of a
/// value give one name.
#[derive(Clone, Copy)]
pub(crate) struct Type {
    name: &'static str,
    /// Parses a text as this type, and writes the parsed value. The error says why the text is not
    /// valid.
    rewrite: fn(&str, &mut dyn fmt::Write) -> Result<(), String>,
}

impl Type {
    pub(crate) fn of<T>() -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        Self {
            name: std::any::type_name::<T>(),
            rewrite: |text, to| {
                let value: T = text.parse().map_err(|error: T::Err| error.to_string())?;
                write!(to, "{value}").map_err(|_| "it cannot be displayed".to_owned())
            },
        }
    }
}

/// Why there is no name.
pub(crate) enum Missing<'a> {
    /// The request needs no lock.
    Unwanted,
    /// This part is missing, which is an error unless the key is optional.
    Absent(&'a Source),
    /// The part is there, but cannot be used.
    Unusable(Problem),
}

/// A name that is being built.
pub(crate) struct Writer<'a> {
    pub(crate) name: String,
    /// The characters that are escaped in values, because they separate the values: see `template`.
    pub(crate) delimiters: &'a str,
    /// The type as which the next value is parsed. With `None` the value is used as it is.
    pub(crate) read_as: Option<Type>,
}

impl Source {
    /// Finds the part and appends it to the name.
    pub(crate) fn write(
        &self,
        parts: &mut Parts,
        writer: &mut Writer<'_>,
    ) -> Result<(), Missing<'_>> {
        match self {
            // This text comes from code of the service and not from the client. So it is not
            // escaped.
            Self::Fn(find) => {
                let refused = |text| Missing::Unusable(Problem::refused_by_a_function(text));
                let found = find(parts).map_err(refused)?;
                writer.name.push_str(&found.ok_or(Missing::Unwanted)?);
                Ok(())
            }
            Self::Extension(find, _) => match find(&parts.extensions, &mut writer.name) {
                Some(Ok(())) => Ok(()),
                Some(Err(_)) => Err(self.unusable("cannot be displayed")),
                None => Err(Missing::Absent(self)),
            },
            Self::Header(header) | Self::Metadata(header) => {
                let mut values = parts.headers.get_all(header).iter();
                let value = values.next().ok_or(Missing::Absent(self))?;
                self.is_alone(values.next())?;
                match std::str::from_utf8(value.as_bytes()) {
                    Ok(value) => self.write_value(value, writer),
                    Err(_) => Err(self.unusable("is not UTF-8")),
                }
            }
            Self::Query(parameter) => {
                let query = parts.uri.query().unwrap_or_default();
                let mut values = form_urlencoded::parse(query.as_bytes())
                    .filter(|(name, _)| name == &**parameter)
                    .map(|(_, value)| value);
                let value = values.next().ok_or(Missing::Absent(self))?;
                self.is_alone(values.next())?;
                self.write_decoded(&value, writer)
            }
            Self::GrpcMethod => match grpc_method(parts.uri.path()) {
                Some(method) => self.write_value(method, writer),
                None => Err(Missing::Absent(self)),
            },
            #[cfg(feature = "axum")]
            Self::Path(parameter) => {
                let parameters = path_parameters(parts).map_err(|NotUtf8| {
                    Missing::Unusable(Problem::bad_key("The path is not UTF-8."))
                })?;
                // This takes the last parameter with this name, like a handler that extracts a map.
                // The parameters of a nested route come after those of the outer route.
                let found = parameters.as_ref().and_then(|parameters| {
                    let ours = parameters.iter().filter(|(name, _)| *name == &**parameter);
                    ours.last()
                });
                let (_, value) = found.ok_or(Missing::Absent(self))?;
                self.write_value(value, writer)
            }
            #[cfg(feature = "axum")]
            Self::MatchedPath => {
                let path = parts.extensions.get::<axum::extract::MatchedPath>();
                let path = path.ok_or(Missing::Absent(self))?;
                self.write_value(path.as_str(), writer)
            }
        }
    }

    /// Refuses a second value: the lock could be for one value, and the handler could use the
    /// other.
    fn is_alone<T>(&self, second: Option<T>) -> Result<(), Missing<'_>> {
        match second {
            None => Ok(()),
            Some(_) => Err(self.unusable("is there more than once")),
        }
    }

    /// Refuses the replacement character. Bytes that are not UTF-8 have been decoded to this
    /// character, so different values would become one.
    fn write_decoded(&self, value: &str, writer: &mut Writer<'_>) -> Result<(), Missing<'_>> {
        match value.contains(char::REPLACEMENT_CHARACTER) {
            true => Err(self.unusable("is not UTF-8")),
            false => self.write_value(value, writer),
        }
    }

    /// Appends a value that the client chose.
    fn write_value(&self, value: &str, writer: &mut Writer<'_>) -> Result<(), Missing<'_>> {
        if value.is_empty() {
            return Err(self.unusable("is empty"));
        }
        // The length is checked here and, with the rest of the name, after the value is written. So
        // the client cannot make either text longer than allowed.
        if value.len() > LONGEST_NAME {
            return Err(self.unusable("is too long to be locked"));
        }
        let before = writer.name.len();
        match writer.read_as {
            Some(read_as) => (read_as.rewrite)(value, writer)
                .map_err(|error| self.unusable(&format!("is not valid: {error}")))?,
            None => writer.push_escaped(value),
        }
        match writer.name.len() == before {
            true => Err(self.unusable("is empty")),
            false => Ok(()),
        }
    }

    /// Checks a name that ends in this part, or in a text after it. A name that code of the service
    /// has made is not checked here, because the client is not the cause if it is too long.
    pub(crate) fn check_length(&self, name: &str) -> Result<(), Missing<'_>> {
        match self {
            Self::Fn(_) | Self::Extension(..) => Ok(()),
            _ if name.len() <= LONGEST_NAME => Ok(()),
            _ => Err(self.unusable("is too long to be locked")),
        }
    }

    /// The answer to a request that lacks this part.
    pub(crate) fn absent(&self) -> Problem {
        match self {
            // The server should have added this part, so the error is not the client's.
            Self::Extension(..) => Problem::misconfigured(format!(
                "The {self}, which says what to lock, is not in the request; what puts it there must come before this layer."
            )),
            #[cfg(feature = "axum")]
            Self::Path(parameter) => Problem::misconfigured(format!(
                "The route has no path parameter \"{parameter}\", which says what to lock."
            )),
            #[cfg(feature = "axum")]
            Self::MatchedPath => {
                Problem::misconfigured("There is no route here, which would say what to lock.")
            }
            Self::GrpcMethod => Problem::bad_key(
                "The path is not that of a gRPC method, /package.Service/Method; it says what to lock.",
            ),
            _ => Problem::bad_key(format!("The {self} is missing; it says what to lock.")),
        }
    }

    fn unusable(&self, how: &str) -> Missing<'_> {
        Missing::Unusable(match self {
            Self::Extension(..) => Problem::misconfigured(format!("The {self} {how}.")),
            _ => Problem::bad_key(format!("The {self} {how}.")),
        })
    }
}

impl Writer<'_> {
    /// Appends a value, and percent-encodes `%` and the delimiters in it, so that no value contains
    /// a delimiter. Without delimiters, nothing is encoded.
    fn push_escaped(&mut self, value: &str) {
        if self.delimiters.is_empty() {
            return self.name.push_str(value);
        }
        let is_escaped = |char| char == '%' || self.delimiters.contains(char);
        let mut rest = value;
        while let Some(at) = rest.find(is_escaped) {
            let (before, from) = rest.split_at(at);
            self.name.push_str(before);
            // Delimiters are ASCII, so the character is one byte.
            self.name
                .push_str(percent_encoding::percent_encode_byte(from.as_bytes()[0]));
            rest = &from[1..];
        }
        self.name.push_str(rest);
    }
}

/// Escapes all text that is written.
impl fmt::Write for Writer<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push_escaped(text);
        Ok(())
    }
}

/// The path `/package.Service/Method` without its first slash. The extension `GrpcMethod` of tonic
/// exists only in clients.
fn grpc_method(path: &str) -> Option<&str> {
    let path = path.strip_prefix('/')?;
    let (service, method) = path.split_once('/')?;
    let is_method = !service.is_empty() && !method.is_empty() && !method.contains('/');
    is_method.then_some(path)
}

#[cfg(feature = "axum")]
struct NotUtf8;

/// The extractor is an `async fn` that awaits nothing, so this polls it once. This needs no
/// allocation, so the future of a request without a lock need not be boxed. If the extractor were
/// ever pending, the layer would refuse the request; it would not let the request pass.
#[cfg(feature = "axum")]
fn path_parameters(parts: &mut Parts) -> Result<Option<axum::extract::RawPathParams>, NotUtf8> {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use axum::extract::rejection::RawPathParamsRejection;
    use axum::extract::{FromRequestParts, RawPathParams};

    let extraction = pin!(RawPathParams::from_request_parts(parts, &()));
    match extraction.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(parameters)) => Ok(Some(parameters)),
        Poll::Ready(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => Err(NotUtf8),
        Poll::Ready(Err(_)) | Poll::Pending => Ok(None),
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Completes the sentence "the … is missing".
impl Source {
    /// What a template has between its braces for this source.
    pub(crate) fn placeholder(&self) -> Option<String> {
        Some(match self {
            Self::Fn(_) | Self::Extension(..) => return None,
            Self::Header(header) => format!("header.{header}"),
            Self::Metadata(key) => format!("metadata.{key}"),
            Self::Query(parameter) => format!("query.{parameter}"),
            Self::GrpcMethod => "grpc_method".to_owned(),
            #[cfg(feature = "axum")]
            Self::Path(parameter) => format!("path.{parameter}"),
            #[cfg(feature = "axum")]
            Self::MatchedPath => "matched_path".to_owned(),
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fn(_) => f.write_str("function"),
            Self::Extension(_, of) => write!(f, "extension {of}"),
            Self::Header(header) => write!(f, "header \"{header}\""),
            Self::Metadata(key) => write!(f, "metadata \"{key}\""),
            Self::Query(parameter) => write!(f, "query parameter \"{parameter}\""),
            Self::GrpcMethod => f.write_str("gRPC method"),
            #[cfg(feature = "axum")]
            Self::Path(parameter) => write!(f, "path parameter \"{parameter}\""),
            #[cfg(feature = "axum")]
            Self::MatchedPath => f.write_str("matched path"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_and_a_method_are_a_grpc_method() {
        assert_eq!(
            grpc_method("/shop.Orders/Settle"),
            Some("shop.Orders/Settle")
        );
        for path in ["", "/", "//", "/a", "/a/", "//a", "/a/b/", "/a/b/c", "a/b"] {
            assert_eq!(grpc_method(path), None, "{path}");
        }
    }
}
