//! The tools of a fact: a store that looks as if no other fact used it, and requests to it.

use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::steps::{LEASE, SOON, STALL};
use super::subject::Subject;
use crate::backend::{
    Adoption, Connection, Count, Counted, Departure, Enqueued, EventSink, FULL, Fault, Id, Name,
    Namespace, News, Released, Renewed, Request, Resize, Resized, TicketInfo, Wake,
};
use crate::builder::Builder;
use crate::error::{Error, ErrorKind};
use crate::locks::Locks;
use crate::options::Fair;

/// The length of a wait that is expected to end without a lock.
pub(super) const SLACK: Duration = Duration::from_millis(1500);

/// How long a request waits for its answer.
pub(super) const PATIENCE: Duration = Duration::MAX;

/// A store in a namespace that no other fact uses.
pub(super) struct Store {
    subject: Arc<dyn Subject>,
    fair: Fair,
    namespace: String,
}

impl Store {
    pub(super) fn new(subject: Arc<dyn Subject>, fair: Fair) -> Self {
        Self {
            subject,
            fair,
            namespace: format!("fact-{:016x}", fastrand::u64(..)),
        }
    }

    /// Makes a new client at each call. Its timeouts are longer than the default. So a stall of the
    /// machine does not look like a failed store, or like the end of a holder.
    pub(super) fn client(&self) -> Locks {
        let builder = Locks::builder().op_timeout(STALL).ttl(LEASE);
        let builder: Builder = builder.namespace(&self.namespace).fair(self.fair);
        self.subject.client(builder).unwrap()
    }

    /// Opens a connection, as a client in another process does.
    pub(super) async fn connect(&self) -> Asker {
        let (tell, told) = mpsc::unbounded_channel();
        let events = EventSink::new(fastrand::u64(..), self.names(), move |news| {
            let _ = tell.send(news); // it is no error if the receiver is gone
        });
        let connection = self.subject.backend().connect(events).await.unwrap();
        Asker { connection, told }
    }

    /// Whether the store can store capacities.
    pub(super) fn resizes(&self) -> bool {
        self.subject.backend().capability().resizes
    }

    pub(super) fn lists(&self) -> bool {
        self.subject.backend().capability().lists
    }

    /// Whether a ticket can go from one client to another.
    pub(super) fn adopts(&self) -> bool {
        self.subject.backend().capability().adopts
    }

    /// A request for all permits, as of a mutex. It waits.
    pub(super) fn request(&self, name: &str) -> Request {
        let name = Name::new(self.names(), name).unwrap();
        let id = Id::draw().unwrap();
        let mut request = Request::new(name, id, FULL, FULL, LEASE);
        request.wait = true;
        request.owner = "host/1/client".into();
        request
    }

    /// A request for `permits` of `capacity`. It waits.
    pub(super) fn permits(&self, name: &str, permits: u32, capacity: u32) -> Arc<Request> {
        let mut request = self.request(name);
        request.permits = NonZeroU32::new(permits).unwrap();
        request.capacity = NonZeroU32::new(capacity).unwrap();
        Arc::new(request)
    }

    pub(super) fn writer(&self, name: &str) -> Arc<Request> {
        Arc::new(self.request(name))
    }

    pub(super) fn reader(&self, name: &str) -> Arc<Request> {
        self.permits(name, 1, FULL.get())
    }

    pub(super) fn name(&self, name: &str) -> Name {
        Name::new(self.names(), name).unwrap()
    }

    pub(super) fn names(&self) -> Namespace {
        Namespace::new(&self.namespace).unwrap()
    }
}

/// The request for the same ticket, with a change.
pub(super) fn with(request: &Request, change: impl FnOnce(&mut Request)) -> Arc<Request> {
    let mut request = request.clone();
    change(&mut request);
    Arc::new(request)
}

/// A client that sends its requests to the store directly.
pub(super) struct Asker {
    pub(super) connection: Arc<dyn Connection>,
    told: mpsc::UnboundedReceiver<News>,
}

impl Asker {
    pub(super) async fn enqueue(&self, request: &Arc<Request>) -> Enqueued {
        self.connection
            .enqueue(Arc::clone(request), PATIENCE)
            .await
            .unwrap()
    }

    /// Takes a ticket that must hold at once. Returns its number.
    pub(super) async fn holds(&self, request: &Arc<Request>) -> u64 {
        match self.enqueue(request).await {
            Enqueued::Granted { ticket, .. } => ticket,
            other => panic!("does not hold: {other:?}"),
        }
    }

    /// Takes a ticket that must wait. Returns its number.
    pub(super) async fn waits(&self, request: &Arc<Request>) -> u64 {
        match self.enqueue(request).await {
            Enqueued::Waiting { ticket, .. } => ticket,
            other => panic!("does not wait: {other:?}"),
        }
    }

    pub(super) async fn renew(&self, request: &Arc<Request>) -> Renewed {
        let tickets = vec![Arc::clone(request)];
        self.connection.renew(tickets, PATIENCE).await.unwrap()[0]
    }

    pub(super) async fn release(&self, request: &Arc<Request>) -> Released {
        let leaving = vec![Departure::new(Arc::clone(request), false)];
        self.connection.release(leaving).await.unwrap()[0]
    }

    pub(super) async fn inspect(&self, name: Name) -> Vec<TicketInfo> {
        self.connection.inspect(name).await.unwrap()
    }

    pub(super) async fn ask_back(&self, request: &Request, ask: &str) -> bool {
        let (name, id) = (request.name.clone(), request.id);
        let asked = self.connection.ask_back(name, id, ask.into());
        asked.await.unwrap()
    }

    pub(super) async fn detach(&self, request: &Arc<Request>) {
        self.connection.detach(Arc::clone(request)).await.unwrap();
    }

    /// Takes over the ticket of `from`, which has this number, with the request `to`.
    pub(super) async fn adopt(&self, from: Id, number: u64, to: &Arc<Request>) -> Enqueued {
        let adoption = Adoption::new(from, number, false, Arc::clone(to));
        self.connection.adopt(Arc::new(adoption)).await.unwrap()
    }

    /// Sends the request again after [`Fault::Retry`], as the core does.
    pub(super) async fn resize(&self, resize: &Arc<Resize>) -> Resized {
        loop {
            match self.connection.resize(Arc::clone(resize)).await {
                Ok(resized) => return resized,
                Err(error) if error.fault() == Fault::Retry => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends the request again after [`Fault::Retry`], as the core does.
    pub(super) async fn count(&self, count: &Arc<Count>) -> Counted {
        loop {
            match self.connection.count(Arc::clone(count)).await {
                Ok(counted) => return counted,
                Err(error) if error.fault() == Fault::Retry => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(super) async fn watch(&self, name: Name) {
        self.connection.watch(name).await.unwrap();
    }

    /// Waits until the store tells of a change, which must be a change of this counter.
    pub(super) async fn expect_told_of(&mut self, name: &Name) {
        let next = async {
            loop {
                if let News::Changed(name) = self.told.recv().await.expect("the sink is gone") {
                    return name;
                }
            }
        };
        let told = tokio::time::timeout(SOON, next).await;
        assert_eq!(told.expect("it is not told"), *name);
    }

    /// Waits for the next wake-up.
    pub(super) async fn expect_wake(&mut self) -> Wake {
        let next = async {
            loop {
                if let News::Granted(wake) = self.told.recv().await.expect("the sink is gone") {
                    return wake;
                }
            }
        };
        let woken = tokio::time::timeout(SOON, next).await;
        woken.expect("it is not woken")
    }

    /// Waits until the store says that somebody wants this ticket.
    pub(super) async fn expect_wanted(&mut self, id: Id) {
        let next = async {
            while self.told.recv().await.expect("the sink is gone") != News::Wanted(id) {}
        };
        let told = tokio::time::timeout(SOON, next).await;
        told.expect("it is not told");
    }

    /// The wake-ups that have come in the meantime.
    pub(super) fn woken_besides(&mut self) -> Vec<Wake> {
        let news = std::iter::from_fn(|| self.told.try_recv().ok());
        news.filter_map(|news| match news {
            News::Granted(wake) => Some(wake),
            _ => None,
        })
        .collect()
    }

    /// Closes the connection, and with it what the store keeps for this client.
    pub(super) async fn close(self) {
        self.connection.close().await;
    }
}

/// The kind of an expected error.
pub(super) fn kind<T: Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.expect_err("should have failed").kind()
}
