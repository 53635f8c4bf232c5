//! Tests with a burst of requests in a process that holds locks. The process must not lose any of
//! these locks.

use std::collections::BTreeMap;
use std::time::Instant;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tokio::task::JoinSet;

use crate::faults::builder;
use crate::store::{Kind, SOON, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_burst_costs_no_lease_and_everybody_has_an_answer
    ]
}

/// The client has all defaults. Some tasks are not granted within the default `wait`, so for them a
/// timeout is a correct answer.
async fn a_burst_costs_no_lease_and_everybody_has_an_answer(store: Store) {
    let at_once = if tests::fact::long() { 10_000 } else { 2_000 };
    let locks = builder(store.file().url()).build().unwrap();
    let held = locks.mutex("held").acquire().await.unwrap();
    let uploads = locks.semaphore("uploads", 5);

    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..at_once {
        let uploads = uploads.clone();
        tasks.spawn(async move {
            match uploads.permits(1).acquire().await {
                Ok(guard) => guard.release().await.map(|_| ()),
                Err(error) => Err(error),
            }
        });
    }
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(outcome) = tasks.join_next().await {
        let outcome = match outcome.unwrap() {
            Ok(()) => "served".to_owned(),
            Err(error) => format!("{:?}", error.kind()),
        };
        *outcomes.entry(outcome).or_default() += 1;
    }

    println!("{at_once} at once: {outcomes:?} in {:?}", began.elapsed());
    assert!(held.is_valid());
    outcomes.retain(|outcome, _| !["served", "Timeout"].contains(&outcome.as_str()));
    assert!(outcomes.is_empty(), "{outcomes:?}");
    eventually("only the lock is left", SOON, async || {
        store.file().litter().len() == 1
    })
    .await;
    give_back(held).await;
}
