//! Tests with nodes that get a request late: its verb has its answer already, or its runtime has
//! ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::RedisServer;
use tokio::runtime::{Handle, Runtime};

use super::{client, has_drawn, has_ticket, held_everywhere, nothing_is_left_at, proxied};
use crate::faults::builder;
use crate::store::{Kind, SOON, Store, give_back, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_release_that_a_node_has_not_heard_outlives_its_runtime
        an_enqueue_that_outlives_its_runtime_takes_nothing_behind_the_release
        a_wait_that_ends_while_the_nodes_are_asked_again_is_over
        a_release_tells_whether_enough_nodes_had_the_ticket
        a_node_that_has_lost_the_ticket_before_it_has_the_number_does_not_count
        a_lock_that_only_a_minority_renews_is_lost_before_its_lease_ends
    ]
}

/// A client of three nodes. The last of them is behind the proxy. The client is connected to all
/// nodes, in the runtime of the fact.
pub(super) async fn with_the_last_behind(proxy: &Proxy, set: &Quorum) -> Locks {
    let [first, second] = [0, 1].map(|at| set.nodes[at].port());
    let locks = client(&url([first, second, proxy.port()]));
    locks.ready(SOON).await.unwrap(); // the keeper connects too
    give_back(locks.mutex("here").acquire().await.unwrap()).await;
    eventually("all are connected", SOON, async || {
        proxy.open_connections() > 1 && proxy.traffic().chunks_up > 0
    })
    .await;
    locks
}

/// Runs a part of a fact on a thread that may build and drop a runtime.
pub(super) async fn in_another_runtime<T: Send + 'static>(
    piece: impl FnOnce(Runtime, Handle) -> T + Send + 'static,
) -> T {
    let here = Handle::current();
    let piece = move || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        piece(
            builder.worker_threads(2).enable_all().build().unwrap(),
            here,
        )
    };
    tokio::task::spawn_blocking(piece).await.unwrap()
}

/// Acquires in another runtime. The enqueue is still in flight to the node behind the proxy, on a
/// connection of that runtime.
pub(super) async fn acquired_with_an_enqueue_under_way(
    proxy: &Arc<Proxy>,
    locks: &Locks,
) -> (Runtime, Guard) {
    let (proxy, locks) = (Arc::clone(proxy), locks.clone());
    let connected = proxy.open_connections();
    in_another_runtime(move |runtime, here| {
        // Opens the connections. After this, no request is in flight.
        let first = runtime.block_on(locks.mutex("there").acquire()).unwrap();
        runtime.block_on(give_back(first));
        here.block_on(eventually("all are connected", SOON, async || {
            proxy.open_connections() > connected
        }));
        proxy.delay(Duration::from_secs(6), Duration::ZERO);
        let before = proxy.traffic().chunks_up;
        let guard = runtime.block_on(locks.mutex("a").acquire()).unwrap();
        here.block_on(eventually("it is under way", SOON, async || {
            proxy.traffic().chunks_up > before
        }));
        proxy.delay(Duration::ZERO, Duration::ZERO);
        (runtime, guard)
    })
    .await
}

async fn a_release_that_a_node_has_not_heard_outlives_its_runtime(_: Store) {
    let set = Quorum::start(3);
    let proxy = Proxy::to(set.nodes[2].port());
    let locks = with_the_last_behind(&proxy, &set).await;
    let last = client(&set.nodes[2].url());

    let proxy = in_another_runtime(move |runtime, here| {
        let guard = runtime.block_on(locks.mutex("a").acquire()).unwrap();
        here.block_on(has_ticket(&last));
        proxy.freeze();
        runtime.block_on(give_back(guard));
        drop(runtime);
        // Everything that was sent to the node and has not arrived is lost with the connections.
        proxy.cut();
        proxy.thaw();
        proxy.restore();
        (proxy, locks)
    })
    .await;

    nothing_is_left_at(&set.nodes).await;
    drop(proxy);
}

async fn an_enqueue_that_outlives_its_runtime_takes_nothing_behind_the_release(_: Store) {
    let set = Quorum::start(3);
    let proxy = Arc::new(Proxy::to(set.nodes[2].port()));
    let locks = with_the_last_behind(&proxy, &set).await;
    let connected = proxy.open_connections();
    let (runtime, guard) = acquired_with_an_enqueue_under_way(&proxy, &locks).await;
    // Dropping a runtime waits for its tasks, so another thread does it.
    let ended = tokio::task::spawn_blocking(move || drop(runtime));
    ended.await.unwrap();

    give_back(guard).await;

    eventually("the enqueue has arrived", SOON, async || {
        proxy.open_connections() <= connected
    })
    .await;
    nothing_is_left_at(&set.nodes).await;
    drop(locks);
}

/// All nodes have answered "busy" before. The wait ends while a further request to them is in
/// flight.
async fn a_wait_that_ends_while_the_nodes_are_asked_again_is_over(_: Store) {
    let set = Quorum::start(3);
    let guard = client(&set.url()).mutex("a").acquire().await.unwrap();
    let (proxies, url) = proxied(&set);
    let locks = client(&url);
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    let heard = || proxies.iter().map(|proxy| proxy.traffic().chunks_up);
    let before: u64 = heard().sum();
    let lock = locks.mutex("a").wait(Duration::from_secs(6));
    let waits = tokio::spawn(async move { lock.acquire().await });
    eventually("it has asked twice", SOON, async || {
        heard().sum::<u64>() > before + 6
    })
    .await;

    for proxy in &proxies {
        proxy.delay(Duration::from_secs(9), Duration::ZERO);
    }

    assert_eq!(kind(waits.await.unwrap()), ErrorKind::Timeout);
    for proxy in &proxies {
        proxy.delay(Duration::ZERO, Duration::ZERO);
    }
    give_back(guard).await;
    give_back(locks.mutex("a").wait(3 * SOON).acquire().await.unwrap()).await;
    nothing_is_left_at(&set.nodes).await;
}

async fn a_release_tells_whether_enough_nodes_had_the_ticket(_: Store) {
    let set = Quorum::start(5);
    let locks = client(&set.url());
    for (from, told) in [
        (3, Release::Released),
        (2, Release::AlreadyLost),
        (0, Release::AlreadyLost),
    ] {
        let guard = held_everywhere(&locks, &set.nodes).await;

        set.nodes[from..].iter().for_each(RedisServer::flush);

        assert_eq!(guard.release().await.unwrap(), told, "{from}");
    }
}

async fn a_lock_that_only_a_minority_renews_is_lost_before_its_lease_ends(_: Store) {
    let set = Quorum::start(5);
    let ttl = Duration::from_secs(12);
    let locks = builder(set.url()).ttl(ttl).op_timeout(SOON);
    let guard = held_everywhere(&locks.build().unwrap(), &set.nodes).await;

    // Three of five nodes lose the ticket. The client learns this from its next renewals.
    set.nodes[2..].iter().for_each(RedisServer::flush);
    let end = Instant::now() + guard.remaining();

    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    assert!(Instant::now() < end);
    let others = client(&set.url());
    give_back(others.mutex("a").wait(SOON).acquire().await.unwrap()).await;
}

/// The first node gives its vote to one client and then loses the ticket. After that it votes for
/// another client. If its first vote also counted, both clients would hold.
async fn a_node_that_has_lost_the_ticket_before_it_has_the_number_does_not_count(_: Store) {
    let set = Quorum::start(2);
    let (loses, slow) = (&set.nodes[0], Proxy::to(set.nodes[1].port()));
    let locks = client(&url([loses.port(), slow.port(), free_port()]));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    slow.delay(Duration::ZERO, Duration::from_secs(1));
    has_drawn(&set.nodes[1], Duration::from_secs(3600));
    let lock = locks.mutex("a").wait(SOON / 2);
    let asks = tokio::spawn(async move { lock.acquire().await });
    let alone = client(&loses.url());
    has_ticket(&alone).await;

    loses.flush();
    let guard = alone.mutex("a").try_acquire().await.unwrap();
    slow.delay(Duration::ZERO, Duration::ZERO);

    assert_eq!(kind(asks.await.unwrap()), ErrorKind::Timeout);
    give_back(guard).await;
    nothing_is_left_at(&set.nodes).await;
}
