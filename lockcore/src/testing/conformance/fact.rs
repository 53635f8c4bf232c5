//! A fact: a sentence with a test.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::kit::Store;
use super::stalls;
use super::steps::LEASE;
use super::subject::Subject;
use crate::backend::Capability;
use crate::options::Fair;

/// The time after which a check is taken to hang. On a working store every check is faster.
const LONGEST: Duration = Duration::from_secs(120);

type Body = fn(Store) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Whether a fact applies to a store with this capability. The error is the reason why it does not.
type Needs = fn(&Capability) -> Result<(), &'static str>;

/// A sentence that is true of every store whose [`Capability`] allows it.
#[derive(Clone, Copy)]
pub struct Fact {
    pub(super) group: &'static str,
    pub(super) name: &'static str,
    /// Whether the fact is checked through clients, and not at the connection.
    pub(super) by_clients: bool,
    pub(super) needs: Needs,
    pub(super) body: Body,
}

impl Fact {
    /// The sentence, as the name of a function: `a_lock_that_is_held_is_busy_for_try`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The subject of the fact, in a word.
    #[must_use]
    pub fn group(&self) -> &'static str {
        self.group
    }

    /// Whether the fact applies to a store with this capability.
    ///
    /// # Errors
    ///
    /// The reason why the fact does not apply.
    pub fn applies_to(&self, capability: &Capability) -> Result<(), &'static str> {
        if capability.longest_ttl < 2 * LEASE {
            return Err("the facts need tickets that live for two minutes");
        }
        (self.needs)(capability)
    }

    /// The policies under which to check the fact. There is only one for a fact that is checked at
    /// the connection, because no policy changes its result.
    #[must_use]
    pub fn policies(&self) -> &'static [Fair] {
        const BOTH: [Fair; 2] = [Fair::Local(Duration::from_millis(50)), Fair::Strict];
        match self.by_clients {
            true => &BOTH,
            false => &BOTH[..1],
        }
    }

    /// Checks the fact in a namespace of its own, so that facts can run at the same time. Needs a
    /// runtime with several threads.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// use std::sync::Arc;
    ///
    /// use lockcore::backend;
    /// use lockcore::testing::conformance::{self, Subject};
    ///
    /// let store = backend::open("memory:")?;
    /// let capability = store.capability();
    /// let subject: Arc<dyn Subject> = Arc::new(move || Arc::clone(&store));
    /// let mut checks = tokio::task::JoinSet::new();
    /// for fact in conformance::facts() {
    ///     if let Err(why) = fact.applies_to(&capability) {
    ///         println!("left out: {} ({why})", fact.name());
    ///         continue;
    ///     }
    ///     for fair in fact.policies() {
    ///         checks.spawn(fact.check(Arc::clone(&subject), *fair));
    ///     }
    /// }
    /// checks.join_all().await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    ///
    /// If the fact is not true of the store, or if the check takes more than two minutes.
    pub async fn check(self, subject: Arc<dyn Subject>, fair: Fair) {
        stalls::watch();
        let checked = (self.body)(Store::new(subject, fair));
        let in_time = tokio::time::timeout(LONGEST, checked).await;
        assert!(in_time.is_ok(), "{} hangs", self.name);
    }
}

impl fmt::Debug for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fact").field(&self.name).finish()
    }
}

/// The facts of a module: `group_of!["group", by_clients, needs; names]`.
macro_rules! group_of {
    ($group:literal, $by_clients:literal, $needs:expr; $($name:ident)*) => {
        vec![$($crate::testing::conformance::fact::Fact {
            group: $group,
            name: stringify!($name),
            by_clients: $by_clients,
            needs: $needs,
            body: |store| Box::pin($name(store)),
        }),*]
    };
}
pub(super) use group_of;

pub(super) fn any_store(_: &Capability) -> Result<(), &'static str> {
    Ok(())
}

pub(super) fn without_sessions(capability: &Capability) -> Result<(), &'static str> {
    match capability.sessions {
        true => Err("its tickets live as long as their session, and not by their own ttl"),
        false => Ok(()),
    }
}

pub(super) fn that_pushes(capability: &Capability) -> Result<(), &'static str> {
    match capability.pushes {
        true => Ok(()),
        false => Err("it wakes nobody"),
    }
}

pub(super) fn that_queues(capability: &Capability) -> Result<(), &'static str> {
    match capability.queues {
        true => Ok(()),
        false => Err("no request waits in line at it"),
    }
}

pub(super) fn without_queue(capability: &Capability) -> Result<(), &'static str> {
    match capability.queues {
        true => Err("requests wait in line at it"),
        false => Ok(()),
    }
}
