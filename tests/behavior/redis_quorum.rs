//! Tests with a quorum of Redis servers. Some of these nodes are down, slow or restarted, or have a
//! wrong clock. Each fact has its own nodes.

mod clocks;
mod cost;
mod crowds;
mod late;
mod missed;
mod nodes;
mod repair;
mod reports;
mod restarts;
mod tls;

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{Guard, Locks};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::RedisServer;

use crate::faults::builder;
use crate::store::{Kind, LEASE, SOON, give_back};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        nodes::facts,
        late::facts,
        missed::facts,
        repair::facts,
        reports::facts,
        restarts::facts,
        clocks::facts,
        crowds::facts,
        cost::facts,
        tls::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// A client that allows more time, because a stalled machine must not look like a failing store.
fn client(url: &str) -> Locks {
    builder(url).ttl(LEASE).op_timeout(SOON).build().unwrap()
}

/// A proxy in front of each node, and the URL of the proxies.
fn proxied(set: &Quorum) -> (Vec<Proxy>, String) {
    let proxies = set.nodes.iter().map(|node| Proxy::to(node.port()));
    let proxies: Vec<_> = proxies.collect();
    let url = url(proxies.iter().map(Proxy::port));
    (proxies, url)
}

/// Checks that no node has a live ticket. Expired tickets may be there: the next request for the
/// name removes them.
async fn nothing_is_left_at(nodes: &[RedisServer]) {
    for node in nodes {
        nothing_is_left(&client(&node.url())).await;
    }
}

async fn nothing_is_left(locks: &Locks) {
    for name in ["a", "b"] {
        eventually("nothing is left", 2 * SOON, async || {
            locks.inspect(name).await.unwrap().is_empty()
        })
        .await;
    }
}

/// Resolves when the one node of this client has a ticket of the lock `a`.
async fn has_ticket(alone: &Locks) {
    eventually("the node has the ticket", SOON, async || {
        !alone.inspect("a").await.unwrap().is_empty()
    })
    .await;
}

/// Holds the lock `a` at all these nodes. An acquire does not wait for a node that is slow or not
/// connected. So this acquires the lock again until all nodes have the ticket.
async fn held_everywhere(locks: &Locks, nodes: &[RedisServer]) -> Guard {
    let until = Instant::now() + 2 * SOON;
    loop {
        let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
        let mut is_everywhere = true;
        for node in nodes {
            let alone = client(&node.url());
            is_everywhere &= !alone.inspect("a").await.unwrap().is_empty();
        }
        if is_everywhere {
            return guard;
        }
        assert!(Instant::now() < until, "it is not at all nodes");
        give_back(guard).await;
    }
}

/// Makes a node remember a number for the lock `a` that is `ahead` of the clocks, as if another
/// client had chosen it. So the nodes answer the next request with different numbers. The lock is
/// free.
fn has_drawn(node: &RedisServer, ahead: Duration) {
    let number = (std::time::UNIX_EPOCH.elapsed().unwrap() + ahead).as_micros();
    node.command::<()>(&["SET", "test:1:{a}", &format!("{number:016}")]);
}

/// The warnings that the check of a new connection returns.
async fn warnings(url: &str) -> Vec<String> {
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = backend::open(url).unwrap().connect(events).await.unwrap();
    connection.check().await.unwrap()
}
