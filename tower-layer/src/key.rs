//! The key: how the name of the lock is built from a request, and what happens if the request lacks
//! a part of the name. `source` finds each part.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

use crate::header;
use crate::refusal::Problem;
use crate::source::{Missing, Source, Type, Writer};
use crate::template::{Piece, Template};

/// Finds the name of the lock in a request.
///
/// A request in which the key finds no name is **refused**, unless the key lets it pass:
///
/// | key | the piece is missing | the piece is empty, not of its type, not UTF-8, longer than a name can be, or there more than once |
/// |---|---|---|
/// | [`header_as`](Self::header_as), [`metadata_as`](Self::metadata_as), [`query_as`](Self::query_as), the same without `_as` | 400 | 400 |
/// | [`grpc_method`](Self::grpc_method) | 400 | 400 |
/// | `path_as`, `path`, `matched_path` (feature `axum`) | 500: the route has no such parameter | 400 |
/// | [`extension`](Self::extension) | 500: no outer layer has added it | |
/// | [`template`](Self::template) | as for its placeholders | as for its placeholders |
/// | [`from_fn`](Self::from_fn) | `Ok(None)`: no lock; `Err`: 400 | |
///
/// With [`optional`](Self::optional), a request that lacks a piece passes **without a lock**. With
/// [`when`](Self::when), every request that a condition does not select also passes without a lock.
///
/// # One thing, one name
///
/// A lock has a text as its name, but a handler acts on the value that it parses from the text. For
/// a handler that takes a `u64`, the paths `/orders/12`, `/orders/012`, `/orders/+12` and
/// `/orders/%31%32` are one order. So give the key the type that the handler reads.
/// `Key::path_as::<u64>("id")` parses the value like the handler, and locks `12` in all four cases.
/// If the value is not of the type, the answer is 400. A type of your own must do two things.
/// [`FromStr`] must return equal values for texts that mean the same to the handler.
/// [`Display`](fmt::Display) must write equal values in the same way.
///
/// **The sources without `_as` take the value as it is**, after percent-decoding in paths and
/// queries. They are for handlers that compare texts byte by byte. With any other handler, two
/// spellings are two locks, so two requests for one
/// thing are handled at the same time. In a [`FenceLayer`](crate::FenceLayer) two spellings are two
/// fences, so a late write passes.
///
/// Different things need different names. With `Key::path_as::<u64>("id")` on `/orders/{id}` and on
/// `/users/{id}`, order 7 and user 7 have one lock. A [`prefix`](Self::prefix) makes two locks of
/// them.
#[derive(Clone)]
#[must_use = "a key does nothing until it is given to a layer"]
pub struct Key {
    template: Template,
    optional: bool,
    when: Option<Arc<When>>,
}

type When = dyn Fn(&Parts) -> bool + Send + Sync;

impl Key {
    /// A name that contains values from the request, such as
    /// `"order:{path.id:u64}:{header.x-tenant}"`.
    ///
    /// | placeholder | reads the same as |
    /// |---|---|
    /// | `{path.NAME}`, `{matched_path}` (feature `axum`) | `Key::path`, `Key::matched_path` |
    /// | `{header.NAME}`, `{metadata.NAME}` | [`header`](Self::header), [`metadata`](Self::metadata) |
    /// | `{query.NAME}` | [`query`](Self::query) |
    /// | `{grpc_method}` | [`grpc_method`](Self::grpc_method) |
    ///
    /// An integer type may follow the name of a value, as in `{path.id:u64}`. Then the value is
    /// parsed, and all its [spellings](#one-thing-one-name) make one name.
    /// [`read_as`](Self::read_as) does this for other types. A value without a type is used as it
    /// is.
    ///
    /// A brace in the name is written `{{` or `}}`.
    ///
    /// **Two requests have the same name only if all their values agree.** The text between two
    /// values must contain ASCII punctuation other than `%`. In the values, this punctuation and
    /// `%` are percent-encoded. For example, with `"{query.a}:{query.b}"` the values `x:y` and `z`
    /// make `x%3Ay:z`. A single value is not encoded, so `"order:{path.id:u64}"` is the lock that
    /// `#[distributed_lock(key = "order:{id}")]` takes. **With several values, the names of the
    /// layer and of the macro can differ**, because the macro does not encode values. They differ
    /// if a value contains the punctuation between the values, as a UUID contains `-`. If layer and
    /// macro must take the same lock, join the values with punctuation that they do not contain. Or
    /// build the name in a function that both call ([`from_fn`](Self::from_fn)).
    ///
    /// # Panics
    ///
    /// If the template has a mistake; the message says what to write.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::template("cart:{header.x-tenant}:{query.user:u64}");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn template(template: &str) -> Self {
        match Template::parse(template) {
            Ok(template) => Self::new(template),
            // This panics, as axum does for a bad route: the mistake is in the source code, and the
            // panic comes when the service starts.
            Err(mistake) => panic!("the key template \"{template}\": {mistake}"),
        }
    }

    /// Reads the values of a placeholder as `T`, so that all [spellings](#one-thing-one-name) of
    /// one `T` are one name. Use it for types that have no name in a [template](Self::template).
    ///
    /// # Panics
    ///
    /// If the key has no such placeholder.
    ///
    /// ```
    /// use std::net::IpAddr;
    ///
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::template("session:{header.x-client}:{query.page:u32}")
    ///     .read_as::<IpAddr>("header.x-client");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn read_as<T>(mut self, placeholder: &str) -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        match self.template.read_as(placeholder, Type::of::<T>()) {
            Ok(()) => self,
            Err(mistake) => panic!("the key template {:?}: {mistake}", self.template),
        }
    }

    /// `find` makes the name from the head of the request. With `Ok(None)` the request passes
    /// without a lock. After an error the answer is 400, and **the client sees the text of the
    /// error**, up to 1,000 bytes. The error is a text and not an error type, so that `?` cannot
    /// show internal errors to clients.
    ///
    /// Different things need different names. `format!("{a}:{b}")` makes the same name of `("x:y",
    /// "z")` and of `("x", "y:z")`; a [`template`](Self::template) makes two names. And each thing
    /// needs one name: `find` sees the URI as the client wrote it, perhaps with `%34` for `4`. So
    /// parse what the handler parses.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::from_fn(|request| {
    ///     let Some(page) = request.uri.path().strip_prefix("/pages/") else {
    ///         return Ok(None); // no lock
    ///     };
    ///     let page: u64 = page.parse().map_err(|error| format!("no page number: {error}"))?;
    ///     Ok(Some(format!("page:{page}")))
    /// });
    /// # drop(key);
    /// ```
    pub fn from_fn(
        find: impl Fn(&Parts) -> Result<Option<String>, Cow<'static, str>> + Send + Sync + 'static,
    ) -> Self {
        Self::of(Source::Fn(Arc::new(find)))
    }

    /// The value of a header, read as `T`. The header must be there exactly once. See
    /// [one thing, one name](#one-thing-one-name). For an `Idempotency-Key` there is the type
    /// [`IdempotencyKey`](crate::IdempotencyKey).
    ///
    /// # Panics
    ///
    /// If `name` cannot be the name of a header.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::header_as::<u64>("account-id").prefix("account:");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn header_as<T>(name: impl TryInto<HeaderName, Error: fmt::Display>) -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        Self::header(name).all_as(Type::of::<T>())
    }

    /// The value of a header, **as it is**: two spellings of one thing are two locks. See [one
    /// thing, one name](#one-thing-one-name). The header must be there exactly once.
    ///
    /// The value may be any text in UTF-8. [`HeaderValue::to_str`](http::HeaderValue::to_str)
    /// refuses a text that is not ASCII. So a handler that uses the value reads its
    /// [bytes](http::HeaderValue::as_bytes) as UTF-8, or answers 400 to values that it cannot read.
    ///
    /// # Panics
    ///
    /// If `name` cannot be the name of a header.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::header("x-request-id").prefix("request:");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn header<N>(name: N) -> Self
    where
        N: TryInto<HeaderName, Error: fmt::Display>,
    {
        match header::named(name) {
            Ok(name) => Self::of(Source::Header(name)),
            Err(mistake) => panic!("{mistake}"),
        }
    }

    /// The value of a piece of gRPC metadata, read as `T`. It must be there exactly once. See
    /// [one thing, one name](#one-thing-one-name).
    ///
    /// # Panics
    ///
    /// As [`metadata`](Self::metadata).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::metadata_as::<u64>("order-id").prefix("order:");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn metadata_as<T>(key: impl TryInto<HeaderName, Error: fmt::Display>) -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        Self::metadata(key).all_as(Type::of::<T>())
    }

    /// The value of a piece of gRPC metadata, **as it is**: two spellings of one thing are two
    /// locks. See [one thing, one name](#one-thing-one-name). The piece must be there exactly once.
    ///
    /// # Panics
    ///
    /// If `key` cannot be the key of metadata, or is that of binary metadata (`…-bin`). A binary
    /// value has several texts in base64, so decode it in [`from_fn`](Self::from_fn).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::metadata("request-id").prefix("request:");
    /// # drop(key);
    /// ```
    #[track_caller]
    pub fn metadata<N>(key: N) -> Self
    where
        N: TryInto<HeaderName, Error: fmt::Display>,
    {
        match header::metadata(key) {
            Ok(key) => Self::of(Source::Metadata(key)),
            Err(mistake) => panic!("{mistake}"),
        }
    }

    /// The name of the gRPC method that is called, such as `shop.Orders/Settle`. So each method
    /// handles one call at a time, over all servers.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::grpc_method().prefix("grpc:");
    /// # drop(key);
    /// ```
    pub fn grpc_method() -> Self {
        Self::of(Source::GrpcMethod)
    }

    /// The value of a query parameter, such as `id` in `/orders?id=42`, read as `T`. It must be
    /// there exactly once. See [one thing, one name](#one-thing-one-name).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::query_as::<u64>("id").prefix("order:");
    /// # drop(key);
    /// ```
    pub fn query_as<T>(parameter: impl Into<String>) -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        Self::query(parameter).all_as(Type::of::<T>())
    }

    /// The value of a query parameter, decoded, and otherwise **as it is**: two spellings of one
    /// thing are two locks. See [one thing, one name](#one-thing-one-name). The parameter must be
    /// there exactly once.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::query("file").prefix("file:");
    /// # drop(key);
    /// ```
    pub fn query(parameter: impl Into<String>) -> Self {
        Self::of(Source::Query(parameter.into().into()))
    }

    /// The text that `show` makes of an extension of the request, for example of the user that is
    /// logged in. An outer layer must have added the extension. The closure's argument has the type
    /// of the extension.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    /// }
    ///
    /// let key = Key::extension(|user: &User| user.id).prefix("user:");
    /// # drop(key);
    /// ```
    pub fn extension<T, D>(show: impl Fn(&T) -> D + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
        D: fmt::Display,
    {
        let find = move |extensions: &http::Extensions, name: &mut String| {
            let extension = extensions.get::<T>()?;
            Some(fmt::Write::write_fmt(
                name,
                format_args!("{}", show(extension)),
            ))
        };
        Self::of(Source::Extension(
            Arc::new(find),
            std::any::type_name::<T>(),
        ))
    }

    /// The value of a path parameter, such as `id` in `/orders/{id}`, read as `T`. Give the type
    /// that the handler extracts: then all spellings of one order are one lock. See [one thing, one
    /// name](#one-thing-one-name).
    ///
    /// The layer must be where the route is known: see [where it may
    /// stand](crate#where-it-may-stand).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::path_as::<u64>("id").prefix("order:");
    /// # drop(key);
    /// ```
    #[cfg(feature = "axum")]
    #[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
    pub fn path_as<T>(parameter: impl Into<String>) -> Self
    where
        T: FromStr<Err: fmt::Display> + fmt::Display,
    {
        Self::path(parameter).all_as(Type::of::<T>())
    }

    /// The value of a path parameter, decoded, and otherwise **as it is**. For a handler that takes
    /// a number, `/orders/12` and `/orders/012` are one order, but two locks: see [one thing, one
    /// name](#one-thing-one-name).
    ///
    /// The layer must be where the route is known: see [where it may
    /// stand](crate#where-it-may-stand).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::path("name").prefix("file:");
    /// # drop(key);
    /// ```
    #[cfg(feature = "axum")]
    #[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
    pub fn path(parameter: impl Into<String>) -> Self {
        Self::of(Source::Path(parameter.into().into()))
    }

    /// The route that matched, such as `/orders/{id}`, without the values of its parameters. So
    /// each route handles one request at a time. The layer must be where the route is known, as for
    /// [`path`](Self::path).
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// let key = Key::matched_path().prefix("route:");
    /// # drop(key);
    /// ```
    #[cfg(feature = "axum")]
    #[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
    pub fn matched_path() -> Self {
        Self::of(Source::MatchedPath)
    }

    /// Puts a text before the name: `Key::path_as::<u64>("id").prefix("order:")` locks
    /// `order:42`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.template.pieces.insert(0, Piece::Text(prefix.into()));
        self
    }

    /// Lets a request pass **without a lock** if it lacks the header, the parameter, or another
    /// piece of the name. Default: it is refused.
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// Locks only requests for which `condition` is true. All others pass **without a lock**.
    ///
    /// ```
    /// use lockcore_tower::Key;
    ///
    /// // Only writes exclude each other.
    /// let key = Key::query_as::<u64>("document").when(|request| !request.method.is_safe());
    /// # drop(key);
    /// ```
    pub fn when(mut self, condition: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.when = Some(Arc::new(condition));
        self
    }

    fn of(source: Source) -> Self {
        Self::new(Template::of(source))
    }

    fn all_as(mut self, wanted: Type) -> Self {
        for piece in &mut self.template.pieces {
            if let Piece::Value(_, read_as) = piece {
                *read_as = Some(wanted);
            }
        }
        self
    }

    fn new(template: Template) -> Self {
        Self {
            template,
            optional: false,
            when: None,
        }
    }

    /// The template as the label of the locks. `None` if a function makes a part of the name.
    pub(crate) fn label(&self) -> Option<String> {
        self.template.label()
    }

    /// The name to lock; `None` if the request needs no lock.
    pub(crate) fn find(&self, parts: &mut Parts) -> Result<Option<String>, Problem> {
        if self.when.as_ref().is_some_and(|when| !when(parts)) {
            return Ok(None);
        }
        match self.name(parts) {
            Ok(name) => Ok(Some(name)),
            Err(Missing::Unwanted) => Ok(None),
            Err(Missing::Absent(_)) if self.optional => Ok(None),
            Err(Missing::Absent(source)) => Err(source.absent()),
            Err(Missing::Unusable(problem)) => Err(problem),
        }
    }

    fn name(&self, parts: &mut Parts) -> Result<String, Missing<'_>> {
        let mut writer = Writer {
            name: String::new(),
            delimiters: &self.template.delimiters,
            read_as: None,
        };
        let mut last = None;
        for piece in &self.template.pieces {
            match piece {
                Piece::Text(text) => writer.name.push_str(text),
                Piece::Value(source, read_as) => {
                    writer.read_as = *read_as;
                    source.write(parts, &mut writer)?;
                    last = Some(source);
                }
            }
            // Checked after every piece, also after a text: so the answer names the value that has
            // made the name too long.
            if let Some(source) = last {
                source.check_length(&writer.name)?;
            }
        }
        Ok(writer.name)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("template", &self.template)
            .field("optional", &self.optional)
            .field("when", &self.when.as_ref().map(|_| "a function"))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use http::{Request, StatusCode};

    use super::*;
    use crate::refusal::Answers;

    /// Tries every pair of values of up to three characters. The characters are those with a
    /// special meaning.
    #[test]
    fn no_two_requests_share_a_name_unless_their_values_agree() {
        let characters = ["%", ":", "3", "A", "-"];
        let mut values = vec![String::new()];
        for length in 1..=3 {
            let shorter: Vec<String> = values
                .iter()
                .filter(|v| v.len() == length - 1)
                .cloned()
                .collect();
            let longer = shorter
                .iter()
                .flat_map(|v| characters.map(|char| format!("{v}{char}")));
            values.extend(longer.collect::<Vec<_>>());
        }
        for template in [
            "{header.a}:{header.b}",
            "3A{header.a}%3A:3A{header.b}:",
            "{header.a}-:{header.b}",
        ] {
            let key = Key::template(template);
            let mut names = HashMap::new();
            // The empty value is left out, because it is refused.
            for a in &values[1..] {
                for b in &values[1..] {
                    let request = Request::builder().header("a", a).header("b", b);
                    let (mut parts, ()) = request.body(()).unwrap().into_parts();
                    let name = key.find(&mut parts).ok().flatten().unwrap();
                    if let Some(other) = names.insert(name.clone(), (a, b)) {
                        panic!("{template}: {name} is of {other:?} and of {:?}", (a, b));
                    }
                }
            }
        }
    }

    #[test]
    fn a_single_value_is_not_escaped() {
        let key = Key::template("order:{header.id}:open");
        let request = Request::builder().header("id", "a:b%c");
        let (mut parts, ()) = request.body(()).unwrap().into_parts();

        let name = key.find(&mut parts).ok().flatten();

        assert_eq!(name.as_deref(), Some("order:a:b%c:open"));
    }

    #[test]
    fn a_value_that_leaves_no_room_for_the_text_after_it_is_the_mistake_of_the_client() {
        let key = Key::template("order:{header.id}:open");
        let find = |length| {
            let request = Request::builder().header("id", "x".repeat(length));
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            key.find(&mut parts)
        };
        let longest = 4096 - "order::open".len();

        assert_eq!(find(longest).unwrap().unwrap().len(), 4096);
        let problem = find(longest + 1).unwrap_err();
        assert_eq!(problem.status(&Answers::default()), StatusCode::BAD_REQUEST);
        let (_, message) = problem.grpc();
        assert!(
            message.contains("The header \"id\" is too long"),
            "{message}"
        );
    }
}
