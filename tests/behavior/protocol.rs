//! Which requests the core sends to a store, in which order, and how it reacts to each answer. Where the content of
//! requests matters, the test plays the store. Where only their time matters, the facts use the library's own store for
//! tests with a stopped clock. This file has the code that the groups of facts share. The groups are the files of this
//! folder.

mod abandoned;
mod breaks;
mod leases;
mod limits;
mod player;

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;
use lockcore::backend::{Renewed, Request};
use lockcore::testing::Store as Kit;

use crate::store::Kind;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        abandoned::facts,
        leases::facts,
        breaks::facts,
        limits::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

const TTL: Duration = Duration::from_secs(1);

/// A client of a store with a stopped clock.
fn kit() -> (Kit, Locks) {
    let kit = Kit::new();
    kit.clock().stop();
    let locks = kit.client().unwrap();
    (kit, locks)
}

fn still_granted(tickets: &[Arc<Request>]) -> Vec<Renewed> {
    let granted = tickets.iter().map(|request| Renewed::Granted {
        valid_for: request.ttl,
    });
    granted.collect()
}
