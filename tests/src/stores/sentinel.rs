//! `redis+sentinel:`. Scripts and clock are those of a single server, so the random histories run
//! on a single server.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use lockcore::backend::{self, Capability};

use super::redis::{Redis, USER, grant, grant_at_sentinel};
use super::{Histories, Marks, Server, ServerProcess, Store, Suite, Timings};
use crate::redis_sentinels::{NEVER, Sentinels, one_that_names, url};
use crate::redis_server::RedisServer;
use crate::watch::SECRET;

#[derive(Debug)]
pub struct Sentinel;

impl Store for Sentinel {
    fn name(&self) -> &'static str {
        "sentinel"
    }

    fn available(&self) -> Result<(), String> {
        Redis.available()
    }

    fn capability(&self) -> Capability {
        let url = "redis+sentinel://127.0.0.1/mymaster";
        backend::open(url).unwrap().capability()
    }

    /// Its capability is that of `redis:`, so the core cannot tell them apart.
    fn suite(&self) -> Suite {
        Suite::beside_another(Suite::Verbs)
    }

    fn timings(&self) -> Timings {
        Redis.timings()
    }

    /// One server, and a sentinel that never replaces it. So only the fact changes the server.
    fn start(&self) -> Box<dyn Server> {
        let server = RedisServer::start();
        let sentinel = one_that_names(server.port());
        Box::new(Alone {
            server,
            sentinel,
            others: Mutex::default(),
        })
    }

    /// A master with replicas. Clients have only the rights of the guide, at the servers and at the
    /// sentinels.
    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let set = Sentinels::start(NEVER);
                for server in &set.servers {
                    grant(server, "fact*", SECRET);
                }
                for sentinel in &set.sentinels {
                    grant_at_sentinel(sentinel, SECRET);
                }
                Arc::new(Shared(set))
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        None
    }
}

#[derive(Debug)]
struct Shared(Sentinels);

impl Server for Shared {
    fn url(&self) -> String {
        let sentinels = self.0.url();
        let hosts = sentinels.strip_prefix("redis+sentinel://").unwrap();
        format!(
            "redis+sentinel://{USER}:{SECRET}@{hosts}?sentinel_user={USER}&sentinel_password={SECRET}"
        )
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.0.master().litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.0.master().litter_but_marks(namespace)
    }

    /// `None`, because no fact may break these servers.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// A server without replicas, and its sentinel. The methods act on the server that keeps the locks.
#[derive(Debug)]
struct Alone {
    server: RedisServer,
    sentinel: RedisServer,
    /// More sentinels, which name another port for the same server.
    others: Mutex<Vec<RedisServer>>,
}

impl Server for Alone {
    fn url(&self) -> String {
        url(std::slice::from_ref(&self.sentinel))
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.server.litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.server.litter_but_marks(namespace)
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for Alone {
    fn port(&self) -> u16 {
        self.server.port()
    }

    fn url_at(&self, port: u16) -> String {
        let sentinel = one_that_names(port);
        let url = url(std::slice::from_ref(&sentinel));
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.push(sentinel);
        url
    }

    fn kill(&self) {
        self.server.kill();
    }

    fn marks(&self) -> Marks {
        self.server.marks()
    }
}
