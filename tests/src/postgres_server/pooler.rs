//! A pgbouncer in front of a server, which gives its two connections to a client for one
//! transaction each.

use std::fs;
use std::net::TcpStream;
use std::path::Path;

use super::{DATABASE, HARNESS, PostgresServer, START};
use crate::daemon::{self, Daemon};
use crate::elsewhere::elsewhere;
use crate::unprivileged::{as_unprivileged, give_away};

/// How many connections to the server there are at most.
const SIZE: usize = 2;

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
                 default_pool_size = {SIZE}\n",
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

    /// Runs a query on each of the connections to the server, and returns the first columns of the
    /// rows as text. None of them may be in use.
    pub fn query_each(&self, query: &str) -> Vec<String> {
        elsewhere(async {
            let (mut clients, mut all) = (Vec::new(), Vec::new());
            for _ in 0..SIZE {
                let stream = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await;
                let client = super::client(stream.unwrap()).await.unwrap();
                // The connection belongs to this client until the transaction ends.
                let told = client.0.simple_query(&format!("BEGIN; {query}")).await;
                all.extend(super::first_column(&told.unwrap()));
                clients.push(client);
            }
            for (client, _) in &clients {
                client.batch_execute("ROLLBACK").await.unwrap();
            }
            all
        })
    }

    /// The URL for a user who may do everything.
    pub fn url(&self) -> String {
        format!("postgres://{HARNESS}@127.0.0.1:{}/{DATABASE}", self.port)
    }
}
