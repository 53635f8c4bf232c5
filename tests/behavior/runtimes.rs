//! Tests with users that block their runtimes, end them, and drop guards outside of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::stalls::awake_since;

use crate::store::{Kind, LEASE, SOON, Store, assert_nothing_left, give_back, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_client_survives_the_runtime_that_connected_first
        the_end_of_a_runtime_is_no_trouble_with_the_store
        a_place_in_line_is_not_left_to_a_runtime_that_has_ended
        a_guard_dropped_when_its_runtime_shuts_down_releases
        a_waiter_that_goes_down_with_its_runtime_leaves_nothing
        a_guard_can_be_released_outside_of_any_runtime
        a_program_without_a_runtime_connects_locks_waits_and_releases
        a_current_thread_runtime_will_do
        blocking_every_worker_for_ten_seconds_loses_no_lease
        dropping_the_last_handle_finishes_the_release
    ]
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Runs a part of a test on a thread that may build and drop runtimes.
async fn outside<T: Send + 'static>(piece: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(piece).await.unwrap()
}

/// Every `#[tokio::test]` has its own runtime. The client may be a static that all of them use.
async fn a_client_survives_the_runtime_that_connected_first(store: Store) {
    let locks = store.client();
    outside(move || {
        for _ in 0..5 {
            let runtime = runtime();
            runtime.block_on(async {
                let guard = locks.mutex("a").acquire().await.unwrap();
                give_back(guard).await;
            });
        }
    })
    .await;
}

async fn the_end_of_a_runtime_is_no_trouble_with_the_store(store: Store) {
    let locks = store.client();
    give_back(locks.mutex("here").acquire().await.unwrap()).await;
    let mut events = locks.events();
    let users = locks.clone();
    outside(move || {
        for _ in 0..20 {
            let runtime = runtime();
            runtime.block_on(async {
                give_back(users.mutex("a").acquire().await.unwrap()).await;
            });
        }
    })
    .await;

    let told = tokio::time::timeout(Duration::from_millis(200), events.recv()).await;
    assert!(told.is_err(), "{told:?}");
}

/// The leader's ticket is in line at the store for its process, and the leader ends with its
/// runtime. The next task must not use this ticket, because its wake-up goes to the runtime that
/// has ended.
async fn a_place_in_line_is_not_left_to_a_runtime_that_has_ended(store: Store) {
    let (locks, theirs) = (store.client(), store.client());
    let guard = theirs.mutex("a").acquire().await.unwrap();
    let (first, second) = (runtime(), runtime());
    let lock = locks.mutex("a").wait(LEASE);
    first.spawn(async move { lock.acquire().await.map(drop) });
    tickets(&locks, "a", 2).await;
    let lock = locks.mutex("a").wait(LEASE);
    let heir = second.spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 3).await;

    outside(move || drop(first)).await;
    tickets(&locks, "a", 2).await;
    give_back(guard).await;

    // Only a wake-up is this fast: the waiter's first renewal would come after 20 s.
    let started = Instant::now();
    give_back(heir.await.unwrap().unwrap()).await;
    let awake = awake_since(started);
    assert!(awake < SOON, "{awake:?}");
    outside(move || drop(second)).await;
}

async fn a_guard_dropped_when_its_runtime_shuts_down_releases(store: Store) {
    let locks = store.client();
    let users = locks.clone();
    let held = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&held);
    outside(move || {
        let runtime = runtime();
        for number in 0..100 {
            let (lock, held) = (users.mutex(format!("n{number}")), Arc::clone(&held));
            runtime.spawn(async move {
                let _guard = lock.acquire().await.unwrap();
                held.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<()>().await;
            });
        }
        while held.load(Ordering::SeqCst) < 100 {
            std::thread::yield_now();
        }
        drop(runtime);
    })
    .await;

    assert_eq!(count.load(Ordering::SeqCst), 100);
    if !store.kind.capability().queues {
        // An enqueue that a node of a quorum had not answered was lost with the runtime. Its
        // release leaves a mark.
        eventually("nothing is left but marks", SOON, async || {
            store.litter_but_marks().is_empty()
        })
        .await;
        return;
    }
    for number in 0..100 {
        assert_nothing_left(&store, &locks, &format!("n{number}")).await;
    }
}

async fn a_waiter_that_goes_down_with_its_runtime_leaves_nothing(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let users = locks.clone();
    let here = tokio::runtime::Handle::current();
    outside(move || {
        let runtime = runtime();
        let lock = users.mutex("a").wait(SOON);
        runtime.spawn(async move { lock.acquire().await.map(drop) });
        here.block_on(tickets(&users, "a", 2));
        drop(runtime);
    })
    .await;

    tickets(&locks, "a", 1).await;
    give_back(guard).await;
}

async fn a_guard_can_be_released_outside_of_any_runtime(store: Store) {
    let locks = store.client();
    let (dropped, released) = (locks.mutex("a"), locks.mutex("b"));
    let dropped = dropped.acquire().await.unwrap();
    let released = released.acquire().await.unwrap();
    std::thread::spawn(move || {
        drop(dropped);
        futures_block_on(give_back(released));
    })
    .join()
    .unwrap();

    assert_nothing_left(&store, &locks, "a").await;
    assert_nothing_left(&store, &locks, "b").await;
}

async fn a_program_without_a_runtime_connects_locks_waits_and_releases(store: Store) {
    let (locks, theirs) = (store.client(), store.client());
    let first = std::thread::spawn(move || {
        futures_block_on(theirs.ready(SOON)).unwrap();
        futures_block_on(theirs.mutex("a").acquire()).unwrap()
    });
    let held = first.join().unwrap();
    let waits = locks.mutex("a").wait(SOON);
    let waits = std::thread::spawn(move || {
        let guard = futures_block_on(waits.acquire()).unwrap();
        futures_block_on(give_back(guard));
    });
    // A quorum has no line. A waiter there comes again until the lock is free.
    if store.kind.capability().queues {
        tickets(&locks, "a", 2).await;
    }

    std::thread::spawn(move || futures_block_on(give_back(held)))
        .join()
        .unwrap();
    waits.join().unwrap();

    assert_nothing_left(&store, &locks, "a").await;
}

/// A minimal executor without tokio.
fn futures_block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut cx = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

async fn a_current_thread_runtime_will_do(store: Store) {
    let locks = store.client();
    outside(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io() // no time driver, because the client has its own clock
            .build()
            .unwrap();
        runtime.block_on(async {
            let guard = locks.mutex("a").acquire().await.unwrap();
            let late = locks
                .mutex("a")
                .wait(Duration::from_millis(50))
                .acquire()
                .await;
            assert!(late.is_err());
            give_back(guard).await;
        });
    })
    .await;
}

/// No worker thread runs a task for 10 s. The lease lasts 6 s.
async fn blocking_every_worker_for_ten_seconds_loses_no_lease(store: Store) {
    let locks = store.client();
    let users = locks.clone();
    let (least, remained) = (
        Arc::new(AtomicUsize::new(usize::MAX)),
        Duration::from_secs(6),
    );
    let lowest = Arc::clone(&least);
    outside(move || {
        let runtime = runtime();
        let guard = runtime
            .block_on(users.mutex("a").ttl(remained).acquire())
            .unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        let held = guard.held();
        for _ in 0..2 {
            // Blocks a worker on purpose. This is the mistake that the fact is about.
            runtime.spawn(async move { std::thread::sleep(end - Instant::now()) });
        }
        while Instant::now() < end {
            let remaining = usize::try_from(held.remaining().as_millis()).unwrap();
            lowest.fetch_min(remaining, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5)); // sampling interval
        }
        assert!(guard.is_valid());
        runtime.block_on(give_back(guard));
    })
    .await;

    // The lowest remaining time before a renewal shows the longest gap between two renewals.
    let least = Duration::from_millis(u64::try_from(least.load(Ordering::SeqCst)).unwrap());
    println!(
        "longest gap between renewals: about {:?} of a 6 s lease",
        remained - least
    );
    assert!(least > Duration::from_millis(500), "{least:?} was left");
    assert_nothing_left(&store, &locks, "a").await;
}

async fn dropping_the_last_handle_finishes_the_release(store: Store) {
    let observer = store.client();
    for _ in 0..20 {
        let locks = store.client();
        let guard = locks.mutex("a").acquire().await.unwrap();
        drop(locks);
        drop(guard); // the last handle, so this returns when the keeper is done

        assert!(observer.inspect("a").await.unwrap().is_empty());
        assert_eq!(store.litter(), Vec::<String>::new());
    }
}
