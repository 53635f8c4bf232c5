//! The attribute macro of `lockcore`. Depend on that crate, which re-exports the macro, not on this one.
//!
//! `args` reads the options, `template` the key, `function` the function; `model` is what is left when
//! all of it has been checked, and `expand` writes the locked function from it. No module gives up at
//! the first thing wrong: `mistakes` collects them.

#![warn(missing_docs, missing_debug_implementations, unreachable_pub)]

mod args;
mod expand;
mod function;
mod mistakes;
mod model;
mod template;

use proc_macro::TokenStream;

/// Runs an async function under a distributed lock: of all calls, in all processes, whose key is the
/// same, one runs at a time.
///
/// ```
/// use lockcore::{Locks, distributed_lock};
///
/// struct Order {
///     id: u64,
/// }
///
/// #[derive(Debug)]
/// enum SettleError {
///     Lock(lockcore::Error),
///     AlreadySettled,
/// }
///
/// impl From<lockcore::Error> for SettleError {
///     fn from(error: lockcore::Error) -> Self {
///         SettleError::Lock(error)
///     }
/// }
///
/// #[distributed_lock(key = "order:{order.id}", wait = "2s")]
/// async fn settle(order: &Order) -> Result<u64, SettleError> {
///     Ok(order.id)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), SettleError> {
/// // Or set LOCK_URL, and leave this out.
/// lockcore::init(Locks::connect("memory:")?)?;
///
/// assert_eq!(settle(&Order { id: 7 }).await?, 7);
/// # Ok(())
/// # }
/// ```
///
/// # Options
///
/// | option | value | when left out |
/// |---|---|---|
/// | `key` | which lock: a template over the arguments, or an expression | it has to be there |
/// | `wait` | how long to stand in line: `"2s"`, `"forever"`, or an expression | what the client is set to (`LOCK_WAIT`) |
/// | `try` | no value: do not wait at all; not together with `wait` | it waits |
/// | `ttl` | length of the lease: `"10s"` or an expression | what the client is set to (`LOCK_TTL`) |
/// | `shared` | no value: take the read side of the lock | it takes the write side |
/// | `locks` | the client, an expression | `lockcore::default_locks()` |
/// | `held` | a name for the lock inside the body | the body does not see it |
/// | `crate` | path to `lockcore`, where it is re-exported | `::lockcore` |
///
/// Every option is evaluated once, at the start of the call and before the lock is asked for: first
/// `key`, then `locks`, `wait`, `ttl`. They can use the arguments and `self`, and `?` in them returns
/// from the function.
///
/// ## `key`
///
/// The text between the braces of a template is an argument, `self`, a constant, or a field, index,
/// function call or method call on one: `"order:{id}"`, `"cart:{self.user_id()}"`,
/// `"{order.region}:{order.lines[0]}"`. After a `:` stands a format spec of [`std::fmt`], as in
/// `{order.id:08}`. A brace in the name is written twice, `{{` or `}}`.
///
/// For more, the key is any expression of a type that turns into a `String`:
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// # struct Order { id: u64 }
/// impl Order {
///     fn lock_name(&self) -> String {
///         format!("order:{}", self.id)
///     }
/// }
///
/// #[distributed_lock(key = order.lock_name())]
/// async fn settle(order: &Order) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// Different keys are different locks, and nothing is added to tell apart what the template does not:
/// `"{a}:{b}"` gives the same key for `"x:y", "z"` as for `"x", "y:z"`. Where arguments come from
/// outside, put those of free text last, or format them with `{a:?}`.
///
/// The template, not the key, labels traces: it has few values, and no personal data.
///
/// ## `wait`, `try` and `ttl`
///
/// Text is read while compiling, in the format of [`humantime`]: `"500ms"`, `"2s"`, `"1m 30s"`. An
/// expression is a `Duration`; for `wait` also a `lockcore::Wait`. A literal of zero is an error: for
/// `ttl`, because such a lease ends before it begins, for `wait`, because `try` says what is meant.
///
/// The lease is renewed for as long as the body runs; `ttl` is how long the others wait for a process
/// that died.
///
/// ```
/// # use std::time::Duration;
/// # use lockcore::{Error, distributed_lock};
/// # struct Shop { patience: Duration }
/// impl Shop {
///     #[distributed_lock(key = "stock", wait = self.patience, ttl = "30s")]
///     async fn count(&self) -> Result<(), Error> {
///         Ok(())
///     }
///
///     /// Whoever comes second gets `Busy` at once.
///     #[distributed_lock(key = "nightly-report", try)]
///     async fn report(&self) -> Result<(), Error> {
///         Ok(())
///     }
/// }
/// ```
///
/// ## `shared`
///
/// Functions with `shared` run beside each other, and beside none without it on the same key.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "catalog:{id}", shared)]
/// async fn read(id: u32) -> Result<String, Error> {
///     Ok(String::new())
/// }
///
/// #[distributed_lock(key = "catalog:{id}")]
/// async fn rewrite(id: u32, text: &str) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `locks`
///
/// An expression for a `lockcore::Locks` or a reference to one, which is borrowed:
///
/// ```
/// # use lockcore::{Error, Locks, distributed_lock};
/// struct Shop {
///     locks: Locks,
/// }
///
/// impl Shop {
///     #[distributed_lock(key = "stock", locks = self.locks)]
///     async fn count(&self) -> Result<(), Error> {
///         Ok(())
///     }
/// }
/// ```
///
/// ## `held`
///
/// Binds a `lockcore::Held`: the fencing token, and what is left of the lease.
///
/// ```
/// # use lockcore::{Error, FencingToken, distributed_lock};
/// # async fn store(id: u64, token: FencingToken) {}
/// #[distributed_lock(key = "order:{id}", held = lock)]
/// async fn settle(id: u64) -> Result<(), Error> {
///     store(id, lock.token()).await;
///     Ok(())
/// }
/// ```
///
/// ## `crate`
///
/// ```
/// mod deps {
///     pub use lockcore;
/// }
///
/// #[deps::lockcore::distributed_lock(key = "stock", crate = deps::lockcore)]
/// async fn count() -> Result<(), deps::lockcore::Error> {
///     Ok(())
/// }
/// ```
///
/// # Functions
///
/// Free functions and methods, with any receiver, generics, lifetimes, `impl Trait` arguments and
/// patterns; methods of traits and of trait impls as far as Rust has `async fn` there, but not inside
/// `#[async_trait]`. The body stays as it is written, not boxed: `?` and `return` mean what they always
/// mean, and the future is `Send` if the body and the arguments are.
///
/// Other attributes may stand above or below. `#[tracing::instrument]` above this one includes the wait
/// for the lock in its span, below it does not.
///
/// # Errors
///
/// The function returns a `Result<_, E>`, or an alias of one, with `E: From<lockcore::Error>`. Beside its
/// own errors it then returns that of the lock: `Busy` or `Timeout` if another holds it, `Lost` if the
/// lease ended while the body ran, and whatever else `lockcore::ErrorKind` names.
///
/// # When the lock is lost
///
/// The body runs only while the lock is held. If the lock is lost, the body is dropped at its current
/// `.await` and the function returns `Lost`; a body that has returned keeps its result. What the body has
/// spawned, and code that blocks, goes on: the fencing token protects what such code writes.
///
/// # Cancel safety
///
/// Dropping the future is safe at every point. In line, it leaves the line. In the body, the body is
/// dropped first, then the lock is released. A call that returns has released its lock; where the store
/// does not answer, the release goes on behind it, and ends with the ttl at the latest.
///
/// An argument that the body does not use lives until the call returns, as in any function.
///
/// [`humantime`]: https://docs.rs/humantime/2/humantime/fn.parse_duration.html
#[proc_macro_attribute]
pub fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::distributed_lock(args.into(), item.into()).into()
}
