//! Tests of the values that the URL may have, of what the server must be able to do, and of the
//! rights that the user needs.

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{ErrorKind, Locks};
use tests::redis_server::RedisServer;
use tests::stores::redis::{USER, documented_for_durability, grant, grant_durability};
use tests::watch::SECRET;

use super::{client, durable, hasty, servers};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        a_durability_that_redis_does_not_have_is_a_mistake_that_lists_the_values
        a_server_that_cannot_wait_for_its_disk_is_a_mistake
        a_lock_on_the_disk_outlives_its_server_if_the_server_can_wait_for_that
        ready_fails_while_a_replica_is_missing
        ready_warns_of_replicas_that_need_not_have_a_lock
        a_user_without_the_right_to_wait_is_told
        a_right_to_wait_that_is_taken_away_grants_nothing_and_leaves_nothing
    ]
}

async fn a_durability_that_redis_does_not_have_is_a_mistake_that_lists_the_values(_: Store) {
    for url in [
        "redis://127.0.0.1/0?durability=majority",
        "redis://127.0.0.1?durability",
        "redis://127.0.0.1?durability=replicas:0",
        "redis+sentinel://127.0.0.1/mymaster?durability=replicas:101",
        "redis+sentinel://127.0.0.1/mymaster/0?sentinel_password=x&durability=on",
    ] {
        let error = Locks::connect(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}");
        let text = error.to_string();
        for value in ["replicas:N", "fsync", "fsync+replicas:N", "from 1 to 100"] {
            assert!(text.contains(value), "{text}");
        }
    }
    for url in [
        "redis://127.0.0.1/0?durabilty=fsync",
        "redis+sentinel://127.0.0.1/mymaster?durabilty=fsync",
    ] {
        let error = Locks::connect(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}");
        assert!(
            error.to_string().contains("did you mean durability?"),
            "{error}"
        );
    }
}

/// Either the server is older than 7.2, or it writes no append-only file.
async fn a_server_that_cannot_wait_for_its_disk_is_a_mistake(_: Store) {
    let server = RedisServer::start();
    for durability in ["fsync", "fsync+replicas:1"] {
        let locks = client(&format!("{}?durability={durability}", server.url()));
        let error = locks.mutex("a").acquire().await.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Config, "{text}");
        assert!(
            text.contains("7.2 or later") || text.contains("set appendonly yes"),
            "{text}"
        );
        assert_eq!(kind(locks.ready(SOON).await), ErrorKind::Config);
    }
}

/// A server older than 7.2 cannot wait for its disk. There the client gives an error that says so.
async fn a_lock_on_the_disk_outlives_its_server_if_the_server_can_wait_for_that(_: Store) {
    let server = RedisServer::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let locks = client(&format!("{}?durability=fsync", server.url()));
    let knows: Vec<Option<Vec<redis::Value>>> = server.command(&["COMMAND", "INFO", "WAITAOF"]);
    if knows[0].is_none() {
        let error = locks.mutex("a").acquire().await.unwrap_err();
        assert!(error.to_string().contains("7.2 or later"), "{error}");
        return;
    }
    locks.ready(SOON).await.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    server.kill();
    server.restart();

    let other = client(&server.url());
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    guard.ensure(SOON).await.unwrap();
    give_back(guard).await;
    // The server has an append-only file and no replica.
    let url = format!("{}?durability=fsync+replicas:1", server.url());
    let error = hasty(&url).build().unwrap().mutex("a").acquire().await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error
            .to_string()
            .contains("0 of 1 replicas have written it"),
        "{error}"
    );
}

async fn ready_fails_while_a_replica_is_missing(_: Store) {
    let (master, replicas) = servers(1).await;
    let one = client(&durable(&master, 1));
    one.ready(SOON).await.unwrap();

    let two = hasty(&durable(&master, 2)).build().unwrap();
    let error = two.ready(SOON).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("1 of 2 replicas"), "{error}");

    // The replica is frozen, and its connection is open.
    replicas[0].freeze();
    let hasty = hasty(&durable(&master, 1)).build().unwrap();
    let error = hasty.ready(SOON).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    replicas[0].thaw();
    one.ready(SOON).await.unwrap();
}

/// A replica that need not have a lock may be promoted.
async fn ready_warns_of_replicas_that_need_not_have_a_lock(_: Store) {
    let (master, _replicas) = servers(2).await;
    for (asked, warns) in [(1, true), (2, false)] {
        let namespace = Namespace::new("test").unwrap();
        let redis = backend::open(&durable(&master, asked)).unwrap();
        let connection = redis.connect(EventSink::new(1, namespace, |_| ()));
        let told = connection.await.unwrap().check().await.unwrap().join("\n");
        assert_eq!(
            told.contains("Write durability=replicas:2"),
            warns,
            "{told}"
        );
    }
    assert_eq!(master.keys("*"), Vec::<String>::new(), "left by the check");
}

fn durable_as_user(master: &RedisServer) -> String {
    format!(
        "{}?durability=replicas:1",
        master.url_with_user(USER, SECRET)
    )
}

async fn a_user_without_the_right_to_wait_is_told(_: Store) {
    let (master, _replicas) = servers(1).await;
    grant(&master, "lock", SECRET);
    let locks = || {
        Locks::builder()
            .url(durable_as_user(&master))
            .op_timeout(SOON)
            .build()
            .unwrap()
    };

    let error = locks().mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(
        text.contains("the user may not run wait (see \"Minimum rights\""),
        "{text}"
    );

    grant_durability(&master);
    let (locks, other) = (locks(), locks());
    locks.ready(SOON).await.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(other.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

async fn a_right_to_wait_that_is_taken_away_grants_nothing_and_leaves_nothing(_: Store) {
    let (master, _replicas) = servers(1).await;
    grant(&master, "lock", SECRET);
    grant_durability(&master);
    let locks = Locks::builder()
        .url(durable_as_user(&master))
        .op_timeout(SOON)
        .build()
        .unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let rights = documented_for_durability();
    assert_eq!(rights, ["+wait"]);
    master.command::<()>(&["ACL", "SETUSER", USER, "-wait"]);

    let error = locks.mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("wait"), "{error}");
    tickets(&locks, "a", 0).await;
    grant_durability(&master);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}
