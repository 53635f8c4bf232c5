//! Tests of the downgrade of a lock with several guards: the ticket becomes a reader's ticket when
//! the last guard that writes has ended.

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind};

use super::{at_once, begin, inside};
use crate::store::{DEFAULT, Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_downgrade_while_another_guard_writes_is_refused
        a_read_that_outlives_its_write_lets_readers_in
        a_read_that_outlives_a_dropped_write_lets_readers_in
        the_last_writer_of_several_lets_readers_in
        a_write_inside_that_ends_lets_the_reads_beside_it_in
        a_write_that_outlives_its_inner_holds_renews_nothing
    ]
}

async fn a_downgrade_while_another_guard_writes_is_refused(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut guard = locks.mutex("a").acquire().await.unwrap();
    let second = guard.reenter().unwrap();
    let reader = other.rwlock("a").read();

    assert_eq!(kind(guard.downgrade().await), ErrorKind::Busy);
    assert!(guard.fencing_token().is_ok());
    assert_eq!(kind(reader.try_acquire().await), ErrorKind::Busy);
    give_back(second).await;
    let inner = inside(&guard, locks.mutex("a")).await;
    assert_eq!(kind(guard.downgrade().await), ErrorKind::Busy);
    give_back(inner).await;

    guard.downgrade().await.unwrap();
    give_back(reader.try_acquire().await.unwrap()).await;
    give_back(guard).await;
}

async fn a_read_that_outlives_its_write_lets_readers_in(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let catalog = locks.rwlock("c");
    let write = catalog.write();
    let reader = begin(other.rwlock("c").read().wait(SOON));

    // The reader is in line, or it was granted before the writer and has released.
    give_back(reader.await.unwrap()).await;
    let mut waits = None;
    let inner = write
        .run(async |held| {
            waits = Some(begin(other.rwlock("c").read()));
            tickets(&other, "c", 2).await;
            let inner = catalog.read().acquire().await?;
            assert_eq!(inner.grant_id(), held.grant_id());
            assert!(held.fencing_token().is_ok());
            Ok::<_, Error>(inner)
        })
        .await
        .unwrap();

    let reader = at_once(waits.unwrap()).await;
    assert!(inner.is_valid());
    assert_eq!(kind(inner.fencing_token()), ErrorKind::Config);
    assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
    give_back(reader).await;
    assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
    give_back(inner).await;
    give_back(other.mutex("c").try_acquire().await.unwrap()).await;
    assert_nothing_left(&store, &locks, "c").await;
}

async fn a_read_that_outlives_a_dropped_write_lets_readers_in(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let catalog = locks.rwlock("c");
    let guard = catalog.write().acquire().await.unwrap();
    let inner = inside(&guard, catalog.read()).await;
    let reader = begin(other.rwlock("c").read());
    tickets(&other, "c", 2).await;

    drop(guard);

    give_back(at_once(reader).await).await;
    assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
    drop(inner);
    assert_nothing_left(&store, &locks, "c").await;
}

/// The two guards may end in either order.
async fn the_last_writer_of_several_lets_readers_in(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let catalog = locks.rwlock("c");
    for outer_first in [true, false] {
        let outer = catalog.write().acquire().await.unwrap();
        let inner = inside(&outer, catalog.write()).await;
        let read = inside(&inner, catalog.read()).await;
        assert_eq!(read.grant_id(), outer.grant_id());
        let reader = other.rwlock("c").read();
        let (first, last) = match outer_first {
            true => (outer, inner),
            false => (inner, outer),
        };

        give_back(first).await;
        assert_eq!(kind(reader.try_acquire().await), ErrorKind::Busy);
        give_back(last).await;

        give_back(reader.try_acquire().await.unwrap()).await;
        assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
        give_back(read).await;
        assert_nothing_left(&store, &locks, "c").await;
    }
}

/// The lane turns the inner write into a read hold.
async fn a_write_inside_that_ends_lets_the_reads_beside_it_in(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let write = catalog.write();
    write
        .run(async |held| {
            let mut inner = catalog.write().acquire().await?;
            assert_eq!(kind(catalog.read().try_acquire().await), ErrorKind::Busy);
            inner.downgrade().await?;
            assert_eq!(kind(inner.fencing_token()), ErrorKind::Config);
            give_back(catalog.read().try_acquire().await?).await;
            assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);

            // For readers of other clients the ticket is still exclusive.
            let stranger = store.client().rwlock("c").read();
            assert_eq!(kind(stranger.try_acquire().await), ErrorKind::Busy);
            assert!(held.fencing_token().is_ok());
            give_back(inner).await;
            give_back(catalog.write().try_acquire().await?).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    assert_nothing_left(&store, &locks, "c").await;
}

async fn a_write_that_outlives_its_inner_holds_renews_nothing(store: Store) {
    let (locks, counts) = store.counted(DEFAULT);
    let catalog = locks.rwlock("c");
    let write = catalog.write();
    write
        .run(async |_| {
            give_back(catalog.read().acquire().await?).await;
            give_back(catalog.write().acquire().await?).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    give_back(catalog.read().acquire().await.unwrap()).await;

    assert_eq!((counts.all(), counts.renewals()), (4, 0));
}
