//! The ZooKeeper store. What it promises and needs is in
//! [`guide::zookeeper`](crate::guide::zookeeper).

mod attempts;
mod capacities;
mod config;
mod counters;
mod driver;
mod errors;
mod events;
mod layout;
mod line;
mod lists;
mod proof;
mod row;
mod sent;
mod session;
mod standing;
mod tickets;
#[cfg(feature = "zookeeper-tls")]
mod tunnel;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use url::Url;

use super::{
    Answer, Backend, BoxFuture, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Listing, Page, Released, Renewed, Resize, Resized, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use config::Settings;
use sent::SentChanges;
use session::{Attached, Session};

/// The longest ttl that the protocol can express. The real limit is the timeout of the session,
/// which the server sets when it opens the session: see `tickets::enqueue`.
const LONGEST_TTL: Duration = Duration::from_millis(i32::MAX as u64);

/// How many requests may be in flight on a connection. A server carries out the requests of one
/// connection in order, and the heartbeats are among them. This number of requests takes a few
/// milliseconds, or tens of milliseconds if the server writes each to a disk. It is enough to keep
/// the servers busy.
const IN_FLIGHT: u32 = 250;

/// How many renewals of held tickets may be in flight: 16 requests, each of which reads up to 100
/// nodes. The heartbeats wait behind them too.
const RENEWALS_IN_FLIGHT: u32 = 1_600;

/// Opens `zookeeper://…`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(ZooKeeper::new(Settings::plain(url)?)))
}

/// Opens `zookeeper+tls://…`.
#[cfg(feature = "zookeeper-tls")]
pub(crate) fn open_encrypted(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(ZooKeeper::new(Settings::encrypted(url, tls)?)))
}

/// A ZooKeeper ensemble, or a single server.
#[derive(Debug)]
pub(crate) struct ZooKeeper {
    ensemble: Arc<Ensemble>,
}

#[derive(Debug)]
struct Ensemble {
    settings: Settings,
    /// The session of each client, by [`EventSink::receiver`]. A session outlives its connections:
    /// when a connection breaks, the next connection continues the session with its tickets.
    sessions: Mutex<HashMap<u64, Weak<Session>>>,
    sent_changes: Arc<SentChanges>,
}

/// The connection of the core: the use of a session while the session is connected.
#[derive(Debug)]
pub(crate) struct ZooKeeperConnection {
    session: Attached,
    sent_changes: Arc<SentChanges>,
}

impl ZooKeeper {
    fn new(settings: Settings) -> Self {
        Self {
            ensemble: Arc::new(Ensemble {
                settings,
                sessions: Mutex::default(),
                sent_changes: Arc::default(),
            }),
        }
    }
}

impl Backend for ZooKeeper {
    fn capability(&self) -> Capability {
        Capability::new()
            .longest_ttl(LONGEST_TTL)
            .sessions(true)
            .in_flight(IN_FLIGHT)
            .renewals_in_flight(RENEWALS_IN_FLIGHT)
            .names_ahead(true)
            .asks_back(true)
            .lists(true)
            .counters(true)
            .watches(true)
            .resizes(true)
    }

    /// The driver waits for the rest of an answer that is none of ZooKeeper's, and Redis waits for
    /// the rest of the driver's request.
    fn silence(&self) -> &'static str {
        "; another server than ZooKeeper at these ports is silent too: check them, 2181 is usual (2281 with TLS)"
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let ensemble = Arc::clone(&self.ensemble);
        Box::pin(async move {
            let session = ensemble.session(&events).await?;
            session.resume(events).await?;
            let sent_changes = Arc::clone(&ensemble.sent_changes);
            let connection: Arc<dyn Connection> = Arc::new(ZooKeeperConnection {
                session,
                sent_changes,
            });
            Ok(connection)
        })
    }
}

impl Ensemble {
    /// The client's session, or a new session if the client has none or its session is over. If the
    /// future is dropped while it opens a session, the server ends the new session, which has no
    /// tickets.
    async fn session(&self, events: &EventSink) -> Result<Attached, super::StoreError> {
        let known = self
            .sessions()
            .get(&events.receiver())
            .and_then(Weak::upgrade);
        let known = known.filter(|session| !session.give_up_if_uncertain());
        if let Some(session) = known.and_then(Session::attach) {
            return Ok(session);
        }
        let session = session::open(&self.settings, events.default_ttl()).await?;
        let mut sessions = self.sessions();
        sessions.retain(|_, session| session.strong_count() > 0);
        sessions.insert(events.receiver(), Arc::downgrade(&session));
        Ok(session)
    }

    fn sessions(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ZooKeeperConnection {
    fn session(&self) -> Arc<Session> {
        Arc::clone(&self.session)
    }
}

impl Connection for ZooKeeperConnection {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        Box::pin(tickets::enqueue(self.session(), request))
    }

    fn longest_ttl(&self) -> Duration {
        self.session.timeout
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(tickets::renew(self.session(), tickets))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        Box::pin(tickets::release(self.session(), tickets))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(self.session(), name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(tickets::list(self.session(), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        Box::pin(tickets::ask_back(self.session(), name, id, ask))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        let sent_changes = Arc::clone(&self.sent_changes);
        Box::pin(capacities::resize(self.session(), sent_changes, resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(self.session(), name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        Box::pin(counters::count(self.session(), count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::watch(self.session(), name))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::unwatch(self.session(), name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(tickets::check(self.session()))
    }

    fn close(self: Arc<Self>) -> BoxFuture<()> {
        let closed = self.session.end();
        // The library closes the session when its last reference is dropped.
        drop(self);
        Box::pin(closed)
    }
}
