//! Tests of renewals: how often they read the node of a ticket, and what the node shows of an
//! extended lease.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{Connection, Enqueued, FULL, Id, Name, Renewed, Request};
use lockcore::{ErrorKind, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::zookeeper_server::ZooKeeperServer;

use super::{client, connection, namespace, nothing_left, operator, through};
use crate::store::{Kind, PATIENCE, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_node_of_a_lease_that_is_extended_far_is_read_as_often_as_its_session_demands
        an_extension_whose_answer_is_lost_counts_when_it_is_acknowledged
        a_ticket_that_is_extended_and_made_smaller_shows_its_longer_ttl
        a_renewal_beside_one_that_makes_the_ticket_smaller_does_not_lose_it
    ]
}

fn request(name: &str, id: char, ttl: Duration) -> Request {
    let name = Name::new(namespace(), name).unwrap();
    let id = Id::parse(&id.to_string().repeat(32)).unwrap();
    Request::new(name, id, FULL, FULL, ttl)
}

/// Takes the locks `a` and `b`. Renewals of several tickets do not read each node each time.
async fn two(connection: &Arc<dyn Connection>, ttl: Duration) -> Vec<Arc<Request>> {
    let requests = [request("a", '1', ttl), request("b", '2', ttl)].map(Arc::new);
    for request in &requests {
        let answer = connection
            .enqueue(Arc::clone(request), PATIENCE)
            .await
            .unwrap();
        assert!(matches!(answer, Enqueued::Granted { .. }), "{answer:?}");
    }
    requests.into()
}

async fn the_node_of_a_lease_that_is_extended_far_is_read_as_often_as_its_session_demands(
    _: Store,
) {
    let server = ZooKeeperServer::start();
    let url = server.url() + "?session_timeout=9s";
    let connection = connection(&url, 1).await;
    let hour = Duration::from_secs(3600);
    let mut both = two(&connection, Duration::from_secs(1)).await;
    for request in &mut both {
        Arc::make_mut(request).ttl = hour;
    }
    let renewed = connection.renew(both.clone(), PATIENCE).await.unwrap();
    assert!(renewed.iter().all(|answer| answer.holds()), "{renewed:?}");
    let operator = operator(&server).await;
    let parent = "/test:1/{a}";
    let nodes = operator.list_children(parent).await.unwrap();

    let node = format!("{parent}/{}", nodes[0]);
    operator.delete(&node, None).await.unwrap();

    eventually("the holder notices it", SOON, async || {
        connection.renew(both.clone(), PATIENCE).await.unwrap()[0] == Renewed::Lost
    })
    .await;
}

/// A port on which nobody listens.
const NOBODY: u16 = 1;

/// The server writes the longer ttl, and the client does not learn of it at first.
async fn an_extension_whose_answer_is_lost_counts_when_it_is_acknowledged(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, other) = (through(&proxy), client(&server));
    let (ttl, longer) = (Duration::from_secs(10), Duration::from_secs(50));
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let shown = async || other.inspect("a").await.unwrap()[0].remaining;
    assert_eq!(shown().await, ttl);

    // The client cannot connect again, so no later renewal can be acknowledged either.
    proxy.lead_to(NOBODY);
    proxy.lose_replies(b" 50000", 1);
    let outcome = kind(guard.extend(longer).await);

    assert!(matches!(
        outcome,
        ErrorKind::Unavailable | ErrorKind::Unknown
    ));
    assert_eq!(proxy.traffic().replies_lost, 1);
    assert!(guard.remaining() <= ttl);
    proxy.lead_to(server.port());
    eventually("it is extended", SOON, async || guard.remaining() > ttl).await;
    assert_eq!(shown().await, longer);
    give_back(guard).await;
    nothing_left(&server).await;
}

async fn a_ticket_that_is_extended_and_made_smaller_shows_its_longer_ttl(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let (ttl, longer) = (Duration::from_secs(10), Duration::from_secs(50));
    let shown = async || other.inspect("a").await.unwrap()[0].remaining;
    for extends_first in [true, false] {
        let lock = locks.rwlock("a").write().ttl(ttl);
        let mut guard = lock.acquire().await.unwrap();

        if extends_first {
            guard.extend(longer).await.unwrap();
        }
        guard.downgrade().await.unwrap();
        assert_eq!(shown().await, if extends_first { longer } else { ttl });
        guard.extend(longer).await.unwrap();

        assert_eq!(shown().await, longer);
        assert!(guard.remaining() > ttl);
        assert_eq!(guard.release().await.unwrap(), Release::Released);
        nothing_left(&server).await;
    }
}

/// `join!` polls both in this order. So the second one looks for the node that the first one has
/// replaced.
async fn a_renewal_beside_one_that_makes_the_ticket_smaller_does_not_lose_it(_: Store) {
    let server = ZooKeeperServer::start();
    let connection = connection(&server.url(), 1).await;
    let whole = two(&connection, Duration::from_secs(10)).await[..1].to_vec();
    let mut smaller = whole.clone();
    Arc::make_mut(&mut smaller[0]).permits = NonZeroU32::MIN;

    let (shrunk, renewed) = tokio::join!(
        connection.renew(smaller.clone(), PATIENCE),
        connection.renew(whole, PATIENCE)
    );

    assert!(shrunk.unwrap()[0].holds());
    assert_ne!(renewed.unwrap(), [Renewed::Lost]);
    let again = connection.renew(smaller, PATIENCE).await.unwrap();
    assert!(again[0].holds(), "{again:?}");
}
