//! Sessions that end, with their process or by themselves, and how long they are.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::witness::FencedResource;
use tests::zookeeper_server::ZooKeeperServer;

use super::{builder, client, counted, nothing_left};
use crate::faults::holder;
use crate::store::{Kind, SLACK, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_killed_holder_is_followed_when_its_session_is_over
        a_frozen_holder_is_followed_and_its_late_write_is_refused
        a_process_that_ends_with_a_guard_leaves_no_lock
        a_client_that_ends_leaves_no_session
        a_ttl_beyond_the_session_is_refused_with_both_numbers
    ]
}

async fn a_killed_holder_is_followed_when_its_session_is_over(_: Store) {
    let server = ZooKeeperServer::start();
    let ttl = Duration::from_secs(2);
    let mut longest = Duration::ZERO;
    for _ in 0..3 {
        let mut dying = holder(&server.url(), "a", ttl);
        let token = dying.acquire();
        // Its own renewals are 40 s apart: it is told by the server that the holder's session is over.
        let locks = counted(&server);
        let waiter = begin(locks.mutex("a").wait(SOON));
        tickets(&client(&server), "a", 2).await;

        dying.kill();
        let killed = Instant::now();
        let next = waiter.await.unwrap().unwrap();

        longest = longest.max(killed.elapsed());
        assert!(next.token().as_u64() > token);
        give_back(next).await;
    }
    println!("SIGKILL of the holder to the next holder, session of 2 s: {longest:?} at most");
    // The bar is a second on an idle machine.
    assert!(
        longest < ttl + Duration::from_secs(1) + SLACK,
        "{longest:?}"
    );
}

/// Its session is another's past.
async fn a_frozen_holder_is_followed_and_its_late_write_is_refused(_: Store) {
    let server = ZooKeeperServer::start();
    let resource = FencedResource::default();
    let mut frozen = holder(&server.url(), "a", Duration::from_secs(1));
    let old = frozen.acquire();
    resource.write(old).unwrap();
    frozen.process().freeze();

    let next = client(&server)
        .mutex("a")
        .wait(SOON)
        .acquire()
        .await
        .unwrap();
    resource.write(next.token().as_u64()).unwrap();
    frozen.process().thaw();

    assert!(!frozen.is_valid(), "two valid holders");
    assert!(resource.write(old).is_err());
    assert_eq!(frozen.release(), "AlreadyLost");
    assert!(next.is_valid());
    give_back(next).await;
    // It works again, in a session of its own.
    assert!(frozen.acquire() > old);
}

async fn a_process_that_ends_with_a_guard_leaves_no_lock(_: Store) {
    let server = ZooKeeperServer::start();
    for _ in 0..3 {
        let mut ending = holder(&server.url(), "a", Duration::from_secs(60));
        ending.acquire();
        ending.finish(SOON);

        nothing_left(&server).await;
    }
}

/// Which the server would carry, and count, for as long as it was to last.
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
        let took = began.elapsed();
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
