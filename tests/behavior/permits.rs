//! Tests of the permits of a semaphore: how many are free, how a caller takes all of them, and how
//! an operator changes their number.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::semaphore::Semaphore;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Locks};
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
    .into_iter()
    .chain(resizing(store))
    .collect()
}

fn resizing(store: Kind) -> Vec<Trial> {
    if !store.capability().resizes {
        return crate::store_facts![store, DEFAULT; a_store_without_stored_capacities_says_what_to_do];
    }
    crate::store_facts![store, DEFAULT;
        a_semaphore_grows_and_shrinks_while_it_is_in_use
        a_stored_capacity_counts_for_all_who_look
        a_capacity_that_is_not_possible_changes_nothing
        permits_that_many_add_at_once_are_all_added
        permits_stay_within_the_capacity_while_it_changes
    ]
}

/// Facts about events between the requests of one call, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_drain_takes_the_rest_when_others_are_faster
        a_drain_ends_when_others_are_faster_each_time
        permits_whose_answer_is_lost_are_added_once
        whether_permits_were_added_is_unknown_if_somebody_else_was_next
        permits_beyond_a_smaller_capacity_come_back_from_a_holder_that_dies
    ]
}

async fn available(semaphore: &Semaphore, permits: u32) {
    // Another client may see a release a moment later.
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

    // Three permits are free, but they are not available while somebody waits.
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

/// The fact counts the permits inside a resource that all holders enter.
async fn permits_never_exceed_the_capacity_while_many_drain_them(store: Store) {
    let pool = Arc::new(Witness::of(5));
    let mut tasks = JoinSet::new();
    for number in 0..4 {
        let (locks, pool) = (store.client(), Arc::clone(&pool));
        tasks.spawn(async move {
            let semaphore = locks.semaphore("s", 5);
            for _ in 0..15 {
                let (guard, permits) = match number {
                    // This task takes some permits, so that the others find different numbers.
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
    // The drain has taken no permit.
    assert_eq!(semaphore.available().await.unwrap(), 12);
    for guard in others {
        give_back(guard).await;
    }
}

async fn a_store_without_stored_capacities_says_what_to_do(store: Store) {
    let locks = store.client();
    let semaphore = locks.semaphore("s", 5);
    for outcome in [
        semaphore.resize(7).await,
        semaphore.add_permits(2).await.map(drop),
        semaphore.reduce_permits(2).await.map(drop),
        semaphore.forget_capacity().await,
    ] {
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("s")));
        let text = error.to_string();
        assert!(text.contains("let all callers state"), "{text}");
    }
    assert_eq!(semaphore.capacity().await.unwrap(), 5);
    assert_eq!(semaphore.available().await.unwrap(), 5);
}

/// The capacity goes from 10 to 15 to 3, and back.
async fn a_semaphore_grows_and_shrinks_while_it_is_in_use(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let semaphore = |locks: &Locks| locks.semaphore("s", 10);
    let ten = semaphore(&locks).permits(10).acquire().await.unwrap();
    let waits = begin(semaphore(&other).permits(5));
    tickets(&locks, "s", 2).await;

    semaphore(&operator).resize(15).await.unwrap();
    let five = waits.await.unwrap().unwrap();
    semaphore(&operator).resize(3).await.unwrap();

    ten.held().ensure(SOON).await.unwrap();
    five.held().ensure(SOON).await.unwrap();
    let late = begin(semaphore(&operator).permits(3));
    tickets(&locks, "s", 3).await;
    give_back(ten).await;
    tickets(&locks, "s", 2).await;
    assert_eq!(semaphore(&locks).available().await.unwrap(), 0);
    assert!(!late.is_finished(), "five are out, and there are three");
    give_back(five).await;
    let three = late.await.unwrap().unwrap();
    assert_eq!(
        kind(semaphore(&locks).permits(1).try_acquire().await),
        ErrorKind::Busy
    );

    semaphore(&operator).forget_capacity().await.unwrap();
    let seven = semaphore(&other).permits(7).acquire().await.unwrap();
    give_back(three).await;
    give_back(seven).await;
    forgotten(&semaphore(&locks)).await;
}

/// Forgets the stored capacity.
async fn forgotten(semaphore: &Semaphore) {
    semaphore.forget_capacity().await.unwrap();
    // If there is nothing to forget, the call succeeds too.
    semaphore.forget_capacity().await.unwrap();
}

async fn a_stored_capacity_counts_for_all_who_look(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let (ours, theirs) = (locks.semaphore("s", 5), other.semaphore("s", 2));
    assert_eq!(ours.capacity().await.unwrap(), 5);
    ours.resize(4).await.unwrap();
    for semaphore in [&ours, &theirs] {
        assert_eq!(semaphore.capacity().await.unwrap(), 4);
        available(semaphore, 4).await;
    }

    let one = ours.permits(1).acquire().await.unwrap();
    available(&theirs, 3).await;
    let places = locks.inspect("s").await.unwrap();
    assert_eq!((places.len(), places[0].capacity), (1, 4));
    // The drain takes the permits that are there, even if they are more than its caller states.
    let (rest, permits) = theirs.drain().await.unwrap();
    assert_eq!(permits, 3);
    available(&ours, 0).await;
    assert_eq!(ours.reduce_permits(3).await.unwrap(), 1);
    let places = locks.inspect("s").await.unwrap();
    assert!(
        places
            .iter()
            .all(|place| place.granted && place.capacity == 1)
    );

    give_back(rest).await;
    available(&theirs, 0).await;
    let mutex = other.mutex("s").try_acquire().await;
    assert_eq!(kind(mutex), ErrorKind::CapacityMismatch);
    give_back(one).await;
    available(&theirs, 1).await;
    forgotten(&ours).await;
    assert_eq!(theirs.capacity().await.unwrap(), 2);
    available(&theirs, 2).await;
}

async fn a_capacity_that_is_not_possible_changes_nothing(store: Store) {
    let locks = store.client();
    let semaphore = locks.semaphore("s", 5);
    for outcome in [
        semaphore.resize(Semaphore::MAX_PERMITS + 1).await,
        semaphore.add_permits(u32::MAX).await.map(drop),
        semaphore.reduce_permits(6).await.map(drop),
        locks.semaphore("s", 0).resize(5).await,
    ] {
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("s")));
    }
    assert_eq!(semaphore.capacity().await.unwrap(), 5);
    let other = locks.semaphore("s", 4).permits(1).acquire().await.unwrap();
    let refused = semaphore.resize(7).await;
    assert_eq!(kind(refused), ErrorKind::CapacityMismatch);
    give_back(other).await;
    semaphore.resize(Semaphore::MAX_PERMITS).await.unwrap();
    assert_eq!(kind(semaphore.add_permits(1).await), ErrorKind::Config);
    semaphore.resize(0).await.unwrap();
    assert_eq!(kind(semaphore.drain().await), ErrorKind::Busy);
    forgotten(&semaphore).await;
}

async fn permits_that_many_add_at_once_are_all_added(store: Store) {
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let locks = store.client();
        tasks.spawn(async move {
            let semaphore = locks.semaphore("s", 5);
            for _ in 0..5 {
                semaphore.add_permits(3).await.unwrap();
                semaphore.reduce_permits(1).await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let semaphore = store.client().semaphore("s", 5);
    assert_eq!(semaphore.capacity().await.unwrap(), 5 + 4 * 5 * 2);
    forgotten(&semaphore).await;
}

/// The fact counts the permits inside the resource. The capacity is never above 5.
async fn permits_stay_within_the_capacity_while_it_changes(store: Store) {
    let pool = Arc::new(Witness::of(5));
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let (locks, pool) = (store.client(), Arc::clone(&pool));
        tasks.spawn(async move {
            for _ in 0..15 {
                let permits = fastrand::u32(1..=3);
                let lock = locks.semaphore("s", 5).permits(permits).wait(6 * SOON);
                let guard = lock.acquire().await.unwrap();
                let inside = pool.enter(permits);
                tokio::task::yield_now().await;
                drop(inside);
                give_back(guard).await;
            }
        });
    }
    let semaphore = store.client().semaphore("s", 5);
    for capacity in [0, 5, 1, 4, 2, 3, 0, 5] {
        semaphore.resize(capacity).await.unwrap();
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(pool.assert_no_overlap().visits, 45);
    forgotten(&semaphore).await;
}

async fn permits_whose_answer_is_lost_are_added_once(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let semaphore = locks.semaphore("s", 5);
    kit.lose_next_reply(Verb::Resize);
    assert_eq!(semaphore.add_permits(2).await.unwrap(), 7);
    kit.lose_next_request(Verb::Resize);
    assert_eq!(semaphore.add_permits(2).await.unwrap(), 9);
    kit.lose_next_reply(Verb::Resize);
    assert_eq!(semaphore.reduce_permits(4).await.unwrap(), 5);
    kit.lose_next_reply(Verb::Resize);
    semaphore.forget_capacity().await.unwrap();
    kit.lose_next_reply(Verb::Resize);
    semaphore.resize(6).await.unwrap();
    assert_eq!(semaphore.capacity().await.unwrap(), 6);
}

async fn whether_permits_were_added_is_unknown_if_somebody_else_was_next(_: Store) {
    let kit = Kit::new();
    let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
    let (ours, theirs) = (locks.semaphore("s", 5), other.semaphore("s", 5));
    for (adds, capacity) in [(true, 20), (false, 7)] {
        kit.lose_next_reply(Verb::Resize);
        let mut again = kit.hold_next(Verb::Resize);
        let semaphore = ours.clone();
        let change = tokio::spawn(async move {
            match adds {
                true => semaphore.add_permits(2).await.map(drop),
                false => semaphore.resize(7).await,
            }
        });
        again.arrived().await;
        theirs.resize(20).await.unwrap();
        again.let_go();

        let changed = change.await.unwrap();
        match adds {
            true => assert_eq!(kind(changed), ErrorKind::Unknown),
            // The repetition overwrites the change of the other client. A repetition that sets a
            // capacity has the same effect as the first request, so the caller gets no error.
            false => changed.unwrap(),
        }
        assert_eq!(theirs.capacity().await.unwrap(), capacity);
    }
}

async fn permits_beyond_a_smaller_capacity_come_back_from_a_holder_that_dies(_: Store) {
    let kit = Kit::new();
    let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
    let (short, long) = (Duration::from_secs(10), Duration::from_secs(60));
    let five = locks.semaphore("s", 5).permits(5).ttl(short).renew(false);
    let five = five.acquire().await.unwrap();
    let semaphore = other.semaphore("s", 5);
    semaphore.resize(2).await.unwrap();
    let waits = begin(semaphore.permits(2).ttl(long));
    tickets(&other, "s", 2).await;

    kit.clock().advance(short + Duration::from_secs(1));

    give_back(waits.await.unwrap().unwrap()).await;
    drop(five);
}
