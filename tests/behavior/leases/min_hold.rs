//! Tests of locks that `min_hold` keeps after their use.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, LostReason, Release};
use tests::stalls::awake_since;

use crate::store::{
    A_FEW_MILLIS, Kind, LEASE, SOON, STALL, Store, assert_nothing_left, begin, give_back, kind,
    tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_lock_stays_taken_as_long_as_asked_however_its_user_ends
        a_lock_kept_by_min_hold_does_not_hold_up_a_shutdown
        a_min_hold_that_no_lease_can_keep_is_refused
        a_lock_kept_by_min_hold_is_free_on_time_though_its_client_ends
        a_waiter_gets_a_kept_lock_on_time_though_its_client_ends
        a_lock_kept_for_longer_than_its_ttl_outlives_its_client
    ]
}

/// `min_hold` is longer than several leases. The next holder is granted when it is over, and not
/// before.
async fn a_lock_stays_taken_as_long_as_asked_however_its_user_ends(store: Store) {
    let (ttl, least) = (Duration::from_secs(3), Duration::from_secs(7));
    let locks = store.client();
    let lock = |name: &str| locks.mutex(name).ttl(ttl).min_hold(least);
    let next = store.client();
    locks.ready(SOON).await.unwrap();
    next.ready(SOON).await.unwrap();
    let began = Instant::now();
    let kept = lock("released").acquire().await.unwrap();
    assert_eq!(kept.release().await.unwrap(), Release::Released);
    drop(lock("dropped").acquire().await.unwrap());
    let failed: Result<(), Error> = lock("failed")
        .run(async |_| locks.mutex("").run(async |_| Ok(())).await)
        .await;
    assert_eq!(kind(failed), ErrorKind::Config);
    let panics = lock("panicked");
    let task = tokio::spawn(async move {
        let _: Result<(), Error> = panics.run(async |_| panic!("on purpose")).await;
    });
    assert!(task.await.unwrap_err().is_panic());
    let done = began.elapsed();
    assert!(done < least / 2, "{done:?}");

    let names = ["released", "dropped", "failed", "panicked"];
    for name in names {
        let busy = next.mutex(name).try_acquire().await;
        assert_eq!(kind(busy), ErrorKind::Busy, "{name}");
    }
    for name in names {
        let guard = next.mutex(name).wait(STALL).acquire().await.unwrap();
        let taken = began.elapsed();
        assert!(taken >= least, "{name}: {taken:?}");
        give_back(guard).await;
    }
    assert_nothing_left(&store, &locks, "released").await;
}

async fn a_lock_kept_by_min_hold_does_not_hold_up_a_shutdown(store: Store) {
    let ttl = Duration::from_secs(6);
    let locks = store.client();
    let lock = locks.mutex("a").ttl(ttl).min_hold(LEASE);
    give_back(lock.acquire().await.unwrap()).await;
    let again = lock.clone();
    let began = Instant::now();

    locks.shutdown(6 * SOON).await.unwrap();

    let awake = awake_since(began);
    assert!(awake < SOON, "{awake:?}");
    let late = again.acquire().await;
    assert_eq!(kind(late), ErrorKind::Lost(LostReason::Shutdown));
    let busy = store.client().mutex("a").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy, "it was given back too early");
}

async fn a_min_hold_that_no_lease_can_keep_is_refused(store: Store) {
    let lock = store.client().mutex("a").min_hold(Duration::from_secs(3));
    let ttl = Duration::from_secs(2);

    for lock in [lock.clone().max_hold(ttl), lock.ttl(ttl).renew(false)] {
        let error = lock.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("min_hold of 3s"), "{error}");
    }
    assert_nothing_left(&store, &store.client(), "a").await;
}

/// The lock becomes free when `min_hold` is over: not earlier, and not only at the end of the
/// lease.
async fn a_lock_kept_by_min_hold_is_free_on_time_though_its_client_ends(store: Store) {
    let (ttl, least) = (STALL, Duration::from_millis(800));
    let elsewhere = store.client();
    for shuts_down in [true, false] {
        let locks = store.client();
        let began = Instant::now();
        let kept = locks.mutex("a").ttl(ttl).min_hold(least).acquire().await;
        give_back(kept.unwrap()).await;
        if shuts_down {
            locks.shutdown(SOON).await.unwrap();
        }
        drop(locks);

        let next = elsewhere.mutex("a").wait(STALL).acquire().await.unwrap();

        let taken = began.elapsed();
        assert!(taken >= least - A_FEW_MILLIS, "{taken:?}");
        assert!(awake_since(began) < least + SOON, "{taken:?}");
        give_back(next).await;
    }
}

/// When the waiter joined the line, the lease of the holder ended later.
async fn a_waiter_gets_a_kept_lock_on_time_though_its_client_ends(store: Store) {
    let (ttl, least) = (LEASE, Duration::from_secs(2));
    let elsewhere = store.client();
    for shuts_down in [true, false] {
        let locks = store.client();
        let began = Instant::now();
        let kept = locks.mutex("a").ttl(ttl).min_hold(least).acquire().await;
        let next = begin(elsewhere.mutex("a").ttl(ttl).wait(STALL));
        tickets(&elsewhere, "a", 2).await;
        give_back(kept.unwrap()).await;
        if shuts_down {
            locks.shutdown(SOON).await.unwrap();
        }
        drop(locks);

        let next = next.await.unwrap().unwrap();

        let taken = began.elapsed();
        assert!(taken >= least - A_FEW_MILLIS, "{taken:?}");
        assert!(awake_since(began) < least + SOON, "{taken:?}");
        give_back(next).await;
    }
}

async fn a_lock_kept_for_longer_than_its_ttl_outlives_its_client(store: Store) {
    if store.capability().sessions {
        // A session that has ended keeps nothing: see `Lock::min_hold`.
        return;
    }
    let (ttl, least) = (Duration::from_secs(3), Duration::from_secs(5));
    let elsewhere = store.client();
    let locks = store.client();
    let began = Instant::now();
    let kept = locks.mutex("a").ttl(ttl).min_hold(least).acquire().await;
    give_back(kept.unwrap()).await;
    drop(locks);

    let next = elsewhere.mutex("a").wait(STALL).acquire().await.unwrap();

    let taken = began.elapsed();
    assert!(taken >= least - A_FEW_MILLIS, "{taken:?}");
    assert!(awake_since(began) < least + SOON, "{taken:?}");
    give_back(next).await;
}
