//! Tests of the acquisition of one of several locks: the first lock that is free, or the first that
//! is granted. The caller never gets two of them.

#![allow(
    clippy::async_yields_async,
    reason = "the future that is made is what gets dropped half-way"
)]

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Guard, Lock, Locks, Release};
use tests::eventually::eventually;
use tokio::task::JoinHandle;

use crate::giving_up::drop_at_every_poll;
use crate::store::{
    A_FEW_MILLIS, DEFAULT, Kind, SOON, Store, assert_nothing_left, begin, give_back, kind, soon,
    tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        the_first_name_that_is_free_is_taken
        a_free_first_lock_costs_one_request
        a_caller_that_waits_for_any_gets_the_name_that_is_released_and_no_other
        any_of_several_dropped_at_any_poll_leaves_nothing
        a_mistake_in_one_of_several_is_reported_and_nothing_is_taken
        a_hold_tells_how_long_it_is_held
    ]
}

/// Facts about failures, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_store_that_fails_does_not_end_the_wait_for_locks_of_another
        a_silent_store_takes_one_operation_however_many_of_its_locks_are_wanted
        a_free_lock_is_found_while_other_stores_are_silent
        a_lock_is_waited_for_while_another_store_is_silent
        the_wait_for_any_counts_from_the_call
    ]
}

type Any = JoinHandle<Result<Guard, Error>>;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn pool(locks: &Locks) -> [Lock; 3] {
    NAMES.map(|name| locks.mutex(name).wait(SOON))
}

async fn the_first_name_that_is_free_is_taken(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let in_the_way = other.mutex("a").acquire().await.unwrap();

    let second = Locks::any(pool(&locks)).acquire().await.unwrap();
    let third = Locks::any(pool(&locks)).try_acquire().await.unwrap();
    assert_eq!((second.name(), third.name()), ("b", "c"));
    let error = Locks::any(pool(&locks)).try_acquire().await;
    assert_eq!(kind(error), ErrorKind::Busy);
    let short = pool(&locks).map(|lock| lock.wait(Duration::from_secs(4)));
    assert_eq!(kind(Locks::any(short).acquire().await), ErrorKind::Timeout);

    give_back(in_the_way).await;
    let first = Locks::any(pool(&locks)).acquire().await.unwrap();
    assert_eq!(first.name(), "a");
    for guard in [first, second, third] {
        give_back(guard).await;
    }
    for name in NAMES {
        assert_nothing_left(&store, &locks, name).await;
    }
}

async fn a_free_first_lock_costs_one_request(store: Store) {
    let (locks, counts) = store.counted(store.fair);
    for waits in [true, false] {
        let before = counts.enqueued();
        let guard = match waits {
            true => Locks::any(pool(&locks)).acquire().await,
            false => Locks::any(pool(&locks)).try_acquire().await,
        };
        assert_eq!(counts.enqueued() - before, 1);
        give_back(guard.unwrap()).await;
    }
}

async fn a_caller_that_waits_for_any_gets_the_name_that_is_released_and_no_other(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut held = Vec::new();
    for name in NAMES {
        held.push(other.mutex(name).acquire().await.unwrap());
    }
    let waiting = tokio::spawn({
        let any = Locks::any(pool(&locks));
        async move { any.acquire().await }
    });
    for name in NAMES {
        tickets(&locks, name, 2).await;
    }

    give_back(held.remove(1)).await;
    let guard = waiting.await.unwrap().unwrap();

    assert_eq!(guard.name(), "b");
    for name in ["a", "c"] {
        tickets(&locks, name, 1).await;
    }
    // The caller also waited for these names. It has given them up, so another client gets them.
    for guard in held {
        give_back(guard).await;
    }
    for name in ["a", "c"] {
        give_back(begin(other.mutex(name)).await.unwrap().unwrap()).await;
    }
    give_back(guard).await;
    assert_nothing_left(&store, &locks, "b").await;
}

async fn any_of_several_dropped_at_any_poll_leaves_nothing(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let in_the_way = other.mutex("a").acquire().await.unwrap();
    let mut drops = 0;
    for names in [vec!["a", "b"], vec!["a"]] {
        drops += drop_at_every_poll(
            async || {
                let short = Duration::from_millis(50);
                let wanted = names.iter().map(|name| locks.mutex(*name).wait(short));
                let any = Locks::any(wanted);
                async move { any.acquire().await }
            },
            async || {
                for (name, left) in [("a", 1), ("b", 0)] {
                    tickets(&locks, name, left).await;
                }
            },
        )
        .await;
    }
    println!("{drops} drops of one of several");
    give_back(in_the_way).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_store_that_fails_does_not_end_the_wait_for_locks_of_another(_: Store) {
    let (kit, fails) = (Kit::new(), Kit::new());
    let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
    let there = fails.client().unwrap().mutex("b");
    let in_the_way = other.mutex("a").acquire().await.unwrap();

    fails.fail_next(Verb::Enqueue, Fault::Refused);
    let waiting = [there.clone(), locks.mutex("a").wait(SOON)];
    let waiting = tokio::spawn(async move { Locks::any(waiting).acquire().await });
    tickets(&locks, "a", 2).await;
    give_back(in_the_way).await;
    let guard = waiting.await.unwrap().unwrap();
    assert_eq!(guard.name(), "a");

    // If the other lock is not released in time, the failure is the error.
    fails.fail_next(Verb::Enqueue, Fault::Refused);
    let short = Duration::from_millis(50);
    let both = [there, other.mutex("a").wait(short)];
    let error = Locks::any(both).acquire().await;
    assert_eq!(kind(error), ErrorKind::Unavailable);
    give_back(guard).await;
    tickets(&locks, "a", 0).await;
}

async fn a_silent_store_takes_one_operation_however_many_of_its_locks_are_wanted(_: Store) {
    for waits in [true, false] {
        let kit = Kit::new();
        let locks = kit.client().unwrap();
        let names: Vec<_> = (0..20).map(|n| format!("n{n}")).collect();
        let wanted = names.iter().map(|name| locks.mutex(name));
        let (any, mut requests) = first_is_silent(&kit, wanted.collect(), waits).await;

        // An operation may take a second.
        kit.clock().advance(Duration::from_millis(500));
        for request in &mut requests {
            soon(request.arrived()).await;
        }
        kit.clock().advance(Duration::from_millis(500));

        assert_eq!(kind(soon(any).await.unwrap()), ErrorKind::Unknown);
        // The requests arrive now. Nobody keeps the locks. The client needs time to connect again.
        drop(requests);
        let other = kit.client().unwrap();
        for name in names {
            eventually("nothing is left", SOON, async || {
                kit.clock().advance(A_FEW_MILLIS);
                other.inspect(&name).await.unwrap().is_empty()
            })
            .await;
        }
    }
}

/// Each of the first twenty locks is of a client of its own, whose store does not answer.
async fn a_free_lock_is_found_while_other_stores_are_silent(_: Store) {
    for waits in [true, false] {
        let (kit, lives) = (Kit::new(), Kit::new());
        let silent: Vec<_> = (0..20).map(|_| kit.client().unwrap()).collect();
        let locks = lives.client().unwrap();
        let mut wanted: Vec<_> = silent.iter().map(|locks| locks.mutex("a")).collect();
        wanted.extend(["b", "c"].map(|name| locks.mutex(name)));
        let in_the_way = lives.client().unwrap().mutex("b").acquire().await.unwrap();
        let (any, requests) = first_is_silent(&kit, wanted, waits).await;

        kit.clock().advance(Duration::from_millis(100));
        let guard = soon(any).await.unwrap().unwrap();

        assert_eq!(guard.name(), "c");
        give_back(guard).await;
        give_back(in_the_way).await;
        tickets(&locks, "b", 0).await;
        drop(requests);
        tickets(&silent[0], "a", 0).await;
    }
}

async fn a_lock_is_waited_for_while_another_store_is_silent(_: Store) {
    let (kit, lives) = (Kit::new(), Kit::new());
    let locks = lives.client().unwrap();
    let in_the_way = lives.client().unwrap().mutex("b").acquire().await.unwrap();
    let wanted = vec![kit.client().unwrap().mutex("a"), locks.mutex("b")];
    let (any, _requests) = first_is_silent(&kit, wanted, true).await;

    kit.clock().advance(Duration::from_millis(100));
    tickets(&locks, "b", 2).await;
    give_back(in_the_way).await;

    let guard = soon(any).await.unwrap().unwrap();
    assert_eq!(guard.name(), "b");
    give_back(guard).await;
}

/// Before the wait is over, the first answer says that the lock is held, or no answer comes.
async fn the_wait_for_any_counts_from_the_call(_: Store) {
    for answers in [true, false] {
        let kit = Kit::new();
        let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
        let in_the_way = Locks::all(["a", "b"].map(|name| other.mutex(name)));
        let in_the_way = in_the_way.acquire().await.unwrap();
        let wait = Duration::from_millis(300);
        let wanted = ["a", "b"].map(|name| locks.mutex(name).wait(wait)).to_vec();
        let (any, mut requests) = first_is_silent(&kit, wanted, true).await;

        kit.clock().advance(Duration::from_millis(200));
        if answers {
            requests.drain(..).for_each(Hold::let_go);
            for name in ["a", "b"] {
                tickets(&other, name, 2).await;
            }
        }
        kit.clock().advance(Duration::from_millis(100));

        let error = soon(any).await.unwrap().unwrap_err();
        match answers {
            true => {
                assert_eq!(error.kind(), ErrorKind::Timeout);
                assert!(error.to_string().contains("300ms"), "{error}");
            }
            false => assert_eq!(error.kind(), ErrorKind::Unknown),
        }
        drop(requests);
        for name in ["a", "b"] {
            tickets(&other, name, 1).await;
        }
        assert_eq!(in_the_way.release().await.unwrap(), Release::Released);
    }
}

/// Starts a call for one of these locks, and stops the clock. Requests that take a ticket are held
/// back. Returns when the first of them has been sent.
async fn first_is_silent(kit: &Kit, wanted: Vec<Lock>, waits: bool) -> (Any, Vec<Hold>) {
    kit.clock().stop();
    let mut requests: Vec<_> = wanted
        .iter()
        .map(|_| kit.hold_next(Verb::Enqueue))
        .collect();
    let any = tokio::spawn(async move {
        match waits {
            true => Locks::any(wanted).acquire().await,
            false => Locks::any(wanted).try_acquire().await,
        }
    });
    soon(requests[0].arrived()).await;
    (any, requests)
}

async fn a_mistake_in_one_of_several_is_reported_and_nothing_is_taken(store: Store) {
    let locks = store.client();
    let names = ["a", ""].map(|name| locks.mutex(name));

    assert_eq!(kind(Locks::any(names).acquire().await), ErrorKind::Config);
    assert_eq!(kind(Locks::any([]).acquire().await), ErrorKind::Config);

    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_hold_tells_how_long_it_is_held(store: Store) {
    let locks = store.client();
    let outer = locks.mutex("a").acquire().await.unwrap();
    let next = begin(locks.mutex("a").wait(SOON));
    tokio::time::sleep(A_FEW_MILLIS).await;
    let inner = outer.reenter().unwrap();

    let (before, view) = (outer.elapsed(), outer.held());
    assert!(before >= A_FEW_MILLIS);
    assert!(inner.elapsed() >= before);
    give_back(inner).await;
    give_back(outer).await;

    // Each holder counts from its own grant, even if a ticket is handed over inside the process.
    let next = next.await.unwrap().unwrap();
    assert!(next.elapsed() + before <= view.elapsed());
    assert!(view.elapsed() > before);
    give_back(next).await;
}
