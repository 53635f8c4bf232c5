//! Tests with code of the user that the library calls: subscribers and wakers. Here they block and
//! panic.
//!
//! This is a test program of its own, because a subscriber applies to the whole process. It has
//! only one test, because the test changes how the subscriber behaves.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use lockcore::events::Event;
use lockcore::testing::Store;
use lockcore::{ErrorKind, Guard, Locks};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

const TTL: Duration = Duration::from_secs(2);

/// How the subscriber behaves when the library logs on a thread other than the test's thread.
static MANNER: AtomicU8 = AtomicU8::new(QUIET);
const QUIET: u8 = 0;
const BLOCKS: u8 = 1;
const PANICS: u8 = 2;
static LOGGED: AtomicUsize = AtomicUsize::new(0);

struct Rude(ThreadId);

impl Subscriber for Rude {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let ours = event.metadata().target().starts_with("lockcore");
        if !ours || std::thread::current().id() == self.0 {
            return;
        }
        LOGGED.fetch_add(1, Ordering::SeqCst);
        match MANNER.load(Ordering::SeqCst) {
            BLOCKS => std::thread::sleep(2 * TTL),
            PANICS => panic!("on purpose"),
            _ => {}
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

async fn hold(locks: &Locks, count: usize) -> Vec<Guard> {
    let mut held = Vec::new();
    for number in 0..count {
        let lock = locks.mutex(format!("n{number}")).ttl(TTL);
        held.push(lock.acquire().await.unwrap());
    }
    held
}

/// Waits for two ttls of all leases. Meanwhile the connections break again and again, and the
/// library logs each break.
async fn outlast_breaks(store: &Store, locks: &Locks) {
    let held = hold(locks, 20).await;
    let mut events = locks.events();
    let began = Instant::now();
    let before = LOGGED.load(Ordering::SeqCst);
    let mut restored = 0;
    while began.elapsed() < 2 * TTL {
        store.break_connections();
        loop {
            let told = tokio::time::timeout(TTL, events.recv()).await;
            match told.expect("the client does not reconnect") {
                Some(Event::Restored) => break,
                Some(Event::Suspended) => {}
                other => panic!("{other:?}"),
            }
        }
        restored += 1;
        tokio::time::sleep(Duration::from_millis(100)).await; // lets the client use the connection for a while
    }
    assert!(held.iter().all(|guard| guard.is_valid()));
    assert!(
        restored > 3 && LOGGED.load(Ordering::SeqCst) > before,
        "nothing was logged"
    );
    for guard in held {
        guard.release().await.unwrap();
    }
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("on purpose");
    }
}

/// The keeper calls the waker when the wait ends, and when the lock is released.
async fn outlast_a_waker(locks: &Locks) {
    let held = hold(locks, 20).await;
    let waker = Waker::from(Arc::new(Panics));
    let mut context = Context::from_waker(&waker);
    let lock = locks.mutex("n0").wait(Duration::from_millis(100));
    let mut waits = pin!(lock.acquire());
    assert!(waits.as_mut().poll(&mut context).is_pending());
    let other = locks.mutex("n1").ttl(2 * TTL);
    let mut in_line = pin!(other.acquire());
    assert!(in_line.as_mut().poll(&mut context).is_pending());

    tokio::time::sleep(2 * TTL).await; // without renewals, the leases would end in this time

    assert!(held.iter().all(|guard| guard.is_valid()));
    for guard in held {
        guard.release().await.unwrap();
    }
}

/// The store does not answer. The leader gets an error, and so does each task that waits behind it
/// in its lane.
async fn refuse_all_behind_a_waker(store: &Store, locks: &Locks) {
    store.freeze();
    let lock = locks.mutex("n0");
    let asks = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await.unwrap_err().kind() }
    });
    tokio::task::yield_now().await;
    let waker = Waker::from(Arc::new(Panics));
    let (mut waits, mut next) = (pin!(lock.acquire()), pin!(lock.acquire()));
    let pending = waits.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(pending.is_pending());
    let pending = next.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(pending.is_pending());

    store.clock().advance(Duration::from_secs(2)); // longer than one operation may take

    assert_eq!(asks.await.unwrap(), ErrorKind::Unknown);
    assert_eq!(next.await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(waits.await.unwrap_err().kind(), ErrorKind::Unavailable);
    store.thaw();
}

#[tokio::test]
async fn leases_and_waiters_survive_blocking_and_panicking_user_code() {
    tracing::subscriber::set_global_default(Rude(std::thread::current().id())).unwrap();
    let store = Store::new();

    for manner in [BLOCKS, PANICS] {
        let locks = store.client().unwrap();
        MANNER.store(manner, Ordering::SeqCst);
        outlast_breaks(&store, &locks).await;
        // Dropping the client does not wait for the subscriber.
        let began = Instant::now();
        drop(locks);
        assert!(began.elapsed() < TTL, "{:?}", began.elapsed());
    }
    MANNER.store(QUIET, Ordering::SeqCst);
    let locks = store.client().unwrap();
    outlast_a_waker(&locks).await;
    refuse_all_behind_a_waker(&store, &locks).await;
    let all_works = locks.mutex("n0").acquire().await.unwrap();
    all_works.release().await.unwrap();
}
