//! A pgbouncer in front of a server, which gives its two connections to a client for one
//! transaction each.

use std::fs;
use std::net::TcpStream;
use std::path::Path;

use super::{DATABASE, HARNESS, PostgresServer, START, as_unprivileged, give_away};
use crate::daemon::{self, Daemon};
use crate::elsewhere::elsewhere;

const PROGRAM: &str = "/usr/sbin/pgbouncer";

/// A running pooler. It ends when this value is dropped.
#[derive(Debug)]
pub struct Pooler {
    port: u16,
    _daemon: Daemon,
}

impl Pooler {
    pub(super) fn available() -> Result<(), String> {
        match Path::new(PROGRAM).exists() {
            true => Ok(()),
            false => Err("pgbouncer is not installed: apt-get install pgbouncer".to_owned()),
        }
    }

    pub fn of(server: &PostgresServer) -> Self {
        let daemon = Daemon::new("this pgbouncer", "pb-");
        let settings = daemon.folder().join("settings.ini");
        let mut port = 0;
        daemon::start(PROGRAM, |free| {
            port = free;
            let text = format!(
                "[databases]\n\
                 {DATABASE} = host=127.0.0.1 port={} user={HARNESS}\n\
                 [pgbouncer]\n\
                 listen_addr = 127.0.0.1\n\
                 listen_port = {port}\n\
                 unix_socket_dir =\n\
                 auth_type = any\n\
                 pool_mode = transaction\n\
                 default_pool_size = 2\n",
                server.port()
            );
            fs::write(&settings, text).unwrap();
            give_away(daemon.folder());
            give_away(&settings);
            let mut command = as_unprivileged(PROGRAM.as_ref());
            let serves = || TcpStream::connect(("127.0.0.1", port)).is_ok();
            daemon.serve(command.arg(&settings), START, serves)
        });
        Self {
            port,
            _daemon: daemon,
        }
    }

    /// Runs statements on one of the connections to the server, and returns the first column of
    /// every row as text.
    pub fn query(&self, statements: &str) -> Vec<String> {
        let rows = elsewhere(async {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await;
            super::rows(stream.unwrap(), statements).await
        });
        rows.unwrap()
    }

    /// The URL for a user who may do everything.
    pub fn url(&self) -> String {
        format!("postgres://{HARNESS}@127.0.0.1:{}/{DATABASE}", self.port)
    }
}
