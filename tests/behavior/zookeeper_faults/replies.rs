//! Tests with requests and replies that are lost, late or out of order.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::zookeeper_server::ZooKeeperServer;
use zookeeper_client::{Acls, AddWatchMode, CreateMode, EventType};

use super::{builder, client, nothing_left, operator, proxied, through};
use crate::faults::works_again;
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        giving_up_on_a_lost_reply_leaves_nothing
        a_request_sent_to_a_stopped_server_is_found_and_deleted
        a_node_that_appears_after_its_release_is_deleted
    ]
}

/// The session timeout. The client library sends probes, and gives up connections, after fractions
/// of this time.
const SESSION: Duration = Duration::from_secs(10);

async fn giving_up_on_a_lost_reply_leaves_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for waits in [true, false] {
        proxy.lose_replies(b"-1073741824-1073741824-", 1);
        let lock = locks.mutex("a").wait(Duration::from_millis(30));
        let outcome = match waits {
            true => lock.acquire().await,
            false => {
                let abandoned = tokio::time::timeout(Duration::from_millis(10), lock.try_acquire());
                match abandoned.await {
                    Ok(outcome) => outcome,
                    Err(_) => locks.mutex("other").acquire().await,
                }
            }
        };
        if let Ok(guard) = outcome {
            give_back(guard).await;
        }
        nothing_left(&server).await;
    }
}

/// A stopped server carries out the requests when it continues, even if their sender gave up long
/// before.
async fn a_request_sent_to_a_stopped_server_is_found_and_deleted(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(200))
        .ttl(SESSION)
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    works_again(&locks, "warm", SOON).await;
    nothing_left(&server).await;
    for stopped in [Duration::from_millis(500), Duration::from_millis(5500)] {
        server.freeze();
        let lock = locks.mutex("a").wait(Duration::from_millis(100));
        assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
        // The server is stopped for a short time and for a long time. The long time is more than
        // 2/5 of the session, after which the client library gives up the connection.
        tokio::time::sleep(stopped).await;
        server.thaw();

        works_again(&locks, "after", SOON).await;
        nothing_left(&server).await;
    }
}

/// A create may arrive after its release if it was in the buffer of a connection that has closed.
/// In this test, another client sends this create, with the same id.
async fn a_node_that_appears_after_its_release_is_deleted(_: Store) {
    let server = ZooKeeperServer::start();
    // A server is slow when it handles a request for the first time. So another client sends these
    // requests first.
    let patient = client(&server);
    give_back(patient.mutex("a").acquire().await.unwrap()).await;
    drop(patient);
    let proxy = Proxy::to(server.port());
    // The operation timeout is shorter than the time between two probes of the session. So the next
    // request after the acquire is the release.
    let locks = builder(proxied(&proxy))
        .op_timeout(Duration::from_millis(200))
        .ttl(SESSION)
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    works_again(&locks, "a", SOON).await;
    nothing_left(&server).await;
    let operator = operator(&server).await;
    let recursive = AddWatchMode::PersistentRecursive;
    let parent = "/test:1/{a}";
    let mut watcher = operator.watch(parent, recursive).await.unwrap();
    server.freeze();
    let lock = locks.mutex("a").wait(Duration::from_millis(100));
    assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
    let asked = proxy.traffic().bytes_up;
    // The keeper stops waiting for the reply to the create. It first sends a release that leaves a
    // mark.
    eventually("the release is sent", SOON, async || {
        proxy.traffic().bytes_up > asked
    })
    .await;
    server.thaw();
    let mut created = watcher.changed().await;
    if created.path == parent {
        created = watcher.changed().await;
    }
    assert_eq!(created.event_type, EventType::NodeCreated);
    nothing_left(&server).await;

    let prefix = &created.path[..created.path.len() - 10];
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    operator.create(prefix, b"late", &options).await.unwrap();

    nothing_left(&server).await;
}
