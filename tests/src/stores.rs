//! The stores for the suite, `bench` and `with-store`: the list of them, and everything that these have to know about
//! one store. A new store is a file beside this one and a line in [`ALL`].
//!
//! [`Store`] describes a store before a server runs, and [`Server`] is a running one. Both have few default methods,
//! because each store should say what may differ.

pub mod cluster;
pub mod durable;
pub mod memory;
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
use crate::proxy::Proxy;

/// Every store of this build.
pub const ALL: &[&dyn Store] = &[
    &memory::Memory,
    &redis::Redis,
    &sentinel::Sentinel,
    &cluster::Cluster,
    &durable::Durable,
    &quorum::RedisQuorum,
    &sqlite::Sqlite,
    &zookeeper::ZooKeeper,
    &zookeeper::ZooKeeperTls,
];

/// The stores that a client reaches by their URL alone, each once.
pub fn by_url() -> impl Iterator<Item = &'static dyn Store> {
    let whole = |store: &&dyn Store| store.suite() == Suite::Whole;
    ALL.iter().copied().filter(whole)
}

/// A store, whether or not a server runs.
pub trait Store: fmt::Debug + Send + Sync {
    /// The name in lower case. It is the first part of the names of facts, and an argument of `bench` and `with-store`.
    fn name(&self) -> &'static str;

    /// The error says why no server can run here, and what to do about it.
    fn available(&self) -> Result<(), String>;

    /// The promises of the store. No server has to run for this.
    fn capability(&self) -> Capability;

    /// How much of the suite runs on this store.
    fn suite(&self) -> Suite {
        Suite::Whole
    }

    /// How fast the store is, and how its timing differs from others.
    fn timings(&self) -> Timings;

    /// Whether a forked child can open its own client although its parent has one. If not, its error says so.
    fn serves_forked_children(&self) -> bool;

    /// A server for the caller alone.
    fn start(&self) -> Box<dyn Server>;

    /// A server for a fact that does not break it. Other facts may use the same server, each in its own namespace.
    fn shared(&self) -> Arc<dyn Server>;

    /// A server for measurements.
    fn start_for_load(&self) -> Box<dyn Server> {
        self.start()
    }

    /// How random histories run on it. `None` leaves them out.
    fn histories(&self) -> Option<Histories>;

    /// Its servers that speak TLS. `None` for a store without TLS, or whose TLS is tested under another name.
    fn tls(&self) -> Option<&dyn Tls> {
        None
    }
}

/// A server that facts share. Its clients have only the rights of the store's guide, by the user of this URL.
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

    /// `None`, because no fact may break it.
    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

/// How much of the suite runs on a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// All facts that its capability allows.
    Whole,
    /// Only the facts about exclusion. It is one of the other stores in another form: over another kind of connection, for
    /// which a client needs more than the URL, or with another setting.
    Exclusion,
}

/// How a store's timing differs from others.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Where an answer comes from.
    pub answers: Answers,
    /// The time from the end of a dead holder's lease until the next in line has the lock, on an idle machine.
    pub follows_the_dead: Duration,
    /// The store asks a waiter to recheck at a given time, because an earlier ticket may be dead. Otherwise the waiter
    /// learns it at its renewal.
    pub tells_when_to_recheck: bool,
}

/// Where the answer to a request comes from. This decides what can happen before it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// From the call itself: a request is never in flight.
    TheCall,
    /// From another thread of the process: the answer may be there when the request is first polled.
    AThread,
    /// From a server.
    AServer,
}

/// A running server, or what a store has instead. It ends with its value.
pub trait Server: Any + fmt::Debug + Send + Sync {
    /// The URL for other processes.
    fn url(&self) -> String;

    /// The store as clients of this process use it.
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

    /// The keys in a namespace that should not outlive its locks. Keys that keep tokens rising are left out.
    fn litter(&self, namespace: &str) -> Vec<String>;

    /// The same without marks, which stay for a minute after a release, for an enqueue that may still arrive.
    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.litter(namespace)
    }

    /// The server process, which a test may kill or cut off. `None` for an embedded store.
    fn process(&self) -> Option<&dyn ServerProcess>;
}

impl dyn Server {
    /// This server as its own type, for facts about one store only.
    pub fn downcast<S: Server>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A server that is its own process, with a port.
pub trait ServerProcess: fmt::Debug + Send + Sync {
    fn port(&self) -> u16;

    /// The URL of the same store at another port of this machine.
    fn url_at(&self, port: u16) -> String;

    /// Sends SIGKILL. Does nothing if the server is down.
    fn kill(&self);

    /// The text that an error has when the server is down. The error names the port too.
    fn says_when_down(&self) -> &'static str;

    /// Bytes by which a proxy recognises requests.
    fn marks(&self) -> Marks;

    /// A proxy to the server that can cut, freeze and delay, and the URL through it.
    fn through_a_proxy(&self) -> (Proxy, String) {
        let proxy = Proxy::to(self.port());
        let url = self.url_at(proxy.port());
        (proxy, url)
    }
}

/// Bytes that such a request contains, and no other request that a fact sends meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// In the request that takes a ticket.
    pub enqueue: &'static [u8],
    /// In the request that makes a writer's ticket a reader's.
    pub downgrade: &'static [u8],
    /// In the request that adds to a counter.
    pub count: &'static [u8],
}

/// The servers of a store that speak TLS. If the store has passwords, clients log in with the
/// [secret](crate::watch::SECRET).
pub trait Tls {
    fn schemes(&self) -> Schemes;

    /// A server that speaks only these versions of TLS, for example `TLSv1.3`. With `clients`, it asks for client
    /// certificates of that authority.
    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server>;

    /// A server that does not speak TLS.
    fn start_without(&self) -> Box<dyn Server>;

    /// The text of an error about an answer of another protocol, from a server without TLS. `None` if the client does
    /// not report what it received.
    fn not_understood(&self) -> Option<&'static str>;
}

/// The URL schemes without TLS and with TLS, and the error texts when one is used instead of the other.
#[derive(Clone, Copy, Debug)]
pub struct Schemes {
    pub plain: &'static str,
    pub encrypted: &'static str,
    pub not_encrypted: &'static str,
    pub not_plain: &'static str,
}

/// How random histories run on a store.
#[derive(Clone, Copy, Debug)]
pub struct Histories {
    /// The numbers of short and of long histories.
    pub short: u64,
    pub long: u64,
    /// The error says why none can run here, beyond [`Store::available`].
    pub available: fn() -> Result<(), String>,
    pub manner: Manner,
    pub start: fn() -> Box<dyn Stage>,
}

/// The times and limits that each store chooses for itself. Times are in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// A grant that no client hears of ends after this time.
    pub unheard: Option<u64>,
    /// The tolerance for the store's times. Zero where its clock stands still between two steps.
    pub slack: u64,
    /// On Redis, the recheck time of a waiter is computed after its whole batch.
    pub looks_after_batch: bool,
    /// A ticket that becomes the first in line, because the first has left, is asked to recheck at the end of the
    /// holders' leases.
    pub tells_first: bool,
    /// Other tests check which tickets the store asks to recheck, and when.
    pub tells_in_its_own_way: bool,
    /// A batch is carried out at once. It looks at the names of those tickets that exist.
    pub by_id: bool,
    /// A renewal always uses the ttl of the enqueue, whatever ttl it names.
    pub keeps_the_first_ttl: bool,
    /// A wake-up may come later than the answer to the request that caused it.
    pub wakes_late: bool,
}

/// A server whose clock the test moves, and whose data it can damage.
pub trait Stage {
    fn backend(&self) -> Arc<dyn Backend>;

    /// Starts a new history.
    fn begin(&mut self) {}

    /// Lets time pass. Not called where tickets live as long as sessions.
    fn pass(&mut self, time: Duration);

    /// How far the wall clock of the leases is ahead of ours.
    fn ahead(&self) -> Duration {
        Duration::ZERO
    }

    /// Loses all data. Returns `false` if it cannot.
    fn lose_data(&mut self) -> bool;

    /// Removes one key of a name, like a server that is out of memory. Returns `false` if it has no such keys.
    fn evict(&mut self, _key: &str) -> bool {
        false
    }

    /// Whether the server has noticed that this client of the namespace is gone.
    fn has_seen_the_end_of(&self, _namespace: &str, _client: usize) -> bool {
        true
    }
}
