#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, missing_debug_implementations, unreachable_pub)]
// Some items are used by these features only; the lints run with all of them.
#![cfg_attr(
    not(all(feature = "backend", feature = "testing")),
    allow(dead_code, unreachable_pub, unused_imports, clippy::enum_variant_names)
)]
//! Distributed locks: exclusion between processes, in a fair queue. Leases are renewed while the
//! work runs. Work stops when its lock is lost. Exclusive grants have fencing tokens.
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lockcore::Error> {
//! let locks = lockcore::Locks::connect("memory:")?; // or "redis://…", or Locks::from_env()
//!
//! let receipt = locks
//!     .mutex("order:42")
//!     .wait(Duration::from_secs(2))
//!     .run(async |held| {
//!         // Nobody else is here for order 42. Pass held.fencing_token()? on with every write.
//!         Ok::<_, lockcore::Error>(format!("settled by grant {}", held.grant_id()))
//!     })
//!     .await?;
//! # drop(receipt);
//! # Ok(()) }
//! ```
//!
//! Locks:
//!
//! | to | use |
//! |---|---|
//! | annotate a function | `#[distributed_lock(key = "order:{id}")]` (feature `macros`) |
//! | run work under a lock | [`Lock::run`] |
//! | hold a lock over several steps | [`Lock::acquire`] → [`Guard`] |
//! | lock per HTTP request | the crate `lockcore-tower` |
//! | exclude all others, share among readers, limit the number of holders | [`Locks::mutex`], [`Locks::rwlock`], [`Locks::semaphore`] |
//! | take several locks at once, or one of several | [`Locks::all`]; [`Locks::any`] |
//! | take a held lock again, or use it in a spawned task | [`Lock::reentrant`], [`Held::scope`], [`Guard::reenter`] |
//! | check that the running code holds a lock | [`held`], [`Locks::held`] |
//! | make sure that the lease lasts for the next minutes | [`Held::ensure`], [`Guard::extend`] |
//! | let a resource refuse a late write | [`fencing`], [`Held::fencing_token`] |
//! | turn a write lock into a read lock; turn a read lock into a write lock, if there is no other reader | [`Guard::downgrade`]; [`Guard::try_upgrade`] |
//! | give some permits back and keep the rest | [`Guard::release_permits`] |
//! | see how many permits are free, or take them all | [`Semaphore::available`](semaphore::Semaphore::available), [`Semaphore::drain`](semaphore::Semaphore::drain) |
//! | change how many permits there are, while they are in use | [`Semaphore::resize`](semaphore::Semaphore::resize) |
//! | give a held lock to another process | [`Guard::detach`], [`Locks::adopt`] |
//! | choose whether a process may serve its own tasks first | [`Fair`] |
//! | test what your code does when it loses its lock | [`testing`] (feature `testing`), [`with_default`] |
//!
//! Coordination of processes:
//!
//! | to | use |
//! |---|---|
//! | wait until others are done | [`Locks::latch`] |
//! | wait until all parties have come; enter and leave together | [`Locks::barrier`]; [`Locks::double_barrier`] |
//! | share a number, and follow its changes | [`Locks::counter`] |
//! | elect one leader among many, and follow who leads | [`Locks::election`] |
//! | store a text beside a lock, read it, and follow its changes | [`Held::set_value`], [`Held::value`], [`Locks::value`] |
//!
//! For operators:
//!
//! | to | use |
//! |---|---|
//! | check the store at the start | [`Locks::ready`] |
//! | see who holds a lock, and which names are in use | [`Locks::inspect`], [`Locks::list`]; their answers show the texts of [`Builder::owner`] and [`Lock::owner`] |
//! | ask for a lock that another holds, or take it away | [`Locks::revoke`], [`Held::revoked`], [`Locks::force_release`] |
//! | learn of outages and of lost locks | [`Locks::events`], [`Held::in_danger`], [`Held::lost`] |
//! | count what happens, for Prometheus for example | [`guide::metrics`] (feature `metrics`) |
//! | shut down in good order | [`Locks::run_until_stopped`], [`stop_signal`] (feature `signal`), [`shutdown`], [`Locks::shutdown`] |
//! | find out at night who holds a lock, and free it | [`guide::operations`] |
//! | copy code for a nightly job, a consumer, a leader … | [`guide::recipes`] |
//! | read what happens in which case, and why | [`guide`] |
//! | write a store | [`backend`] (feature `backend`) |
//!
//! # What it promises, and what it cannot
//!
//! While [`is_valid`](Held::is_valid) is true for a guard, the store has granted the lock to nobody
//! else. This holds as long as the store keeps its data, and the clocks of the store and of this
//! machine run evenly. A process can be stopped for seconds between this check and its next write.
//! Another process may hold the lock when that write arrives. Fencing tokens protect the resource
//! in this case: it remembers the highest token that it has seen, and refuses lower ones.
//! [`fencing`] has the checks for SQL and Redis. [`guide::promises`] lists every promise with its
//! basis, its limits, and its tests.
//!
//! Work under [`Lock::run`] is stopped when the lock is lost: its future is not polled again. Tasks
//! that the work has *spawned* are not stopped, and code that blocks without awaiting is not
//! stopped either.
//!
//! The crate needs tokio, and is for Unix only.

#[cfg(not(unix))]
compile_error!(
    "lockcore is for Unix only: it reads clocks and names that other systems do not have"
);

// The modules by floors, from the top. A module uses only modules of its own floor and of lower
// floors. See ARCHITECTURE.md.

// Built on locks.
#[cfg(feature = "macros")]
#[doc(hidden)]
pub mod __private;
pub mod fencing;
pub mod guide;
mod process_default;
#[cfg(feature = "signal")]
mod stop;
#[cfg(feature = "testing")]
pub mod testing;

// The public API: locks as values, work that runs under them, the client and its configuration.
pub mod adopt;
mod any;
pub mod barrier;
mod builder;
mod carry;
pub mod counter;
pub mod double_barrier;
pub mod election;
pub mod events;
pub mod inspect;
pub mod latch;
mod lock;
mod locks;
pub mod multi;
mod places;
pub mod revoke;
mod run;
pub mod rwlock;
pub mod semaphore;
mod upgrade;
pub mod value;

// The locks that the running code holds already.
mod scope;

// A held lock: the guard, which releases it, and the view, which only reads its state.
mod hold;

// The acquire loop, and the queue inside one process.
mod acquire;

// The parts of a client that all its handles share: its tickets, its keeper thread, its
// connections.
mod client;
#[cfg(debug_assertions)]
mod inversions;

// The contract with a store, the stores, and the way from a URL to a store.
#[cfg(feature = "backend")]
pub mod backend;
#[cfg(not(feature = "backend"))]
mod backend;

// The ground: plain values, the clock, and the one rule that decides which tickets hold.
mod clock;
mod counting;
mod detached;
mod error;
mod fork;
mod hash;
mod log;
mod meter;
mod name;
mod options;
mod owner;
mod pauses;
mod queue;
mod request;
mod resizing;
mod sync;
mod tls;
mod token;

#[cfg(lockcore_loom)]
#[cfg(test)]
mod loom;

pub use builder::Builder;
pub use error::{Error, ErrorKind, LostReason};
pub use hold::{Guard, Held, Release};
pub use lock::Lock;
#[cfg(feature = "macros")]
pub use lockmacro::distributed_lock;
pub use locks::Locks;
pub use options::{Fair, OnLost, OnRevoke, Wait};
pub use process_default::{default_locks, set_default, shutdown, with_default};
pub use scope::held;
#[cfg(feature = "signal")]
pub use stop::stop_signal;
pub use token::{FencingToken, GrantId};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The futures of the public API are `Send`, so they can be spawned. If a change breaks this, this
/// module does not compile.
#[cfg(test)]
mod futures_are_send {
    use crate::multi::MultiGuard;
    use crate::{Error, Guard, Locks};

    fn spawnable<T: Send>(_: &T) {}

    fn owned<T: Send + Sync + 'static>(_: &T) {}

    #[allow(dead_code)] // compiling it is the test
    fn all(locks: &Locks, guard: Guard, mut other: Guard, third: Guard, several: MultiGuard) {
        let lock = locks.mutex("x");
        owned(&guard);
        owned(&several);
        spawnable(&lock.acquire());
        spawnable(&lock.try_acquire());
        spawnable(&lock.run(async |held| {
            held.lost().await;
            Ok::<_, Error>(())
        }));
        spawnable(&guard.ensure(std::time::Duration::ZERO));
        #[cfg(feature = "signal")]
        spawnable(&locks.run_until_stopped(async {}, std::time::Duration::ZERO));
        spawnable(&guard.in_danger());
        spawnable(&guard.revoked());
        spawnable(&guard.set_value("x"));
        spawnable(&other.try_upgrade());
        spawnable(&guard.release_permits(1));
        spawnable(&guard.extend(std::time::Duration::ZERO));
        spawnable(&guard.scope(async {}));
        spawnable(&locks.events().recv());
        spawnable(&locks.adopt("x"));
        spawnable(&guard.release());
        let both = Locks::all([locks.mutex("x"), locks.mutex("y")]);
        spawnable(&both.acquire());
        spawnable(&both.run(async |_| Ok::<_, Error>(())));
        spawnable(&several.lost());
        spawnable(&several.in_danger());
        spawnable(&several.revoked());
        spawnable(&several.scope(async {}));
        spawnable(&several.release());
        spawnable(&other.run(async { Ok::<_, Error>(()) }));
        spawnable(&Locks::any([locks.mutex("x")]).acquire());
        spawnable(&locks.inspect("x"));
        spawnable(&locks.semaphore("x", 1).available());
        spawnable(&locks.semaphore("x", 1).drain());
        spawnable(&locks.semaphore("x", 1).resize(1));
        spawnable(&locks.semaphore("x", 1).add_permits(1));
        spawnable(&locks.list("x").next());
        spawnable(&locks.revoke("x", 1, std::time::Duration::ZERO, "y"));
        spawnable(&locks.force_release("x", 1));
        spawnable(&locks.latch("x").try_set(1));
        spawnable(&locks.latch("x").wait_for_zero());
        spawnable(&locks.counter("x").changes().next());
        spawnable(&locks.barrier("x", 2).wait_for_all());
        spawnable(&locks.double_barrier("x", 2).enter());
        spawnable(&locks.value("x").changes().next());
        let election = locks.election("x");
        spawnable(&election.campaign());
        spawnable(&election.observe().next());
        spawnable(&election.run_as_leader(async |leader| {
            leader.lost().await;
            std::ops::ControlFlow::Break(())
        }));
        spawnable(&third.detach());
        spawnable(&locks.shutdown(std::time::Duration::ZERO));
    }
}
