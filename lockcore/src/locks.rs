//! The client: the handle that makes locks.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::any::AnyLock;
#[cfg(feature = "backend")]
use crate::backend::Capability;
use crate::backend::StoreError;
use crate::barrier::Barrier;
use crate::client::calls::Where;
use crate::client::events::EventListener;
use crate::counter::Counter;
use crate::double_barrier::DoubleBarrier;
use crate::error::Error;
use crate::hold::Held;
use crate::latch::Latch;
use crate::lock::Lock;
use crate::multi::MultiLock;
use crate::name::Name;
use crate::options::Wait;
use crate::request::FULL;
use crate::rwlock::RwLock;
use crate::scope;
use crate::semaphore::Semaphore;
use crate::value::LockValue;

/// A client of a lock store. Clones are the same client: there is one keeper thread per connect,
/// not per clone.
///
/// A client works from every tokio runtime of the process, and may outlive them. Its clones, locks,
/// guards and views are its handles. When the last handle is dropped, the keeper finishes the
/// releases that are left. This last drop blocks until the releases are done, for at most one
/// operation timeout.
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
    /// Connects now and checks the server: its version, and the settings that can cost a lock. It
    /// logs problems that an operator should know of as warnings. It skips a check for which the
    /// client has no right.
    ///
    /// This opens the connection of the caller's runtime, and that of the thread that renews the
    /// leases. (At ZooKeeper and etcd they are one.) If the second one cannot be opened, locks that are
    /// taken may be lost.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when one of the connections cannot be opened
    /// `within` the given time; [`Config`](crate::ErrorKind::Config) when the store refuses the
    /// credentials or is too old.
    ///
    /// # Cancel safety
    ///
    /// Safe: nothing is taken.
    pub async fn ready(&self, within: Duration) -> Result<(), Error> {
        let shared = &self.0.shared;
        shared.refuse_forked()?;
        let by = shared.clock.now().after(within);
        let check = shared.operate(Where::Here, by, |connection, _| connection.check());
        let keepers = shared.connection(Where::Keeper, by);
        let both = async { tokio::try_join!(check, keepers) };
        let ((_, warnings), _) = shared
            .inside_of_a_runtime(both)
            .await
            .map_err(StoreError::unavailable_unless_config)?;
        for warning in warnings {
            tracing::warn!("lock store: {warning}");
        }
        Ok(())
    }

    /// An exclusive lock on a name: 1 to 4,096 bytes of any UTF-8. With another name, each attempt
    /// to take the lock fails.
    pub fn mutex(&self, name: impl Into<String>) -> Lock {
        Lock::new(&self.0, name.into(), Ok((FULL, FULL)))
    }

    /// A read/write lock on a name; its write side is the mutex on that name.
    pub fn rwlock(&self, name: impl Into<String>) -> RwLock {
        RwLock::new(&self.0, name.into())
    }

    /// A semaphore on a name, with this number of permits: 1 to 2³⁰ − 1.
    pub fn semaphore(&self, name: impl Into<String>, capacity: u32) -> Semaphore {
        Semaphore::new(&self.0, name.into(), capacity)
    }

    /// A count-down latch on a name.
    pub fn latch(&self, name: impl Into<String>) -> Latch {
        Latch::new(&self.0, name.into())
    }

    /// A barrier on a name, for this number of parties: 1 to [`Barrier::MAX_PARTIES`].
    pub fn barrier(&self, name: impl Into<String>, parties: u32) -> Barrier {
        Barrier::new(&self.0, name.into(), parties)
    }

    /// A double barrier on a name, for this number of parties: 1 to [`Barrier::MAX_PARTIES`].
    pub fn double_barrier(&self, name: impl Into<String>, parties: u32) -> DoubleBarrier {
        DoubleBarrier::new(&self.0, name.into(), parties)
    }

    /// A shared counter on a name.
    pub fn counter(&self, name: impl Into<String>) -> Counter {
        Counter::new(&self.0, name.into())
    }

    /// The value of the lock on a name. Callers need not hold the lock to read and follow it.
    pub fn value(&self, name: impl Into<String>) -> LockValue {
        LockValue::new(&self.0, self.name(name))
    }

    /// Several locks at once, all or none of them: see [`MultiLock`]. The locks may belong to
    /// different clients, and so to different stores.
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

    /// One of several locks: the first that is free, or the first that is granted. See [`AnyLock`].
    /// The locks may belong to different clients, and so to different stores.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// use lockcore::Locks;
    ///
    /// let locks = Locks::connect("memory:")?;
    /// let printers = Locks::any(["printer:1", "printer:2"].map(|name| locks.mutex(name)));
    /// let one = printers.acquire().await?;
    /// let other = printers.acquire().await?;
    /// assert_eq!((one.name(), other.name()), ("printer:1", "printer:2"));
    /// # Ok(()) }
    /// ```
    pub fn any(locks: impl IntoIterator<Item = Lock>) -> AnyLock {
        AnyLock::new(locks.into_iter().collect())
    }

    /// How long a lock of this client waits if it does not set its own wait (`LOCK_WAIT`). This is
    /// for code that shortens the wait, for example to the deadline of its caller.
    #[must_use]
    pub fn default_wait(&self) -> Wait {
        self.0.shared.defaults.wait
    }

    /// What the store of this client can do. The store is not asked.
    #[cfg(feature = "backend")]
    #[must_use]
    pub fn capability(&self) -> Capability {
        self.0.shared.capability
    }

    /// The held lock with this name, if the running code is inside of it. The lock must have been
    /// taken with this client or a clone of it. [`lockcore::held`](crate::held) does the same for
    /// all clients, and explains "inside".
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

    pub(crate) fn name(&self, name: impl Into<String>) -> Result<Name, Error> {
        Name::new(self.0.shared.namespace.clone(), name)
    }

    /// Listens to the events of this client from now on: the store is out of reach, the store is
    /// back, a lock was lost. Use the events for logs, metrics and readiness probes. Work under a
    /// lock need not listen, because the client stops the work when its lock is lost.
    ///
    /// While there is a listener, the client reconnects after an outage even if nobody uses it,
    /// with pauses of up to five seconds. So the listener learns of the end of the outage.
    ///
    /// ```
    /// # fn example(locks: &lockcore::Locks) {
    /// let mut events = locks.events();
    /// tokio::spawn(async move {
    ///     while let Some(event) = events.recv().await {
    ///         eprintln!("locks: {event:?}");
    ///     }
    /// });
    /// # }
    /// ```
    #[must_use]
    pub fn events(&self) -> EventListener {
        self.0.shared.listen()
    }

    /// Shuts this client down, with all its clones. The client refuses new requests, and waiters
    /// fail at once. Holders may finish until `deadline` is nearly over. Then the remaining locks
    /// count as lost: the client stops the work under them, and releases them.
    ///
    /// Returns as soon as no lock is held.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store did not acknowledge all
    /// releases in time. The leases of the remaining locks run out by themselves.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the client refuses new requests even so. Locks that are held stay
    /// held.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), Error> {
        let shared = &self.0.shared;
        // In a forked child this client holds nothing that could be ended.
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

    /// Shuts down a client that nobody has used yet.
    pub(crate) fn end_unused(&self) {
        self.0.shared.refuse_new();
        self.0.shared.tell_end(0);
    }

    /// Returns how many locks are not released at the deadline.
    async fn ended_by(&self, deadline: Duration) -> usize {
        let shared = &self.0.shared;
        let started = shared.clock.now();
        let end = started.after(deadline);
        // The time that is left for the releases after the work was stopped.
        let reserve = shared.op_timeout.min(deadline / 2);
        shared.refuse_new();
        if shared.idle(end.before(reserve)).await == 0 {
            return 0;
        }
        shared.lose_held();
        // A body is dropped at its next poll. Its lock is released only after that.
        if shared.idle(end.before(reserve / 2)).await == 0 {
            return 0;
        }
        shared.release_the_rest();
        shared.idle(end).await
    }
}
