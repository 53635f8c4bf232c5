//! Tests of Redis with Sentinel: masters that are replaced, and sentinels that are down, wrong or
//! in disagreement. The facts that apply to every store run on other servers and sentinels, where
//! nothing breaks.

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

/// A ttl that is longer than any failover.
const TTL: Duration = Duration::from_secs(40);

/// A client that allows more time, because a stalled machine must not look like a failing store.
fn client(url: &str) -> Locks {
    builder(url).ttl(TTL).op_timeout(SOON).build().unwrap()
}
