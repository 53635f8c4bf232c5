//! The etcd store. What it promises and needs is in [`guide::etcd`](crate::guide::etcd).
//!
//! A client has one [lease](session) and one connection. `proof` says until when the lease lives,
//! `line` which tickets hold, and `standing` how waiters learn of it.

mod config;
mod counters;
#[cfg(feature = "etcd-tls")]
mod encrypted;
mod errors;
mod layout;
mod line;
mod link;
mod messages;
mod proof;
mod resize;
mod session;
mod standing;
mod tickets;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use url::Url;

use super::{
    Adoption, Answer, Backend, BoxFuture, Capability, Connection, Count, Counted, Departure,
    Enqueued, EventSink, Listing, Page, Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use config::Settings;
use session::{At, Session};

/// The longest ttl of a lease at the servers.
const LONGEST_TTL: Duration = Duration::from_secs(9_000_000_000);

/// How many requests may be in flight. The servers write each to their disks, many together. This
/// number is enough to keep them busy.
const IN_FLIGHT: u32 = 250;

/// How many renewals of held tickets may be in flight: 16 requests, each of which reads up to 100
/// keys.
const RENEWALS_IN_FLIGHT: u32 = 1_600;

/// Opens `etcd://…`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Settings::plain(url)?))
}

/// Opens `etcd+tls://…`.
#[cfg(feature = "etcd-tls")]
pub(crate) fn open_encrypted(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Settings::encrypted(url, tls)?))
}

fn of(settings: Settings) -> Arc<dyn Backend> {
    Arc::new(Etcd(Arc::new(Ensemble {
        settings,
        sessions: Mutex::default(),
    })))
}

/// An etcd ensemble, or a single member.
#[derive(Debug)]
struct Etcd(Arc<Ensemble>);

#[derive(Debug)]
struct Ensemble {
    settings: Settings,
    /// The lease of each client, by [`EventSink::receiver`].
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
}

/// The connection of the core.
#[derive(Debug)]
struct EtcdConnection {
    at: Arc<At>,
    ensemble: Arc<Ensemble>,
    receiver: u64,
}

impl Backend for Etcd {
    fn capability(&self) -> Capability {
        Capability::new()
            .longest_ttl(LONGEST_TTL)
            .sessions(true)
            .in_flight(IN_FLIGHT)
            .renewals_in_flight(RENEWALS_IN_FLIGHT)
            .adopts(true)
            .resizes(true)
            .asks_back(true)
            .lists(true)
            .counters(true)
            .watches(true)
    }

    fn silence(&self) -> &'static str {
        if self.0.settings.is_encrypted {
            return link::NOT_ENCRYPTED;
        }
        "; another server than etcd at these ports is silent too: check them, 2379 is usual"
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let ensemble = Arc::clone(&self.0);
        Box::pin(async move {
            let connection: Arc<dyn Connection> = Arc::new(ensemble.connect(events).await?);
            Ok(connection)
        })
    }
}

impl Ensemble {
    /// Connects, and goes on with the client's lease, or asks for one if the client has none that
    /// certainly lives.
    ///
    /// If the future is dropped, the connection ends. A lease that was just granted stays without
    /// tickets until its ttl is over.
    async fn connect(self: Arc<Self>, events: EventSink) -> Result<EtcdConnection, StoreError> {
        let (settings, receiver) = (&self.settings, events.receiver());
        let (namespace, time) = (events.namespace().clone(), events.op_timeout());
        let probe = settings.layout.all(&namespace);
        let linked = link::dial(settings, &probe, time).await?;
        let known = self.sessions().get(&receiver).cloned();
        let session = match known.filter(|session| session.is_usable()) {
            Some(session) => session,
            None => {
                let seconds = settings.asked(events.default_ttl());
                let session = Session::open(&linked.0, seconds, &settings.layout, &namespace);
                let session = Arc::new(session.await?);
                let mut sessions = self.sessions();
                sessions.retain(|_, session| session.is_usable());
                sessions.insert(receiver, Arc::clone(&session));
                session
            }
        };
        let at = session.attach(linked, Arc::new(events)).await?;
        Ok(EtcdConnection {
            at,
            ensemble: self,
            receiver,
        })
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<u64, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EtcdConnection {
    fn at(&self) -> Arc<At> {
        Arc::clone(&self.at)
    }
}

impl Connection for EtcdConnection {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        Box::pin(tickets::enqueue(self.at(), request))
    }

    fn longest_ttl(&self) -> Duration {
        self.at.session.ttl
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(tickets::renew(self.at(), tickets))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        Box::pin(tickets::release(self.at(), tickets))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(self.at(), name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(tickets::list(self.at(), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        Box::pin(tickets::ask_back(self.at(), name, id, ask))
    }

    fn detach(&self, ticket: Arc<Request>) -> Answer<()> {
        Box::pin(tickets::detach(self.at(), ticket))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        Box::pin(tickets::adopt(self.at(), adoption))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        Box::pin(resize::resize(self.at(), resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(resize::forget(self.at(), name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        Box::pin(counters::count(self.at(), count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::watch(self.at(), name))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        self.at.session.state().unwatch(&name);
        Box::pin(std::future::ready(Ok(())))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(tickets::check(self.at()))
    }

    /// Revokes the lease, which deletes what is left of its tickets. The marks have another lease:
    /// an enqueue may still come.
    fn close(self: Arc<Self>) -> BoxFuture<()> {
        Box::pin(async move {
            self.ensemble.sessions().remove(&self.receiver);
            // From now on nobody is told that the tickets are gone.
            self.at.session.state().mine.clear();
            let lease = self.at.session.lease;
            if let Err(error) = self.at.link.revoke(lease).await {
                tracing::debug!(%error, "the lease was not revoked, and ends by itself");
            }
            // Only now, because the connection ends with this.
            let _ = self.at.session.end("the client was closed");
        })
    }
}
