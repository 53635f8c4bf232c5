//! The network between the clients of one process and the store. A request arrives at once, unless
//! the test has asked for something else. The memory store handles the request on arrival.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use crate::backend::memory;
use crate::backend::{
    Adoption, Answer, Connection, Count, Counted, Departure, Enqueued, EventSink, Fault, Listing,
    News, Page, Released, Renewed, Resize, ResizeOp, Resized, StoreError, TicketInfo,
};
use crate::name::Name;
use crate::request::{Id, Request};

/// The kinds of requests of a client to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verb {
    /// Open a connection. Clients do this at first use, and after each break.
    Connect,
    /// Take a ticket: it holds the lock, or waits in line.
    Enqueue,
    /// Renew all tickets of a client that are due, or one ticket, for
    /// [`Held::ensure`](crate::Held::ensure) and [`Guard::downgrade`](crate::Guard::downgrade).
    Renew,
    /// Remove tickets.
    Release,
    /// Read the tickets of a name. [`Locks::inspect`](crate::Locks::inspect) does this, and also
    /// barriers, elections, and [`Semaphore::available`](crate::semaphore::Semaphore::available).
    Inspect,
    /// Take over a lock that another client has detached.
    Adopt,
    /// Read or change a counter.
    Count,
    /// Change the stored capacity of a semaphore.
    Resize,
    /// Watch a counter. Clients do this when they begin to wait for a change, and after each break.
    Watch,
}

/// A message that was sent: the code to run on its arrival.
pub(super) type Parcel = Box<dyn FnOnce() + Send>;

pub(super) enum Fate {
    LoseRequest,
    LoseReply,
    Fail(Fault),
    Hold(oneshot::Sender<Parcel>),
}

pub(super) struct Wire {
    tickets: Arc<memory::Store>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    fates: Vec<(Verb, Fate)>,
    wake_ups_to_lose: usize,
    /// The messages that were sent since the freeze began, in order. `None` if there is no freeze.
    frozen: Option<VecDeque<Parcel>>,
    connections: Vec<Weak<WireConnection>>,
}

struct WireConnection {
    wire: Arc<Wire>,
    receiver: u64,
    /// `None` after the connection was broken.
    events: Mutex<Option<Arc<EventSink>>>,
    broken: watch::Sender<bool>,
}

impl Wire {
    pub(super) fn to(tickets: &Arc<memory::Store>) -> Self {
        Self {
            tickets: Arc::clone(tickets),
            state: Mutex::default(),
        }
    }

    pub(super) fn next(&self, verb: Verb, fate: Fate) {
        self.state().fates.push((verb, fate));
    }

    pub(super) fn lose_next_wake_up(&self) {
        self.state().wake_ups_to_lose += 1;
    }

    pub(super) fn freeze(&self) {
        self.state().frozen.get_or_insert_default();
    }

    pub(super) fn thaw(&self) {
        loop {
            let mut state = self.state();
            let next = state.frozen.as_mut().and_then(VecDeque::pop_front);
            let Some(parcel) = next else {
                // The freeze ends only now, so that no new message overtakes the kept ones.
                state.frozen = None;
                return;
            };
            drop(state);
            parcel();
        }
    }

    pub(super) fn break_connections(&self) {
        let connections = std::mem::take(&mut self.state().connections);
        for connection in connections.iter().filter_map(Weak::upgrade) {
            connection.broken.send_replace(true);
            drop(connection.events().take());
        }
    }

    pub(super) fn connect(self: &Arc<Self>, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let wire = Arc::clone(self);
        let answer = self.send(Some(Verb::Connect), move |tickets| {
            let receiver = events.receiver();
            let news_of = Arc::clone(&wire);
            let client = Arc::new(events);
            let events = EventSink::new(receiver, client.namespace().clone(), move |news| {
                news_of.tell(&client, news);
            });
            let events = Arc::new(events);
            tickets.listen(&events);
            let connection = Arc::new(WireConnection {
                wire: Arc::clone(&wire),
                receiver,
                events: Mutex::new(Some(events)),
                broken: watch::Sender::new(false),
            });
            let mut state = wire.state();
            state.connections.retain(|known| known.strong_count() > 0);
            state.connections.push(Arc::downgrade(&connection));
            Ok(connection as Arc<dyn Connection>)
        });
        Box::pin(async { answer.await.unwrap_or_else(|_| Err(broke())) })
    }

    /// A message arrives. During a freeze it is kept.
    pub(super) fn deliver(&self, parcel: Parcel) {
        let mut state = self.state();
        match &mut state.frozen {
            Some(kept) => kept.push_back(parcel),
            None => {
                drop(state);
                parcel();
            }
        }
    }

    /// Sends a request. `arrive` is the work of the request at the store. If there will be no
    /// reply, the sender of the reply is dropped.
    fn send<T: Send + 'static>(
        &self,
        verb: Option<Verb>,
        arrive: impl FnOnce(&memory::Store) -> Result<T, StoreError> + Send + 'static,
    ) -> oneshot::Receiver<Result<T, StoreError>> {
        let (reply, answer) = oneshot::channel();
        let tickets = Arc::clone(&self.tickets);
        let carry_out = move || {
            let _ = reply.send(arrive(&tickets));
        };
        match verb.and_then(|verb| self.fate(verb)) {
            None => self.deliver(Box::new(carry_out)),
            Some(Fate::LoseRequest) => drop(carry_out),
            Some(Fate::LoseReply) => {
                let (_, nobody_hears) = oneshot::channel();
                self.deliver(Box::new(carry_out));
                return nobody_hears;
            }
            Some(Fate::Fail(fault)) => {
                let (reply, answer) = oneshot::channel();
                self.deliver(Box::new(move || {
                    let error = StoreError::new(fault, "the test asked for this error");
                    let _ = reply.send(Err(error));
                }));
                return answer;
            }
            Some(Fate::Hold(gate)) => {
                // If the test does not hold requests back any more, the request arrives at once.
                if let Err(request) = gate.send(Box::new(carry_out)) {
                    self.deliver(request);
                }
            }
        }
        answer
    }

    fn fate(&self, verb: Verb) -> Option<Fate> {
        let fates = &mut self.state().fates;
        let next = fates.iter().position(|(of, _)| *of == verb)?;
        Some(fates.remove(next).1)
    }

    /// The store sends a message to a client.
    fn tell(&self, client: &Arc<EventSink>, news: News) {
        let mut state = self.state();
        if let (News::Granted(_), 1..) = (&news, state.wake_ups_to_lose) {
            state.wake_ups_to_lose -= 1;
            return;
        }
        drop(state);
        let client = Arc::downgrade(client);
        self.deliver(Box::new(move || {
            if let Some(client) = client.upgrade() {
                client.tell(news);
            }
        }));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WireConnection {
    /// The request is sent at the first poll. As on a network, dropping the future later does not
    /// take the request back.
    fn ask<T: Send + 'static>(
        &self,
        verb: Option<Verb>,
        arrive: impl FnOnce(&memory::Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Answer<T> {
        let wire = Arc::clone(&self.wire);
        let mut broken = self.broken.subscribe();
        Box::pin(async move {
            if *broken.borrow() {
                return Err(broke());
            }
            let answer = wire.send(verb, arrive);
            tokio::select! {
                biased;
                answer = answer => answer.unwrap_or_else(|_| Err(broke())),
                Ok(()) = broken.changed() => Err(broke()),
            }
        })
    }

    fn events(&self) -> MutexGuard<'_, Option<Arc<EventSink>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection for WireConnection {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        let receiver = self.receiver;
        self.ask(Some(Verb::Enqueue), move |tickets| {
            tickets.enqueue(request, receiver)
        })
    }

    fn renew(&self, requests: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        self.ask(Some(Verb::Renew), move |tickets| {
            Ok(requests
                .iter()
                .map(|request| tickets.renew(request))
                .collect())
        })
    }

    fn release(&self, departures: Vec<Departure>) -> Answer<Vec<Released>> {
        self.ask(Some(Verb::Release), move |tickets| {
            Ok(departures
                .iter()
                .map(|departure| tickets.release(departure))
                .collect())
        })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.ask(Some(Verb::Inspect), move |tickets| {
            Ok(tickets.inspect(&name))
        })
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        self.ask(None, move |tickets| Ok(tickets.list(&listing)))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        self.ask(None, move |tickets| Ok(tickets.ask_back(&name, id, ask)))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        let receiver = self.receiver;
        self.ask(Some(Verb::Adopt), move |tickets| {
            Ok(tickets.adopt(&adoption, receiver))
        })
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        let verb = match resize.op {
            ResizeOp::Read => None,
            ResizeOp::Set { .. } => Some(Verb::Resize),
        };
        self.ask(verb, move |tickets| Ok(tickets.resize(&resize)))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        self.ask(None, move |tickets| {
            tickets.forget(&name);
            Ok(())
        })
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.ask(Some(Verb::Count), move |tickets| tickets.count(&count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        let receiver = self.receiver;
        self.ask(Some(Verb::Watch), move |tickets| {
            tickets.watch(name, receiver);
            Ok(())
        })
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        let receiver = self.receiver;
        self.ask(None, move |tickets| {
            tickets.unwatch(&name, receiver);
            Ok(())
        })
    }

    fn check(&self) -> Answer<Vec<String>> {
        self.ask(None, |_| Ok(Vec::new()))
    }
}

impl fmt::Debug for WireConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireConnection").finish_non_exhaustive()
    }
}

fn broke() -> StoreError {
    StoreError::broken("the connection broke, as the test asked")
}
