//! Tests of what the server is asked.

use std::sync::atomic::{AtomicU64, Ordering};

use libtest_mimic::Trial;
use lockcore::Fair;
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;

use crate::faults::patient;
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_hand_over_costs_two_requests
    ]
}

/// The one by which the waiter takes its ticket, and the release.
async fn a_hand_over_costs_two_requests(_: Store) {
    const HAND_OVERS: u64 = 100;
    let server = EtcdServer::start();
    let clients = [(); 3].map(|()| {
        let builder = patient(server.url()).fair(Fair::Strict);
        builder.build().unwrap()
    });
    for locks in &clients {
        locks.ready(SOON).await.unwrap();
    }
    // Locks with an owner text do not share a ticket.
    let lock = |number: u64| {
        let locks = &clients[(number % 3) as usize];
        locks.mutex("a").owner(number.to_string()).wait(STALL)
    };
    let first = lock(0).acquire().await.unwrap();

    let before = server.requests();
    let waits = (1..=HAND_OVERS).map(lock).map(|lock| {
        // They may come to the server in any order.
        tokio::spawn(async move { give_back(lock.acquire().await.unwrap()).await })
    });
    let waits: Vec<_> = waits.collect();
    let looks = AtomicU64::new(0);
    eventually("the line has formed", SOON, async || {
        looks.fetch_add(1, Ordering::Relaxed);
        server.keys("test:1:{a}/t").len() as u64 == HAND_OVERS + 1
    })
    .await;
    give_back(first).await;
    for wait in waits {
        wait.await.unwrap();
    }

    // The last release is no hand-over.
    let asked = server.requests() - before - looks.into_inner() - 1;
    // Each client proves every ten seconds that its lease lives.
    let most = 2 * HAND_OVERS + HAND_OVERS / 10;
    assert!((2 * HAND_OVERS..=most).contains(&asked), "{asked}");
    println!("{asked} requests for {HAND_OVERS} hand-overs");
}
