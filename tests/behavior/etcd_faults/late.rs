//! Tests of requests and watches that arrive late.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{
    self, Backend, Connection, Departure, Enqueued, EventSink, FULL, Id, Name, Released, Request,
};
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;
use tests::proxy::Proxy;

use super::{client, namespace};
use crate::faults::patient;
use crate::store::{DEFAULT, Kind, LEASE, PATIENCE, SOON, STALL, Store, begin, give_back, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_enqueue_of_an_earlier_connection_takes_no_ticket
        a_renewal_that_began_before_a_detach_does_not_take_the_ticket_back
        a_watch_that_begins_behind_a_compaction_misses_no_grant
        a_line_of_thousands_moves
    ]
}

/// Two ways to a server, and a store that uses the second one as soon as it leads there.
fn two_ways(server: &EtcdServer) -> ([Proxy; 2], Arc<dyn Backend>) {
    let ways = [(); 2].map(|()| Proxy::to(server.port()));
    let [first, second] = &ways;
    second.cut();
    let url = format!(
        "etcd://127.0.0.1:{},127.0.0.1:{}?session_ttl=60s",
        first.port(),
        second.port()
    );
    (ways, backend::open(&url).unwrap())
}

async fn connect(store: &Arc<dyn Backend>) -> Arc<dyn Connection> {
    // On a busy machine, a member may have too little time.
    for _ in 0..20 {
        let events = EventSink::new(1, namespace(), |_| ());
        if let Ok(connection) = store.connect(events).await {
            return connection;
        }
    }
    panic!("not connected");
}

fn request(number: u32) -> Arc<Request> {
    let name = Name::new(namespace(), "a").unwrap();
    let id = Id::parse(&format!("{number:032}")).unwrap();
    Arc::new(Request::new(name, id, FULL, FULL, LEASE / 2))
}

/// As if a member had been stopped with a request in its buffer, for longer than marks stay.
async fn an_enqueue_of_an_earlier_connection_takes_no_ticket(_: Store) {
    let server = EtcdServer::start();
    let ([first, second], store) = two_ways(&server);
    let earlier = connect(&store).await;

    first.freeze();
    let enqueue = tokio::spawn(earlier.enqueue(request(1), PATIENCE));
    second.restore();
    let later = connect(&store).await;
    let departure = Departure::new(request(1), true);
    let released = later.release(vec![departure]).await.unwrap();
    assert_eq!(released, [Released::NotFound]);
    assert_eq!(server.keys("test:1:gone/").len(), 1);
    server.ctl(&["del", "--prefix", "test:1:gone/"]);
    first.thaw();

    let outcome = enqueue.await.unwrap();
    assert!(outcome.is_err(), "{outcome:?}");
    assert_eq!(server.keys("test:1:{"), [""; 0]);
    let next = later.enqueue(request(2), PATIENCE).await;
    assert!(matches!(next, Ok(Enqueued::Granted { .. })), "{next:?}");
}

/// The renewal began after an earlier detach. Its read arrives after the last one.
async fn a_renewal_that_began_before_a_detach_does_not_take_the_ticket_back(_: Store) {
    const KEY: &[&str] = &["get", "--prefix", "test:1:{a}/t", "--write-out=fields"];
    let server = EtcdServer::start();
    let ([first, second], store) = two_ways(&server);
    let earlier = connect(&store).await;
    let taken = earlier.enqueue(request(1), PATIENCE).await;
    assert!(matches!(taken, Ok(Enqueued::Granted { .. })), "{taken:?}");
    earlier.detach(request(1)).await.unwrap();

    first.freeze();
    let mut renewal = earlier.renew(vec![request(1)], PATIENCE);
    tokio::select! {
        biased;
        renewed = &mut renewal => panic!("{renewed:?}"),
        () = async {} => {} // It has begun.
    }
    second.restore();
    connect(&store).await.detach(request(1)).await.unwrap();
    // With the revision of the last write, and the lease.
    let written = server.ctl(KEY);
    first.thaw();
    renewal.await.unwrap();

    assert_eq!(server.ctl(KEY), written);
}

/// The server refuses to tell what it has compacted.
async fn a_watch_that_begins_behind_a_compaction_misses_no_grant(_: Store) {
    let server = EtcdServer::start();
    let proxy = Proxy::to(server.port());
    let holder = client(&server);
    let waiter = patient(server.url_at(proxy.port())).build().unwrap();
    give_back(waiter.mutex("warm").acquire().await.unwrap()).await;
    let guard = holder.mutex("a").acquire().await.unwrap();

    // The end of the range, and then the first revision, which only a request for a watch has.
    proxy.delay_requests(b"test:1:{a}0\x18", Duration::from_secs(3));
    let waits = begin(waiter.mutex("a").wait(STALL));
    eventually("the request for a watch is on its way", SOON, async || {
        proxy.traffic().delayed == 1
    })
    .await;
    proxy.freeze();
    give_back(guard).await;
    server.ctl(&["put", "other", "1"]);
    server.ctl(&["compact", &server.revision().to_string()]);
    proxy.thaw();

    give_back(soon(waits).await.unwrap().unwrap()).await;
}

/// The answer that lists this line is longer than the libraries for gRPC accept by default.
async fn a_line_of_thousands_moves(_: Store) {
    const LINE: usize = 6_000;
    let server = EtcdServer::start();
    let locks = || {
        let builder = patient(server.url()).ttl(2 * LEASE);
        builder.fair(lockcore::Fair::Strict).build().unwrap()
    };
    let (holder, waiter) = (locks(), locks());
    // It is in each key.
    let name = "x".repeat(600);
    let guard = holder.mutex(&name).acquire().await.unwrap();
    let waits: Vec<_> = (0..LINE)
        // Locks with an owner text do not share a ticket.
        .map(|_| begin(waiter.mutex(&name).owner("a").wait(2 * LEASE)))
        .collect();
    eventually("the line has formed", 2 * STALL, async || {
        holder.inspect(&name).await.unwrap().len() == LINE + 1
    })
    .await;

    give_back(guard).await;
    let mut moved = 0;
    let mut waits = waits.into_iter();
    while moved < 20 {
        eventually("the next one holds", 2 * SOON, async || {
            waits.as_slice().iter().any(|wait| wait.is_finished())
        })
        .await;
        let mut left = Vec::new();
        for wait in waits {
            match wait.is_finished() {
                true => {
                    give_back(wait.await.unwrap().unwrap()).await;
                    moved += 1;
                }
                false => left.push(wait),
            }
        }
        waits = left.into_iter();
    }
    waits.for_each(|wait| wait.abort());
    eventually("nothing is left", STALL, async || {
        server.keys("test:1:{").is_empty()
    })
    .await;
}
