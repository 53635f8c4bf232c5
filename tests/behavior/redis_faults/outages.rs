//! Tests with a server that is down and comes back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Fair, FencingToken, Locks, LostReason};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::Server as _;
use tests::witness::Witness;
use tokio::sync::mpsc;

use super::{client, hasty, nothing_left, through};
use crate::faults::{a_shutdown_ends_the_first_use, builder, patient};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_wait_bounds_connecting_and_asking_too
        tasks_in_line_behind_one_another_learn_together_that_the_store_is_down
        a_client_that_was_idle_through_an_outage_works_again
        shutdown_gives_up_waiters_while_the_server_is_down
        waiters_survive_a_server_that_restarts_empty
        waiters_keep_their_places_over_restarts_of_a_server_with_its_data
        a_server_that_reads_its_data_is_unavailable_and_comes_back
        a_shutdown_during_the_first_use_ends_it_and_leaves_nothing
    ]
}

async fn the_wait_bounds_connecting_and_asking_too(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let wait = Duration::from_millis(150);
    for (connected, expected) in [(false, ErrorKind::Unavailable), (true, ErrorKind::Unknown)] {
        if connected {
            give_back(locks.mutex("warm").acquire().await.unwrap()).await;
        }
        proxy.freeze();
        let started = Instant::now();

        let outcome = locks.mutex("a").wait(wait).acquire().await;
        let (waited, awake) = (started.elapsed(), awake_since(started));

        assert_eq!(kind(outcome), expected);
        assert!(
            waited >= wait && awake < SOON, // the operation timeout is much longer
            "{waited:?}"
        );
        proxy.thaw();
    }
    tickets(&client(&server), "a", 0).await;
}

async fn a_client_that_was_idle_through_an_outage_works_again(_: Store) {
    let server = RedisServer::start();
    let locks = hasty(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.kill();
    // A request on a connection that has broken unnoticed has an unknown outcome, which is correct.
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
    let locks = builder(server.url()).build().unwrap();
    locks.ready(SOON).await.unwrap();
    let guard = client(&server).mutex("a").acquire().await.unwrap();
    let ttl = Duration::from_millis(300);
    let lock = locks.mutex("a").ttl(ttl);
    let waiter = begin(lock.wait(lockcore::Wait::Forever));
    tickets(&client(&server), "a", 2).await;
    server.kill();
    // The waiter's ticket expires. The client repeats its requests to a server that is down.
    drop(guard);
    tokio::time::sleep(2 * ttl).await; // no event reports the end of the ticket

    locks.shutdown(Duration::from_secs(2)).await.unwrap();

    let outcome = tokio::time::timeout(SOON, waiter)
        .await
        .expect("the waiter hangs");
    assert_eq!(
        kind(outcome.unwrap()),
        ErrorKind::Lost(LostReason::Shutdown)
    );
}

/// Only the leader of the lane sends requests. The other tasks must learn of the outage together
/// with it.
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
    // If the tasks tried one after another, this would take 15 s.
    assert!(awake_since(started) < Duration::from_secs(5));
}

/// A hundred waiters of ten clients, each with its own ticket at the store. Each waiter enters the
/// resource and reports its number and its token.
async fn hundred_waiters(
    server: &RedisServer,
    ttl: Duration,
    resource: &Arc<Witness>,
) -> mpsc::UnboundedReceiver<(usize, FencingToken)> {
    let (served, order) = mpsc::unbounded_channel();
    let strict = || patient(server.url()).fair(Fair::Strict).build().unwrap();
    let clients: Vec<Locks> = (0..10).map(|_| strict()).collect();
    for number in 0..100 {
        let lock = clients[number % 10].mutex("a").ttl(ttl).wait(6 * SOON);
        let (served, resource) = (served.clone(), Arc::clone(resource));
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            let visit = resource.enter(1);
            served
                .send((number, guard.fencing_token().unwrap()))
                .unwrap();
            tokio::task::yield_now().await;
            drop(visit);
            drop(guard); // the server may be down now
        });
        tickets(&clients[0], "a", number + 2).await;
    }
    order
}

async fn waiters_survive_a_server_that_restarts_empty(_: Store) {
    let server = RedisServer::start();
    let resource = Arc::new(Witness::exclusive());
    let ttl = LEASE;
    let lock = client(&server).mutex("a").ttl(ttl);
    let guard = lock.acquire().await.unwrap();
    let mut served = hundred_waiters(&server, ttl, &resource).await;
    server.kill();
    server.restart();

    // The waiters enqueue again, in any order. They need not wait for the holder, which has not
    // learnt of its loss.
    guard.lost().await;
    let mut last = guard.fencing_token().unwrap();
    for _ in 0..100 {
        let (_, token) = served.recv().await.unwrap();
        assert!(token > last, "{token} after {last}");
        last = token;
    }
    assert_eq!(resource.assert_no_overlap().visits, 100);
    // If the restart cut a request off, the client may have sent it twice. The release of its
    // ticket leaves a mark.
    eventually("nothing else is left", Duration::from_secs(3), async || {
        server.litter_but_marks("test").is_empty()
    })
    .await;
}

/// The server restarts with its data several times. The waiters are granted in their old order.
async fn waiters_keep_their_places_over_restarts_of_a_server_with_its_data(_: Store) {
    let server = RedisServer::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let resource = Arc::new(Witness::exclusive());
    let ttl = LEASE;
    let guard = client(&server).mutex("a").ttl(ttl).acquire().await.unwrap();
    let mut last = guard.fencing_token().unwrap();
    let mut served = hundred_waiters(&server, ttl, &resource).await;
    server.kill();
    server.restart();
    assert_eq!(client(&server).inspect("a").await.unwrap().len(), 101);
    assert!(guard.is_valid());
    let visit = resource.enter(1);
    drop((visit, guard));

    for expected in 0..100 {
        if expected % 30 == 29 {
            server.kill(); // probably in the middle of a hand-over
            server.restart();
        }
        let (number, token) = served.recv().await.unwrap();
        assert_eq!(number, expected);
        assert!(token > last, "{token} after {last}");
        last = token;
    }
    assert_eq!(resource.assert_no_overlap().visits, 101);
    nothing_left(&server).await;
}

/// The server answers LOADING. It reads its data for six seconds, which is several operation
/// timeouts.
async fn a_server_that_reads_its_data_is_unavailable_and_comes_back(_: Store) {
    let slowly = [
        "--key-load-delay",
        "1000",
        "--loading-process-events-interval-bytes",
        "1024",
    ];
    let server = Arc::new(RedisServer::with(&slowly));
    let locks = builder(server.url()).build().unwrap();
    locks.ready(SOON).await.unwrap();
    let ttl = Duration::from_secs(60);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let much = "for i = 1, 6000 do redis.call('SET', 'key' .. i, string.rep('x', 100)) end";
    server.command::<()>(&["EVAL", much, "0"]);
    server.command::<()>(&["SAVE"]);
    server.kill();
    let starting = Arc::clone(&server);
    let restart = tokio::task::spawn_blocking(move || starting.restart());

    // One request on the broken connection may get no answer.
    eventually("told that it loads", SOON, async || {
        let error = locks.mutex("b").try_acquire().await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown),
            "{error}"
        );
        error.kind() == ErrorKind::Unavailable && error.to_string().contains("loading the dataset")
    })
    .await;
    // A caller with enough time waits until the server is ready.
    let next = locks.mutex("b").wait(2 * SOON);
    eventually("it is there", 2 * SOON, async || {
        next.acquire().await.is_ok()
    })
    .await;
    restart.await.unwrap();
    assert!(guard.is_valid());
    give_back(guard).await;
}

async fn a_shutdown_during_the_first_use_ends_it_and_leaves_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());

    a_shutdown_ends_the_first_use(&proxy.url(), std::slice::from_ref(&proxy)).await;

    assert_eq!(server.keys("*"), Vec::<String>::new());
}
