//! The function under the attribute: its head is parsed, its body stays as the user wrote it.

use std::mem;

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote_spanned};
use syn::parse::{Parse, ParseStream, Parser};
use syn::spanned::Spanned;
use syn::token::Brace;
use syn::visit_mut::{self, VisitMut};
use syn::{
    AssocType, Attribute, Block, Error, Expr, GenericArgument, Local,
    ParenthesizedGenericArguments, Pat, PathArguments, ReturnType, Signature, Token, Type,
    TypeParamBound, Visibility, braced,
};

use crate::args::Args;
use crate::mistakes::Mistakes;

pub(crate) struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    signature: Signature,
    brace: Brace,
    inner_attrs: Vec<Attribute>,
    body: Body,
    /// What a call comes to, once it is awaited; `None` where nothing is written.
    output: Option<Type>,
}

enum Body {
    /// Of an `async fn`, without its braces.
    Own(TokenStream),
    /// In what `#[async_trait]` has made of an `async fn`; it comes before the attributes inside of
    /// its trait or impl: `Box::pin(async move { let __self = self; let __ret: T = { … }; __ret })`.
    InAsyncTrait { around: Block, own: TokenStream },
    /// `#[async_trait]` has been here, but what it left is not as above.
    Unknown(TokenStream),
}

impl Function {
    /// Tells everything that keeps this function from being locked.
    pub(crate) fn check(&self, args: &Args, mistakes: &mut Mistakes) {
        let signature = &self.signature;
        if let Body::Unknown(_) = self.body {
            mistakes.push(Error::new_spanned(
                &signature.ident,
                "`#[distributed_lock]` does not find the body in what `#[async_trait]` made of this \
                 function: move it to an `async fn` of its own, lock that, and call it from here",
            ));
            return;
        }
        if let Some(constness) = &signature.constness {
            mistakes.push(Error::new_spanned(
                constness,
                "a `const fn` cannot wait for a lock: remove `const`",
            ));
        }
        let is_async =
            signature.asyncness.is_some() || matches!(self.body, Body::InAsyncTrait { .. });
        let later = self.output.as_ref().and_then(Later::find);
        match (&later, is_async) {
            (Some(later), _) => {
                let message = match (later.is_future, is_async) {
                    (true, true) => {
                        "the lock would be released before this future runs: `.await` it in the body, \
                         and return what it comes to"
                    }
                    (true, false) => {
                        "the lock would be released before this future runs: write an `async fn` that \
                         returns what the future comes to"
                    }
                    (false, _) => {
                        "the lock would be released before this stream is read: read it in the body of \
                         an `async fn`, or take the lock inside of the stream with `Lock::acquire`"
                    }
                };
                mistakes.push(Error::new_spanned(&later.tokens, message));
            }
            (None, false) => mistakes.push(Error::new_spanned(
                signature.fn_token,
                "a locked function waits for its lock, so it has to be async: write `async fn`",
            )),
            (None, true) => {}
        }
        // What else is no `Result`, the compiler tells: aliases look like anything.
        if self.output.is_none() && later.is_none() && args.name("on_error").is_none() {
            mistakes.push(Error::new_spanned(
                &signature.ident,
                "asking for the lock can fail: write `-> Result<(), MyError>` and `impl From<lockcore::Error> \
                 for MyError`, or say what to do then, as in `on_error = eprintln!(\"{error}\")`",
            ));
        }
    }

    /// What a call comes to, once it is awaited; `None` where nothing is written.
    pub(crate) fn output(&self) -> Option<&Type> {
        self.output.as_ref()
    }

    pub(crate) fn name_span(&self) -> Span {
        self.signature.ident.span()
    }

    /// Where a compiler error about the function's error type belongs: at `E` where the output is
    /// written `Result<T, E>`, else at the name of what is probably an alias.
    pub(crate) fn failure_span(&self) -> Span {
        match &self.output {
            Some(output) => type_name_span(failure(output).unwrap_or(output)),
            None => self.signature.ident.span(),
        }
    }

    /// `{ … }`: the body, without its inner attributes.
    pub(crate) fn block(&self) -> TokenStream {
        match &self.body {
            Body::Own(statements) | Body::Unknown(statements) => {
                let mut tokens = TokenStream::new();
                self.brace
                    .surround(&mut tokens, |tokens| statements.to_tokens(tokens));
                tokens
            }
            Body::InAsyncTrait { own, .. } => own.clone(),
        }
    }

    /// This function with another body.
    pub(crate) fn with_body(&self, body: &TokenStream) -> TokenStream {
        let mut tokens = TokenStream::new();
        for attr in &self.attrs {
            attr.to_tokens(&mut tokens);
        }
        self.vis.to_tokens(&mut tokens);
        self.signature.to_tokens(&mut tokens);
        self.brace.surround(&mut tokens, |tokens| {
            for attr in &self.inner_attrs {
                attr.to_tokens(tokens);
            }
            match &self.body {
                Body::Own(_) | Body::Unknown(_) => body.to_tokens(tokens),
                Body::InAsyncTrait { around, .. } => {
                    let body = quote_spanned!(Span::mixed_site()=> { #body });
                    let mut around = around.clone();
                    Exchange::in_block(&mut around, Expr::Verbatim(body));
                    around.stmts.iter().for_each(|it| it.to_tokens(tokens));
                }
            }
        });
        tokens
    }

    /// An option's tokens where they see what the body sees: `#[async_trait]` has moved `self`.
    pub(crate) fn as_in_the_body(&self, option: TokenStream) -> TokenStream {
        match self.body {
            Body::InAsyncTrait { .. } => rename_self(option),
            Body::Own(_) | Body::Unknown(_) => option,
        }
    }
}

impl Parse for Function {
    fn parse(input: ParseStream) -> syn::Result<Function> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        let signature: Signature = input.parse().map_err(|error| {
            let message = format!("`#[distributed_lock]` goes on an `async fn`: {error}");
            Error::new(error.span(), message)
        })?;
        if input.peek(Token![;]) {
            return Err(Error::new_spanned(
                signature.ident,
                "there is no body to lock here: put `#[distributed_lock]` on the implementations",
            ));
        }
        let content;
        let brace = braced!(content in input);
        let inner_attrs = content.call(Attribute::parse_inner)?;
        let statements: TokenStream = content.parse()?;
        let written = match &signature.output {
            ReturnType::Default => None,
            ReturnType::Type(_, output) => Some((**output).clone()),
        };
        let (body, output) = match written {
            Some(future) if is_rewritten_by_async_trait(&signature) => {
                in_async_trait(&statements, &future).unwrap_or((Body::Unknown(statements), None))
            }
            output => (Body::Own(statements), output),
        };
        Ok(Function {
            attrs,
            vis,
            signature,
            brace,
            inner_attrs,
            body,
            output,
        })
    }
}

/// `#[async_trait]` leaves a lifetime of this name.
fn is_rewritten_by_async_trait(signature: &Signature) -> bool {
    let mut lifetimes = signature.generics.lifetimes();
    lifetimes.any(|it| it.lifetime.ident == "async_trait")
}

/// The body, and what it comes to; `None` if `#[async_trait]` has left something else.
fn in_async_trait(statements: &TokenStream, future: &Type) -> Option<(Body, Option<Type>)> {
    let stmts = Block::parse_within.parse2(statements.clone()).ok()?;
    let mut around = Block {
        brace_token: Brace::default(),
        stmts,
    };
    let exchange = Exchange::in_block(&mut around, Expr::PLACEHOLDER);
    let Expr::Block(own) = exchange.expr else {
        return None;
    };
    let output = match exchange.done? {
        Variable::Ret => Some(output_of(future)?),
        Variable::Unit => None,
    };
    let own = own.to_token_stream();
    Some((Body::InAsyncTrait { around, own }, output))
}

/// Exchanges what `#[async_trait]` binds to a variable of its own, which is the user's block. It is the
/// first such variable, also where `#[instrument]` has been there in between.
struct Exchange {
    expr: Expr,
    done: Option<Variable>,
}

#[derive(Clone, Copy)]
enum Variable {
    /// `__ret: T`
    Ret,
    /// `_: ()`, where no output is written.
    Unit,
}

impl Exchange {
    fn in_block(block: &mut Block, expr: Expr) -> Exchange {
        let mut exchange = Exchange { expr, done: None };
        exchange.visit_block_mut(block);
        exchange
    }
}

impl VisitMut for Exchange {
    fn visit_local_mut(&mut self, local: &mut Local) {
        if self.done.is_some() {
            return;
        }
        match (Variable::of(&local.pat), &mut local.init) {
            (Some(variable), Some(init)) => {
                mem::swap(&mut *init.expr, &mut self.expr);
                self.done = Some(variable);
            }
            _ => visit_mut::visit_local_mut(self, local),
        }
    }
}

impl Variable {
    fn of(pat: &Pat) -> Option<Variable> {
        let Pat::Type(variable) = pat else {
            return None;
        };
        match (&*variable.pat, &*variable.ty) {
            (Pat::Ident(name), _) if name.ident == "__ret" => Some(Variable::Ret),
            (Pat::Wild(_), Type::Tuple(unit)) if unit.elems.is_empty() => Some(Variable::Unit),
            _ => None,
        }
    }
}

/// `T` of `Pin<Box<dyn Future<Output = T> + 'async_trait>>`.
fn output_of(future: &Type) -> Option<Type> {
    struct Output(Option<Type>);
    impl VisitMut for Output {
        fn visit_assoc_type_mut(&mut self, binding: &mut AssocType) {
            if self.0.is_none() && binding.ident == "Output" {
                self.0 = Some(binding.ty.clone());
            }
        }
    }
    let mut output = Output(None);
    output.visit_type_mut(&mut future.clone());
    output.0
}

/// `self` as `#[async_trait]` calls it; the `self` of a path stays.
fn rename_self(tokens: TokenStream) -> TokenStream {
    let mut tokens = tokens.into_iter().peekable();
    let mut renamed = TokenStream::new();
    while let Some(token) = tokens.next() {
        let is_path = matches!(tokens.peek(), Some(TokenTree::Punct(it)) if it.as_char() == ':');
        renamed.extend([match token {
            TokenTree::Ident(it) if it == "self" && !is_path => {
                Ident::new("__self", it.span()).into()
            }
            TokenTree::Group(group) => {
                let mut inside = Group::new(group.delimiter(), rename_self(group.stream()));
                inside.set_span(group.span());
                inside.into()
            }
            other => other,
        }]);
    }
    renamed
}

/// Something in the output that is used when the lock is released already.
struct Later {
    is_future: bool,
    /// The part of the output, to point at.
    tokens: TokenStream,
}

impl Later {
    fn find(output: &Type) -> Option<Later> {
        let mut search = Search(None);
        search.visit_type_mut(&mut output.clone());
        search.0
    }

    fn of_type(ty: &Type) -> Option<Later> {
        let is_future = match ty {
            Type::ImplTrait(it) => Self::of_bounds(&it.bounds),
            Type::TraitObject(it) => Self::of_bounds(&it.bounds),
            Type::Path(it) => match it.path.segments.last()?.ident.to_string().as_str() {
                "BoxFuture" | "LocalBoxFuture" => Some(true),
                "BoxStream" | "LocalBoxStream" => Some(false),
                _ => None,
            },
            _ => None,
        };
        Some(Later {
            is_future: is_future?,
            tokens: ty.to_token_stream(),
        })
    }

    fn of_bounds<'a>(bounds: impl IntoIterator<Item = &'a TypeParamBound>) -> Option<bool> {
        bounds.into_iter().find_map(|bound| match bound {
            TypeParamBound::Trait(bound) => {
                match bound.path.segments.last()?.ident.to_string().as_str() {
                    "Future" | "TryFuture" | "IntoFuture" => Some(true),
                    "Stream" | "TryStream" | "AsyncIterator" => Some(false),
                    _ => None,
                }
            }
            _ => None,
        })
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

    /// `impl Fn() -> BoxFuture<…>` makes futures, and is none.
    fn visit_parenthesized_generic_arguments_mut(&mut self, _: &mut ParenthesizedGenericArguments) {
    }
}

/// `E` of `Result<T, E>`.
fn failure(output: &Type) -> Option<&Type> {
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

/// The last name of a path: a span that covers `app::Error` whole cannot be had on stable.
fn type_name_span(ty: &Type) -> Span {
    match ty {
        Type::Path(path) => match path.path.segments.last() {
            Some(last) => last.ident.span(),
            None => ty.span(),
        },
        _ => ty.span(),
    }
}
