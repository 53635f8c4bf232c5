//! Downgrades: a writer becomes a reader. Waiting readers are granted, waiting writers are not, and no other writer
//! holds the lock in between.

#![allow(
    clippy::async_yields_async,
    reason = "the future that is made is what gets dropped half-way"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Guard, Lock, Locks, LostReason, Release, RwLock};
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions};
use tests::stalls::awake_since;
use tests::stores::Answers;
use tokio::task::{JoinHandle, JoinSet};

use crate::giving_up::drop_at_every_poll;
use crate::processes::moments;
use crate::store::{DEFAULT, Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        readers_come_in_at_once_and_writers_do_not
        a_reader_behind_a_waiting_writer_stays_behind_it
        a_crowd_of_writers_in_line_stays_in_line
        no_writer_gets_in_while_a_writer_becomes_a_reader
        a_downgraded_hold_reads_and_does_not_write
        a_downgraded_hold_that_is_given_back_leaves_nothing
        a_downgrade_dropped_at_any_poll_is_whole_or_has_not_begun
        a_lost_lock_is_not_downgraded
        a_semaphore_is_not_downgraded_and_a_reader_is_one_already
        a_downgrade_while_another_guard_writes_is_refused
        a_read_that_outlives_its_write_lets_readers_in
        a_read_that_outlives_a_dropped_write_lets_readers_in
        the_last_writer_of_several_lets_readers_in
        a_write_inside_that_ends_lets_the_reads_beside_it_in
        a_write_that_outlives_its_inner_holds_renews_nothing
        min_hold_keeps_only_the_read_side_after_a_downgrade
    ]
}

/// Facts about the queue inside one process.
pub(crate) fn local_facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Local(Duration::from_secs(60));
        readers_of_the_process_share_a_downgraded_ticket
        a_writer_of_the_process_that_waits_goes_to_the_store_and_readers_stay_behind_it
        readers_do_not_join_a_downgraded_ticket_past_the_bound
    ]
}

/// Facts that need several processes.
pub(crate) fn facts_of_processes(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_holder_killed_after_its_downgrade_is_followed_when_its_lease_is_over
    ]
}

/// Facts about lost requests and replies, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_downgrade_that_is_not_acknowledged_is_a_read_hold_and_is_asked_for_again
        a_lease_without_renewal_is_asked_for_again_too
        a_write_released_while_its_last_read_ends_was_not_lost
        a_write_dropped_while_its_last_read_ends_is_kept_for_readers
        a_ticket_on_its_way_to_the_readers_is_passed_on_to_nobody
        an_acknowledgement_of_an_earlier_renewal_lets_nobody_in
    ]
}

fn begin(lock: Lock) -> JoinHandle<Guard> {
    tokio::spawn(async move { lock.wait(SOON).acquire().await.unwrap() })
}

/// Acquires a lock inside the scope of another guard of it.
async fn inside(outer: &Guard, lock: Lock) -> Guard {
    let inner = outer.while_held(async { lock.acquire().await });
    inner.await.unwrap().unwrap()
}

/// The guard of a waiter that is granted by a wake-up. Its first renewal would come only after three seconds.
async fn at_once(waiter: JoinHandle<Guard>) -> Guard {
    let at_once = Duration::from_secs(2);
    let woken = tokio::time::timeout(at_once, waiter).await;
    woken.expect("not woken").unwrap()
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

/// On ZooKeeper, each waiter of a line this long watches only the ticket in front of it, and that ticket has another
/// node after the downgrade.
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

/// Each writer reads a number and writes it back. A second writer would make this one lose an update.
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
        // Gives another writer, if there were one, time to change the number.
        elsewhere.inspect("n").await.unwrap();
        tokio::task::yield_now().await;

        assert_eq!(number.load(Ordering::SeqCst), mine, "somebody wrote");
        give_back(guard).await;
    }
    stop.store(true, Ordering::SeqCst);
    written += others.join_all().await.into_iter().sum::<u64>();
    assert_eq!(number.load(Ordering::SeqCst), written);
}

async fn a_downgraded_hold_reads_and_does_not_write(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let view = guard.held();
    assert_eq!(
        view.fencing_token().unwrap().as_i64(),
        guard.grant_id().as_u64() as i64
    );

    guard.downgrade().await.unwrap();

    assert!(guard.is_valid() && guard.remaining() > Duration::from_secs(5));
    assert_eq!(kind(view.fencing_token()), ErrorKind::Config);
    let inside = guard.while_held(async {
        let again = catalog.read().acquire().await?;
        assert_eq!(again.grant_id(), view.grant_id());
        give_back(again).await;
        let error = kind(catalog.write().acquire().await);
        assert_eq!(error, ErrorKind::WouldDeadlock);
        Ok::<_, Error>(())
    });
    inside.await.unwrap().unwrap();
    let again = guard.reenter().unwrap();
    assert_eq!(kind(again.fencing_token()), ErrorKind::Config);
    // The remaining guard keeps the lock for reading.
    give_back(guard).await;
    let writer = store.client().mutex("c").try_acquire().await;
    assert_eq!(kind(writer), ErrorKind::Busy);
    give_back(again).await;
    assert_eq!(kind(view.fencing_token()), ErrorKind::Config);
    assert_nothing_left(&store, &locks, "c").await;
}

async fn a_downgraded_hold_that_is_given_back_leaves_nothing(store: Store) {
    let locks = store.client();
    for dropped in [true, false] {
        for _ in 0..5 {
            let mut guard = locks.mutex("a").acquire().await.unwrap();
            guard.downgrade().await.unwrap();
            match dropped {
                true => drop(guard),
                false => give_back(guard).await,
            }
            assert_nothing_left(&store, &locks, "a").await;
        }
    }
}

async fn a_downgrade_dropped_at_any_poll_is_whole_or_has_not_begun(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut drops = 0;
    for round in 0..10 {
        let guard = tokio::sync::Mutex::new(None);
        drops += drop_at_every_poll(
            async || {
                let new = locks.rwlock("a").write().wait(SOON).acquire().await;
                *guard.lock().await = Some(new.unwrap());
                async { guard.lock().await.as_mut().unwrap().downgrade().await }
            },
            async || {
                let guard = guard.lock().await.take().unwrap();
                assert!(guard.is_valid());
                assert_eq!(kind(guard.fencing_token()), ErrorKind::Config);
                // In even rounds the keeper repeats the request. In odd rounds the ticket is released before that.
                if round % 2 == 0 {
                    give_back(at_once(begin(other.rwlock("a").read())).await).await;
                    let writer = other.mutex("a").try_acquire().await;
                    assert_eq!(kind(writer), ErrorKind::Busy);
                }
                drop(guard);
                assert_nothing_left(&store, &locks, "a").await;
            },
        )
        .await;
    }
    println!("{drops} drops of a downgrade that was being answered");
    // The memory store answers within the first poll.
    assert!(drops > 0 || store.timings().answers == Answers::TheCall);

    let mut guard = locks.mutex("a").acquire().await.unwrap();
    drop(guard.downgrade());
    assert!(guard.fencing_token().is_ok());
    give_back(guard).await;
}

async fn a_lost_lock_is_not_downgraded(store: Store) {
    let (locks, counts) = store.counted(DEFAULT);
    let lock = locks.mutex("a").ttl(Duration::from_millis(600));
    let mut guard = lock.acquire().await.unwrap();
    counts.refuse_renewals(true);
    assert_eq!(guard.lost().await, LostReason::Expired);

    let lost = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(kind(guard.downgrade().await), lost);

    assert!(guard.fencing_token().is_ok(), "nothing has changed");
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}

async fn a_semaphore_is_not_downgraded_and_a_reader_is_one_already(store: Store) {
    let (locks, counts) = store.counted(DEFAULT);
    let mut permits = locks.semaphore("s", 3).permits(3).acquire().await.unwrap();
    assert_eq!(kind(permits.downgrade().await), ErrorKind::Config);
    assert!(permits.is_valid());
    give_back(permits).await;

    let mut reader = locks.rwlock("c").read().acquire().await.unwrap();
    reader.downgrade().await.unwrap();
    assert_eq!(counts.renewals(), 0);
    give_back(reader).await;

    let mut writer = locks.rwlock("c").write().acquire().await.unwrap();
    for _ in 0..3 {
        writer.downgrade().await.unwrap();
    }
    assert_eq!(counts.renewals(), 1);
    give_back(writer).await;
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

    // The reader is in line, or it was granted first and has left.
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

/// The turn of the inner write becomes a reader's turn.
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

async fn min_hold_keeps_only_the_read_side_after_a_downgrade(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let min_hold = Duration::from_secs(2);
    let write = locks.rwlock("c").write().min_hold(min_hold);
    let mut guard = write.acquire().await.unwrap();
    let began = Instant::now();
    guard.downgrade().await.unwrap();
    drop(guard);

    give_back(other.rwlock("c").read().try_acquire().await.unwrap()).await;
    let writer = other.rwlock("c").write().wait(SOON).acquire().await;
    assert!(began.elapsed() >= min_hold - Duration::from_millis(500));
    give_back(writer.unwrap()).await;
    assert_nothing_left(&store, &locks, "c").await;
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

async fn a_holder_killed_after_its_downgrade_is_followed_when_its_lease_is_over(store: Store) {
    let ttl = Duration::from_secs(2);
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

fn kit() -> (Kit, Locks, Locks) {
    let kit = Kit::new();
    let (locks, other) = (kit.client(), kit.another_process().client());
    (kit, locks.unwrap(), other.unwrap())
}

/// A downgrade with an unknown outcome must not change what others may rely on.
async fn a_downgrade_that_is_not_acknowledged_is_a_read_hold_and_is_asked_for_again(_: Store) {
    type Befall = fn(&Kit);
    let faults: [(Befall, ErrorKind); 6] = [
        (|kit| kit.lose_next_reply(Verb::Renew), ErrorKind::Unknown),
        (|kit| kit.lose_next_request(Verb::Renew), ErrorKind::Unknown),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Retry),
            ErrorKind::Unavailable,
        ),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Refused),
            ErrorKind::Unavailable,
        ),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Unknown),
            ErrorKind::Unknown,
        ),
        // `Config` would mean that nothing has changed.
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Config),
            ErrorKind::Unavailable,
        ),
    ];
    for (befall, expected) in faults {
        for released in [false, true] {
            let (kit, locks, other) = kit();
            let catalog = locks.rwlock("c");
            let mut guard = catalog.write().acquire().await.unwrap();
            let inner = inside(&guard, catalog.read()).await;
            let reader = begin(other.rwlock("c").read());
            tickets(&locks, "c", 2).await;
            befall(&kit);

            let outcome = match released {
                true => guard.release().await.map(drop),
                false => {
                    let outcome = guard.downgrade().await;
                    assert_eq!(kind(guard.fencing_token()), ErrorKind::Config);
                    drop(guard);
                    outcome
                }
            };
            assert_eq!(kind(outcome), expected);

            assert!(inner.is_valid());
            give_back(at_once(reader).await).await;
            assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
            give_back(inner).await;
            tickets(&locks, "c", 0).await;
        }
    }
}

async fn a_lease_without_renewal_is_asked_for_again_too(_: Store) {
    let (kit, locks, other) = kit();
    let lock = locks.rwlock("c").write().renew(false);
    let mut guard = lock.acquire().await.unwrap();
    let reader = begin(other.rwlock("c").read());
    tickets(&locks, "c", 2).await;
    kit.lose_next_request(Verb::Renew);

    assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);

    give_back(at_once(reader).await).await;
    give_back(guard).await;
}

/// A write hold with a read hold inside. The write is being released, and its request to let readers in has arrived at
/// the store.
async fn releasing(
    kit: &Kit,
    catalog: &RwLock,
    min_hold: Duration,
) -> (JoinHandle<Result<Release, Error>>, Guard, Hold) {
    let write = catalog.write().min_hold(min_hold);
    let guard = write.acquire().await.unwrap();
    let inner = inside(&guard, catalog.read()).await;
    let mut asked = kit.hold_next(Verb::Renew);
    let releasing = tokio::spawn(guard.release());
    asked.arrived().await;
    (releasing, inner, asked)
}

/// The lock was held until its end, so the release is no loss, whatever happens to the renewal that is no longer
/// needed.
async fn a_write_released_while_its_last_read_ends_was_not_lost(_: Store) {
    for dropped in [true, false] {
        let (kit, locks, _) = kit();
        let (releasing, inner, asked) = releasing(&kit, &locks.rwlock("c"), Duration::ZERO).await;
        match dropped {
            true => drop(inner),
            false => give_back(inner).await,
        }
        asked.let_go();

        assert_eq!(releasing.await.unwrap().unwrap(), Release::Released);
        tickets(&locks, "c", 0).await;
    }
}

/// `min_hold` keeps the ticket, and the keeper repeats the downgrade.
async fn a_write_dropped_while_its_last_read_ends_is_kept_for_readers(_: Store) {
    let (kit, locks, other) = kit();
    let min_hold = Duration::from_secs(3600);
    let (releasing, inner, asked) = releasing(&kit, &locks.rwlock("c"), min_hold).await;
    let reader = begin(other.rwlock("c").read());
    tickets(&locks, "c", 2).await;
    drop(inner);
    releasing.abort();
    releasing.await.unwrap_err();

    give_back(at_once(reader).await).await;
    assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
    asked.let_go();
}

/// The store may already have let in readers of other clients.
async fn a_ticket_on_its_way_to_the_readers_is_passed_on_to_nobody(_: Store) {
    let kit = Kit::new();
    let fair = Locks::builder().fair(Fair::Local(Duration::from_secs(60)));
    let locks = kit.client_with(fair).unwrap();
    let other = kit.another_process().client().unwrap();
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let ticket = guard.grant_id().as_u64() >> 10;
    let writer = begin(catalog.write());
    tickets(&locks, "c", 2).await;
    let mut asked = kit.hold_next(Verb::Renew);
    {
        let mut downgrade = std::pin::pin!(guard.downgrade());
        tokio::select! {
            _ = &mut downgrade => panic!("not answered yet"),
            () = asked.arrived() => {}
        }
    }
    // It goes to the store without waiting for the answer.
    eventually("the writer is in line at the store", SOON, async || {
        other.inspect("c").await.unwrap().len() == 2
    })
    .await;
    drop(guard);
    let writer = at_once(writer).await;

    assert_ne!(writer.grant_id().as_u64() >> 10, ticket);
    asked.let_go();
    give_back(writer).await;
    tickets(&locks, "c", 0).await;
}

/// That renewal was sent while the ticket was a writer's, so its acknowledgement does not confirm the downgrade.
async fn an_acknowledgement_of_an_earlier_renewal_lets_nobody_in(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let fair = Locks::builder().fair(Fair::Local(Duration::from_secs(3600)));
    let locks = kit.client_with(fair).unwrap();
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let mut of_the_writer = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(4));
    of_the_writer.arrived().await;
    let before = guard.remaining();
    kit.fail_next(Verb::Renew, Fault::Unknown);
    assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);
    // The keeper's next renewal is held back, and so are all that follow.
    let mut again = kit.hold_next(Verb::Renew);

    of_the_writer.let_go();
    eventually("it is worked in", SOON, async || guard.remaining() > before).await;
    let places = locks.inspect("c").await.unwrap();
    assert_eq!(places[0].permits, lockcore::backend::FULL.get());
    let reader = begin(catalog.read());
    tickets(&locks, "c", 2).await;
    assert_eq!(
        locks.inspect("c").await.unwrap().len(),
        2,
        "the reader has joined the ticket"
    );

    again.arrived().await;
    again.let_go();
    give_back(at_once(reader).await).await;
    give_back(guard).await;
}
