//! Tests with a holder that gives back some permits of a semaphore and keeps the others.

#![allow(
    clippy::async_yields_async,
    reason = "the future that is made is what gets dropped half-way"
)]

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Guard, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::stores::Answers;
use tests::witness::Witness;
use tokio::task::{JoinHandle, JoinSet};

use crate::giving_up::drop_at_every_poll;
use crate::store::{
    DEFAULT, Kind, LEASE, SOON, STALL, Store, assert_nothing_left, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_waiter_for_permits_is_woken_when_they_are_given_back
        permits_never_exceed_the_capacity_while_some_are_given_back
        giving_back_none_or_all_permits_is_refused_and_changes_nothing
        guards_of_one_hold_give_back_from_the_same_permits
        a_lost_lock_gives_no_permits_back
        permits_given_back_by_a_call_dropped_at_any_poll_go_to_others
    ]
}

/// Facts about lost requests and replies, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        giving_permits_back_is_repeated_until_it_is_acknowledged
        an_acknowledgement_of_an_earlier_renewal_gives_nothing_back
    ]
}

fn begin(lock: Lock) -> JoinHandle<Guard> {
    tokio::spawn(async move { lock.wait(LEASE).acquire().await.unwrap() })
}

/// Waits for the guard of a waiter that is granted by a wake-up. The waiter's first renewal would
/// come only after twenty seconds.
async fn at_once(waiter: JoinHandle<Guard>) -> Guard {
    soon(waiter).await.unwrap()
}

async fn permits(store: &Store) -> Vec<u32> {
    let places = store.client().inspect("s").await.unwrap();
    places.iter().map(|place| place.permits).collect()
}

async fn a_waiter_for_permits_is_woken_when_they_are_given_back(store: Store) {
    let observer = store.client();
    let guard = store.client().semaphore("s", 5).permits(5).acquire().await;
    let guard = guard.unwrap();
    let grant = guard.grant_id();
    let mut line = Vec::new();
    for place in 2..4 {
        line.push(begin(store.client().semaphore("s", 5).permits(2)));
        tickets(&observer, "s", place).await;
    }
    let mut line = line.into_iter();

    guard.release_permits(1).await.unwrap();
    assert!(line.as_slice().iter().all(|waiter| !waiter.is_finished()));
    guard.release_permits(1).await.unwrap();
    let first = at_once(line.next().unwrap()).await;
    assert!(!line.as_slice()[0].is_finished());
    guard.release_permits(2).await.unwrap();
    let second = at_once(line.next().unwrap()).await;

    assert_eq!(permits(&store).await, [1, 2, 2]);
    assert!(guard.is_valid());
    assert_eq!(guard.grant_id(), grant);
    let more = observer.semaphore("s", 5).permits(1);
    assert_eq!(kind(more.try_acquire().await), ErrorKind::Busy);
    for guard in [guard, first, second] {
        give_back(guard).await;
    }
    assert_nothing_left(&store, &observer, "s").await;
}

/// The fact counts the permits inside a resource that all holders enter.
async fn permits_never_exceed_the_capacity_while_some_are_given_back(store: Store) {
    let pool = Arc::new(Witness::of(5));
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let (locks, pool) = (store.client(), Arc::clone(&pool));
        tasks.spawn(async move {
            for _ in 0..10 {
                let mut held = fastrand::u32(2..=5);
                let lock = locks.semaphore("s", 5).permits(held).wait(6 * SOON);
                let guard = lock.acquire().await.unwrap();
                while held > 1 {
                    let inside = pool.enter(held);
                    tokio::task::yield_now().await;
                    drop(inside);
                    let part = fastrand::u32(1..held);
                    guard.release_permits(part).await.unwrap();
                    held -= part;
                }
                let inside = pool.enter(held);
                tokio::task::yield_now().await;
                drop(inside);
                give_back(guard).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(pool.assert_no_overlap().visits >= 120);
    assert_nothing_left(&store, &store.client(), "s").await;
}

async fn giving_back_none_or_all_permits_is_refused_and_changes_nothing(store: Store) {
    let locks = store.client();
    let guard = locks.semaphore("s", 5).permits(3).acquire().await.unwrap();

    for (given, says) in [
        (0, "1 or more"),
        (3, "release the guard instead"),
        (4, "release the guard instead"),
        (u32::MAX, "of the 3 permits"),
    ] {
        let error = guard.release_permits(given).await.unwrap_err();
        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("s")));
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(permits(&store).await, [3]);
    guard.release_permits(2).await.unwrap();
    assert_eq!(kind(guard.release_permits(1).await), ErrorKind::Config);
    give_back(guard).await;

    let catalog = locks.rwlock("a");
    for lock in [catalog.read(), catalog.write()] {
        let guard = lock.wait(SOON).acquire().await.unwrap();
        let error = guard.release_permits(1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("downgrade"), "{error}");
        assert!(guard.is_valid());
        give_back(guard).await;
    }
}

async fn guards_of_one_hold_give_back_from_the_same_permits(store: Store) {
    let locks = store.client();
    let one = locks.semaphore("s", 8).permits(8).acquire().await.unwrap();
    let other = one.reenter().unwrap();

    // The two calls are made at the same time. They are carried out one after the other, and each
    // gives back its own number of permits.
    let (first, second) = tokio::join!(one.release_permits(3), other.release_permits(2));
    first.unwrap();
    second.unwrap();

    assert_eq!(permits(&store).await, [3]);
    assert_eq!(kind(other.release_permits(3).await), ErrorKind::Config);
    give_back(one).await;
    other.release_permits(1).await.unwrap();
    assert_eq!(permits(&store).await, [2]);
    let rest = store.client().semaphore("s", 8).permits(6);
    give_back(rest.try_acquire().await.unwrap()).await;
    give_back(other).await;
    assert_nothing_left(&store, &locks, "s").await;
}

async fn a_lost_lock_gives_no_permits_back(store: Store) {
    let ttl = Duration::from_millis(300);
    let lock = store.client().semaphore("s", 3).permits(3);
    let guard = lock.ttl(ttl).renew(false).acquire().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::Expired);

    let lost = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(kind(guard.release_permits(1).await), lost);
}

async fn permits_given_back_by_a_call_dropped_at_any_poll_go_to_others(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut drops = 0;
    for round in 0..10 {
        let guard = tokio::sync::Mutex::new(None);
        drops += drop_at_every_poll(
            async || {
                let new = locks.semaphore("s", 5).permits(5).wait(SOON);
                *guard.lock().await = Some(new.acquire().await.unwrap());
                async {
                    guard
                        .lock()
                        .await
                        .as_ref()
                        .unwrap()
                        .release_permits(3)
                        .await
                }
            },
            async || {
                let guard = guard.lock().await.take().unwrap();
                assert!(guard.is_valid());
                // The call of `release_permits` was dropped, so the keeper repeats its request. In
                // even rounds the test waits until the keeper has done this. In odd rounds the test
                // releases the whole ticket at once, mostly before the keeper can repeat the
                // request.
                if round % 2 == 0 {
                    give_back(at_once(begin(other.semaphore("s", 5).permits(3))).await).await;
                    assert_eq!(permits(&store).await, [2]);
                }
                drop(guard);
                assert_nothing_left(&store, &locks, "s").await;
            },
        )
        .await;
    }
    println!("{drops} drops of a part that was being given back");
    // The memory store answers within the first poll, so no future is dropped there.
    assert!(drops > 0 || store.timings().answers == Answers::TheCall);

    let guard = locks.semaphore("s", 5).permits(5).acquire().await.unwrap();
    drop(guard.release_permits(3));
    assert_eq!(permits(&store).await, [5]);
    give_back(guard).await;
}

async fn giving_permits_back_is_repeated_until_it_is_acknowledged(_: Store) {
    type Befall = fn(&Kit);
    let faults: [(Befall, ErrorKind); 4] = [
        (|kit| kit.lose_next_reply(Verb::Renew), ErrorKind::Unknown),
        (|kit| kit.lose_next_request(Verb::Renew), ErrorKind::Unknown),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Refused),
            ErrorKind::Unavailable,
        ),
        // The caller does not get `Config`, because `Config` would mean that nothing has changed.
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Config),
            ErrorKind::Unavailable,
        ),
    ];
    for (befall, expected) in faults {
        for renew in [true, false] {
            let kit = Kit::new();
            let patient = Locks::builder().ttl(LEASE).op_timeout(STALL);
            let locks = kit.client_with(patient.clone()).unwrap();
            let other = kit.client_with(patient).unwrap();
            let lock = locks.semaphore("s", 5).permits(5).renew(renew);
            let guard = lock.acquire().await.unwrap();
            let waits = begin(other.semaphore("s", 5).permits(2));
            tickets(&locks, "s", 2).await;
            befall(&kit);

            assert_eq!(kind(guard.release_permits(2).await), expected);

            give_back(at_once(waits).await).await;
            // The repetitions have not given back more than three permits.
            guard.release_permits(1).await.unwrap();
            let places = locks.inspect("s").await.unwrap();
            assert_eq!(places[0].permits, 2);
            give_back(guard).await;
            tickets(&locks, "s", 0).await;
        }
    }
}

/// Some permits are given back while a renewal of all permits is in flight. Its acknowledgement
/// does not confirm that the store has the smaller number.
async fn an_acknowledgement_of_an_earlier_renewal_gives_nothing_back(_: Store) {
    let kit = Kit::new();
    let patient = Locks::builder().op_timeout(STALL);
    let (locks, other) = (kit.client_with(patient).unwrap(), kit.client().unwrap());
    let lock = locks.semaphore("s", 5).permits(5);
    let guard = lock.acquire().await.unwrap();
    let mut before = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(4));
    before.arrived().await;
    kit.lose_next_request(Verb::Renew);

    assert_eq!(kind(guard.release_permits(2).await), ErrorKind::Unknown);
    before.let_go();

    eventually("the keeper has asked again", SOON, async || {
        let places = locks.inspect("s").await.unwrap();
        places[0].permits == 3
    })
    .await;
    give_back(
        other
            .semaphore("s", 5)
            .permits(2)
            .try_acquire()
            .await
            .unwrap(),
    )
    .await;
    give_back(guard).await;
}
