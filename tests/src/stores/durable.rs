//! `redis:` with `?durability=replicas:1`: a master and a replica, which must have stored every
//! lock. Scripts and clock are those of a single server, so the random histories run on a single
//! server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::Locks;
use lockcore::backend::{self, Capability};

use super::redis::{Redis, USER, grant, grant_durability};
use super::{Histories, Marks, Server, ServerProcess, Shared, Store, Suite, Timings};
use crate::elsewhere::elsewhere;
use crate::redis_server::{self, RedisServer};
use crate::watch::SECRET;

const OPTION: &str = "?durability=replicas:1";

/// The time for the first acknowledgement. For up to a second after a replica has connected, Redis
/// acknowledges nothing.
const FIRST_ACKNOWLEDGEMENT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Durable;

impl Store for Durable {
    fn name(&self) -> &'static str {
        "durable"
    }

    fn available(&self) -> Result<(), String> {
        Redis.available()
    }

    fn capability(&self) -> Capability {
        let url = format!("redis://127.0.0.1{OPTION}");
        backend::open(&url).unwrap().capability()
    }

    /// More would take longer than it is worth, because the verbs are those of `redis:`.
    fn suite(&self) -> Suite {
        Suite::beside_another(Suite::Exclusion)
    }

    fn timings(&self) -> Timings {
        Redis.timings()
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(Pair::start())
    }

    /// Clients have the rights of the guide.
    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<Shared<Pair>>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let pair = Pair::start();
                grant(&pair.master, "fact*", SECRET);
                grant_durability(&pair.master);
                let url = pair.master.url_with_user(USER, SECRET) + OPTION;
                Arc::new(Shared { server: pair, url })
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        None
    }
}

/// A master and its replica. The methods act on the master.
#[derive(Debug)]
struct Pair {
    master: RedisServer,
    _replica: RedisServer,
}

impl Pair {
    fn start() -> Self {
        let master = RedisServer::start();
        let user = redis_server::USER;
        let replica = master.replica_with(&["--masteruser", user, "--masterauth", user]);
        let pair = Self {
            master,
            _replica: replica,
        };
        pair.wait_until_acknowledged();
        pair
    }

    fn wait_until_acknowledged(&self) {
        let url = self.url();
        elsewhere(async {
            let locks = Locks::builder().url(url).op_timeout(FIRST_ACKNOWLEDGEMENT);
            let locks = locks.build().unwrap();
            locks.ready(FIRST_ACKNOWLEDGEMENT).await.unwrap();
        });
    }
}

impl Server for Pair {
    fn url(&self) -> String {
        self.master.url() + OPTION
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.master.litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.master.litter_but_marks(namespace)
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

impl ServerProcess for Pair {
    fn port(&self) -> u16 {
        self.master.port()
    }

    fn url_at(&self, port: u16) -> String {
        self.master.url_at(port) + OPTION
    }

    fn kill(&self) {
        self.master.kill();
    }

    fn says_when_down(&self) -> &'static str {
        self.master.says_when_down()
    }

    fn marks(&self) -> Marks {
        self.master.marks()
    }
}
