//! `redis:`. Facts share a server. There, a client has only the rights that the store's guide
//! lists, and only in the namespaces of the facts.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};

use super::{Histories, Manner, Marks, Schemes, Server, ServerProcess, Stage, Store, Timings, Tls};
use crate::certificates::{Authority, Identity};
use crate::faketime::{Clock, FakeClock};
use crate::redis_server::RedisServer;
use crate::watch::SECRET;

/// The user that the store's guide creates.
pub const USER: &str = "locks";

#[derive(Debug)]
pub struct Redis;

impl Store for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn available(&self) -> Result<(), String> {
        // Checked only once, because every fact needs the result.
        static SERVER: OnceLock<Result<(), String>> = OnceLock::new();
        SERVER.get_or_init(RedisServer::available).clone()
    }

    fn capability(&self) -> Capability {
        backend::open("redis://127.0.0.1").unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings {
            cuts_unheard_grants: true,
            ..Timings::of_a_server(Duration::from_millis(200))
        }
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(RedisServer::start())
    }

    fn shared(&self) -> Arc<dyn Server> {
        static SHARED: OnceLock<Arc<SharedRedis>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = RedisServer::start();
                grant(&server, "fact*", SECRET);
                Arc::new(SharedRedis(server))
            })
            .clone()
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 1_000,
            long: 1_000,
            available: FakeClock::available,
            manner: Manner {
                unheard: Some(2_000),
                looks_after_batch: true,
                slack: 2_000,
                tells_first: true,
                ..Manner::default()
            },
            start: || {
                Box::new(Clocked {
                    server: RedisServer::with_clock(&[]),
                    ahead: Duration::ZERO,
                })
            },
        })
    }

    fn tls(&self) -> Option<&dyn Tls> {
        Some(self)
    }
}

/// The rights that the store's guide lists. They apply to the namespaces that match a pattern, in
/// place of the namespace `lock`.
pub fn documented(namespaces: &str, password: &str) -> Vec<String> {
    adapted(of_the_page("# Minimum rights", password), namespaces)
}

fn adapted(words: Vec<String>, namespaces: &str) -> Vec<String> {
    let namespace = format!("{namespaces}:1:");
    let adapted = words.iter().map(|word| word.replace("lock:1:", &namespace));
    let words: Vec<_> = adapted.collect();
    let keys = format!("~{namespace}*");
    assert!(words.contains(&keys), "no {keys} in the page's rights");
    words
}

/// The additional rights for locks that replicas must have stored.
pub fn documented_for_durability() -> Vec<String> {
    words_of("## With durability")[3..].to_vec()
}

/// The rights that the page lists for the nodes of a cluster.
pub fn documented_in_a_cluster(namespaces: &str, password: &str) -> Vec<String> {
    adapted(of_the_page("## In a cluster", password), namespaces)
}

/// The rights at a sentinel.
pub fn documented_at_sentinel(password: &str) -> Vec<String> {
    of_the_page("## At the sentinels", password)
}

fn of_the_page(heading: &str, password: &str) -> Vec<String> {
    let secret = format!(">{password}");
    let words = words_of(heading).into_iter();
    let words: Vec<_> = words.map(|word| word.replace(">secret", &secret)).collect();
    assert!(words.contains(&secret), "no password in the page's rights");
    words
}

fn words_of(heading: &str) -> Vec<String> {
    let page = include_str!("../../../lockcore/src/backend/redis/guide.md");
    let rights = page.split(heading).nth(1).unwrap();
    let rights = rights.split("```").nth(1).unwrap();
    let words: Vec<_> = (rights.split_whitespace().skip(1).map(String::from)).collect();
    assert_eq!(words[..3], ["ACL", "SETUSER", USER]);
    words
}

/// Makes the guide's user the only user besides the harness.
pub fn grant(server: &RedisServer, namespaces: &str, password: &str) {
    set_alone(server, &documented(namespaces, password));
    add(server, &words_of("## To list names"));
}

fn add(server: &RedisServer, words: &[String]) {
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Adds the rights for locks that replicas must have stored.
pub fn grant_durability(server: &RedisServer) {
    let mut words = vec!["ACL".to_owned(), "SETUSER".to_owned(), USER.to_owned()];
    words.extend(documented_for_durability());
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Like [`grant`], at a node of a cluster.
pub fn grant_in_a_cluster(node: &RedisServer, namespaces: &str, password: &str) {
    set_alone(node, &documented_in_a_cluster(namespaces, password));
    add(node, &words_of("## To list names"));
}

/// Like [`grant`], at a node of a quorum. There the user needs a few more rights.
pub fn grant_at_node(node: &RedisServer, namespaces: &str, password: &str) {
    let mut words = documented(namespaces, password);
    let page = include_str!("../../../lockcore/src/backend/redis/quorum/guide.md");
    let rights = page.split("# Minimum rights").nth(1).unwrap();
    let rights = rights.split("```").nth(1).unwrap().split_whitespace();
    words.extend(
        rights
            .filter(|word| word.starts_with('+'))
            .map(String::from),
    );
    set_alone(node, &words);
}

/// Like [`grant`], at a sentinel.
pub fn grant_at_sentinel(sentinel: &RedisServer, password: &str) {
    set_alone(sentinel, &documented_at_sentinel(password));
}

fn set_alone(server: &RedisServer, words: &[String]) {
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
    server.command::<()>(&["ACL", "SETUSER", "default", "off"]);
}

impl Server for RedisServer {
    fn url(&self) -> String {
        self.url()
    }

    /// All keys except the last number of each name, which stays so that the tokens of the name
    /// rise.
    fn litter(&self, namespace: &str) -> Vec<String> {
        let mut keys = self.keys(&format!("{namespace}:*"));
        keys.retain(|key| {
            // Counters and values stay for a day. The name is in braces.
            if key.ends_with("}:count") || key.ends_with("}:value:count") {
                return false;
            }
            let kind: String = self.command(&["TYPE", key]);
            if kind != "string" {
                return kind != "none";
            }
            let value: Option<String> = self.command(&["GET", key]);
            let is_number = |value: String| value.len() == 16 && value.parse::<u64>().is_ok();
            !value.is_none_or(is_number)
        });
        keys
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        let mut keys = self.litter(namespace);
        keys.retain(|key| {
            let kind: String = self.command(&["TYPE", key]);
            let state = || self.command::<Option<String>>(&["GET", key]);
            let is_mark = key.contains("}:gone:");
            !is_mark && (kind != "string" || !state().is_some_and(only_tells_of_marks))
        });
        keys
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        Some(self)
    }
}

/// Whether `state` is the state of a name without tickets that has only marks. `line.lua` describes
/// the format.
fn only_tells_of_marks(state: String) -> bool {
    let [head, next, out] = [30..43, 43..56, 56..66].map(|place| state.get(place));
    state.len() == 76 && head == next && out == Some("0000000000")
}

impl ServerProcess for RedisServer {
    fn port(&self) -> u16 {
        self.port()
    }

    fn url_at(&self, port: u16) -> String {
        format!("redis://127.0.0.1:{port}")
    }

    fn kill(&self) {
        self.kill();
    }

    fn marks(&self) -> Marks {
        Marks {
            enqueue: b"EVALSHA",
            // The number of permits that this renewal keeps: one. The renewal of a writer keeps all
            // of them.
            downgrade: b"\r\n$10\r\n0000000001\r\n",
            count: b"\r\n$3\r\nadd\r\n",
        }
    }
}

/// A server for clients with the rights of the guide's user.
#[derive(Debug)]
struct SharedRedis(RedisServer);

impl Server for SharedRedis {
    fn url(&self) -> String {
        self.0.url_with_user(USER, SECRET)
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.0.litter(namespace)
    }

    /// `None`, because no fact may break this server.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

impl Tls for Redis {
    fn schemes(&self) -> Schemes {
        Schemes {
            plain: "redis",
            encrypted: "rediss",
            // The server takes the bytes of TLS for a command and waits for the rest of it. So it
            // behaves like a server that hangs.
            not_encrypted: "a server without TLS is silent too: redis:// is for it",
            not_plain: "if this port speaks TLS, write rediss://",
            says_which: false,
        }
    }

    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server> {
        let versions = versions.join(" ");
        let extra = ["--requirepass", SECRET, "--tls-protocols", &versions];
        Box::new(RedisServer::with_tls(identity, clients, &extra))
    }

    fn start_without(&self) -> Box<dyn Server> {
        Box::new(RedisServer::with(&["--requirepass", SECRET]))
    }

    fn not_understood(&self) -> Option<&'static str> {
        Some("is not Redis")
    }
}

/// A server whose wall clock is ahead.
struct Clocked {
    server: RedisServer,
    ahead: Duration,
}

impl Stage for Clocked {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&self.server.url()).unwrap()
    }

    fn pass(&mut self, time: Duration) {
        self.ahead += time;
        self.server.set_clock(Clock::Ahead(self.ahead));
    }

    fn ahead(&self) -> Duration {
        self.ahead
    }

    fn lose_data(&mut self) -> bool {
        self.server.flush();
        true
    }

    fn evict(&mut self, key: &str) -> bool {
        self.server.command::<()>(&["DEL", key]);
        true
    }

    fn has_seen_the_end_of(&self, namespace: &str, client: usize) -> bool {
        let channel = format!("{namespace}:1:wake:{client:016x}");
        let (_, count): (String, u64) = self.server.command(&["PUBSUB", "NUMSUB", &channel]);
        count == 0
    }
}
