//! What a fact gets: a store to itself, as far as it can tell.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{self, Backend};
use lockcore::{Builder, Error, ErrorKind, Fair, Guard, Lock, Locks, testing};
use tests::certificates::Authority;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::sqlite_file::SqliteFile;
use tests::watch::SECRET;
use tests::zookeeper_server::ZooKeeperServer;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::counted::{Counted, Counts};
use crate::{redis_rights, traces};

/// The stores of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Redis,
    ZooKeeper,
    /// The same through its TLS.
    ZooKeeperTls,
    Sqlite,
}

/// A store in a namespace that no other fact uses.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) kind: Kind,
    pub(crate) fair: Fair,
    pub(crate) namespace: String,
    /// Whose clients are as good as those of several processes.
    memory: Option<testing::Store>,
    /// One for each fact: nothing has to be started for it.
    sqlite: Option<SqliteFile>,
}

/// Long enough for a slow machine, short enough to notice a hang.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// What a bound allows beyond what it is for: this machine runs other tests too.
pub(crate) const SLACK: Duration = Duration::from_millis(1500);

/// No fact takes longer; one that does hangs.
const LONGEST_FACT: Duration = Duration::from_secs(120);

type Body = fn(Store) -> Pin<Box<dyn Future<Output = ()>>>;

/// The policies that facts hold under: the default, and one ticket per request.
pub(crate) const DEFAULT: Fair = Fair::Local(Duration::from_millis(50));

/// A fact for one store, run on a multi-threaded runtime of its own.
pub(crate) fn fact(kind: Kind, fair: Fair, group: &str, name: &str, body: Body) -> Trial {
    let needs = match kind {
        Kind::Memory | Kind::Sqlite => Ok(()),
        Kind::Redis => RedisServer::available(),
        Kind::ZooKeeper | Kind::ZooKeeperTls => ZooKeeperServer::available(),
    };
    let strict = if fair == Fair::Strict { "::strict" } else { "" };
    let name = format!("{kind:?}{strict}::{group}::{name}").to_lowercase();
    tests::fact::fact(name, needs, move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let runtime = LeftAlone(Some(runtime));
        runtime.0.as_ref().unwrap().block_on(async {
            tokio::time::timeout(LONGEST_FACT, body(Store::new(kind, fair)))
                .await
                .expect("hangs");
        });
    })
}

/// A runtime whose end waits for none of its threads: one that hangs makes its fact fail, and not the run hang with it.
struct LeftAlone(Option<Runtime>);

impl Drop for LeftAlone {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// The facts of a module, for one store, under one policy or (when none is given) under both.
#[macro_export]
macro_rules! store_facts {
    ($kind:expr; $($name:ident)*) => {{
        let mut trials = $crate::store_facts![$kind, $crate::store::DEFAULT; $($name)*];
        trials.extend($crate::store_facts![$kind, lockcore::Fair::Strict; $($name)*]);
        trials
    }};
    ($kind:expr, $fair:expr; $($name:ident)*) => {{
        // That of a module below is the group's.
        let group = module_path!().split("::").nth(1).unwrap();
        vec![$($crate::store::fact($kind, $fair, group, stringify!($name), |store| Box::pin($name(store)))),*]
    }};
}

impl Store {
    fn new(kind: Kind, fair: Fair) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self {
            kind,
            fair,
            namespace: format!("fact{number}"),
            memory: (kind == Kind::Memory).then(testing::Store::new),
            sqlite: (kind == Kind::Sqlite).then(SqliteFile::new),
        }
    }

    /// A client; another one each time.
    pub(crate) fn client(&self) -> Locks {
        self.client_with(Locks::builder())
    }

    pub(crate) fn client_with(&self, builder: Builder) -> Locks {
        let builder = builder.namespace(&self.namespace).fair(self.fair);
        match &self.memory {
            Some(store) => store.client_with(builder).unwrap(),
            None => self
                .trusted(builder)
                .url(self.url_for_long_leases())
                .build()
                .unwrap(),
        }
    }

    /// The store itself.
    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        match &self.memory {
            Some(store) => Arc::new(store.clone()),
            None => backend::open(&self.url_for_long_leases()).unwrap(),
        }
    }

    fn trusted(&self, builder: Builder) -> Builder {
        match self.kind {
            Kind::ZooKeeperTls => builder.ca_file(authority().file()),
            _ => builder,
        }
    }

    /// A client whose store counts what it is asked.
    pub(crate) fn counted(&self, fair: Fair) -> (Locks, Arc<Counts>) {
        let (counted, counts) = Counted::around(self.backend());
        let locks = Locks::builder()
            .namespace(&self.namespace)
            .fair(fair)
            .backend(counted);
        (locks.build().unwrap(), counts)
    }

    pub(crate) fn url(&self) -> String {
        match self.kind {
            Kind::Memory => "memory:".into(),
            Kind::Sqlite => self.file().url(),
            Kind::Redis => shared_redis().url_with_user(redis_rights::USER, SECRET),
            Kind::ZooKeeper => shared_zookeeper().url(),
            Kind::ZooKeeperTls => shared_encrypted_zookeeper().url(),
        }
    }

    /// Where a session carries the lease, one that is as long as the longest ttl of a fact.
    fn url_for_long_leases(&self) -> String {
        match self.kind {
            Kind::ZooKeeper | Kind::ZooKeeperTls => self.url() + "?session_timeout=60s",
            Kind::Memory | Kind::Redis | Kind::Sqlite => self.url(),
        }
    }

    /// The file of a fact for SQLite.
    pub(crate) fn file(&self) -> &SqliteFile {
        self.sqlite.as_ref().unwrap()
    }

    /// What is stored in the namespace that is neither the remembered number of a name nor a
    /// ticket: on Redis, everything but hashes with the one field `last`; on SQLite, rows of any other table; on ZooKeeper
    /// the tickets too (what they are in is removed by the server).
    pub(crate) fn litter(&self) -> Vec<String> {
        match self.kind {
            Kind::Memory => Vec::new(),
            Kind::Redis => litter(shared_redis(), &self.namespace),
            Kind::ZooKeeper => shared_zookeeper().ephemerals(&format!("/{}:", self.namespace)),
            Kind::ZooKeeperTls => {
                shared_encrypted_zookeeper().ephemerals(&format!("/{}:", self.namespace))
            }
            Kind::Sqlite => self.file().litter(),
        }
    }
}

/// The server that facts share which do not break it. All that a client may do there is what the store's page says is
/// needed, and only in the facts' namespaces.
pub(crate) fn shared_redis() -> &'static RedisServer {
    static SERVER: OnceLock<RedisServer> = OnceLock::new();
    SERVER.get_or_init(|| {
        let server = RedisServer::start();
        redis_rights::grant(&server, "fact*", SECRET);
        server
    })
}

/// The same for ZooKeeper.
pub(crate) fn shared_zookeeper() -> &'static ZooKeeperServer {
    static SERVER: OnceLock<ZooKeeperServer> = OnceLock::new();
    SERVER.get_or_init(ZooKeeperServer::start)
}

fn shared_encrypted_zookeeper() -> &'static ZooKeeperServer {
    static SERVER: OnceLock<ZooKeeperServer> = OnceLock::new();
    SERVER.get_or_init(|| {
        let server = ZooKeeperServer::with_tls(&authority().server(&["127.0.0.1"]), None, &[]);
        // Java loads its TLS at the first handshake, which takes longer on a busy machine than a client waits for it.
        let patient = Locks::builder()
            .url(server.url())
            .ca_file(authority().file())
            .op_timeout(3 * SOON);
        let first = || {
            let runtime = Runtime::new().unwrap();
            runtime.block_on(async { patient.build().unwrap().ready(3 * SOON).await.unwrap() })
        };
        // On a thread of its own: this one is a runtime's already.
        std::thread::scope(|scope| scope.spawn(first).join().unwrap());
        server
    })
}

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(Authority::new)
}

/// Keys of a namespace beyond those that keep the tokens rising.
pub(crate) fn litter(server: &RedisServer, namespace: &str) -> Vec<String> {
    let mut keys = server.keys(&format!("{namespace}:*"));
    keys.retain(|key| {
        let is_hash: String = server.command(&["TYPE", key]);
        if is_hash != "hash" {
            return true;
        }
        let fields: Vec<String> = server.command(&["HKEYS", key]);
        fields != ["last"]
    });
    keys
}

/// Waits until nobody holds or waits for a name and nothing else is left: by the clean-up, far
/// before any lease ends.
pub(crate) async fn assert_nothing_left(store: &Store, locks: &Locks, name: &str) {
    eventually("nothing is left", Duration::from_secs(3), async || {
        locks.inspect(name).await.unwrap().is_empty() && store.litter().is_empty()
    })
    .await;
}

/// The kind of an expected error.
pub(crate) fn kind<T: Debug>(outcome: Result<T, Error>) -> ErrorKind {
    let error = outcome.expect_err("should have failed");
    shows_no_password(&error);
    error.kind()
}

pub(crate) fn shows_no_password(shown: &impl Debug) {
    let text = format!("{shown:?} {shown:#?}");
    assert!(
        !text.contains(SECRET) && !text.contains(traces::WRONG),
        "{text}"
    );
}

/// Waits until so many, holders and waiters together, are at a name: tickets at the store, and who
/// waits inside this client.
pub(crate) async fn tickets(locks: &Locks, name: &str, count: usize) {
    eventually("the line has formed", SOON, async || {
        let places = locks.inspect(name).await.unwrap();
        let local: u32 = places.iter().map(|place| place.local_waiters).sum();
        places.len() + local as usize == count
    })
    .await;
}

/// A task that asks.
pub(crate) fn begin(lock: Lock) -> JoinHandle<Result<Guard, Error>> {
    tokio::spawn(async move { lock.acquire().await })
}

/// Releases and sees that it was held to the end.
pub(crate) async fn give_back(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), lockcore::Release::Released);
}
