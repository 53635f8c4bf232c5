//! Tests with requests and replies that are lost, late or out of order, and with callers that give
//! up before an answer arrives.

use std::task::Poll;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use super::{client, nothing_left, through};
use crate::faults::{builder, works_again};
use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        giving_up_on_a_lost_reply_leaves_nothing
        a_release_that_overtakes_its_enqueue_is_obeyed
        a_server_stopped_for_longer_than_a_lease_still_gets_the_release
        an_enqueue_that_arrives_after_its_release_takes_nothing
        a_slow_reply_counts_against_the_lease
        a_budget_shorter_than_a_round_trip_does_not_cost_the_connection
        a_handle_dropped_in_mid_acquire_leaves_no_lock_on_a_runtime_of_one_thread
        shutdown_waits_for_a_release_that_is_under_way
    ]
}

async fn giving_up_on_a_lost_reply_leaves_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    proxy.lose_replies(b"EVALSHA", usize::MAX);

    let error = locks
        .mutex("a")
        .wait(Duration::from_millis(300))
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.may_hold());
    proxy.restore();
    proxy.lose_replies(b"EVALSHA", 0);

    tickets(&client(&server), "a", 0).await;
    give_back(client(&server).mutex("a").try_acquire().await.unwrap()).await;
}

/// A client gives up while the network is frozen, with its enqueue and its release in flight. After
/// the thaw, both arrive over different connections, in any order.
async fn a_release_that_overtakes_its_enqueue_is_obeyed(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for round in 0..10 {
        let name = format!("n{round}");
        proxy.freeze();
        let outcome = locks
            .mutex(&name)
            .wait(Duration::from_millis(50))
            .acquire()
            .await;
        assert_eq!(kind(outcome), ErrorKind::Unknown);
        proxy.thaw();

        // When this request has its answer, earlier requests in flight have arrived too …
        works_again(&locks, "after", SOON).await;
        // … and their ticket is gone long before its lease would end.
        eventually("nothing is left", Duration::from_secs(3), async || {
            client(&server).inspect(&name).await.unwrap().is_empty()
        })
        .await;
    }
}

/// A stopped server carries out the requests when it continues, even if their sender gave up long
/// ago.
async fn a_server_stopped_for_longer_than_a_lease_still_gets_the_release(_: Store) {
    let server = RedisServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(200))
        .build()
        .unwrap();
    works_again(&locks, "warm", SOON).await;
    server.freeze();
    let lease = Duration::from_millis(300);
    let lock = locks.mutex("a").ttl(lease).wait(Duration::from_millis(100));
    assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
    tokio::time::sleep(4 * lease).await; // no event reports the end of the lease or of the operation
    server.thaw();

    // The release leaves a mark. The mark refuses an enqueue that arrives even later.
    eventually("the release has come", SOON, async || {
        !server.keys("test:1:{a}:gone:*").is_empty()
    })
    .await;
    tickets(&client(&server), "a", 0).await;
}

/// The fact sends the enqueue with the lost answer once more, byte for byte, after its release was
/// carried out.
async fn an_enqueue_that_arrives_after_its_release_takes_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    server.command::<()>(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
    proxy.lose_replies(b"EVALSHA", usize::MAX);
    let wait = Duration::from_millis(300);
    assert_eq!(
        kind(locks.mutex("a").wait(wait).acquire().await),
        ErrorKind::Unknown
    );
    proxy.lose_replies(b"EVALSHA", 0);
    tickets(&client(&server), "a", 0).await;

    // The log has every command with its arguments. An enqueue is found by its first argument, a
    // record that begins with `+` and the ttl.
    let log: Vec<(u64, u64, u64, Vec<String>, String, String)> =
        server.command(&["SLOWLOG", "GET", "-1"]);
    let enqueue = log.into_iter().map(|entry| entry.3).find(|command| {
        command[0] == "EVALSHA"
            && command[3] == "test:1:{a}"
            && command.get(4).is_some_and(|record| record.starts_with('+'))
    });
    let enqueue = enqueue.expect("the enqueue is in the log");
    let enqueue: Vec<&str> = enqueue.iter().map(String::as_str).collect();
    let answer: Vec<i64> = server.command(&enqueue);

    assert_eq!(answer, [4], "released before");
    assert!(client(&server).inspect("a").await.unwrap().is_empty());
}

async fn a_slow_reply_counts_against_the_lease(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let late = Duration::from_millis(500);
    proxy.delay(Duration::ZERO, late);

    let ttl = Duration::from_secs(10);
    let guard = locks
        .mutex("a")
        .ttl(ttl)
        .renew(false)
        .acquire()
        .await
        .unwrap();

    assert!(guard.remaining() <= ttl - late, "{:?}", guard.remaining());
    proxy.delay(Duration::ZERO, Duration::ZERO);
    give_back(guard).await;
}

async fn a_budget_shorter_than_a_round_trip_does_not_cost_the_connection(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    proxy.delay(Duration::ZERO, Duration::from_millis(50));
    let before = proxy.traffic().connections;
    for _ in 0..20 {
        let hasty = locks.mutex("a").wait(Duration::from_millis(1));
        assert_eq!(kind(hasty.acquire().await), ErrorKind::Unknown);
    }
    proxy.delay(Duration::ZERO, Duration::ZERO);

    nothing_left(&server).await;
    // One more connection is allowed: the keeper opens its own for the clean-up.
    assert!(proxy.traffic().connections <= before + 1);
}

/// The runtime has one thread. The same thread drops the future and would have to read the reply.
async fn a_handle_dropped_in_mid_acquire_leaves_no_lock_on_a_runtime_of_one_thread(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let dropped = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            locks.ready(SOON).await.unwrap();
            let lock = locks.mutex("a");
            let mut acquire = Box::pin(async move { lock.acquire().await.map(drop) });
            // The request has been sent. Its reply has not been read.
            let sent = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
            assert!(sent.is_pending());
            tokio::task::yield_now().await;
            drop(acquire);
            drop(locks);
        });
    });
    dropped.await.unwrap();

    tickets(&client(&server), "a", 0).await;
    assert!(client(&server).mutex("a").try_acquire().await.is_ok());
}

async fn shutdown_waits_for_a_release_that_is_under_way(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.freeze();
    let mut release = Box::pin(guard.release());
    let sent = std::future::poll_fn(|cx| Poll::Ready(release.as_mut().poll(cx))).await;
    assert!(sent.is_pending());

    let closing = locks.clone();
    let mut shutdown = Box::pin(async move { closing.shutdown(SOON).await });
    let early = std::future::poll_fn(|cx| Poll::Ready(shutdown.as_mut().poll(cx))).await;
    assert!(early.is_pending(), "shut down with a release under way");
    proxy.thaw();

    assert_eq!(release.await.unwrap(), Release::Released);
    shutdown.await.unwrap();
}
