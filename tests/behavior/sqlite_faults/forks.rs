//! Processes that fork.

use std::process::Command;

use libtest_mimic::Trial;
use tests::process::Process;

use super::client;
use crate::store::{Kind, SOON, Store, assert_nothing_left, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_child_is_refused_the_file_that_its_parent_had_open
        a_child_locks_a_file_that_its_parent_had_not_opened
    ]
}

fn forked(store: &Store, idle: bool) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forked"));
    command
        .arg(store.file().url())
        .args(idle.then_some("--idle"));
    Process::start(&mut command)
}

/// SQLite cannot open it in both.
async fn a_child_is_refused_the_file_that_its_parent_had_open(store: Store) {
    let mut forked = forked(&store, false);

    let why = forked.expect("CHILD FAILED", SOON);

    assert!(why.starts_with("Config "), "{why}");
    assert!(why.contains("had it open when it forked"), "{why}");
    assert_eq!(forked.expect("PARENT VALID", SOON), "true");
    forked.finish(SOON);
    assert_nothing_left(&store, &client(&store), "parent").await;
}

async fn a_child_locks_a_file_that_its_parent_had_not_opened(store: Store) {
    let locks = client(&store);
    let mut forked = forked(&store, true);
    forked.expect("CHILD HELD", SOON);

    let outcome = locks.mutex("child").try_acquire().await;
    assert_eq!(kind(outcome), lockcore::ErrorKind::Busy);
    forked.close_input();

    assert_eq!(forked.expect("CHILD RELEASED", SOON), "Released");
    give_back(locks.mutex("child").acquire().await.unwrap()).await;
}
