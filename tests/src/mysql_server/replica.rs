//! A replica, which follows a primary.

use super::{HARNESS, MysqlServer, START};
use crate::eventually::wait_until;

impl MysqlServer {
    /// A server that a replica can follow, with more options. Once it has a replica, each of its
    /// commits waits until the replica has it.
    pub fn primary(extra: &[&str]) -> Self {
        let own = [
            "--log-bin=log",
            "--server-id=1",
            "--rpl-semi-sync-master-wait-point=AFTER_SYNC",
            // Without a replica, a commit waits for an hour.
            "--rpl-semi-sync-master-timeout=3600000",
        ];
        Self::with(&[&own, extra].concat())
    }

    /// A replica that reads the log of its primary at this port of this machine, from its beginning.
    /// It takes no writes of others. Returns when it has all of the log so far.
    pub fn replica(&self, port: u16) -> Self {
        let replica = Self::with(&[
            "--log-bin=log",
            "--server-id=2",
            "--read-only=ON",
            "--rpl-semi-sync-slave-enabled=ON",
        ]);
        replica.query(&format!(
            "CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='{HARNESS}', \
             MASTER_USE_GTID=slave_pos, MASTER_CONNECT_RETRY=1; START SLAVE"
        ));
        self.query("SET GLOBAL rpl_semi_sync_master_enabled = ON");
        wait_until("the replica follows", START, || {
            let number = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS \
                WHERE VARIABLE_NAME = 'Rpl_semi_sync_master_clients'";
            self.query(number) == ["1"]
                && self.query("SELECT @@gtid_binlog_pos")
                    == replica.query("SELECT @@gtid_slave_pos")
        });
        replica
    }

    /// Makes the replica a primary. Before that it applies all that it has of the log. Returns when
    /// it takes writes.
    pub fn promote(&self) {
        self.query("STOP SLAVE IO_THREAD");
        wait_until("the replica has applied the log", START, || {
            let rests = "SELECT COUNT(*) FROM information_schema.PROCESSLIST \
                WHERE STATE LIKE 'Slave has read all relay log%'";
            self.query(rests) == ["1"]
        });
        self.query("STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only = OFF");
    }
}
