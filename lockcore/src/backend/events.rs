//! The receiver of messages from a store's connection.

use std::sync::Arc;
use std::time::Duration;

use super::{BoxFuture, Wake};
use crate::name::{Name, Namespace};
use crate::request::Id;

/// Takes the messages that a store sends without being asked: the connection reports them here.
/// When the connection drops its `EventSink`, the connection cannot be used any more.
pub struct EventSink {
    receiver: u64,
    namespace: Namespace,
    default_ttl: Duration,
    op_timeout: Duration,
    tell: Box<dyn Fn(News) + Send + Sync>,
    timer: Timer,
}

/// Resolves after a time.
pub(crate) type Timer = Arc<dyn Fn(Duration) -> BoxFuture<()> + Send + Sync>;

/// A message that a store sends without being asked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum News {
    /// A ticket is granted.
    Granted(Wake),
    /// The core renews this ticket after this time.
    Recheck(Id, Duration),
    /// Somebody waits for this ticket, or was refused because of it.
    Wanted(Id),
    /// The counter of this name has changed. The client watches it, so the core reads it.
    Changed(Name),
    /// Wake-ups, and changes of watched counters, may have been missed.
    Gap,
    /// This address leads to another server than before. The store has closed the connections to
    /// the earlier server.
    Moved(String),
    /// This node of the store is out of reach, for this reason. The store goes on without it.
    NodeDown {
        /// The address of the node.
        address: String,
        /// What is wrong with the node.
        reason: String,
    },
    /// The node at this address is in reach again.
    NodeUp(String),
    /// A warning for an operator about the settings of the store, as from
    /// [`check`](super::Connection::check). The store sends it once.
    Warning(String),
}

impl std::fmt::Debug for EventSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventSink")
            .field("receiver", &self.receiver)
            .finish_non_exhaustive()
    }
}

impl EventSink {
    /// A receiver that is yours and not the core's. It is dropped together with the connection. Use
    /// it in a test that calls a store directly, or in a store that wraps another store.
    ///
    /// ```
    /// use std::sync::mpsc;
    ///
    /// use lockcore::backend::{self, EventSink, Namespace};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (tell, told) = mpsc::channel();
    /// let events = EventSink::new(1, Namespace::new("test")?, move |news| {
    ///     let _ = tell.send(news);
    /// });
    /// let connection = backend::open("memory:")?.connect(events).await?;
    /// // … enqueue, release, and see who is told …
    /// # drop((connection, told));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn new(
        receiver: u64,
        namespace: Namespace,
        tell: impl Fn(News) + Send + Sync + 'static,
    ) -> Self {
        Self {
            receiver,
            namespace,
            default_ttl: Duration::from_secs(10),
            op_timeout: Duration::from_secs(1),
            tell: Box::new(tell),
            timer: Arc::new(|after| Box::pin(tokio::time::sleep(after))),
        }
    }

    /// Sets the ttl that locks of the client have by default.
    pub(crate) fn with_default_ttl(mut self, ttl: Duration) -> Self {
        self.default_ttl = ttl;
        self
    }

    /// Sets how long an operation of the client may take.
    pub(crate) fn with_op_timeout(mut self, op_timeout: Duration) -> Self {
        self.op_timeout = op_timeout;
        self
    }

    /// Sets the timer of a client. It works without the timers of the connection's runtime.
    pub(crate) fn with_timer(mut self, timer: Timer) -> Self {
        self.timer = timer;
        self
    }

    /// A timer for the tasks of the connection.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
    pub(crate) fn timer(&self) -> Timer {
        Arc::clone(&self.timer)
    }

    /// A number that no other receiver of wake-ups has. It stays the same when the connection is
    /// replaced, so the store sends wake-ups for earlier tickets to the new connection.
    #[must_use]
    pub fn receiver(&self) -> u64 {
        self.receiver
    }

    /// The namespace of all names that the client uses.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The ttl of locks that do not set their own (`LOCK_TTL`). A session at the store should last
    /// this long without a heartbeat.
    #[must_use]
    pub fn default_ttl(&self) -> Duration {
        self.default_ttl
    }

    /// How long one operation may take (`LOCK_OP_TIMEOUT`), for a store that can tell its server of
    /// this limit.
    #[must_use]
    pub fn op_timeout(&self) -> Duration {
        self.op_timeout
    }

    /// A ticket is granted. May be called from any thread. Wakes the waiter without blocking.
    pub fn granted(&self, wake: Wake) {
        self.tell(News::Granted(wake));
    }

    /// Reports that a waiting ticket may be granted after this time, and that the store will send
    /// no wake-up for it. The core renews the ticket at that time, or after 100 ms if that is
    /// later. The meaning is that of [`recheck_in`](super::Enqueued::Waiting). The core also renews
    /// a ticket that holds, so a store calls this when a ticket is [asked
    /// back](super::Connection::ask_back).
    pub fn recheck(&self, id: Id, after: Duration) {
        self.tell(News::Recheck(id, after));
    }

    /// Reports that somebody waits for a ticket that [lingers](super::Request::lingers), or was refused
    /// because of it. The ticket does not linger any more after this: if it is not in use, the core
    /// releases it at once.
    pub fn wanted(&self, id: Id) {
        self.tell(News::Wanted(id));
    }

    /// The counter of this name has changed. Call this only for names that are
    /// [watched](super::Connection::watch).
    pub fn changed(&self, name: Name) {
        self.tell(News::Changed(name));
    }

    /// Wake-ups, or changes of counters, may have been missed. The core renews every ticket. It
    /// also watches and reads every watched counter again.
    pub fn gap(&self) {
        self.tell(News::Gap);
    }

    pub(crate) fn tell(&self, news: News) {
        (self.tell)(news);
    }
}
