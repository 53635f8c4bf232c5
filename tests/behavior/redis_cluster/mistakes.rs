//! Tests of the errors of clients when the URL, the rights or the cluster are wrong.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{ErrorKind, Locks};
use tests::certificates::Authority;
use tests::redis_cluster::{Cluster, NEVER};
use tests::redis_server::RedisServer;
use tests::stores::redis::{USER, documented_in_a_cluster};
use tests::watch::SECRET;

use super::{TTL, client, key};
use crate::faults::{builder, works_again};
use crate::redis_rights;
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, shows_no_password, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_single_server_is_told_apart_and_named_with_its_scheme
        one_node_of_the_url_that_answers_is_enough
        without_any_one_of_the_documented_rights_the_client_says_which_is_missing
        slots_that_nobody_serves_are_named_and_the_others_can_be_used
        readiness_warns_of_a_master_without_a_replica_and_of_eviction
        with_tls_the_nodes_are_reached_at_their_ports_for_it
    ]
}

async fn a_single_server_is_told_apart_and_named_with_its_scheme(_: Store) {
    let server = RedisServer::start();
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let error = client(&url).mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let text = error.to_string();
    assert!(text.contains("not part of a Redis Cluster"), "{text}");
    assert!(text.contains("write redis://"), "{text}");
}

async fn one_node_of_the_url_that_answers_is_enough(_: Store) {
    let cluster = Cluster::with(3, false, NEVER, &[]);
    let gone = tests::ports::free_port();
    let url = format!(
        "redis+cluster://127.0.0.1:{gone},127.0.0.1:{}",
        cluster.nodes[2].port()
    );
    let locks = client(&url);

    for number in 0..10 {
        give_back(locks.mutex(format!("n{number}")).acquire().await.unwrap()).await;
    }
}

async fn without_any_one_of_the_documented_rights_the_client_says_which_is_missing(_: Store) {
    let cluster = Cluster::of_one();
    let node = &cluster.nodes[0];
    let documented = documented_in_a_cluster("lock", SECRET);
    let client = |user: &str| {
        let url = format!("redis+cluster://{user}:{SECRET}@127.0.0.1:{}", node.port());
        let builder = Locks::builder().url(url).op_timeout(STALL);
        builder.build().unwrap()
    };
    let more = [(["resetchannels", "&other:*"], "spublish")];
    redis_rights::each_missing_right_is_named(node, &documented, &more, client).await;
    // With all of these rights, a lock can be handed over.
    redis_rights::command(node, &documented);
    let guard = client(USER).mutex("a").acquire().await.unwrap();
    let next = begin(client(USER).mutex("a").wait(SOON));
    tickets(&client(USER), "a", 2).await;
    give_back(guard).await;
    give_back(next.await.unwrap().unwrap()).await;
}

async fn with_tls_the_nodes_are_reached_at_their_ports_for_it(_: Store) {
    let ca = Authority::new();
    let identity = ca.server(&["127.0.0.1"]);
    let node = |tls_cluster: &str| {
        let bus = tests::ports::free_port().to_string();
        let mut extra = vec!["--cluster-enabled", "yes", "--cluster-port", &bus];
        extra.extend(["--tls-cluster", tls_cluster, "--requirepass", SECRET]);
        let node = RedisServer::with_tls(&identity, None, &extra);
        node.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        node
    };
    let client = |scheme: &str, node: &RedisServer| {
        let url = format!("{scheme}://:{SECRET}@127.0.0.1:{}", node.port());
        builder(url).op_timeout(SOON).ttl(TTL)
    };
    let encrypted = |node: &RedisServer| {
        let builder = client("rediss+cluster", node).ca_file(ca.file());
        builder.build().unwrap()
    };

    let sound = node("yes");
    let locks = encrypted(&sound);
    works_again(&locks, "a", SOON).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let next = begin(encrypted(&sound).mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(next.await.unwrap().unwrap()).await;

    let plain = client("redis+cluster", &sound).op_timeout(Duration::from_secs(3));
    let error = plain
        .build()
        .unwrap()
        .mutex("b")
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("write rediss+cluster://"), "{text}");
    shows_no_password(&error);

    // If `tls-cluster` is off, Redis 7.0 does not announce its TLS port.
    let error = encrypted(&node("no"))
        .mutex("a")
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("set tls-cluster yes"), "{error}");
}

/// The warnings about this cluster that are logged when a client becomes ready.
async fn told(cluster: &Cluster) -> String {
    client(&cluster.url()).ready(SOON).await.unwrap(); // warnings do not make `ready` fail
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = backend::open(&cluster.url()).unwrap().connect(events);
    connection.await.unwrap().check().await.unwrap().join("\n")
}

async fn slots_that_nobody_serves_are_named_and_the_others_can_be_used(_: Store) {
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(1, false, NEVER, &partial);
    let node = &cluster.nodes[0];
    let slot = tests::redis_cluster::slot(node, &key("a")).to_string();
    node.command::<()>(&["CLUSTER", "DELSLOTS", &slot]);
    let locks = builder(cluster.url())
        .op_timeout(Duration::from_secs(2))
        .build()
        .unwrap();

    let error = locks.mutex("a").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(
        error.to_string().contains(&format!("slot {slot}")),
        "{error}"
    );
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    let warnings = told(&cluster).await;
    assert!(warnings.contains("serves 1 of its slots"), "{warnings}");

    node.command::<()>(&["CLUSTER", "ADDSLOTS", &slot]);
    give_back(
        client(&cluster.url())
            .mutex("a")
            .wait(SOON)
            .acquire()
            .await
            .unwrap(),
    )
    .await;
}

async fn readiness_warns_of_a_master_without_a_replica_and_of_eviction(_: Store) {
    let evicts = ["--maxmemory-policy", "allkeys-lru"];
    let cluster = Cluster::with(1, false, NEVER, &evicts);

    let warnings = told(&cluster).await;

    for part in [
        "no replica is connected",
        "allkeys-lru",
        "min-replicas-to-write 1",
    ] {
        assert!(warnings.contains(part), "{warnings}");
    }
    let port = cluster.nodes[0].port().to_string();
    assert!(warnings.contains(&port), "{warnings}");
}
