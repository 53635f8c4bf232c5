//! Tests with a master that is frozen: requests reach it, but it answers none of them. Each fact
//! has its own cluster.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{join_all, select_all};
use libtest_mimic::Trial;
use lockcore::inspect::TicketInfo;
use lockcore::{Error, Guard, Locks, LostReason};
use tests::eventually::eventually;
use tests::redis_cluster::{Cluster, NEVER};
use tests::redis_server::RedisServer;
use tokio::task::JoinSet;

use super::{LONG_WAIT, TIMEOUT, TTL, connections, key};
use crate::faults::{builder, is_renewed, works_again};
use crate::store::{Kind, SOON, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_frozen_master_costs_the_leases_at_other_masters_nothing
        a_frozen_master_is_left_although_requests_for_it_go_on
        a_master_that_answers_within_the_operation_timeout_is_kept
        a_request_that_is_dropped_or_not_polled_makes_no_master_silent
        a_master_that_stays_silent_gets_another_connection
    ]
}

/// The first names that this master serves if `here` is true, else the first names that it does not
/// serve.
fn names(cluster: &Cluster, master: &RedisServer, here: bool, count: usize) -> Vec<String> {
    let names = (0..).map(|number| format!("n{number}"));
    let is_here = |name: &String| cluster.master_of(&key(name)).port() == master.port();
    names
        .filter(|name| is_here(name) == here)
        .take(count)
        .collect()
}

async fn all(locks: &Locks, names: &[String]) -> Vec<Guard> {
    let mut guards = Vec::new();
    for name in names {
        guards.push(locks.mutex(name).acquire().await.unwrap());
    }
    guards
}

/// No node replaces the frozen master. The leases of this master and of other masters are renewed
/// in the same batches.
async fn a_frozen_master_costs_the_leases_at_other_masters_nothing(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let frozen = cluster.master_of(&key("a"));
    let ttl = Duration::from_secs(6);
    let locks = builder(cluster.url()).ttl(ttl).build().unwrap();
    let here = all(&locks, &names(&cluster, frozen, true, 4)).await;
    let there = all(&locks, &names(&cluster, frozen, false, 8)).await;

    frozen.freeze();

    let lost = select_all(there.iter().map(|guard| Box::pin(guard.lost())));
    if let Ok((reason, which, _)) = tokio::time::timeout(2 * ttl, lost).await {
        panic!("{} is lost: {reason:?}", there[which].name());
    }
    for guard in &here {
        let told = tokio::time::timeout(SOON, guard.lost()).await;
        assert_eq!(told.expect("is not told"), LostReason::Expired);
    }
    for guard in there {
        give_back(guard).await;
    }
    frozen.thaw();
    works_again(&locks, "a", LONG_WAIT).await;
}

/// Requests to the frozen master are in flight all the time. The other masters answer their
/// requests.
async fn a_frozen_master_is_left_although_requests_for_it_go_on(_: Store) {
    // The other masters serve their slots even while a slot is not served. So their answers do not
    // show the client that something has changed.
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(3, true, TIMEOUT, &partial);
    let old = cluster.master_of(&key("a"));
    let locks = builder(cluster.url()).ttl(TTL).build().unwrap();
    let asked = [true, false].map(|here| names(&cluster, old, here, 20));
    for name in asked.iter().flatten() {
        give_back(locks.mutex(name).acquire().await.unwrap()).await;
    }
    cluster.wait_until_replicated();

    old.freeze();
    let requests = tokio::spawn(requests(locks.clone(), asked));
    cluster.wait_for_another_master_than(old.port(), &key("a"));

    eventually("granted again", SOON, async || {
        locks.mutex("a").try_acquire().await.is_ok()
    })
    .await;
    requests.abort();
}

/// Sends a request to the frozen master and a request to another master, again and again. Does not
/// wait for the answers.
async fn requests(locks: Locks, names: [Vec<String>; 2]) {
    let mut requests = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_millis(50));
    for round in 0.. {
        pace.tick().await;
        for names in &names {
            let lock = locks.mutex(&names[round % names.len()]);
            requests.spawn(async move { lock.try_acquire().await.map(drop) });
        }
        while requests.try_join_next().is_some() {}
    }
}

/// The master is frozen for longer than the default operation timeout, but for less than the
/// timeout of this client. While the master is frozen, the keeper renews the leases in several
/// batches. The other masters answer their parts of each batch at once.
async fn a_master_that_answers_within_the_operation_timeout_is_kept(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let stalls = cluster.master_of(&key("a"));
    let ttl = Duration::from_secs(9);
    let renewed_after = ttl / 3;
    let locks = builder(cluster.url()).ttl(ttl).op_timeout(SOON);
    let locks = locks.build().unwrap();
    let names = [true, false].map(|here| names(&cluster, stalls, here, 8));
    let mut guards = Vec::new();
    for name in names[0].iter().zip(&names[1]) {
        for name in [name.0, name.1] {
            guards.push(locks.mutex(name).acquire().await.unwrap());
        }
        // Leases that are granted at different times are renewed at different times. So the test
        // waits between the grants. In total it spreads the renewals over half of the time between
        // two renewals of a lease.
        tokio::time::sleep(renewed_after / 2 / 8).await;
    }
    let renewed = || join_all(guards.iter().map(|guard| is_renewed(guard, ttl)));
    // The keeper has its own connection. `connections` lists a connection only if its latest
    // command was EVALSHA. The keeper's first renewal may have sent the whole script (EVAL). So the
    // test waits for two renewals.
    for _ in 0..2 {
        renewed().await;
    }
    let before = connections(stalls);
    assert_eq!(before.len(), 2);

    stalls.freeze();
    // During this sleep, each lease becomes due for a renewal. The frozen master does not answer
    // its part of these renewals.
    tokio::time::sleep(renewed_after + renewed_after / 6).await;
    stalls.thaw();

    renewed().await;
    assert_eq!(connections(stalls), before);
    for guard in guards {
        give_back(guard).await;
    }
}

/// Sends a request, and returns it before its answer has come.
fn sent(locks: &Locks) -> Pin<Box<impl Future<Output = Result<Vec<TicketInfo>, Error>>>> {
    loop {
        let mut request = Box::pin(locks.inspect("a"));
        // If the answer comes while the request is sent, another one is sent.
        if request.as_mut().now_or_never().is_none() {
            return request;
        }
    }
}

/// The connection of a client without leases, at its only node.
async fn connection(locks: &Locks, node: &RedisServer) -> BTreeSet<u64> {
    loop {
        locks.inspect("a").await.unwrap();
        // `connections` lists a connection only if its latest command was EVALSHA. The first request
        // may send the whole script, and the client may ask the node for its time.
        let open = connections(node);
        if !open.is_empty() {
            return open;
        }
    }
}

/// A client that sends requests, but does not look at their answers. The master answers at once.
async fn a_request_that_is_dropped_or_not_polled_makes_no_master_silent(_: Store) {
    let cluster = Cluster::of_one();
    let op_timeout = Duration::from_secs(4);
    let locks = builder(cluster.url()).op_timeout(op_timeout);
    let locks = locks.build().unwrap();
    let before = connection(&locks, &cluster.nodes[0]).await;
    assert_eq!(before.len(), 1);
    // After half of the operation timeout, a node that has answered nothing counts as silent.
    let longer_than_silent = op_timeout / 2 + op_timeout / 20;

    drop(sent(&locks));
    tokio::time::sleep(longer_than_silent).await;
    drop(sent(&locks));
    assert_eq!(connection(&locks, &cluster.nodes[0]).await, before);

    let not_polled = sent(&locks);
    tokio::time::sleep(longer_than_silent).await;
    drop(sent(&locks));
    not_polled.await.unwrap();
    assert_eq!(connection(&locks, &cluster.nodes[0]).await, before);
}

async fn a_master_that_stays_silent_gets_another_connection(_: Store) {
    let cluster = Cluster::of_one();
    let master = &cluster.nodes[0];
    let locks = builder(cluster.url()).ttl(TTL).build().unwrap();
    let before = connection(&locks, master).await;
    assert_eq!(before.len(), 1);

    master.freeze();
    // The first of these requests ends after an operation timeout. The connection is closed after
    // a quarter of it more, before the second one ends.
    for _ in 0..2 {
        locks.inspect("a").await.unwrap_err();
    }
    master.thaw();

    eventually("it answers", SOON, async || {
        locks.inspect("a").await.is_ok()
    })
    .await;
    assert!(connection(&locks, master).await.is_disjoint(&before));
}
