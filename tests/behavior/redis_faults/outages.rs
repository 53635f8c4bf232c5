//! A server that is down, and comes back.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, LostReason};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use super::{client, nothing_left};
use crate::faults::{begin, builder, is_unavailable_within_one_operation};
use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_server_that_is_down_is_unavailable_within_one_operation
        the_wait_bounds_connecting_and_asking_too
        tasks_in_line_behind_one_another_learn_together_that_the_store_is_down
        a_client_that_was_idle_through_an_outage_works_again
        shutdown_gives_up_waiters_while_the_server_is_down
        waiters_survive_a_server_that_restarts_empty
    ]
}

async fn a_server_that_is_down_is_unavailable_within_one_operation(_: Store) {
    let port = tests::ports::free_port();
    let locks = builder(format!("redis://127.0.0.1:{port}"))
        .build()
        .unwrap();
    is_unavailable_within_one_operation(&locks, "refused").await;
    assert_eq!(
        kind(locks.ready(Duration::from_millis(200)).await),
        ErrorKind::Unavailable
    );
}

/// P8.
async fn the_wait_bounds_connecting_and_asking_too(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    let wait = Duration::from_millis(150);
    for (connected, expected) in [(false, ErrorKind::Unavailable), (true, ErrorKind::Unknown)] {
        if connected {
            give_back(locks.mutex("warm").acquire().await.unwrap()).await;
        }
        proxy.freeze();
        let started = Instant::now();

        let outcome = locks.mutex("a").wait(wait).acquire().await;
        let waited = started.elapsed();

        assert_eq!(kind(outcome), expected);
        assert!(
            waited >= wait && waited < wait + Duration::from_millis(500),
            "{waited:?}"
        );
        proxy.thaw();
    }
    tickets(&client(&server), "a", 0).await;
}

/// H20.
async fn a_client_that_was_idle_through_an_outage_works_again(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.kill();
    // A request into a connection whose end has not been noticed yet has an unknown outcome, rightly.
    eventually("the client has noticed", SOON, async || {
        let error = locks.mutex("a").try_acquire().await.unwrap_err();
        error.kind() == ErrorKind::Unavailable
    })
    .await;
    server.restart();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

async fn shutdown_gives_up_waiters_while_the_server_is_down(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = client(&server).mutex("a").acquire().await.unwrap();
    let waiter = begin(
        locks
            .mutex("a")
            .ttl(Duration::from_millis(300))
            .wait(lockcore::Wait::Forever),
    );
    tickets(&client(&server), "a", 2).await;
    server.kill();
    // Its ticket runs out, and it asks a server that is not there, for ever.
    drop(guard);
    tokio::time::sleep(Duration::from_millis(600)).await; // past its ttl; no event stands for that

    locks.shutdown(Duration::from_secs(2)).await.unwrap();

    let outcome = tokio::time::timeout(SOON, waiter)
        .await
        .expect("the waiter hangs");
    assert_eq!(
        kind(outcome.unwrap()),
        ErrorKind::Lost(LostReason::Shutdown)
    );
}

/// One of them asks; the others must not find out one after the other.
async fn tasks_in_line_behind_one_another_learn_together_that_the_store_is_down(_: Store) {
    let server = RedisServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(300))
        .build()
        .unwrap();
    server.kill();
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let lock = locks.mutex("a").wait(6 * SOON);
        tasks.spawn(async move { kind(lock.acquire().await) });
    }
    for error in tasks.join_all().await {
        assert_eq!(error, ErrorKind::Unavailable);
    }
    // One after the other would be 15 s.
    assert!(started.elapsed() < Duration::from_secs(5));
}

async fn waiters_survive_a_server_that_restarts_empty(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let lock = client(&server)
            .mutex("a")
            .ttl(Duration::from_secs(1))
            .wait(3 * SOON);
        tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    tickets(&locks, "a", 11).await;
    server.kill();
    server.restart();

    guard.lost().await;
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    nothing_left(&server).await;
}
