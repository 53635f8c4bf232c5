//! How many permits of a semaphore are free, and taking all of them.

use std::sync::Arc;

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Semaphore};
use tests::eventually::eventually;
use tests::witness::Witness;
use tokio::task::JoinSet;

use crate::store::{
    DEFAULT, Kind, SOON, Store, assert_nothing_left, begin, give_back, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        permits_that_nobody_holds_are_available
        nothing_is_available_while_somebody_waits
        a_drain_takes_all_permits_that_are_free
        the_permits_of_a_name_in_other_use_are_a_mismatch
        permits_never_exceed_the_capacity_while_many_drain_them
    ]
}

/// Facts about what happens between the requests of one call, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_drain_takes_the_rest_when_others_are_faster
        a_drain_ends_when_others_are_faster_each_time
    ]
}

async fn available(semaphore: &Semaphore, permits: u32) {
    // A release is seen by another client a moment later.
    eventually("the permits are available", SOON, async || {
        semaphore.available().await.unwrap() == permits
    })
    .await;
}

async fn permits_that_nobody_holds_are_available(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let (ours, theirs) = (locks.semaphore("s", 5), other.semaphore("s", 5));
    assert_eq!(ours.available().await.unwrap(), 5);

    let two = theirs.permits(2).acquire().await.unwrap();
    assert_eq!(ours.available().await.unwrap(), 3);
    let three = ours.permits(3).try_acquire().await.unwrap();
    assert_eq!(ours.available().await.unwrap(), 0);
    two.release_permits(1).await.unwrap();
    available(&ours, 1).await;
    give_back(three).await;
    available(&theirs, 4).await;

    give_back(two).await;
    available(&ours, 5).await;
    let error = locks.semaphore("s", 0).available().await.unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("s")));
    assert_nothing_left(&store, &locks, "s").await;
}

async fn nothing_is_available_while_somebody_waits(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let semaphore = locks.semaphore("s", 5);
    let two = semaphore.permits(2).acquire().await.unwrap();
    let waits = begin(other.semaphore("s", 5).permits(4));
    tickets(&locks, "s", 2).await;

    // Three are free, and nobody can have them.
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert_eq!(kind(semaphore.drain().await), ErrorKind::Busy);
    assert_eq!(
        kind(semaphore.permits(1).try_acquire().await),
        ErrorKind::Busy
    );

    waits.abort();
    available(&semaphore, 3).await;
    give_back(two).await;
    assert_nothing_left(&store, &locks, "s").await;
}

async fn a_drain_takes_all_permits_that_are_free(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let (ours, theirs) = (locks.semaphore("s", 5), other.semaphore("s", 5));
    let two = theirs.permits(2).acquire().await.unwrap();

    let (rest, permits) = ours.drain().await.unwrap();
    assert_eq!(permits, 3);
    let error = theirs.drain().await.unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Busy, Some("s")));
    assert!(error.retry_after().is_some());

    give_back(two).await;
    available(&ours, 2).await;
    let (two, permits) = theirs.drain().await.unwrap();
    assert_eq!(permits, 2);
    give_back(rest).await;
    give_back(two).await;
    assert_nothing_left(&store, &locks, "s").await;
}

async fn the_permits_of_a_name_in_other_use_are_a_mismatch(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let semaphore = locks.semaphore("s", 5);
    for lock in [other.mutex("s"), other.semaphore("s", 4).permits(4)] {
        let guard = lock.wait(SOON).acquire().await.unwrap();
        for outcome in [
            semaphore.available().await.map(drop),
            semaphore.drain().await.map(drop),
        ] {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CapacityMismatch, "{error}");
            assert_eq!(error.name(), Some("s"));
        }
        give_back(guard).await;
        assert_nothing_left(&store, &locks, "s").await;
    }
}

/// Counts the permits inside the resource, where the holders meet.
async fn permits_never_exceed_the_capacity_while_many_drain_them(store: Store) {
    let pool = Arc::new(Witness::of(5));
    let mut tasks = JoinSet::new();
    for number in 0..4 {
        let (locks, pool) = (store.client(), Arc::clone(&pool));
        tasks.spawn(async move {
            let semaphore = locks.semaphore("s", 5);
            for _ in 0..15 {
                let (guard, permits) = match number {
                    // Takes some, so that the others find different numbers.
                    0 => {
                        let permits = fastrand::u32(1..=3);
                        let lock = semaphore.permits(permits).wait(6 * SOON);
                        (lock.acquire().await.unwrap(), permits)
                    }
                    _ => match semaphore.drain().await {
                        Ok(drained) => drained,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                            tokio::task::yield_now().await;
                            continue;
                        }
                    },
                };
                let inside = pool.enter(permits);
                tokio::task::yield_now().await;
                drop(inside);
                give_back(guard).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(pool.assert_no_overlap().visits >= 15);
    assert_nothing_left(&store, &store.client(), "s").await;
}

async fn a_drain_takes_the_rest_when_others_are_faster(_: Store) {
    let kit = Kit::new();
    let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
    let semaphore = other.semaphore("s", 5);
    let mut request = kit.hold_next(Verb::Enqueue);
    let drains = tokio::spawn(async move { locks.semaphore("s", 5).drain().await });
    request.arrived().await;

    let one = semaphore.permits(1).try_acquire().await.unwrap();
    request.let_go();

    let (rest, permits) = drains.await.unwrap().unwrap();
    assert_eq!(permits, 4);
    assert_eq!(semaphore.available().await.unwrap(), 0);
    give_back(rest).await;
    give_back(one).await;
}

async fn a_drain_ends_when_others_are_faster_each_time(_: Store) {
    let kit = Kit::new();
    let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
    let semaphore = other.semaphore("s", 20);
    let mut request = kit.hold_next(Verb::Enqueue);
    let drains = tokio::spawn(async move { locks.semaphore("s", 20).drain().await });
    let mut others = Vec::new();
    for look in 1..=8 {
        request.arrived().await;
        others.push(semaphore.permits(1).try_acquire().await.unwrap());
        let next = kit.hold_next(Verb::Enqueue);
        assert!(!drains.is_finished(), "it ended after {look} looks");
        std::mem::replace(&mut request, next).let_go();
    }

    assert_eq!(kind(drains.await.unwrap()), ErrorKind::Busy);
    // It has taken none.
    assert_eq!(semaphore.available().await.unwrap(), 12);
    for guard in others {
        give_back(guard).await;
    }
}
