//! Models: facts that must be true in every order in which a few threads can take their steps. Loom
//! runs each model many times, until it has tried all orders that could make a difference.
//!
//! ```text
//! RUSTFLAGS='--cfg lockcore_loom' cargo test -p lockcore --lib --no-default-features --target-dir target/loom loom
//! ```
//!
//! Steps are the operations on mutexes and atomics, and each use of a notification or a channel
//! (see `sync`). In one order, threads are preempted at most twice, unless `LOOM_MAX_PREEMPTIONS`
//! sets another number. A thread that has to wait does not count as preempted.
//!
//! The models do not contain:
//!
//! - the inside of tokio;
//! - the connection (`supervise`, `Shared::operate`): the models do the work of the store, which
//!   grants and acknowledges, and of the keeper's loop;
//! - clones of `Arc`;
//! - a clock that moves while threads run, except in models that advance it.
//!
//! Loom defines no order over `SeqCst` operations on different atomics, so these results do not
//! depend on such an order.

mod lane;
mod lease;
mod process;
mod table;

use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::backend::memory::Memory;
use crate::client::settings::{Defaults, Settings};
use crate::client::shared::Shared;
use crate::clock::Clock;
use crate::name::{Name, Namespace};
use crate::options::Fair;
use crate::options::Wait;
use crate::request::{FULL, Id, Request};

const TTL: Duration = Duration::from_secs(10);
/// The bound of [`Fair::Local`]. No model reaches it, unless the model advances the clock.
const BOUND: Duration = Duration::from_secs(3);

/// Runs `model` in every order, and prints how many orders there were.
fn in_every_order(model: impl Fn() + Send + Sync + 'static) {
    let mut loom = loom::model::Builder::new();
    loom.preemption_bound = loom.preemption_bound.or(Some(2));
    let orders = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&orders);
    let began = std::time::Instant::now();

    loom.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });

    let orders = orders.load(Ordering::Relaxed);
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    println!("{name}: {orders} orders, {:.1?}", began.elapsed());
    assert!(orders > 1, "nothing was reordered");
}

type Thread<T> = loom::thread::JoinHandle<T>;

fn spawn<T: 'static>(work: impl FnOnce() -> T + 'static) -> Thread<T> {
    loom::thread::spawn(work)
}

/// Waits for a future as a thread does. If nobody wakes this thread, loom reports the deadlock.
/// Loom also wakes the thread for no reason at times.
fn wait_for<F: Future>(future: F) -> F::Output {
    struct Parked(loom::sync::Notify);
    impl Wake for Parked {
        fn wake(self: Arc<Self>) {
            self.0.notify();
        }
    }

    let parked = Arc::new(Parked(loom::sync::Notify::new()));
    let waker = Waker::from(Arc::clone(&parked));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => parked.0.wait(),
        }
    }
}

fn poll_once<F: Future>(future: F) -> Poll<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    std::pin::pin!(future).poll(&mut context)
}

fn request(permits: NonZeroU32) -> Request {
    Request {
        name: name(),
        id: Id::draw().unwrap(),
        permits,
        capacity: FULL,
        ttl: TTL,
        wait: true,
        name_ahead: false,
        lingers: false,
        highest_seen: 0,
        owner: "model".into(),
    }
}

fn name() -> Name {
    Name::new(Namespace::new("model").unwrap(), "n").unwrap()
}

/// A client without a connection and without a keeper. The model does their work.
fn client() -> Arc<Shared> {
    client_with(Fair::Local(BOUND))
}

fn client_with(fair: Fair) -> Arc<Shared> {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
    });
    // Loom finds new orders by repeating earlier runs, so nothing in a run may be random.
    fastrand::seed(1);
    let clock = Clock::by_hand();
    clock.stop();
    let settings = Settings {
        clock: clock.clone(),
        defaults: Defaults {
            ttl: Duration::from_secs(10),
            wait: Wait::Forever,
            fair,
            through_outages: false,
            linger: Duration::ZERO,
        },
        ..Settings::of_tests()
    };
    let memory = Arc::new(Memory::new(clock));
    Arc::new(Shared::new(memory, settings, runtime.handle().clone(), |_, _| ()).unwrap())
}
