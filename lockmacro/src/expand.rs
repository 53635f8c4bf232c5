//! Writes the locked function. All names in it are hygienic: the user's body and options see none of
//! them but `error`, and no variable of the user's is in their way.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, Path, Type, UnOp, parse_quote};

use crate::args::{Args, Given, OnLost};
use crate::function::{Foreign, Function};
use crate::mistakes::Mistakes;
use crate::model::{Key, Keys, Length, Model, OnBusy, Patience, Side, without_groups};
use crate::template::Format;

/// The whole attribute: the locked function, or every mistake and the function as it was.
pub(crate) fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut mistakes = Mistakes::default();
    let args = Args::parse(args, &mut mistakes);
    let model = Model::check(&args, &mut mistakes);
    let function = mistakes.keep(syn::parse2::<Function>(item.clone()));
    if let Some(function) = &function {
        function.check(&args, &mut mistakes);
    }
    match (model, function, mistakes.compile_errors()) {
        (Some(model), Some(function), None) => locked(&model, &function),
        (_, Some(function), errors) => {
            let function = unlocked(&args, function);
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
///         Ok(guard) => {
///             let body = infallible(async move { /* the body */ });
///             guard.run(body).await
///         }
///         Err(error) if is_busy(&error) => Ok(/* on_busy */),
///         Err(error) => Err(error),
///     };
///     match returned {
///         Ok(returned) => returned,
///         Err(error) => /* on_error, or */ Refused::refused(error),
///     }
/// }
/// ```
///
/// Every lock error ends in the one call of `refused`: what the user's return type lacks is said
/// once. To `run` the body cannot fail, so `run` asks nothing of that type. The body takes its
/// arguments with it, so that they are gone when the lock is released.
///
/// With `when` there is `Some(guard)` or `None`, and the body is one all the same.
fn locked(model: &Model, function: &Function) -> TokenStream {
    let site = Span::mixed_site();
    let acquire = match model.patience {
        Patience::Try => quote_spanned!(site=> try_acquire),
        _ => quote_spanned!(site=> acquire),
    };
    let (guarded, guard_held, run) = match model.when {
        None => (
            None,
            quote_spanned!(site=> guard.held()),
            quote_spanned!(site=> guard.run(body).await),
        ),
        Some(_) => (
            Some(quote_spanned!(site=> .map(::core::option::Option::Some))),
            quote_spanned!(site=> guard.as_ref().map(|guard| guard.held())),
            quote_spanned! {site=>
                match guard {
                    ::core::option::Option::Some(guard) => guard.run(body).await,
                    ::core::option::Option::None => body.await,
                }
            },
        ),
    };
    let lock = function.as_in_the_body(lock(model, &function.names_of_arguments()));
    let acquired = quote_spanned! {site=>
        let lock = #lock;
        let acquired = match lock {
            ::core::result::Result::Ok(lock) => lock.#acquire().await #guarded,
            ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
        };
    };
    let acquired = match &model.when {
        None => acquired,
        Some(when) => {
            let when = binding("when", when, |span| quote_spanned!(span=> bool));
            let when = function.as_in_the_body(when);
            quote_spanned! {site=>
                #when
                let acquired = if when {
                    #acquired
                    acquired
                } else {
                    ::core::result::Result::Ok(::core::option::Option::None)
                };
            }
        }
    };
    let held = model.held.as_ref();
    let held = held.map(|held| quote_spanned!(site=> let #held = #guard_held;));
    let lockcore = lockcore(model.crate_path.as_ref());
    let body = typed_body(function);
    let busy = model.on_busy.as_ref().map(|it| busy(model, function, it));
    let refused = match &model.on_error {
        Some(on_error) => instead(function, on_error),
        None => refused(model, function),
    };
    // Where the compiler says that the body takes an argument with it.
    let body = quote_spanned! {site.located_at(function.name_span())=>
        async move { #body }
    };
    function.with_body(&quote_spanned! {site=>
        #acquired
        let returned = match acquired {
            ::core::result::Result::Ok(guard) => {
                #held
                let body = #lockcore::__private::infallible(#body);
                #run
            }
            #busy
            ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
        };
        match returned {
            ::core::result::Result::Ok(returned) => returned,
            #[allow(unreachable_code)]
            ::core::result::Result::Err(error) => #refused,
        }
    })
}

/// Evaluates the options and builds a `Result` of a `Lock` or `MultiLock` from them. A block, so that
/// nothing of it is alive while the lock is waited for: what an option borrows need not be `Send`.
fn lock(model: &Model, names_of_arguments: &[Ident]) -> TokenStream {
    let site = Span::mixed_site();
    let crate_path = model.crate_path.as_ref();
    let lockcore = lockcore(crate_path);
    let (keys, label) = keys(model, names_of_arguments);
    let locks = match &model.locks {
        Some(Given { name, value }) => {
            let ty = in_lockcore(crate_path, name.span(), "Locks");
            let ty = quote_spanned!(name.span()=> &#ty);
            // The span puts a wrong type's error at the expression.
            let value = quote_spanned!(value.span()=> &(#value));
            quote_spanned!(site=> let locks: #ty = #value;)
        }
        None => quote_spanned!(site=> let locks = #lockcore::default_locks();),
    };

    // What belongs to each lock, and how it is used there.
    let mut bindings = TokenStream::new();
    let mut setters = TokenStream::new();
    let side = match &model.side {
        Side::Exclusive => quote_spanned!(site=> mutex(key)),
        Side::Shared => quote_spanned!(site=> rwlock(key).read()),
        Side::Permits { permits, of } => {
            bindings.extend(binding(
                "permits",
                permits,
                |span| quote_spanned!(span=> u32),
            ));
            bindings.extend(binding("of", of, |span| quote_spanned!(span=> u32)));
            quote_spanned!(site=> semaphore(key, of).permits(permits))
        }
    };
    let wait = match &model.patience {
        Patience::Default | Patience::Try => None,
        Patience::Forever => {
            bindings.extend(quote_spanned!(site=> let wait = #lockcore::Wait::Forever;));
            Some(())
        }
        Patience::For(Length::Known(length)) => {
            let length = duration(*length);
            bindings.extend(quote_spanned!(site=> let wait = #length;));
            Some(())
        }
        Patience::For(Length::Expr(Given { name, value })) => {
            let wait = in_lockcore(crate_path, name.span(), "__private::IntoWait::into_wait");
            bindings.extend(quote_spanned!(site=> let wait = #wait(#value);));
            Some(())
        }
    };
    let wait = wait.map(|()| quote_spanned!(site=> .wait(wait)));
    for (setter, length) in [
        ("ttl", &model.ttl),
        ("min_hold", &model.min_hold),
        ("max_hold", &model.max_hold),
    ] {
        let Some(length) = length else { continue };
        let setter = Ident::new(setter, site);
        bindings.extend(match length {
            Length::Known(length) => {
                let length = duration(*length);
                quote_spanned!(site=> let #setter = #length;)
            }
            Length::Expr(given) => binding(
                &setter.to_string(),
                given,
                |span| quote_spanned!(span=> ::core::time::Duration),
            ),
        });
        setters.extend(quote_spanned!(site=> .#setter(#setter)));
    }
    if let Some(reentrant) = &model.reentrant {
        bindings.extend(binding(
            "reentrant",
            reentrant,
            |span| quote_spanned!(span=> bool),
        ));
        setters.extend(quote_spanned!(site=> .reentrant(reentrant)));
    }
    if let Some(policy) = model.on_lost {
        let policy = match policy {
            OnLost::Cancel => quote_spanned!(site=> Cancel),
            OnLost::Signal => quote_spanned!(site=> Signal),
        };
        setters.extend(quote_spanned!(site=> .on_lost(#lockcore::OnLost::#policy)));
    }

    let lock = match model.keys {
        Keys::One(_) => quote_spanned!(site=> locks.#side #setters),
        Keys::List(_) | Keys::Expr(_) => quote_spanned! {site=>
            #lockcore::Locks::all(::core::iter::Iterator::map(
                ::core::iter::IntoIterator::into_iter(#lockcore::__private::each_once(key)),
                |key| locks.#side #setters,
            ))
        },
    };
    let lock = quote_spanned!(site=> ::core::result::Result::Ok(#lock.label(#label) #wait));
    let lock = match &model.locks {
        Some(_) => lock,
        None => quote_spanned! {site=>
            match locks {
                ::core::result::Result::Ok(locks) => #lock,
                ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
            }
        },
    };
    quote_spanned! {site=>
        {
            #keys
            #locks
            #bindings
            #lock
        }
    }
}

/// Binds `key` to the name, or to an iterator of the names, and gives what labels them.
fn keys(model: &Model, names_of_arguments: &[Ident]) -> (TokenStream, TokenStream) {
    let site = Span::mixed_site();
    let crate_path = model.crate_path.as_ref();
    let lockcore = lockcore(crate_path);
    let one = |key: &Key| match key {
        Key::Template(template) => {
            let Format { format, arguments } = template.format(names_of_arguments);
            let arguments = arguments.iter().map(|argument| {
                let expr = &argument.expr;
                let span = template.literal.span();
                match argument.is_displayed {
                    true => quote_spanned!(span=> #lockcore::__private::key_part(&&#expr)),
                    false => expr.to_token_stream(),
                }
            });
            let key = quote_spanned!(site=> ::std::format!(#format #(, #arguments)*));
            // Ours, so that clippy does not take it for a `format!` that was forgotten.
            let mut label = template.literal.clone();
            label.set_span(site.located_at(label.span()));
            (key, label.into_token_stream())
        }
        Key::Expr(expr) => {
            let key = in_lockcore(crate_path, expr.span(), "__private::IntoKey::into_key");
            let not_moved = without_moving(&lockcore, expr);
            let key = quote_spanned!(site=> #key(#not_moved));
            (key, as_written(expr))
        }
    };
    match &model.keys {
        Keys::One(key) => {
            let (key, label) = one(key);
            (quote_spanned!(site=> let key = #key;), label)
        }
        Keys::List(keys) => {
            let (keys, labels): (Vec<_>, Vec<_>) = keys.iter().map(one).unzip();
            let (first, others) = labels.split_first().expect("checked not to be empty");
            (
                quote_spanned!(site=> let key = [#(#keys),*];),
                quote_spanned!(site=> ::core::concat!(#first #(, ", ", #others)*)),
            )
        }
        Keys::Expr(expr) => {
            let keys = in_lockcore(crate_path, expr.span(), "__private::IntoKeys::into_keys");
            let not_moved = without_moving(&lockcore, expr);
            (
                quote_spanned!(site=> let key = #keys(#not_moved);),
                as_written(expr),
            )
        }
    }
}

/// A copy of a variable or of a part of one: it stays where it is, for the body. If its type is not `Clone`, it is moved.
///
/// Which of the two is decided by the type of `copy`'s error. For `Clone` there is no such error, so the call of
/// `identity` does not return, and the compiler sees no move behind it.
fn without_moving(lockcore: &TokenStream, expr: &Expr) -> TokenStream {
    if !is_place(expr) {
        return expr.to_token_stream();
    }
    let span = Span::mixed_site().located_at(expr.span());
    let reference = quote_spanned!(span=> &#expr);
    let copy = quote_spanned! {span=>
        use #lockcore::__private::OrMoved as _;
        let copy = #lockcore::__private::Place(#reference).copy();
        #[allow(unreachable_code, unreachable_patterns)]
        match copy {
            ::core::result::Result::Ok(copy) => copy,
            ::core::result::Result::Err(moved) => {
                ::core::convert::identity(moved);
                #expr
            }
        }
    };
    quote_spanned!(expr.span()=> { #copy })
}

/// A variable or a part of one. No part of what a call returns: `without_moving` writes the place twice.
fn is_place(expr: &Expr) -> bool {
    match without_groups(expr) {
        Expr::Path(_) => true,
        Expr::Field(it) => is_place(&it.base),
        Expr::Index(it) => is_place(&it.expr),
        Expr::Unary(it) => matches!(it.op, UnOp::Deref(_)) && is_place(&it.expr),
        _ => false,
    }
}

/// A text, and not what `stringify!` would make of it later: `#[async_trait]` calls `self` otherwise.
fn as_written(expr: &Expr) -> TokenStream {
    Literal::string(&expr.to_token_stream().to_string()).into_token_stream()
}

/// `let variable: Type = value;`. The type stands where the option is named: there the compiler says
/// that it expects it.
fn binding(variable: &str, given: &Given, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
    let site = Span::mixed_site();
    let variable = Ident::new(variable, site);
    let (ty, value) = (ty(given.name.span()), &given.value);
    quote_spanned!(site=> let #variable: #ty = #value;)
}

fn duration(length: std::time::Duration) -> TokenStream {
    let (secs, nanos) = (length.as_secs(), length.subsec_nanos());
    quote_spanned!(Span::mixed_site()=> ::core::time::Duration::new(#secs, #nanos))
}

/// The arm for a lock that another holds.
fn busy(model: &Model, function: &Function, on_busy: &OnBusy) -> TokenStream {
    let site = Span::mixed_site();
    let crate_path = model.crate_path.as_ref();
    let lockcore = lockcore(crate_path);
    let returned = match on_busy {
        OnBusy::Skip(span) => {
            let skipped = in_lockcore(crate_path, *span, "__private::Skipped::skipped");
            quote_spanned!(*span=> #skipped())
        }
        OnBusy::Expr(expr) => instead(function, expr),
    };
    quote_spanned! {site=>
        #[allow(unreachable_code)]
        ::core::result::Result::Err(error) if #lockcore::__private::is_busy(&error) => {
            ::core::result::Result::Ok(#returned)
        }
    }
}

/// What the function returns with a lock error and without `on_error`.
fn refused(model: &Model, function: &Function) -> TokenStream {
    let span = function.failure_span();
    let error = Ident::new("error", Span::mixed_site().located_at(span));
    let in_private = |path: &str| {
        let path = format!("__private::{path}");
        in_lockcore(model.crate_path.as_ref(), span, &path)
    };
    // Traits that do the same, each with words of its own for what cannot be made from a lock error.
    let from = match function.foreign_failure() {
        None => {
            let refused = in_private("Refused::refused");
            return quote_spanned!(span=> #refused(#error));
        }
        Some(Foreign::Io) => "IoFromLockError::from_lock_error",
        Some(Foreign::Status) => "StatusFromLockError::from_lock_error",
        Some(Foreign::StatusCode) => "StatusCodeFromLockError::from_lock_error",
        Some(Foreign::Text) => "TextFromLockError::from_lock_error",
        Some(Foreign::Tuple) => "TupleFromLockError::from_lock_error",
    };
    let from = in_private(from);
    quote_spanned!(span=> ::core::result::Result::Err(#from(#error)))
}

/// What an option says that the function returns instead of what its body would. The type makes it
/// wrong where it is written. `error` is the one name that we give to the user's tokens.
fn instead(function: &Function, expr: &Expr) -> TokenStream {
    let site = Span::mixed_site();
    let ty = match output(function) {
        Some(output) => output.to_token_stream(),
        None => quote_spanned!(function.name_span()=> ()),
    };
    let error = Ident::new("error", expr.span());
    let expr = function.as_in_the_body(expr.to_token_stream());
    quote_spanned! {site=>
        {
            #[allow(unused_variables)]
            let #error = error;
            #[allow(clippy::diverging_sub_expression, clippy::let_unit_value)]
            let returned: #ty = #expr;
            returned
        }
    }
}

/// The body, with a `return` before it that never happens and tells the compiler the type of the `async` block, so
/// that a body of another type is reported where the user wrote it (as `tracing-attributes` does).
///
/// What stands in the body is in a block of its own, so that clippy does not take its items to come too late.
fn typed_body(function: &Function) -> TokenStream {
    let site = Span::mixed_site();
    let body = as_an_arm(function);
    let fake_return = output(function).map(|output| {
        quote_spanned! {output.span()=>
            #[allow(
                unknown_lints,
                unreachable_code,
                unused_variables,
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
    });
    quote_spanned! {site=>
        #fake_return
        #body
    }
}

/// The body as the arm of a `match`. There its braces are needed, however short it is: elsewhere the compiler warns of
/// them.
fn as_an_arm(function: &Function) -> TokenStream {
    let block = function.block();
    quote_spanned! {Span::mixed_site()=>
        match () {
            () => #block
        }
    }
}

/// The function's output as the type of a variable.
fn output(function: &Function) -> Option<Type> {
    let mut output = function.output()?.clone();
    EraseImplTrait.visit_type_mut(&mut output);
    Some(output)
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

/// The path to the crate.
fn lockcore(crate_path: Option<&Path>) -> TokenStream {
    match crate_path {
        Some(path) => path.to_token_stream(),
        None => quote_spanned!(Span::mixed_site()=> ::lockcore),
    }
}

/// A path inside of the crate, standing where the compiler should point when a type does not fit it.
fn in_lockcore(crate_path: Option<&Path>, span: Span, path: &str) -> TokenStream {
    let lockcore = lockcore(crate_path).into_iter().map(|mut token| {
        token.set_span(match crate_path {
            Some(_) => token.span().located_at(span),
            None => span,
        });
        token
    });
    let segments = path.split("::").map(|it| Ident::new(it, span));
    quote_spanned!(span=> #(#lockcore)* #(::#segments)*)
}

/// The function as the user means it, so that callers and body do not add errors of their own: it is async, the
/// body knows the variable that `held` would have bound, and no argument is blamed for being unused
/// when only the key uses it.
fn unlocked(args: &Args, mut function: Function) -> TokenStream {
    function.make_async();
    let site = Span::mixed_site();
    let held = args.held.as_ref().map(|held| {
        let lockcore = lockcore(args.crate_path.as_ref());
        let mut ty = match args.name("keys") {
            Some(_) => quote_spanned!(site=> #lockcore::MultiHeld),
            None => quote_spanned!(site=> #lockcore::Held),
        };
        if args.name("when").is_some() {
            ty = quote_spanned!(site=> ::core::option::Option<#ty>);
        }
        quote_spanned!(site=> let #held: #ty = (|| loop {})();)
    });
    let body = as_an_arm(&function);
    let function = function.with_body(&quote!(#held #body));
    quote!(#[allow(unused_variables)] #function)
}
