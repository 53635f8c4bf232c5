//! Tests of nodes that have lost the ticket of a holder, and get it again from a renewal.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Locks};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::proxy::Proxy;
use tests::redis_quorum::Quorum;
use tests::redis_server::RedisServer;
use tokio::runtime::Runtime;

use super::late::{in_another_runtime, with_the_last_behind};
use super::{client, held_everywhere, nothing_is_left_at, proxied};
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_lock_is_held_while_all_nodes_restart_empty_one_after_the_other
        a_node_that_restarted_empty_gets_no_ticket_before_it_votes
        a_node_that_has_lost_a_ticket_gets_it_again_and_keeps_others_out
        permits_are_counted_at_a_node_that_has_got_them_again
        a_renewal_that_finds_its_ticket_everywhere_is_one_request_to_each_node
        a_release_that_overtakes_a_repair_at_a_slow_node_leaves_nothing
        a_repair_that_outlives_its_runtime_leaves_nothing_behind_the_release
        a_repair_whose_reply_is_lost_counts
    ]
}

/// Only the enqueue of a mutex has this text: all permits, and the capacity.
const ENQUEUE: &[u8] = b":1073741824:1073741824";

/// Sends a renewal and waits for its answer. If the last renewal was just before, this one may be
/// too slow to make the lease longer, which is an error.
async fn renew(guard: &Guard) {
    let longer = guard.remaining() + Duration::from_millis(1);
    let _ = guard.ensure(longer).await;
    assert!(guard.is_valid());
}

/// The scripts that a node has executed.
fn scripts(node: &RedisServer) -> u64 {
    node.command_stats().get("evalsha").copied().unwrap_or(0)
}

/// Renews until the node has the ticket of the guard, with the number of the grant.
async fn renewed_at(guard: &Guard, node: &RedisServer) {
    let alone = client(&node.url());
    let number = guard.grant_id().as_u64() >> 10;
    eventually("the node has the ticket again", SOON, async || {
        renew(guard).await;
        let places = alone.inspect("a").await.unwrap();
        places.iter().any(|place| place.ticket == number)
    })
    .await;
}

/// The client also loses its connections to the nodes. By its clock, each node has been up for long
/// enough to vote when the client reaches it again.
async fn a_lock_is_held_while_all_nodes_restart_empty_one_after_the_other(_: Store) {
    let set = Quorum::forgetful(5);
    let (proxies, url) = proxied(&set);
    let locks = client(&url);
    let guard = held_everywhere(&locks, &set.nodes).await;

    for (node, proxy) in set.nodes.iter().zip(&proxies) {
        proxy.cut();
        node.restart();
        node.set_clock(Clock::Ahead(Duration::from_secs(2 * 3600)));
        proxy.restore();
        renewed_at(&guard, node).await;
    }

    assert!(guard.is_valid());
    give_back(guard).await;
    nothing_is_left_at(&set.nodes).await;
}

/// Another client may have got the vote of this node before its restart, and may still wait for the
/// votes of other nodes.
async fn a_node_that_restarted_empty_gets_no_ticket_before_it_votes(_: Store) {
    let set = Quorum::forgetful(5);
    let locks = client(&set.url());
    let guard = held_everywhere(&locks, &set.nodes).await;
    let node = &set.nodes[4];
    node.restart();

    // The client renews at this node again.
    eventually("the node has answered renewals", SOON, async || {
        renew(&guard).await;
        scripts(node) >= 3
    })
    .await;

    assert!(client(&node.url()).inspect("a").await.unwrap().is_empty());
    give_back(guard).await;
}

async fn a_node_that_has_lost_a_ticket_gets_it_again_and_keeps_others_out(_: Store) {
    let set = Quorum::start(5);
    let (locks, other) = (client(&set.url()), client(&set.url()));
    let guard = held_everywhere(&locks, &set.nodes).await;
    let number = guard.grant_id().as_u64() >> 10;
    // The number was ahead of the clocks. From now on the nodes assign greater numbers by
    // themselves.
    eventually("the clock has passed the number", SOON, async || {
        std::time::UNIX_EPOCH.elapsed().unwrap().as_micros() > u128::from(number)
    })
    .await;

    for node in &set.nodes {
        node.flush();
        renewed_at(&guard, node).await;
    }

    assert_eq!(locks.inspect("a").await.unwrap()[0].ticket, number);
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    set.nodes[..2].iter().for_each(RedisServer::kill);
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    let next = other.mutex("a").wait(SOON).acquire().await.unwrap();
    assert!(next.grant_id().as_u64() >> 10 > number);
    give_back(next).await;
    nothing_is_left_at(&set.nodes[2..]).await;
}

/// A semaphore of two needs four of five nodes. The node that has lost a permit may give it to
/// somebody else. Then the permit does not come back to this node.
async fn permits_are_counted_at_a_node_that_has_got_them_again(_: Store) {
    let set = Quorum::start(5);
    let locks = client(&set.url());
    let guard = locks.semaphore("a", 2).permits(1).acquire().await.unwrap();
    for node in &set.nodes {
        renewed_at(&guard, node).await;
    }
    let node = &set.nodes[4];
    let alone = client(&node.url());
    let permits = |count| alone.semaphore("a", 2).permits(count);

    node.flush();
    renewed_at(&guard, node).await;
    let other = permits(1).acquire().await.unwrap();
    assert_eq!(kind(permits(1).try_acquire().await), ErrorKind::Busy);

    node.flush();
    let both = permits(2).acquire().await.unwrap();
    let before = scripts(node);
    renew(&guard).await;
    eventually("the repair is refused", SOON, async || {
        scripts(node) >= before + 2
    })
    .await;
    assert_eq!(alone.inspect("a").await.unwrap().len(), 1);

    give_back(both).await;
    renewed_at(&guard, node).await;
    give_back(guard).await;
    let _ = other.release().await;
    nothing_is_left_at(&set.nodes).await;
}

async fn a_renewal_that_finds_its_ticket_everywhere_is_one_request_to_each_node(_: Store) {
    const RENEWALS: u64 = 20;
    let set = Quorum::start(5);
    let locks = client(&set.url());
    let guard = held_everywhere(&locks, &set.nodes).await;
    let before: Vec<_> = set.nodes.iter().map(scripts).collect();

    for _ in 0..RENEWALS {
        renew(&guard).await;
    }

    for (node, before) in set.nodes.iter().zip(before) {
        eventually("the last renewal is counted", SOON, async || {
            scripts(node) >= before + RENEWALS
        })
        .await;
        // The keeper may renew the lease once more by itself.
        let spent = scripts(node) - before;
        assert!(spent <= RENEWALS + 1, "{spent}");
    }
    give_back(guard).await;
}

/// The renewal and the release are on connections of two runtimes. Both runtimes continue to run.
async fn a_release_that_overtakes_a_repair_at_a_slow_node_leaves_nothing(_: Store) {
    let slow = SlowLast::start().await;
    for _ in 0..5 {
        let (before, runtime, guard) = slow.held_with_a_repair_in_flight().await;

        give_back(guard).await;

        // The renewal, the release and the enqueue of the repair.
        eventually("all have arrived", SOON, async || {
            slow.scripts() >= before + 3
        })
        .await;
        nothing_is_left_at(&slow.set.nodes).await;
        runtime.shutdown_background();
    }
}

/// The runtime of the renewal ends before the release.
async fn a_repair_that_outlives_its_runtime_leaves_nothing_behind_the_release(_: Store) {
    let slow = SlowLast::start().await;
    for _ in 0..5 {
        let (before, runtime, guard) = slow.held_with_a_repair_in_flight().await;
        // Dropping a runtime waits for its tasks, so another thread does it.
        let ended = tokio::task::spawn_blocking(move || drop(runtime));
        ended.await.unwrap();

        give_back(guard).await;

        // The renewal, the release and the enqueue of the repair.
        eventually("all have arrived", SOON, async || {
            slow.scripts() >= before + 3
        })
        .await;
        nothing_is_left_at(&slow.set.nodes).await;
    }
}

/// Three nodes, and a client that reaches the last of them through a proxy.
struct SlowLast {
    set: Arc<Quorum>,
    proxy: Arc<Proxy>,
    locks: Locks,
    /// The connections to the last node if only the runtime of the fact has one.
    connections: usize,
}

impl SlowLast {
    async fn start() -> Self {
        let set = Arc::new(Quorum::start(3));
        let proxy = Arc::new(Proxy::to(set.nodes[2].port()));
        let locks = with_the_last_behind(&proxy, &set).await;
        let connections = proxy.open_connections();
        Self {
            set,
            proxy,
            locks,
            connections,
        }
    }

    /// The scripts that the last node has executed.
    fn scripts(&self) -> u64 {
        scripts(&self.set.nodes[2])
    }

    /// Holds the lock `a`. The last node has lost the ticket. The enqueue of the repair is in flight
    /// to this node, on a connection of the returned runtime. Also returns how many scripts the node
    /// had executed before the renewal.
    async fn held_with_a_repair_in_flight(&self) -> (u64, Runtime, Guard) {
        eventually("the last runtime has ended", SOON, async || {
            self.proxy.open_connections() <= self.connections
        })
        .await;
        let guard = held_everywhere(&self.locks, &self.set.nodes).await;
        let (set, proxy) = (Arc::clone(&self.set), Arc::clone(&self.proxy));
        in_another_runtime(move |runtime, here| {
            let node = &set.nodes[2];
            let is_executed = || {
                let before = scripts(node);
                runtime.block_on(renew(&guard));
                let executed = async || scripts(node) > before;
                let executed = eventually("the renewal has arrived", SOON, executed);
                here.block_on(tokio::time::timeout(SOON / 10, executed))
            };
            // The first renewals open the connections of this runtime.
            while is_executed().is_err() {}
            proxy.delay_requests(ENQUEUE, Duration::from_millis(400));
            let (before, delayed) = (scripts(node), proxy.traffic().delayed);
            node.flush();
            runtime.block_on(renew(&guard));
            here.block_on(eventually("the repair is in flight", SOON, async || {
                proxy.traffic().delayed > delayed
            }));
            proxy.delay_requests(ENQUEUE, Duration::ZERO);
            (before, runtime, guard)
        })
        .await
    }
}

/// The enqueue of a repair is carried out, and the client does not learn this. After that, the node
/// is needed.
async fn a_repair_whose_reply_is_lost_counts(_: Store) {
    let set = Quorum::start(3);
    let (proxies, url) = proxied(&set);
    let locks = client(&url);
    let guard = held_everywhere(&locks, &set.nodes).await;
    let (node, proxy) = (&set.nodes[2], &proxies[2]);
    node.flush();
    proxy.lose_replies(ENQUEUE, 1);

    eventually("the reply is lost", SOON, async || {
        renew(&guard).await;
        proxy.traffic().replies_lost > 0
    })
    .await;
    set.nodes[0].kill();

    for _ in 0..3 {
        eventually("the other two nodes renew it", SOON, async || {
            let longer = guard.remaining() + Duration::from_millis(1);
            guard.ensure(longer).await.is_ok()
        })
        .await;
    }
    assert!(!client(&node.url()).inspect("a").await.unwrap().is_empty());
    give_back(guard).await;
    nothing_is_left_at(&set.nodes[1..]).await;
}
