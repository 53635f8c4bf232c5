//! A store for tests of code that uses locks. What does the code do when its lock is lost, or
//! cannot be taken?
//!
//! [`Store`] is the memory store, with a clock that the test advances and with faults that the test
//! asks for. The client in front of the store is the real one. It renews, retries, reconnects,
//! gives up and cleans up as it would in front of a server. With
//! [`with_default`](crate::with_default), the store also serves code that uses the process-wide
//! default, for example annotated functions.
//!
//! This module needs the feature `testing`, which belongs in `[dev-dependencies]`:
//! `lockcore = { version = "0.1", features = ["testing"] }`. The module is as stable as the rest of
//! the crate. Its items that also need the feature `backend` are as stable as
//! [`backend`](crate::backend).
//!
//! ```
//! use std::time::Duration;
//!
//! use lockcore::testing::{Store, Verb};
//! use lockcore::{Error, ErrorKind, LostReason, distributed_lock};
//!
//! #[distributed_lock(key = "order:{id}")]
//! async fn settle(id: u64, charge: impl Future<Output = ()>) -> Result<(), Error> {
//!     charge.await;
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Error> {
//! // In a test of yours this is the body of a `#[tokio::test]`.
//! let store = Store::new();
//! let locks = store.client()?;
//!
//! // The store hangs while the card is being charged, until the lease has run out.
//! let mut charged = false;
//! let charge = async {
//!     store.freeze();
//!     store.clock().advance(Duration::from_secs(10));
//!     tokio::task::yield_now().await;
//!     charged = true;
//! };
//! let outcome = lockcore::with_default(locks.clone(), settle(42, charge)).await;
//!
//! assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Lost(LostReason::Expired));
//! assert!(!charged, "the body was stopped where it stood");
//!
//! // The next one gets the lock, although the reply to its first request is lost.
//! store.thaw();
//! store.lose_next_reply(Verb::Enqueue);
//! lockcore::with_default(locks, settle(42, async {})).await?;
//! # Ok(()) }
//! ```
//!
//! # Simulating another process
//!
//! Every call of [`client`](Store::client) makes a new client. It excludes the other clients, as a
//! client in another process does. A client of [`another_process`](Store::another_process) also has
//! a network of its own to the same store. So a test can cut off one client while another works:
//!
//! ```
//! use std::time::Duration;
//!
//! use lockcore::testing::Store;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lockcore::Error> {
//! let store = Store::new();
//! let there = store.another_process();
//! let theirs = there.client()?.mutex("leader").acquire().await?;
//! assert!(store.client()?.mutex("leader").try_acquire().await.is_err());
//!
//! // The same effect as killing that process.
//! there.freeze();
//! store.clock().advance(Duration::from_secs(10));
//!
//! assert!(!theirs.is_valid());
//! let ours = store.client()?.mutex("leader").try_acquire().await?;
//! assert!(ours.fencing_token()? > theirs.fencing_token()?);
//! # Ok(()) }
//! ```

#[cfg(feature = "backend")]
mod around;
#[cfg(feature = "backend")]
pub mod conformance;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

pub use crate::backend::Fault;
use crate::backend::memory;
use crate::backend::{Answer, Backend, Capability, Connection, EventSink};
use crate::builder::Builder;
use crate::clock;
use crate::error::Error;
use crate::locks::Locks;
#[cfg(feature = "backend")]
pub use around::around;
pub use wire::Verb;
use wire::{Fate, Parcel, Wire};

/// A store inside the test. The test controls its clock and its faults. Clones are the same store.
///
/// Each call for a fault affects one request: the next request of that kind. Several calls affect
/// the following requests in the order of the calls. See the [module](self) for examples.
#[derive(Clone)]
pub struct Store {
    tickets: Arc<memory::Store>,
    clock: Clock,
    wire: Arc<Wire>,
}

impl Store {
    /// An empty store with a running clock.
    #[must_use]
    pub fn new() -> Self {
        let clock = clock::Clock::by_hand();
        let tickets = Arc::new(memory::Store::new(clock.clone()));
        Self {
            wire: Arc::new(Wire::to(&tickets)),
            tickets,
            clock: Clock(clock),
        }
    }

    /// The same store as another process would see it: tickets and clock are shared, faults are
    /// not.
    #[must_use]
    pub fn another_process(&self) -> Self {
        Self {
            wire: Arc::new(Wire::to(&self.tickets)),
            ..self.clone()
        }
    }

    /// A client with the default configuration. Each call makes another client.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when no thread can be started, or memory is
    /// short.
    pub fn client(&self) -> Result<Locks, Error> {
        self.client_with(Locks::builder())
    }

    /// A client with the configuration of `builder`. The URL of the builder is not used.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn client_with(&self, builder: Builder) -> Result<Locks, Error> {
        let store = Arc::new(self.clone());
        builder.build_with(store, String::new(), self.clock.0.clone())
    }

    /// The clock of this store, and of the leases of its clients.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The next request is carried out, and then the connection breaks before the reply arrives.
    pub fn lose_next_reply(&self, verb: Verb) {
        self.wire.next(verb, Fate::LoseReply);
    }

    /// The connection breaks before the next request arrives at the store.
    pub fn lose_next_request(&self, verb: Verb) {
        self.wire.next(verb, Fate::LoseRequest);
    }

    /// The next request is not carried out, and is answered with an error.
    pub fn fail_next(&self, verb: Verb, fault: Fault) {
        self.wire.next(verb, Fate::Fail(fault));
    }

    /// Holds the next request back, before it arrives at the store, until the test lets it arrive.
    /// The store carries it out at that time, even if the client that sent it has given up.
    #[must_use = "the request is let go when this is dropped"]
    pub fn hold_next(&self, verb: Verb) -> Hold {
        let (gate, request) = oneshot::channel();
        self.wire.next(verb, Fate::Hold(gate));
        Hold {
            wire: Arc::clone(&self.wire),
            request,
            arrived: None,
        }
    }

    /// The next wake-up does not arrive. The waiter learns from its renewal that it has the lock.
    pub fn lose_next_wake_up(&self) {
        self.wire.lose_next_wake_up();
    }

    /// From now on no request is answered, and no wake-up is sent. Requests that are sent during
    /// the freeze are kept.
    pub fn freeze(&self) {
        self.wire.freeze();
    }

    /// Ends a [`freeze`](Self::freeze). The requests that were kept are carried out in order, even
    /// if no caller waits for their answers any more.
    pub fn thaw(&self) {
        self.wire.thaw();
    }

    /// Breaks all connections. Requests in flight get no answer. Clients connect again, and renew
    /// every ticket that they have.
    pub fn break_connections(&self) {
        self.wire.break_connections();
    }

    /// Forgets all data of all processes: tickets, stored capacities, counters and values. A holder
    /// learns of its loss at its next renewal. If the test also calls
    /// [`break_connections`](Self::break_connections), the holder learns of it at once, as after a
    /// restart of a server without its data.
    pub fn lose_data(&self) {
        self.tickets.lose_data();
    }
}

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

/// With this a test can talk to the store directly, or wrap it in a store of its own. A client from
/// [`Locks::with_backend`] has a clock of its own, and [`Clock::advance`] does not affect it.
impl Backend for Store {
    fn capability(&self) -> Capability {
        Capability::new()
            .tells_holders(true)
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            .counters(true)
            .watches(true)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        self.wire.connect(events)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// The clock by which a [`Store`] and its clients measure leases. It is independent of tokio's
/// clock, paused or not.
#[derive(Clone, Debug)]
pub struct Clock(clock::Clock);

impl Clock {
    /// Moves the clock ahead at once, as a suspend of the machine does. Work that became due in
    /// that time, for example a renewal, is done only afterwards. So a lease that ends in that time
    /// is lost, even if it is renewed regularly. If a test advances by at most a third of a ttl at
    /// a time, the renewals are in time.
    pub fn advance(&self, by: Duration) {
        self.0.advance(by);
    }

    /// From now on the clock moves only by [`advance`](Self::advance). This is for tests that
    /// depend on exact times. Everything that waits for a time then waits until the test advances
    /// the clock. This includes operation timeouts, and the pauses before a client sends a request
    /// again or connects again.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Makes a client of the store that `builder` names. The client measures its leases and timeouts
    /// by this clock. The store has a clock of its own, unless it is this clock's [`Store`].
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn client_with(&self, builder: Builder) -> Result<Locks, Error> {
        builder.build_at(self.0.clone())
    }
}

/// A request that is held back before it arrives at the store. It arrives when this value is
/// dropped.
pub struct Hold {
    wire: Arc<Wire>,
    request: oneshot::Receiver<Parcel>,
    arrived: Option<Parcel>,
}

impl Hold {
    /// Waits until a client has sent the request.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn arrived(&mut self) {
        if self.arrived.is_none() {
            // The sender of this channel is dropped only after it has sent a request, or together
            // with the store.
            self.arrived = (&mut self.request).await.ok();
        }
    }

    /// Lets the request arrive. If no client has sent a request of this kind yet, the next one is
    /// not held back.
    pub fn let_go(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A request that comes from now on finds the channel closed, and is not held back.
        self.request.close();
        if let Some(request) = self.arrived.take().or_else(|| self.request.try_recv().ok()) {
            self.wire.deliver(request);
        }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("arrived", &self.arrived.is_some())
            .finish_non_exhaustive()
    }
}
