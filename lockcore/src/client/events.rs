//! What a client tells of itself: trouble with the store, and locks that were lost. What one lock
//! tells is in `hold`.

use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::broadcast;

use crate::clock::Instant;
use crate::error::LostReason;
use crate::token::FencingToken;

/// More than one client has to tell between two looks of a listener, unless very many locks are lost
/// at once; then it is told how many it has missed.
const KEPT: usize = 256;

/// What a client has to tell: see [`Locks::events`](crate::Locks::events).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The store does not answer, or a connection to it broke. What is held stays held until its
    /// lease has run out; the client reconnects by itself.
    Suspended,
    /// The store answers again. Everything that is held or waited for is asked after at once.
    Restored,
    /// A held lock was lost. Work under it is stopped by [`Lock::run`](crate::Lock::run).
    Lost {
        /// The name of the lock.
        name: String,
        /// The token of its last holder in this process.
        token: FencingToken,
        /// Why.
        reason: LostReason,
    },
    /// The listener was slow, and so many events were dropped.
    Missed(u64),
}

/// A listener for what a client has to tell, from the moment that it was made.
///
/// If the store is out of reach at that moment, the first event says so.
pub struct EventListener {
    /// What was told before, and still holds.
    standing: Option<Event>,
    news: broadcast::Receiver<Event>,
}

impl EventListener {
    /// The next event; `None` when the client is gone.
    ///
    /// # Cancel safety
    ///
    /// Safe: an event that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Option<Event> {
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

/// The telling side.
#[derive(Default)]
pub(crate) struct Teller {
    /// Made for the first listener.
    listeners: OnceLock<broadcast::Sender<Event>>,
    outage: Mutex<Option<Outage>>,
}

/// The store is out of reach.
struct Outage {
    since: Instant,
    /// It was told that somebody has to mend something.
    mistake: bool,
}

impl Teller {
    pub(crate) fn listen(&self) -> EventListener {
        let listeners = self.listeners.get_or_init(|| broadcast::Sender::new(KEPT));
        // In this order: a change that comes in between is told, if twice.
        let news = listeners.subscribe();
        EventListener {
            standing: self.is_suspended().then_some(Event::Suspended),
            news,
        }
    }

    pub(crate) fn tell(&self, event: impl FnOnce() -> Event) {
        if let Some(listeners) = self.listeners.get() {
            // That nobody listens any more is no error.
            let _ = listeners.send(event());
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

    /// Told once, however many connections break and however often they are tried. Returns whether it is
    /// news, which a mistake is too that is found later.
    pub(crate) fn suspended(&self, now: Instant, mistake: bool) -> bool {
        let mut outage = self.outage();
        if let Some(outage) = &mut *outage {
            return mistake && !std::mem::replace(&mut outage.mistake, true);
        }
        *outage = Some(Outage {
            since: now,
            mistake,
        });
        drop(outage); // telling runs wakers
        self.tell(|| Event::Suspended);
        true
    }

    /// Returns since when the store was out of reach, if it was.
    pub(crate) fn restored(&self) -> Option<Instant> {
        let outage = self.outage().take()?;
        self.tell(|| Event::Restored);
        Some(outage.since)
    }

    fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
