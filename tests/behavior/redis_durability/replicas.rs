//! Tests with replicas that stop, replicas that come back, and too few replicas.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, LostReason, Release};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::Server as _;
use tests::witness::Witness;

use super::{OP_TIMEOUT, client, durable, hasty, servers, tickets_at, waits};
use crate::faults::works_again;
use crate::store::{Kind, SLACK, SOON, STALL, Store, begin, give_back, kind};
use crate::traces;

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        a_lock_is_granted_when_its_replicas_have_it
        a_lock_that_too_few_replicas_have_is_refused_with_both_numbers_and_given_back
        every_kind_of_lock_waits_for_the_replicas_and_a_refusal_does_not
        a_place_in_line_is_acknowledged_too
        a_holder_whose_replica_stops_loses_at_the_deadline_and_not_after
        a_replica_that_pauses_for_less_than_a_lease_costs_nothing
        a_wake_up_is_confirmed_by_the_replicas
        an_adoption_that_too_few_replicas_have_is_refused_and_released
        a_capacity_is_stored_when_the_replicas_have_it_and_added_once
    ]
}

async fn a_lock_is_granted_when_its_replicas_have_it(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();

    let acquire = begin(locks.mutex("a"));
    tickets_at(&master, "a", 1).await;
    // If the server answered the acquire without the replica, its answer would have come before
    // this one.
    tickets_at(&master, "b", 0).await;
    assert!(!acquire.is_finished());
    replicas[0].thaw();

    let guard = acquire.await.unwrap().unwrap();
    assert!(!replicas[0].litter("test").is_empty(), "not at the replica");
    give_back(guard).await;
}

async fn a_lock_that_too_few_replicas_have_is_refused_with_both_numbers_and_given_back(_: Store) {
    let (master, replicas) = servers(2).await;
    let url = durable(&master, 2);
    let locks = hasty(&url).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[1].freeze();

    for name in ["a", "b"] {
        let began = Instant::now();
        let error = locks
            .mutex(name)
            .wait(3 * SOON)
            .acquire()
            .await
            .unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{text}");
        assert!(!error.may_hold());
        assert!(
            text.contains("1 of 2 replicas have acknowledged") && text.contains("replicas:2"),
            "{text}"
        );
        assert!(awake_since(began) < OP_TIMEOUT, "{:?}", began.elapsed());
        tickets_at(&master, name, 0).await;
    }
    assert_eq!(master.litter("test"), Vec::<String>::new());

    replicas[1].thaw();
    works_again(&locks, "a", SOON).await;
}

async fn every_kind_of_lock_waits_for_the_replicas_and_a_refusal_does_not(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    let held = locks.mutex("held").acquire().await.unwrap();
    replicas[0].freeze();

    let began = Instant::now();
    for _ in 0..10 {
        // The fact uses another client, because a client sends no request for a lock that it holds
        // itself.
        let other = client(&durable(&master, 1));
        assert_eq!(
            kind(other.mutex("held").try_acquire().await),
            ErrorKind::Busy
        );
    }
    println!("ten refusals took {:?}", began.elapsed());
    let semaphore = locks.semaphore("c", 3);
    let refused = [
        kind(locks.mutex("a").try_acquire().await),
        kind(locks.rwlock("b").read().try_acquire().await),
        kind(locks.rwlock("b").write().acquire().await),
        kind(semaphore.permits(2).try_acquire().await),
        kind(
            lockcore::Locks::all([locks.mutex("d"), locks.mutex("e")])
                .acquire()
                .await,
        ),
    ];
    assert_eq!(refused, [ErrorKind::Unavailable; 5]);
    for name in ["a", "b", "c", "d", "e"] {
        tickets_at(&master, name, 0).await;
    }
    replicas[0].thaw();
    give_back(held).await;
    let reader = locks.rwlock("b").read().acquire().await.unwrap();
    let permits = locks.semaphore("c", 3).permits(2).acquire().await.unwrap();
    for guard in [reader, permits] {
        give_back(guard).await;
    }
}

async fn a_place_in_line_is_acknowledged_too(_: Store) {
    let (master, replicas) = servers(1).await;
    let url = durable(&master, 1);
    let (holds, waits) = (client(&url), hasty(&url).build().unwrap());
    let guard = holds.mutex("a").acquire().await.unwrap();
    give_back(waits.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();

    let error = waits.mutex("a").wait(3 * SOON).acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    tickets_at(&master, "a", 1).await;
    replicas[0].thaw();
    give_back(guard).await;
}

async fn a_holder_whose_replica_stops_loses_at_the_deadline_and_not_after(store: Store) {
    let (master, replicas) = servers(1).await;
    let url = durable(&master, 1);
    let owner = format!("{}:stopped", store.namespace);
    let locks = hasty(&url).owner(&owner).build().unwrap();
    let ttl = Duration::from_secs(2);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    // After this renewal the server knows the script, so the first renewal below is sent only once.
    guard.extend(ttl).await.unwrap();
    let deadline = Instant::now() + guard.remaining();
    let resource = Witness::exclusive();
    let visit = resource.enter(1);

    replicas[0].freeze();
    // A renewal may have been acknowledged just before the freeze.
    let deadline = deadline.max(Instant::now() + guard.remaining());
    let reason = tokio::time::timeout(SOON, guard.lost()).await.unwrap();
    assert!(awake_since(deadline) < SLACK);

    assert_eq!(reason, LostReason::Expired);
    let logged = || traces::lines(&owner).into_iter().map(|line| line.text);
    eventually("the log says why", SOON, async || {
        let why = ["refuses renewals", "0 of 1 replicas have acknowledged"];
        logged().any(|line| why.iter().all(|part| line.contains(part)))
    })
    .await;
    let outage = logged().find(|line| line.contains("out of reach"));
    assert_eq!(outage, None, "the server answers");
    drop(visit);
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    // The master has the renewals that no replica has. So it keeps others out until after the
    // holder's deadline.
    replicas[0].thaw();
    let next = client(&url).mutex("a").wait(STALL).acquire().await.unwrap();
    drop(resource.enter(1));
    give_back(next).await;
    resource.assert_no_overlap();
}

async fn a_replica_that_pauses_for_less_than_a_lease_costs_nothing(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    let ttl = Duration::from_secs(6);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    replicas[0].freeze();
    // The first renewal comes after a third of the ttl, and no replica acknowledges it.
    eventually("a renewal was due", SOON, async || {
        guard.remaining() < ttl / 2
    })
    .await;
    replicas[0].thaw();

    eventually("it is renewed", SOON, async || guard.remaining() > ttl / 2).await;

    give_back(guard).await;
}

/// The master has lost its replica. It grants a waiter, because it believes that the holder's lease
/// has expired. But the holder may have renewed its lease at a new master. So the waiter must not
/// hold yet.
async fn a_wake_up_is_confirmed_by_the_replicas(_: Store) {
    let (master, replicas) = servers(1).await;
    let url = durable(&master, 1);
    let [holds, waits] = [(); 2].map(|()| hasty(&url).build().unwrap());
    let ttl = Duration::from_secs(2);
    let unrenewed = holds.mutex("a").ttl(ttl).renew(false);
    let guard = unrenewed.acquire().await.unwrap();
    let waiter = begin(waits.mutex("a").ttl(3 * STALL).wait(3 * STALL));
    tickets_at(&master, "a", 2).await;
    eventually("the waiter is in line", SOON, async || {
        waits.inspect("a").await.unwrap().len() == 2
    })
    .await;
    replicas[0].freeze();
    guard.lost().await;

    // This request finds that the holder's lease has expired, and wakes the waiter.
    let asks = client(&master.url());
    eventually("the master lets the waiter in", SOON, async || {
        let _ = asks.mutex("a").try_acquire().await;
        let places = asks.inspect("a").await.unwrap();
        places.len() == 1 && places[0].granted
    })
    .await;
    tokio::time::sleep(OP_TIMEOUT).await; // no event tells that the waiter does not hold
    assert!(!waiter.is_finished(), "it holds, and no replica knows");
    replicas[0].thaw();

    give_back(waiter.await.unwrap().unwrap()).await;
}

/// The master has carried out the adoption. After a failover, the old holder or the new holder may
/// have the lock.
async fn an_adoption_that_too_few_replicas_have_is_refused_and_released(_: Store) {
    let (master, replicas) = servers(1).await;
    let url = durable(&master, 1);
    let (locks, other) = (client(&url), hasty(&url).build().unwrap());
    give_back(other.mutex("warm").acquire().await.unwrap()).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let text = guard.detach().await.unwrap();
    replicas[0].freeze();

    let error = other.adopt(&text).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    tickets_at(&master, "a", 0).await;
    replicas[0].thaw();
    let taken = ErrorKind::Lost(LostReason::Taken);
    assert_eq!(kind(locks.adopt(&text).await), taken);
    works_again(&other, "a", SOON).await;
}

async fn a_capacity_is_stored_when_the_replicas_have_it_and_added_once(_: Store) {
    let (master, replicas) = servers(1).await;
    let pool = hasty(&durable(&master, 1)).build().unwrap();
    let pool = pool.semaphore("a", 2);
    assert_eq!(pool.add_permits(1).await.unwrap(), 3);
    let state = |server: &RedisServer| server.command::<String>(&["GET", "test:1:{a}"]);
    assert_eq!(state(&replicas[0]), state(&master));
    replicas[0].freeze();

    let (before, stored) = (waits(&master), state(&master));
    let adds = pool.clone();
    let adding = tokio::spawn(async move { adds.add_permits(2).await });
    eventually("it asks again", 3 * SOON, async || {
        waits(&master) >= before + 2
    })
    .await;
    assert!(!adding.is_finished());
    // What it reads first is not acknowledged. So it does not ask for a change yet.
    assert_eq!(state(&master), stored);
    replicas[0].thaw();

    assert_eq!(adding.await.unwrap().unwrap(), 5);
    assert_eq!(state(&replicas[0]), state(&master));
    assert_eq!(pool.capacity().await.unwrap(), 5);
}
