//! Tests of barriers between processes. Some of the processes are killed.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use tests::process::Process;

use super::{passed, waits};
use crate::store::{DEFAULT, Kind, LEASE, SOON, Store, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        fifty_rounds_of_four_processes_do_not_mix
        a_killed_party_frees_its_place_and_is_not_counted
        a_killed_party_is_not_counted_while_its_place_is_left
        a_party_that_is_killed_inside_is_missing_for_the_others
    ]
}

/// How long the store keeps the place of a killed party. A store with sessions allows no shorter
/// ttl.
const TTL: Duration = Duration::from_secs(6);

fn party(store: &Store, parties: u32, folder: &str) -> Process {
    party_with(store, parties, folder, TTL)
}

fn party_with(store: &Store, parties: u32, folder: &str, ttl: Duration) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_party"));
    command
        .args(["a", &parties.to_string(), folder])
        .env("LOCK_URL", store.url())
        .env("LOCK_NAMESPACE", &store.namespace)
        .env("LOCK_OP_TIMEOUT", "30s")
        .env("LOCK_TTL", format!("{}s", ttl.as_secs()))
        .env("LOCK_WAIT", "100s");
    Process::start(&mut command)
}

async fn fifty_rounds_of_four_processes_do_not_mix(store: Store) {
    let folder = tempfile::tempdir().unwrap();
    let mut parties: Vec<_> = (0..4)
        .map(|_| party_with(&store, 4, folder.path().to_str().unwrap(), LEASE))
        .collect();
    for party in &mut parties {
        party.say("rounds 50");
    }
    for party in &mut parties {
        party.expect("DONE", Duration::from_secs(100));
    }
    tickets(&store.client(), "a", 0).await;
}

async fn a_killed_party_frees_its_place_and_is_not_counted(store: Store) {
    let locks = store.client();
    let barrier = locks.barrier("a", 3).wait(4 * SOON);
    let (mut stays, mut dies) = (party(&store, 3, "-"), party(&store, 3, "-"));
    stays.say("wait");
    dies.say("wait");
    tickets(&locks, "a", 2).await;

    dies.kill();
    tests::eventually::eventually("its lease ends", 4 * TTL, async || {
        locks.inspect("a").await.unwrap().len() == 1
    })
    .await;
    let second = waits(&barrier);
    tickets(&locks, "a", 2).await;
    assert_eq!(stays.hear(Duration::from_millis(300)), None);
    assert!(!second.is_finished(), "two of three go on");

    let third = waits(&barrier);

    assert!(passed(third).await);
    assert!(!passed(second).await);
    assert_eq!(stays.expect("PASSED", SOON), "false");
    tickets(&locks, "a", 0).await;
}

async fn a_killed_party_is_not_counted_while_its_place_is_left(store: Store) {
    let locks = store.client();
    let barrier = locks.barrier("a", 3).wait(4 * SOON);
    let mut dies = party(&store, 3, "-");
    dies.say("wait");
    tickets(&locks, "a", 1).await;

    dies.kill();
    let (first, second) = (waits(&barrier), waits(&barrier));

    // The place of the killed party ends with its lease. Then the others wait for a third one.
    tickets(&locks, "a", 3).await;
    tests::eventually::eventually("its lease ends", 4 * TTL, async || {
        assert!(
            !first.is_finished() && !second.is_finished(),
            "two of three go on"
        );
        let places = locks.inspect("a").await.unwrap();
        places.len() == 2 && places.iter().all(|place| place.permits == 3)
    })
    .await;
    let third = waits(&barrier);
    let mut leaders = 0;
    for party in [first, second, third] {
        leaders += u32::from(passed(party).await);
    }
    assert_eq!(leaders, 1);
    tickets(&locks, "a", 0).await;
}

async fn a_party_that_is_killed_inside_is_missing_for_the_others(store: Store) {
    let locks = store.client();
    let mut parties: Vec<_> = (0..3).map(|_| party(&store, 3, "-")).collect();
    for party in &mut parties {
        party.say("enter");
    }
    for party in &mut parties {
        party.expect("ENTERED", SOON);
    }
    let dies = parties.pop().unwrap();
    parties[0].say("missing");
    parties[1].say("leave");

    dies.kill();

    assert_eq!(parties[0].expect("MISSING", 6 * TTL), "1");
    parties[0].say("leave");
    for party in &mut parties {
        assert_eq!(party.expect("LEFT", 6 * TTL), "NotAll");
    }
    tickets(&locks, "a", 0).await;
}
