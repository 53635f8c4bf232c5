//! Tests with many processes that use a lock while nodes go down and come up again.

use std::process::Command;

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::eventually;
use tests::process::Process;
use tests::redis_quorum::Quorum;
use tests::witness::FileWitness;

use crate::store::{Kind, SOON, STALL, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        processes_overlap_nowhere_while_nodes_are_killed
    ]
}

/// One or two nodes are killed at a time.
async fn processes_overlap_nowhere_while_nodes_are_killed(store: Store) {
    let set = Quorum::start(5);
    let folder = tempfile::tempdir().unwrap();
    let start = |_| {
        Process::start(
            Command::new(env!("CARGO_BIN_EXE_crowd"))
                .args(["a", "2", "600"])
                .arg(folder.path())
                .env("LOCK_URL", set.url())
                .env("LOCK_NAMESPACE", &store.namespace)
                .env("LOCK_TTL", "7s") // longer than a process of the crowd may stand still inside
                .env("LOCK_WAIT", "30s"),
        )
    };
    let crowd: Vec<Process> = (0..4).map(start).collect();
    let witness = FileWitness::in_folder(folder.path());
    let rounds = if tests::fact::long() { 60 } else { 8 };
    let moves = async |by: usize| {
        let visits = witness.visits();
        eventually("the crowd moves", 4 * SOON, async || {
            witness.visits() > visits + by
        })
        .await;
    };
    for _ in 0..rounds {
        moves(20 + fastrand::usize(..20)).await; // kills at a random moment
        let first = fastrand::usize(..5);
        let down = [first, (first + fastrand::usize(..3)) % 5];
        for at in down {
            set.nodes[at].kill();
        }
        moves(20).await;
        for at in down {
            if !set.nodes[at].is_running() {
                set.nodes[at].restart();
            }
        }
    }
    crowd.into_iter().for_each(Process::kill);

    witness.assert_no_overlap();
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    println!("{} visits, {rounds} rounds", tokens.len());
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens fell");
    let locks = Locks::builder().url(set.url()).namespace(&store.namespace);
    let locks = locks.op_timeout(STALL).build().unwrap();
    let next = locks.mutex("a").wait(2 * SOON).acquire().await;
    give_back(next.unwrap()).await;
}
