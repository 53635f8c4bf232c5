//! The stores for the suite, for `bench` and for `with-store`: a list of all stores, and everything
//! that these programs must know about each store. To add a store, write a file beside this one and
//! add a line to [`ALL`].
//!
//! [`Store`] describes a store whose server need not run. [`Server`] is a running server. A
//! default of these traits is what most stores do, so that a store states only its exceptions.

pub mod cluster;
pub mod durable;
pub mod etcd;
pub mod memory;
pub mod mysql;
pub mod postgres;
pub mod quorum;
pub mod redis;
pub mod sentinel;
pub mod sqlite;
pub mod zookeeper;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};
use lockcore::{Builder, Error, Locks};

use crate::certificates::{Authority, Identity};
use crate::fact;
use crate::proxy::Proxy;

/// Every store of this build.
pub const ALL: &[&dyn Store] = &[
    &memory::Memory,
    &redis::Redis,
    &sentinel::Sentinel,
    &cluster::Cluster,
    &durable::Durable,
    &quorum::RedisQuorum,
    &etcd::Etcd,
    &mysql::Mysql,
    &postgres::Postgres,
    &sqlite::Sqlite,
    &zookeeper::ZooKeeper,
    &zookeeper::ZooKeeperTls,
];

/// The stores that a client reaches by their URL alone, each once.
pub fn by_url() -> impl Iterator<Item = &'static dyn Store> {
    let is_named = |store: &&dyn Store| store.suite() != Suite::Exclusion;
    ALL.iter().copied().filter(is_named)
}

/// A store. Its server need not run.
pub trait Store: fmt::Debug + Send + Sync {
    /// The name in lower case. It is the first part of the names of facts, and an argument of
    /// `bench` and `with-store`.
    fn name(&self) -> &'static str;

    /// Whether a server can run here. The error says why not, and what to do about it.
    fn available(&self) -> Result<(), String>;

    /// The promises of the store. No server needs to run for this.
    fn capability(&self) -> Capability;

    /// How much of the suite runs on this store.
    fn suite(&self) -> Suite {
        Suite::Whole
    }

    /// How fast the store is, and how its timing differs from others.
    fn timings(&self) -> Timings;

    /// Whether a forked child can open a client of its own while its parent has one. If not, the
    /// error of the child's client says so.
    fn serves_forked_children(&self) -> bool {
        true
    }

    /// A server for the caller alone.
    fn start(&self) -> Box<dyn Server>;

    /// A server for a fact that does not break its server. Other facts may use the same server,
    /// each in its own namespace.
    fn shared(&self) -> Arc<dyn Server>;

    /// A server for measurements.
    fn start_for_load(&self) -> Box<dyn Server> {
        self.start()
    }

    /// How random histories run on this store. `None` if they do not run.
    fn histories(&self) -> Option<Histories>;

    /// The servers of this store that support TLS. `None` for a store without TLS. It is also
    /// `None` for another form of `redis:` or `zookeeper:`: the facts of these two stores test the
    /// code that it uses.
    fn tls(&self) -> Option<&dyn Tls> {
        None
    }
}

/// A server that facts share. Its clients log in as the user in `url`. This user has only the
/// rights that the store's guide lists.
#[derive(Debug)]
struct Shared<S> {
    server: S,
    url: String,
}

impl<S: Server> Server for Shared<S> {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn litter(&self, namespace: &str) -> Vec<String> {
        self.server.litter(namespace)
    }

    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.server.litter_but_marks(namespace)
    }

    /// `None`, because no fact may break this server.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// How much of the suite runs on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// All facts that its capability allows.
    Whole,
    /// All but the groups that test only the core, above the contract of a store, and under strict
    /// order only the facts about exclusion and crowds. The others run on another store with the same
    /// capability, and on this one only with `--long`.
    Verbs,
    /// Only the facts about exclusion. The store is another form of a store that runs all facts. It
    /// has another kind of connection or a special setting, or its client needs more than a URL.
    Exclusion,
}

impl Suite {
    /// The suite of a store beside another one with the same capability, which runs the whole suite.
    /// With `--long` both run all of it.
    fn beside_another(suite: Suite) -> Suite {
        if fact::long() { Suite::Whole } else { suite }
    }
}

/// How a store's timing differs from others.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Where an answer comes from.
    pub answers: Answers,
    /// The time from the end of a dead holder's lease until the next in line has the lock, on an
    /// idle machine.
    pub follows_the_dead: Duration,
    /// Whether the store asks a waiter to recheck at a given time, because an earlier ticket may be
    /// dead. If not, the waiter learns of the dead ticket at its renewal.
    pub tells_when_to_recheck: bool,
    /// Whether a grant that no client hears of ends after two seconds. If not, it lasts as long as
    /// the lease of the ticket, or as the session of its client.
    pub cuts_unheard_grants: bool,
}

impl Timings {
    /// A server that keeps leases, and asks the first in line to recheck when the lease before it
    /// ends.
    fn of_a_server(follows_the_dead: Duration) -> Self {
        Self {
            answers: Answers::AServer,
            follows_the_dead,
            tells_when_to_recheck: true,
            cuts_unheard_grants: false,
        }
    }
}

/// Where the answer to a request comes from. This decides what may happen before the answer
/// arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// From the call itself: a request is never in flight.
    TheCall,
    /// From another thread of the process: the answer may be there when the request is first
    /// polled.
    AThread,
    /// From a server.
    AServer,
}

/// A running server, or its counterpart for a store without a server. It ends when this value is
/// dropped.
pub trait Server: Any + fmt::Debug + Send + Sync {
    /// The URL for other processes.
    fn url(&self) -> String;

    /// The store, as clients of this process use it.
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&self.url()).unwrap()
    }

    /// A client in this process.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`].
    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        builder.url(self.url()).build()
    }

    /// The keys in a namespace that should be gone when its locks are gone. Keys that keep tokens
    /// rising are left out.
    fn litter(&self, namespace: &str) -> Vec<String>;

    /// The keys of [`litter`](Self::litter) without marks. A mark stays for a minute after a
    /// release, because the enqueue may still arrive.
    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.litter(namespace)
    }

    /// The server process. A test may kill it or cut it off. `None` for an embedded store.
    fn process(&self) -> Option<&dyn ServerProcess>;
}

impl dyn Server {
    /// This server as a value of its own type, for facts about one store only.
    pub fn downcast<S: Server>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A server that is a process of its own and has a port.
pub trait ServerProcess: fmt::Debug + Send + Sync {
    fn port(&self) -> u16;

    /// The URL of the same store at another port of this machine.
    fn url_at(&self, port: u16) -> String;

    /// Sends SIGKILL. Does nothing if the server is down.
    fn kill(&self);

    /// The text that an error contains when the server is down. The error also contains the port.
    fn says_when_down(&self) -> &'static str {
        "refused"
    }

    /// Bytes by which a proxy recognises requests.
    fn marks(&self) -> Marks;

    /// A proxy to the server, and the URL through this proxy. It can cut, freeze and delay
    /// connections.
    fn through_a_proxy(&self) -> (Proxy, String) {
        let proxy = Proxy::to(self.port());
        let url = self.url_at(proxy.port());
        (proxy, url)
    }
}

/// Bytes that occur in a request of the given kind, and in no other request that a fact sends
/// meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// In the request that takes a ticket.
    pub enqueue: &'static [u8],
    /// In the request that makes a writer's ticket a reader's.
    pub downgrade: &'static [u8],
    /// In the request that adds to a counter.
    pub count: &'static [u8],
}

/// The servers of a store with TLS. If the store has passwords, clients log in with the
/// [secret](crate::watch::SECRET).
pub trait Tls {
    fn schemes(&self) -> Schemes;

    /// How many connections a client opens at the same time when it connects.
    fn connections_at_once(&self) -> u64 {
        1
    }

    /// What a URL has behind the host.
    fn database(&self) -> &'static str {
        ""
    }

    /// A server that accepts only these versions of TLS, for example `TLSv1.3`. With `clients`, it
    /// requires client certificates of this authority.
    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server>;

    /// A server without TLS.
    fn start_without(&self) -> Box<dyn Server>;

    /// Whether the server tells the client in plain text what it can do, before the client says
    /// anything.
    fn server_speaks_first(&self) -> bool {
        false
    }

    /// The text of the error that a client returns when a server without TLS answers in another
    /// protocol. `None` if the client does not report such an answer.
    fn not_understood(&self) -> Option<&'static str>;
}

/// The URL schemes without TLS and with TLS, and the error texts when one is used instead of the
/// other.
#[derive(Clone, Copy, Debug)]
pub struct Schemes {
    pub plain: &'static str,
    pub encrypted: &'static str,
    pub not_encrypted: &'static str,
    pub not_plain: &'static str,
    /// Whether a server says that it refuses one of the two. Other servers end the connection or
    /// say nothing, as servers in trouble do.
    pub says_which: bool,
}

/// How random histories run on a store.
#[derive(Clone, Copy, Debug)]
pub struct Histories {
    /// The numbers of short and of long histories.
    pub short: u64,
    pub long: u64,
    /// Whether histories can run here, if [`Store::available`] is `Ok`. The error says why not.
    pub available: fn() -> Result<(), String>,
    pub manner: Manner,
    pub start: fn() -> Box<dyn Stage>,
}

/// The times and limits that each store may choose. Times are in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// A grant that no client learns of ends after this time.
    pub unheard: Option<u64>,
    /// The tolerance for the store's times. Zero if the store's clock stands still between two
    /// steps.
    pub slack: u64,
    /// Whether the recheck time of a waiter is computed at the end of its whole batch, as on Redis.
    pub looks_after_batch: bool,
    /// Whether the store asks the first in line to recheck at the end of the holders' leases. It
    /// does so when a ticket becomes the first because the one before has left.
    pub tells_first: bool,
    /// Whether other tests check which tickets the store asks to recheck, and when.
    pub tells_in_its_own_way: bool,
    /// Whether the store carries out a whole batch before it answers. Such a store computes the
    /// grants of a name only if the request's ticket exists.
    pub by_id: bool,
    /// Whether a renewal always uses the ttl of the enqueue, whatever ttl the renewal states.
    pub keeps_the_first_ttl: bool,
    /// Whether a mark stays when the session of its client has ended. Without sessions, marks always
    /// stay.
    pub marks_outlive_sessions: bool,
    /// Whether a wake-up may come later than the answer to the request that caused it.
    pub wakes_late: bool,
}

/// A server whose clock the test moves, and whose data it can damage.
pub trait Stage {
    fn backend(&self) -> Arc<dyn Backend>;

    /// Starts a new history.
    fn begin(&mut self) {}

    /// Lets time pass. Not called for a store whose tickets live as long as sessions.
    fn pass(&mut self, time: Duration);

    /// How far the clock of the store's leases is ahead of this process's wall clock.
    fn ahead(&self) -> Duration {
        Duration::ZERO
    }

    /// Removes all data. Returns `false` if the store cannot do this.
    fn lose_data(&mut self) -> bool;

    /// Removes one key of a name, like a server that is out of memory. Returns `false` if the store
    /// has no such keys.
    fn evict(&mut self, _key: &str) -> bool {
        false
    }

    /// Whether the server has noticed that this client of the namespace is gone.
    fn has_seen_the_end_of(&self, _namespace: &str, _client: usize) -> bool {
        true
    }
}
