//! The attribute macro of `lockcore`. Depend on that crate, which re-exports the macro, not on this
//! one.
//!
//! `args` reads the options, `template` the key, and `function` the function. `model` holds the
//! options after they have been checked, and `expand` writes the locked function. No module stops
//! at the first mistake: `mistakes` collects them all.

#![warn(missing_docs, missing_debug_implementations, unreachable_pub)]

mod args;
mod expand;
mod function;
mod mistakes;
mod model;
mod output;
mod template;

use proc_macro::TokenStream;

/// Runs an async function under a distributed lock. Of all calls with the same key, in all
/// processes, only one runs at a time.
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
/// // Without this, the first call reads LOCK_URL.
/// lockcore::set_default(Locks::connect("memory:")?)?;
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
/// | [`key`](#key) | which lock: a template over the arguments, or an expression | `key` or `keys` is required |
/// | [`keys`](#keys) | several locks, of which all are taken or none: `["…", "…"]`, or an expression | one lock |
/// | [`wait`](#wait-try-and-ttl) | how long to wait for the lock: `"2s"`, `"forever"`, or an expression | the client's setting (`LOCK_WAIT`) |
/// | [`try`](#wait-try-and-ttl) | no value: the call does not wait; not together with `wait` | it waits |
/// | [`through_outages`](#through_outages) | `true`: the wait covers outages of the store too | the client's setting (`LOCK_THROUGH_OUTAGES`) |
/// | [`ttl`](#wait-try-and-ttl) | length of the lease: `"10s"` or an expression | the client's setting (`LOCK_TTL`) |
/// | [`shared`](#shared) | no value: the call takes the read side of the lock | it takes the write side |
/// | [`permits`, `of`](#permits-and-of) | numbers: the call takes `permits` of a semaphore that has `of` | a mutex |
/// | [`on_busy`](#on_busy) | what to return when another holds the lock: an expression, or `skip` | the error |
/// | [`on_error`](#on_error) | what to return for any other error of the lock: an expression | the error |
/// | [`on_lost`](#on_lost) | `cancel` or `signal` | `cancel` |
/// | [`on_revoke`](#on_revoke) | `cancel` or `finish` | `finish` |
/// | [`min_hold`, `max_hold`](#min_hold-and-max_hold) | the shortest and the longest time to hold the lock: `"1s"` or an expression | as long as the body runs |
/// | [`linger`](#linger) | how long the lock stays with this process after the body: `"20ms"` or an expression | the client's setting (`LOCK_LINGER`) |
/// | [`reentrant`](#reentrant) | `false`: it is an error to take the lock again inside of the body | the body can take the lock again |
/// | [`when`](#when) | `false`: the body runs without the lock | it runs under the lock |
/// | [`locks`](#locks) | the client, an expression | `lockcore::default_locks()` |
/// | [`held`](#held) | a name for the lock inside of the body | the body does not see the lock |
/// | [`crate`](#crate) | the path to `lockcore`, where it is re-exported | `::lockcore` |
///
/// An option can use the arguments and `self`. A `?` in an option returns from the function. Each
/// option is evaluated once, at the start of the call, before the call asks for the lock. The order
/// is `when`, `key` or `keys`, `locks`, `permits`, `of`, `wait`, `ttl`, `min_hold`, `max_hold`,
/// `linger`, `reentrant`, `through_outages`. If `when` is false, the others are not evaluated. `on_busy` and `on_error` are
/// evaluated only when they are needed.
///
/// ## `key`
///
/// A template is a text in quotes. Between its braces, write an argument, `self` or a constant; or
/// a field, an index, a function call or a method call on one of these. Examples are
/// `"order:{id}"`, `"cart:{self.user_id()}"` and `"{order.region}:{order.lines[0]}"`. A format spec
/// of [`std::fmt`] may follow after a `:`, as in `{order.id:08}`. A brace in the name is written
/// twice, `{{` or `}}`. A name that is a keyword is written as it is: `{order.type}`.
///
/// An `Option` has no text of its own, so the template says which key `None` has:
/// `{order.id.unwrap_or(0)}`.
///
/// A key has 1 to 4,096 bytes. A template that is empty, or whose text alone is longer, does not
/// compile. If a key is empty or too long when the function is called, the call fails with an error
/// of the kind `Config`.
///
/// The key can also be an expression of any type that turns into a `String`:
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
/// If the expression is a variable or a field, as in `key = name`, `key = self.name` or `keys =
/// names`, the macro clones it, so the body can use it too. If its type is not `Clone`, as with
/// `name: impl Into<String>`, the macro moves it, and the body cannot use it.
///
/// Different keys are different locks. The macro adds nothing to a key, so `"{a}:{b}"` gives the
/// same key for `"x:y", "z"` as for `"x", "y:z"`. If arguments are free text from outside, put them
/// last, or format them with `{a:?}`.
///
/// The label of the lock in traces is the template, not the key. It has few values, and no personal
/// data.
///
/// ## `keys`
///
/// Several locks, for work on several things at once. The call holds all of them, or none. It takes
/// them in the order of their names, so that two calls never wait for each other in a circle. A
/// name that is given twice is one lock, and takes its `permits` once. `wait` is the time for all
/// locks together. The other options apply to each lock.
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
/// An expression is anything to iterate over whose items turn into `String`s. If it has no items,
/// the body runs without a lock. The label is made of the labels of the keys, with `, ` between
/// them.
///
/// ## `wait`, `try` and `ttl`
///
/// A text has the format of [`humantime`]: `"500ms"`, `"2s"`, `"1m 30s"`. It is checked at compile
/// time. An expression is a `Duration`, or, for `wait`, a `lockcore::Wait`.
///
/// The lease is renewed as long as the body runs. If the process dies, other calls get the lock
/// after one `ttl`.
///
/// The text of a `ttl` is `"50ms"` to `"12h"`. A shorter lease would be over when the answer of the
/// store arrives, and Redis refuses a longer lease. For a store that accepts longer leases, write
/// an expression. The text of a `wait` must not be zero: write `try` instead.
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
///     /// A second call gets `Busy` at once.
///     #[distributed_lock(key = "nightly-report", try)]
///     async fn report(&self) -> Result<(), Error> {
///         Ok(())
///     }
/// }
/// ```
///
/// ## `shared`
///
/// Calls with `shared` and the same key run at the same time. A call without `shared` runs alone.
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
/// A semaphore: calls with the same key run at the same time as long as there are permits for them.
/// Every user of the name has to state the same `of`; see `lockcore::semaphore::Semaphore`.
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
/// The value that the call returns in place of the errors `Busy` and `Timeout`, when another holds
/// the lock of this function. It does not replace errors of other locks that the body takes. `skip`
/// returns `()`, `None` or `Ok(())`. An expression has the return type of the function, and finds
/// the [error](https://docs.rs/lockcore/latest/lockcore/struct.Error.html) in the variable `error`.
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
/// The value that the call returns for every other error of the lock, and also when the lock is
/// lost while the body runs. Without `on_busy`, the call also returns it for `Busy` and `Timeout`.
/// It is an expression of the return type of the function, and finds the error in the variable
/// `error`.
///
/// A function needs `on_error` if it returns no `Result`, or a `Result` whose error type cannot be
/// made from a `lockcore::Error`: see [Errors](#errors).
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
/// The body owns the arguments that it uses, and they are dropped with it when the lock is lost. If
/// the body uses an argument, `on_error` can use this argument too only if it is `Copy`. Shared
/// references are `Copy`, but `&mut self` is not. `on_busy` can use all arguments.
///
/// ## `on_lost`
///
/// With `cancel`, the body is dropped at its current `.await` when the lock is lost, and the call
/// returns `Lost`. With `signal`, the body continues to run. It can learn of the loss by `lost()`
/// or `is_valid()` of the variable that [`held`](#held) names. Use `signal` for work that has to be
/// finished once it has begun. The resource that the work writes to should check the fencing token.
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
/// ## `on_revoke`
///
/// An operator can ask the holder of a lock to give the lock up, with `Locks::revoke`. The operator
/// gives the holder some time, the grace. With `finish`, the body continues to run. If it is not
/// done when the grace is over, the lock is lost, and [`on_lost`](#on_lost) decides. With `cancel`,
/// the body is dropped at its current `.await` as soon as this process learns that somebody asks
/// for the lock. Then the lock is released, and the call returns `Lost`. Use `cancel` for work that
/// can be repeated, and that must not keep others waiting.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// # async fn build_part(part: u32) {}
/// #[distributed_lock(key = "search index", on_revoke = cancel)]
/// async fn rebuild() -> Result<(), Error> {
///     for part in 0..9 {
///         build_part(part).await;
///     }
///     Ok(())
/// }
/// ```
///
/// ## `min_hold` and `max_hold`
///
/// `min_hold` keeps the lock taken for at least this time. The call does not wait for the end of
/// this time: it returns when the body does, and the lock stays taken. Use it for processes that
/// all `try` at midnight. Their clocks differ a little, so a short body could end before the last
/// process tries. With `min_hold`, only one process does the work.
///
/// `max_hold` ends the lock after this time, and stops the body as when a lock is
/// [lost](#when-the-lock-is-lost).
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "nightly", try, on_busy = skip, min_hold = "30s", max_hold = "1h", ttl = "40s")]
/// async fn nightly() -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `linger`
///
/// The lock stays with this process for this time after the body, if nobody waits for it. If the
/// function is called again in this time with the same key, it gets the lock without a request to the
/// store. Use it for keys whose calls come to the same process again and again. It has an effect at
/// Redis. `lockcore::Lock::linger` says what it costs.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "cart:{id}", linger = "20ms")]
/// async fn add_to_cart(id: u64) -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `through_outages`
///
/// An expression of `bool`. By default a call fails within one operation timeout if the store is out
/// of reach, however long its `wait` is. With `true` the call asks again until the store is back,
/// for as long as its `wait` says. Use it for work that has to be done some time. See
/// `lockcore::Lock::through_outages`.
///
/// ```
/// # use lockcore::{Error, distributed_lock};
/// #[distributed_lock(key = "nightly", wait = "forever", through_outages = true)]
/// async fn nightly() -> Result<(), Error> {
///     Ok(())
/// }
/// ```
///
/// ## `reentrant`
///
/// An expression of `bool`. By default a body can take its own lock again, for example in a
/// function that it calls. The second request succeeds at once, because the body holds the lock
/// already. See `lockcore::Lock::reentrant`. With `false`, the second request fails with
/// `WouldDeadlock` at once.
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
/// An expression of `bool`. It is evaluated before all other options. With `when`, the variable of
/// [`held`](#held) is an `Option`.
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
/// The client: an expression of type `lockcore::Locks` or of a reference to one. It is borrowed.
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
/// The name of a new variable for the body. It is a `lockcore::Held`, which has the fencing token
/// and the rest of the lease. No argument may have this name. With `keys` it is a
/// `lockcore::multi::MultiHeld`. With `when` it is an `Option`. If `#[axum::debug_handler]` stands
/// above this attribute, it reports that it cannot find the variable: write it below.
///
/// ```
/// # use lockcore::{Error, FencingToken, distributed_lock};
/// # async fn store(id: u64, token: FencingToken) {}
/// #[distributed_lock(key = "order:{id}", held = lock)]
/// async fn settle(id: u64) -> Result<(), Error> {
///     store(id, lock.fencing_token()?).await;
///     Ok(())
/// }
/// ```
///
/// ## `crate`
///
/// The path to `lockcore`, for a crate that does not depend on `lockcore` itself.
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
/// The attribute goes on any `async fn`: free functions and methods, with any receiver, generics,
/// lifetimes, `impl Trait` arguments and patterns. In traits and their impls it goes on methods
/// that have a body, also inside of `#[async_trait]`. The body stays as it is written: `?` and
/// `return` have their usual meaning. The body is not boxed, and the future is `Send` if the body
/// and the arguments are.
///
/// Other attributes may stand above or below this one, but `#[tokio::main]` and `#[tokio::test]`
/// have to stand below. With [`held`](#held), `#[axum::debug_handler]` has to stand below too: it
/// copies the body without this attribute, and the copy does not know the variable. If
/// `#[tracing::instrument]` stands above, its span includes the wait for
/// the lock; if it stands below, its span does not. (Inside `#[async_trait]`, its span includes the
/// wait in both places.)
///
/// The same attribute with another key may stand above too, but [`keys`](#keys) is better: it takes
/// the locks in one order.
///
/// ## What a function must not return
///
/// The lock is released when the function returns. So a function must not return a value that
/// continues to work, or is read, after that. The macro knows these types by their names, and
/// refuses them anywhere in the return type:
///
/// - futures and streams: `impl Future`, `dyn Stream`, `BoxFuture`, `ReceiverStream`, `Streaming`,
///   `Sse` and others,
/// - spawned tasks: `JoinHandle`, `JoinSet`,
/// - HTTP responses and their bodies: `Response` without the type of its body, `Body`, `BoxBody`
///   and others.
///
/// For a response or a stream, use `lockcore_tower::LockLayer`: it keeps the lock until the body
/// has ended. A `Response<Receipt>` of tonic is accepted, because its message is complete.
///
/// **The macro sees names, not types.** It cannot see what is behind an alias, inside of a struct,
/// or in `impl IntoResponse`. Functions that return these compile, and their lock is released
/// before the returned value is read.
///
/// If a type of your own has one of these names, write `self::` before it, as in `self::Response`,
/// or import it by another name: `use crate::model::Response as OrderResponse`. A path that begins
/// with no crate of futures, tasks or HTTP, as in `model::Response`, is accepted as it is.
///
/// # Errors
///
/// The function returns a `Result<_, E>`, or an alias of one, with `E: From<lockcore::Error>`. It
/// returns its own errors, and those of the lock: `Busy` or `Timeout` if another holds the lock,
/// `Lost` if the lease ended while the body ran, and the other kinds of `lockcore::ErrorKind`.
///
/// Rust allows an `impl From` only for a type of your own crate. For the error types of other
/// crates write [`on_error`](#on_error):
///
/// | error type | option |
/// |---|---|
/// | `String` | `on_error = Err(error.to_string())` |
/// | `std::io::Error` | `on_error = Err(io::Error::other(error))` |
/// | `http::StatusCode` | `on_busy = Err(StatusCode::CONFLICT)`, `on_error = Err(StatusCode::SERVICE_UNAVAILABLE)` |
/// | `(http::StatusCode, String)` | `on_error = { tracing::error!(%error); Err((StatusCode::SERVICE_UNAVAILABLE, "try again later".into())) }` |
/// | `tonic::Status` | `on_error = Err(lockcore_tower::status(&error))` |
///
/// The text of a lock error is for operators: it names the address of the store. Write it to the
/// log, and do not send it to a client.
///
/// # When the lock is lost
///
/// The body runs only while the lock is held. If the lock is lost, the body is dropped at its
/// current `.await`, and the function returns `Lost`, unless [`on_lost`](#on_lost) says otherwise.
/// If the body has returned already, the function returns its result. Tasks that the body has
/// spawned continue to run, and so does code that blocks. The fencing token protects a resource
/// from their writes.
///
/// # Cancel safety
///
/// The future can be dropped at any point. If it is dropped while it waits for the lock, it gives
/// up its place in line. If it is dropped while the body runs, the body is dropped first, and then
/// the lock is released.
///
/// A call that returns has given its lock back: to the store, or to the next task of this process.
/// (With `min_hold` or `linger` it stays taken for longer.) If the store does not answer, the release
/// continues in the background, and the lock is free when its ttl has passed, at the latest.
///
/// An argument that the body does not use lives until the call returns, as in any function.
///
/// [`humantime`]: https://docs.rs/humantime/2/humantime/fn.parse_duration.html
#[proc_macro_attribute]
pub fn distributed_lock(args: TokenStream, item: TokenStream) -> TokenStream {
    expand::distributed_lock(args.into(), item.into()).into()
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
