//! Redis with `?durability=`: a lock counts when replicas have it, or the disk. Each fact has its own master and
//! replicas.

mod failovers;
mod groups;
mod patience;
mod replicas;
mod settings;

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Builder, Locks};
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use crate::faults::{builder, patient};
use crate::store::{Kind, LEASE, STALL, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        replicas::facts,
        groups::facts,
        patience::facts,
        failovers::facts,
        settings::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// The master waits half as long for its replicas.
const OP_TIMEOUT: Duration = Duration::from_secs(2);

/// A master with so many replicas, which all acknowledge its writes.
async fn servers(count: usize) -> (RedisServer, Vec<RedisServer>) {
    let master = RedisServer::start();
    let replicas = (0..count).map(|_| RedisServer::replica_of(&master));
    let replicas: Vec<_> = replicas.collect();
    acknowledges(&durable(&master, count)).await;
    (master, replicas)
}

/// Waits until the replicas acknowledge. A replica that is connected may do so only after its next message, which it
/// sends once a second.
async fn acknowledges(url: &str) {
    client(url).ready(STALL).await.unwrap();
}

/// The store with locks that so many replicas have.
fn durable(master: &RedisServer, replicas: usize) -> String {
    format!("{}?durability=replicas:{replicas}", master.url())
}

/// A client whose operations take long before they fail.
fn client(url: &str) -> Locks {
    patient(url).build().unwrap()
}

/// A client whose operations fail after [`OP_TIMEOUT`], and whose leases outlast a fact.
fn hasty(url: &str) -> Builder {
    builder(url).op_timeout(OP_TIMEOUT).ttl(LEASE)
}

/// How often the master was asked to wait since it started.
fn waits(master: &RedisServer) -> u64 {
    *master.command_stats().get("wait").unwrap_or(&0)
}

/// A master with one replica that hears of everything this much later. The replica acknowledges writes meanwhile.
struct Distant {
    master: RedisServer,
    link: Proxy,
    _replica: RedisServer,
}

impl Distant {
    async fn start() -> Self {
        let master = RedisServer::start();
        let link = Proxy::to(master.port());
        let port = link.port().to_string();
        let replica = RedisServer::with(&["--replicaof", "127.0.0.1", &port]);
        acknowledges(&durable(&master, 1)).await;
        Self {
            master,
            link,
            _replica: replica,
        }
    }

    fn url(&self) -> String {
        durable(&self.master, 1)
    }

    fn is_away(&self, lag: Duration) {
        self.link.delay(Duration::ZERO, lag);
    }
}

/// The replica stops following, and is a master from now on.
fn promote(replica: &RedisServer) {
    replica.command::<()>(&["REPLICAOF", "NO", "ONE"]);
}

/// Waits until so many tickets of a name are at the server, whether or not they count.
async fn tickets_at(server: &RedisServer, name: &str, count: usize) {
    tickets(&client(&server.url()), name, count).await;
}
