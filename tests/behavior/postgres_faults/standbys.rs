//! Facts about servers with a standby.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use lockcore::backend::{
    self, Departure, EventSink, FULL, Fault, Id, Name, Namespace, Released, Request, Resize,
    ResizeOp, StoreError,
};
use tests::eventually::eventually;
use tests::postgres_server::{HARNESS, Pooler, PostgresServer, STANDBY};
use tests::proxy::Proxy;

use crate::crowd::{Crowd, SHORT};
use crate::faults::{builder, patient, works_again};
use crate::store::{DEFAULT, Kind, LEASE, PATIENCE, SOON, STALL, Store, begin, give_back, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        clients_of_a_server_whose_standby_is_cut_off_leave_no_process_there
        what_a_client_that_was_cut_off_has_left_is_ended_by_the_next_one
        behind_a_pooler_a_request_itself_waits_until_it_lasts
        a_wait_for_a_standby_that_was_ended_does_not_count
        clients_use_the_server_that_was_promoted_last
        a_standby_that_was_waited_for_lets_no_second_holder_in_when_it_is_promoted
    ]
}

/// A server that waits for its standby, which follows it through this proxy.
fn waits_for_its_standby() -> (PostgresServer, Proxy, PostgresServer) {
    let primary = PostgresServer::primary(&[]);
    let proxy = Proxy::to(primary.port());
    let standby = primary.standby(proxy.port());
    primary.set(&format!("SET synchronous_standby_names = {STANDBY}"));
    (primary, proxy, standby)
}

/// The change of the counter is repeated until the standby is back.
async fn clients_of_a_server_whose_standby_is_cut_off_leave_no_process_there(_: Store) {
    let (primary, proxy, _standby) = waits_for_its_standby();
    let locks = builder(primary.url()).build().unwrap();
    works_again(&locks, "a", STALL).await;
    let processes = || {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockcore'";
        primary.query(count)[0].parse::<usize>().unwrap()
    };
    proxy.cut();

    let counter = locks.counter("c");
    let counting = tokio::spawn(async move { counter.add(1).await });
    for _ in 0..5 {
        let outcome = locks.mutex("a").acquire().await;
        assert!(outcome.is_err(), "{outcome:?}");
    }
    // Two for the keeper, two for this runtime, and the same again while they are replaced.
    eventually("no other process is left", SOON, async || processes() <= 4).await;

    proxy.restore();
    works_again(&locks, "a", STALL).await;
    assert_eq!(counting.await.unwrap().unwrap().count, 1);
}

/// The client is cut off while the server waits for the standby. A process that is left keeps its
/// name locked, if the request flushes itself. So others would wait for it, one after the other.
async fn what_a_client_that_was_cut_off_has_left_is_ended_by_the_next_one(_: Store) {
    let (primary, proxy, _standby) = waits_for_its_standby();
    let clients = Proxy::to(primary.port());
    let left = || {
        primary.query(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'lockcore' \
             AND wait_event IN ('SyncRep', 'advisory')",
        )
    };
    for wakeups in ["listen", "look"] {
        let url = |port| format!("{}?wakeups={wakeups}", primary.url_at(port));
        // It is cut off before it ends the wait itself.
        let locks = builder(url(clients.port())).op_timeout(SOON);
        let locks = locks.build().unwrap();
        works_again(&locks, "a", STALL).await;
        proxy.cut();
        let waits = begin(locks.mutex("a").wait(2 * SOON));
        eventually("the server waits", SOON, async || !left().is_empty()).await;
        clients.cut();
        assert!(waits.await.unwrap().is_err());
        assert!(!left().is_empty());

        let store = backend::open(&url(primary.port())).unwrap();
        eventually("another client has ended the wait", STALL, async || {
            let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
            store.connect(events).await.unwrap();
            left().is_empty()
        })
        .await;

        clients.restore();
        proxy.restore();
    }
}

/// A flush behind the request would prove nothing there. Each request waits alone.
async fn behind_a_pooler_a_request_itself_waits_until_it_lasts(_: Store) {
    let server = PostgresServer::primary(&[]);
    let pooler = Pooler::of(&server);
    let locks = patient(format!("{}?wakeups=look", pooler.url()));
    let locks = locks.build().unwrap();
    let waits = async |verb: &str| {
        let hangs = format!(
            "SELECT count(*) FROM pg_stat_activity \
             WHERE wait_event = 'SyncRep' AND query LIKE '%lockcore1.{verb}(%'"
        );
        eventually(&format!("{verb} waits"), SOON, async || {
            server.query(&hangs) == ["1"]
        })
        .await;
    };
    macro_rules! lasts {
        ($verb:literal, $request:expr) => {{
            server.wait_for_no_standby();
            let request = tokio::spawn($request);
            waits($verb).await;
            assert!(!request.is_finished(), $verb);
            server.set("RESET synchronous_standby_names");
            request.await.unwrap().unwrap()
        }};
    }
    // The ttl is so long that the keeper sends no renewal meanwhile.
    let long = Duration::from_secs(3600);
    let mutex = locks.mutex("a").ttl(long);
    let guard = lasts!("enqueue", async move { mutex.acquire().await });
    let guard = lasts!("renew", async move {
        guard.extend(2 * long).await.map(|_| guard)
    });
    let text = guard.detach().await.unwrap();
    let adopts = locks.clone();
    let guard = lasts!("adopt", async move { adopts.adopt(&text).await });
    give_back(guard).await;
    let semaphore = locks.semaphore("s", 4);
    lasts!("stored", async move { semaphore.capacity().await });
    let counter = locks.counter("c");
    lasts!("counter", async move { counter.add(1).await });
}

/// The server answers as if the request were at the standby, and warns. The client ends the wait
/// itself when it has lasted for one operation timeout.
async fn a_wait_for_a_standby_that_was_ended_does_not_count(_: Store) {
    let server = PostgresServer::primary(&[]);
    server.query(&format!(
        "ALTER USER {HARNESS} SET client_min_messages = error"
    ));
    let pooler = Pooler::of(&server);
    let namespace = Namespace::new("test").unwrap();
    let urls = [server.url(), format!("{}?wakeups=look", pooler.url())];
    for (number, url) in urls.iter().enumerate() {
        let events = EventSink::new(1, namespace.clone(), |_| ());
        let connection = backend::open(url).unwrap().connect(events).await.unwrap();
        server.wait_for_no_standby();
        let name = Name::new(namespace.clone(), format!("n{number}")).unwrap();
        let id = Id::parse(&format!("{number:032}")).unwrap();
        let request = Arc::new(Request::new(name.clone(), id, FULL, FULL, LEASE));
        let assert_does_not_count = |error: StoreError| {
            let is_unknown = error.is_halfway() || error.fault() == Fault::Unknown;
            assert!(is_unknown && !error.is_broken(), "{error:?}");
        };

        let taken = connection.enqueue(Arc::clone(&request), PATIENCE).await;
        assert_does_not_count(taken.unwrap_err());
        let renewed = connection.renew(vec![Arc::clone(&request)], PATIENCE).await;
        assert_does_not_count(renewed.unwrap_err());
        let op = ResizeOp::Set {
            capacity: Some(2),
            after: None,
            stated: FULL,
        };
        let resize = Arc::new(Resize::new(name.clone(), id, op));
        assert_does_not_count(connection.resize(resize).await.unwrap_err());
        let read = Arc::new(Resize::new(name, id, ResizeOp::Read));
        assert_does_not_count(connection.resize(read).await.unwrap_err());

        let departure = Departure::new(request, true);
        let released = connection.release(vec![departure]).await.unwrap();
        assert_eq!(released, [Released::Released]);
        server.set("RESET synchronous_standby_names");
    }
}

/// The host names are those of the URL. The old primary is the first.
fn url_of_both(old: &PostgresServer, new: &PostgresServer) -> String {
    let both = format!("127.0.0.1:{},127.0.0.1:{}", old.port(), new.port());
    old.url()
        .replace(&format!("127.0.0.1:{}", old.port()), &both)
}

/// The old primary goes on, as if nobody could stop it.
async fn clients_use_the_server_that_was_promoted_last(_: Store) {
    let old = PostgresServer::primary(&[]);
    let new = old.standby(old.port());
    let url = url_of_both(&old, &new);
    let early = patient(&url).build().unwrap();
    // The new one may not have its release.
    works_again(&early, "early", STALL).await;
    let of = |server: &PostgresServer| {
        server.query("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockcore'")
    };
    // For its keeper and for this runtime.
    eventually("both are connected", SOON, async || of(&old) == ["4"]).await;
    new.promote();

    let clients = (0..10).map(|_| patient(&url).build().unwrap());
    let clients: Vec<_> = clients.collect();
    for locks in &clients {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }

    // The early client has not connected again.
    eventually("nobody else uses the old one", SOON, async || {
        of(&old) == ["4"]
    })
    .await;
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = backend::open(&url).unwrap().connect(events).await.unwrap();
    let warnings = connection.check().await.unwrap();
    let told = |warning: &String| warning.contains("take writes at the same time");
    assert!(warnings.iter().any(told), "{warnings:?}");

    // Who has seen the new one goes back to the old one in no case.
    let locks = builder(&url).build().unwrap();
    works_again(&locks, "a", STALL).await;
    new.kill();
    let outcome = locks.mutex("a").try_acquire().await;
    let text = outcome.as_ref().unwrap_err().to_string();
    // The request may have been on its way to the new one.
    let kinds = [ErrorKind::Unavailable, ErrorKind::Unknown];
    assert!(kinds.contains(&kind(outcome)), "{text}");
    assert!(text.contains("another server was promoted"), "{text}");
}

/// The primary crashes under load, and nobody starts it again. What its standby has applied does not
/// matter: it applies the rest of the log before it takes writes.
async fn a_standby_that_was_waited_for_lets_no_second_holder_in_when_it_is_promoted(_: Store) {
    for durability in ["on", "remote_apply"] {
        let old = PostgresServer::primary(&["wal_writer_delay=10s"]);
        let new = old.standby(old.port());
        old.set(&format!("SET synchronous_standby_names = {STANDBY}"));
        let url = format!("{}?durability={durability}", url_of_both(&old, &new));
        let crowd = Crowd::begin(&url, SHORT);
        crowd.visits(fastrand::usize(20..120)).await;
        let fail_over = || {
            old.kill();
            new.promote();
        };
        crowd.crash(fail_over, true).await;
        crowd.visits(100).await;
        crowd.end().await;
    }
}
