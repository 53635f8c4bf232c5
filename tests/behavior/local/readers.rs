//! Tests of readers in the queue inside one process: which of them share a ticket.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Fair};
use tests::eventually::eventually;
use tokio::task::JoinSet;

use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        readers_of_a_process_share_one_ticket
        a_reader_does_not_join_past_a_local_writer
        readers_behind_a_writer_come_in_together
        readers_that_try_at_once_both_get_in
    ]
}

async fn readers_of_a_process_share_one_ticket(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let catalog = locks.rwlock("c");
    let mut readers = Vec::new();
    for _ in 0..20 {
        readers.push(catalog.read().acquire().await.unwrap());
    }

    assert_eq!(counts.enqueued(), 1);
    assert_eq!(locks.inspect("c").await.unwrap().len(), 1);
    let last = readers.pop().unwrap();
    drop(readers);
    assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);
    give_back(last).await;
    give_back(catalog.write().try_acquire().await.unwrap()).await;
}

async fn a_reader_does_not_join_past_a_local_writer(store: Store) {
    let (locks, _) = store.counted(Fair::Local(Duration::from_secs(60)));
    let catalog = locks.rwlock("c");
    let reader = catalog.read().acquire().await.unwrap();
    let writer = begin(catalog.write().wait(SOON));
    tickets(&locks, "c", 2).await;

    assert_eq!(kind(catalog.read().try_acquire().await), ErrorKind::Busy);
    writer.abort();
    let _ = writer.await;

    // When the writer has given up, the next reader joins the ticket again.
    eventually("a reader joins", SOON, async || {
        catalog.read().try_acquire().await.is_ok()
    })
    .await;
    give_back(reader).await;
}

/// All readers share one ticket of their own. The writer's ticket is not used for them: it would
/// keep readers of other processes out.
async fn readers_behind_a_writer_come_in_together(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let catalog = locks.rwlock("c");
    let writer = catalog.write().acquire().await.unwrap();
    // The readers continue only when all of them hold the lock.
    let inside = Arc::new(tokio::sync::Barrier::new(11));
    let mut readers = JoinSet::new();
    for _ in 0..10 {
        let (read, inside) = (catalog.read().wait(SOON), Arc::clone(&inside));
        readers.spawn(async move {
            let guard = read.acquire().await.unwrap();
            inside.wait().await;
            inside.wait().await;
            give_back(guard).await;
        });
    }
    tickets(&locks, "c", 11).await;
    let next = begin(catalog.write().wait(SOON));
    tickets(&locks, "c", 12).await;

    give_back(writer).await;
    inside.wait().await;
    // The next writer came earlier than this reader.
    assert_eq!(kind(catalog.read().try_acquire().await), ErrorKind::Busy);
    inside.wait().await;
    while let Some(done) = readers.join_next().await {
        done.unwrap();
    }
    give_back(next.await.unwrap().unwrap()).await;
    assert_eq!(counts.enqueued(), 3, "a writer, the readers, a writer");
}

async fn readers_that_try_at_once_both_get_in(store: Store) {
    let read = store.client().rwlock("c").read();
    let (one, other) = tokio::join!(read.try_acquire(), read.try_acquire());
    give_back(one.unwrap()).await;
    give_back(other.unwrap()).await;
}
