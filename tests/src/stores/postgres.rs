//! `postgres:`. Facts share a server. There, a client has only the rights that the store's guide
//! lists.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};

use super::{
    Histories, Manner, Marks, Schemes, Server, ServerProcess, Shared, Stage, Store, Suite, Timings,
    Tls,
};
use crate::certificates::{Authority, Identity};
use crate::postgres_server::{PostgresServer, USER};
use crate::watch::SECRET;

#[derive(Debug)]
pub struct Postgres;

impl Store for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn available(&self) -> Result<(), String> {
        PostgresServer::available()
    }

    fn suite(&self) -> Suite {
        Suite::beside_another(Suite::Verbs)
    }

    fn capability(&self) -> Capability {
        let url = "postgres://locks@127.0.0.1/postgres";
        backend::open(url).unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings::of_a_server(Duration::from_millis(200))
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(PostgresServer::start())
    }

    /// As a user has it: it writes to the disk.
    fn start_for_load(&self) -> Box<dyn Server> {
        Box::new(PostgresServer::with(&[
            "fsync=on",
            "full_page_writes=on",
            "shared_buffers=128MB",
        ]))
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared<PostgresServer>>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = PostgresServer::start();
                let url = server.url_with_user(USER, SECRET);
                Arc::new(Shared { server, url })
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 400,
            long: 250,
            available: || Ok(()),
            manner: Manner {
                slack: 2_000,
                tells_first: true,
                // Once for a whole batch.
                tells_in_its_own_way: true,
                by_id: true,
                wakes_late: true,
                ..Manner::default()
            },
            start: || Box::new(PostgresServer::start()),
        })
    }

    fn tls(&self) -> Option<&dyn Tls> {
        Some(self)
    }
}

impl Server for PostgresServer {
    fn url(&self) -> String {
        self.url()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        let marks = format!(
            "SELECT 'mark ' || id FROM lockcore1.marks WHERE starts_with(name, '{namespace}:')"
        );
        let mut litter = self.litter_but_marks(namespace);
        litter.extend(self.query(&marks));
        litter
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.query(&format!(
            "SELECT 'ticket ' || name || ' ' || ticket FROM lockcore1.tickets \
             WHERE starts_with(name, '{namespace}:')"
        ))
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for PostgresServer {
    fn port(&self) -> u16 {
        self.port()
    }

    fn url_at(&self, port: u16) -> String {
        self.url_at(port)
    }

    fn kill(&self) {
        self.kill();
    }

    /// Calls are prepared, so a request has only its parameters. A number has its length in front.
    fn marks(&self) -> Marks {
        Marks {
            // All permits of the capacity of a mutex.
            enqueue: b"\0\0\0\x04\x40\0\0\0\0\0\0\x04\x40\0\0\0",
            // An array of type int4 with one element, which is 1: how many permits the ticket
            // keeps.
            downgrade: b"\0\0\0\x17\0\0\0\x01\0\0\0\x01\0\0\0\x04\0\0\0\x01",
            // The record of the counter lists its last changes. `a` means that one was applied.
            count: b" a ",
        }
    }
}

impl Tls for Postgres {
    fn schemes(&self) -> Schemes {
        Schemes {
            plain: "postgres",
            encrypted: "postgres+tls",
            not_encrypted: "the server does not use TLS",
            not_plain: "if it wants TLS, write postgres+tls://",
            says_which: true,
        }
    }

    /// For its requests, and for its flushes.
    fn connections_at_once(&self) -> u64 {
        2
    }

    fn database(&self) -> &'static str {
        "/postgres"
    }

    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server> {
        Box::new(PostgresServer::with_tls(identity, clients, versions))
    }

    fn start_without(&self) -> Box<dyn Server> {
        Box::new(PostgresServer::start())
    }

    /// `None`: the driver takes the answer for the length of a message, and waits for more.
    fn not_understood(&self) -> Option<&'static str> {
        None
    }
}

impl Stage for PostgresServer {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&self.url()).unwrap()
    }

    /// Lets time pass by changing the times in the tables.
    fn pass(&mut self, time: Duration) {
        let micros = time.as_micros();
        let earlier =
            |table| format!("UPDATE lockcore1.{table} SET expires_at = expires_at - {micros};");
        self.query(&(earlier("tickets") + &earlier("marks")));
    }

    fn lose_data(&mut self) -> bool {
        self.query("TRUNCATE lockcore1.tickets, lockcore1.marks, lockcore1.names");
        true
    }
}
