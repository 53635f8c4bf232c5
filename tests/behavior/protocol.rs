//! Tests of the requests that the core sends to a store, of their order, and of how the core reacts
//! to each answer. Where the content of requests matters, the test plays the store. Where only
//! their time matters, the facts use the library's own store for tests, with a stopped clock. This
//! file has what the groups of facts share. The groups are the files of this folder.

mod abandoned;
mod breaks;
mod gathering;
mod keepers;
mod leases;
mod limits;
mod player;
mod several;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{Renewed, Request};
use lockcore::testing::{Hold, Store as Kit};
use lockcore::{Guard, Locks};

use crate::store::{Kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        abandoned::facts,
        leases::facts,
        keepers::facts,
        breaks::facts,
        gathering::facts,
        limits::facts,
        several::facts,
        turns::facts,
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

/// Checks that the keeper has read the clock of the kit and has sent no renewal.
pub(crate) async fn is_not_renewed(locks: &Locks, guard: &Guard, renewal: &mut Hold) {
    // When this lock is released, the keeper has read the clock.
    drop(locks.mutex("other").acquire().await.unwrap());
    tickets(locks, "other", 0).await;
    let arrived = renewal.arrived().now_or_never();
    assert!(
        arrived.is_none(),
        "renewed with {:?} left",
        guard.remaining()
    );
}

fn still_granted(tickets: &[Arc<Request>]) -> Vec<Renewed> {
    let granted = tickets.iter().map(|request| Renewed::Granted {
        valid_for: request.ttl,
    });
    granted.collect()
}
