//! Tests of the cost of waits and hand-overs, in transactions.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::process::Holder;

use super::next_held;
use crate::faults::{patient, patient_holder};
use crate::store::{Kind, SOON, Store, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_lock_that_another_process_holds_for_long_costs_no_transactions
        a_hand_over_between_processes_costs_as_many_transactions_with_ten_waiters_as_with_one
    ]
}

/// A ttl so long that no renewal falls into the counted time.
const LONG: Duration = Duration::from_secs(60);

fn holder_without_renewals(store: &Store) -> Holder {
    patient_holder(&store.file().url(), "a", LONG)
}

/// The number of transactions that were committed to the file. This number is in the header of the
/// file's shared index. The program `od` reads it, because if this process opened and closed the
/// index, SQLite's locks on the index would be dropped.
fn commits(store: &Store) -> u64 {
    let index = store.file().folder().join("locks.db-shm");
    let said = Command::new("od")
        .args(["-An", "-tu4", "-j8", "-N4"])
        .arg(index)
        .output()
        .unwrap();
    String::from_utf8(said.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

async fn a_lock_that_another_process_holds_for_long_costs_no_transactions(store: Store) {
    let locks = patient(store.file().url()).ttl(LONG).build().unwrap();
    let mut other = holder_without_renewals(&store);
    other.acquire();
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let lock = locks.mutex("a").wait(3 * SOON);
        waiters.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    // The process has one ticket in line, and its tasks wait in their lane.
    tickets(&locks, "a", 21).await;

    let before = commits(&store);
    tokio::time::sleep(Duration::from_millis(1500)).await; // counts the transactions of this time
    assert_eq!(commits(&store), before);

    other.release();
    while let Some(done) = waiters.join_next().await {
        done.unwrap();
    }
}

async fn a_hand_over_between_processes_costs_as_many_transactions_with_ten_waiters_as_with_one(
    store: Store,
) {
    let mut spent = Vec::new();
    for waiters in [1, 10] {
        let mut first = holder_without_renewals(&store);
        first.acquire();
        let mut line: Vec<Holder> = Vec::new();
        for number in 0..waiters {
            let mut holder = holder_without_renewals(&store);
            holder.ask_to_acquire();
            line.push(holder);
            eventually("in line", SOON, async || {
                store.file().litter().len() == number + 2
            })
            .await;
        }

        let before = commits(&store);
        first.release();
        let (at, _) = next_held(&mut line);
        assert_eq!(at, 0);
        tokio::time::sleep(Duration::from_millis(200)).await; // other clients may have been woken too
        spent.push(commits(&store) - before);
        for holder in line {
            holder.kill();
        }
        store.file().query("DELETE FROM tickets");
    }

    println!("transactions for a hand-over with 1 and 10 waiters: {spent:?}");
    // Two transactions: the release, and the one in which the next in line takes its grant.
    assert_eq!(spent, [2, 2]);
}
