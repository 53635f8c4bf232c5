//! The store under test: a store at a URL or on servers that the bench starts, and the requests
//! that it received.

use std::cell::RefCell;

use lockcore::backend::{self, Capability};
use redis::{Client, Connection};
use tests::etcd_server::EtcdServer;
use tests::measure::cpu_seconds_of;
use tests::mysql_server::MysqlServer;
use tests::redis_cluster::Cluster;
use tests::redis_quorum::Quorum;
use tests::redis_sentinels::{NEVER, Sentinels};
use tests::redis_server::{CommandStats, RedisServer, parse_command_micros, parse_command_stats};
use tests::stores::{self, Server};
use tests::zookeeper_server::{Packets, ZooKeeperServer};
use url::Url;

use crate::terms::{self, Terms};

pub(crate) struct Store {
    /// The scheme and host, because the rest of a URL may be secret.
    pub(crate) name: String,
    pub(crate) url: String,
    pub(crate) terms: Terms,
    capability: Capability,
    /// A connection to each Redis server of the store, to read its statistics.
    redis: Vec<RefCell<Connection>>,
    /// The servers that the bench has started for this store.
    servers: Option<Servers>,
}

/// The servers of a store.
enum Servers {
    /// The server that the suite starts for this store.
    One(Box<dyn Server>),
    /// A master, and a replica that acknowledges each write.
    Replicated(Vec<RedisServer>),
    Sentinels(Sentinels),
    Cluster(Cluster),
    Quorum(Quorum),
}

impl Servers {
    /// Starts the servers of a named store. `None` if `name` is not the name of a store.
    fn start(name: &str) -> Result<Option<Self>, String> {
        let of_several = ["durable", "sentinel", "cluster", "quorum"].contains(&name);
        if of_several {
            RedisServer::available()?;
        }
        let several = match name {
            "durable" => {
                let master = RedisServer::start();
                let replica = RedisServer::replica_of(&master);
                await_acknowledgement(&master);
                Self::Replicated(vec![master, replica])
            }
            "sentinel" => Self::Sentinels(Sentinels::start(NEVER)),
            "cluster" => Self::Cluster(Cluster::with(3, false, NEVER, &[])),
            "quorum" => Self::Quorum(Quorum::start(5)),
            _ => {
                let Some(store) = stores::by_url().find(|store| store.name() == name) else {
                    return Ok(None);
                };
                store.available()?;
                return Ok(Some(Self::One(store.start_for_load())));
            }
        };
        Ok(Some(several))
    }

    fn url(&self) -> String {
        match self {
            Self::One(server) => server.url(),
            Self::Replicated(servers) => servers[0].url() + "?durability=replicas:1",
            Self::Sentinels(set) => set.url(),
            Self::Cluster(cluster) => cluster.url(),
            Self::Quorum(quorum) => quorum.url(),
        }
    }

    /// The Redis servers that clients send requests to.
    fn redis(&self) -> Vec<&RedisServer> {
        match self {
            Self::One(server) => server.downcast().into_iter().collect(),
            Self::Replicated(servers) => vec![&servers[0]],
            Self::Sentinels(set) => vec![set.master()],
            Self::Cluster(cluster) => cluster.nodes.iter().collect(),
            Self::Quorum(quorum) => quorum.nodes.iter().collect(),
        }
    }

    /// A server of another kind.
    fn one<S: Server>(&self) -> Option<&S> {
        match self {
            Self::One(server) => server.downcast(),
            _ => None,
        }
    }
}

/// Waits until the replica acknowledges a write. A connected replica may begin to acknowledge only
/// with its next message to the master. It sends one each second.
fn await_acknowledgement(master: &RedisServer) {
    let client = Client::open(master.url()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let probe = redis::cmd("SET").arg("bench").arg("").to_owned();
    probe.exec(&mut connection).unwrap();
    let replicas: u32 = redis::cmd("WAIT")
        .arg(1)
        .arg(10_000)
        .query(&mut connection)
        .unwrap();
    assert_eq!(replicas, 1, "the replica acknowledges nothing");
}

pub(crate) fn scheme(url: &str) -> &str {
    url.split_once(':').map_or(url, |(scheme, _)| scheme)
}

impl Store {
    /// Opens the store at a URL. If `name` is a name only, starts servers for this store.
    pub(crate) fn open(name: &str) -> Result<Self, String> {
        let servers = Servers::start(name)?;
        let url = servers.as_ref().map_or(name.to_owned(), Servers::url);
        // Only the first of several hosts is parsed, because the parser for URLs allows only one
        // host.
        let (first, options) = url.split_once('?').unwrap_or((&url, ""));
        let first = first.split(',').next().unwrap_or(first);
        let parsed = Url::parse(first).map_err(|error| format!("not a URL: {error}"))?;
        let backend = backend::open(&url).map_err(|error| error.to_string())?;
        let nodes = match &servers {
            Some(servers) => servers.redis().into_iter().map(RedisServer::url).collect(),
            None if scheme(&url) == "redis" => vec![url.clone()],
            None => vec![],
        };
        let connect = |url: String| {
            let connection = Client::open(url).and_then(|client| client.get_connection());
            connection.map(RefCell::new)
        };
        let redis = nodes.into_iter().map(connect).collect::<Result<_, _>>();
        Ok(Self {
            name: match parsed.host_str() {
                Some(host) => {
                    let options = if options.starts_with("durability=") {
                        options
                    } else {
                        ""
                    };
                    let mark = if options.is_empty() { "" } else { "?" };
                    format!("{}://{host}{mark}{options}", parsed.scheme())
                }
                None => format!("{}:", parsed.scheme()),
            },
            // The floors can use only a plain URL, without options.
            terms: terms::of(if options.is_empty() { scheme(&url) } else { "" }),
            capability: backend.capability(),
            redis: redis.map_err(|error| format!("Redis: {error}"))?,
            url,
            servers,
        })
    }

    /// Whether several processes can share this store.
    pub(crate) fn is_shared(&self) -> bool {
        self.capability.cross_process
    }

    /// The number of Redis servers that clients send requests to.
    pub(crate) fn servers_asked(&self) -> usize {
        self.redis.len()
    }

    /// Makes a list with one token, which the tasks of a floor hand over. Used only if the floor
    /// needs a list.
    pub(crate) fn put_token(&self, key: &str) {
        self.ask(redis::cmd("LPUSH").arg(key).arg("token"));
    }

    /// Removes the list that [`put_token`](Self::put_token) has made.
    pub(crate) fn forget(&self, key: &str) {
        self.ask(redis::cmd("DEL").arg(key));
    }

    fn ask(&self, command: &redis::Cmd) {
        for redis in &self.redis {
            command.exec(&mut *redis.borrow_mut()).unwrap();
        }
    }

    /// The bytes that the Redis servers use. `None` for another store.
    pub(crate) fn memory_used(&self) -> Option<f64> {
        let of = |redis: &RefCell<Connection>| {
            let mut question = redis::cmd("INFO");
            let info: String = question
                .arg("memory")
                .query(&mut *redis.borrow_mut())
                .unwrap();
            let used = info
                .lines()
                .find_map(|line| line.strip_prefix("used_memory:"));
            used.unwrap().trim().parse::<f64>().unwrap()
        };
        (!self.redis.is_empty()).then(|| self.redis.iter().map(of).sum())
    }

    /// The counts of the servers now. `None` for a store without counts, or without access to them.
    pub(crate) fn reading(&self) -> Option<Reading> {
        let servers = self.servers.as_ref();
        if let Some(server) = servers.and_then(Servers::one::<EtcdServer>) {
            return Some(Reading {
                cpu_s: cpu_seconds_of(server.pid()),
                counts: Counts::Etcd(server.requests()),
            });
        }
        if let Some(server) = servers.and_then(Servers::one::<ZooKeeperServer>) {
            return Some(Reading {
                cpu_s: cpu_seconds_of(server.pid()),
                counts: Counts::ZooKeeper(server.packets()),
            });
        }
        if let Some(server) = servers.and_then(Servers::one::<MysqlServer>) {
            return Some(Reading {
                counts: Counts::Mysql(server.requests()),
                cpu_s: cpu_seconds_of(server.pid()),
            });
        }
        if self.redis.is_empty() {
            return None;
        }
        let mut reading = Reading {
            cpu_s: 0.0,
            counts: Counts::Redis {
                commands: CommandStats::new(),
                micros: CommandStats::new(),
            },
        };
        for redis in &self.redis {
            reading.add(&mut redis.borrow_mut());
        }
        Some(reading)
    }

    /// The requests since an earlier reading.
    pub(crate) fn asked_since(&self, earlier: &Option<Reading>) -> Option<Asked> {
        let (earlier, later) = (earlier.as_ref()?, self.reading()?);
        let cpu_s = later.cpu_s - earlier.cpu_s;
        match (&earlier.counts, later.counts) {
            (Counts::Etcd(earlier), Counts::Etcd(later))
            | (Counts::Mysql(earlier), Counts::Mysql(later)) => Some(Asked {
                requests: (later - earlier) as f64,
                cpu_s,
                redis: None,
            }),
            (Counts::ZooKeeper(earlier), Counts::ZooKeeper(later)) => Some(Asked {
                requests: later.since(*earlier).received as f64,
                cpu_s,
                redis: None,
            }),
            (
                Counts::Redis { commands, micros },
                Counts::Redis {
                    commands: later,
                    micros: micros_later,
                },
            ) => {
                let mut redis = Commands::between(commands, &later);
                redis.micros = micros_later;
                for (command, spent) in &mut redis.micros {
                    *spent -= micros.get(command).unwrap_or(&0);
                }
                Some(Asked {
                    requests: redis.scripts + redis.other_requests,
                    cpu_s,
                    redis: Some(redis),
                })
            }
            _ => None,
        }
    }
}

pub(crate) struct Reading {
    /// The processor time of the servers that clients send requests to.
    cpu_s: f64,
    counts: Counts,
}

enum Counts {
    Redis {
        commands: CommandStats,
        micros: CommandStats,
    },
    /// Requests about keys.
    Etcd(u64),
    /// Statements of clients.
    Mysql(u64),
    ZooKeeper(Packets),
}

impl Reading {
    /// Adds the figures that a Redis server reports.
    fn add(&mut self, redis: &mut Connection) {
        let mut info =
            |section: &str| -> String { redis::cmd("INFO").arg(section).query(redis).unwrap() };
        let cpu = info("cpu");
        let cpu = cpu.lines().filter_map(|line| {
            let of_the_server = line.strip_prefix("used_cpu_user:");
            let seconds = of_the_server.or_else(|| line.strip_prefix("used_cpu_sys:"));
            seconds?.trim().parse::<f64>().ok()
        });
        self.cpu_s += cpu.sum::<f64>();
        let stats = info("commandstats");
        if let Counts::Redis { commands, micros } = &mut self.counts {
            for (command, calls) in parse_command_stats(&stats) {
                *commands.entry(command).or_default() += calls;
            }
            for (command, spent) in parse_command_micros(&stats) {
                *micros.entry(command).or_default() += spent;
            }
        }
    }
}

pub(crate) struct Asked {
    /// The requests of all clients, including probes.
    pub(crate) requests: f64,
    /// The processor time of the servers.
    pub(crate) cpu_s: f64,
    /// The commands of the Redis servers of the store.
    pub(crate) redis: Option<Commands>,
}

pub(crate) struct Commands {
    pub(crate) scripts: f64,
    pub(crate) publishes: f64,
    pub(crate) other_requests: f64,
    pub(crate) inside_scripts: f64,
    micros: CommandStats,
}

impl Commands {
    fn between(earlier: &CommandStats, later: &CommandStats) -> Self {
        let mut asked = Self {
            scripts: 0.0,
            publishes: 0.0,
            other_requests: 0.0,
            inside_scripts: 0.0,
            micros: CommandStats::new(),
        };
        for (command, calls) in later {
            let calls = (calls - earlier.get(command).unwrap_or(&0)) as f64;
            match command.as_str() {
                "evalsha" | "eval" | "fcall" => asked.scripts += calls,
                "publish" | "spublish" => asked.publishes += calls,
                "info" => {} // sent by the harness
                other if is_a_request(other) => asked.other_requests += calls,
                _ => asked.inside_scripts += calls,
            }
        }
        asked
    }

    /// The microseconds that the server has spent in these commands. They depend little on the
    /// machine. The time of a script includes the commands that it calls.
    pub(crate) fn micros_in(&self, commands: &[&str]) -> f64 {
        let spent = commands
            .iter()
            .filter_map(|command| self.micros.get(*command));
        spent.sum::<u64>() as f64
    }

    pub(crate) fn script_micros(&self) -> f64 {
        self.micros_in(&["evalsha", "eval", "fcall"])
    }
}

/// Whether this command comes from a client. A server also counts the commands that scripts call.
/// No script calls the commands of this list.
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
