//! The type that a function returns, as it is written. The macro sees only names. If a type of the
//! user has the name of a well-known type, the macro takes it for the well-known type.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{
    GenericArgument, ParenthesizedGenericArguments, PathArguments, Type, TypeParamBound, TypePath,
};

/// A type in the output that is used after the lock has been released. The macro only sees its
/// name.
pub(crate) struct Later {
    pub(crate) kind: LaterKind,
    /// The part of the output that the error message points at.
    pub(crate) tokens: TokenStream,
}

#[derive(Clone, Copy)]
pub(crate) enum LaterKind {
    Future,
    Stream,
    /// An HTTP response: its body is read after the function has returned.
    Response,
    /// A spawned task.
    Task,
    /// A spawned thread of the standard library.
    Thread,
}

/// The crates whose types the macro knows by name, and the modules in `task::JoinHandle` and
/// `thread::JoinHandle`. If a path begins with another name, it means another type.
const KNOWN: [&str; 22] = [
    "async_stream",
    "axum",
    "axum_core",
    "axum_extra",
    "futures",
    "futures_core",
    "futures_util",
    "http",
    "http_body",
    "http_body_util",
    "hyper",
    "poem",
    "reqwest",
    "std",
    "task",
    "thread",
    "tokio",
    "tokio_stream",
    "tokio_util",
    "tonic",
    "tower_http",
    "warp",
];

impl Later {
    pub(crate) fn find(output: &Type) -> Option<Later> {
        let mut search = Search(None);
        search.visit_type_mut(&mut output.clone());
        search.0
    }

    fn of_type(ty: &Type) -> Option<Later> {
        let kind = match ty {
            Type::ImplTrait(it) => Self::of_bounds(&it.bounds),
            Type::TraitObject(it) => Self::of_bounds(&it.bounds),
            Type::Path(it) => Self::of_path(it),
            _ => None,
        };
        Some(Later {
            kind: kind?,
            tokens: ty.to_token_stream(),
        })
    }

    fn of_bounds<'a>(bounds: impl IntoIterator<Item = &'a TypeParamBound>) -> Option<LaterKind> {
        bounds.into_iter().find_map(|bound| match bound {
            TypeParamBound::Trait(bound) => {
                match bound.path.segments.last()?.ident.to_string().as_str() {
                    "Future" | "TryFuture" | "IntoFuture" => Some(LaterKind::Future),
                    "Stream" | "TryStream" | "AsyncIterator" => Some(LaterKind::Stream),
                    _ => None,
                }
            }
            _ => None,
        })
    }

    fn of_path(ty: &TypePath) -> Option<LaterKind> {
        let segments = &ty.path.segments;
        let (first, last) = (segments.first()?, segments.last()?);
        let name = last.ident.to_string();
        // An associated type of a service, as in the code that tonic generates.
        let is_associated = ty.qself.is_some() || segments.len() > 1 && first.ident == "Self";
        if is_associated {
            return name.ends_with("Stream").then_some(LaterKind::Stream);
        }
        // The user's own types may have the same names.
        let is_other = segments.len() > 1 && !KNOWN.iter().any(|it| first.ident == it);
        let is_of_a_thread = segments.iter().any(|it| it.ident == "thread");
        match name.as_str() {
            "BoxFuture" | "LocalBoxFuture" => Some(LaterKind::Future),
            "BoxStream" | "LocalBoxStream" => Some(LaterKind::Stream),
            _ if is_other => None,
            // If the type of the body is given, the search looks at that type. The `Response` of
            // tonic has no type of a body.
            "Response" if last.arguments.is_empty() => Some(LaterKind::Response),
            "Body" | "BoxBody" | "Incoming" | "StreamBody" | "UnsyncBoxBody" => {
                Some(LaterKind::Response)
            }
            "AsyncStream"
            | "BroadcastStream"
            | "FuturesOrdered"
            | "FuturesUnordered"
            | "IntervalStream"
            | "LinesStream"
            | "ReaderStream"
            | "ReceiverStream"
            | "SelectAll"
            | "Sse"
            | "StreamMap"
            | "Streaming"
            | "UnboundedReceiverStream"
            | "WatchStream" => Some(LaterKind::Stream),
            "JoinHandle" if is_of_a_thread => Some(LaterKind::Thread),
            "JoinHandle" | "JoinSet" => Some(LaterKind::Task),
            _ => None,
        }
    }
}

impl LaterKind {
    pub(crate) fn message(self, is_async: bool) -> &'static str {
        match (self, is_async) {
            (Self::Future, true) => {
                "the lock would be released before this future runs: `.await` it in the body, and return its output"
            }
            (Self::Future, false) => {
                "the lock would be released before this future runs: write an `async fn` that returns its output"
            }
            (Self::Stream, _) => {
                "the lock would be released before this stream is read: read it in the body of an \
                 `async fn`, or keep the lock with `lockcore_tower::LockLayer`, which releases it when a \
                 response has ended, or take it inside of the stream with `Lock::acquire`"
            }
            (Self::Response, _) => {
                "the lock would be released before the body of this response is read: keep it with \
                 `lockcore_tower::LockLayer`, which releases it when the body has ended, or return what \
                 is complete, such as `Json<…>` or `String`; if this is a type of your own, write `self::` before its \
                 name, or import it by another name, with `use … as …`"
            }
            (Self::Task, _) => {
                "the lock would be released while this task goes on: `.await` it in the body, and return its output"
            }
            (Self::Thread, _) => {
                "the lock would be released while this thread goes on: write \
                 `tokio::task::spawn_blocking(…).await` in the body, and return its output"
            }
        }
    }
}

/// An error type of another crate, recognized by its name. The user cannot write `impl
/// From<lockcore::Error>` for it. If a type of the user's own crate has this name and that `impl`,
/// it works as any other type.
#[derive(Clone, Copy)]
pub(crate) enum Foreign {
    /// `std::io::Error`
    Io,
    /// `tonic::Status`
    Status,
    /// `http::StatusCode`
    StatusCode,
    Text,
    Cow,
    /// `&'static str`
    StaticText,
    /// `()`
    Unit,
    Tuple,
}

impl Foreign {
    /// The error type of `Result<_, Foreign>`, or of the alias `io::Result<_>` or
    /// `tonic::Result<_>`.
    pub(crate) fn of(output: &Type) -> Option<Foreign> {
        let Type::Path(result) = output else {
            return None;
        };
        let last_two = |ty: &TypePath| {
            let mut names = ty.path.segments.iter().map(|it| it.ident.to_string());
            let last = names.next_back().unwrap_or_default();
            (names.next_back().unwrap_or_default(), last)
        };
        let result_names = last_two(result);
        let (of, "Result") = (result_names.0.as_str(), result_names.1.as_str()) else {
            return None;
        };
        match (failure(output), of) {
            (None, "io") => Some(Foreign::Io),
            (None, "tonic") => Some(Foreign::Status),
            (None, _) => None,
            (Some(Type::Tuple(tuple)), _) if tuple.elems.is_empty() => Some(Foreign::Unit),
            (Some(Type::Tuple(_)), _) => Some(Foreign::Tuple),
            (Some(Type::Reference(text)), _) => match &*text.elem {
                Type::Path(text) if text.path.is_ident("str") => Some(Foreign::StaticText),
                _ => None,
            },
            (Some(Type::Path(failure)), _) => {
                let (of, name) = last_two(failure);
                match (of.as_str(), name.as_str()) {
                    ("io", "Error") => Some(Foreign::Io),
                    (_, "Status") => Some(Foreign::Status),
                    (_, "StatusCode") => Some(Foreign::StatusCode),
                    (_, "String") => Some(Foreign::Text),
                    (_, "Cow") => Some(Foreign::Cow),
                    _ => None,
                }
            }
            (Some(_), _) => None,
        }
    }
}

struct Search(Option<Later>);

impl VisitMut for Search {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if self.0.is_none() {
            self.0 = Later::of_type(ty);
            visit_mut::visit_type_mut(self, ty);
        }
    }

    /// `impl Fn() -> BoxFuture<…>` is a function that makes futures, not a future.
    fn visit_parenthesized_generic_arguments_mut(&mut self, _: &mut ParenthesizedGenericArguments) {
    }
}

/// The `E` in `Result<T, E>`.
pub(crate) fn failure(output: &Type) -> Option<&Type> {
    let Type::Path(path) = output else {
        return None;
    };
    let PathArguments::AngleBracketed(arguments) = &path.path.segments.last()?.arguments else {
        return None;
    };
    match (arguments.args.get(1)?, arguments.args.len()) {
        (GenericArgument::Type(failure), 2) => Some(failure),
        _ => None,
    }
}

/// The span of the last name in a path: stable Rust gives no span for the whole of `app::Error`.
pub(crate) fn type_name_span(ty: &Type) -> Span {
    match ty {
        Type::Path(path) => match path.path.segments.last() {
            Some(last) => last.ident.span(),
            None => ty.span(),
        },
        _ => ty.span(),
    }
}
