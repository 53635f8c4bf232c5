//! Events about a client: trouble with the store, locks that were lost, and the grants of each
//! lock.

use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::broadcast;

use crate::clock::Instant;
use crate::error::LostReason;
use crate::log::guarded;
use crate::name::Name;
use crate::token::GrantId;

/// How many events are kept for a slow listener. Usually fewer events than this come between two
/// calls of a listener, unless very many locks are lost at once. Then the listener learns how many
/// events it has missed.
const KEPT: usize = 256;

/// Something that happened to a client: see [`Locks::events`](crate::Locks::events).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The store does not answer, or a connection to it broke. Locks that are held stay held until
    /// their leases run out. The client reconnects by itself.
    Suspended,
    /// The store answers again. The client asks the store at once about every ticket that it holds
    /// or waits for.
    Restored,
    /// A held lock was lost. Work under it is stopped by [`Lock::run`](crate::Lock::run).
    Lost {
        /// The name of the lock.
        name: String,
        /// The grant id of its last holder in this process.
        grant_id: GrantId,
        /// Why the lock was lost.
        reason: LostReason,
    },
    /// This address leads to another server than before, or the server was restarted before all
    /// connections of the client had noticed. The client has left the earlier server: it asks the
    /// new one about every ticket, and a lock that the new one does not have is lost.
    Moved(String),
    /// The node at this address, one of the servers of a [quorum](crate::guide::redis_quorum), is out
    /// of reach, or is the same server as another node. The client goes on without it while the
    /// other nodes are enough, and tries to reach it again. The log has the reason.
    NodeDown(String),
    /// The node at this address is in reach again.
    NodeUp(String),
    /// The listener was slow, and this number of events was dropped.
    Missed(u64),
}

/// A listener for the events of a client, from the moment that it was made.
///
/// If the store is out of reach at that moment, the first event is [`Event::Suspended`].
pub struct EventListener {
    /// An outage that began before the listener was made and was not over at that time.
    standing: Option<Event>,
    news: broadcast::Receiver<Event>,
}

impl EventListener {
    /// The next event; `None` when the client is gone.
    ///
    /// # Cancel safety
    ///
    /// Safe: an event that was not returned is returned by the next call.
    pub async fn recv(&mut self) -> Option<Event> {
        if let Some(standing) = self.standing.take() {
            return Some(standing);
        }
        match self.news.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Lagged(missed)) => Some(Event::Missed(missed)),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

impl fmt::Debug for EventListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventListener").finish_non_exhaustive()
    }
}

/// Something that happened to a grant of one lock in this client: see
/// [`Lock::grants`](crate::Lock::grants).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrantEvent {
    /// A task of this client has the lock.
    Granted(GrantId),
    /// Somebody asks for the lock ([`Locks::revoke`](crate::Locks::revoke)) while this grant holds
    /// it.
    AskedBack(GrantId),
    /// The lock was lost while this grant held it. A listener gets this at once. For a reader it
    /// comes when the reader's last guard ends, because the readers of one process share tickets.
    Lost(GrantId, LostReason),
    /// The last guard of the grant has ended, and the lock was not known to be lost. The store may
    /// not know of the release yet. If the store then answers that the lock had been lost before,
    /// [`Lost`](Self::Lost) follows.
    Released(GrantId),
    /// The grant was [given away](crate::Guard::detach). The client that adopts it has a grant with
    /// the same id.
    Detached(GrantId),
    /// The listener was slow, and this number of events was dropped. Some of them may be about
    /// other locks.
    Missed(u64),
}

/// A listener for the grants of one lock in this client, from the moment that it was made.
pub struct GrantListener {
    name: String,
    news: broadcast::Receiver<(Name, GrantEvent)>,
}

impl GrantListener {
    /// The next event; `None` when the client is gone.
    ///
    /// # Cancel safety
    ///
    /// Safe: an event that was not returned is returned by the next call.
    pub async fn recv(&mut self) -> Option<GrantEvent> {
        loop {
            match self.news.recv().await {
                Ok((name, event)) if name.as_str() == self.name => return Some(event),
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    return Some(GrantEvent::Missed(missed));
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

impl fmt::Debug for GrantListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantListener")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The side that sends events to the listeners of a client.
#[derive(Default)]
pub(crate) struct Teller {
    /// Made for the first listener.
    listeners: OnceLock<broadcast::Sender<Event>>,
    /// Made for the first listener to grants.
    grants: OnceLock<broadcast::Sender<(Name, GrantEvent)>>,
    outage: Mutex<Option<Outage>>,
}

/// An outage: the store is out of reach.
struct Outage {
    since: Instant,
    /// Whether it has been reported that a person must correct something.
    mistake: bool,
}

impl Teller {
    pub(crate) fn listen(&self) -> EventListener {
        let listeners = self.listeners.get_or_init(|| broadcast::Sender::new(KEPT));
        // The listener subscribes before it reads the state. So an outage that begins or ends
        // between the two lines is reported, perhaps twice.
        let news = listeners.subscribe();
        EventListener {
            standing: self.is_suspended().then_some(Event::Suspended),
            news,
        }
    }

    pub(crate) fn listen_to_grants(&self, name: String) -> GrantListener {
        let listeners = self.grants.get_or_init(|| broadcast::Sender::new(KEPT));
        let news = listeners.subscribe();
        GrantListener { name, news }
    }

    pub(crate) fn tell_grant(&self, name: &Name, event: GrantEvent) {
        if let Some(listeners) = self.grants.get()
            && listeners.receiver_count() > 0
        {
            guarded(|| drop(listeners.send((name.clone(), event))));
        }
    }

    pub(crate) fn tell(&self, event: impl FnOnce() -> Event) {
        if let Some(listeners) = self.listeners.get()
            && listeners.receiver_count() > 0
        {
            guarded(|| drop(listeners.send(event())));
        }
    }

    /// Whether anybody listens.
    pub(crate) fn is_heard(&self) -> bool {
        let listeners = self.listeners.get();
        listeners.is_some_and(|listeners| listeners.receiver_count() > 0)
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.outage().is_some()
    }

    /// Notes an outage and tells the listeners once, however many connections break and however
    /// often the client tries to reconnect. Returns whether this is news. A mistake that is found
    /// later in the same outage is news too.
    pub(crate) fn suspended(&self, now: Instant, mistake: bool) -> bool {
        let mut outage = self.outage();
        if let Some(outage) = &mut *outage {
            return mistake && !std::mem::replace(&mut outage.mistake, true);
        }
        *outage = Some(Outage {
            since: now,
            mistake,
        });
        drop(outage); // sending runs wakers, which are users' code
        self.tell(|| Event::Suspended);
        true
    }

    /// The outage is over. Returns when it began, if there was one.
    pub(crate) fn restored(&self) -> Option<Instant> {
        let outage = self.outage().take()?;
        self.tell(|| Event::Restored);
        Some(outage.since)
    }

    fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
