//! The contract between the core and a store.
//!
//! A store keeps **tickets**: who asked for how many permits of a name, in which order, and until
//! when. Holders and waiters are the same record. One rule decides who holds:
//!
//! > A ticket is granted when the permits of all older live tickets plus its own are at most the
//! > capacity. A grant lasts until release or expiry; no later computation takes it back.
//!
//! [`Queue`](crate::queue::Queue) is that rule as plain code. A store adds a place to keep tickets
//! and a way to wake clients, and owes three things beside the rule:
//!
//! - **Order is final.** Once a ticket is visible, none with a smaller number ever appears.
//! - **Who removes, wakes.** Whoever removes a ticket, by release or because it expired, or makes it
//!   smaller, tells the owner of every ticket that is thereby granted, in the same atomic step.
//! - **Verbs are idempotent by id** and neither loop, retry nor sleep. Deadlines, repetition,
//!   renewal, clean-up and reconnecting are the core's, once for all stores.
//!
//! The core may drop the future of a verb at any point, or move it to another thread and finish it
//! there; it must therefore not depend on timers or tasks of the runtime that first polled it,
//! except for the connection's own driver.

mod events;
pub(crate) mod memory;
pub(crate) mod open;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(feature = "zookeeper")]
pub(crate) mod zookeeper;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
pub use events::{Events, News};
pub use open::open;

/// A future that may be moved between threads.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What a verb answers.
pub type Answer<T> = BoxFuture<Result<T, StoreError>>;

/// Where tickets live. See the [module](self) for what an implementation owes.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// What this store can promise.
    fn capability(&self) -> Capability;

    /// Opens a connection, driven by the tokio runtime that polls this future.
    ///
    /// It is usable when the future resolves: wake-ups for tickets that are enqueued on it go to
    /// `events` from then on. The store calls [`Events::gap`] when wake-ups may have been missed
    /// and drops `events` when the connection is of no use any more; the core then opens another.
    fn connect(&self, events: Events) -> Answer<Arc<dyn Connection>>;

    /// What else it may mean that [`connect`](Self::connect) got no answer in time; ends the
    /// message that says so.
    fn silence(&self) -> &'static str {
        ""
    }
}

/// A connection to a store: the verbs.
///
/// Requests are shared, not copied: what was enqueued is what is released, and what is renewed, unless the
/// ticket is to be [smaller](Self::renew).
pub trait Connection: fmt::Debug + Send + Sync + 'static {
    /// Takes a ticket, or finds the one that an earlier try with the same id left, and renews it.
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued>;

    /// Prolongs tickets to the ttl of these requests from now; one answer per ticket, in order. Never
    /// creates one.
    ///
    /// The ttl may be longer or shorter than that of the enqueue or of the last renewal: a shorter one ends
    /// the ticket sooner than it would have ended. The ticket keeps its number and its place.
    ///
    /// A request of fewer permits than its ticket has makes the ticket smaller, for good: a writer that
    /// reads on. That is one atomic step with the waking of every ticket that is thereby granted, and
    /// the ticket keeps its number and its place. A ticket never gets more permits.
    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>>;

    /// Removes tickets; one answer per ticket, in order.
    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>>;

    /// The live tickets of a name, oldest first.
    fn inspect(&self, name: Name) -> Answer<Vec<Place>>;

    /// Forgets what remains of a name that nobody uses; does nothing while a ticket is there.
    fn forget(&self, name: Name) -> Answer<()>;

    /// Looks at the server's version and settings; returns what an operator should know.
    ///
    /// What may not be read is passed over.
    fn check(&self) -> Answer<Vec<String>>;

    /// Takes back what the store keeps for the client beyond the connection, a session for example.
    ///
    /// Called once, at the end of the client, when it has nothing more at the store and nobody else
    /// has the connection; polled by the runtime that drives it. Dropped at any point when that takes
    /// too long. There is nothing to take back unless an implementation says otherwise.
    fn close(self: Arc<Self>) -> BoxFuture<()> {
        Box::pin(std::future::ready(()))
    }
}

/// 365.25 days, which messages call a year.
const YEAR: Duration = Duration::from_secs(31_557_600);

/// What a store can promise; the behaviour suite runs the facts that apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    /// Other processes see the tickets. Without it, the ids of requests differ within this process only:
    /// they are counted instead of drawn at random, which saves a system call.
    pub cross_process: bool,
    /// A release wakes the next in line; otherwise waiters learn by their renewals.
    pub pushes: bool,
    /// The longest ttl that a ticket may have.
    pub longest_ttl: Duration,
    /// A ticket lives as long as the session of the client that took it, and not by its own ttl:
    /// all runtimes of a process use the one connection that the keeper drives, so that tickets
    /// outlive the runtime that took them, and a lease that has run out is removed by the keeper,
    /// which does not give up before the store has acknowledged it.
    pub sessions: bool,
    /// How many tickets a connection takes at the same time, and of how many it releases. The core
    /// keeps the others back until it is their turn, in order of arrival. Renewals are never kept
    /// back, so a burst of requests cannot delay them by more than this many requests take.
    /// `u32::MAX` keeps nothing back.
    pub in_flight: u32,
}

impl Capability {
    /// Pushes wake-ups, several processes, a ttl of up to a year, and 1,000 requests in flight.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            cross_process: true,
            pushes: true,
            longest_ttl: YEAR,
            sessions: false,
            in_flight: 1_000,
        }
    }

    /// Sets [`cross_process`](Self::cross_process).
    #[must_use]
    pub const fn cross_process(mut self, yes: bool) -> Self {
        self.cross_process = yes;
        self
    }

    /// Sets [`pushes`](Self::pushes).
    #[must_use]
    pub const fn pushes(mut self, yes: bool) -> Self {
        self.pushes = yes;
        self
    }

    /// Sets [`longest_ttl`](Self::longest_ttl).
    #[must_use]
    pub const fn longest_ttl(mut self, ttl: Duration) -> Self {
        self.longest_ttl = ttl;
        self
    }

    /// Sets [`sessions`](Self::sessions).
    #[must_use]
    pub const fn sessions(mut self, yes: bool) -> Self {
        self.sessions = yes;
        self
    }

    /// Sets [`in_flight`](Self::in_flight); at least 1.
    #[must_use]
    pub const fn in_flight(mut self, requests: u32) -> Self {
        self.in_flight = if requests == 0 { 1 } else { requests };
        self
    }
}

impl Default for Capability {
    fn default() -> Self {
        Self::new()
    }
}

/// The answer to [`Connection::enqueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// The permits are held, for this long from the moment that the request was sent.
    Granted {
        /// The number of the ticket, at most [`MAX_TICKET`](crate::token::MAX_TICKET).
        ticket: u64,
        /// The ttl that the store gave.
        valid_for: Duration,
    },
    /// In line.
    Waiting {
        /// The number of the ticket.
        ticket: u64,
        /// The ttl that the store gave.
        valid_for: Duration,
        /// When the ticket may have moved up without a wake-up, because a holder's time is over
        /// then. `None` leaves it to the ordinary renewals.
        recheck_in: Option<Duration>,
    },
    /// Not free, and the request was not to wait, or would have had to behind
    /// [`MOST_TICKETS`](crate::queue::MOST_TICKETS): nothing was left behind.
    Busy {
        /// When the first of the holders' leases ends if it is not renewed.
        retry_in: Option<Duration>,
    },
    /// The name is in use with this capacity: nothing was left behind.
    CapacityMismatch {
        /// The capacity of the oldest live ticket.
        in_use: u32,
    },
    /// The ticket's release was here first, or an earlier request took the ticket and it has
    /// expired since: nothing was left behind.
    Gone,
}

/// The answer to [`Connection::renew`], for one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// Holds.
    Granted {
        /// The ttl that the store gave, from the moment that the request was sent.
        valid_for: Duration,
    },
    /// In line.
    Waiting {
        /// The ttl that the store gave, from the moment that the request was sent.
        valid_for: Duration,
        /// As in [`Enqueued::Waiting`].
        recheck_in: Option<Duration>,
    },
    /// There is no such ticket.
    Lost,
    /// Something is wrong with this ticket alone; whether it was renewed is unknown.
    Failed,
}

/// A ticket to be removed.
#[derive(Clone, Debug)]
pub struct Departure {
    /// The request as it was enqueued.
    pub request: Arc<Request>,
    /// An enqueue of this id may still be on its way: leave a mark that makes it answer
    /// [`Enqueued::Gone`].
    pub enqueue_may_follow: bool,
}

/// The answer to [`Connection::release`], for one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// The ticket was there and is gone.
    Released,
    /// It was not there.
    NotFound,
    /// Something is wrong with this ticket alone; whether it is gone is unknown.
    Failed,
}

/// A ticket as [`Locks::inspect`](crate::Locks::inspect) shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The number of the ticket.
    pub ticket: u64,
    /// Whether it holds its permits; otherwise it waits.
    pub granted: bool,
    /// How many permits.
    pub permits: u32,
    /// The capacity that it was asked with.
    pub capacity: u32,
    /// How long it lives without a renewal.
    pub remaining: Duration,
    /// Who asked: `host/pid/client`, by the library.
    pub owner: String,
    /// What the application said of itself: [`Builder::owner`](crate::Builder::owner), or
    /// [`Lock::owner`](crate::Lock::owner). As true as the application is.
    pub owner_text: Option<String>,
    /// How many wait in memory for this ticket to be passed on to them, where that is known: by the
    /// client that looks.
    pub local_waiters: u32,
}

impl Place {
    /// A ticket as a store found it, with the owner that the [request](Request::owner) had.
    #[must_use]
    pub fn new(
        ticket: u64,
        granted: bool,
        permits: u32,
        capacity: u32,
        remaining: Duration,
        owner: String,
    ) -> Self {
        let (owner, text) = match owner.split_once(' ') {
            Some((owner, text)) => (owner.to_owned(), Some(text.to_owned())),
            None => (owner, None),
        };
        Self {
            ticket,
            granted,
            permits,
            capacity,
            remaining,
            owner,
            owner_text: text,
            local_waiters: 0,
        }
    }
}

/// What a store's failure did to the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It was not carried out; the same request may succeed in a moment.
    Retry,
    /// It was not carried out, and repeating it soon will not help.
    Refused,
    /// It may have been carried out.
    Unknown,
    /// It was not carried out, and will not be until somebody changes the configuration. See
    /// [`StoreError::halfway`] for one that was denied after it had begun.
    Config,
}

/// A verb's failure.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    fault: Fault,
    message: String,
    broken: bool,
    halfway: bool,
}

impl StoreError {
    /// A failure with its effect, and a text that carries no secrets.
    #[must_use]
    pub fn new(fault: Fault, message: impl Into<String>) -> Self {
        Self {
            fault,
            message: message.into(),
            broken: false,
            halfway: false,
        }
    }

    /// A failure with its effect, after which the connection is of no use: the core opens another.
    /// What became of the request is a separate question. A server that has become a replica, for
    /// example, refuses a write for certain and will refuse every later one on this connection.
    #[must_use]
    pub fn replace(fault: Fault, message: impl Into<String>) -> Self {
        Self {
            broken: true,
            ..Self::new(fault, message)
        }
    }

    /// The connection broke under the request, whose fate is unknown; the core opens another.
    #[must_use]
    pub fn broken(message: impl Into<String>) -> Self {
        Self::replace(Fault::Unknown, message)
    }

    /// The request was answered, and stopped for good after it had begun, for example by a right that was taken
    /// away: part of it may have been carried out. The core gives back the ticket that an enqueue may have left.
    #[must_use]
    pub fn halfway(message: impl Into<String>) -> Self {
        Self {
            halfway: true,
            ..Self::new(Fault::Config, message)
        }
    }

    /// What it did to the request.
    #[must_use]
    pub fn fault(&self) -> Fault {
        self.fault
    }

    /// Whether the connection is of no use any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether part of the request may have been carried out, though it was answered.
    #[must_use]
    pub fn is_halfway(&self) -> bool {
        self.halfway
    }

    /// The failure of a request that takes nothing.
    pub(crate) fn unavailable_unless_config(self) -> Error {
        match self.fault {
            Fault::Config => Error::config(self.to_string()),
            Fault::Retry | Fault::Refused | Fault::Unknown => Error::unavailable(self.to_string()),
        }
    }
}

/// What a store's refusal means to the caller. An [`Fault::Unknown`] is passed on as it is: only
/// the acquire loop knows whether a repetition has settled it.
impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error.fault() {
            Fault::Config => Self::config(message),
            Fault::Retry | Fault::Refused => Self::unavailable(message),
            Fault::Unknown => Self::unknown(message),
        }
    }
}

/// The identity of a ticket together with its number, as a wake-up carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wake {
    /// Whose turn it is.
    pub id: Id,
    /// Its number; a wake-up that does not know it grants nothing.
    pub ticket: u64,
}
