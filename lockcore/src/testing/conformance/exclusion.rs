//! Exclusion and order, as users see it: through clients of the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::fact::{Fact, any_store, group_of, that_pushes};
use super::kit::{SLACK, Store, kind};
use super::stalls::{awake_since, stalled_since};
use super::steps::{A_FEW_MILLIS, LEASE, STALL, begin, give_back, soon, tickets};
use super::witness::Witness;
use crate::error::{Error, ErrorKind};
use crate::hold::Release;

pub(super) fn all() -> Vec<Fact> {
    let any = group_of!["exclusion", true, any_store;
        a_lock_that_is_held_is_busy_for_try
        a_wait_of_zero_does_not_wait
        readers_share_and_a_writer_excludes
        the_mutex_of_a_name_is_its_write_side
        permits_are_taken_all_or_none
        a_release_of_permits_that_were_lost_frees_nothing
        another_capacity_is_refused_while_the_name_is_in_use
        names_that_look_alike_are_different_locks
        invalid_requests_get_an_error_and_take_nothing
        tokens_rise_with_every_exclusive_grant
    ];
    // At a store that does not push, waiters learn of a grant from their renewals, which are 20 s
    // apart.
    let pushing = group_of!["exclusion", true, that_pushes;
        tasks_of_two_clients_never_overlap
        waiters_of_one_client_that_give_up_harm_nobody
        a_waiter_gets_in_when_the_holder_leaves
        waiters_are_served_in_the_order_they_came
        a_waiting_writer_is_not_overtaken_by_later_readers
        readers_behind_a_writer_hold_together_up_to_the_next_writer
        a_semaphore_never_gives_more_than_it_has
        a_large_request_in_line_is_not_overtaken_by_small_ones
        two_tasks_that_want_all_permits_never_get_one_each
        inspect_shows_holders_and_waiters
    ];
    [any, pushing].concat()
}

async fn tasks_of_two_clients_never_overlap(store: Store) {
    let witness = Arc::new(Witness::exclusive());
    let mut tasks = JoinSet::new();
    for locks in [store.client(), store.client()] {
        for _ in 0..8 {
            let (locks, witness) = (locks.clone(), Arc::clone(&witness));
            tasks.spawn(async move {
                for _ in 0..25 {
                    let guard = locks.mutex("hot").acquire().await.unwrap();
                    let visit = witness.enter(1);
                    tokio::task::yield_now().await;
                    drop(visit);
                    give_back(guard).await;
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }

    assert_eq!(witness.assert_no_overlap().visits, 2 * 8 * 25);
}

/// Every second wait is too short, so tickets leave from the middle of the line all the time.
async fn waiters_of_one_client_that_give_up_harm_nobody(store: Store) {
    let witness = Arc::new(Witness::exclusive());
    let locks = store.client();
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (locks, witness) = (locks.clone(), Arc::clone(&witness));
        tasks.spawn(async move {
            let mut served = 0;
            for turn in 0..20 {
                let wait = match (task + turn) % 2 {
                    0 => Duration::from_millis(u64::from(1 + (task * 7 + turn) % 20_u32)),
                    _ => LEASE,
                };
                match locks.mutex("hot").wait(wait).acquire().await {
                    Ok(guard) => {
                        let visit = witness.enter(1);
                        tokio::task::yield_now().await;
                        drop(visit);
                        served += 1;
                        drop(guard);
                    }
                    Err(error) => assert!(wait < LEASE, "{error}"),
                }
            }
            served
        });
    }
    let served: u64 = tasks.join_all().await.into_iter().sum();

    assert_eq!(witness.assert_no_overlap().visits, served);
    assert!(served >= 16 * 10, "{served}");
}

async fn a_lock_that_is_held_is_busy_for_try(store: Store) {
    let asked = Instant::now();
    let guard = store.client().mutex("a").acquire().await.unwrap();

    let other = store.client();
    let error = other.mutex("a").try_acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(error.name(), Some("a"));
    if let Some(retry_after) = error.retry_after() {
        let whole = retry_after + asked.elapsed();
        assert!(whole >= LEASE - A_FEW_MILLIS, "{whole:?}");
    }
    assert!(!error.may_hold());
    give_back(guard).await;
    give_back(other.mutex("a").try_acquire().await.unwrap()).await;
}

async fn a_waiter_gets_in_when_the_holder_leaves(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let other = store.client();
    let asked = Instant::now();
    let waiter = begin(other.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;

    let token = guard.fencing_token().unwrap();
    drop(guard);

    let next = soon(waiter).await.unwrap().unwrap();
    assert!(next.fencing_token().unwrap() > token);
    // The waiter was granted by a wake-up. So its lease began when it sent its last request in
    // line. At a store with sessions, it began when the session was last confirmed, up to a quarter
    // of the lease earlier.
    let whole = next.remaining() + asked.elapsed();
    assert!(whole > LEASE / 4 * 3 - SLACK, "{whole:?}");
}

async fn a_wait_of_zero_does_not_wait(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a").wait(Duration::ZERO);
    let guard = lock.acquire().await.unwrap();

    assert_eq!(kind(lock.acquire().await), ErrorKind::Busy);
    give_back(guard).await;
}

async fn waiters_are_served_in_the_order_they_came(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let mut waiters = JoinSet::new();
    for number in 0..20 {
        let (lock, served) = (locks.mutex("a").wait(LEASE), served.clone());
        waiters.spawn(async move {
            let guard = lock.acquire().await.unwrap();
            served
                .send((number, guard.fencing_token().unwrap()))
                .unwrap();
            give_back(guard).await;
        });
        tickets(&locks, "a", number + 2).await;
    }
    drop((guard, served));

    let all = soon(async {
        let mut all = Vec::new();
        while let Some(one) = order.recv().await {
            all.push(one);
        }
        all
    });
    let (numbers, tokens): (Vec<_>, Vec<_>) = all.await.into_iter().unzip();
    assert_eq!(numbers, (0..20).collect::<Vec<_>>());
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    waiters.join_all().await;
}

async fn readers_share_and_a_writer_excludes(store: Store) {
    let catalog = store.client().rwlock("c");
    let one = catalog.read().acquire().await.unwrap();
    let other = store.client().rwlock("c").read().acquire().await.unwrap();

    assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);
    give_back(one).await;
    assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);
    give_back(other).await;
    let writer = catalog.write().try_acquire().await.unwrap();
    assert_eq!(kind(catalog.read().try_acquire().await), ErrorKind::Busy);
    give_back(writer).await;
}

async fn a_waiting_writer_is_not_overtaken_by_later_readers(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let reader = catalog.read().acquire().await.unwrap();
    let writer = begin(catalog.write().wait(LEASE));
    tickets(&locks, "c", 2).await;

    assert_eq!(kind(catalog.read().try_acquire().await), ErrorKind::Busy);
    let late_reader = begin(catalog.read().wait(LEASE));
    tickets(&locks, "c", 3).await;
    drop(reader);

    let writer = soon(writer).await.unwrap().unwrap();
    assert!(!late_reader.is_finished());
    let token = writer.grant_id().as_u64();
    give_back(writer).await;
    assert!(
        soon(late_reader)
            .await
            .unwrap()
            .unwrap()
            .grant_id()
            .as_u64()
            > token
    );
}

async fn readers_behind_a_writer_hold_together_up_to_the_next_writer(store: Store) {
    let observer = store.client();
    let writer = observer.rwlock("c").write().acquire().await.unwrap();
    let mut line = Vec::new();
    for place in 0..6 {
        let catalog = store.client().rwlock("c");
        let lock = match place {
            3 => catalog.write(),
            _ => catalog.read(),
        };
        line.push(tokio::spawn(async move {
            lock.wait(LEASE).acquire().await.unwrap()
        }));
        tickets(&observer, "c", place + 2).await;
    }
    let mut line = line.into_iter();

    drop(writer);
    let left = Instant::now();
    let mut readers = Vec::new();
    for reader in line.by_ref().take(3) {
        readers.push(reader.await.unwrap());
    }
    // The readers learned of the grant from wake-ups, and not from their renewals, which are 20 s
    // apart.
    let awake = awake_since(left);
    assert!(awake < Duration::from_secs(2), "{awake:?}");

    let places = observer.inspect("c").await.unwrap();
    let granted: Vec<bool> = places.iter().map(|place| place.granted).collect();
    assert_eq!(granted, [true, true, true, false, false, false]);
    drop(readers);
    give_back(line.next().unwrap().await.unwrap()).await;
    for reader in line {
        give_back(reader.await.unwrap()).await;
    }
}

async fn the_mutex_of_a_name_is_its_write_side(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("c").acquire().await.unwrap();
    assert_eq!(
        kind(locks.rwlock("c").read().try_acquire().await),
        ErrorKind::Busy
    );
    give_back(guard).await;

    let reader = locks.rwlock("c").read().acquire().await.unwrap();
    assert_eq!(kind(locks.mutex("c").try_acquire().await), ErrorKind::Busy);
    give_back(reader).await;
}

async fn a_semaphore_never_gives_more_than_it_has(store: Store) {
    let witness = Arc::new(Witness::of(5));
    let mut tasks = JoinSet::new();
    for locks in [store.client(), store.client()] {
        for task in 0..6 {
            let (locks, witness) = (locks.clone(), Arc::clone(&witness));
            let permits = task % 3 + 1;
            tasks.spawn(async move {
                for _ in 0..15 {
                    let lock = locks.semaphore("s", 5).permits(permits);
                    let guard = lock.acquire().await.unwrap();
                    let visit = witness.enter(permits);
                    tokio::task::yield_now().await;
                    drop(visit);
                    give_back(guard).await;
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }

    assert_eq!(witness.assert_no_overlap().visits, 2 * 6 * 15);
}

async fn permits_are_taken_all_or_none(store: Store) {
    let locks = store.client();
    let pool = locks.semaphore("s", 10);
    let five = pool.permits(5).acquire().await.unwrap();
    let one = pool.permits(1).acquire().await.unwrap();

    loop {
        let began = Instant::now();
        match kind(pool.permits(5).wait(SLACK).acquire().await) {
            ErrorKind::Timeout => break,
            // The machine stood still during the request, so the client does not know its outcome.
            other => assert!(!stalled_since(began).is_zero(), "{other:?}"),
        }
    }
    tickets(&locks, "s", 2).await;
    // The request holds nothing while it waits: the four free permits can be taken.
    give_back(pool.permits(4).try_acquire().await.unwrap()).await;

    give_back(one).await;
    let rest = pool.permits(5).try_acquire().await.unwrap();
    assert_eq!(kind(pool.permits(1).try_acquire().await), ErrorKind::Busy);
    give_back(five).await;
    give_back(rest).await;
}

/// If small requests could overtake, a stream of them would keep a large request waiting for ever.
async fn a_large_request_in_line_is_not_overtaken_by_small_ones(store: Store) {
    let locks = store.client();
    let two = locks.semaphore("s", 3).permits(2).acquire().await.unwrap();
    let all = store.client().semaphore("s", 3).permits(3).wait(LEASE);
    let large = tokio::spawn(async move { all.acquire().await.unwrap() });
    tickets(&locks, "s", 2).await;

    // One permit is free. It is kept for the request that came first.
    let one = locks.semaphore("s", 3).permits(1);
    assert_eq!(kind(one.try_acquire().await), ErrorKind::Busy);
    let small = one.wait(LEASE);
    let small = tokio::spawn(async move { small.acquire().await.unwrap() });
    tickets(&locks, "s", 3).await;
    give_back(two).await;

    let large = soon(large).await.unwrap();
    assert!(!small.is_finished());
    give_back(large).await;
    give_back(soon(small).await.unwrap()).await;
}

/// A permit belongs to the id that took it, and the store's clock decides when it is free.
async fn a_release_of_permits_that_were_lost_frees_nothing(store: Store) {
    let (stalled, locks) = (store.client(), store.client());
    let short = Duration::from_millis(500);
    let two = stalled.semaphore("s", 3).permits(2).ttl(short).renew(false);
    let lost = two.acquire().await.unwrap();
    let all = locks.semaphore("s", 3).permits(3);

    let theirs = soon(all.clone().wait(LEASE).acquire()).await.unwrap();
    assert_eq!(lost.release().await.unwrap(), Release::AlreadyLost);

    assert!(theirs.is_valid());
    assert_eq!(kind(two.try_acquire().await), ErrorKind::Busy);
    give_back(theirs).await;
    give_back(all.try_acquire().await.unwrap()).await;
}

async fn two_tasks_that_want_all_permits_never_get_one_each(store: Store) {
    let witness = Arc::new(Witness::of(2));
    let mut tasks = JoinSet::new();
    for locks in [store.client(), store.client()] {
        let witness = Arc::clone(&witness);
        tasks.spawn(async move {
            for _ in 0..50 {
                let both = locks.semaphore("s", 2).permits(2).wait(LEASE);
                let guard = soon(both.acquire()).await.unwrap();
                let visit = witness.enter(2);
                tokio::task::yield_now().await;
                drop(visit);
                give_back(guard).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(witness.assert_no_overlap().visits, 2 * 50);
}

async fn another_capacity_is_refused_while_the_name_is_in_use(store: Store) {
    let locks = store.client();
    let guard = locks.semaphore("s", 3).permits(1).acquire().await.unwrap();

    let refused = locks.semaphore("s", 4).permits(1).acquire().await;
    let message = refused.as_ref().unwrap_err().to_string();
    assert_eq!(kind(refused), ErrorKind::CapacityMismatch);
    assert!(
        message.contains("semaphore of 4") && message.contains("semaphore of 3"),
        "{message}"
    );
    assert_eq!(
        kind(locks.mutex("s").try_acquire().await),
        ErrorKind::CapacityMismatch
    );

    give_back(guard).await;
    give_back(
        locks
            .semaphore("s", 4)
            .permits(1)
            .try_acquire()
            .await
            .unwrap(),
    )
    .await;
}

/// Each name is a lock of its own, whatever characters it has.
async fn names_that_look_alike_are_different_locks(store: Store) {
    let long = "x".repeat(4000);
    let names = [
        "a",
        "A",
        "a ",
        " a",
        "a:b",
        "a:b:",
        "{a}",
        "a}",
        "{a",
        "}{",
        "a/b",
        "/a",
        "%61",
        "%",
        "%%",
        "%25",
        "\0",
        "a\0",
        "\r\n",
        "a\r\nDEL b",
        "a\nb",
        "*",
        "?",
        "[a]",
        "\\",
        "\"",
        "'",
        "$(id)",
        "ä",
        "a\u{308}",
        "😀",
        "\u{202e}a",
        "a:line",
        "a}:line",
        "a}:ends",
        "a:gone:00",
        "wake:",
        "line",
        "ends",
        &long[..3999],
        &long,
    ];
    let locks = store.client();
    let mut guards = Vec::new();
    for name in names {
        guards.push(
            locks
                .mutex(name)
                .try_acquire()
                .await
                .unwrap_or_else(|error| {
                    panic!("{name:?} is not a lock of its own: {error}");
                }),
        );
    }
    for name in names {
        assert_eq!(
            kind(locks.mutex(name).try_acquire().await),
            ErrorKind::Busy,
            "{name:?}"
        );
    }
    for guard in guards {
        give_back(guard).await;
    }
}

async fn invalid_requests_get_an_error_and_take_nothing(store: Store) {
    let locks = store.client();
    let forever = locks
        .mutex("a")
        .wait(Duration::MAX)
        .acquire()
        .await
        .unwrap();
    give_back(forever).await;

    for lock in [
        locks.mutex("a").ttl(Duration::ZERO),
        locks.mutex("a").ttl(Duration::from_nanos(1)),
        locks.mutex("a").ttl(Duration::MAX),
        locks.mutex(""),
        locks.mutex("x".repeat(4097)),
        locks.semaphore("a", 0).permits(1),
        locks.semaphore("a", u32::MAX).permits(1),
        locks.semaphore("a", 3).permits(0),
        locks.semaphore("a", 3).permits(4),
    ] {
        assert_eq!(kind(lock.acquire().await), ErrorKind::Config, "{lock:?}");
        assert_eq!(
            kind(lock.try_acquire().await),
            ErrorKind::Config,
            "{lock:?}"
        );
        let ran: Result<(), Error> = lock.run(async |_| panic!("ran")).await;
        assert_eq!(kind(ran), ErrorKind::Config, "{lock:?}");
    }
    tickets(&locks, "a", 0).await;
}

async fn inspect_shows_holders_and_waiters(store: Store) {
    let locks = store.client();
    let guard = locks.semaphore("s", 3).permits(2).acquire().await.unwrap();
    let pool = locks.semaphore("s", 3);
    let waiter = begin(pool.permits(3).wait(LEASE));
    tickets(&locks, "s", 2).await;

    let places = locks.inspect("s").await.unwrap();

    assert!(places[0].granted && !places[1].granted);
    assert_eq!((places[0].permits, places[1].permits), (2, 3));
    assert_eq!((places[0].capacity, places[1].capacity), (3, 3));
    assert!(places[0].ticket < places[1].ticket);
    for place in &places {
        assert!(
            place.remaining > STALL && place.remaining <= LEASE,
            "{place:?}"
        );
        assert!(
            place.owner.contains(&format!("/{}/", std::process::id())),
            "{}",
            place.owner
        );
    }
    drop(guard);
    give_back(soon(waiter).await.unwrap().unwrap()).await;
}

async fn tokens_rise_with_every_exclusive_grant(store: Store) {
    let (one, other) = (store.client(), store.client());
    let mut last = None;
    for locks in [&one, &other, &one, &one, &other] {
        let guard = locks.mutex("a").acquire().await.unwrap();
        let token = guard.fencing_token().unwrap();
        assert!(token.as_i64() > 0 && Some(token) > last);
        last = Some(token);
        give_back(guard).await;
    }
}
