//! The shared state of a client: the table under its mutex, the clock, and the way to the store. It
//! belongs to the client's handles, guards, connections and keeper thread together. The mutex is
//! locked for a few map operations at a time, and never across an await. Each of the other files in
//! this folder does one job with this state.

use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime;
use tracing::Level;

use super::events::Teller;
use super::lease::Lease;
use super::links::{Link, Links};
use super::settings::{Defaults, Settings};
use super::table::Table;
use super::watched::Watches;
use crate::backend::{Backend, Capability};
use crate::clock::{Clock, Instant};
use crate::counting::answered::Answered;
use crate::error::Error;
use crate::fork::Process;
use crate::log::{Log, guarded};
use crate::meter::Meter;
use crate::name::Namespace;
use crate::request::Id;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, Notify};

pub(super) const FORKED: &str =
    "this client was made before a fork, in the parent process; make another in the child";

/// The state that belongs to the handles, the guards, the connections and the keeper thread of a
/// client together.
pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    /// The promises of the backend. They never change. They are kept here because each acquire
    /// reads them several times.
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
    /// The highest ticket number, of any name, that the store has told this client.
    highest_seen: AtomicU64,
    /// See [`Shared::epoch`].
    pub(super) epoch: AtomicU64,
    table: Mutex<Table>,
    answered: Mutex<Answered>,
    pub(super) watches: Watches,
    /// Wakes the keeper early.
    pub(crate) due_changed: Notify,
    /// Notifies when the last lease and the last clean-up are gone.
    pub(super) idle: Notify,
    /// Notifies when the last handle is gone.
    pub(crate) ends: Notify,
    pub(crate) teller: Teller,
    /// Whether it has been logged that the store refuses renewals.
    pub(super) refusing: AtomicBool,
    /// Whether the end of the client has been logged.
    pub(super) told_end: AtomicBool,
    pub(crate) meter: Meter,
    log: Log,
}

/// Learns when a ticket of this process ends. Tasks may wait for that ticket inside this process.
pub(crate) trait LeaseObserver: Send + Sync {
    /// A lease is over. The tasks that wait for its ticket need not wait until its user ends.
    fn lost(self: Arc<Self>, lease: &Arc<Lease>);

    /// A ticket of this process was asked back: no further task may use the ticket.
    fn asked_back(self: Arc<Self>, lease: &Arc<Lease>);

    /// A ticket was granted and its task did not collect it: the keeper is giving the ticket back.
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
        let capability = backend.capability();
        let process = Process::this()?;
        Ok(Self {
            meter: Meter::new(&settings.place, settings.namespace.as_str(), &process),
            capability,
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
            process,
            highest_seen: AtomicU64::new(0),
            epoch: AtomicU64::new(1),
            table: Mutex::new(Table::new(capability.renewals_in_flight)),
            answered: Mutex::default(),
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

    /// From now on the client tells `observer` of leases that are over. Called once.
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

    /// The store's product, in the words of the conventions for traces of databases. `None` if the
    /// store has no address to show.
    pub(crate) fn system(&self) -> Option<&str> {
        let (scheme, _) = self.place.split_once(':')?;
        let product = scheme.split('+').next()?;
        Some(match product {
            "rediss" | "redlock" => "redis",
            "postgres" => "postgresql",
            product => product,
        })
    }

    /// The servers of the store, without a user. `None` if the store has no server.
    pub(crate) fn address(&self) -> Option<&str> {
        let (_, rest) = self.place.split_once("://")?;
        rest.split('/').next().filter(|servers| !servers.is_empty())
    }

    /// Logs a line. On the keeper's thread this does not wait for the subscriber.
    pub(crate) fn log(&self, level: Level, line: impl FnOnce() + Send + 'static) {
        self.log.say(level, &self.keeper, line);
    }

    /// Whether this process is a forked child of the process that made the client.
    ///
    /// The child has no keeper thread and no connections of its own. It has copies of the parent's
    /// sockets, which the parent uses. It also has copies of mutexes that a thread of the parent
    /// may have held at the fork. So the client cannot work in the child, and no code may touch any
    /// part of it there.
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

    /// The number of the current epoch. A gap is a time in which a wake-up, or the store's data,
    /// may have been lost. Each gap begins a new epoch. A request that was sent before the gap
    /// belongs to an earlier epoch.
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

    /// As [`sent_now`](Self::sent_now), but with `at` as the moment, if it is given. A caller gives
    /// a moment that it has read before if it has awaited nothing since. That saves a read of the
    /// clock. It is safe: a lease that is counted from an earlier moment only ends earlier.
    pub(crate) fn sent_since(&self, at: Option<Instant>) -> Sent {
        Sent {
            at: at.unwrap_or_else(|| self.clock.now()),
            epoch: self.epoch(),
        }
    }

    /// Begins a new epoch, because a connection is lost, and perhaps the store's data too. In a new
    /// epoch, a task hands a ticket over only after the store has confirmed that the ticket exists.
    /// All watched counters are read again, because pushes may have been lost.
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
        // No code that can panic runs under the mutex. If such code is added one day, the maps are
        // consistent even after a panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn answered(&self) -> MutexGuard<'_, Answered> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake_keeper_at(&self, table: &mut Table, at: Instant) {
        if at < table.next_wake {
            table.next_wake = at;
            self.due_changed.notify_one();
        }
    }

    /// Called when the mutex of the table is not held, because this runs wakers, which are users'
    /// code.
    pub(super) fn tell_if(&self, idle: bool) {
        if idle {
            guarded(|| self.idle.notify_waiters());
        }
    }
}
