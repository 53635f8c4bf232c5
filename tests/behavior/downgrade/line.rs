//! Tests of the waiters that a downgrade grants at the store, and of those that keep waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::process::{Holder, HolderOptions};
use tests::stalls::awake_since;
use tokio::task::JoinSet;

use super::{at_once, begin};
use crate::processes::moments;
use crate::store::{Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        readers_come_in_at_once_and_writers_do_not
        a_reader_behind_a_waiting_writer_stays_behind_it
        a_crowd_of_writers_in_line_stays_in_line
        no_writer_gets_in_while_a_writer_becomes_a_reader
    ]
}

pub(crate) fn facts_of_processes(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_holder_killed_after_its_downgrade_is_followed_when_its_lease_is_over
    ]
}

async fn readers_come_in_at_once_and_writers_do_not(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut guard = locks.rwlock("c").write().acquire().await.unwrap();
    let before = guard.grant_id();
    let mut readers = Vec::new();
    for (at, client) in [&other, &locks, &store.client()].into_iter().enumerate() {
        readers.push(begin(client.rwlock("c").read()));
        tickets(&other, "c", at + 2).await;
    }

    guard.downgrade().await.unwrap();

    let mut guards = Vec::new();
    for reader in readers {
        guards.push(at_once(reader).await);
    }
    assert_eq!(guard.grant_id(), before);
    for client in [&locks, &other] {
        let late = client.rwlock("c").read().try_acquire().await.unwrap();
        give_back(late).await;
        let writer = client.rwlock("c").write().try_acquire().await;
        assert_eq!(kind(writer), ErrorKind::Busy);
    }
    let places = other.inspect("c").await.unwrap();
    assert!(
        places
            .iter()
            .all(|place| place.granted && place.permits == 1)
    );
    assert!(places.is_sorted_by_key(|place| place.ticket), "{places:?}");
    assert_eq!(places[0].ticket, before.as_u64() >> 10);

    give_back(guard).await;
    for guard in guards {
        give_back(guard).await;
    }
    let next = other.mutex("c").try_acquire().await.unwrap();
    assert!(next.grant_id().as_u64() > before.as_u64());
    give_back(next).await;
}

async fn a_reader_behind_a_waiting_writer_stays_behind_it(store: Store) {
    let observer = store.client();
    let mut guard = store.client().mutex("c").acquire().await.unwrap();
    let mut line = Vec::new();
    for place in 0..4 {
        let catalog = store.client().rwlock("c");
        line.push(begin(match place {
            2 => catalog.write(),
            _ => catalog.read(),
        }));
        tickets(&observer, "c", place + 2).await;
    }
    let mut line = line.into_iter();

    guard.downgrade().await.unwrap();

    let readers = [
        at_once(line.next().unwrap()).await,
        at_once(line.next().unwrap()).await,
    ];
    let places = observer.inspect("c").await.unwrap();
    let granted: Vec<bool> = places.iter().map(|place| place.granted).collect();
    assert_eq!(granted, [true, true, true, false, false]);
    give_back(guard).await;
    for reader in readers {
        give_back(reader).await;
    }
    let writer = at_once(line.next().unwrap()).await;
    let last = line.next().unwrap();
    assert!(!last.is_finished());
    give_back(writer).await;
    give_back(at_once(last).await).await;
}

/// On ZooKeeper, in a line as long as this one, each waiter watches only the ticket in front of it.
/// After the downgrade that ticket has another node.
async fn a_crowd_of_writers_in_line_stays_in_line(store: Store) {
    let observer = store.client();
    let mut guard = store.client().mutex("c").acquire().await.unwrap();
    let mut crowd = Vec::new();
    for place in 0..10 {
        crowd.push(begin(store.client().mutex("c")));
        tickets(&observer, "c", place + 2).await;
    }

    guard.downgrade().await.unwrap();

    let reader = observer.rwlock("c").read();
    assert_eq!(kind(reader.try_acquire().await), ErrorKind::Busy);
    let places = observer.inspect("c").await.unwrap();
    assert!(places[0].granted && places[0].permits == 1);
    assert!(!places[1..].iter().any(|place| place.granted));
    assert!(crowd.iter().all(|writer| !writer.is_finished()));
    give_back(guard).await;
    for writer in crowd {
        give_back(at_once(writer).await).await;
    }
}

/// Each writer reads a number and writes back one more. If two writers held the lock at once, an
/// update would be lost.
async fn no_writer_gets_in_while_a_writer_becomes_a_reader(store: Store) {
    let number = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let write = async |number: &AtomicU64| {
        let before = number.load(Ordering::SeqCst);
        tokio::task::yield_now().await;
        number.store(before + 1, Ordering::SeqCst);
    };
    let mut others = JoinSet::new();
    for waits in [true, false] {
        let (locks, number, stop) = (store.client(), Arc::clone(&number), Arc::clone(&stop));
        others.spawn(async move {
            let (mut written, lock) = (0, locks.mutex("n").wait(SOON));
            while !stop.load(Ordering::SeqCst) {
                let guard = match waits {
                    true => lock.acquire().await.unwrap(),
                    false => match lock.try_acquire().await {
                        Ok(guard) => guard,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Busy);
                            tokio::task::yield_now().await;
                            continue;
                        }
                    },
                };
                write(&number).await;
                written += 1;
                give_back(guard).await;
            }
            written
        });
    }
    let (locks, elsewhere) = (store.client(), store.client());
    let mut written = 0;
    for _ in 0..30 {
        let lock = locks.rwlock("n").write().wait(SOON);
        let mut guard = lock.acquire().await.unwrap();
        write(&number).await;
        written += 1;
        let mine = number.load(Ordering::SeqCst);

        guard.downgrade().await.unwrap();
        assert_eq!(number.load(Ordering::SeqCst), mine);
        // If there were another writer, this would give it time to change the number.
        elsewhere.inspect("n").await.unwrap();
        tokio::task::yield_now().await;

        assert_eq!(number.load(Ordering::SeqCst), mine, "somebody wrote");
        give_back(guard).await;
    }
    stop.store(true, Ordering::SeqCst);
    written += others.join_all().await.into_iter().sum::<u64>();
    assert_eq!(number.load(Ordering::SeqCst), written);
}

async fn a_holder_killed_after_its_downgrade_is_followed_when_its_lease_is_over(store: Store) {
    let ttl = Duration::from_secs(4); // a helper that stalls keeps its lease until it is killed
    let options = HolderOptions {
        namespace: store.namespace.clone(),
        ttl,
        lock: "mutex a".into(),
        ..HolderOptions::mutex(&store.url(), "")
    };
    let mut dying = Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
    let token = dying.acquire();
    let locks = store.client();
    let reader = begin(locks.rwlock("a").read().ttl(Duration::from_secs(60)));
    tickets(&locks, "a", 2).await;
    dying.downgrade();
    give_back(at_once(reader).await).await;
    let writer = begin(locks.mutex("a").ttl(Duration::from_secs(60)));
    tickets(&locks, "a", 2).await;

    dying.kill();
    let killed = Instant::now();
    let next = writer.await.unwrap();

    let after = awake_since(killed);
    assert!(next.grant_id().as_u64() > token);
    assert!(after < ttl + moments(&store), "{after:?}");
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}
