//! Tests of the programs `load` and `bench`.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use serde_json::Value;
use tests::measure::now;
use tests::process::Process;
use tests::redis_server::RedisServer;
use tests::turns::{self, Contention};

use crate::facts;

const SOON: Duration = Duration::from_secs(20);

pub(crate) fn facts() -> Vec<Trial> {
    let mut facts = facts![Ok(());
        pairs_are_counted_and_timed
        the_rows_of_contending_tasks_show_no_overlap
        a_lock_changes_hands_on_command
        a_herd_releases_as_often_as_asked
        leases_are_held_until_the_input_closes
        a_mistake_is_named_and_no_password_is
    ];
    facts.extend(facts![RedisServer::available();
        the_report_has_the_store_s_host_and_no_password
        the_driver_judges_four_processes_at_one_lock
    ]);
    facts
}

fn load(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_load"));
    command.args(arguments);
    command
}

/// Runs a mode that needs no input, and returns its report, the last line.
fn report(arguments: &[&str]) -> Value {
    let mut process = Process::start(&mut load(arguments));
    process.close_input();
    last_line(&mut process)
}

fn last_line(process: &mut Process) -> Value {
    loop {
        let line = process.hear(SOON).expect("a report");
        if line.starts_with('{') {
            let report: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(report["errors"], 0, "{report}");
            return report;
        }
    }
}

fn pairs_are_counted_and_timed() {
    for arguments in [
        &["memory:", "w1", "1000"][..],
        &["memory:", "w1", "1000", "cold"],
        &["memory:", "w2", "8", "0.2"],
        // The bench puts the ttl behind the mode.
        &["memory:", "w1", "1000", "--ttl", "10s"],
    ] {
        let report = report(arguments);

        assert_eq!(report["mode"], arguments[1]);
        assert_eq!(report["store"], "memory:");
        for figure in [
            "pairs_s",
            "p50_us",
            "p99_us",
            "lock_p50_us",
            "unlock_p50_us",
        ] {
            assert!(
                report[figure].as_f64().unwrap() > 0.0,
                "{figure} in {report}"
            );
        }
    }
}

fn the_rows_of_contending_tasks_show_no_overlap() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("rows");
    let mut process = Process::start(&mut load(&[
        "memory:",
        "w3",
        "4",
        "0.2",
        "a",
        "0",
        out.to_str().unwrap(),
    ]));

    process.expect("READY", SOON);
    let start = now();
    process.say(&start.to_string());
    let report = last_line(&mut process);

    let turns = turns::read(&mut File::open(&out).unwrap()).unwrap();
    let acquired = turns.iter().filter(|turn| turn.acquired != 0).count();
    assert_eq!(report["acquisitions"], acquired);
    assert!(turns.iter().all(|turn| turn.task < 4));
    let contention = Contention::of(&turns, start, 0.2);
    assert_eq!(contention.overlaps, 0);
    assert!(contention.fewest > 0);
}

fn a_lock_changes_hands_on_command() {
    let mut process = Process::start(&mut load(&["memory:", "w5", "a"]));

    process.expect("READY", SOON);
    process.say("a");
    let acquired: u64 = process.expect("A", SOON).parse().unwrap();
    process.say("r");
    let released = process.expect("R", SOON);

    let (before, after) = released.split_once(' ').unwrap();
    let (before, after): (u64, u64) = (before.parse().unwrap(), after.parse().unwrap());
    assert!(acquired <= before && before <= after && after <= now());
    process.close_input();
    assert_eq!(last_line(&mut process)["acquisitions"], 1);
}

fn a_herd_releases_as_often_as_asked() {
    // First with fewer releases than waiters, and then with more.
    for releases in ["3", "20"] {
        let arguments = ["memory:", "w6", "8", "0", releases, "a"];
        let mut process = Process::start(&mut load(&arguments));

        process.expect("READY", SOON);
        process.say("go");
        process.expect("DONE", SOON);

        let report = last_line(&mut process);
        assert_eq!(report["releases"].to_string(), releases);
    }
}

fn leases_are_held_until_the_input_closes() {
    let mut process = Process::start(&mut load(&["memory:", "w7", "200"]));

    let ready = process.expect("READY", SOON);
    assert!(ready.starts_with("200 "), "{ready}");
    process.close_input();

    let report = last_line(&mut process);
    assert_eq!(
        (&report["taken"], &report["held"]),
        (&200.into(), &200.into())
    );
}

fn a_mistake_is_named_and_no_password_is() {
    for (arguments, named) in [
        (&["memory:", "w1", "many"][..], "many"),
        (&["memory:", "w1", "1", "hot"], "cold"),
        (&["memory:", "w1", "1", "--ttl", "1ms"], "1ms"),
        (&["redos://u:hunter2@host", "w1", "1"], "redos"),
        (
            &["memory:", "w3", "1", "1", "a", "1", "/no/such/folder"],
            "/no/such/folder",
        ),
    ] {
        let output = load(arguments).output().unwrap();

        assert!(!output.status.success(), "{arguments:?}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(named), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}

fn the_report_has_the_store_s_host_and_no_password() {
    let server = RedisServer::start();
    server.command::<()>(&["ACL", "SETUSER", "u", "on", ">hunter2", "~*", "&*", "+@all"]);

    let report = report(&[&server.url_with_user("u", "hunter2"), "w1", "100"]);

    assert_eq!(report["store"], "redis://127.0.0.1");
}

fn the_driver_judges_four_processes_at_one_lock() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["redis", "--only", "w4,w5", "--policy", "strict"])
        .args(["--runs", "1", "--secs", "0.3"])
        .output()
        .unwrap();

    // Overlaps and errors make the driver fail. The speed of a debug build on a busy machine does
    // not.
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{table}");
    for figure in [
        "true hand-overs",
        "scripts per hand-over",
        "release → waiter p50",
    ] {
        assert!(table.contains(figure), "no {figure} in\n{table}");
    }
}
