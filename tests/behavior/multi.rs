//! Tests of the acquisition of several locks at once: all or none, in one order, within one time
//! budget.

#![allow(
    clippy::async_yields_async,
    reason = "the future that is made is what gets dropped half-way"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Lock, Locks, LostReason, OnLost, Release, Wait};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tests::stores::Answers;
use tests::witness::Witness;
use tokio::task::JoinSet;

use crate::giving_up::drop_at_every_poll;
use crate::store::{
    A_FEW_MILLIS, Kind, SLACK, SOON, Store, assert_nothing_left, give_back, in_line, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        many_clients_that_take_names_in_any_order_all_come_through
        names_on_two_stores_are_taken_in_one_order
        a_lock_that_is_not_free_leaves_the_others_free
        one_wait_budget_covers_all_locks
        a_wait_of_zero_takes_free_locks_or_is_refused
        limits_of_the_hold_begin_when_all_are_held
        an_ensure_of_several_holds_for_each_of_them
        a_name_that_is_given_twice_is_locked_once_in_the_stronger_way
        permits_of_one_semaphore_are_added_up
        more_permits_than_there_are_is_a_mistake_and_nothing_is_taken
        a_semaphore_of_two_capacities_is_a_mismatch
        a_timeout_tells_the_whole_wait
        a_name_as_mutex_and_as_semaphore_is_a_mismatch
        the_loss_of_one_stops_the_work_and_releases_the_others
        a_lock_that_only_reports_its_loss_stops_nothing
        a_lock_lost_while_the_others_are_waited_for_is_an_error
        several_locks_dropped_at_any_poll_leave_nothing
        locks_held_around_are_re_entered_inside
        an_empty_list_of_locks_waits_for_nothing
    ]
}

/// Each client enters the resources of all its names at the same time.
async fn many_clients_that_take_names_in_any_order_all_come_through(store: Store) {
    let resources: Arc<[Witness; 4]> = Arc::new(std::array::from_fn(|_| Witness::exclusive()));
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (locks, resources) = (store.client(), Arc::clone(&resources));
        tasks.spawn(async move {
            for _ in 0..12 {
                let mut wanted = vec![0, 1, 2, 3];
                fastrand::shuffle(&mut wanted);
                wanted.truncate(fastrand::usize(2..=3));
                let names = wanted.iter().map(|i| locks.mutex(format!("r{i}")));
                let all = Locks::all(names).wait(6 * SOON);
                let done: Result<(), Error> = all
                    .run(async |held| {
                        assert_eq!(held.len(), wanted.len());
                        let inside: Vec<_> =
                            wanted.iter().map(|&i| resources[i].enter(1)).collect();
                        tokio::task::yield_now().await;
                        drop(inside);
                        Ok(())
                    })
                    .await;
                done.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let visits: u64 = resources
        .iter()
        .map(|resource| resource.assert_no_overlap().visits)
        .sum();
    assert!((8 * 12 * 2..=8 * 12 * 3).contains(&visits), "{visits}");
    for i in 0..4 {
        assert_nothing_left(&store, &store.client(), &format!("r{i}")).await;
    }
}

async fn names_on_two_stores_are_taken_in_one_order(store: Store) {
    let (here, there) = (store.client(), Locks::connect("memory:").unwrap());
    let resource = Arc::new(Witness::exclusive());
    let mut tasks = JoinSet::new();
    for turned in [false, true, false, true] {
        let (one, other) = (here.mutex("a"), there.mutex("a"));
        let both = if turned { [one, other] } else { [other, one] };
        let (both, resource) = (Locks::all(both).wait(3 * SOON), Arc::clone(&resource));
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = both.acquire().await.unwrap();
                assert_eq!(guard.len(), 2);
                let inside = resource.enter(1);
                tokio::task::yield_now().await;
                drop(inside);
                assert_eq!(guard.release().await.unwrap(), Release::Released);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(resource.assert_no_overlap().visits, 80);
}

async fn a_lock_that_is_not_free_leaves_the_others_free(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let in_the_way = other.mutex("b").acquire().await.unwrap();
    let all = Locks::all(["c", "b", "a"].map(|name| locks.mutex(name)));

    let busy = all.try_acquire().await.unwrap_err();
    assert_eq!((busy.kind(), busy.name()), (ErrorKind::Busy, Some("b")));
    if let Answers::TheCall = store.timings().answers {
        // This store gives the first lock back before it answers. On another store its ticket may
        // be there for a moment longer.
        assert!(locks.inspect("a").await.unwrap().is_empty());
    }
    let late = all.clone().wait(SOON / 2).acquire().await;
    let late = late.unwrap_err();
    assert_eq!((late.kind(), late.name()), (ErrorKind::Timeout, Some("b")));

    for free in ["a", "c"] {
        let guard = other.mutex(free).wait(SOON).acquire().await.unwrap();
        give_back(guard).await;
    }
    tickets(&other, "b", 1).await; // its ticket is gone too
    give_back(in_the_way).await;
    let all = all.try_acquire().await.unwrap();
    assert_eq!(
        all.iter().map(|held| held.name()).collect::<Vec<_>>(),
        ["a", "b", "c"]
    );
    assert!(all.get("b").unwrap().is_valid() && all.get("d").is_none());
    assert_eq!(all.release().await.unwrap(), Release::Released);
}

async fn one_wait_budget_covers_all_locks(store: Store) {
    let (locks, other) = (store.client(), store.client());
    // Half of the budget must be more than the slack. Otherwise the check below could not tell one
    // budget for both locks from a budget for each lock.
    let budget = Duration::from_secs(8);
    let first = other.mutex("a").acquire().await.unwrap();
    let second = other.mutex("b").acquire().await.unwrap();
    let began = Instant::now();
    let both = Locks::all([locks.mutex("a"), locks.mutex("b")]).wait(budget);
    let waits = tokio::spawn(async move { both.acquire().await });
    in_line(&store, &other, "a", 1, 1).await;
    tokio::time::sleep(budget / 2).await; // uses up half of the budget
    give_back(first).await;

    let error = waits.await.unwrap().unwrap_err();

    let (waited, awake) = (began.elapsed(), awake_since(began));
    assert_eq!(
        (error.kind(), error.name()),
        (ErrorKind::Timeout, Some("b"))
    );
    // If each lock had a budget of its own, the wait would last half a budget longer.
    assert!(waited >= budget && awake < budget + SLACK, "{waited:?}");
    tickets(&other, "a", 0).await;
    give_back(second).await;
    assert_nothing_left(&store, &locks, "b").await;
}

async fn a_wait_of_zero_takes_free_locks_or_is_refused(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let both = Locks::all([locks.mutex("a"), locks.mutex("b")]).wait(Duration::ZERO);

    let guard = both.acquire().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    let in_the_way = other.mutex("b").acquire().await.unwrap();

    assert_eq!(kind(both.acquire().await), ErrorKind::Busy);
    give_back(in_the_way).await;
}

/// The first lock was given back because the second one was busy. It was not in use, so its limits
/// do not count yet.
async fn limits_of_the_hold_begin_when_all_are_held(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let in_the_way = other.mutex("b").acquire().await.unwrap();
    let (least, most) = (Duration::from_millis(300), Duration::from_secs(3));
    let limited = |lock: Lock| lock.min_hold(least).max_hold(most);
    let both = Locks::all(["a", "b"].map(|name| limited(locks.mutex(name)))).wait(SOON);

    assert_eq!(kind(both.try_acquire().await), ErrorKind::Busy);
    tickets(&other, "a", 0).await;
    let waits = tokio::spawn(async move { both.acquire().await });
    tickets(&other, "b", 2).await;
    tokio::time::sleep(most + most / 6).await; // no event reports that a hold would be over
    // Both locks are granted after this moment. How long after the grant this task continues
    // depends on the machine.
    let not_held = Instant::now();
    give_back(in_the_way).await;

    let guard = waits.await.unwrap().unwrap();
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    for name in ["a", "b"] {
        give_back(other.mutex(name).wait(SOON).acquire().await.unwrap()).await;
        assert!(not_held.elapsed() >= least - A_FEW_MILLIS / 2, "{name}");
    }
}

async fn an_ensure_of_several_holds_for_each_of_them(store: Store) {
    let locks = store.client();
    let (short, long) = (Duration::from_secs(8), Duration::from_secs(32));
    let once = |name, ttl| locks.mutex(name).ttl(ttl).renew(false);
    let both = Locks::all([once("a", short), once("b", long)]);
    let guard = both.acquire().await.unwrap();
    eventually("the shorter has aged", SOON, async || {
        guard.remaining() < short * 4 / 5
    })
    .await;

    let asked = Instant::now();
    guard.ensure(short * 9 / 10).await.unwrap();
    assert!(guard.remaining() + asked.elapsed() >= short * 4 / 5);

    assert_eq!(kind(guard.ensure(2 * short).await), ErrorKind::Config);
    assert!(guard.is_valid());
    assert_eq!(guard.release().await.unwrap(), Release::Released);
}

async fn a_name_that_is_given_twice_is_locked_once_in_the_stronger_way(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("a");
    let all = Locks::all([catalog.read(), catalog.write(), catalog.read()]);

    let guard = all.try_acquire().await.unwrap();

    assert_eq!(guard.len(), 1);
    let other = store.client();
    let read = other.rwlock("a").read().try_acquire().await;
    assert_eq!(kind(read), ErrorKind::Busy);
    assert_eq!(guard.release().await.unwrap(), Release::Released);
}

/// The fact counts the permits that another client can get.
async fn permits_of_one_semaphore_are_added_up(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let (pool, elsewhere) = (locks.semaphore("s", 7), other.semaphore("s", 7));
    let all = Locks::all([
        pool.permits(2),
        locks.mutex("a"),
        pool.permits(3),
        pool.permits(1),
    ]);

    let guard = all.try_acquire().await.unwrap();

    assert_eq!(guard.len(), 2);
    let too_many = elsewhere.permits(2).try_acquire().await;
    assert_eq!(kind(too_many), ErrorKind::Busy);
    give_back(elsewhere.permits(1).try_acquire().await.unwrap()).await;
    let places = other.inspect("s").await.unwrap();
    assert_eq!(places.iter().map(|place| place.permits).sum::<u32>(), 6);
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    assert_nothing_left(&store, &locks, "s").await;
}

async fn more_permits_than_there_are_is_a_mistake_and_nothing_is_taken(store: Store) {
    let (locks, other) = (store.client(), store.client());
    // If the library sent a request for this name, the error would be `Busy`.
    let in_the_way = other.mutex("a").acquire().await.unwrap();
    let most = lockcore::backend::FULL.get() - 1;
    for (capacity, permits) in [(5, [2, 3, 1]), (most, [most, most, most])] {
        let pool = locks.semaphore("s", capacity);
        let all = Locks::all(
            permits
                .map(|k| pool.permits(k))
                .into_iter()
                .chain([locks.mutex("a")]),
        );

        let error = all.try_acquire().await.unwrap_err();

        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("s")));
        let of = format!("of {capacity}");
        assert!(error.to_string().contains(&of), "{error}");
    }
    give_back(in_the_way).await;
    assert_nothing_left(&store, &locks, "s").await;
}

async fn a_semaphore_of_two_capacities_is_a_mismatch(store: Store) {
    let locks = store.client();
    let both = [5, 6].map(|capacity| locks.semaphore("s", capacity).permits(1));

    let error = Locks::all(both).acquire().await;

    assert_eq!(kind(error), ErrorKind::CapacityMismatch);
    assert_nothing_left(&store, &locks, "s").await;
}

/// One part of the wait is spent on the first lock, and the rest on the second.
async fn a_timeout_tells_the_whole_wait(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let wait = Duration::from_secs(8); // half of it is more than SLACK
    let first = other.mutex("a").acquire().await.unwrap();
    let second = other.mutex("b").acquire().await.unwrap();
    let both = Locks::all([locks.mutex("a"), locks.mutex("b")]).wait(wait);
    let began = Instant::now();
    let waits = tokio::spawn(async move { both.acquire().await });
    in_line(&store, &other, "a", 1, 1).await;
    tokio::time::sleep(wait / 2).await; // half of the wait
    give_back(first).await;

    let error = waits.await.unwrap().unwrap_err();

    let awake = awake_since(began);
    assert!(awake < wait + SLACK, "{awake:?}");
    assert_eq!(
        (error.kind(), error.name()),
        (ErrorKind::Timeout, Some("b"))
    );
    let text = error.to_string();
    let (_, waited) = text.split_once("after waiting ").expect("says how long");
    let waited = humantime::parse_duration(waited).unwrap();
    assert!(waited >= wait && waited <= began.elapsed(), "{text}");
    give_back(second).await;
    assert_nothing_left(&store, &locks, "b").await;
}

async fn a_name_as_mutex_and_as_semaphore_is_a_mismatch(store: Store) {
    let locks = store.client();
    let both = Locks::all([locks.semaphore("a", 5).permits(1), locks.mutex("a")]);

    assert_eq!(kind(both.acquire().await), ErrorKind::CapacityMismatch);
    assert_nothing_left(&store, &locks, "a").await;
}

/// One of the locks belongs to a client that is shut down, so this lock is lost.
async fn the_loss_of_one_stops_the_work_and_releases_the_others(store: Store) {
    let (stays, goes) = (store.client(), store.client());
    let both = Locks::all([stays.mutex("a"), goes.mutex("b")]);
    let mut told = None;

    let ended: Result<(), Error> = both
        .run(async |held| {
            told = Some(held.clone());
            tokio::spawn(async move { goes.shutdown(Duration::ZERO).await });
            std::future::pending().await
        })
        .await;

    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Shutdown));
    assert_eq!(error.name(), Some("b"));
    let told = told.unwrap();
    let (lost, reason) = told.lost().await;
    assert_eq!((lost.name(), reason), ("b", LostReason::Shutdown));
    for name in ["a", "b"] {
        assert_nothing_left(&store, &stays, name).await;
    }
}

async fn a_lock_that_only_reports_its_loss_stops_nothing(store: Store) {
    let (stays, goes) = (store.client(), store.client());
    let told = goes.mutex("b").on_lost(OnLost::Signal);

    let ended: Result<LostReason, Error> = Locks::all([stays.mutex("a"), told])
        .run(async |held| {
            let (_, lost) = tokio::join!(goes.shutdown(Duration::ZERO), held.lost());
            assert!(!held.is_valid() && held.remaining().is_zero());
            Ok(lost.1)
        })
        .await;

    assert_eq!(ended.unwrap(), LostReason::Shutdown);
}

async fn a_lock_lost_while_the_others_are_waited_for_is_an_error(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let in_the_way = other.mutex("b").acquire().await.unwrap();
    let short = |lock: Lock| lock.ttl(Duration::from_millis(300)).renew(false);
    let both = Locks::all([short(locks.mutex("a")), locks.mutex("b")]).wait(Wait::Forever);

    let error = both.acquire().await.unwrap_err();

    // The error comes at once, because the caller cannot use the other locks without the lost one.
    assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Expired));
    assert_eq!(error.name(), Some("a"));
    tickets(&other, "b", 1).await;
    give_back(in_the_way).await;
    assert_nothing_left(&store, &locks, "b").await;
}

async fn several_locks_dropped_at_any_poll_leave_nothing(store: Store) {
    let locks = store.client();
    let in_the_way = locks.mutex("c").acquire().await.unwrap();
    let mut drops = 0;
    for names in [["a", "b"], ["b", "c"]] {
        drops += drop_at_every_poll(
            async || {
                let all = Locks::all(names.map(|name| locks.mutex(name)));
                let all = all.wait(Duration::from_millis(100));
                async move {
                    let ran: Result<(), Error> = all.run(async |_| Ok(())).await;
                    ran
                }
            },
            async || {
                for (name, left) in [("a", 0), ("b", 0), ("c", 1)] {
                    tickets(&locks, name, left).await;
                }
            },
        )
        .await;
    }
    println!("{drops} drops of several");
    give_back(in_the_way).await;
    assert_nothing_left(&store, &locks, "c").await;
}

async fn locks_held_around_are_re_entered_inside(store: Store) {
    let locks = store.client();
    let both = || Locks::all([locks.mutex("a"), locks.mutex("b")]).wait(SOON);

    let ended: Result<(), Error> = both()
        .run(async |outer| {
            let one: Result<_, Error> =
                locks.mutex("b").run(async |held| Ok(held.grant_id())).await;
            assert_eq!(one?, outer.get("b").unwrap().grant_id());
            let inner = both().acquire().await?;
            for (inner, outer) in inner.iter().zip(outer.iter()) {
                assert_eq!(inner.grant_id(), outer.grant_id());
            }
            inner.release().await.map(drop)
        })
        .await;

    ended.unwrap();
    for name in ["a", "b"] {
        assert_nothing_left(&store, &locks, name).await;
    }
}

async fn an_empty_list_of_locks_waits_for_nothing(_: Store) {
    let none = Locks::all([]);

    let ended: Result<bool, Error> = none.run(async |held| Ok(held.is_valid())).await;

    assert!(ended.unwrap());
    assert_eq!(
        none.try_acquire().await.unwrap().release().await.unwrap(),
        Release::Released
    );
}
