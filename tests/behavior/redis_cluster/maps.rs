//! Tests of the map of a cluster: which nodes clients believe, how often they request the map, and
//! which connections they keep after the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::{eventually, wait_until};
use tests::redis_cluster::{Cluster, NEVER};
use tests::redis_server::RedisServer;

use super::{LONG_WAIT, TTL, client, connections, key};
use crate::faults::builder;
use crate::store::{Kind, SOON, STALL, Store, begin, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_node_that_knows_an_older_cluster_is_not_believed
        a_master_that_slots_arrive_at_keeps_its_connections
        all_connections_of_a_client_ask_for_the_map_once_a_second
        a_master_that_was_demoted_is_left
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

/// The node that is left behind answers first, and says that it has all slots.
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
    // A client that believes this node sends the lock request to it next.
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
    // request was sent by the hash of the script.
    for round in 1..3 {
        guard.extend(round * TTL).await.unwrap();
    }
    let before = connections(empty);
    assert!(!before.is_empty());

    for _ in 0..3 {
        let asked = questions(full);
        cut(full);
        // If it is too early to request the map again, the next operation requests it.
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

/// The client has one connection for each of several runtimes, and all of these connections break
/// again and again.
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

    // The limit is a number of requests per second, so the fact has to run for some time.
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

/// Acquires and releases locks at all masters until `ends` is set. Errors do not matter, because
/// the connections break.
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
