//! The contract between the core and a store.
//!
//! A store keeps **tickets**: which client asked for how many permits of a name, in which order,
//! and until when. Holders and waiters are the same record. One rule decides which tickets hold:
//!
//! > A ticket is granted when the permits of all older live tickets plus its own are at most the
//! > capacity. A grant lasts until release or expiry; no later computation takes it back.
//!
//! All tickets of a name have the same capacity, and this capacity counts. If a capacity is
//! [stored](Resize) for the name, the stored capacity counts instead. When the capacity becomes
//! smaller, tickets that hold keep their permits. The next waiter is granted when its permits fit
//! into the smaller capacity.
//!
//! [`Queue`](queue::Queue) is that rule as plain code. A store adds storage for the tickets and a
//! way to wake clients. Beside the rule, a store must guarantee three things:
//!
//! - **The order is final.** Once a ticket is visible, no ticket with a smaller number ever
//!   appears.
//! - **A client that removes a ticket wakes others.** A client may release a ticket, remove one
//!   that has expired, or make one smaller. In the same atomic step, the client notifies the owner
//!   of every ticket that is granted by this.
//! - **Operations are idempotent by id.** They do not loop, retry or sleep: the core handles
//!   deadlines, repetition, renewal, clean-up and reconnecting, once for all stores.
//!
//! Beside the tickets, a store may keep **counters**: one number per name, which clients change in
//! atomic steps and [watch](Connection::watch). The primitives that are not locks, for example a
//! latch, are built on counters. The holder of a lock can write a *value*. A store keeps it in the
//! same way, under a [name of its own](Name::value).
//!
//! `testing::conformance` checks a store against this contract; the example `own_store` is a store
//! that passes it.
//!
//! This module needs the feature `backend`. A `0.x` release of lockcore may change the contract
//! when a store of this crate needs it, and the changelog says how. So a store outside of this
//! crate should depend on one exact minor version.
//!
//! The core may drop the future of an operation at any point, or move it to another thread and
//! finish it there. So the future must not depend on timers or tasks of the runtime that first
//! polled it, except for the connection's own driver.

mod adoption;
mod capability;
#[cfg(feature = "etcd")]
pub(crate) mod etcd;
mod events;
mod fault;
#[cfg(any(
    feature = "etcd",
    feature = "mysql",
    feature = "postgres",
    feature = "redis",
    feature = "zookeeper"
))]
mod hosts;
pub(crate) mod meant;
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
pub(crate) mod open;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(any(
    feature = "etcd",
    feature = "postgres",
    feature = "redis",
    feature = "zookeeper"
))]
mod query;
#[cfg(feature = "redis")]
pub(crate) mod redis;
mod shown;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod socket;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod table;
#[cfg(feature = "zookeeper")]
pub(crate) mod zookeeper;

/// The rule as plain code: the tickets of one name in order, and which of them hold. No clock and
/// no I/O: time is a number that the caller passes in.
pub mod queue {
    pub use crate::queue::{MOST_TICKETS, NewTicket, NoTicket, Queue, Ticket, granted, granted_of};
}

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub use crate::counting::{
    Count, CountOp, Counted, KEEP, MAX_COUNT, MAX_TEXT, MOST_REMEMBERED, OnlyIf, Outcome, Written,
};
pub use crate::name::{Name, Namespace};
pub use crate::request::{FULL, Id, Request};
pub use crate::resizing::{Resize, ResizeOp, ResizeOutcome, Resized};
pub use crate::token::MAX_TICKET;
pub use adoption::Adoption;
pub use capability::Capability;
pub use events::{EventSink, News};
pub use fault::{Fault, StoreError};
pub use open::open;
pub use shown::{AskedBack, Listing, NameInUse, Page, Summary, TicketInfo};

/// A future that may be moved between threads.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The result of an operation, as a future.
pub type Answer<T> = BoxFuture<Result<T, StoreError>>;

/// A store of tickets. The [module](self) says what an implementation must guarantee.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// The promises of this store.
    fn capability(&self) -> Capability;

    /// Opens a connection. The tokio runtime that polls this future drives the connection.
    ///
    /// The connection is usable when the future resolves. From then on, `events` gets the wake-ups
    /// for tickets that are enqueued on this connection. The store calls [`EventSink::gap`] when
    /// wake-ups may have been missed. It drops `events` when the connection cannot be used any
    /// more; the core then opens another one.
    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>>;

    /// A possible reason why [`connect`](Self::connect) got no answer in time, in addition to the
    /// usual ones. It is appended to the error message.
    fn silence(&self) -> &'static str {
        ""
    }
}

/// A connection to a store: the operations.
///
/// Requests are shared, not copied. The core renews and releases a ticket with the request that
/// enqueued it, except when the ticket is to become [smaller](Self::renew).
///
/// A store implements at least [`enqueue`](Self::enqueue), [`renew`](Self::renew),
/// [`release`](Self::release), [`inspect`](Self::inspect), [`forget`](Self::forget) and
/// [`check`](Self::check). A connection that wraps another one implements [`inner`](Self::inner)
/// and the verbs that it changes.
pub trait Connection: fmt::Debug + Send + Sync + 'static {
    /// The connection that this one wraps. Every verb that is not implemented is passed on to it.
    /// `None`, the default, for the connection of a store.
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        None
    }

    /// Takes a ticket. If an earlier attempt with the same id has left one, finds that ticket and
    /// renews it.
    ///
    /// The caller waits for the answer no longer than `patience`. A store uses `patience` if its
    /// server waits before it answers, and can be told for how long. Other stores ignore it. When
    /// `patience` is over, the core polls the future one last time, and then gives up. If the store
    /// knows by then what became of the request, this poll can return the answer.
    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        match self.inner() {
            Some(inner) => inner.enqueue(request, patience),
            None => unsupported("take tickets"),
        }
    }

    /// The longest ttl that a ticket of this connection can have, if that is less than
    /// [`Capability::longest_ttl`]. It is the length of the session at a store with
    /// [sessions](Capability::sessions), which the server decides. The core asks for no longer ttl
    /// for a lease that it renews. By default there is no such limit.
    fn longest_ttl(&self) -> Duration {
        self.inner()
            .map_or(Duration::MAX, |inner| inner.longest_ttl())
    }

    /// Extends tickets to the ttl of these requests, counted from now. One answer per ticket, in
    /// order. Never creates a ticket.
    ///
    /// The ttl may be longer or shorter than that of the enqueue or of the last renewal. A shorter
    /// one ends the ticket earlier than before. The ticket keeps its number and its position.
    ///
    /// If a request has fewer permits than its ticket, the ticket becomes smaller, for good. For
    /// example, a writer becomes a reader. The same atomic step wakes every ticket that is granted
    /// by this. The ticket keeps its number and its position. A ticket never gets more permits.
    ///
    /// `patience` is that of [`enqueue`](Self::enqueue).
    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        match self.inner() {
            Some(inner) => inner.renew(tickets, patience),
            None => unsupported("renew tickets"),
        }
    }

    /// Removes tickets. One answer per ticket, in order.
    ///
    /// If this lets in a waiter that was enqueued on the same connection, the server may put the
    /// wake-up into its answer in place of a message. The connection then reports it to its
    /// [`EventSink`] when the answer arrives, even if the caller has dropped the future.
    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        match self.inner() {
            Some(inner) => inner.release(tickets),
            None => unsupported("release tickets"),
        }
    }

    /// The live tickets of a name, oldest first.
    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        match self.inner() {
            Some(inner) => inner.inspect(name),
            None => unsupported("show the tickets of a name"),
        }
    }

    /// A page of the names in use, that is, of the names that have a ticket. A name that stays in
    /// use while all pages are read is on one of the pages. A name that is in use for only a part
    /// of that time may be on one page, on two, or on none. A ticket that has expired but was not
    /// removed yet may count.
    ///
    /// By default this is refused.
    fn list(&self, listing: Listing) -> Answer<Page> {
        match self.inner() {
            Some(inner) => inner.list(listing),
            None => unsupported("list the names in use"),
        }
    }

    /// Asks the holder of a ticket to give the ticket up. Returns whether the ticket is there.
    ///
    /// Stores `ask`, the ask-back, after the [owner](Request::owner) of the ticket and a line
    /// break. It replaces an earlier ask-back. After that, a renewal of the ticket answers
    /// [`Renewed::AskedBack`] if the ticket holds, and [`inspect`](Self::inspect) returns the owner
    /// with the ask-back. If the store can send messages, it sends [`EventSink::recheck`] to the
    /// client of the ticket, so that this client renews at once. Everything else about the ticket
    /// stays as it is.
    ///
    /// At a store with [sessions](Capability::sessions), a renewal that follows another one within
    /// a third of the ttl may answer [`Renewed::Granted`] all the same. Such a store shows the
    /// whole ttl as the time that remains.
    ///
    /// `ask` has no line break, and at most 200 bytes.
    ///
    /// By default this is refused: locks of the store cannot be revoked.
    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        match self.inner() {
            Some(inner) => inner.ask_back(name, id, ask),
            None => unsupported("ask a holder to give its lock up"),
        }
    }

    /// Prepares a held ticket for its [adoption](Self::adopt) by another client. After the answer, the
    /// ticket does not depend on the session of this client any more: it ends after its ttl, counted
    /// from this call at the earliest, even if the client is closed or goes on. A second call does the
    /// same once more.
    ///
    /// If the future is dropped, or the answer is lost, the ticket may have left the session or not. It
    /// may also leave it later, when the request arrives. In each of these cases the ticket holds for
    /// its ttl at least, and nobody adopts it, because the client gives the ticket's text away only after
    /// the answer. If the client keeps the ticket, its next renewal that begins after this call takes
    /// the ticket back into the session. From the answer to that renewal on, a request of this call that
    /// arrives late changes nothing. A release removes the ticket in any case.
    ///
    /// The core calls this only at a store with [sessions](Capability::sessions) that
    /// [adopts](Capability::adopts). It begins no renewal of the ticket during the call. By default there
    /// is nothing to do.
    fn detach(&self, ticket: Arc<Request>) -> Answer<()> {
        match self.inner() {
            Some(inner) => inner.detach(ticket),
            None => Box::pin(std::future::ready(Ok(()))),
        }
    }

    /// Gives the ticket of another client to the client of this connection: see [`Adoption`].
    /// Answers [`Enqueued::Granted`] or [`Enqueued::Gone`].
    ///
    /// In one atomic step, the ticket gets the [id](Request::id), the [owner](Request::owner) and
    /// the [ttl](Request::ttl) of the new request. The ttl counts from now. After this step, the
    /// store sends the wake-ups of the ticket to this connection. The ticket keeps its number, its
    /// permits and its position. If somebody has [asked the ticket back](Self::ask_back), the store
    /// keeps this ask-back after the new owner. The earlier id names no ticket any more. If the
    /// ticket has the new id already, an earlier attempt has succeeded, and this attempt renews the
    /// ticket.
    ///
    /// At a store with [sessions](Capability::sessions), a renewal of several tickets that follows
    /// another one within a third of the ttl may answer [`Renewed::Granted`] for the earlier id all
    /// the same. Nobody uses this answer, because the client has given the ticket away.
    ///
    /// The answer is `Gone`, and nothing has changed, in these cases:
    ///
    /// - There is no such ticket, or it has expired, or it waits.
    /// - Its number, its permits or its capacity are not those of the adoption.
    /// - The release of the new id has arrived before this adoption.
    ///
    /// By default this is refused: see [`Capability::adopts`].
    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        match self.inner() {
            Some(inner) => inner.adopt(adoption),
            None => unsupported("hand a held lock over to another client"),
        }
    }

    /// Reads or changes the capacity that is stored for a name. The same atomic step wakes every
    /// ticket that is granted by the change. Tickets that hold keep their permits.
    ///
    /// A repetition of a change has the same [id](Resize::id). It changes nothing and answers that
    /// the change was [carried out](ResizeOutcome::Applied), as long as no other change has
    /// followed. If the requests of two clients conflict, the store may fail with
    /// [`StoreError::conflict`], and the core sends the request again.
    ///
    /// A stored capacity stays until a client takes it back, even while the name is not in use.
    /// While it is stored, [`inspect`](Self::inspect) shows it for each ticket.
    ///
    /// By default this is refused: semaphores of the store cannot be resized.
    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        match self.inner() {
            Some(inner) => inner.resize(resize),
            None => unsupported("store the capacity of a semaphore"),
        }
    }

    /// Forgets everything about a name that is not in use. Does nothing while the name has a
    /// ticket. The id of the last [change](Resized::change) of its capacity is kept for a minute all
    /// the same, so that a repetition of this change does not count again.
    fn forget(&self, name: Name) -> Answer<()> {
        match self.inner() {
            Some(inner) => inner.forget(name),
            None => unsupported("forget a name"),
        }
    }

    /// Reads or changes a counter, or the [value](Name::value) of a lock, in one atomic step. A
    /// repetition of a change has the same [id](Count::id). It changes nothing and gets the answer
    /// of the first attempt. If the requests of two clients conflict, the store may fail with
    /// [`StoreError::conflict`], and the core sends the request again.
    ///
    /// A counter lives for at least its [`keep`](Count::keep) after the last request for it. The
    /// store does not depend on the wall clock of one client for this. When the counter gets a new
    /// version, the store tells each client that [watches](Self::watch) it, once. The store may
    /// also tell these clients of a change that was refused, but not of a read or a repetition.
    ///
    /// A store that has no counters need not implement this: see [`Capability::counters`].
    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        match self.inner() {
            Some(inner) => inner.count(count),
            None => unsupported("keep counters, latches, barriers and the values of locks"),
        }
    }

    /// Starts to watch the counter of a name. From the answer on, the store sends [`News::Changed`]
    /// to this connection whenever the counter changes, until [`unwatch`](Self::unwatch) or the end
    /// of the connection. Watching a name twice is the same as once.
    ///
    /// The core calls this only if the store [pushes](Capability::watches) changes.
    fn watch(&self, name: Name) -> Answer<()> {
        match self.inner() {
            Some(inner) => inner.watch(name),
            None => unsupported("push the changes of counters"),
        }
    }

    /// Ends [`watch`](Self::watch). If this fails, the store may send news of the name until the
    /// connection ends.
    fn unwatch(&self, name: Name) -> Answer<()> {
        match self.inner() {
            Some(inner) => inner.unwatch(name),
            None => Box::pin(std::future::ready(Ok(()))),
        }
    }

    /// Checks the server's version and settings. Returns warnings for an operator.
    ///
    /// A check that the client has no right to make is skipped.
    fn check(&self) -> Answer<Vec<String>> {
        match self.inner() {
            Some(inner) => inner.check(),
            None => unsupported("check its server"),
        }
    }

    /// Ends what the store keeps for the client in addition to the connection, for example a
    /// session.
    ///
    /// The core calls this once, at the end of the client. By then the client has no more tickets
    /// at the store, and nobody else uses the connection. The runtime that drives the connection
    /// polls the future. The core drops the future, at any point, if it takes too long. By default
    /// there is nothing to do.
    fn close(self: Arc<Self>) -> BoxFuture<()> {
        match self.inner() {
            Some(inner) => Arc::clone(inner).close(),
            None => Box::pin(std::future::ready(())),
        }
    }
}

/// The answer of a store that does not implement a verb.
fn unsupported<T: Send + 'static>(what: &str) -> Answer<T> {
    let text = format!("this store cannot {what}");
    Box::pin(std::future::ready(Err(StoreError::new(
        Fault::Config,
        text,
    ))))
}

/// The answer to [`Connection::enqueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Enqueued {
    /// The permits are held, for `valid_for` from the moment that the request was sent.
    Granted {
        /// The number of the ticket, at most [`MAX_TICKET`].
        ticket: u64,
        /// The ttl that the store gave.
        valid_for: Duration,
    },
    /// The ticket stands in line.
    Waiting {
        /// The number of the ticket.
        ticket: u64,
        /// The ttl that the store gave.
        valid_for: Duration,
        /// The time after which the ticket may be granted without a wake-up, because a holder's
        /// lease ends then. With `None` the waiter only makes its ordinary renewals.
        recheck_in: Option<Duration>,
        /// The ticket right ahead: the youngest of the older tickets that were in the line when the
        /// store took this one. The store names it only if the request [asks for
        /// it](Request::name_ahead), if both tickets ask for [everything](FULL), and if it is a
        /// ticket of the same client. With `None`, which is always right, the waiter gets the lock
        /// by a wake-up only.
        ///
        /// When the ticket ahead has been held and its last user is done, the client lets the
        /// waiter in at once, and does not wait for the store. This is safe because everything
        /// older had ended before the ticket ahead could be held, because no ticket is between the
        /// two, and because the end of a ticket stays true. So this has to be the truth at the
        /// moment when the store took the ticket, or later. From a copy that may be older, a store
        /// may miss a ticket in between. A ticket that has expired counts until it is
        /// removed.
        ///
        /// **A waiter to which the store has named the ticket ahead may believe that it holds.** So
        /// from then on the store never shortens its lease, not even if a wake-up reached nobody.
        ahead: Option<Id>,
    },
    /// The permits are not free, and the request does not stand in line. The reason is one of
    /// three: the request does not wait; it would wait behind
    /// [`MOST_TICKETS`](queue::MOST_TICKETS); the store has [no queue](Capability::queues). The
    /// store keeps no ticket.
    Busy {
        /// The time until the first of the holders' leases ends, if it is not renewed.
        retry_in: Option<Duration>,
    },
    /// The name is in use with another capacity. The store keeps no ticket.
    CapacityMismatch {
        /// The capacity of the oldest live ticket, or the stored one.
        in_use: u32,
    },
    /// The release of this ticket has arrived before the enqueue. Or an earlier enqueue with this
    /// id took the ticket, and the ticket has expired since. The store keeps no ticket.
    Gone,
}

/// The answer to [`Connection::renew`], for one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Renewed {
    /// The ticket holds.
    Granted {
        /// The ttl that the store gave, from the moment that the request was sent.
        valid_for: Duration,
    },
    /// The ticket holds, and was asked back: see [`Connection::ask_back`].
    AskedBack {
        /// The ttl that the store gave, from the moment that the request was sent.
        valid_for: Duration,
        /// How much time the client has, from when it learns that the ticket was asked back:
        /// [`AskedBack::grace`].
        grace: Duration,
    },
    /// The ticket stands in line. Its client may believe all the same that it holds, if the store
    /// has named the [ticket ahead](Enqueued::Waiting::ahead) and has not seen the end of that one
    /// yet. So everything that a renewal does is done for a waiter too: its lease is extended, and
    /// it becomes [smaller](Connection::renew).
    Waiting {
        /// The ttl that the store gave, from the moment that the request was sent.
        valid_for: Duration,
        /// As in [`Enqueued::Waiting`].
        recheck_in: Option<Duration>,
        /// As in [`AskedBack`](Self::AskedBack), if the ticket was asked back. A store that does
        /// not tell a waiter tells it when it holds.
        grace: Option<Duration>,
    },
    /// There is no such ticket.
    Lost,
    /// Something is wrong with this ticket alone. Whether it was renewed is unknown.
    Failed,
}

impl Renewed {
    /// The answer for a ticket that holds, with the owner that is stored for it.
    pub fn holding(valid_for: Duration, owner: &str) -> Self {
        match AskedBack::grace_behind(owner) {
            Some(grace) => Self::AskedBack { valid_for, grace },
            None => Self::Granted { valid_for },
        }
    }

    /// The ttl that the store gave. Zero if the ticket was not renewed.
    pub(crate) fn valid_for(self) -> Duration {
        match self {
            Self::Granted { valid_for }
            | Self::AskedBack { valid_for, .. }
            | Self::Waiting { valid_for, .. } => valid_for,
            Self::Lost | Self::Failed => Duration::ZERO,
        }
    }

    /// Whether the ticket holds, as the store sees it.
    #[must_use]
    pub fn holds(self) -> bool {
        matches!(self, Self::Granted { .. } | Self::AskedBack { .. })
    }
}

/// A ticket to be removed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Departure {
    /// The request as it was enqueued, but with the longest ttl that a renewal has asked for. The
    /// ticket expires at the latest this long after the last request about it.
    pub request: Arc<Request>,
    /// Whether an enqueue of this id may arrive at the store later. If so, the store leaves a mark,
    /// and the late enqueue answers [`Enqueued::Gone`].
    pub enqueue_may_follow: bool,
}

impl Departure {
    /// The departure of the ticket of this request.
    #[must_use]
    pub fn new(request: Arc<Request>, enqueue_may_follow: bool) -> Self {
        Self {
            request,
            enqueue_may_follow,
        }
    }
}

/// The answer to [`Connection::release`], for one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Released {
    /// The ticket was there and has been removed.
    Released,
    /// The ticket was not there.
    NotFound,
    /// Something is wrong with this ticket alone. Whether it was removed is unknown.
    Failed,
}

/// The contents of a wake-up: the identity of a ticket together with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wake {
    /// The ticket that is granted.
    pub id: Id,
    /// The number of the ticket. A wake-up with another number grants nothing.
    pub ticket: u64,
}

impl Wake {
    /// The ticket with this id and this number is granted.
    #[must_use]
    pub const fn new(id: Id, ticket: u64) -> Self {
        Self { id, ticket }
    }
}
