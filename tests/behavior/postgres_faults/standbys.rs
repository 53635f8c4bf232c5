//! Facts about servers with a standby.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use lockcore::backend::{self, EventSink, Namespace};
use tests::eventually::eventually;
use tests::postgres_server::{PostgresServer, STANDBY};
use tests::proxy::Proxy;

use super::{Crowd, SHORT};
use crate::faults::{builder, patient, works_again};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, give_back, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        clients_of_a_server_whose_standby_is_cut_off_leave_no_process_there
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
    for _ in 0..8 {
        let outcome = locks.mutex("a").acquire().await;
        assert!(outcome.is_err(), "{outcome:?}");
    }
    // Two for the keeper, two for this runtime, and the same again while they are replaced.
    eventually("no other process is left", SOON, async || processes() <= 4).await;

    proxy.restore();
    works_again(&locks, "a", STALL).await;
    assert_eq!(counting.await.unwrap().unwrap().count, 1);
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
    assert_eq!(kind(outcome), ErrorKind::Unavailable, "{text}");
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
