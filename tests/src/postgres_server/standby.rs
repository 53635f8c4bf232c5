//! A standby, which follows a primary.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::process::Stdio;

use super::{HARNESS, PostgresServer, program};
use crate::eventually::wait_until;
use crate::unprivileged::give_away;

/// The name of a standby for the primary's `synchronous_standby_names`.
pub const STANDBY: &str = "standby";

/// What a primary needs so that a standby can follow it.
const OF_A_PRIMARY: [&str; 3] = ["wal_level=replica", "max_wal_senders=4", "hot_standby=on"];

impl PostgresServer {
    /// A server that a standby can follow, with more settings.
    pub fn primary(extra: &[&str]) -> Self {
        Self::with(&[&OF_A_PRIMARY, extra].concat())
    }

    /// A standby that reads the log of its primary at this port of this machine. Returns when it
    /// has all of the log so far.
    pub fn standby(&self, port: u16) -> Self {
        let primary =
            format!("host=127.0.0.1 port={port} user={HARNESS} application_name={STANDBY}");
        let standby = Self::launch(&OF_A_PRIMARY, |data| {
            let mut command = program("pg_basebackup");
            command.args(["--dbname", &primary, "--pgdata", data.to_str().unwrap()]);
            command.args(["--checkpoint=fast", "--no-sync", "--write-recovery-conf"]);
            fs::DirBuilder::new().mode(0o700).create(data).unwrap();
            give_away(data);
            let copied = command.stdin(Stdio::null()).output().unwrap();
            assert!(copied.status.success(), "{copied:?}");
        });
        wait_until("the standby follows", super::START, || {
            let follows = "SELECT count(*) FROM pg_stat_replication \
                WHERE state = 'streaming' AND replay_lsn = pg_current_wal_flush_lsn()";
            self.query(follows) == ["1"]
        });
        standby
    }

    /// Makes the standby a primary. Returns when it takes writes.
    pub fn promote(&self) {
        self.query("SELECT pg_promote()");
    }

    /// Changes a setting while the server runs, as an administrator does.
    pub fn set(&self, change: &str) {
        self.query(&format!("ALTER SYSTEM {change}"));
        self.query("SELECT pg_reload_conf()");
    }

    /// From now on, a commit that waits for standbys waits for one that does not exist.
    pub fn wait_for_no_standby(&self) {
        self.set("SET synchronous_standby_names = nobody");
        wait_until("the setting is read", super::START, || {
            self.query("SHOW synchronous_standby_names") == ["nobody"]
        });
        // The process that makes it begins with the new settings, and then makes them known.
        self.query("CHECKPOINT");
    }
}
