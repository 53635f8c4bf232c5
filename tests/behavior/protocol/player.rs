//! Provides a store that the test plays: the test receives each request and sends each answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockcore::backend::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Fault, Id, Name,
    Released, Renewed, Request, StoreError, TicketInfo, Wake,
};
use lockcore::{Guard, Locks};
use tokio::sync::{mpsc, oneshot};

use crate::store::SOON;

/// A store without any state. If a future is dropped after it was polled, its request has been
/// sent, as on a network.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    asked: mpsc::UnboundedSender<Asked>,
    events: Arc<Mutex<Vec<Arc<EventSink>>>>,
    /// The ids of the receivers of all connections, for the runtime that connected first. The
    /// connections of the keeper are not in this list.
    connections: Arc<Mutex<Vec<u64>>>,
    /// How many of these connections have broken.
    broken: Arc<AtomicUsize>,
    /// The number of this connection, counted from 1.
    number: usize,
    capability: Capability,
    line: Line,
}

/// The tickets that the store shows.
pub(super) type Line = Arc<Mutex<Vec<TicketInfo>>>;

/// The test's side of the store. If the test drops a reply, the request fails as if the connection
/// had broken.
pub(super) struct Player {
    pub(super) asked: mpsc::UnboundedReceiver<Asked>,
    pub(super) events: Arc<Mutex<Vec<Arc<EventSink>>>>,
    pub(super) connections: Arc<Mutex<Vec<u64>>>,
    pub(super) broken: Arc<AtomicUsize>,
    pub(super) line: Line,
}

#[derive(Debug)]
pub(super) enum Asked {
    Enqueue(Arc<Request>, Reply<Enqueued>),
    Renew(Vec<Arc<Request>>, Reply<Vec<Renewed>>),
    Release(Vec<Departure>, Reply<Vec<Released>>),
    AskBack(Id, Reply<bool>),
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) fn played() -> (Locks, Player) {
    played_with(Capability::new())
}

pub(super) fn played_with(capability: Capability) -> (Locks, Player) {
    let (wire, player) = wire(capability);
    (Locks::with_backend(wire).unwrap(), player)
}

/// Like [`played`], with requests that do not time out while the machine stalls.
pub(super) fn patient() -> (Locks, Player) {
    patient_with(Capability::new())
}

pub(super) fn patient_with(capability: Capability) -> (Locks, Player) {
    let (wire, player) = wire(capability);
    let locks = Locks::builder().backend(wire).op_timeout(STALLED);
    (locks.build().unwrap(), player)
}

/// The operation timeout of clients for whom the machine may stall. A client whose requests get no
/// answer takes as long as this to end.
pub(super) const STALLED: Duration = Duration::from_secs(4);

pub(super) fn wire(capability: Capability) -> (Arc<Wire>, Player) {
    let (sender, asked) = mpsc::unbounded_channel();
    let events = Arc::default();
    let connections = Arc::<Mutex<Vec<u64>>>::default();
    let broken = Arc::<AtomicUsize>::default();
    let line = Line::default();
    let wire = Wire {
        asked: sender,
        events: Arc::clone(&events),
        connections: Arc::clone(&connections),
        broken: Arc::clone(&broken),
        number: 0,
        capability,
        line: Arc::clone(&line),
    };
    (
        Arc::new(wire),
        Player {
            asked,
            events,
            connections,
            broken,
            line,
        },
    )
}

impl Wire {
    /// Returns a future that sends the request when it is first polled.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(Reply<T>) -> Asked + Send + 'static,
    ) -> Answer<T> {
        let asked = self.asked.clone();
        if self.number <= self.broken.load(Ordering::SeqCst) {
            return Box::pin(std::future::ready(Err(StoreError::broken("it broke"))));
        }
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let _ = asked.send(question(reply));
            answer
                .await
                .unwrap_or_else(|_| Err(StoreError::new(Fault::Unknown, "the connection broke")))
        })
    }
}

impl Backend for Wire {
    fn capability(&self) -> Capability {
        self.capability
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let number = {
            let mut receivers = self.connections.lock().unwrap();
            let first = *receivers.first().unwrap_or(&events.receiver());
            match events.receiver() == first {
                true => {
                    receivers.push(first);
                    receivers.len()
                }
                false => usize::MAX,
            }
        };
        self.events.lock().unwrap().push(Arc::new(events));
        let connection = Self {
            number,
            ..self.clone()
        };
        let connection: Arc<dyn Connection> = Arc::new(connection);
        Box::pin(std::future::ready(Ok(connection)))
    }
}

impl Connection for Wire {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        self.ask(|reply| Asked::Enqueue(request, reply))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        self.ask(|reply| Asked::Renew(tickets, reply))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        self.ask(|reply| Asked::Release(tickets, reply))
    }

    fn inspect(&self, _: Name) -> Answer<Vec<TicketInfo>> {
        let line = self.line.lock().unwrap().clone();
        Box::pin(std::future::ready(Ok(line)))
    }

    fn ask_back(&self, _: Name, id: Id, _: Arc<str>) -> Answer<bool> {
        self.ask(move |reply| Asked::AskBack(id, reply))
    }

    fn forget(&self, _: Name) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}

impl Player {
    pub(super) async fn next(&mut self) -> Asked {
        tokio::time::timeout(SOON, self.asked.recv())
            .await
            .expect("nothing was asked")
            .unwrap()
    }

    pub(super) async fn enqueue(&mut self) -> (Arc<Request>, Reply<Enqueued>) {
        match self.next().await {
            Asked::Enqueue(request, reply) => (request, reply),
            other => panic!("not an enqueue: {other:?}"),
        }
    }

    pub(super) async fn renewal(&mut self) -> (Vec<Arc<Request>>, Reply<Vec<Renewed>>) {
        match self.next().await {
            Asked::Renew(tickets, reply) => (tickets, reply),
            other => panic!("not a renewal: {other:?}"),
        }
    }

    /// Receives the release of one ticket and acknowledges it.
    pub(super) async fn release(&mut self) -> Departure {
        match self.next().await {
            Asked::Release(mut tickets, reply) => {
                reply
                    .send(Ok(vec![Released::Released; tickets.len()]))
                    .unwrap();
                assert_eq!(tickets.len(), 1, "{tickets:?}");
                tickets.remove(0)
            }
            other => panic!("not a release: {other:?}"),
        }
    }

    /// Wakes the owner of a ticket. The message has the ticket number that [`waiting`] uses.
    pub(super) fn wake(&self, id: Id) {
        self.wake_with(id, 7);
    }

    pub(super) fn wake_with(&self, id: Id, number: u64) {
        for events in &*self.events.lock().unwrap() {
            events.granted(Wake::new(id, number));
        }
    }

    /// Acquires a lock, and grants it as the store.
    pub(super) async fn grant(&mut self, lock: &lockcore::Lock) -> Guard {
        let (guard, ()) = tokio::join!(lock.acquire(), async {
            let (request, reply) = self.enqueue().await;
            reply.send(Ok(granted(request.ttl))).unwrap();
        });
        guard.unwrap()
    }
}

/// Removes the events of the last connection of this receiver.
pub(super) fn last_of(all: &Mutex<Vec<Arc<EventSink>>>, receiver: u64) -> Option<Arc<EventSink>> {
    let mut all = all.lock().unwrap();
    let at = all
        .iter()
        .rposition(|events| events.receiver() == receiver)?;
    Some(all.remove(at))
}

pub(super) const fn granted(valid_for: Duration) -> Enqueued {
    Enqueued::Granted {
        ticket: 7,
        valid_for,
    }
}

pub(super) const fn waiting(valid_for: Duration, recheck_in: Option<Duration>) -> Enqueued {
    Enqueued::Waiting {
        ticket: 7,
        valid_for,
        recheck_in,
        ahead: None,
    }
}
