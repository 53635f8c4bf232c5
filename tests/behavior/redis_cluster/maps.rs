//! Tests of the map of a cluster: which maps clients use, how often they request the map, and which
//! connections they keep after the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks, Release};
use tests::eventually::{eventually, wait_until};
use tests::proxy::Proxy;
use tests::redis_cluster::{Cluster, NEVER, slot};
use tests::redis_server::RedisServer;

use super::{LONG_WAIT, TTL, client, connections, key, nothing_left, redirections};
use crate::faults::{a_shutdown_ends_the_first_use, builder, works_again};
use crate::moved::{self, Place};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_node_that_knows_an_older_cluster_is_not_believed
        a_master_that_slots_arrive_at_keeps_its_connections
        all_connections_of_a_client_ask_for_the_map_once_a_second
        a_master_that_was_demoted_is_left
        a_node_that_knows_an_older_cluster_does_not_replace_the_map
        a_request_at_a_demoted_master_is_repeated_at_the_new_one
        clients_exclude_each_other_after_the_address_of_a_master_is_moved
        a_slot_that_has_no_master_in_a_new_map_is_asked_for_at_the_last_one
        a_shutdown_during_the_first_use_ends_it_and_leaves_nothing
    ]
}

/// How often clients have requested the map from this node.
fn questions(node: &RedisServer) -> u64 {
    let stats = node.command_stats();
    *stats.get("cluster|shards").unwrap_or(&0)
}

/// Closes all connections that clients have to this node.
fn cut(node: &RedisServer) {
    node.command::<()>(&["CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES"]);
}

/// The node that was left behind answers first, and says that it has all slots.
async fn a_node_that_knows_an_older_cluster_is_not_believed(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let left_behind = Cluster::of_one();
    let left_behind = &left_behind.nodes[0];
    let url = format!("{},127.0.0.1:{}", cluster.url(), left_behind.port());
    let locks = builder(url).ttl(TTL).op_timeout(STALL).build().unwrap();
    let asked = questions(left_behind);
    for node in &cluster.nodes {
        node.freeze();
    }

    let next = begin(locks.mutex("a").wait(LONG_WAIT));
    wait_until("it is asked", SOON, || questions(left_behind) > asked);
    // If a client used the map of this node, it would send the lock request to this node next.
    eventually("it is asked no more", SOON, async || {
        connections(left_behind).is_empty() || !left_behind.keys("test:*").is_empty()
    })
    .await;
    for node in &cluster.nodes {
        node.thaw();
    }

    let guard = next.await.unwrap().unwrap();
    assert_eq!(left_behind.keys("*"), Vec::<String>::new());
    assert_eq!(cluster.master_of(&key("a")).keys("test:*"), [key("a")]);
    give_back(guard).await;
}

/// The new master serves no slot until the moving slots have arrived.
async fn a_master_that_slots_arrive_at_keeps_its_connections(_: Store) {
    let cluster = Cluster::with(2, false, NEVER, &[]);
    let [full, empty] = &cluster.nodes[..] else {
        panic!()
    };
    cluster.take_all_slots(full);
    let locks = client(&cluster.url());
    let guard = locks.mutex("a").acquire().await.unwrap();
    let slot = cluster.begin_moving(&key("a"), empty);
    cluster.move_key(full, empty, &key("a"));
    // The client sends two requests, because `connections` counts a connection only if its latest
    // request was `EVALSHA`. The first request may be the whole script.
    for round in 1..3 {
        guard.extend(round * TTL).await.unwrap();
    }
    let before = connections(empty);
    assert!(!before.is_empty());

    for _ in 0..3 {
        let asked = questions(full);
        cut(full);
        // If it is too early to request the map again, the next operation of the client requests
        // it.
        eventually("the map is asked for", SOON, async || {
            locks.inspect("a").await.is_ok() && questions(full) > asked
        })
        .await;
    }

    let after = connections(empty);
    assert!(after.is_superset(&before), "{before:?} {after:?}");
    cluster.finish_moving(slot, full, empty);
    give_back(guard).await;
}

/// For how long the fact counts the requests for the map.
const MEASURED: Duration = Duration::from_secs(4);

/// The client has one connection for each of several runtimes. All of these connections break again
/// and again.
async fn all_connections_of_a_client_ask_for_the_map_once_a_second(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let locks = client(&cluster.url());
    let ends = Arc::new(AtomicBool::new(false));
    let works = |number: u32| {
        let (locks, ends) = (locks.clone(), Arc::clone(&ends));
        std::thread::spawn(move || busy(&locks, number, &ends))
    };
    let threads: Vec<_> = (0..6).map(works).collect();
    let broken = cluster.master_of(&key("a"));
    wait_until("all are connected", SOON, || connections(broken).len() >= 6);
    let before: Vec<_> = cluster.nodes.iter().map(questions).collect();
    let began = Instant::now();

    // The limit is a number of requests per second, so this loop runs for some time.
    while began.elapsed() < MEASURED {
        cut(broken);
        wait_until("all are connected again", SOON, || {
            connections(broken).len() >= 6
        });
    }

    let seconds = began.elapsed().as_secs() + 1;
    let since = cluster.nodes.iter().zip(before);
    let since: Vec<_> = since
        .map(|(node, before)| questions(node) - before)
        .collect();
    println!("{since:?} questions in {seconds} s");
    assert!(since.iter().all(|asked| *asked <= seconds + 1), "{since:?}");
    assert!(since.iter().any(|asked| *asked >= 2), "{since:?}");
    ends.store(true, Ordering::SeqCst);
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Acquires and releases locks at all masters until `ends` is set. Errors are ignored, because the
/// connections break.
#[tokio::main(flavor = "current_thread")]
async fn busy(locks: &Locks, number: u32, ends: &AtomicBool) {
    for round in 0.. {
        if ends.load(Ordering::SeqCst) {
            return;
        }
        let name = format!("n{number}:{}", round % 20);
        let _ = locks.mutex(name).try_acquire().await;
    }
}

/// The old master continues as a replica. The client learns this only from the answers of the old
/// master.
async fn a_master_that_was_demoted_is_left(_: Store) {
    let cluster = Cluster::start(NEVER);
    let old = cluster.master_of(&key("a"));
    let locks = client(&cluster.url());
    for _ in 0..2 {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }
    assert_eq!(connections(old).len(), 1);

    cluster.fail_over(old);

    eventually("its connections are closed", SOON, async || {
        give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
        connections(old).is_empty()
    })
    .await;
}

/// The node that was left behind is the only node that answers. It says that it has all slots. The
/// client has read the map of the cluster before.
async fn a_node_that_knows_an_older_cluster_does_not_replace_the_map(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let left_behind = Cluster::of_one();
    let left_behind = &left_behind.nodes[0];
    let url = format!("{},127.0.0.1:{}", cluster.url(), left_behind.port());
    let quick = builder(url).ttl(TTL).op_timeout(Duration::from_millis(500));
    let locks = quick.build().unwrap();
    works_again(&locks, "a", LONG_WAIT).await;
    let asked = questions(left_behind);
    for node in &cluster.nodes {
        node.freeze();
    }

    // The client gives up the first of these questions. The later questions do not wait for the
    // nodes that were silent in the first.
    eventually("it is asked several times", LONG_WAIT, async || {
        let outcome = locks.mutex("a").try_acquire().await;
        assert!(outcome.is_err(), "granted by another cluster");
        questions(left_behind) >= asked + 4
    })
    .await;
    // A new connection also gets only the answer of the node that was left behind.
    let other = locks.clone();
    let is_let_in = tokio::task::spawn_blocking(move || is_let_in_elsewhere(&other));
    assert!(!is_let_in.await.unwrap(), "granted by another cluster");

    assert_eq!(left_behind.keys("*"), Vec::<String>::new());
    for node in &cluster.nodes {
        node.thaw();
    }
    works_again(&locks, "a", LONG_WAIT).await;
    assert_eq!(left_behind.keys("*"), Vec::<String>::new());
}

/// Tries to acquire the lock in a runtime of its own.
#[tokio::main(flavor = "current_thread")]
async fn is_let_in_elsewhere(locks: &Locks) -> bool {
    locks.mutex("a").try_acquire().await.is_ok()
}

/// Only the answer of the old master shows that it is a replica now. Another client holds the lock,
/// and does not know of the failover.
async fn a_request_at_a_demoted_master_is_repeated_at_the_new_one(_: Store) {
    let cluster = Cluster::start(NEVER);
    let old = cluster.master_of(&key("a"));
    let new = cluster.replica_of(old);
    let names = (0..).map(|number| format!("n{number}"));
    let is_here = |name: &String| cluster.master_of(&key(name)).port() == old.port();
    let free = names.into_iter().find(is_here).unwrap();
    let [holds, asks] = [(); 2].map(|()| client(&cluster.url()));
    give_back(asks.mutex("a").acquire().await.unwrap()).await;
    asks.ready(SOON).await.unwrap(); // no further connection of this client asks for the map
    let guard = holds.mutex("a").acquire().await.unwrap();
    cluster.wait_until_replicated();
    cluster.fail_over(old);
    let asked = || cluster.nodes.iter().map(questions).sum::<u64>();
    let (before, sent_away) = (asked(), redirections(old));

    // The test makes one call for each name. The client must repeat the request at the new master
    // within this call.
    let outcome = asks.mutex("a").try_acquire().await;
    let next = asks.mutex(&free).try_acquire().await.unwrap();

    assert_eq!(kind(outcome), ErrorKind::Busy);
    assert!(redirections(old) > sent_away);
    wait_until("the map is asked for", SOON, || asked() > before);
    for name in ["a", &free] {
        tickets(&asks, name, 1).await;
        let other = client(&cluster.url()).mutex(name).try_acquire().await;
        assert_eq!(kind(other), ErrorKind::Busy);
    }
    assert!(new.keys("test:*").contains(&key(&free)));
    let token = guard.grant_id().as_u64();
    let waits = begin(asks.mutex("a").wait(LONG_WAIT));
    tickets(&asks, "a", 2).await;
    give_back(guard).await;
    let waits = waits.await.unwrap().unwrap();
    assert!(waits.grant_id().as_u64() > token);
    give_back(waits).await;
    give_back(next).await;
    nothing_left(&cluster, &["a", &free]).await;
}

/// The master of the slot is silent for a moment, and the other nodes know no master of the slot.
async fn a_slot_that_has_no_master_in_a_new_map_is_asked_for_at_the_last_one(_: Store) {
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(3, false, NEVER, &partial);
    let master = cluster.master_of(&key("a"));
    let others: Vec<_> = cluster.masters();
    let others = others
        .into_iter()
        .filter(|node| node.port() != master.port());
    let others: Vec<_> = others.collect();
    let quick = builder(cluster.url()).op_timeout(Duration::from_secs(2));
    let locks = quick.ttl(2 * LONG_WAIT).build().unwrap();
    locks.ready(SOON).await.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let asked = || others.iter().map(|node| questions(node)).max().unwrap();

    // Each node knows the master of the slot.
    cluster.wait_for_another_master_than(0, &key("a"));
    master.freeze();
    let lost = slot(others[0], &key("a")).to_string();
    for node in &others {
        node.command::<()>(&["CLUSTER", "DELSLOTS", &lost]);
    }
    // The answer to the first of these questions is a map without the slot, and the second question
    // comes only after this map is known.
    let before = asked();
    eventually("the map is asked for", LONG_WAIT, async || {
        assert!(locks.inspect("a").await.is_err());
        asked() >= before + 2
    })
    .await;
    master.thaw();

    assert_eq!(guard.release().await.unwrap(), Release::Released);
}

/// The address is moved to the node of another cluster.
async fn clients_exclude_each_other_after_the_address_of_a_master_is_moved(_: Store) {
    let [earlier, later] = [(); 2].map(|()| Cluster::of_one());
    let way = Proxy::to(earlier.nodes[0].port());
    let port = way.port().to_string();
    for cluster in [&earlier, &later] {
        let node = &cluster.nodes[0];
        node.command::<()>(&["CONFIG", "SET", "cluster-announce-port", &port]);
    }
    let place = Place {
        url: format!("redis+cluster://127.0.0.1:{port}"),
        ways: vec![way],
        earlier: earlier.nodes,
        later: later.nodes,
        beside: Box::new(()),
    };
    moved::clients_exclude_each_other_after_the_move(place).await;
}

/// The proxy is frozen, so no node answers the question where the slots are.
async fn a_shutdown_during_the_first_use_ends_it_and_leaves_nothing(_: Store) {
    let cluster = Cluster::of_one();
    let node = &cluster.nodes[0];
    let proxy = Proxy::to(node.port());
    let url = format!("redis+cluster://127.0.0.1:{}", proxy.port());

    a_shutdown_ends_the_first_use(&url, std::slice::from_ref(&proxy)).await;

    assert_eq!(node.keys("*"), Vec::<String>::new());
}
