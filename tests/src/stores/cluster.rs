//! `redis+cluster:`. Facts that break nothing share a cluster of three masters with their replicas.
//! A fact that breaks its server gets a cluster of one master with all slots: only there, one
//! broken node breaks the whole store. The rule of the queue and the scripts are those of a single
//! server, so the random histories run on a single server.

use std::sync::{Arc, OnceLock};

use lockcore::backend::{self, Capability};

use super::redis::{Redis, USER, grant_in_a_cluster};
use super::{Histories, Marks, Server, ServerProcess, Store, Suite, Timings};
use crate::proxy::Proxy;
use crate::redis_cluster::{Cluster as Nodes, NEVER};
use crate::redis_server::RedisServer;
use crate::watch::SECRET;

#[derive(Debug)]
pub struct Cluster;

impl Store for Cluster {
    fn name(&self) -> &'static str {
        "cluster"
    }

    fn available(&self) -> Result<(), String> {
        Redis.available()
    }

    fn capability(&self) -> Capability {
        backend::open("redis+cluster://127.0.0.1")
            .unwrap()
            .capability()
    }

    /// Its capability is that of `redis:`, so the core cannot tell them apart.
    fn suite(&self) -> Suite {
        Suite::beside_another(Suite::Verbs)
    }

    fn timings(&self) -> Timings {
        Redis.timings()
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(Alone(Nodes::of_one()))
    }

    /// Clients have the rights of the guide.
    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let cluster = Nodes::start(NEVER);
                for node in &cluster.nodes {
                    grant_in_a_cluster(node, "fact*", SECRET);
                }
                Arc::new(Shared {
                    cluster,
                    login: format!("{USER}:{SECRET}@"),
                })
            })
            .clone()
    }

    fn start_for_load(&self) -> Box<dyn Server> {
        let cluster = Nodes::with(3, false, NEVER, &[]);
        Box::new(Shared {
            cluster,
            login: String::new(),
        })
    }

    fn histories(&self) -> Option<Histories> {
        None
    }
}

#[derive(Debug)]
struct Shared {
    cluster: Nodes,
    login: String,
}

impl Server for Shared {
    fn url(&self) -> String {
        let url = self.cluster.url();
        url.replace("://", &format!("://{}", self.login))
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        let nodes = self.cluster.masters().into_iter();
        nodes.flat_map(|node| node.litter(namespace)).collect()
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        let nodes = self.cluster.masters().into_iter();
        nodes
            .flat_map(|node| node.litter_but_marks(namespace))
            .collect()
    }

    /// `None`, because no fact may break this cluster.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// One master with all slots.
#[derive(Debug)]
struct Alone(Nodes);

impl Alone {
    fn node(&self) -> &RedisServer {
        &self.0.nodes[0]
    }
}

impl Server for Alone {
    fn url(&self) -> String {
        self.0.url()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.node().litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.node().litter_but_marks(namespace)
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for Alone {
    fn port(&self) -> u16 {
        self.node().port()
    }

    fn url_at(&self, port: u16) -> String {
        format!("redis+cluster://127.0.0.1:{port}")
    }

    fn kill(&self) {
        self.node().kill();
    }

    fn marks(&self) -> Marks {
        self.node().marks()
    }

    /// The node tells clients its own port. The proxy replaces this port by its own.
    fn through_a_proxy(&self) -> (Proxy, String) {
        let proxy = Proxy::to(self.port());
        let line = |port: u16| format!("$4\r\nport\r\n:{port}\r\n");
        proxy.rename(line(self.port()).as_bytes(), line(proxy.port()).as_bytes());
        let url = self.url_at(proxy.port());
        (proxy, url)
    }
}
