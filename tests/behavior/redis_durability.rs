//! Tests of Redis with `?durability=`: a lock is granted when the replicas have stored it, or when
//! it is on the disk. Each fact has its own master and replicas.

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

/// The operation timeout of the clients. The master waits for its replicas for half of it.
const OP_TIMEOUT: Duration = Duration::from_secs(6);

/// A master with this many replicas. All of them acknowledge its writes.
async fn servers(count: usize) -> (RedisServer, Vec<RedisServer>) {
    let master = RedisServer::start();
    let replicas = (0..count).map(|_| RedisServer::replica_of(&master));
    let replicas: Vec<_> = replicas.collect();
    acknowledges(&durable(&master, count)).await;
    (master, replicas)
}

/// Waits until the replicas acknowledge. A connected replica may begin to acknowledge only with its
/// next message to the master. It sends one each second.
async fn acknowledges(url: &str) {
    client(url).ready(STALL).await.unwrap();
}

/// The URL of a store whose locks are stored on this many replicas.
fn durable(master: &RedisServer, replicas: usize) -> String {
    format!("{}?durability=replicas:{replicas}", master.url())
}

/// A client with long operation timeouts.
fn client(url: &str) -> Locks {
    patient(url).build().unwrap()
}

/// A client whose operations fail after [`OP_TIMEOUT`]. Its leases are longer than a fact.
fn hasty(url: &str) -> Builder {
    builder(url).op_timeout(OP_TIMEOUT).ttl(LEASE)
}

/// How many `WAIT` commands the master has got since it started.
fn waits(master: &RedisServer) -> u64 {
    *master.command_stats().get("wait").unwrap_or(&0)
}

/// A master with one replica. After a call of `is_away`, each write reaches the replica late. The
/// replica acknowledges it as soon as it arrives.
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

/// Makes a replica a master. It does not follow its old master after this.
fn promote(replica: &RedisServer) {
    replica.command::<()>(&["REPLICAOF", "NO", "ONE"]);
}

/// Waits until the server has this many tickets of a name. The replicas need not have them.
async fn tickets_at(server: &RedisServer, name: &str, count: usize) {
    tickets(&client(&server.url()), name, count).await;
}
