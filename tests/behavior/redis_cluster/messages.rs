//! Tests of the messages of nodes that serve a slot, and of nodes that have served it before.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Release;
use lockcore::backend::{self, Enqueued, EventSink, FULL, Id, Name, Namespace, News, Request};
use tests::eventually::{eventually, wait_until};
use tests::proxy::Proxy;
use tests::redis_cluster::{Cluster, NEVER, slot};
use tests::redis_server::RedisServer;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::{LONG_WAIT, TTL, client, key};
use crate::store::{Kind, PATIENCE, SOON, Store, give_back, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_message_grants_a_ticket_only_if_it_is_from_the_master_of_the_slot
        a_holder_is_asked_back_at_once_from_its_first_renewal_on
    ]
}

/// The lease is so long that the next renewal would come far too late.
async fn a_holder_is_asked_back_at_once_from_its_first_renewal_on(_: Store) {
    let cluster = Cluster::start(NEVER);
    let (locks, operator) = (client(&cluster.url()), client(&cluster.url()));
    let node = cluster.master_of(&key("a"));
    let channels = || node.command::<Vec<String>>(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
    let lock = locks.mutex("a").ttl(10 * LONG_WAIT);
    let guard = lock.try_acquire().await.unwrap();
    assert_eq!(
        channels(),
        [""; 0],
        "a lock that is held shortly costs none"
    );

    for _ in 0..2 {
        guard.extend(11 * LONG_WAIT).await.unwrap(); // a renewal
        wait_until("it listens", SOON, || channels().len() == 1);
    }

    let place = operator.inspect("a").await.unwrap().remove(0);
    let asks = operator.revoke("a", place.ticket, LONG_WAIT, "maintenance");
    let gives_way = async {
        assert_eq!(soon(guard.revoked()).await.why, "maintenance");
        give_back(guard).await;
    };
    let (asked, ()) = tokio::join!(asks, gives_way);
    assert_eq!(asked.unwrap(), Release::Released);
}

/// How much later than its request the subscription of a waiter reaches the node.
const LATER: Duration = Duration::from_secs(6);

/// The next news about a ticket.
async fn told(news: &mut UnboundedReceiver<News>) -> News {
    loop {
        match soon(news.recv()).await.unwrap() {
            News::Gap => {}
            news => return news,
        }
    }
}

/// The same message comes from a master, and from its replica. The client also listens at the
/// replica, because the replica was the master when the client sent its subscription.
async fn a_message_grants_a_ticket_only_if_it_is_from_the_master_of_the_slot(_: Store) {
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(1, true, NEVER, &partial);
    let [old, new] = &cluster.nodes[..] else {
        panic!()
    };
    // While a slot is served by no node, a client keeps its connections to nodes without slots. The
    // reason is that the map may not be complete.
    let mut others = (0..).filter(|other| *other != slot(old, &key("a")));
    let nobodys = others.next().unwrap().to_string();
    for node in [old, new] {
        node.command::<()>(&["CLUSTER", "DELSLOTS", &nobodys]);
    }
    let way = Proxy::to(old.port());
    cluster.announce(old, way.port());
    let namespace = Namespace::new("test").unwrap();
    let name = Name::new(namespace.clone(), "a").unwrap();
    let id = |number: u32| Id::parse(&format!("{number:032}")).unwrap();
    let request = |number| {
        let mut request = Request::new(name.clone(), id(number), FULL, FULL, TTL);
        request.wait = true;
        Arc::new(request)
    };
    let (tell, mut news) = mpsc::unbounded_channel();
    let events = EventSink::new(1, namespace, move |news| {
        let _ = tell.send(news);
    });
    let store = backend::open(&cluster.url()).unwrap();
    let store = store.connect(events).await.unwrap();
    let granted = store.enqueue(request(1), PATIENCE).await.unwrap();
    assert!(matches!(granted, Enqueued::Granted { .. }));

    way.delay(LATER, Duration::ZERO);
    let waits = tokio::spawn(store.enqueue(request(2), PATIENCE));
    let line = format!("{}:line", key("a"));
    eventually("it is in line", 2 * LATER, async || {
        old.command::<u64>(&["HLEN", &line]) == 2
    })
    .await;
    new.command::<()>(&["CLUSTER", "FAILOVER"]);
    wait_until("it is a replica", LONG_WAIT, || {
        let told: String = old.command(&["INFO", "replication"]);
        told.contains("role:slave") && told.contains("master_link_status:up")
    });
    way.delay(Duration::ZERO, Duration::ZERO);
    let waits = waits.await.unwrap().unwrap();
    assert!(matches!(waits, Enqueued::Waiting { .. }));
    let listens = |node: &RedisServer| {
        let channels: Vec<String> = node.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
        channels.first().cloned()
    };
    let channel = listens(old).expect("it listens at the replica");
    assert_eq!(listens(new), None);

    new.command::<u64>(&["SPUBLISH", &channel, &format!("{} 17", id(2))]);
    assert_eq!(told(&mut news).await, News::Recheck(id(2), Duration::ZERO));

    // The renewal makes the client listen at the master.
    let renewed = store.renew(vec![request(2)], PATIENCE);
    renewed.await.unwrap();
    wait_until("it listens at the master", SOON, || listens(new).is_some());
    new.command::<u64>(&["SPUBLISH", &channel, &format!("{} 18", id(2))]);
    // The master and the replica both deliver the message, in any order.
    let both = [told(&mut news).await, told(&mut news).await];
    let wakes = |news: &News| matches!(news, News::Granted(wake) if wake.ticket == 18);
    let asks = |news: &News| *news == News::Recheck(id(2), Duration::ZERO);
    assert!(both.iter().any(wakes) && both.iter().any(asks), "{both:?}");
}
