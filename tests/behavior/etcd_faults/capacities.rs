//! Tests of stored capacities.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::semaphore::Semaphore;
use lockcore::{ErrorKind, Locks};
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;
use tests::proxy::Proxy;

use super::client;
use crate::faults::patient;
use crate::store::{DEFAULT, Kind, SOON, Store, begin, give_back, kind, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_grant_of_the_same_moment_outlives_a_smaller_capacity
        a_ticket_of_the_same_moment_outlives_a_smaller_capacity
        a_capacity_that_is_removed_takes_no_grant_back
        only_a_larger_capacity_is_stored_for_more_holders_than_a_transaction_compares
    ]
}

/// A part of the request that writes a capacity, which reads do not have.
const CHANGE: &[u8] = b"{a}/capacity";

fn two(locks: &Locks) -> Semaphore {
    locks.semaphore("a", 2)
}

/// A client whose changes of the capacity are on their way for some time after their reads.
async fn slow(server: &EtcdServer) -> (Locks, Proxy) {
    let proxy = Proxy::to(server.port());
    let locks = patient(server.url_at(proxy.port())).build().unwrap();
    locks.ready(SOON).await.unwrap();
    proxy.delay_requests(CHANGE, Duration::from_secs(3));
    (locks, proxy)
}

async fn is_on_its_way(proxy: &Proxy) {
    eventually("the change is on its way", SOON, async || {
        proxy.traffic().delayed > 0
    })
    .await;
}

/// The waiter has seen its grant before the change comes.
async fn a_grant_of_the_same_moment_outlives_a_smaller_capacity(_: Store) {
    let server = EtcdServer::start();
    let locks = client(&server);
    let (operator, proxy) = slow(&server).await;
    let first = two(&locks).permits(2).acquire().await.unwrap();
    let waits = begin(two(&locks).permits(2).wait(SOON));
    tickets(&locks, "a", 2).await;

    let pool = two(&operator);
    let resizes = tokio::spawn(async move { pool.resize(1).await });
    is_on_its_way(&proxy).await;
    give_back(first).await;
    let next = soon(waits).await.unwrap().unwrap();
    soon(resizes).await.unwrap().unwrap();

    let line = locks.inspect("a").await.unwrap();
    assert!(line.len() == 1 && line[0].granted, "{line:?}");
    give_back(next).await;
}

/// Nobody waits when the line is read, so a ticket that comes may hold.
async fn a_ticket_of_the_same_moment_outlives_a_smaller_capacity(_: Store) {
    let server = EtcdServer::start();
    let locks = client(&server);
    let (operator, proxy) = slow(&server).await;
    let first = two(&locks).acquire().await.unwrap();

    let pool = two(&operator);
    let resizes = tokio::spawn(async move { pool.resize(1).await });
    is_on_its_way(&proxy).await;
    let next = two(&locks).acquire().await.unwrap();
    soon(resizes).await.unwrap().unwrap();

    let line = locks.inspect("a").await.unwrap();
    assert!(line.len() == 2 && line.iter().all(|ticket| ticket.granted));
    give_back(first).await;
    give_back(next).await;
}

/// The record of the removal says that they hold. It has the lease of marks only if nobody needs it.
async fn a_capacity_that_is_removed_takes_no_grant_back(_: Store) {
    let server = EtcdServer::start();
    let locks = client(&server);
    two(&locks).resize(3).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(two(&locks).acquire().await.unwrap());
    }
    two(&locks).forget_capacity().await.unwrap();

    let line = locks.inspect("a").await.unwrap();
    assert!(line.iter().all(|ticket| ticket.granted), "{line:?}");
    let left = server.leases().into_iter().map(|lease| {
        let told = server.ctl(&["lease", "timetolive", &lease, "--keys"]);
        (told.contains("/resized"), told)
    });
    let (_, told) = left.into_iter().find(|(has, _)| *has).unwrap();
    assert!(!told.contains("granted with TTL(120s)"), "{told}");
    for guard in guards {
        give_back(guard).await;
    }
}

async fn only_a_larger_capacity_is_stored_for_more_holders_than_a_transaction_compares(_: Store) {
    const HOLDERS: u32 = 130;
    let server = EtcdServer::start();
    let locks = client(&server);
    let pool = || locks.semaphore("a", HOLDERS);
    let mut guards = Vec::new();
    for _ in 0..HOLDERS {
        guards.push(pool().acquire().await.unwrap());
    }

    let refused = pool().resize(HOLDERS - 1).await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert_eq!(kind(refused), ErrorKind::Unavailable);
    assert!(text.contains("120 tickets"), "{text}");
    pool().resize(HOLDERS + 1).await.unwrap();
    guards.push(pool().acquire().await.unwrap());
    for guard in guards.drain(100..) {
        give_back(guard).await;
    }
    pool().resize(HOLDERS - 1).await.unwrap();
}
