//! Tests of sessions that end together with their client, and of the length of sessions.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::stalls::awake_since;
use tests::zookeeper_server::ZooKeeperServer;

use super::{builder, counted};
use crate::store::{Kind, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_client_that_ends_leaves_no_session
        a_ttl_beyond_the_session_is_refused_with_both_numbers
    ]
}

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
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

async fn a_ttl_beyond_the_session_is_refused_with_both_numbers(_: Store) {
    let server = ZooKeeperServer::with(&["maxSessionTimeout=5000"]);
    let locks = builder(server.url())
        .ttl(Duration::from_secs(7))
        .build()
        .unwrap();

    let error = locks.mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(text.contains("7s") && text.contains("5s"), "{text}");
    let short = locks.mutex("a").ttl(Duration::from_secs(5));
    give_back(short.acquire().await.unwrap()).await;
}
