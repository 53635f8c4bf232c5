//! Writes the locked function. All names in it are hygienic: they do not clash with the user's
//! variables. The user's body and options can use none of them except `error`.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, Path, Type, UnOp, parse_quote};

use crate::args::{Args, Given, OnLost, OnRevoke};
use crate::function::Function;
use crate::mistakes::Mistakes;
use crate::model::{Key, Keys, Length, Model, OnBusy, Patience, Side, without_groups};
use crate::output::Foreign;
use crate::template::Format;

/// Expands the attribute: returns the locked function, or all mistakes together with the function
/// without a lock.
pub(crate) fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut mistakes = Mistakes::default();
    let args = Args::parse(args, &mut mistakes);
    let model = Model::check(&args, &mut mistakes);
    let function = mistakes.keep(syn::parse2::<Function>(item.clone()));
    if let Some(function) = &function {
        function.check(&args, &mut mistakes);
        if let Some(model) = &model {
            check_keys(model, function, &mut mistakes);
        }
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

/// Reports placeholders that are written as other libraries write them.
fn check_keys(model: &Model, function: &Function, mistakes: &mut Mistakes) {
    let keys = match &model.keys {
        Keys::One(key) => std::slice::from_ref(key),
        Keys::List(keys) => keys,
        Keys::Expr(_) => &[],
    };
    for key in keys {
        if let Key::Template(template) = key {
            mistakes.keep(template.check_placeholders(&function.names_in_a_key()));
        }
    }
}

/// ```text
/// async fn settle(order: &Order) -> Result<Receipt, SettleError> {
///     let lock = { /* the options, once */ };
///     let acquired = match lock {
///         Ok(lock) => lock.acquire().await,
///         Err(error) => Err(error),
///     };
///     match match acquired {
///         Ok(guard) => {
///             let body = infallible(async move { /* the body */ });
///             guard.run(body).await
///         }
///         Err(error) if is_busy(&error) => Ok(/* on_busy */),
///         Err(error) => Err(error),
///     } {
///         Ok(returned) => returned,
///         Err(error) => /* on_error, or */ Refused::refused(error),
///     }
/// }
/// ```
///
/// The two `match` are one statement. If a statement followed the last use of `acquired`, clippy would
/// ask for an earlier drop of it.
///
/// Every lock error reaches the one call of `refused`, so the compiler reports an unsuitable return
/// type only once. `infallible` wraps the body, so `run` has no requirements on the return type.
/// The body owns the arguments that it uses, so they are dropped before the lock is released.
///
/// With `when`, the guard is `Some(guard)` or `None`, so one copy of the body is enough.
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
    let lock = lock(model, &function.names_of_arguments_of_known_type());
    let lock = function.as_in_the_body(lock);
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
    // The span where the compiler reports that the body moves an argument.
    let body = quote_spanned! {site.located_at(function.name_span())=>
        async move { #body }
    };
    function.with_body(&quote_spanned! {site=>
        #acquired
        match match acquired {
            ::core::result::Result::Ok(guard) => {
                #held
                let body = #lockcore::__private::infallible(#body);
                #run
            }
            #busy
            ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
        } {
            ::core::result::Result::Ok(returned) => returned,
            #[allow(unreachable_code)]
            ::core::result::Result::Err(error) => #refused,
        }
    })
}

/// Evaluates the options, and builds a `Result` of a `Lock` or `MultiLock` from them. The code is a
/// block, so that no temporary value lives during the wait for the lock. So the values that an
/// option borrows need not be `Send`.
fn lock(model: &Model, names_of_arguments: &[Ident]) -> TokenStream {
    let site = Span::mixed_site();
    let crate_path = model.crate_path.as_ref();
    let lockcore = lockcore(crate_path);
    let (keys, label) = keys(model, names_of_arguments);
    let locks = match &model.locks {
        Some(Given { name, value }) => {
            let ty = in_lockcore(crate_path, name.span(), "Locks");
            let ty = quote_spanned!(name.span()=> &#ty);
            // With this span, the compiler reports a wrong type at the expression.
            let value = quote_spanned!(value.span()=> &(#value));
            quote_spanned!(site=> let locks: #ty = #value;)
        }
        None => quote_spanned!(site=> let locks = #lockcore::default_locks();),
    };

    // `bindings` evaluates the options of each lock, `setters` passes them to the lock.
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
        ("linger", &model.linger),
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
    for (setter, yes) in [
        ("reentrant", &model.reentrant),
        ("through_outages", &model.through_outages),
    ] {
        let Some(yes) = yes else { continue };
        bindings.extend(binding(setter, yes, |span| quote_spanned!(span=> bool)));
        let setter = Ident::new(setter, site);
        setters.extend(quote_spanned!(site=> .#setter(#setter)));
    }
    if let Some(policy) = model.on_lost {
        let policy = match policy {
            OnLost::Cancel => quote_spanned!(site=> Cancel),
            OnLost::Signal => quote_spanned!(site=> Signal),
        };
        setters.extend(quote_spanned!(site=> .on_lost(#lockcore::OnLost::#policy)));
    }
    if let Some(policy) = model.on_revoke {
        let policy = match policy {
            OnRevoke::Cancel => quote_spanned!(site=> Cancel),
            OnRevoke::Finish => quote_spanned!(site=> Finish),
        };
        setters.extend(quote_spanned!(site=> .on_revoke(#lockcore::OnRevoke::#policy)));
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

/// Binds `key` to the name, or to an iterator over the names. Also returns the label.
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
                    true => quote_spanned!(span=> #lockcore::__private::key_part(&&#expr, || ())),
                    false => expr.to_token_stream(),
                }
            });
            let key = quote_spanned!(site=> ::std::format!(#format #(, #arguments)*));
            // The literal gets a span of the macro, because clippy would otherwise suggest a
            // `format!` around it.
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

/// A clone of a variable, or of a part of a variable, so that the body can use it too. If its type
/// is not `Clone`, the value is moved.
///
/// The error type of `copy` decides between the two. For a type that is `Clone`, this error type
/// has no values. So the call of `identity` never returns, and the compiler sees no move after it.
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

/// Whether this is a variable or a part of one. A part of a value that a function returns is no
/// such place: `without_moving` writes the expression twice, so the function would be called twice.
fn is_place(expr: &Expr) -> bool {
    match without_groups(expr) {
        Expr::Path(_) => true,
        Expr::Field(it) => is_place(&it.base),
        Expr::Index(it) => is_place(&it.expr),
        Expr::Unary(it) => matches!(it.op, UnOp::Deref(_)) && is_place(&it.expr),
        _ => false,
    }
}

/// The expression as a literal. `stringify!` would give another text later, because
/// `#[async_trait]` renames `self`.
fn as_written(expr: &Expr) -> TokenStream {
    Literal::string(&expr.to_token_stream().to_string()).into_token_stream()
}

/// `let variable: Type = value;`. The type has the span of the option's name, so the compiler
/// points there to say which type it expects.
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

/// The match arm for the case that another holds the lock.
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

/// The value that the function returns for a lock error if there is no `on_error`.
fn refused(model: &Model, function: &Function) -> TokenStream {
    let span = function.failure_span();
    let error = Ident::new("error", Span::mixed_site().located_at(span));
    let in_private = |path: &str| {
        let path = format!("__private::{path}");
        in_lockcore(model.crate_path.as_ref(), span, &path)
    };
    // These traits do the same as `Refused`. Each has its own error message for a type that cannot
    // be made from a lock error.
    let from = match function.foreign_failure() {
        None => {
            let refused = in_private("Refused::refused");
            return quote_spanned!(span=> #refused(#error));
        }
        Some(Foreign::Io) => "IoFromLockError::from_lock_error",
        Some(Foreign::Status) => "StatusFromLockError::from_lock_error",
        Some(Foreign::StatusCode) => "StatusCodeFromLockError::from_lock_error",
        Some(Foreign::Text) => "TextFromLockError::from_lock_error",
        Some(Foreign::Cow) => "CowFromLockError::from_lock_error",
        Some(Foreign::StaticText) => "StaticTextFromLockError::from_lock_error",
        Some(Foreign::Unit) => "UnitFromLockError::from_lock_error",
        Some(Foreign::Tuple) => "TupleFromLockError::from_lock_error",
    };
    let from = in_private(from);
    quote_spanned!(span=> ::core::result::Result::Err(#from(#error)))
}

/// The value of an option that the function returns instead of the value of its body. The `let`
/// states the type, so that the compiler reports a wrong type at the option. `error` is the only
/// name that the user's tokens can use.
fn instead(function: &Function, expr: &Expr) -> TokenStream {
    let site = Span::mixed_site();
    let ty = match output(function) {
        Some(output) => output.to_token_stream(),
        None => quote_spanned!(function.name_span()=> ()),
    };
    let error = Ident::new("error", expr.span());
    let expr = function.as_in_the_body(expr.to_token_stream());
    let returned = match is_never(function) {
        true => expr,
        false => quote_spanned! {site=>
            #[allow(clippy::diverging_sub_expression, clippy::let_unit_value)]
            let returned: #ty = #expr;
            returned
        },
    };
    quote_spanned! {site=>
        {
            #[allow(unused_variables)]
            let #error = error;
            #returned
        }
    }
}

/// Whether the function never returns. Stable Rust has no variables of the type `!`.
fn is_never(function: &Function) -> bool {
    matches!(output(function), Some(Type::Never(_)))
}

/// The body, after a `return` that is never reached. The `return` tells the compiler the type of
/// the `async` block. So the compiler reports a body of another type where the user wrote it (as in
/// `tracing-attributes`).
///
/// The body is in its own block, because clippy would otherwise report that its items come after
/// statements.
fn typed_body(function: &Function) -> TokenStream {
    let site = Span::mixed_site();
    let body = as_an_arm(function);
    let fake_return = output(function)
        .filter(|_| !is_never(function))
        .map(|output| {
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

/// The body as the arm of a `match`. Braces are never superfluous there. In other places the
/// compiler warns about braces around a short body.
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

/// Replaces `impl Trait` with `_`, because `impl Trait` is not allowed in the type of a variable.
struct EraseImplTrait;

impl VisitMut for EraseImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        match ty {
            Type::ImplTrait(_) => *ty = parse_quote!(_),
            _ => visit_mut::visit_type_mut(self, ty),
        }
    }
}

/// The path to the `lockcore` crate.
fn lockcore(crate_path: Option<&Path>) -> TokenStream {
    match crate_path {
        Some(path) => path.to_token_stream(),
        None => quote_spanned!(Span::mixed_site()=> ::lockcore),
    }
}

/// A path inside of the `lockcore` crate, with the span that the compiler should point at if a type
/// does not fit.
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

/// The function without a lock, changed so that its callers and its body cause no further errors.
/// It is async, and the body has the variable that `held` would bind. An argument that only the key
/// uses is not reported as unused.
fn unlocked(args: &Args, mut function: Function) -> TokenStream {
    function.make_async();
    let site = Span::mixed_site();
    let held = args.held.as_ref();
    let held = held.filter(|held| !function.has_argument(held));
    let held = held.map(|held| {
        let lockcore = lockcore(args.crate_path.as_ref());
        let mut ty = match args.name("keys") {
            Some(_) => quote_spanned!(site=> #lockcore::multi::MultiHeld),
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
