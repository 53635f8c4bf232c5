//! Where the name of the lock comes from, and what happens to a request that does not say it.

use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

use crate::response::Problem;

/// What [`lockcore::Name`] takes. A client that sends more is told so with 400; it is not our
/// configuration that is wrong then.
const LONGEST_NAME: usize = 4096;

/// Finds the name of the lock in a request.
///
/// A request for which no lock is found is **not** let through, unless the key says so: a lock that
/// is silently not taken protects nothing. So
///
/// | key | request | answer |
/// |---|---|---|
/// | [`header`](Self::header) | without it | 400; with [`optional`](Self::optional) no lock |
/// | | it is empty, not UTF-8, too long, or there more than once | 400 |
/// | `path` (feature `axum`) | its route has no such parameter | 500; with [`optional`](Self::optional) no lock |
/// | | the parameter is not UTF-8, or too long | 400 |
/// | [`from_fn`](Self::from_fn) | `None` | no lock |
///
/// Different things need different names: `Key::path("id")` on `/orders/{id}` and on `/users/{id}`
/// is one lock for order 7 and user 7. A [`prefix`](Self::prefix) keeps them apart.
#[derive(Clone)]
#[must_use = "a key does nothing until it is given to a layer"]
pub struct Key {
    source: Source,
    prefix: String,
    optional: bool,
}

type Find = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
enum Source {
    Fn(Arc<Find>),
    Header(HeaderName),
    #[cfg(feature = "axum")]
    Path(Arc<str>),
}

impl Key {
    /// The name is what `find` makes of the request's head. `None` lets the request pass without a
    /// lock.
    ///
    /// Names should be as injective as their parts: `format!("{a}:{b}")` is one lock for
    /// `("x:y", "z")` and `("x", "y:z")`.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// // Only writes exclude each other.
    /// let key = Key::from_fn(|request| {
    ///     (!request.method.is_safe()).then(|| format!("document:{}", request.uri.path()))
    /// });
    /// # drop(key);
    /// ```
    pub fn from_fn(find: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::new(Source::Fn(Arc::new(find)))
    }

    /// The value of a header, which must be there exactly once.
    ///
    /// # Panics
    ///
    /// If `name` cannot be the name of a header.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::header("Idempotency-Key").prefix("payment:");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn header<N>(name: N) -> Self
    where
        N: TryInto<HeaderName, Error: fmt::Display>,
    {
        match name.try_into() {
            Ok(name) => Self::new(Source::Header(name)),
            // As axum does for a bad route: a mistake in the source, seen when the service starts.
            Err(error) => panic!("not the name of a header: {error}"),
        }
    }

    /// The value of a path parameter, decoded, as `id` in `/orders/{id}`.
    ///
    /// The layer must be where the route is known: added by `Router::route_layer`, or
    /// `MethodRouter::layer`. (`Router::layer` works too, but also covers the fallback, where there
    /// is no parameter.)
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::path("id").prefix("order:");
    /// # drop(key);
    /// ```
    #[cfg(feature = "axum")]
    #[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
    pub fn path(parameter: impl Into<String>) -> Self {
        Self::new(Source::Path(parameter.into().into()))
    }

    /// Text before what is found: `Key::path("id").prefix("order:")` locks `order:42`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Lets a request without the header, or on a route without the parameter, pass **without a
    /// lock**. Default: it is refused.
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    fn new(source: Source) -> Self {
        Self {
            source,
            prefix: String::new(),
            optional: false,
        }
    }

    /// The name to lock, `None` to lock nothing.
    pub(crate) fn find(&self, parts: &mut Parts) -> Result<Option<String>, Problem> {
        let found = match &self.source {
            // What a function of ours returns is not a client's mistake: not measured here.
            Source::Fn(find) => return Ok(find(parts).map(|value| self.name(&value))),
            Source::Header(header) => header_value(parts, header),
            #[cfg(feature = "axum")]
            Source::Path(parameter) => path_parameter(parts, parameter),
        };
        let value = match found {
            Ok(value) => value,
            Err(Missing::Absent(_)) if self.optional => return Ok(None),
            Err(Missing::Absent(problem) | Missing::Unusable(problem)) => return Err(problem),
        };
        let name = self.name(&value);
        if name.len() > LONGEST_NAME {
            return Err(Problem::bad_key(format!(
                "The {} is too long to be locked.",
                self.source
            )));
        }
        Ok(Some(name))
    }

    fn name(&self, value: &str) -> String {
        [&self.prefix, value].concat()
    }
}

/// Why there is no value.
enum Missing {
    Absent(Problem),
    Unusable(Problem),
}

fn header_value(parts: &Parts, header: &HeaderName) -> Result<String, Missing> {
    let mut values = parts.headers.get_all(header).iter();
    let Some(value) = values.next() else {
        let problem = Problem::bad_key(format!(
            "The header \"{header}\" is missing; it says what to lock."
        ));
        return Err(Missing::Absent(problem));
    };
    let unusable =
        |how| Missing::Unusable(Problem::bad_key(format!("The header \"{header}\" {how}.")));
    if values.next().is_some() {
        // The lock would be on one of them and the handler might act on the other.
        return Err(unusable("is there more than once"));
    }
    match std::str::from_utf8(value.as_bytes()) {
        Ok("") => Err(unusable("is empty")),
        Ok(value) => Ok(value.to_owned()),
        Err(_) => Err(unusable("is not UTF-8")),
    }
}

/// The extractor is an `async fn` that awaits nothing; polled once, it costs no allocation, and a
/// request that passes through keeps its future unboxed. Were it ever to wait, the request would be
/// refused, never let through.
#[cfg(feature = "axum")]
fn path_parameter(parts: &mut Parts, parameter: &str) -> Result<String, Missing> {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use axum::extract::rejection::RawPathParamsRejection;
    use axum::extract::{FromRequestParts, RawPathParams};

    let extraction = pin!(RawPathParams::from_request_parts(parts, &()));
    let found = match extraction.poll(&mut Context::from_waker(Waker::noop())) {
        // The last one, as for a handler that extracts a map: a nested route comes after its outer.
        Poll::Ready(Ok(parameters)) => parameters
            .iter()
            .filter(|(name, _)| *name == parameter)
            .last()
            .map(|(_, value)| value.to_owned()),
        Poll::Ready(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) => {
            let problem = Problem::bad_key("The path is not UTF-8.");
            return Err(Missing::Unusable(problem));
        }
        Poll::Ready(Err(_)) | Poll::Pending => None,
    };
    found.ok_or_else(|| {
        tracing::debug!(
            parameter,
            "no such path parameter here; add the layer with route_layer"
        );
        Missing::Absent(Problem::misconfigured(format!(
            "The route has no path parameter \"{parameter}\", which says what to lock."
        )))
    })
}

/// For a sentence: "the … is missing".
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fn(_) => f.write_str("function"),
            Self::Header(header) => write!(f, "header \"{header}\""),
            #[cfg(feature = "axum")]
            Self::Path(parameter) => write!(f, "path parameter \"{parameter}\""),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("source", &format_args!("{}", self.source))
            .field("prefix", &self.prefix)
            .field("optional", &self.optional)
            .finish()
    }
}
