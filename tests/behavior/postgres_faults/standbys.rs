//! Facts about servers with a standby.

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::postgres_server::{PostgresServer, STANDBY};
use tests::proxy::Proxy;

use crate::faults::{builder, works_again};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        clients_of_a_server_whose_standby_is_cut_off_leave_no_process_there
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
