//! Tests of how long a waiter waits. Facts about exclusion and order are in
//! `lockcore::testing::conformance`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::stalls::awake_since;
use tests::witness::Witness;

use crate::store::{Kind, SLACK, SOON, Store, give_back, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_wait_ends_with_timeout_when_it_is_over
        a_lock_that_was_dropped_is_free_for_try
        a_lock_that_was_dropped_outside_of_a_runtime_is_free_for_try
        what_shares_a_name_is_free_for_try_when_it_was_dropped
        a_caller_that_tries_and_drops_again_and_again_lets_others_in
    ]
}

/// A ticket is handed over 64 times in this process. So the drops of some guards are followed by a
/// request to the store.
const MORE_THAN_HAND_OVERS: usize = 150;

/// The keeper releases the ticket, and may not have begun when the next request comes.
async fn a_lock_that_was_dropped_is_free_for_try(store: Store) {
    let lock = store.client().mutex("a");
    let mut tokens = Vec::new();
    for _ in 0..MORE_THAN_HAND_OVERS {
        let guard = lock.try_acquire().await.unwrap();
        assert!(guard.is_valid());
        tokens.push(guard.grant_id().as_u64());
        drop(guard);
    }

    assert!(tokens.is_sorted_by(|before, after| before < after));
}

async fn a_lock_that_was_dropped_outside_of_a_runtime_is_free_for_try(store: Store) {
    let lock = store.client().mutex("a");
    for _ in 0..20 {
        let guard = lock.try_acquire().await.unwrap();
        std::thread::spawn(move || drop(guard)).join().unwrap();
    }
}

async fn what_shares_a_name_is_free_for_try_when_it_was_dropped(store: Store) {
    let locks = store.client();
    let (both, readers) = (locks.rwlock("a"), locks.rwlock("a"));
    let slots = locks.semaphore("slots", 3);
    for _ in 0..10 {
        drop(both.write().try_acquire().await.unwrap());
        let two = [(); 2].map(|()| readers.read());
        let first = two[0].try_acquire().await.unwrap();
        drop((first, two[1].try_acquire().await.unwrap()));
        let [one, two] = [1, 2].map(|permits| slots.permits(permits));
        let (one, two) = (
            one.try_acquire().await.unwrap(),
            two.try_acquire().await.unwrap(),
        );
        drop((one, two));
        drop(slots.permits(3).try_acquire().await.unwrap());
    }
}

/// A ticket that was dropped is taken back in memory, but not past the bound.
async fn a_caller_that_tries_and_drops_again_and_again_lets_others_in(store: Store) {
    let over = Arc::new(AtomicBool::new(false));
    let (again, witness) = (store.client().mutex("a"), Arc::new(Witness::exclusive()));
    let again_and_again = tokio::spawn({
        let (over, witness) = (Arc::clone(&over), Arc::clone(&witness));
        async move {
            while !over.load(Ordering::SeqCst) {
                if let Ok(guard) = again.try_acquire().await {
                    let visit = witness.enter(1);
                    tokio::task::yield_now().await;
                    drop(visit);
                    drop(guard);
                }
                tokio::task::yield_now().await;
            }
        }
    });
    let other = store.client().mutex("a").wait(SOON);
    for _ in 0..5 {
        let guard = other.acquire().await.unwrap();
        let visit = witness.enter(1);
        tokio::task::yield_now().await;
        drop(visit);
        give_back(guard).await;
    }
    over.store(true, Ordering::SeqCst);
    again_and_again.await.unwrap();

    witness.assert_no_overlap();
}

async fn a_wait_ends_with_timeout_when_it_is_over(store: Store) {
    let _guard = store.client().mutex("a").acquire().await.unwrap();
    let locks = store.client();
    // The first use of a client also connects. This fact measures only the wait.
    locks.ready(SOON).await.unwrap();

    // Long enough for a stall, because the store must have answered by then. A client that checks
    // the time only once a second is late by 0.8 s.
    let wait = Duration::from_millis(3200);
    let mut late = Duration::ZERO;
    for _ in 0..3 {
        let started = Instant::now();
        let error = locks.mutex("a").wait(wait).acquire().await.unwrap_err();
        let waited = started.elapsed();

        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(waited >= wait, "{waited:?}");
        late += awake_since(started).saturating_sub(wait);
    }
    // On an idle machine each wait ends within 50 ms. The fact checks the sum of three waits,
    // because a single wait could be late by less than the slack.
    let on_an_idle_machine = 3 * Duration::from_millis(50);
    assert!(late < on_an_idle_machine + SLACK, "{late:?}");
    tickets(&locks, "a", 1).await;
}
