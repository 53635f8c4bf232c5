//! Redis Cluster: masters that are replaced, slots that move, nodes that are silent, and what clients say when something
//! is wrong. The facts that all stores share run on another cluster, which nobody breaks.

mod failovers;
mod mistakes;
mod silent;
mod slots;

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::redis_cluster::Cluster;

use crate::faults::builder;
use crate::store::{Kind, SOON, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        failovers::facts,
        mistakes::facts,
        silent::facts,
        slots::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// Longer than any failover takes.
const TTL: Duration = Duration::from_secs(20);

/// When the other nodes give up a silent master. A busy machine delays a node's answers for much less than this.
const TIMEOUT: Duration = Duration::from_secs(2);

const LONG_WAIT: Duration = Duration::from_secs(60);

/// Allows more time, because a stalled machine must not look like a failing store.
fn client(url: &str) -> Locks {
    builder(url).ttl(TTL).op_timeout(SOON).build().unwrap()
}

/// The key of a name in the namespace of these facts.
fn key(name: &str) -> String {
    format!("test:1:{{{name}}}")
}

/// Checks that nobody holds these names or waits for them.
async fn nothing_left(cluster: &Cluster, names: &[&str]) {
    let locks = client(&cluster.url());
    for name in names {
        tickets(&locks, name, 0).await;
    }
}
