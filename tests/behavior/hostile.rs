//! Tests with hostile clients: what strangers, forged messages and callers that send requests
//! without end can do to a lock. Passwords, rights and encryption are in `redis_rights` and `tls`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::queue::MOST_TICKETS;
use lockcore::backend::{
    Connection, Departure, Enqueued, EventSink, FULL, Id, Name, Namespace, Released, Renewed,
    Request,
};
use lockcore::{ErrorKind, Fair, Locks};
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tokio::task::coop::unconstrained;

use crate::store::{
    DEFAULT, Kind, LEASE, PATIENCE, SOON, Store, begin, give_back, in_line, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_stranger_releases_and_renews_nothing
        a_request_behind_ten_thousand_tickets_is_refused
        a_process_has_ten_thousand_waiters_at_most
    ]
}

pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT; a_flood_of_forged_wake_ups_grants_nothing_and_drowns_nothing]
}

/// The number of tickets in one request. The core uses the same number.
const BATCH: usize = 100;

/// A client that talks to the store directly.
pub(crate) async fn stranger(store: &Store) -> Arc<dyn Connection> {
    let events = EventSink::new(fastrand::u64(..), namespace(store), |_| ());
    store.backend().connect(events).await.unwrap()
}

fn namespace(store: &Store) -> Namespace {
    Namespace::new(&store.namespace).unwrap()
}

pub(crate) fn request(store: &Store, name: &str, id: &str) -> Arc<Request> {
    let name = Name::new(namespace(store), name).unwrap();
    let id = Id::parse(id).unwrap();
    let mut request = Request::new(name, id, FULL, FULL, Duration::from_secs(60));
    request.wait = true;
    request.owner = "stranger".into();
    Arc::new(request)
}

/// The request for the same ticket, changed by `change`.
pub(crate) fn with(request: &Request, change: impl FnOnce(&mut Request)) -> Arc<Request> {
    let mut request = request.clone();
    change(&mut request);
    Arc::new(request)
}

pub(crate) fn random_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

/// A stranger sends 100,000 random ids. The holder and the waiter lose nothing, and no ticket is
/// created.
async fn a_stranger_releases_and_renews_nothing(store: Store) {
    let (holding, waiting) = (store.client(), store.client());
    let guard = holding.mutex("a").acquire().await.unwrap();
    let waiter = begin(waiting.mutex("a").wait(PATIENCE));
    in_line(&store, &holding, "a", 1, 1).await;
    let numbers = async || {
        let places = holding.inspect("a").await.unwrap();
        places.iter().map(|place| place.ticket).collect::<Vec<_>>()
    };
    let line = numbers().await;

    let stranger = stranger(&store).await;
    let (mut released, mut renewed) = (0, 0);
    for _ in 0..100_000 / BATCH {
        let foreign: Vec<_> = (0..BATCH)
            .map(|_| request(&store, "a", &random_id()))
            .collect();
        for answer in stranger.renew(foreign.clone(), PATIENCE).await.unwrap() {
            renewed += usize::from(answer != Renewed::Lost);
        }
        let leaving = foreign
            .into_iter()
            .map(|request| Departure::new(request, false));
        for answer in stranger.release(leaving.collect()).await.unwrap() {
            released += usize::from(answer != Released::NotFound);
        }
    }

    assert_eq!((released, renewed), (0, 0));
    assert_eq!(numbers().await, line);
    assert!(!waiter.is_finished());
    guard.ensure(Duration::from_secs(9)).await.unwrap(); // the store confirms the lease
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

/// The store refuses a request at once if the line has ten thousand tickets already. When one
/// ticket has been released, the next request may wait.
async fn a_request_behind_ten_thousand_tickets_is_refused(store: Store) {
    let stranger = stranger(&store).await;
    let in_line = ten_thousand(&store, &stranger).await;
    let locks = store.client();
    locks.ready(SOON).await.unwrap();
    let length = async || locks.inspect("a").await.unwrap().len();
    assert_eq!(length().await, MOST_TICKETS);

    for _ in 0..2 {
        let asked = Instant::now();
        let refused = locks.mutex("a").wait(LEASE).acquire().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert!(refused.to_string().contains("too many wait"), "{refused}");
        let awake = awake_since(asked);
        assert!(awake < SOON, "{awake:?}");
    }
    assert_eq!(
        length().await,
        MOST_TICKETS,
        "the refused request has left a ticket"
    );

    let leaving = Departure::new(in_line, false);
    let left = stranger.release(vec![leaving]).await.unwrap();
    assert_eq!(left, [Released::Released]);
    let waits = begin(locks.mutex("a").wait(6 * SOON));
    tickets(&locks, "a", MOST_TICKETS).await;
    assert!(!waits.is_finished());
    waits.abort();
    stranger.close().await;
}

/// Enqueues a holder and the waiters behind it. Returns one of the waiters.
async fn ten_thousand(store: &Store, stranger: &Arc<dyn Connection>) -> Arc<Request> {
    let holder = request(store, "a", &random_id());
    let holds = stranger.enqueue(holder, PATIENCE).await.unwrap();
    assert!(matches!(holds, Enqueued::Granted { .. }), "{holds:?}");
    if let Some(file) = store.file_if_any() {
        // One request per ticket would be slow: each of them is a transaction that reads all
        // earlier tickets.
        let more = MOST_TICKETS - 1;
        file.query(&format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {more}) \
             INSERT INTO tickets SELECT name, ticket + i, printf('%032x', i), permits, capacity, ttl_millis, \
             expires_at, receiver, process, owner, named FROM tickets, n"
        ));
        return request(store, "a", &format!("{more:032x}"));
    }
    let mut in_line = Vec::with_capacity(MOST_TICKETS);
    while in_line.len() < MOST_TICKETS - 1 {
        let batch = BATCH.min(MOST_TICKETS - 1 - in_line.len());
        let asked: Vec<_> = (0..batch)
            .map(|_| request(store, "a", &random_id()))
            .collect();
        // All requests are in flight at once.
        let asking: Vec<_> = (asked.iter())
            .map(|request| tokio::spawn(stranger.enqueue(Arc::clone(request), PATIENCE)))
            .collect();
        for answer in asking {
            let waits = answer.await.unwrap().unwrap();
            assert!(matches!(waits, Enqueued::Waiting { .. }), "{waits:?}");
        }
        in_line.extend(asked);
    }
    in_line.swap_remove(MOST_TICKETS / 2)
}

/// The waiters of a process are one ticket at the store, so the store would never refuse them.
/// Therefore the client refuses the waiters beyond its limit.
async fn a_process_has_ten_thousand_waiters_at_most(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(3600)));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut line: Vec<Pin<Box<dyn Future<Output = ()> + Send>>> = Vec::new();
    for _ in 0..MOST_TICKETS {
        let lock = locks.mutex("a").wait(6 * SOON);
        let mut waiter: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(unconstrained(
            async move { drop(lock.acquire().await.unwrap()) },
        ));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiter.as_mut().poll(&mut cx).is_pending());
        line.push(waiter);
    }

    let last = locks.mutex("a").wait(LEASE);
    let refused = soon(last.acquire()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    assert!(refused.to_string().contains("too many wait"), "{refused}");

    assert_eq!(counts.enqueued(), 1);
    // A waiter that has left makes room.
    line.truncate(MOST_TICKETS / 4);
    let next = begin(locks.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2 + MOST_TICKETS / 4).await;
    drop(line);
    give_back(guard).await;
    give_back(soon(next).await.unwrap().unwrap()).await;
}

/// The forger may publish and may not read. Its messages grant nothing and cost no lease, and the
/// real messages also arrive.
async fn a_flood_of_forged_wake_ups_grants_nothing_and_drowns_nothing(store: Store) {
    let server = RedisServer::start();
    let client = || {
        let builder = Locks::builder().url(server.url()).op_timeout(SOON);
        builder.namespace(&store.namespace).build().unwrap()
    };
    let (holding, waiting) = (client(), client());
    let ttl = Duration::from_secs(8);
    let guard = holding.mutex("a").ttl(ttl).acquire().await.unwrap();
    let lock = waiting.mutex("a").ttl(Duration::from_secs(60));
    let waiter = begin(lock.wait(6 * SOON));
    tickets(&holding, "a", 2).await;
    let mut events = waiting.events();
    let pattern = format!("{}:1:wake:*", store.namespace);
    let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS", &pattern]);

    // The flood lasts longer than the lease, and its messages come as fast as both clients can
    // read. This fact does not cover a connection that is seconds behind.
    let began = Instant::now();
    let mut forged = 0;
    while began.elapsed() < 2 * ttl || forged < 200_000 {
        let many = "for i = 1, 5000 do \
            redis.call('PUBLISH', KEYS[1], string.format('%032x %d', i * 7919, i)) end";
        for channel in &channels {
            server.command::<()>(&["EVAL", many, "1", channel]);
            forged += 5000;
        }
        for client in [&holding, &waiting] {
            tickets(client, "a", 2).await;
        }
        assert!(guard.is_valid(), "lost after {forged}");
    }
    println!("{forged} forged wake-ups in {:?}", began.elapsed());
    assert!(!waiter.is_finished(), "a forged wake-up granted the lock");

    let left = Instant::now();
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    // Only a wake-up is this fast: the waiter's renewals are twenty seconds apart.
    let awake = awake_since(left);
    assert!(awake < ttl, "{awake:?}");
    // No event reports trouble with the store.
    drop((holding, waiting));
    assert_eq!(events.recv().await, None);
}
