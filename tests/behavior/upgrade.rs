//! Tests of upgrades: a reader becomes a writer for a while. It is upgraded at once or not at all.
//! It is upgraded only if there is no other reader, and it gets a token of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::rwlock::UpgradedGuard;
use lockcore::value::Written;
use lockcore::{Error, ErrorKind, Guard, Held, Locks, LostReason, Release};
use tests::stalls::awake_since;
use tests::witness::Witness;
use tokio::task::JoinSet;

use crate::giving_up::polled;
use crate::store::{
    Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        a_reader_that_is_alone_writes_and_then_reads_on
        a_body_that_reads_writes_if_it_is_alone_and_then_reads_on
        a_write_hold_that_outlives_its_body_keeps_readers_out
        a_reader_that_is_not_alone_is_refused_at_once
        readers_that_upgrade_at_the_same_time_never_write_together
        an_upgrade_that_is_dropped_at_any_poll_leaves_the_reader
        a_writer_whose_read_ticket_is_lost_is_lost
        only_a_reader_can_be_upgraded
    ];
    if store.capability().counters {
        facts.extend(crate::store_facts![store;
            an_upgraded_reader_writes_the_value_with_its_token
        ]);
    }
    facts
}

async fn reads(locks: &Locks) -> Guard {
    locks.rwlock("a").read().acquire().await.unwrap()
}

async fn a_reader_that_is_alone_writes_and_then_reads_on(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let earlier = other.mutex("a").acquire().await.unwrap();
    let before = earlier.fencing_token().unwrap();
    give_back(earlier).await;
    let mut guard = reads(&locks).await;

    let write = guard.try_upgrade().await.unwrap();

    for locks in [&locks, &other] {
        let read = locks.rwlock("a").read().try_acquire().await;
        assert_eq!(kind(read), ErrorKind::Busy);
        assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    }
    assert!(write.is_valid());
    let token = write.fencing_token();
    assert!(token > before);
    assert_eq!(write.release().await.unwrap(), Release::Released);
    assert!(guard.is_valid());
    let second = reads(&other).await;
    assert_eq!(kind(guard.try_upgrade().await), ErrorKind::Busy);
    give_back(second).await;
    // The upgrade may also be dropped.
    drop(guard.try_upgrade().await.unwrap());
    give_back(reads(&other).await).await;
    give_back(guard).await;
    let later = other.mutex("a").acquire().await.unwrap();
    assert!(later.fencing_token().unwrap() > token);
    give_back(later).await;
    assert_nothing_left(&store, &locks, "a").await;
}

/// Upgrades a reader that is alone. A release at a quorum does not wait for the slowest node, and an
/// upgrade needs all nodes. So there the upgrade is repeated until that node has the release too.
async fn upgraded(store: &Store, held: &Held) -> Result<UpgradedGuard<'static>, Error> {
    let by = Instant::now() + SOON;
    loop {
        match held.try_upgrade().await {
            Err(error) if is_late_release(store, &error) && Instant::now() < by => {}
            outcome => return outcome,
        }
    }
}

fn is_late_release(store: &Store, error: &Error) -> bool {
    !store.capability().queues && error.kind() == ErrorKind::Busy
}

async fn a_body_that_reads_writes_if_it_is_alone_and_then_reads_on(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let beside = reads(&other).await;
    let read = locks.rwlock("a").read();
    let body = async |held: Held| {
        assert_eq!(kind(held.try_upgrade().await), ErrorKind::Busy);
        give_back(beside).await;
        let write = upgraded(&store, &held).await?;
        assert_eq!(kind(held.try_upgrade().await), ErrorKind::Busy);
        let second = other.rwlock("a").read().try_acquire().await;
        assert_eq!(kind(second), ErrorKind::Busy);
        assert_eq!(write.release().await?, Release::Released);
        give_back(reads(&other).await).await;
        drop(upgraded(&store, &held).await?);
        Ok::<_, Error>(held)
    };

    let view = soon(read.run(body)).await.unwrap();

    let late = view.try_upgrade().await;
    assert_eq!(kind(late), ErrorKind::Lost(LostReason::Released));
    assert_nothing_left(&store, &locks, "a").await;
}

/// The body returns its write hold. The ticket of the reader must stay: without it there would be
/// room for another reader beside the writer.
async fn a_write_hold_that_outlives_its_body_keeps_readers_out(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let read = locks.rwlock("a").read();
    let body = async |held: Held| held.try_upgrade().await;

    let write = soon(read.run(body)).await.unwrap();

    let second = other.rwlock("a").read().try_acquire().await;
    assert_eq!(kind(second), ErrorKind::Busy);
    assert!(write.is_valid());
    assert_eq!(write.release().await.unwrap(), Release::Released);
    give_back(soon(other.mutex("a").wait(SOON).acquire()).await.unwrap()).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_upgraded_reader_writes_the_value_with_its_token(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut guard = reads(&locks).await;
    let refused = guard.set_value("as a reader").await;
    assert_eq!(kind(refused), ErrorKind::Config);

    let write = guard.try_upgrade().await.unwrap();
    write.set_value("as a writer").await.unwrap();

    let expected = Written::new(write.fencing_token(), "as a writer");
    assert_eq!(write.value().await.unwrap(), Some(expected.clone()));
    write.release().await.unwrap();
    assert_eq!(other.value("a").get().await.unwrap(), Some(expected));
    give_back(guard).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_reader_that_is_not_alone_is_refused_at_once(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut guard = reads(&locks).await;
    let began = Instant::now();

    // A reader of the same process shares the ticket, unless every request has a ticket of its own.
    let beside = reads(&locks).await;
    assert_eq!(kind(guard.try_upgrade().await), ErrorKind::Busy);
    give_back(beside).await;
    let again = guard.reenter().unwrap();
    assert_eq!(kind(guard.try_upgrade().await), ErrorKind::Busy);
    give_back(again).await;
    let elsewhere = reads(&other).await;
    assert_eq!(kind(guard.try_upgrade().await), ErrorKind::Busy);
    give_back(elsewhere).await;
    // A waiting writer is in front of the upgrade and waits for this reader. If the upgrade waited
    // too, both would wait for ever.
    let writer = begin(other.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    assert_eq!(kind(guard.try_upgrade().await), ErrorKind::Busy);

    assert!(awake_since(began) < SOON, "{:?}", began.elapsed());
    assert!(guard.is_valid());
    give_back(guard).await;
    give_back(soon(writer).await.unwrap().unwrap()).await;
    assert_nothing_left(&store, &locks, "a").await;
}

/// Each reader reads the number. If it is alone, it writes the next number. Nothing else protects
/// the number.
async fn readers_that_upgrade_at_the_same_time_never_write_together(store: Store) {
    let (number, writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let witness = Arc::new(Witness::exclusive());
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let locks = store.client();
        for _ in 0..3 {
            let (locks, witness) = (locks.clone(), Arc::clone(&witness));
            let (number, writes) = (Arc::clone(&number), Arc::clone(&writes));
            tasks.spawn(async move {
                for _ in 0..15 {
                    let mut guard = reads(&locks).await;
                    let read = number.load(Ordering::SeqCst);
                    if let Ok(write) = guard.try_upgrade().await {
                        let visit = witness.enter(1);
                        tokio::task::yield_now().await;
                        // The value has not changed since this task read it as a reader.
                        assert_eq!(number.swap(read + 1, Ordering::SeqCst), read);
                        writes.fetch_add(1, Ordering::SeqCst);
                        drop(visit);
                        write.release().await.unwrap();
                    }
                    give_back(guard).await;
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }

    let writes = writes.load(Ordering::SeqCst);
    println!("{writes} upgrades");
    assert_eq!(number.load(Ordering::SeqCst), writes);
    witness.assert_no_overlap();
    assert_nothing_left(&store, &store.client(), "a").await;
}

async fn an_upgrade_that_is_dropped_at_any_poll_leaves_the_reader(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut guard = reads(&locks).await;
    for polls in 1.. {
        let ended = polled(guard.try_upgrade(), polls).await.map(drop).is_some();
        tickets(&locks, "a", 1).await;
        assert!(guard.is_valid());
        if ended {
            break;
        }
    }
    give_back(reads(&other).await).await;
    give_back(guard).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_writer_whose_read_ticket_is_lost_is_lost(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let ttl = Duration::from_secs(6);
    let read = locks.rwlock("a").read().ttl(ttl);
    let mut guard = read.acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let write = guard.try_upgrade().await.unwrap();

    let outcome = operator.force_release("a", ticket).await;

    assert_eq!(outcome.unwrap(), Release::Released);
    let stopped = write.while_held(std::future::pending::<()>());
    let error = soon(stopped).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Taken));
    assert!(!write.is_valid());
    assert_eq!(write.release().await.unwrap(), Release::AlreadyLost);
    let lost = guard.try_upgrade().await.map(drop);
    assert_eq!(kind(lost), ErrorKind::Lost(LostReason::Taken));
    drop(guard);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn only_a_reader_can_be_upgraded(store: Store) {
    let locks = store.client();
    let mut writer = locks.mutex("a").acquire().await.unwrap();
    let mut permit = locks.semaphore("s", 3).permits(1).acquire().await.unwrap();

    for guard in [&mut writer, &mut permit] {
        let refused = guard.try_upgrade().await.map(drop);
        assert_eq!(kind(refused), ErrorKind::Config);
    }

    writer.downgrade().await.unwrap();
    drop(writer.try_upgrade().await.unwrap());
    for guard in [writer, permit] {
        give_back(guard).await;
    }
    assert_nothing_left(&store, &locks, "a").await;
}
