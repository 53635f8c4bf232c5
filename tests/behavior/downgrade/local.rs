//! Tests of downgrades and the queue inside one process.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Fair};
use tests::eventually::eventually;

use super::{at_once, begin};
use crate::store::{Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Local(Duration::from_secs(60));
        readers_of_the_process_share_a_downgraded_ticket
        a_writer_of_the_process_that_waits_goes_to_the_store_and_readers_stay_behind_it
        readers_do_not_join_a_downgraded_ticket_past_the_bound
    ]
}

async fn readers_of_the_process_share_a_downgraded_ticket(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    guard.downgrade().await.unwrap();

    let one = catalog.read().acquire().await.unwrap();
    let other = catalog.read().try_acquire().await.unwrap();
    assert_eq!(counts.enqueued(), 1, "a reader has a ticket of its own");
    assert_eq!(
        one.grant_id().as_u64() >> 10,
        guard.grant_id().as_u64() >> 10
    );
    assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    let stranger = store.client().mutex("c");
    assert_eq!(kind(stranger.try_acquire().await), ErrorKind::Busy);
    give_back(one).await;
    give_back(other).await;
    give_back(stranger.try_acquire().await.unwrap()).await;
    assert_nothing_left(&store, &locks, "c").await;
}

async fn a_writer_of_the_process_that_waits_goes_to_the_store_and_readers_stay_behind_it(
    store: Store,
) {
    let (locks, other) = (store.client(), store.client());
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let token = guard.grant_id();
    let writer = begin(catalog.write());
    tickets(&locks, "c", 2).await;
    assert_eq!(other.inspect("c").await.unwrap().len(), 1, "in memory");

    guard.downgrade().await.unwrap();

    eventually("it is in line at the store", SOON, async || {
        other.inspect("c").await.unwrap().len() == 2
    })
    .await;
    for client in [&locks, &other] {
        let read = client.rwlock("c").read();
        assert_eq!(kind(read.try_acquire().await), ErrorKind::Busy);
    }
    let readers = [begin(catalog.read()), begin(other.rwlock("c").read())];
    tickets(&locks, "c", 4).await;
    give_back(guard).await;
    let writer = at_once(writer).await;
    assert_ne!(writer.grant_id().as_u64() >> 10, token.as_u64() >> 10);
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    give_back(writer).await;
    for reader in readers {
        give_back(at_once(reader).await).await;
    }
}

async fn readers_do_not_join_a_downgraded_ticket_past_the_bound(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::ZERO));
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    guard.downgrade().await.unwrap();

    let reader = catalog.read().acquire().await.unwrap();

    assert_eq!(counts.enqueued(), 2);
    assert_ne!(
        reader.grant_id().as_u64() >> 10,
        guard.grant_id().as_u64() >> 10
    );
    give_back(guard).await;
    give_back(reader).await;
    assert_nothing_left(&store, &locks, "c").await;
}
