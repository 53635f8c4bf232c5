//! Tests with a process that forks before it has used the file. A process that forks later is
//! tested in `forks`, for every store.

use std::process::Command;

use libtest_mimic::Trial;
use tests::process::Process;

use super::client;
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_child_locks_a_file_that_its_parent_had_not_opened
    ]
}

async fn a_child_locks_a_file_that_its_parent_had_not_opened(store: Store) {
    let locks = client(&store);
    let mut command = Command::new(env!("CARGO_BIN_EXE_forked"));
    command.arg(store.file().url()).arg("--idle");
    let mut forked = Process::start(&mut command);
    forked.expect("CHILD HELD", SOON);

    let outcome = locks.mutex("child").try_acquire().await;
    assert_eq!(kind(outcome), lockcore::ErrorKind::Busy);
    forked.close_input();

    assert_eq!(forked.expect("CHILD RELEASED", SOON), "Released");
    give_back(locks.mutex("child").acquire().await.unwrap()).await;
}
