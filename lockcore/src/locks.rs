//! The client: the handle that locks are made from.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::backend::{Place, StoreError};
use crate::client::calls::Where;
use crate::client::events::EventListener;
use crate::error::Error;
use crate::hold::Held;
use crate::lock::Lock;
use crate::multi::MultiLock;
use crate::name::Name;
use crate::options::Wait;
use crate::request::FULL;
use crate::rwlock::RwLock;
use crate::scope;
use crate::semaphore::Semaphore;

/// A client of a lock store. Clones are the same client: one keeper thread per connect, not per
/// clone.
///
/// It works from every tokio runtime of the process and outlives them. When the last clone, lock,
/// guard and view of a client is gone, its keeper finishes what it has to release; dropping that
/// last one blocks for as long as that takes, at most one operation timeout.
///
/// A client does not survive `fork` without `exec`: its keeper thread stays in the parent.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").acquire().await?;
/// assert!(locks.mutex("order:42").try_acquire().await.is_err());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Locks(pub(crate) Arc<Client>);

impl Locks {
    /// Connects now and looks at the server: its version, and the settings that can cost a lock.
    /// What an operator should know is logged as a warning; what may not be read is passed over.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store cannot be reached `within`
    /// the given time; [`Config`](crate::ErrorKind::Config) when it refuses the credentials or is
    /// too old.
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing is taken.
    pub async fn ready(&self, within: Duration) -> Result<(), Error> {
        let shared = &self.0.shared;
        let by = shared.clock.now().after(within);
        let (_, warnings) = shared
            .operate(Where::Here, by, |connection| connection.check())
            .await
            .map_err(StoreError::unavailable_unless_config)?;
        for warning in warnings {
            tracing::warn!("lock store: {warning}");
        }
        Ok(())
    }

    /// An exclusive lock on a name: 1 to 4,096 bytes of any UTF-8. A name that is not usable is
    /// reported when the lock is taken.
    pub fn mutex(&self, name: impl Into<String>) -> Lock {
        Lock::new(&self.0, name.into(), Ok((FULL, FULL)))
    }

    /// A read/write lock on a name; its write side is the mutex on that name.
    pub fn rwlock(&self, name: impl Into<String>) -> RwLock {
        RwLock::new(&self.0, name.into())
    }

    /// A semaphore on a name with so many permits: 1 to 2³⁰ − 1.
    pub fn semaphore(&self, name: impl Into<String>, capacity: u32) -> Semaphore {
        Semaphore::new(&self.0, name.into(), capacity)
    }

    /// Several locks at once, all or none of them: see [`MultiLock`]. They may be of different clients,
    /// and so of different stores.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// use lockcore::Locks;
    ///
    /// let locks = Locks::connect("memory:")?;
    /// let (from, to) = (locks.mutex("account:7"), locks.mutex("account:3"));
    /// let both = Locks::all([from, to]).acquire().await?;
    /// assert!(locks.mutex("account:3").try_acquire().await.is_err());
    /// both.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn all(locks: impl IntoIterator<Item = Lock>) -> MultiLock {
        MultiLock::new(locks.into_iter().collect())
    }

    /// How long a lock of this client waits that is not told how long (`LOCK_WAIT`): for code that
    /// shortens a wait, say to a deadline of its caller's.
    #[must_use]
    pub fn default_wait(&self) -> Wait {
        self.0.shared.defaults.wait
    }

    /// The lock of a name of this client, of any clone of it, that the running code is inside of: as
    /// [`lockcore::held`](crate::held), which says what that means, does for all clients.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// # use lockcore::Locks;
    /// let (locks, others) = (Locks::connect("memory:")?, Locks::connect("memory:")?);
    /// locks
    ///     .mutex("order:42")
    ///     .run(async |_| {
    ///         assert!(locks.held("order:42").is_some());
    ///         assert!(others.held("order:42").is_none());
    ///         Ok::<_, lockcore::Error>(())
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn held(&self, name: &str) -> Option<Held> {
        scope::held_that(|held| held.is_of_client(&self.0) && held.name() == name)
    }

    /// Who holds a name and who waits for it, oldest first. A snapshot: it may be outdated when it
    /// arrives, and is for people, not for decisions.
    ///
    /// [`Place::owner`] tells the machine, the process and the client; [`Place::owner_text`] what the
    /// application says of itself. A ticket that is passed on inside a process keeps its owner.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) and [`Config`](crate::ErrorKind::Config).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn inspect(&self, name: impl Into<String>) -> Result<Vec<Place>, Error> {
        let name = Name::new(self.0.shared.namespace.clone(), name)?;
        let shared = &self.0.shared;
        let by = shared.clock.now().after(shared.op_timeout);
        let looked_at = name.clone();
        let (_, mut places) = shared
            .operate(Where::Here, by, |connection| connection.inspect(looked_at))
            .await
            // Nothing was asked that could have an unknown fate.
            .map_err(|error| error.unavailable_unless_config().of_name(name.as_str()))?;
        let ours = |place: &&mut Place| place.owner == self.0.owner.client;
        if let Some(youngest) = places.iter_mut().rev().find(ours) {
            youngest.local_waiters = self.0.lanes.waiting(&name);
        }
        Ok(places)
    }

    /// Listens to what this client has to tell from now on: that the store is in trouble, that it is
    /// back, that a lock was lost. For logs, metrics and readiness probes; work under a lock need not
    /// listen, it is stopped by itself.
    ///
    /// While somebody listens, a client that nobody uses reconnects after an outage as well, with
    /// pauses of up to five seconds, so that the end of the outage is told.
    ///
    /// ```
    /// # fn example(locks: &lockcore::Locks) {
    /// let mut events = locks.events();
    /// tokio::spawn(async move {
    ///     while let Some(event) = events.next().await {
    ///         eprintln!("locks: {event:?}");
    ///     }
    /// });
    /// # }
    /// ```
    #[must_use]
    pub fn events(&self) -> EventListener {
        self.0.shared.listen()
    }

    /// Ends this client's work in an orderly way, for every clone of it: nothing new is taken,
    /// waiters are given up at once, and what is held may finish until `deadline` is nearly over.
    /// Then it is lost (work under it is stopped) and released.
    ///
    /// Returns as soon as nothing is held any more.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store did not acknowledge all
    /// releases in time: those leases run out by themselves.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the client refusing new work; what is held stays held.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        let shared = &self.0.shared;
        // In a forked child there is nothing of this client's to end.
        if shared.is_forked() {
            return Ok(());
        }
        let left = self.ended_by(deadline).await;
        shared.tell_end(left);
        match left {
            0 => Ok(()),
            left => Err(Error::unavailable(format!(
                "{left} locks could not be released within {deadline:?}; they end with their leases"
            ))),
        }
    }

    /// Returns how many locks are not released then.
    async fn ended_by(&self, deadline: Duration) -> usize {
        let shared = &self.0.shared;
        let started = shared.clock.now();
        let end = started.after(deadline);
        // What is left for the releases themselves, once the work has been told to stop.
        let reserve = shared.op_timeout.min(deadline / 2);
        shared.refuse_new();
        if shared.idle(end.before(reserve)).await == 0 {
            return 0;
        }
        shared.lose_held();
        // Bodies are dropped where they are polled next; that comes before their release.
        if shared.idle(end.before(reserve / 2)).await == 0 {
            return 0;
        }
        shared.release_held();
        shared.idle(end).await
    }
}
