//! `zookeeper:`, with and without TLS.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};
use lockcore::{Builder, Error, Locks};
use tokio::runtime::Runtime;

use super::{
    Histories, Manner, Marks, Schemes, Server, ServerProcess, Stage, Store, Suite, Timings, Tls,
};
use crate::certificates::{Authority, Identity};
use crate::zookeeper_server::ZooKeeperServer;

/// A lease lasts at most as long as its session. So the session timeout is the longest ttl of a
/// fact.
const LONG_LEASES: &str = "?session_timeout=60s";

/// The time for Java code that runs for the first time, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct ZooKeeper;

impl Store for ZooKeeper {
    fn name(&self) -> &'static str {
        "zookeeper"
    }

    fn available(&self) -> Result<(), String> {
        ZooKeeperServer::available()
    }

    fn capability(&self) -> Capability {
        backend::open("zookeeper://127.0.0.1").unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings {
            tells_when_to_recheck: false,
            // The server checks at intervals which sessions have ended.
            ..Timings::of_a_server(Duration::from_secs(1))
        }
    }

    fn serves_forked_children(&self) -> bool {
        false
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(ZooKeeperServer::start())
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<ForLongLeases>> = OnceLock::new();
        SHARED
            .get_or_init(|| Arc::new(ForLongLeases(ZooKeeperServer::start())))
            .clone()
    }

    fn start_for_load(&self) -> Box<dyn Server> {
        Box::new(ZooKeeperServer::for_load())
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 400,
            long: 200,
            available: || Ok(()),
            manner: Manner {
                // A session lasts longer than every ttl here.
                keeps_the_first_ttl: true,
                wakes_late: true,
                ..Manner::default()
            },
            start: || Box::new(Sessions(ZooKeeperServer::start())),
        })
    }

    fn tls(&self) -> Option<&dyn Tls> {
        Some(self)
    }
}

impl Server for ZooKeeperServer {
    fn url(&self) -> String {
        self.url()
    }

    /// Tickets are litter. Their parent nodes are not, because the server removes them.
    fn litter(&self, namespace: &str) -> Vec<String> {
        self.ephemerals(&format!("/{namespace}:"))
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for ZooKeeperServer {
    fn port(&self) -> u16 {
        self.port()
    }

    fn url_at(&self, port: u16) -> String {
        format!("zookeeper://127.0.0.1:{port}")
    }

    fn kill(&self) {
        self.kill();
    }

    fn says_when_down(&self) -> &'static str {
        "no available hosts"
    }

    /// The name of a ticket's node contains its permits and its capacity.
    fn marks(&self) -> Marks {
        Marks {
            enqueue: b"-1073741824-1073741824-",
            downgrade: b"-1-1073741824-",
            // The record of the counter lists its last changes. The change of this request has the
            // time 0, because the server sets its time later. `a` means that it was applied.
            count: b" 0 a ",
        }
    }
}

#[derive(Debug)]
struct ForLongLeases(ZooKeeperServer);

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

    /// `None`, because no fact may break this server.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

impl Tls for ZooKeeper {
    fn schemes(&self) -> Schemes {
        Schemes {
            plain: "zookeeper",
            encrypted: "zookeeper+tls",
            not_encrypted: "if this port does not speak TLS, write zookeeper://",
            not_plain: "if these ports speak TLS, write zookeeper+tls://",
            says_which: false,
        }
    }

    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server> {
        let versions = format!("ssl.enabledProtocols={}", versions.join(","));
        Box::new(ZooKeeperServer::with_tls(identity, clients, &[&versions]))
    }

    fn start_without(&self) -> Box<dyn Server> {
        Box::new(ZooKeeperServer::start())
    }

    /// `None`: the client library waits for more bytes and reports nothing.
    fn not_understood(&self) -> Option<&'static str> {
        None
    }
}

/// A server for histories. The core, not this store, tracks the ends of leases, so histories leave
/// them out. When a client disconnects, its session ends.
struct Sessions(ZooKeeperServer);

impl Stage for Sessions {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&(self.0.url() + "?session_timeout=280s")).unwrap()
    }

    fn pass(&mut self, _time: Duration) {}

    fn lose_data(&mut self) -> bool {
        false
    }
}

/// ZooKeeper with TLS.
#[derive(Debug)]
pub struct ZooKeeperTls;

impl Store for ZooKeeperTls {
    fn name(&self) -> &'static str {
        "zookeepertls"
    }

    fn available(&self) -> Result<(), String> {
        ZooKeeper.available()
    }

    fn capability(&self) -> Capability {
        ZooKeeper.capability()
    }

    fn suite(&self) -> Suite {
        Suite::Exclusion
    }

    fn timings(&self) -> Timings {
        ZooKeeper.timings()
    }

    fn serves_forked_children(&self) -> bool {
        ZooKeeper.serves_forked_children()
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(Encrypted::start())
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Encrypted>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = Encrypted::start();
                server.warm_up();
                Arc::new(server)
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        None
    }
}

#[derive(Debug)]
struct Encrypted(ZooKeeperServer);

impl Encrypted {
    fn start() -> Self {
        let identity = authority().server(&["127.0.0.1"]);
        Self(ZooKeeperServer::with_tls(&identity, None, &[]))
    }

    /// Makes the first TLS handshake. Java loads its TLS code for it, which on a busy machine takes
    /// longer than a client waits.
    fn warm_up(&self) {
        let patient = Locks::builder().op_timeout(PATIENCE);
        let first = || {
            let runtime = Runtime::new().unwrap();
            runtime.block_on(async { self.client(patient).unwrap().ready(PATIENCE).await.unwrap() })
        };
        // The client runs on another thread, because this thread already has a runtime.
        thread::scope(|scope| scope.spawn(first).join().unwrap());
    }
}

impl Server for Encrypted {
    fn url(&self) -> String {
        self.0.url()
    }

    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        builder
            .ca_file(authority().file())
            .url(self.url() + LONG_LEASES)
            .build()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.0.litter(namespace)
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(Authority::new)
}
