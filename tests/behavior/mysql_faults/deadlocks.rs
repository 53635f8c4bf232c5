//! Processes that use the same names, and the deadlocks that the server counts.

use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::mysql_server::{MysqlServer, USER};
use tests::process::Process;
use tests::watch::SECRET;

use super::with_tables;
use crate::store::{DEFAULT, Kind, LEASE, STALL, Store};

/// How often the fact is checked with `--long`, and for how many seconds each time: ten minutes.
const TIMES: usize = 7;
const SECONDS: u64 = 90;

const PROCESSES: usize = 16;
/// As many names as each process has tasks.
const NAMES: [&str; 4] = ["w2k0", "w2k1", "w2k2", "w2k3"];

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let times = if tests::fact::long() { TIMES } else { 0 };
    let fact = |_| crate::store_facts![store, DEFAULT; processes_that_share_names_meet_no_deadlock];
    (0..times).flat_map(fact).collect()
}

/// The keeper of another client renews and releases all names, in one call if it can.
async fn processes_that_share_names_meet_no_deadlock(_: Store) {
    let server = MysqlServer::start();
    let locks = with_tables(&server).await;
    server.query("SET GLOBAL innodb_monitor_enable = 'lock_deadlocks'");
    let mut processes: Vec<Process> = (0..PROCESSES)
        .map(|_| {
            let (tasks, seconds) = (NAMES.len().to_string(), SECONDS.to_string());
            Process::start(
                Command::new(env!("CARGO_BIN_EXE_load"))
                    .arg(server.url_with_user(USER, SECRET))
                    .args(["--ttl", "3s", "w2", &tasks, &seconds])
                    .env("LOCK_NAMESPACE", "test")
                    .env("LOCK_FAIR", "strict")
                    .env("LOCK_OP_TIMEOUT", "30s"),
            )
        })
        .collect();
    let end = Instant::now() + Duration::from_secs(SECONDS);
    while Instant::now() < end {
        let mut guards = Vec::new();
        for name in NAMES {
            let lock = locks.mutex(name).ttl(LEASE).wait(LEASE);
            guards.push(lock.acquire().await.unwrap());
        }
        for guard in &guards {
            guard.extend(LEASE).await.unwrap();
        }
        drop(guards);
    }

    let mut pairs = 0;
    for process in &mut processes {
        let report = process.expect("{", STALL);
        let report: serde_json::Value = serde_json::from_str(&format!("{{{report}")).unwrap();
        assert_eq!(report["errors"], 0, "{report}");
        pairs += report["pairs"].as_u64().unwrap();
    }
    println!(
        "{pairs} pairs of {PROCESSES} processes at {} names",
        NAMES.len()
    );
    assert!(pairs > 0);
    let deadlocks = "SELECT COUNT FROM information_schema.INNODB_METRICS \
        WHERE NAME = 'lock_deadlocks' AND ENABLED";
    assert_eq!(server.query(deadlocks), ["0"]);
}
