//! The stores of the suite, of the bench and of `with-store`: everything that they have to know of one store in
//! particular, and the list of them. A new store is a file beside this one and a line in [`ALL`].
//!
//! [`Store`] is what can be said before a server runs, and [`Server`] is one that does. Both have few defaults: what could
//! differ has to be said of each store.

pub mod memory;
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
    &sqlite::Sqlite,
    &zookeeper::ZooKeeper,
    &zookeeper::ZooKeeperTls,
];

/// Each store once: those that a client reaches by their URL alone.
pub fn by_url() -> impl Iterator<Item = &'static dyn Store> {
    let whole = |store: &&dyn Store| store.suite() == Suite::Whole;
    ALL.iter().copied().filter(whole)
}

/// A store, whether or not a server runs.
pub trait Store: fmt::Debug + Send + Sync {
    /// In lower case: the first part of the names of its facts, and what `bench` and `with-store` are told.
    fn name(&self) -> &'static str;

    /// Why no server can run here, and what to do about it.
    fn available(&self) -> Result<(), String>;

    /// What it promises; nothing has to run for that.
    fn capability(&self) -> Capability;

    /// How much of the suite it is put through.
    fn suite(&self) -> Suite {
        Suite::Whole
    }

    /// How fast it is, and in what ways it differs in time.
    fn timings(&self) -> Timings;

    /// Whether a child that was forked can open a client of its own, though its parent has one. If not, it is told so.
    fn serves_forked_children(&self) -> bool;

    /// A server that is the caller's alone.
    fn start(&self) -> Box<dyn Server>;

    /// A server for one fact that does not break it. Others may use the same server, each in a namespace of its own.
    fn shared(&self) -> Arc<dyn Server>;

    /// A server that is to be measured.
    fn start_for_load(&self) -> Box<dyn Server> {
        self.start()
    }

    /// How random histories are played on it; `None` leaves them out.
    fn histories(&self) -> Option<Histories>;

    /// Its servers that speak TLS; `None` for a store that does not, or that is tested under another name.
    fn tls(&self) -> Option<&dyn Tls> {
        None
    }
}

/// How much of the suite a store is put through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// All facts that its capability allows.
    Whole,
    /// Those of exclusion only: it is one of the other stores over another kind of connection, for which a client has to
    /// know more than the URL.
    Exclusion,
}

/// In what ways a store differs in time.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Where an answer comes from.
    pub answers: Answers,
    /// From the end of a dead holder's lease until the next in line has the lock, on an idle machine.
    pub follows_the_dead: Duration,
    /// A waiter is told when to look for itself, because one before it may be dead. Otherwise it finds out when it renews.
    pub tells_when_to_recheck: bool,
}

/// Where the answer to a request comes from, which decides what can happen before it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// From the call itself: no request is ever under way.
    TheCall,
    /// From another thread of the process: it may be there when the request is first looked at.
    AThread,
    /// From a server.
    AServer,
}

/// A server that runs, or what a store has instead. It is gone with its value.
pub trait Server: Any + fmt::Debug + Send + Sync {
    /// Where other processes find it.
    fn url(&self) -> String;

    /// The store itself, as clients of this process use it.
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

    /// What is stored in a namespace and should not outlive its locks. Whatever keeps tokens rising may stay.
    fn litter(&self, namespace: &str) -> Vec<String>;

    /// The same without the marks that stay for a minute after a release, for an enqueue that may still arrive.
    fn litter_but_marks(&self, namespace: &str) -> Vec<String> {
        self.litter(namespace)
    }

    /// The process behind it, to be killed and cut off; `None` for an embedded store.
    fn process(&self) -> Option<&dyn ServerProcess>;
}

impl dyn Server {
    /// This very kind of server, for facts about one store only.
    pub fn downcast<S: Server>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A server that is a process of its own, behind a port.
pub trait ServerProcess: fmt::Debug + Send + Sync {
    fn port(&self) -> u16;

    /// The URL of the same store at another port of this machine.
    fn url_at(&self, port: u16) -> String;

    /// SIGKILL. Nothing happens when it is down already.
    fn kill(&self);

    /// The words for its being down, in an error that names the port too.
    fn says_when_down(&self) -> &'static str;

    /// What tells requests apart on their way to it.
    fn marks(&self) -> Marks;

    /// A way to it that can be cut, frozen and delayed, and the URL that leads through it.
    fn through_a_proxy(&self) -> (Proxy, String) {
        let proxy = Proxy::to(self.port());
        let url = self.url_at(proxy.port());
        (proxy, url)
    }
}

/// Bytes that are in such a request and in no other that a fact sends meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// Of the request that takes a ticket.
    pub enqueue: &'static [u8],
    /// Of the request that makes a writer's ticket a reader's.
    pub downgrade: &'static [u8],
}

/// The servers of a store that speak TLS. Clients log in with the [secret](crate::watch::SECRET), where the store has
/// passwords.
pub trait Tls {
    fn schemes(&self) -> Schemes;

    /// A server that speaks only these versions of TLS, as `TLSv1.3`. It asks clients for a certificate of `clients`, if that
    /// is given.
    fn start(
        &self,
        identity: &Identity,
        clients: Option<&Authority>,
        versions: &[&str],
    ) -> Box<dyn Server>;

    /// A server that does not speak TLS.
    fn start_without(&self) -> Box<dyn Server>;

    /// The words for an answer that is not of this store, from a server without TLS. `None` if its client says nothing of
    /// what it has heard.
    fn not_understood(&self) -> Option<&'static str>;
}

/// Schemes without TLS and with it, and what somebody is told who uses one where the other is needed.
#[derive(Clone, Copy, Debug)]
pub struct Schemes {
    pub plain: &'static str,
    pub encrypted: &'static str,
    pub not_encrypted: &'static str,
    pub not_plain: &'static str,
}

/// How random histories are played on a store.
#[derive(Clone, Copy, Debug)]
pub struct Histories {
    /// How many short ones, and how many long ones.
    pub short: u64,
    pub long: u64,
    /// Why none can be played here, beyond [`Store::available`].
    pub available: fn() -> Result<(), String>,
    pub manner: Manner,
    pub start: fn() -> Box<dyn Stage>,
}

/// What a store is free to do in its own way. Times are in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// A grant that nobody hears ends after this time.
    pub unheard: Option<u64>,
    /// How exactly the store's times can be foretold. Zero where its clock stands still between two steps.
    pub slack: u64,
    /// On Redis: the time after which a waiter rechecks is that after the whole of its batch.
    pub looks_after_batch: bool,
    /// A ticket that becomes the first in line, because the first has left, is told when to look after the holders.
    pub tells_first: bool,
    /// Whom it tells to look again, and when, is tested elsewhere.
    pub tells_in_its_own_way: bool,
    /// A batch is carried out at once, and looks at the names of those of its tickets that are there.
    pub by_id: bool,
    /// A renewal is for the ttl of the enqueue, whatever ttl it names.
    pub keeps_the_first_ttl: bool,
    /// A wake-up may come later than the answer to the request that caused it.
    pub wakes_late: bool,
}

/// A server whose clock is in the hands of a test, and whose data it can damage.
pub trait Stage {
    fn backend(&self) -> Arc<dyn Backend>;

    /// A new history begins.
    fn begin(&mut self) {}

    /// Lets time pass. Not called where tickets live as long as sessions do.
    fn pass(&mut self, time: Duration);

    /// How far the wall clock that leases are counted on is ahead of ours.
    fn ahead(&self) -> Duration {
        Duration::ZERO
    }

    /// `false` if it cannot.
    fn lose_data(&mut self) -> bool;

    /// Removes one key of a name, as a server does that runs out of memory; `false` if it has no such keys.
    fn evict(&mut self, _key: &str) -> bool {
        false
    }

    /// Whether it has noticed that this client of the namespace is gone.
    fn has_seen_the_end_of(&self, _namespace: &str, _client: usize) -> bool {
        true
    }
}
