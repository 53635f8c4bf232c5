//! Tests of sessions that end together with their client, and of the length of sessions.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::stalls::awake_since;
use tests::zookeeper_server::ZooKeeperServer;

use super::counted;
use crate::faults::{is_renewed, patient};
use crate::giving_up::polled;
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_client_that_ends_leaves_no_session
        a_ttl_beyond_the_session_without_renewal_is_refused_with_both_numbers
        a_renewed_lease_with_a_ttl_beyond_the_session_has_that_of_the_session
        an_extension_beyond_the_session_is_refused_and_changes_nothing
    ]
}

const SESSION: Duration = Duration::from_secs(15);

/// A session that is not closed stays at the server, and is counted, until its timeout.
async fn a_client_that_ends_leaves_no_session(_: Store) {
    let server = ZooKeeperServer::start();
    let sessions = || server.mntr().remove("zk_global_sessions").unwrap();
    for waits in [false, true] {
        let locks = counted(&server);
        let guard = locks.mutex("a").acquire().await.unwrap();
        if waits {
            let waiter = begin(locks.mutex("a").wait(SOON));
            tickets(&locks, "a", 2).await;
            give_back(guard).await;
            drop(waiter.await.unwrap().unwrap());
        } else {
            drop(guard);
        }
        assert_eq!(sessions(), "1");

        let began = Instant::now();
        drop(locks);

        assert_eq!(sessions(), "0");
        let took = awake_since(began);
        assert!(took < SOON, "{took:?}");
    }
}

async fn a_ttl_beyond_the_session_without_renewal_is_refused_with_both_numbers(_: Store) {
    let (_server, locks) = with_short_sessions();
    let long = locks.mutex("a").renew(false);

    let error = long.acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(text.contains("30s") && text.contains("15s"), "{text}");
    let short = long.ttl(SESSION);
    give_back(short.acquire().await.unwrap()).await;
}

/// As with `tryLock(3, 30)` of people who come from other libraries.
async fn a_renewed_lease_with_a_ttl_beyond_the_session_has_that_of_the_session(_: Store) {
    let (_server, locks) = with_short_sessions();
    for lock in [locks.mutex("a"), locks.semaphore("s", 3).permits(2)] {
        let guard = lock.clone().acquire().await.unwrap();
        let waits = begin(lock.wait(LEASE));

        let remaining = guard.remaining();
        assert!(remaining <= SESSION, "{remaining:?}");
        assert!(remaining > SESSION / 2, "{remaining:?}");
        assert!(polled(guard.in_danger(), 1).await.is_none(), "{guard:?}");
        is_renewed(&guard, SESSION).await;
        assert!(polled(guard.in_danger(), 1).await.is_none(), "{guard:?}");
        let error = guard.ensure(2 * SESSION).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");

        give_back(guard).await;
        give_back(soon(waits).await.unwrap().unwrap()).await;
    }
}

async fn an_extension_beyond_the_session_is_refused_and_changes_nothing(_: Store) {
    let (_server, locks) = with_short_sessions();
    let lock = locks.rwlock("a").read().ttl(SESSION / 2);
    let mut guard = lock.acquire().await.unwrap();

    let error = guard.extend(Duration::from_secs(60)).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    for part in ["1m", "15s", "7s 500ms"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let remaining = guard.remaining();
    assert!(remaining <= SESSION / 2, "{remaining:?}");
    guard.try_upgrade().await.unwrap().release().await.unwrap();
    // The session is the reason, and not a slow store.
    guard.extend(SESSION).await.unwrap();
    let error = guard.ensure(2 * SESSION).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    guard.ensure(SESSION / 2).await.unwrap();
    give_back(guard).await;
}

/// The server gives sessions of fifteen seconds, and the client asks for leases of thirty.
fn with_short_sessions() -> (ZooKeeperServer, Locks) {
    let server = ZooKeeperServer::with(&["maxSessionTimeout=15000"]);
    let locks = patient(server.url()).ttl(Duration::from_secs(30));
    let locks = locks.build().unwrap();
    (server, locks)
}
