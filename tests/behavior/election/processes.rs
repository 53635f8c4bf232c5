//! Tests of candidates in several processes. The leading process is killed.

use std::time::Duration;

use libtest_mimic::Trial;
use tests::candidate::{Campaign, Candidate};
use tests::eventually::eventually;
use tests::witness::FileWitness;

use crate::store::{DEFAULT, Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_leader_that_is_killed_is_followed_and_every_observer_sees_it
    ]
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_election");

/// Waits for the next candidate that begins to lead. Returns its index in `candidates` and its
/// token.
async fn next_leader(candidates: &mut [Candidate]) -> (usize, u64) {
    let mut found = None;
    eventually("somebody leads", 3 * SOON, || {
        let mut begun = candidates.iter_mut().map(Candidate::has_begun).enumerate();
        found = begun.find_map(|(at, token)| Some((at, token?)));
        std::future::ready(found.is_some())
    })
    .await;
    found.unwrap()
}

async fn a_leader_that_is_killed_is_followed_and_every_observer_sees_it(store: Store) {
    let (url, folder) = (store.url(), tempfile::tempdir().unwrap());
    let campaign = Campaign {
        url: &url,
        namespace: &store.namespace,
        name: "a",
        folder: folder.path(),
        ttl: Duration::from_secs(6),
    };
    let mut candidates: Vec<_> = (0..3).map(|_| campaign.start(PROGRAM)).collect();
    let mut last = 0;
    for left in (0..3).rev() {
        let (leader, token) = next_leader(&mut candidates).await;
        assert!(token > last, "{token} after {last}");
        last = token;
        eventually("all observers see the leader", SOON, || {
            let all = candidates.iter_mut().all(|one| one.sees() == Some(token));
            std::future::ready(all)
        })
        .await;
        candidates.swap_remove(leader).kill();
        assert_eq!(candidates.len(), left);
    }
    let witness = FileWitness::in_folder(folder.path());
    assert_eq!(witness.visits(), 3);
    witness.assert_no_overlap();
    // After the last leader there is no other. Observers report it until its lease is over.
    let locks = store.client();
    let mut leaders = locks.election("a").observe();
    while leaders.next().await.unwrap().is_some() {}
}
