//! The store under test: a store at a URL or on a server of its own, and the requests that it received.

use std::cell::RefCell;

use lockcore::backend::{self, Capability};
use redis::{Client, Connection};
use tests::redis_server::{CommandStats, parse_command_micros, parse_command_stats};
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
    /// A connection to a Redis, to read its statistics.
    redis: Option<RefCell<Connection>>,
    /// The server that was started for it.
    server: Option<Box<dyn Server>>,
}

pub(crate) fn scheme(url: &str) -> &str {
    url.split_once(':').map_or(url, |(scheme, _)| scheme)
}

impl Store {
    /// Opens a store at a URL, or starts a server of its own if there is only a name.
    pub(crate) fn open(name: &str) -> Result<Self, String> {
        let server = match stores::by_url().find(|store| store.name() == name) {
            Some(store) => {
                store.available()?;
                Some(store.start_for_load())
            }
            None => None,
        };
        let url = server
            .as_ref()
            .map_or_else(|| name.to_owned(), |server| server.url());
        let parsed = Url::parse(&url).map_err(|error| format!("not a URL: {error}"))?;
        let backend = backend::open(&url).map_err(|error| error.to_string())?;
        let redis = match scheme(&url) {
            "redis" => {
                let connection = Client::open(&*url).and_then(|client| client.get_connection());
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
            terms: terms::of(scheme(&url)),
            capability: backend.capability(),
            url,
            redis,
            server,
        })
    }

    /// Whether several processes can share this store.
    pub(crate) fn is_shared(&self) -> bool {
        self.capability.cross_process
    }

    /// Makes the list with the one token that the tasks of a floor hand over, if the floor uses a list.
    pub(crate) fn put_token(&self, key: &str) {
        self.ask(redis::cmd("LPUSH").arg(key).arg("token"));
    }

    /// Removes that list.
    pub(crate) fn forget(&self, key: &str) {
        self.ask(redis::cmd("DEL").arg(key));
    }

    fn ask(&self, command: &redis::Cmd) {
        if let Some(redis) = &self.redis {
            command.exec(&mut *redis.borrow_mut()).unwrap();
        }
    }

    /// `None` for a store without counts, or without access to them.
    pub(crate) fn reading(&self) -> Option<Reading> {
        let server = self.server.as_ref();
        if let Some(server) = server.and_then(|server| server.downcast::<ZooKeeperServer>()) {
            return Some(Reading::ZooKeeper(server.packets()));
        }
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
        let stats = info("commandstats", &mut redis);
        Some(Reading::Redis {
            cpu_s: cpu.sum(),
            commands: parse_command_stats(&stats),
            micros: parse_command_micros(&stats),
        })
    }

    /// The requests since an earlier reading.
    pub(crate) fn asked_since(&self, earlier: &Option<Reading>) -> Option<Asked> {
        match (earlier.as_ref()?, self.reading()?) {
            (Reading::ZooKeeper(earlier), Reading::ZooKeeper(later)) => Some(Asked {
                requests: later.since(*earlier).received as f64,
                redis: None,
            }),
            (
                Reading::Redis {
                    cpu_s,
                    commands,
                    micros,
                },
                Reading::Redis {
                    cpu_s: cpu_s_later,
                    commands: later,
                    micros: micros_later,
                },
            ) => {
                let mut redis = Commands::between(commands, &later, cpu_s_later - cpu_s);
                redis.micros = micros_later;
                for (command, spent) in &mut redis.micros {
                    *spent -= micros.get(command).unwrap_or(&0);
                }
                Some(Asked {
                    requests: redis.scripts + redis.other_requests,
                    redis: Some(redis),
                })
            }
            _ => None,
        }
    }
}

pub(crate) enum Reading {
    Redis {
        cpu_s: f64,
        commands: CommandStats,
        micros: CommandStats,
    },
    ZooKeeper(Packets),
}

pub(crate) struct Asked {
    /// The requests of all clients, probes included.
    pub(crate) requests: f64,
    /// The commands of a Redis.
    pub(crate) redis: Option<Commands>,
}

pub(crate) struct Commands {
    pub(crate) scripts: f64,
    pub(crate) publishes: f64,
    pub(crate) other_requests: f64,
    pub(crate) inside_scripts: f64,
    /// The processor time of the server.
    pub(crate) cpu_s: f64,
    micros: CommandStats,
}

impl Commands {
    fn between(earlier: &CommandStats, later: &CommandStats, cpu_s: f64) -> Self {
        let mut asked = Self {
            scripts: 0.0,
            publishes: 0.0,
            other_requests: 0.0,
            inside_scripts: 0.0,
            cpu_s,
            micros: CommandStats::new(),
        };
        for (command, calls) in later {
            let calls = (calls - earlier.get(command).unwrap_or(&0)) as f64;
            match command.as_str() {
                "evalsha" | "eval" | "fcall" => asked.scripts += calls,
                "publish" | "spublish" => asked.publishes += calls,
                "info" => {} // the harness's own
                other if is_a_request(other) => asked.other_requests += calls,
                _ => asked.inside_scripts += calls,
            }
        }
        asked
    }

    /// The microseconds that the server has spent in these commands. A script's time includes the commands that it
    /// calls. This depends little on the machine.
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

/// Whether clients send this command. A server also counts commands that scripts call, and these are not called by
/// scripts.
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
