//! `redlock:`. Each node runs the scripts of a single server, so the random histories run on a
//! single server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::backend::{self, Capability};

use super::redis::{Redis, USER, grant_at_node};
use super::{Histories, Marks, Server, ServerProcess, Shared, Store, Timings};
use crate::ports::free_port;
use crate::redis_quorum::{Quorum, url};
use crate::redis_server::RedisServer;
use crate::watch::SECRET;

#[derive(Debug)]
pub struct RedisQuorum;

impl Store for RedisQuorum {
    fn name(&self) -> &'static str {
        "quorum"
    }

    fn available(&self) -> Result<(), String> {
        Redis.available()
    }

    fn capability(&self) -> Capability {
        backend::open("redlock://h1,h2,h3").unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings {
            tells_when_to_recheck: false,
            cuts_unheard_grants: true,
            // The time includes a pause between two requests of a waiter.
            ..Timings::of_a_server(Duration::from_millis(600))
        }
    }

    /// Two of three nodes run, so both are needed. A fact breaks the first of them.
    fn start(&self) -> Box<dyn Server> {
        Box::new(Needed {
            nodes: Quorum::start(2),
            down: free_port(),
        })
    }

    /// Clients have the rights of the guide.
    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared<Quorum>>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let set = Quorum::start(3);
                for node in &set.nodes {
                    grant_at_node(node, "fact*", SECRET);
                }
                let url = set.url();
                let url = url.replace("://", &format!("://{USER}:{SECRET}@"));
                Arc::new(Shared { server: set, url })
            })
            .clone()
    }

    fn start_for_load(&self) -> Box<dyn Server> {
        Box::new(Quorum::start(3))
    }

    fn histories(&self) -> Option<Histories> {
        None
    }
}

impl Server for Quorum {
    fn url(&self) -> String {
        self.url()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        at_all(&self.nodes, |node| node.litter(namespace))
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        at_all(&self.nodes, |node| node.litter_but_marks(namespace))
    }

    /// `None`, because several processes form the store.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// The keys at all nodes that run.
fn at_all(nodes: &[RedisServer], keys: impl Fn(&RedisServer) -> Vec<String>) -> Vec<String> {
    let running = nodes.iter().filter(|node| node.is_running());
    running.flat_map(keys).collect()
}

/// Two running nodes, and a port where the third does not run.
#[derive(Debug)]
struct Needed {
    nodes: Quorum,
    down: u16,
}

impl Server for Needed {
    fn url(&self) -> String {
        self.url_at(self.port())
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.nodes.litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.nodes.litter_but_marks(namespace)
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for Needed {
    fn port(&self) -> u16 {
        self.nodes.nodes[0].port()
    }

    fn url_at(&self, port: u16) -> String {
        url([port, self.nodes.nodes[1].port(), self.down])
    }

    fn kill(&self) {
        self.nodes.nodes[0].kill();
    }

    fn marks(&self) -> Marks {
        self.nodes.nodes[0].marks()
    }
}
