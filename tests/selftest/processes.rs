//! Tests of the helper processes and of the witness that watches them.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use tests::process::{Holder, HolderOptions, Process};
use tests::redis_server::RedisServer;
use tests::witness::FileWitness;

use crate::facts;

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn facts() -> Vec<Trial> {
    let mut facts = facts![Ok(());
        a_process_killed_inside_has_left_the_witness
    ];
    facts.extend(facts![RedisServer::available();
        a_holder_acquires_and_releases
        a_holder_that_ends_leaves_no_key_of_the_lock
    ]);
    facts
}

/// If this variable is set, this program is a process that enters the resource and stays there.
const INSIDE: &str = "LOCKCORE_HARNESS_INSIDE";

fn a_process_killed_inside_has_left_the_witness() {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let _visit = FileWitness::in_folder(folder).write();
        // The text begins a new line, because libtest-mimic captures no output, and has already
        // begun a line.
        println!("\nINSIDE");
        loop {
            std::thread::park();
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let mut inside = Process::start(
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "processes::a_process_killed_inside_has_left_the_witness",
            ])
            .env(INSIDE, folder.path()),
    );
    while inside.hear(SOON).expect("enters") != "INSIDE" {}
    let witness = FileWitness::in_folder(folder.path());
    drop(witness.write());
    assert_eq!(witness.overlaps().len(), 1);

    inside.kill();
    drop(witness.write());

    assert_eq!(witness.overlaps().len(), 1);
    assert_eq!(witness.visits(), 3);
}

fn holder(server: &RedisServer) -> Holder {
    Holder::start(
        env!("CARGO_BIN_EXE_holder"),
        &HolderOptions::mutex(&server.url(), "a"),
    )
}

fn a_holder_acquires_and_releases() {
    let server = RedisServer::start();
    let (mut one, mut other) = (holder(&server), holder(&server));

    let first = one.acquire();
    assert!(one.is_valid());
    assert_eq!(other.try_acquire(), Err("Busy".into()));
    other.ask_to_acquire();
    assert_eq!(one.release(), "Released");

    assert!(other.held(SOON) > first);
}

fn a_holder_that_ends_leaves_no_key_of_the_lock() {
    let server = RedisServer::start();
    let (mut one, mut other) = (holder(&server), holder(&server));
    one.acquire();

    one.finish(SOON);

    assert!(other.try_acquire().is_ok());
}
