//! Tests of the guard that is downgraded: what it may do, how it ends, and downgrades that are
//! dropped or refused.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, LostReason, Release};
use tests::stores::Answers;

use super::{at_once, begin};
use crate::giving_up::drop_at_every_poll;
use crate::store::{DEFAULT, Kind, SOON, Store, assert_nothing_left, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_downgraded_hold_reads_and_does_not_write
        a_downgraded_hold_that_is_given_back_leaves_nothing
        a_downgrade_dropped_at_any_poll_is_whole_or_has_not_begun
        a_lost_lock_is_not_downgraded
        a_semaphore_is_not_downgraded_and_a_reader_is_one_already
        min_hold_keeps_only_the_read_side_after_a_downgrade
    ]
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

#[allow(
    clippy::async_yields_async,
    reason = "the future that is made is what gets dropped half-way"
)]
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
                // The call of `downgrade` was dropped, so the keeper repeats its request. In even
                // rounds the test waits until the keeper has done this. In odd rounds the test
                // releases the ticket at once, mostly before the keeper can repeat the request.
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
    // The memory store answers within the first poll, so no future is dropped there.
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
