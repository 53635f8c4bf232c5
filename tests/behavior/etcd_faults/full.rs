//! Tests with a server whose disk quota is used up.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::ErrorKind;
use lockcore::backend::{
    self, Departure, Enqueued, EventSink, FULL, Fault, Id, Name, Released, Request,
};
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;

use super::{client, namespace};
use crate::faults::{is_renewed, patient, works_again};
use crate::store::{
    DEFAULT, Kind, LEASE, PATIENCE, SOON, Store, begin, give_back, kind, soon, tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_full_server_keeps_locks_and_takes_releases
        a_release_that_a_full_server_cannot_mark_stays_final
        a_client_that_reconnects_to_a_full_server_keeps_its_locks
        what_a_server_refuses_when_it_becomes_full_is_not_there
    ]
}

fn small() -> EtcdServer {
    EtcdServer::with(&["--quota-backend-bytes=2000000"])
}

async fn a_full_server_keeps_locks_and_takes_releases(_: Store) {
    let ttl = Duration::from_secs(9);
    let server = small();
    let (holder, waiter) = (client(&server), client(&server));
    let guard = holder.mutex("a").ttl(ttl).acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(LEASE));
    tickets(&holder, "a", 2).await;

    server.fill();
    let refused = holder.mutex("b").acquire().await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert_eq!(kind(refused), ErrorKind::Unavailable);
    assert!(text.contains("NOSPACE"), "{text}");
    is_renewed(&guard, ttl).await;
    let refused = guard.detach().await.unwrap_err();
    assert!(refused.to_string().contains("NOSPACE"), "{refused}");
    let guard = refused.into_guard();
    is_renewed(&guard, ttl).await;
    is_renewed(&guard, ttl).await;
    give_back(guard).await;
    let next = soon(waits).await.unwrap().unwrap();
    give_back(next).await;

    server.make_room();
    works_again(&holder, "b", SOON).await;
}

/// The ticket of a request without an answer may be taken after its release.
async fn a_release_that_a_full_server_cannot_mark_stays_final(_: Store) {
    let server = small();
    let store = backend::open(&(server.url() + "?session_ttl=60s")).unwrap();
    let connect = async || {
        let events = EventSink::new(1, namespace(), |_| ());
        store.connect(events).await.unwrap()
    };
    let connection = connect().await;
    let request = |number: u32| {
        let name = Name::new(namespace(), format!("n{number}")).unwrap();
        let id = Id::parse(&format!("{number:032}")).unwrap();
        Arc::new(Request::new(name, id, FULL, FULL, LEASE))
    };
    let taken = connection.enqueue(request(1), PATIENCE).await;
    assert!(matches!(taken, Ok(Enqueued::Granted { .. })), "{taken:?}");

    server.fill();
    let departures = [1, 2].map(|number| Departure::new(request(number), true));
    let released = connection.release(departures.to_vec()).await.unwrap();
    assert_eq!(released, [Released::Released, Released::NotFound]);
    server.make_room();

    // They come late, and there are no marks.
    for number in [1, 2] {
        let late = connection.enqueue(request(number), PATIENCE).await;
        let error = late.unwrap_err();
        assert_eq!(error.fault(), Fault::Retry, "{error}");
    }
    assert_eq!(server.keys("test:1:{"), [""; 0]);
    let taken = connect().await.enqueue(request(3), PATIENCE).await;
    assert!(matches!(taken, Ok(Enqueued::Granted { .. })), "{taken:?}");
}

async fn a_client_that_reconnects_to_a_full_server_keeps_its_locks(_: Store) {
    let ttl = Duration::from_secs(15);
    let server = small();
    let proxy = tests::proxy::Proxy::to(server.port());
    let locks = patient(server.url_at(proxy.port())).build().unwrap();
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();

    server.fill();
    proxy.cut();
    proxy.restore();
    is_renewed(&guard, ttl).await;
    is_renewed(&guard, ttl).await;
    assert!(guard.is_valid());
    give_back(guard).await;

    server.make_room();
    works_again(&locks, "b", SOON).await;
    eventually("nothing is left", SOON, async || {
        server.keys("test:1:{").is_empty()
    })
    .await;
}

/// The server carries out the requests that it has let in before it noticed, and refuses them too.
async fn what_a_server_refuses_when_it_becomes_full_is_not_there(_: Store) {
    const TASKS: usize = 64;
    let server = Arc::new(small());
    let locks = client(&server);
    // What was counted for certain, and what may have been.
    let none = || Arc::new((0..TASKS).map(|_| AtomicI64::new(0)).collect::<Vec<_>>());
    let (counted, unknown) = (none(), none());
    let tasks = (0..TASKS).map(|task| {
        let (locks, counted, unknown) = (locks.clone(), counted.clone(), unknown.clone());
        tokio::spawn(async move {
            let counter = locks.counter(format!("c{task}"));
            let error = loop {
                match counter.add(1).await {
                    Ok(_) => counted[task].fetch_add(1, Ordering::Relaxed),
                    Err(error) => break error,
                };
            };
            if error.kind() == ErrorKind::Unknown {
                unknown[task].store(1, Ordering::Relaxed);
            }
        })
    });
    let takers = (0..TASKS).map(|task| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let lock = locks.mutex(format!("n{task}"));
            while let Ok(guard) = lock.acquire().await {
                give_back(guard).await;
            }
        })
    });
    let tasks: Vec<_> = tasks.chain(takers).collect();
    let filled = Arc::clone(&server);
    tokio::task::spawn_blocking(move || filled.fill())
        .await
        .unwrap();
    join_all(tasks).await;

    eventually("no ticket is left", SOON, async || {
        server.keys("test:1:{").is_empty()
    })
    .await;
    server.make_room();
    for (task, (counted, unknown)) in counted.iter().zip(unknown.iter()).enumerate() {
        let count = locks.counter(format!("c{task}")).get().await.unwrap().count;
        let least = counted.load(Ordering::Relaxed);
        let most = least + unknown.load(Ordering::Relaxed);
        assert!(
            (least..=most).contains(&count),
            "c{task}: {count} of {least} to {most}"
        );
    }
}
