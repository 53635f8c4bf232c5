//! Tests with holders in other processes whose locks an operator asks back.

use std::time::Instant;

use libtest_mimic::Trial;
use lockcore::Release;
use tests::process::{Holder, HolderOptions};

use super::{GRACE, LEARNS, TTL, lock};
use crate::store::{
    DEFAULT, Kind, SLACK, SOON, Store, assert_nothing_left, begin, give_back, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().asks_back {
        return Vec::new();
    }
    crate::store_facts![store, DEFAULT;
        a_holder_in_another_process_learns_who_asks_and_gives_up
        a_holder_in_another_process_that_goes_on_loses_its_lock
        a_frozen_holder_that_is_asked_is_followed_when_its_lease_is_over
    ]
}

fn holder(store: &Store) -> Holder {
    let options = HolderOptions {
        namespace: store.namespace.clone(),
        ttl: TTL,
        ..HolderOptions::mutex(&store.url(), "a")
    };
    let mut holder = Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
    holder.acquire();
    holder
}

async fn a_holder_in_another_process_learns_who_asks_and_gives_up(store: Store) {
    let operator = store.client();
    let mut holder = holder(&store);
    let ticket = operator.inspect("a").await.unwrap()[0].ticket;
    holder.process().say("asked");
    let asks = operator.clone();
    let asked = tokio::spawn(async move { asks.revoke("a", ticket, 4 * SOON, "a deploy").await });

    let told = holder.process().expect("ASKED", LEARNS + SOON);

    assert!(
        told.starts_with(&format!("{:?} a deploy, by ", 4 * SOON)),
        "{told}"
    );
    assert!(
        told.contains(&format!("/{}/", std::process::id())),
        "{told}"
    );
    assert!(holder.is_valid(), "it has its grace");
    assert!(!asked.is_finished());
    assert_eq!(holder.release(), "Released");
    assert_eq!(asked.await.unwrap().unwrap(), Release::Released);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn a_holder_in_another_process_that_goes_on_loses_its_lock(store: Store) {
    let (operator, other) = (store.client(), store.client());
    let mut holder = holder(&store);
    let ticket = operator.inspect("a").await.unwrap()[0].ticket;
    let next = begin(lock(&other).wait(4 * SOON));
    tickets(&operator, "a", 2).await;
    let began = Instant::now();

    let outcome = operator.revoke("a", ticket, GRACE, "a deploy").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    assert!(began.elapsed() >= GRACE);
    assert_eq!(holder.lost(SOON), "Revoked");
    give_back(next.await.unwrap().unwrap()).await;
    assert_nothing_left(&store, &operator, "a").await;
}

/// A frozen holder does not learn of the ask-back and cannot release. It loses the lock when its
/// lease ends, and not earlier.
async fn a_frozen_holder_that_is_asked_is_followed_when_its_lease_is_over(store: Store) {
    let operator = store.client();
    let mut holder = holder(&store);
    let ticket = operator.inspect("a").await.unwrap()[0].ticket;
    holder.process().freeze();
    let began = Instant::now();

    let outcome = operator.revoke("a", ticket, GRACE, "a deploy").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    let most = TTL + store.timings().follows_the_dead + SLACK;
    assert!(began.elapsed() < most + SOON, "{:?}", began.elapsed());
    holder.process().thaw();
    assert!(!holder.is_valid(), "two would hold it");
}
