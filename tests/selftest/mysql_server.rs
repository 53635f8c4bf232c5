//! Tests of the MariaDB servers that the harness starts.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime};

use libtest_mimic::Trial;
use tests::eventually::wait_until;
use tests::faketime::{Clock, FakeClock};
use tests::mysql_server::{DATABASE, MysqlServer};
use tests::proxy::Proxy;

use crate::facts;

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn facts() -> Vec<Trial> {
    let mut facts = facts![MysqlServer::available();
        two_servers_share_nothing
        options_outrank_the_harness
        a_server_does_not_run_as_root
        a_statement_that_fails_says_why
        a_killed_server_comes_back_with_its_data_on_the_same_port
        a_frozen_server_answers_after_the_thaw
        a_dropped_server_is_gone_with_its_folder_even_frozen
        a_server_that_cannot_start_says_why
        a_promoted_replica_has_all_that_its_primary_has_told
        a_commit_waits_until_the_replica_has_it
    ];
    facts.extend(facts![MysqlServer::available().and(FakeClock::available());
        the_clock_jumps_ahead_and_back
    ]);
    facts
}

/// A table with one row.
fn fill(server: &MysqlServer) {
    server.query(&format!(
        "CREATE TABLE {DATABASE}.a (n INT PRIMARY KEY); INSERT INTO {DATABASE}.a VALUES (1)"
    ));
}

fn rows(server: &MysqlServer) -> Vec<String> {
    server.query(&format!("SELECT n FROM {DATABASE}.a"))
}

fn two_servers_share_nothing() {
    let (one, other) = (MysqlServer::start(), MysqlServer::start());

    fill(&one);

    assert_eq!(rows(&one), ["1"]);
    assert!(
        other
            .query(&format!("SHOW TABLES FROM {DATABASE}"))
            .is_empty()
    );
    assert_ne!(one.query("SELECT @@port"), other.query("SELECT @@port"));
}

fn options_outrank_the_harness() {
    let server = MysqlServer::with(&["--max-connections=11"]);

    assert_eq!(server.query("SELECT @@max_connections"), ["11"]);
}

fn a_server_does_not_run_as_root() {
    let server = MysqlServer::start();

    let user = fs::metadata(format!("/proc/{}", server.pid()))
        .unwrap()
        .uid();

    assert_ne!(user, 0);
}

fn a_statement_that_fails_says_why() {
    let server = MysqlServer::start();

    let error = server.try_query("SELECT 1; SELECT nothing").unwrap_err();

    assert!(error.contains("Unknown column 'nothing'"), "{error}");
}

fn a_killed_server_comes_back_with_its_data_on_the_same_port() {
    let server = MysqlServer::start();
    fill(&server);
    let (port, pid) = (server.port(), server.pid());

    server.kill();
    assert!(server.try_query("SELECT 1").is_err());
    server.restart();

    assert_eq!(rows(&server), ["1"]);
    assert_eq!(server.query("SELECT @@port"), [port.to_string()]);
    assert_ne!(server.pid(), pid);
}

fn a_frozen_server_answers_after_the_thaw() {
    let server = MysqlServer::start();

    server.freeze();
    let stat = fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
    assert!(stat.contains(") T "), "{stat}");
    server.thaw();

    assert_eq!(server.query("SELECT 1"), ["1"]);
}

fn a_dropped_server_is_gone_with_its_folder_even_frozen() {
    let server = MysqlServer::start();
    let (folder, pid) = (server.folder().to_owned(), server.pid());
    server.freeze();

    drop(server);

    assert!(!folder.exists());
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}

fn a_server_that_cannot_start_says_why() {
    let panic = std::panic::catch_unwind(|| MysqlServer::with(&["--no-such-option"]));

    let panic = panic.unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("unknown option '--no-such-option'"),
        "{message}"
    );
}

fn a_promoted_replica_has_all_that_its_primary_has_told() {
    let primary = MysqlServer::primary(&[]);
    let replica = primary.replica(primary.port());
    assert!(replica.query("SELECT @@read_only") == ["1"]);
    fill(&primary);

    primary.kill();
    replica.promote();

    assert_eq!(rows(&replica), ["1"]);
    replica.query(&format!("INSERT INTO {DATABASE}.a VALUES (2)"));
}

fn a_commit_waits_until_the_replica_has_it() {
    let primary = MysqlServer::primary(&[]);
    let proxy = Proxy::to(primary.port());
    let replica = primary.replica(proxy.port());
    fill(&primary);
    proxy.cut();

    let insert = format!("INSERT INTO {DATABASE}.a VALUES (2)");
    std::thread::scope(|scope| {
        let commits = scope.spawn(|| primary.query(&insert));
        wait_until("the commit waits", SOON, || {
            let waits = "SELECT COUNT(*) FROM information_schema.PROCESSLIST \
                WHERE STATE LIKE 'Waiting for semi-sync%'";
            primary.query(waits) == ["1"]
        });
        assert!(!commits.is_finished());
        proxy.restore();
        commits.join().unwrap();
    });
    wait_until("the replica has it", SOON, || rows(&replica) == ["1", "2"]);
}

fn the_clock_jumps_ahead_and_back() {
    let server = MysqlServer::with_clock();
    let hour = Duration::from_secs(3600);
    // In seconds, by more than half an hour of tolerance.
    let ahead = || {
        let theirs: f64 = server.query("SELECT UNIX_TIMESTAMP(SYSDATE(6))")[0]
            .parse()
            .unwrap();
        let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        ((theirs - ours.unwrap().as_secs_f64()) / 1800.0).round() as i64
    };

    assert_eq!(ahead(), 0);
    server.set_clock(Clock::Ahead(hour));
    assert_eq!(ahead(), 2);
    server.set_clock(Clock::Behind(hour));
    assert_eq!(ahead(), -2);
}
