//! Provides the store that a fact gets. Each fact has a namespace of its own, so it sees nothing of
//! other facts.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{Backend, Capability};
pub(crate) use lockcore::testing::conformance::steps::{
    A_FEW_MILLIS, LEASE, SOON, STALL, begin, give_back, soon, tickets,
};
use lockcore::testing::conformance::{self, Fact, Subject};
use lockcore::{Builder, Error, ErrorKind, Fair, Locks};
use tests::eventually::eventually;
use tests::sqlite_file::SqliteFile;
use tests::stores::{self, Server, Suite, Timings};
use tests::watch::SECRET;
use tokio::runtime::Runtime;

use crate::counted::{Counted, Counts};
use crate::traces;

/// The store that a fact is about. The list is [`stores::ALL`].
pub(crate) type Kind = &'static dyn stores::Store;

/// A store in a namespace that no other fact uses.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) kind: Kind,
    pub(crate) fair: Fair,
    pub(crate) namespace: String,
    server: Arc<dyn Server>,
}

/// The time that facts add to each time limit, because this machine runs other tests too.
pub(crate) const SLACK: Duration = Duration::from_millis(1500);

/// How long a request that a fact sends itself waits for its answer.
pub(crate) const PATIENCE: Duration = Duration::MAX;

/// No fact takes longer than this. A fact that does so hangs.
const LONGEST_FACT: Duration = Duration::from_secs(120);

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// The policies that facts run under: the default, and one ticket per request.
pub(crate) const DEFAULT: Fair = Fair::Local(Duration::from_millis(50));

/// A fact for one store. It runs on a multi-threaded runtime of its own.
pub(crate) fn fact(
    kind: Kind,
    fair: Fair,
    group: &str,
    name: &str,
    body: impl FnOnce(Store) -> Running + Send + 'static,
) -> Trial {
    let strict = if fair == Fair::Strict { "::strict" } else { "" };
    let name = format!("{}{strict}::{group}::{name}", kind.name());
    tests::fact::fact(name, kind.available(), move || {
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

/// The facts of the conformance kit, as far as this store's suite uses them. Every store must pass
/// them, including stores outside this workspace.
pub(crate) fn conformance(kind: Kind) -> Vec<Trial> {
    let capability = kind.capability();
    let mut facts = conformance::facts();
    facts.retain(|fact| fact.applies_to(&capability).is_ok());
    if kind.suite() == Suite::Exclusion {
        facts.retain(|fact| fact.group() == "exclusion");
    }
    let under = |fact: Fact, fair: Fair| {
        self::fact(kind, fair, fact.group(), fact.name(), move |store| {
            Box::pin(async move { fact.check(Arc::new(Served(store.server)), fair).await })
        })
    };
    let policies = |fact: &Fact| {
        fact.policies()
            .iter()
            .map(|fair| under(*fact, *fair))
            .collect()
    };
    facts.iter().flat_map::<Vec<_>, _>(policies).collect()
}

struct Served(Arc<dyn Server>);

impl Subject for Served {
    fn backend(&self) -> Arc<dyn Backend> {
        self.0.backend()
    }

    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        self.0.client(builder)
    }
}

/// A runtime that does not wait for its threads when it ends. A thread that hangs makes its fact
/// fail, but the run continues.
struct LeftAlone(Option<Runtime>);

impl Drop for LeftAlone {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Makes tests of the facts of a module, for one store. They run under the given policy, or under
/// both policies if none is given.
#[macro_export]
macro_rules! store_facts {
    ($kind:expr; $($name:ident)*) => {{
        let mut trials = $crate::store_facts![$kind, $crate::store::DEFAULT; $($name)*];
        trials.extend($crate::store_facts![$kind, lockcore::Fair::Strict; $($name)*]);
        trials
    }};
    ($kind:expr, $fair:expr; $($name:ident)*) => {{
        // A module below another one uses the group name of its parent.
        let group = module_path!().split("::").nth(1).unwrap();
        $crate::store_facts![$kind, $fair, group; $($name)*]
    }};
    ($kind:expr, $fair:expr, $group:expr; $($name:ident)*) => {{
        let group: &str = $group;
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
            server: kind.shared(),
        }
    }

    /// A new client. Its timeouts are longer than the defaults: a stalled machine must not look
    /// like a failing store or a dead holder.
    pub(crate) fn client(&self) -> Locks {
        self.client_with(Locks::builder().op_timeout(STALL).ttl(LEASE))
    }

    pub(crate) fn client_with(&self, builder: Builder) -> Locks {
        let builder = builder.namespace(&self.namespace).fair(self.fair);
        self.server.client(builder).unwrap()
    }

    /// The store without a client.
    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        self.server.backend()
    }

    /// A client whose calls to the store are counted.
    pub(crate) fn counted(&self, fair: Fair) -> (Locks, Arc<Counts>) {
        let (counted, counts) = Counted::around(self.backend());
        let locks = Locks::builder()
            .op_timeout(Duration::from_secs(9)) // a second less than the default ttl
            .namespace(&self.namespace)
            .fair(fair)
            .backend(counted);
        (locks.build().unwrap(), counts)
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn capability(&self) -> Capability {
        self.kind.capability()
    }

    pub(crate) fn timings(&self) -> Timings {
        self.kind.timings()
    }

    /// The SQLite file of a fact about SQLite.
    pub(crate) fn file(&self) -> &SqliteFile {
        self.file_if_any().unwrap()
    }

    pub(crate) fn file_if_any(&self) -> Option<&SqliteFile> {
        self.server.downcast()
    }

    /// The keys in the namespace that should be gone when its locks are gone.
    pub(crate) fn litter(&self) -> Vec<String> {
        self.server.litter(&self.namespace)
    }

    /// The keys of [`litter`](Self::litter) without marks, which stay for a minute.
    pub(crate) fn litter_but_marks(&self) -> Vec<String> {
        self.server.litter_but_marks(&self.namespace)
    }
}

/// Waits until a name has no holders, no waiters and no other remains. Clean-up must do this long
/// before a lease ends.
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

/// Resolves when the name has this many holders and waiters. At a store without a line, waiters
/// leave no trace. There this waits for the holders only, and a waiter may not have sent its
/// request yet.
pub(crate) async fn in_line(
    store: &Store,
    locks: &Locks,
    name: &str,
    holders: usize,
    waiters: usize,
) {
    let all = match store.capability().queues {
        true => holders + waiters,
        false => holders,
    };
    tickets(locks, name, all).await;
}
