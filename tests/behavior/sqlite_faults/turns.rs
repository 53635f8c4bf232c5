//! Tests of turns: a ticket that ends lets in the ticket of its client right behind it, before the
//! end is in the file. So the file may show the holder as a waiter, and a process may be killed
//! between the two.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Fair;
use tests::eventually::eventually;
use tests::witness::FileWitness;

use super::client;
use crate::faults::{builder, passing_on};
use crate::store::{
    Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, soon, tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_lock_passes_inside_its_client_while_the_file_is_locked
        processes_that_are_killed_or_kept_from_the_file_while_they_pass_a_lock_on_overlap_nowhere
    ]
}

async fn a_lock_passes_inside_its_client_while_the_file_is_locked(store: Store) {
    let locks = builder(store.file().url()).fair(Fair::Strict);
    let (locks, other) = (locks.build().unwrap(), client(&store));
    let holder = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    // When this is answered, the answer to the enqueue has arrived.
    locks.inspect("a").await.unwrap();
    let behind = begin(other.mutex("a").wait(LEASE));
    tickets(&other, "a", 3).await;

    let transaction = store.file().lock();
    drop(holder);
    let guard = soon(waiter).await.unwrap().unwrap();

    let shown = other.inspect("a").await.unwrap();
    let granted: Vec<_> = shown.iter().map(|place| place.granted).collect();
    assert_eq!(granted, [true, false, false]);
    assert!(guard.is_valid());
    drop(transaction);
    tickets(&other, "a", 2).await;
    assert!(!behind.is_finished(), "two hold at once");
    give_back(guard).await;
    give_back(behind.await.unwrap().unwrap()).await;
    assert_nothing_left(&store, &other, "a").await;
}

/// Longer than a visit during which the machine stands still.
const TTL: Duration = Duration::from_secs(5);

/// While the file is locked, the processes can renew nothing, and each passes the lock on until its
/// leases are over, and not longer.
async fn processes_that_are_killed_or_kept_from_the_file_while_they_pass_a_lock_on_overlap_nowhere(
    store: Store,
) {
    let folder = tempfile::tempdir().unwrap();
    let witness = FileWitness::in_folder(folder.path());
    let url = store.file().url();
    let start = || passing_on(&url, folder.path(), TTL, Duration::from_millis(10));
    let mut random = fastrand::Rng::new();
    let mut crowds: Vec<_> = (0..3).map(|_| start()).collect();
    let rounds = if tests::fact::long() { 16 } else { 6 };
    for round in 0..rounds {
        let visits = witness.visits() + 30 + random.usize(..30);
        eventually("the lock passes", 6 * SOON, async || {
            witness.visits() > visits
        })
        .await;
        if round % 2 == 0 {
            crowds.remove(0).kill();
            crowds.push(start());
        } else {
            let transaction = store.file().lock();
            let pause = random.u32(..10) * Duration::from_millis(200);
            tokio::time::sleep(TTL + pause).await;
            drop(transaction);
        }
    }
    for process in crowds {
        process.kill();
    }

    witness.assert_no_overlap();
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    println!("{} visits in {rounds} rounds", tokens.len());
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens fell");
    let lock = client(&store).mutex("a").wait(2 * SOON);
    give_back(lock.acquire().await.unwrap()).await;
}
