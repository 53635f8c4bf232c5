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
/// | [`key`](#key) | which lock: a template over the arguments, or an expression | it or `keys` has to be there |
/// | [`keys`](#keys) | which locks, all or none: `["…", "…"]`, or an expression | one lock |
/// | [`wait`](#wait-try-and-ttl) | how long to stand in line: `"2s"`, `"forever"`, or an expression | what the client is set to (`LOCK_WAIT`) |
/// | [`try`](#wait-try-and-ttl) | no value: do not wait at all; not together with `wait` | it waits |
/// | [`ttl`](#wait-try-and-ttl) | length of the lease: `"10s"` or an expression | what the client is set to (`LOCK_TTL`) |
/// | [`shared`](#shared) | no value: take the read side of the lock | it takes the write side |
/// | [`permits`, `of`](#permits-and-of) | numbers: so many permits of a semaphore of that many | a mutex |
/// | [`on_busy`](#on_busy) | what to return when another holds the lock: an expression, or `skip` | the error |
/// | [`on_error`](#on_error) | what to return for any other error of the lock: an expression | the error |
/// | [`on_lost`](#on_lost) | `cancel` or `signal` | `cancel` |
/// | [`min_hold`, `max_hold`](#min_hold-and-max_hold) | the lock is held for so long at least, or at most: `"1s"` or an expression | as long as the body runs |
/// | [`reentrant`](#reentrant) | `false`: taking the lock again inside is an error | it is taken again |
/// | [`when`](#when) | `false`: the body runs without the lock | it runs under the lock |
/// | [`locks`](#locks) | the client, an expression | `lockcore::default_locks()` |
/// | [`held`](#held) | a name for the lock inside the body | the body does not see it |
/// | [`crate`](#crate) | path to `lockcore`, where it is re-exported | `::lockcore` |
///
/// Options can use the arguments and `self`, and `?` in them returns from the function. They are evaluated
/// once, at the start of the call and before the lock is asked for, in this order: `when`, and then, unless
/// it was false, `key` or `keys`, `locks`, `permits`, `of`, `wait`, `ttl`, `min_hold`, `max_hold`,
/// `reentrant`. But `on_busy` and `on_error` are evaluated where they are needed and only then.
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
/// ## `keys`
///
/// Several locks, for work on several things at once. They are taken in the order of their names, so that
/// two calls never wait for each other in a circle; all of them are held or none; the same name twice is one
/// lock, and one that takes its `permits` once. The other options are for each of them, `wait` for all together.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// # struct Account { id: u64 }
/// #[distributed_lock(keys = ["account:{from.id}", "account:{to.id}"])]
/// async fn transfer(from: &Account, to: &Account, cents: u64) -> Result<(), Error> {
///     Ok(())
/// }
///
/// #[distributed_lock(keys = accounts.iter().map(|it| format!("account:{}", it.id)))]
/// async fn close(accounts: &[Account]) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// An expression is anything to iterate over whose items turn into `String`s. Of no keys at all there is no
/// lock to wait for. The label is that of each key, joined by `, `.
///
/// ## `wait`, `try` and `ttl`
///
/// Text is read while compiling, in the format of [`humantime`]: `"500ms"`, `"2s"`, `"1m 30s"`. An
/// expression is a `Duration`; for `wait` also a `lockcore::Wait`. A literal of zero is an error: for
/// `ttl`, because such a lease ends before it begins (50 ms is the least), for `wait`, because `try` says
/// what is meant.
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
/// ## `permits` and `of`
///
/// Of all calls with the same key so many run beside each other as there are permits for. Everybody who
/// uses the name states the same `of`; see `lockcore::Semaphore`.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "uploads", permits = 1, of = 5)]
/// async fn upload(file: &[u8]) -> Result<(), Error> {
///     Ok(())
/// }
///
/// #[distributed_lock(key = "api", permits = cost, of = 100)]
/// async fn query(cost: u32) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `on_busy`
///
/// What the call comes to when the lock is not to be had: for `Busy` and `Timeout` while asking for it, and
/// for nothing that the body meets. `skip` returns `()`, `None` or `Ok(())`. Or it is an expression of the
/// return type, which finds the [error](https://docs.rs/lockcore/latest/lockcore/struct.Error.html) as `error`.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// /// Every process tries at midnight, and one does the work.
/// #[distributed_lock(key = "nightly-report", try, on_busy = skip)]
/// async fn report() -> Result<(), Error> {
///     Ok(())
/// }
///
/// # struct Page; impl Page { async fn outdated(_: u32) -> Result<Self, Error> { Ok(Page) } }
/// #[distributed_lock(key = "page:{id}", wait = "200ms", on_busy = Page::outdated(id).await)]
/// async fn render(id: u32) -> Result<Page, Error> {
///     Ok(Page)
/// }
/// ```
///
/// ## `on_error`
///
/// What the call comes to for every error of the lock that `on_busy` does not take, the loss of the lock
/// while the body runs among them. An expression of the return type, which finds the error as `error`. A
/// function needs it that returns no `Result`, or one whose error cannot be made from a `lockcore::Error`.
///
/// ```
/// # use lockcore::distributed_lock;
/// #[distributed_lock(key = "cache", on_busy = skip, on_error = eprintln!("not cleaned: {error}"))]
/// async fn clean() {}
///
/// #[distributed_lock(key = "order:{id}", on_error = Err(error.to_string()))]
/// async fn settle(id: u64) -> Result<u64, String> {
///     Ok(id)
/// }
/// ```
///
/// The body takes the arguments that it uses with it, and they are gone when it has lost its lock: of those,
/// `on_error` can use what is `Copy`, as shared references are; not `&mut self`. `on_busy` can use all.
///
/// ## `on_lost`
///
/// With `cancel` the body is dropped at its current `.await` when the lock is lost, and the call returns
/// `Lost`. With `signal` it goes on, and `lost()` or `is_valid()` of what [`held`](#held) names tell: for
/// work that must come to an end once begun, and that checks the fencing token where it writes.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// # async fn copy(part: u32) {}
/// #[distributed_lock(key = "archive", on_lost = signal, held = lock)]
/// async fn archive() -> Result<u32, Error> {
///     let mut part = 0;
///     while lock.is_valid() && part < 9 {
///         copy(part).await;
///         part += 1;
///     }
///     Ok(part)
/// }
/// ```
///
/// ## `min_hold` and `max_hold`
///
/// `min_hold` keeps the lock taken for that long, though the call returns when the body does: of several
/// processes whose clocks differ a little and who all `try` at midnight, one does the work. `max_hold` ends
/// it, body and all, when that has passed.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "nightly", try, on_busy = skip, min_hold = "30s", max_hold = "1h", ttl = "40s")]
/// async fn nightly() -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `reentrant`
///
/// A body that takes its own lock again, be it through other functions, holds it already and goes on: see
/// `lockcore::Lock::reentrant`. With `false` it gets `WouldDeadlock` at once. An expression of `bool`.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "ledger", reentrant = false)]
/// async fn append(line: &str) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `when`
///
/// An expression of `bool`, looked at before everything else. What [`held`](#held) names is then an
/// `Option`.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// # struct Order { id: u64, is_draft: bool }
/// #[distributed_lock(key = "order:{order.id}", when = !order.is_draft, held = lock)]
/// async fn save(order: &Order) -> Result<(), Error> {
///     assert_eq!(lock.is_some(), !order.is_draft);
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
/// Binds a `lockcore::Held`: the fencing token, and what is left of the lease. With `keys` it is a
/// `lockcore::MultiHeld`, with `when` an `Option`.
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
/// patterns; methods of traits and of trait impls as far as Rust has `async fn` there, and inside
/// `#[async_trait]`. The body stays as it is written, not boxed: `?` and `return` mean what they always
/// mean, and the future is `Send` if the body and the arguments are.
///
/// A function that returns a future or a stream would return it with the lock released already: that does
/// not compile.
///
/// Other attributes may stand above or below. `#[tracing::instrument]` above this one includes the wait
/// for the lock in its span, below it does not. (Inside `#[async_trait]` both do.)
///
/// # Errors
///
/// The function returns a `Result<_, E>`, or an alias of one, with `E: From<lockcore::Error>`. Beside its
/// own errors it then returns that of the lock: `Busy` or `Timeout` if another holds it, `Lost` if the
/// lease ended while the body ran, and whatever else `lockcore::ErrorKind` names. With
/// [`on_error`](#on_error) it returns what it likes.
///
/// # When the lock is lost
///
/// The body runs only while the lock is held. If the lock is lost, the body is dropped at its current
/// `.await` and the function returns `Lost`, unless [`on_lost`](#on_lost) says otherwise; a body that has
/// returned keeps its result. What the body has
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
