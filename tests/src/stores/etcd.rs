//! `etcd:`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};
use lockcore::{Builder, Error, Locks};

use super::{Histories, Manner, Marks, Schemes, Server, ServerProcess, Stage, Store, Timings, Tls};
use crate::certificates::{Authority, Identity};
use crate::etcd_server::EtcdServer;

/// A lease lasts at most as long as the one of its client. So this is the longest ttl of a fact.
const LONG_LEASES: &str = "?session_ttl=60s";

#[derive(Debug)]
pub struct Etcd;

impl Store for Etcd {
    fn name(&self) -> &'static str {
        "etcd"
    }

    fn available(&self) -> Result<(), String> {
        EtcdServer::available()
    }

    fn capability(&self) -> Capability {
        backend::open("etcd://127.0.0.1").unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings {
            tells_when_to_recheck: false,
            // A lease of one second gets two from the server. The server looks for leases that have
            // ended twice a second.
            ..Timings::of_a_server(Duration::from_secs(2))
        }
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(EtcdServer::start())
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<ForLongLeases>> = OnceLock::new();
        SHARED
            .get_or_init(|| Arc::new(ForLongLeases(EtcdServer::start())))
            .clone()
    }

    fn tls(&self) -> Option<&dyn Tls> {
        Some(self)
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 400,
            long: 200,
            available: || Ok(()),
            manner: Manner {
                // A lease of a client lasts longer than every ttl here.
                keeps_the_first_ttl: true,
                marks_outlive_sessions: true,
                wakes_late: true,
                ..Manner::default()
            },
            start: || Box::new(Leases(EtcdServer::start())),
        })
    }
}

impl Tls for Etcd {
    fn schemes(&self) -> Schemes {
        Schemes {
            plain: "etcd",
            encrypted: "etcd+tls",
            not_encrypted: "if this port does not speak TLS, write etcd://",
            not_plain: "if this port speaks TLS, write etcd+tls://",
            says_which: false,
        }
    }

    /// The server cannot be told to accept some versions only.
    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        _versions: &[&str],
    ) -> Box<dyn Server> {
        Box::new(EtcdServer::with_tls(identity, clients))
    }

    fn start_without(&self) -> Box<dyn Server> {
        Box::new(EtcdServer::start())
    }

    /// `None`: the library for HTTP/2 does not say what it got.
    fn not_understood(&self) -> Option<&'static str> {
        None
    }
}

impl Server for EtcdServer {
    fn url(&self) -> String {
        self.url()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        // The key of a client stays as long as the client, and the last change of a capacity that was
        // removed for two minutes.
        let stays = |key: &String| {
            let [counter, client] = [":counters/", ":clients/"].map(|part| key.contains(part));
            counter || client || key.ends_with("/resized")
        };
        let mut keys = self.keys(&format!("{namespace}:"));
        keys.retain(|key| !stays(key));
        keys
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        let mut litter = self.litter(namespace);
        litter.retain(|key| !key.contains(":gone/"));
        litter
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for EtcdServer {
    fn port(&self) -> u16 {
        self.port()
    }

    fn url_at(&self, port: u16) -> String {
        self.url_at(port)
    }

    fn kill(&self) {
        self.kill();
    }

    /// The value of a ticket begins with its permits and its capacity.
    fn marks(&self) -> Marks {
        Marks {
            enqueue: b"1073741824 1073741824 ",
            downgrade: b"1 1073741824 ",
            // The record of the counter lists its last changes. `a` means that one was applied.
            count: b" a ",
        }
    }
}

#[derive(Debug)]
struct ForLongLeases(EtcdServer);

impl Server for ForLongLeases {
    fn url(&self) -> String {
        self.0.url()
    }

    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&(self.url() + LONG_LEASES)).unwrap()
    }

    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        builder.url(self.url() + LONG_LEASES).build()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.0.litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.0.litter_but_marks(namespace)
    }

    /// `None`, because no fact may break this server.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// A server for histories. The core, not this store, tracks the ends of leases, so histories leave
/// them out. When a client disconnects, its lease is revoked.
struct Leases(EtcdServer);

impl Stage for Leases {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&(self.0.url() + "?session_ttl=280s")).unwrap()
    }

    fn pass(&mut self, _time: Duration) {}

    fn lose_data(&mut self) -> bool {
        false
    }
}
