//! Writes the locked function. All names in it are hygienic: the user's body and options see none of
//! them, and no variable of the user's is in their way.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Path, ReturnType, Type, parse_quote};

use crate::args::Args;
use crate::function::Function;
use crate::mistakes::Mistakes;
use crate::model::{Key, Length, Model, Patience, Side};

/// The whole attribute: the locked function, or every mistake and the function as it was.
pub(crate) fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut mistakes = Mistakes::default();
    let args = Args::parse(args, &mut mistakes);
    let model = Model::check(&args, &mut mistakes);
    let function = mistakes.keep(syn::parse2::<Function>(item.clone()));
    if let Some(function) = &function {
        function.check(&mut mistakes);
    }
    match (model, function, mistakes.compile_errors()) {
        (Some(model), Some(function), None) => locked(&model, &function),
        (_, Some(function), errors) => {
            let function = unlocked(&args, &function);
            quote!(#errors #function)
        }
        (_, None, errors) => quote!(#errors #item),
    }
}

/// ```text
/// async fn settle(order: &Order) -> Result<Receipt, SettleError> {
///     let lock = { /* the options, once */ };
///     let acquired = match lock {
///         Ok(lock) => lock.acquire().await,
///         Err(error) => Err(error),
///     };
///     let returned = match acquired {
///         Ok(guard) => guard.run(async move { Ok(async move { /* the body */ }.await) }).await,
///         Err(error) => Err(error),
///     };
///     match returned {
///         Ok(returned) => returned,
///         Err(error) => lockcore::__private::refused(error),
///     }
/// }
/// ```
///
/// Every lock error ends in the one call of `refused`: what the user's return type lacks is said
/// once. To `run` the body cannot fail, so `run` asks nothing of that type.
fn locked(model: &Model, function: &Function) -> TokenStream {
    let site = Span::mixed_site();
    let lock = lock(model);
    let acquire = match model.patience {
        Patience::Try => quote_spanned!(site=> try_acquire),
        _ => quote_spanned!(site=> acquire),
    };
    let held = model
        .held
        .as_ref()
        .map(|held| quote_spanned!(site=> let #held = guard.held();));
    let fake_return = fake_return(function);
    let block = function.block();
    let refused = refused(&model.lockcore, function.failure_span());
    function.with_body(&quote_spanned! {site=>
        let lock = #lock;
        let acquired = match lock {
            ::core::result::Result::Ok(lock) => lock.#acquire().await,
            ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
        };
        let returned = match acquired {
            ::core::result::Result::Ok(guard) => {
                #held
                guard
                    .run(async move {
                        ::core::result::Result::Ok(async move { #fake_return #block }.await)
                    })
                    .await
            }
            ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
        };
        match returned {
            ::core::result::Result::Ok(returned) => returned,
            ::core::result::Result::Err(error) => #refused(error),
        }
    })
}

/// Evaluates the options and builds a `Result<Lock, Error>` from them. A block, so that nothing of it
/// is alive while the lock is waited for: what an option borrows need not be `Send`.
fn lock(model: &Model) -> TokenStream {
    let site = Span::mixed_site();
    let lockcore = &model.lockcore;
    let (key, label) = match &model.key {
        Key::Template(template) => {
            let (format, arguments) = (&template.format, &template.arguments);
            let key = quote_spanned!(site=> ::std::format!(#format #(, #arguments)*));
            (key, template.literal.to_token_stream())
        }
        Key::Expr(expr) => {
            let key =
                quote_spanned!(site=> ::core::convert::Into::<::std::string::String>::into(#expr));
            (key, quote_spanned!(site=> ::core::stringify!(#expr)))
        }
    };
    let side = match model.side {
        Side::Exclusive => quote_spanned!(site=> mutex(key)),
        Side::Shared => quote_spanned!(site=> rwlock(key).read()),
    };
    let wait = match &model.patience {
        Patience::Default | Patience::Try => None,
        Patience::Forever => Some(quote_spanned!(site=> #lockcore::Wait::Forever)),
        Patience::For(length) => Some(duration(length)),
    };
    let wait = wait.map(|wait| quote_spanned!(site=> .wait(#wait)));
    let ttl = model.ttl.as_ref().map(duration);
    let ttl = ttl.map(|ttl| quote_spanned!(site=> .ttl(#ttl)));
    let lock = quote_spanned! {site=>
        ::core::result::Result::Ok(locks.#side.label(#label)#wait #ttl)
    };
    let lock = match &model.locks {
        Some(locks) => {
            // The span puts a wrong type's error at the expression.
            let locks = quote_spanned!(site.located_at(locks.span())=> &(#locks));
            quote_spanned! {site=>
                let locks: &#lockcore::Locks = #locks;
                #lock
            }
        }
        None => quote_spanned! {site=>
            match #lockcore::default_locks() {
                ::core::result::Result::Ok(locks) => #lock,
                ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
            }
        },
    };
    quote_spanned! {site=>
        {
            let key: ::std::string::String = #key;
            #lock
        }
    }
}

fn duration(length: &Length) -> TokenStream {
    match length {
        Length::Known(length) => {
            let (secs, nanos) = (length.as_secs(), length.subsec_nanos());
            quote_spanned!(Span::mixed_site()=> ::core::time::Duration::new(#secs, #nanos))
        }
        Length::Expr(expr) => expr.to_token_stream(),
    }
}

/// Turns a lock error into what the user returns. Located where the user's error type stands: there
/// the compiler says that it lacks its `From` impl.
fn refused(lockcore: &Path, failure: Span) -> TokenStream {
    let lockcore = lockcore.to_token_stream().into_iter().map(|mut token| {
        token.set_span(token.span().located_at(failure));
        token
    });
    let site = Span::mixed_site().located_at(failure);
    quote_spanned!(site=> #(#lockcore)*::__private::refused)
}

/// A `return` that never happens and tells the compiler the type of the `async` block, so that a
/// body of another type is reported where the user wrote it (as `tracing-attributes` does).
fn fake_return(function: &Function) -> TokenStream {
    let ReturnType::Type(_, output) = function.output() else {
        return TokenStream::new();
    };
    let mut output = output.clone();
    EraseImplTrait.visit_type_mut(&mut output);
    quote_spanned! {Span::mixed_site().located_at(output.span())=>
        #[allow(
            unknown_lints,
            unreachable_code,
            clippy::diverging_sub_expression,
            clippy::empty_loop,
            clippy::let_unit_value,
            clippy::let_with_type_underscore,
            clippy::needless_return,
            clippy::unreachable
        )]
        if false {
            let output: #output = loop {};
            return output;
        }
    }
}

/// `impl Trait` may not stand in the type of a variable; `_` may.
struct EraseImplTrait;

impl VisitMut for EraseImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        match ty {
            Type::ImplTrait(_) => *ty = parse_quote!(_),
            _ => visit_mut::visit_type_mut(self, ty),
        }
    }
}

/// The function as the user wrote it, so that callers and body do not add errors of their own: the
/// body knows the variable that `held` would have bound, and no argument is blamed for being unused
/// when only the key uses it.
fn unlocked(args: &Args, function: &Function) -> TokenStream {
    let lockcore = args.lockcore();
    let held = args.held.as_ref().map(|held| {
        quote_spanned! {Span::mixed_site()=>
            let #held: #lockcore::Held = (|| loop {})();
        }
    });
    let block = function.block();
    let function = function.with_body(&quote!(#held #block));
    quote!(#[allow(unused_variables)] #function)
}
