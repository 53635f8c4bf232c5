//! The state that handles, guards, connections and the keeper's thread share: the table under its mutex, the clock, and
//! the way to the store. The mutex is held for a few map operations at a time and never across an await. The work on
//! this state is in the files beside this one, one job each.

use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime;
use tracing::Level;

use super::answered::Answered;
use super::events::Teller;
use super::lease::Lease;
use super::links::{Link, Links};
use super::settings::{Defaults, Settings};
use super::table::Table;
use super::watched::Watches;
use crate::backend::{Backend, Capability};
use crate::clock::{Clock, Instant};
use crate::error::Error;
use crate::fork::Process;
use crate::log::{Log, guarded};
use crate::name::Namespace;
use crate::request::Id;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, Notify};

pub(super) const FORKED: &str =
    "this client was made before a fork, in the parent process; make another in the child";

/// The state that handles, guards, connections and the keeper's thread share.
pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    /// The promises of the backend. It never changes, and is asked for several times in each acquire.
    pub(crate) capability: Capability,
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    /// The time that one operation at the store may take, connecting included.
    pub(crate) op_timeout: Duration,
    /// See [`Settings::place`].
    pub(crate) place: String,
    pub(super) owner: Arc<str>,
    pub(crate) defaults: Defaults,
    /// Where the keeper's tasks run.
    pub(crate) keeper: runtime::Handle,
    pub(crate) links: Links,
    /// Starts the supervisor of a link, on the keeper.
    pub(super) supervise: fn(Arc<Shared>, Arc<Link>),
    observer: OnceLock<Weak<dyn LeaseObserver>>,
    /// The process that made the client.
    process: Process,
    /// The highest ticket number that this client was told, on any name.
    highest_seen: AtomicU64,
    /// See [`Shared::epoch`].
    pub(super) epoch: AtomicU64,
    table: Mutex<Table>,
    pub(super) answered: Answered,
    pub(super) watches: Watches,
    /// Wakes the keeper early.
    pub(crate) due_changed: Notify,
    /// Notifies when the last lease and the last clean-up are gone.
    pub(super) idle: Notify,
    /// Notifies when the last handle is gone.
    pub(crate) ends: Notify,
    pub(crate) teller: Teller,
    /// It has been logged that the store refuses renewals.
    pub(super) refusing: AtomicBool,
    /// The end of the client has been logged.
    pub(super) told_end: AtomicBool,
    log: Log,
}

/// Is told when a ticket of this process ends. Tasks may wait for that ticket inside this process.
pub(crate) trait LeaseObserver: Send + Sync {
    /// A lease is over: waiters need not wait for its user.
    fn lost(self: Arc<Self>, lease: &Arc<Lease>);

    /// Somebody asks for a ticket of this process: no further task may use it.
    fn asked_back(self: Arc<Self>, lease: &Arc<Lease>);

    /// A ticket was granted and its task did not collect it: it is being given back.
    fn recalled(self: Arc<Self>, lease: &Arc<Lease>);

    /// The client is shut down.
    fn close(self: Arc<Self>);
}

/// When a request was sent, by the lease clock, and in which [epoch](Shared::epoch).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) at: Instant,
    pub(crate) epoch: u64,
}

impl Shared {
    /// # Errors
    ///
    /// The errors of [`Process::this`].
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        settings: Settings,
        keeper: runtime::Handle,
        supervise: fn(Arc<Self>, Arc<Link>),
    ) -> Result<Self, Error> {
        Ok(Self {
            capability: backend.capability(),
            backend,
            clock: settings.clock,
            namespace: settings.namespace,
            op_timeout: settings.op_timeout,
            place: settings.place,
            owner: settings.owner,
            defaults: settings.defaults,
            keeper,
            links: Links::default(),
            supervise,
            observer: OnceLock::new(),
            process: Process::this()?,
            highest_seen: AtomicU64::new(0),
            epoch: AtomicU64::new(1),
            table: Mutex::default(),
            answered: Answered::default(),
            watches: Watches::default(),
            due_changed: Notify::new(),
            idle: Notify::new(),
            ends: Notify::new(),
            teller: Teller::default(),
            refusing: AtomicBool::new(false),
            told_end: AtomicBool::new(false),
            log: Log::default(),
        })
    }

    /// From now on `observer` is told of leases that are over. Called once.
    pub(crate) fn observe(&self, observer: Weak<dyn LeaseObserver>) {
        let first = self.observer.set(observer);
        debug_assert!(first.is_ok(), "there is one");
    }

    pub(super) fn observer(&self) -> Option<Arc<dyn LeaseObserver>> {
        self.observer.get()?.upgrade()
    }

    /// The name of the store in messages.
    pub(crate) fn store(&self) -> &str {
        match self.place.as_str() {
            "" => "the store",
            place => place,
        }
    }

    /// Logs a line. On the keeper's thread this does not wait for the subscriber.
    pub(crate) fn log(&self, level: Level, line: impl FnOnce() + Send + 'static) {
        self.log.say(level, &self.keeper, line);
    }

    /// Whether this process is a forked child of the one that made the client.
    ///
    /// The child has neither the keeper's thread nor connections of its own. It has copies: sockets that the parent
    /// uses, and mutexes that a thread of the parent may have held at the fork. So the client cannot work there, and no
    /// part of it may be touched.
    pub(crate) fn is_forked(&self) -> bool {
        !self.process.is_this()
    }

    /// # Errors
    ///
    /// `Config` in a [forked child](Self::is_forked).
    pub(crate) fn refuse_forked(&self) -> Result<(), Error> {
        match self.is_forked() {
            true => Err(Error::config(FORKED)),
            false => Ok(()),
        }
    }

    /// The number of the current epoch. A gap is a time in which a wake-up, or the store's data, may have been lost.
    /// Each gap begins a new epoch. A request that was sent before belongs to an earlier epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// An identity for a request that is about to be sent.
    pub(crate) fn new_id(&self) -> Result<Id, Error> {
        match self.capability.cross_process {
            true => Id::draw(),
            false => Ok(Id::count()),
        }
    }

    /// The moment and the epoch of a request that is sent after this call.
    pub(crate) fn sent_now(&self) -> Sent {
        Sent {
            at: self.clock.now(),
            epoch: self.epoch(),
        }
    }

    /// As [`sent_now`](Self::sent_now). If nothing was waited for since `at`, the request counts as sent then, and the
    /// clock need not be read again: a lease that is counted from earlier only ends earlier.
    pub(crate) fn sent_since(&self, at: Option<Instant>) -> Sent {
        Sent {
            at: at.unwrap_or_else(|| self.clock.now()),
            epoch: self.epoch(),
        }
    }

    /// A connection is lost, and perhaps the store's data too. From now on, no ticket is handed over in this process
    /// before the store has been asked whether the ticket still exists.
    pub(crate) fn suspect(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.watches.gap();
    }

    pub(crate) fn highest_seen(&self) -> u64 {
        self.highest_seen.load(Ordering::Relaxed)
    }

    pub(crate) fn saw_ticket(&self, ticket: u64) {
        self.highest_seen.fetch_max(ticket, Ordering::Relaxed);
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        // No code that can panic runs under the mutex. If that changes, the maps are still consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake_keeper_at(&self, table: &mut Table, at: Instant) {
        if at < table.next_wake {
            table.next_wake = at;
            self.due_changed.notify_one();
        }
    }

    /// Called outside of the table's mutex, because it runs wakers, which are users' code.
    pub(super) fn tell_if(&self, idle: bool) {
        if idle {
            guarded(|| self.idle.notify_waiters());
        }
    }
}
