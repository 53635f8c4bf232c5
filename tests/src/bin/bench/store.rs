//! What is benched: a store by its URL, on a server of its own or somewhere, and what it was asked meanwhile.

use std::cell::RefCell;

use redis::{Client, Connection};
use tests::redis_server::{CommandStats, RedisServer, parse_command_stats};
use url::Url;

pub(crate) struct Store {
    /// Scheme and host: what else is in a URL may be secret.
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) kind: Kind,
    /// To ask a Redis what it was asked.
    redis: Option<RefCell<Connection>>,
    /// Goes with the store.
    _server: Option<RedisServer>,
}

/// What bars and floors depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Redis,
    Memory,
    ZooKeeper,
    Etcd,
    Postgres,
    MariaDb,
    Other,
}

impl Store {
    pub(crate) fn of_its_own(server: RedisServer) -> Self {
        let mut store = Self::at(&server.url()).unwrap();
        store._server = Some(server);
        store
    }

    pub(crate) fn at(url: &str) -> Result<Self, String> {
        let parsed = Url::parse(url).map_err(|error| format!("not a URL: {error}"))?;
        let kind = match parsed.scheme() {
            "redis" => Kind::Redis,
            "memory" => Kind::Memory,
            "zookeeper" => Kind::ZooKeeper,
            "etcd" => Kind::Etcd,
            "postgres" | "postgresql" => Kind::Postgres,
            "mariadb" | "mysql" => Kind::MariaDb,
            _ => Kind::Other,
        };
        let redis = match kind {
            Kind::Redis => {
                let connection = Client::open(url).and_then(|client| client.get_connection());
                let connection = connection.map_err(|error| format!("Redis: {error}"))?;
                Some(RefCell::new(connection))
            }
            _ => None,
        };
        Ok(Self {
            name: match parsed.host_str() {
                Some(host) => format!("{}://{host}", parsed.scheme()),
                None => format!("{}:", parsed.scheme()),
            },
            url: url.to_owned(),
            kind,
            redis,
            _server: None,
        })
    }

    /// Whether processes can meet there.
    pub(crate) fn is_shared(&self) -> bool {
        self.kind != Kind::Memory
    }

    /// Makes a list of the one token that the tasks of a floor hand on.
    pub(crate) fn put_token(&self, key: &str) {
        self.ask(redis::cmd("LPUSH").arg(key).arg("token"));
    }

    /// Removes a key.
    pub(crate) fn forget(&self, key: &str) {
        self.ask(redis::cmd("DEL").arg(key));
    }

    fn ask(&self, command: &redis::Cmd) {
        if let Some(redis) = &self.redis {
            command.exec(&mut *redis.borrow_mut()).unwrap();
        }
    }

    /// `None` for a store that does not count.
    pub(crate) fn reading(&self) -> Option<Reading> {
        let mut redis = self.redis.as_ref()?.borrow_mut();
        let info = |section: &str, redis: &mut Connection| -> String {
            redis::cmd("INFO").arg(section).query(redis).unwrap()
        };
        let cpu = info("cpu", &mut redis);
        let cpu = cpu.lines().filter_map(|line| {
            let of_the_server = line.strip_prefix("used_cpu_user:");
            let seconds = of_the_server.or_else(|| line.strip_prefix("used_cpu_sys:"));
            seconds?.trim().parse::<f64>().ok()
        });
        Some(Reading {
            cpu_s: cpu.sum(),
            commands: parse_command_stats(&info("commandstats", &mut redis)),
        })
    }

    /// What it was asked since an earlier reading.
    pub(crate) fn asked_since(&self, earlier: &Option<Reading>) -> Option<Asked> {
        let (earlier, later) = (earlier.as_ref()?, self.reading()?);
        let mut asked = Asked {
            cpu_s: later.cpu_s - earlier.cpu_s,
            ..Asked::default()
        };
        for (command, calls) in &later.commands {
            let calls = (calls - earlier.commands.get(command).unwrap_or(&0)) as f64;
            match command.as_str() {
                "evalsha" | "eval" => asked.scripts += calls,
                "publish" | "spublish" => asked.publishes += calls,
                "info" => {} // ours
                other if is_a_request(other) => asked.other_requests += calls,
                _ => asked.inside_scripts += calls,
            }
        }
        Some(asked)
    }
}

/// A server counts what scripts call like what clients send. These are not called by scripts.
fn is_a_request(command: &str) -> bool {
    let families = ["client|", "script|", "config|", "acl|", "command|"];
    let alone = [
        "ping",
        "hello",
        "auth",
        "select",
        "subscribe",
        "psubscribe",
        "ssubscribe",
        "unsubscribe",
    ];
    alone.contains(&command) || families.iter().any(|family| command.starts_with(family))
}

pub(crate) struct Reading {
    cpu_s: f64,
    commands: CommandStats,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) scripts: f64,
    pub(crate) publishes: f64,
    pub(crate) other_requests: f64,
    pub(crate) inside_scripts: f64,
    /// Of the server.
    pub(crate) cpu_s: f64,
}

impl Asked {
    pub(crate) fn requests(&self) -> f64 {
        self.scripts + self.other_requests
    }
}
