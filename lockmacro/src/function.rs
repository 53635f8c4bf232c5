//! The function under the attribute. Its signature is parsed; its body is kept as the user wrote
//! it.

use std::mem;

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote_spanned};
use syn::parse::{Parse, ParseStream, Parser};
use syn::token::Brace;
use syn::visit_mut::{self, VisitMut};
use syn::{
    AssocType, Attribute, Block, Error, Expr, FnArg, Local, Meta, Pat, PatIdent, ReturnType,
    Signature, Token, Type, Visibility, braced,
};

use crate::args::{Args, Given};
use crate::mistakes::Mistakes;
use crate::output::{Foreign, Later, LaterKind, failure, type_name_span};

pub(crate) struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    signature: Signature,
    brace: Brace,
    inner_attrs: Vec<Attribute>,
    body: Body,
    /// The type that a call returns after `.await`; `None` if no return type is written.
    output: Option<Type>,
}

enum Body {
    /// The body of an `async fn`, without its braces.
    Own(TokenStream),
    /// The body inside of the code that `#[async_trait]` has generated from an `async fn`:
    /// `Box::pin(async move { let __self = self; let __ret: T = { … }; __ret })`. `#[async_trait]`
    /// stands on the trait or impl, so it is expanded before the attributes inside.
    InAsyncTrait { around: Block, own: TokenStream },
    /// `#[async_trait]` has been expanded, but its code does not have the form above.
    Unknown(TokenStream),
}

impl Function {
    /// Reports every reason why this function cannot be locked.
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
        if let Some(attribute) = self.runtime_above() {
            let message = format!(
                "swap the attributes: `#[{attribute}]` makes a sync function, so `#[distributed_lock(…)]` has to stand \
                 above it"
            );
            mistakes.push(Error::new_spanned(&signature.ident, message));
            return;
        }
        if let Some(again) = self.same_lock_below(args) {
            let message = "the attribute above takes the same lock: remove one of the two";
            mistakes.push(Error::new_spanned(again, message));
        }
        let later = self.output.as_ref().and_then(Later::find);
        if let Some(later) = later {
            let message = later.kind.message(self.is_async());
            mistakes.push(Error::new_spanned(&later.tokens, message));
        }
        if self.lacks_async() {
            mistakes.push(Error::new_spanned(
                signature.fn_token,
                "a locked function waits for its lock, so it has to be async: write `async fn`",
            ));
        }
        if let Some(held) = &args.held
            && self.has_argument(held)
        {
            let message = format!(
                "`held = {held}` hides the argument `{held}` in the body: choose another name, as in `held = lock`"
            );
            mistakes.push(Error::new_spanned(held, message));
        }
        // Other types that are not a `Result` are left to the compiler, because an alias of
        // `Result` can have any name.
        if self.output.is_none() && args.name("on_error").is_none() {
            mistakes.push(Error::new_spanned(
                &signature.ident,
                "taking the lock can fail: write `-> Result<(), MyError>` and `impl From<lockcore::Error> \
                 for MyError`, or say what to do then, as in `on_error = eprintln!(\"{error}\")`",
            ));
        }
    }

    /// Whether the only mistake is a missing `async`. A function without `async` that returns a
    /// future or a stream gets another message.
    fn lacks_async(&self) -> bool {
        let later = self.output.as_ref().and_then(Later::find);
        let returns_future =
            later.is_some_and(|it| matches!(it.kind, LaterKind::Future | LaterKind::Stream));
        !self.is_async() && !returns_future
    }

    fn is_async(&self) -> bool {
        self.signature.asyncness.is_some() || matches!(self.body, Body::InAsyncTrait { .. })
    }

    /// Returns the name of tokio's attribute, if it stands above this one and has already been
    /// expanded. Its expansion is a sync function that builds a runtime and runs the body there.
    fn runtime_above(&self) -> Option<&'static str> {
        fn has(tokens: &TokenStream, text: &str) -> bool {
            tokens.clone().into_iter().any(|token| match token {
                TokenTree::Literal(literal) => literal.to_string() == text,
                TokenTree::Group(group) => has(&group.stream(), text),
                _ => false,
            })
        }
        let Body::Own(statements) = &self.body else {
            return None;
        };
        // The text of the `expect` in tokio's code.
        if self.is_async() || !has(statements, "\"Failed building the Runtime\"") {
            return None;
        }
        let is_test = self.attrs.iter().any(|attr| is_called(attr, "test"));
        Some(match is_test {
            true => "tokio::test",
            false => "tokio::main",
        })
    }

    /// The same attribute below this one, with the same key, client and condition.
    fn same_lock_below(&self, args: &Args) -> Option<&Attribute> {
        let lock = |args: &Args| {
            [&args.key, &args.keys, &args.locks, &args.when].map(|given: &Option<Given>| {
                let given = given.as_ref()?;
                Some(given.value.to_token_stream().to_string())
            })
        };
        let ours = lock(args);
        let has_key = ours[..2].iter().any(Option::is_some);
        let mut attrs = self.attrs.iter().filter(|_| has_key);
        attrs.find(|attr| match &attr.meta {
            Meta::List(list) if is_called(attr, "distributed_lock") => {
                let below = Args::parse(list.tokens.clone(), &mut Mistakes::default());
                lock(&below) == ours
            }
            _ => false,
        })
    }

    /// Makes a refused function async if it lacks `async`. Otherwise the compiler would also report
    /// every caller that awaits it. A `const fn` stays as it is, because its callers may be unable
    /// to await.
    ///
    /// A private method whose body awaits nothing stays as it is too: it may belong to a trait, and
    /// `async` would change its signature. If it does not belong to a trait, the compiler also
    /// reports its callers.
    pub(crate) fn make_async(&mut self) {
        let is_const = self.signature.constness.is_some();
        let may_be_of_a_trait = self.signature.receiver().is_some()
            && matches!(self.vis, Visibility::Inherited)
            && !awaits(&self.block());
        let stays = is_const || may_be_of_a_trait || self.runtime_above().is_some();
        if self.lacks_async() && !stays {
            self.signature.asyncness = Some(Token![async](self.signature.fn_token.span));
        }
    }

    /// The variables that the arguments bind, except `self`.
    pub(crate) fn names_of_arguments(&self) -> Vec<Ident> {
        struct Names(Vec<Ident>);
        impl VisitMut for Names {
            fn visit_pat_ident_mut(&mut self, pat: &mut PatIdent) {
                self.0.push(pat.ident.clone());
                visit_mut::visit_pat_ident_mut(self, pat);
            }
        }
        let mut names = Names(Vec::new());
        names.visit_signature_mut(&mut self.signature.clone());
        names.0
    }

    pub(crate) fn has_argument(&self, name: &Ident) -> bool {
        self.names_of_arguments().contains(name)
    }

    /// The variables that the arguments bind whose type is not a type parameter. For a type
    /// parameter, the compiler suggests a bound. If `format!` asks for the bound, this is `Display`.
    /// If our trait did, the compiler would suggest our trait, which is private.
    pub(crate) fn names_of_arguments_of_known_type(&self) -> Vec<Ident> {
        let generics = &self.signature.generics;
        let is_parameter = |ty: &Type| match ty {
            Type::Path(ty) => generics.type_params().any(|it| ty.path.is_ident(&it.ident)),
            _ => false,
        };
        let generic = self
            .signature
            .inputs
            .iter()
            .filter_map(|input| match input {
                FnArg::Typed(argument) => match (&*argument.pat, &*argument.ty) {
                    (Pat::Ident(name), Type::Reference(ty)) if is_parameter(&ty.elem) => {
                        Some(&name.ident)
                    }
                    (Pat::Ident(name), ty) if is_parameter(ty) => Some(&name.ident),
                    _ => None,
                },
                FnArg::Receiver(_) => None,
            });
        let generic: Vec<_> = generic.collect();
        let mut names = self.names_of_arguments();
        names.retain(|name| !generic.contains(&name));
        names
    }

    /// The names with which the placeholders of a key may begin.
    pub(crate) fn names_in_a_key(&self) -> Vec<Ident> {
        let mut names = self.names_of_arguments();
        names.extend(self.signature.receiver().map(|it| it.self_token.into()));
        names
    }

    /// The type that a call returns after `.await`; `None` if no return type is written.
    pub(crate) fn output(&self) -> Option<&Type> {
        self.output.as_ref()
    }

    pub(crate) fn name_span(&self) -> Span {
        self.signature.ident.span()
    }

    /// Where the compiler should report an error about the function's error type. If the output is
    /// written as `Result<T, E>`, this is at `E`. Otherwise it is at the name of the output, which
    /// is probably an alias.
    pub(crate) fn failure_span(&self) -> Span {
        match &self.output {
            Some(output) => type_name_span(failure(output).unwrap_or(output)),
            None => self.signature.ident.span(),
        }
    }

    /// The error type, if its name is the name of a well-known type of another crate.
    pub(crate) fn foreign_failure(&self) -> Option<Foreign> {
        Foreign::of(self.output.as_ref()?)
    }

    /// The body in its braces `{ … }`, without its inner attributes.
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

    /// This function, with `body` instead of its own.
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

    /// The tokens of an option, changed so that they mean the same as in the body: `#[async_trait]`
    /// has renamed `self`.
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

/// `#[async_trait]` adds a lifetime with this name.
fn is_rewritten_by_async_trait(signature: &Signature) -> bool {
    let mut lifetimes = signature.generics.lifetimes();
    lifetimes.any(|it| it.lifetime.ident == "async_trait")
}

/// The body and its type; `None` if the code of `#[async_trait]` has another form.
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

/// Replaces the user's block in the code of `#[async_trait]`. The block is the value of the first
/// variable that has one of the forms of [`Variable`]. This is also true if `#[instrument]` has
/// been expanded in between.
struct Exchange {
    expr: Expr,
    done: Option<Variable>,
}

#[derive(Clone, Copy)]
enum Variable {
    /// `__ret: T`
    Ret,
    /// `_: ()`, if no output is written.
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

/// The `T` in `Pin<Box<dyn Future<Output = T> + 'async_trait>>`.
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

/// Renames `self` to the name that `#[async_trait]` gives it. The `self` of a path stays as it is.
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

fn awaits(tokens: &TokenStream) -> bool {
    tokens.clone().into_iter().any(|token| match token {
        TokenTree::Ident(word) => word == "await",
        TokenTree::Group(group) => awaits(&group.stream()),
        _ => false,
    })
}

fn is_called(attr: &Attribute, name: &str) -> bool {
    let last = attr.path().segments.last();
    last.is_some_and(|last| last.ident == name)
}
