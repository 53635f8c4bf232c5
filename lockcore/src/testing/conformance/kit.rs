//! What a fact gets: a store to itself, as far as it can tell.

use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::stalls::awake_since;
use super::subject::Subject;
use crate::backend::{
    Connection, Departure, Enqueued, EventSink, FULL, Id, Name, Namespace, News, Released, Renewed,
    Request, TicketInfo, Wake,
};
use crate::builder::Builder;
use crate::error::{Error, ErrorKind};
use crate::hold::{Guard, Release};
use crate::lock::Lock;
use crate::locks::Locks;
use crate::options::Fair;

/// Long enough for a slow machine, short enough to notice a hang.
pub(super) const SOON: Duration = Duration::from_secs(10);

/// For how long a busy machine may stop altogether without making a fact fail that is not about time.
pub(super) const STALL: Duration = Duration::from_secs(30);

/// The ttl of a [client](Store::client), which outlasts that. Its renewals are 20 s apart. It is as long as others wait in
/// facts that bound the wait by [`soon`], or not at all.
pub(super) const LEASE: Duration = STALL.saturating_mul(2);

/// Stores count milliseconds, and round as they like.
pub(super) const A_FEW_MILLIS: Duration = Duration::from_millis(20);

/// For how long a wait that is to end without a lock lasts.
pub(super) const SLACK: Duration = Duration::from_millis(1500);

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

    /// A client; another one each time. It has more time than the default: a machine that stalls is not a store that
    /// fails, nor a holder that is gone.
    pub(super) fn client(&self) -> Locks {
        let builder = Locks::builder().op_timeout(STALL).ttl(LEASE);
        let builder: Builder = builder.namespace(&self.namespace).fair(self.fair);
        self.subject.client(builder).unwrap()
    }

    /// A connection, as the client of another process opens it.
    pub(super) async fn connect(&self) -> Asker {
        let (tell, told) = mpsc::unbounded_channel();
        let events = EventSink::new(fastrand::u64(..), self.names(), move |news| {
            let _ = tell.send(news); // it is no error if nobody listens any more
        });
        let connection = self.subject.backend().connect(events).await.unwrap();
        Asker { connection, told }
    }

    /// A request that waits, for the whole of a mutex.
    pub(super) fn request(&self, name: &str) -> Request {
        let name = Name::new(self.names(), name).unwrap();
        let id = Id::draw().unwrap();
        let mut request = Request::new(name, id, FULL, FULL, LEASE);
        request.wait = true;
        request.owner = "host/1/client".into();
        request
    }

    /// A request that waits, for so many permits of so many.
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

    fn names(&self) -> Namespace {
        Namespace::new(&self.namespace).unwrap()
    }
}

/// The request for the same ticket, with other wishes.
pub(super) fn with(request: &Request, change: impl FnOnce(&mut Request)) -> Arc<Request> {
    let mut request = request.clone();
    change(&mut request);
    Arc::new(request)
}

/// A client that speaks with the store directly.
pub(super) struct Asker {
    pub(super) connection: Arc<dyn Connection>,
    told: mpsc::UnboundedReceiver<News>,
}

impl Asker {
    pub(super) async fn enqueue(&self, request: &Arc<Request>) -> Enqueued {
        self.connection.enqueue(Arc::clone(request)).await.unwrap()
    }

    /// Takes a ticket that holds at once. Its number.
    pub(super) async fn holds(&self, request: &Arc<Request>) -> u64 {
        match self.enqueue(request).await {
            Enqueued::Granted { ticket, .. } => ticket,
            other => panic!("does not hold: {other:?}"),
        }
    }

    /// Takes a ticket that waits. Its number.
    pub(super) async fn waits(&self, request: &Arc<Request>) -> u64 {
        match self.enqueue(request).await {
            Enqueued::Waiting { ticket, .. } => ticket,
            other => panic!("does not wait: {other:?}"),
        }
    }

    pub(super) async fn renew(&self, request: &Arc<Request>) -> Renewed {
        let tickets = vec![Arc::clone(request)];
        self.connection.renew(tickets).await.unwrap()[0]
    }

    pub(super) async fn release(&self, request: &Arc<Request>) -> Released {
        let leaving = vec![Departure::new(Arc::clone(request), false)];
        self.connection.release(leaving).await.unwrap()[0]
    }

    pub(super) async fn inspect(&self, name: Name) -> Vec<TicketInfo> {
        self.connection.inspect(name).await.unwrap()
    }

    /// The next wake-up.
    pub(super) async fn is_woken(&mut self) -> Wake {
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

    /// The wake-ups that have come and were not asked for.
    pub(super) fn woken_besides(&mut self) -> Vec<Wake> {
        let news = std::iter::from_fn(|| self.told.try_recv().ok());
        news.filter_map(|news| match news {
            News::Granted(wake) => Some(wake),
            _ => None,
        })
        .collect()
    }

    /// Ends what the store keeps for this client.
    pub(super) async fn close(self) {
        self.connection.close().await;
    }
}

/// Waits until it holds; panics with `what` when it does not within the time. The time in which the machine stands still
/// does not count.
pub(super) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(awake_since(began) < SOON, "not within {SOON:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What comes of this, which has to come [soon](SOON). The time in which the machine stands still does not count.
pub(super) async fn soon<T>(coming: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let came = coming.await;
    let awake = awake_since(began);
    assert!(awake < SOON, "{awake:?}");
    came
}

/// The kind of an expected error.
pub(super) fn kind<T: Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.expect_err("should have failed").kind()
}

/// Waits until so many, holders and waiters together, are at a name: tickets at the store, and callers that wait inside
/// this client.
pub(super) async fn tickets(locks: &Locks, name: &str, count: usize) {
    eventually("the line has formed", async || {
        let places = locks.inspect(name).await.unwrap();
        let local: u32 = places.iter().map(|place| place.local_waiters).sum();
        places.len() + local as usize == count
    })
    .await;
}

/// A task that asks.
pub(super) fn begin(lock: Lock) -> JoinHandle<Result<Guard, Error>> {
    tokio::spawn(async move { lock.acquire().await })
}

/// Releases and sees that it was held to the end.
pub(super) async fn give_back(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), Release::Released);
}
