//! Redis with Sentinel: masters that are replaced, and sentinels that are away, wrong or of two minds. What clients do at a
//! server is tested with the other stores, on a set of servers and sentinels that nobody breaks.

mod failovers;
mod sentinels;

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;

use crate::faults::builder;
use crate::store::{Kind, SOON};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [failovers::facts, sentinels::facts];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// Longer than any failover takes.
const TTL: Duration = Duration::from_secs(20);

/// A machine that stalls is not a store that fails.
fn client(url: &str) -> Locks {
    builder(url).ttl(TTL).op_timeout(SOON).build().unwrap()
}
