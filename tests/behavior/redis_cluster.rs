//! Tests with Redis Cluster: masters that are replaced, slots that move, nodes that do not answer,
//! and the errors of clients. The facts that apply to every store run on another cluster, where
//! nothing breaks.

mod failovers;
mod maps;
mod messages;
mod mistakes;
mod silent;
mod slots;

use std::collections::BTreeSet;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::redis_cluster::Cluster;
use tests::redis_server::RedisServer;

use crate::faults::builder;
use crate::store::{Kind, SOON, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        failovers::facts,
        maps::facts,
        mistakes::facts,
        silent::facts,
        slots::facts,
        messages::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// A ttl that is longer than any failover.
const TTL: Duration = Duration::from_secs(40);

/// The time after which the other nodes replace a silent master. A master that stands still for
/// three seconds stays.
const TIMEOUT: Duration = Duration::from_secs(5);

const LONG_WAIT: Duration = Duration::from_secs(60);

/// A client that allows more time, because a stalled machine must not look like a failing store.
fn client(url: &str) -> Locks {
    builder(url).ttl(TTL).op_timeout(SOON).build().unwrap()
}

/// The key of a name in the namespace of these facts.
fn key(name: &str) -> String {
    format!("test:1:{{{name}}}")
}

/// The connections of clients whose latest command was a script. A connection that has requested
/// the map closes a moment later, so it is not listed.
fn connections(node: &RedisServer) -> BTreeSet<u64> {
    let list: String = node.command(&["CLIENT", "LIST", "TYPE", "NORMAL"]);
    let scripts = list.lines().filter(|line| line.contains("cmd=evalsha"));
    let id = |line: &str| line.split([' ', '=']).nth(1).unwrap().parse().unwrap();
    scripts.map(id).collect()
}

/// How many requests this node has redirected to another node, because it does not serve their
/// slot.
fn redirections(node: &RedisServer) -> u64 {
    let stats: String = node.command(&["INFO", "errorstats"]);
    let moved = stats
        .lines()
        .find_map(|line| line.strip_prefix("errorstat_MOVED:count="));
    moved.map_or(0, |count| count.trim().parse().unwrap())
}

/// Checks that nobody holds these names or waits for them.
async fn nothing_left(cluster: &Cluster, names: &[&str]) {
    let locks = client(&cluster.url());
    for name in names {
        tickets(&locks, name, 0).await;
    }
}
