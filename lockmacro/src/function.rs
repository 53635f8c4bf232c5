//! The function under the attribute: its head is parsed, its body stays as the user wrote it.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::token::Brace;
use syn::{
    Attribute, Error, GenericArgument, PathArguments, ReturnType, Signature, Token, Type,
    Visibility, braced,
};

use crate::mistakes::Mistakes;

pub(crate) struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    signature: Signature,
    brace: Brace,
    inner_attrs: Vec<Attribute>,
    statements: TokenStream,
}

impl Function {
    /// Tells everything that keeps this function from being locked.
    pub(crate) fn check(&self, mistakes: &mut Mistakes) {
        let signature = &self.signature;
        if self.is_rewritten_by_async_trait() {
            mistakes.push(Error::new_spanned(
                &signature.ident,
                "`#[distributed_lock]` does not work inside `#[async_trait]` yet: move the body to an \
                 `async fn` of its own, lock that, and call it from here",
            ));
            return;
        }
        if let Some(constness) = &signature.constness {
            mistakes.push(Error::new_spanned(
                constness,
                "a `const fn` cannot wait for a lock: remove `const`",
            ));
        }
        if signature.asyncness.is_none() {
            mistakes.push(Error::new_spanned(
                signature.fn_token,
                "a locked function waits for its lock, so it has to be async: write `async fn`",
            ));
        }
        // What else is no `Result`, the compiler tells: aliases look like anything.
        if let ReturnType::Default = signature.output {
            mistakes.push(Error::new_spanned(
                &signature.ident,
                "asking for the lock can fail, so the function returns a `Result`: write \
                 `-> Result<(), MyError>` and `impl From<lockcore::Error> for MyError`",
            ));
        }
    }

    pub(crate) fn output(&self) -> &ReturnType {
        &self.signature.output
    }

    /// Where a compiler error about the function's error type belongs: at `E` where the output is
    /// written `Result<T, E>`, else at the name of what is probably an alias.
    pub(crate) fn failure_span(&self) -> Span {
        match &self.signature.output {
            ReturnType::Type(_, output) => type_name_span(failure(output).unwrap_or(output)),
            ReturnType::Default => self.signature.ident.span(),
        }
    }

    /// `{ … }`: the body, without its inner attributes.
    pub(crate) fn block(&self) -> TokenStream {
        let mut tokens = TokenStream::new();
        self.brace
            .surround(&mut tokens, |tokens| self.statements.to_tokens(tokens));
        tokens
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
            body.to_tokens(tokens);
        });
        tokens
    }

    /// `#[async_trait]` on the trait or impl comes first and leaves a lifetime of this name.
    fn is_rewritten_by_async_trait(&self) -> bool {
        let mut lifetimes = self.signature.generics.lifetimes();
        lifetimes.any(|it| it.lifetime.ident == "async_trait")
    }
}

impl Parse for Function {
    fn parse(input: ParseStream) -> syn::Result<Function> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        let signature = input.parse().map_err(|error| {
            let message = format!("`#[distributed_lock]` goes on an `async fn`: {error}");
            Error::new(error.span(), message)
        })?;
        if input.peek(Token![;]) {
            return Err(Error::new_spanned(
                signature,
                "there is no body to lock here: put `#[distributed_lock]` on the implementations",
            ));
        }
        let body;
        let brace = braced!(body in input);
        Ok(Function {
            attrs,
            vis,
            signature,
            brace,
            inner_attrs: body.call(Attribute::parse_inner)?,
            statements: body.parse()?,
        })
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
