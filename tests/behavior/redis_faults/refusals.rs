//! Tests with a server that answers and refuses: it is full, read-only or busy, has lost its
//! scripts, or is the wrong server.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use super::{client, hasty, nothing_left, through};
use crate::faults::builder;
use crate::store::{Kind, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_full_server_refuses_locks_but_renews_and_releases
        a_full_server_takes_back_a_lock_and_keeps_its_mark
        a_full_server_lets_readers_in
        a_full_server_refuses_a_further_reader
        a_read_only_server_is_unavailable
        a_read_only_server_is_unavailable_to_a_further_reader
        a_server_that_cannot_save_is_unavailable
        a_server_busy_with_a_script_is_unavailable_and_comes_back
        forgotten_scripts_are_loaded_again
        the_database_of_the_url_is_used
        ready_reports_a_replica
        a_server_of_a_cluster_is_refused_before_it_costs_a_lock
    ]
}

/// The server answers OOM.
async fn a_full_server_refuses_locks_but_renews_and_releases(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let ttl = Duration::from_secs(6);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);

    let error = locks.mutex("b").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("maxmemory"), "{error}");
    let full = Instant::now();
    while full.elapsed() < 2 * ttl {
        assert!(guard.is_valid(), "the renewal was refused");
        tokio::time::sleep(Duration::from_millis(1)).await; // until more than the ttl has passed
    }
    give_back(guard).await;
    nothing_left(&server).await;
}

/// The lock was requested twice, so its release leaves a mark. The mark is one more key.
async fn a_full_server_takes_back_a_lock_and_keeps_its_mark(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    proxy.lose_replies(b"EVALSHA", 1);
    let guard = locks.mutex("a").acquire().await.unwrap();
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);

    give_back(guard).await;

    assert_eq!(server.keys("test:1:{a}:gone:*").len(), 1);
}

async fn a_full_server_lets_readers_in(_: Store) {
    let server = RedisServer::start();
    let (locks, other) = (client(&server), client(&server));
    let mut guard = locks.mutex("a").acquire().await.unwrap();
    let reader = begin(other.rwlock("a").read().wait(SOON));
    tickets(&locks, "a", 2).await;
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);

    guard.downgrade().await.unwrap();

    give_back(reader.await.unwrap().unwrap()).await;
    give_back(guard).await;
    nothing_left(&server).await;
}

/// The server has become a replica and answers READONLY. So the client replaces its connection.
async fn a_read_only_server_is_unavailable(_: Store) {
    let server = RedisServer::start();
    let locks = hasty(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);

    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("replica"), "{error}");
    server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// The server refuses a command in the middle of the script. Earlier commands of the script have
/// been carried out by then.
async fn a_full_server_refuses_a_further_reader(_: Store) {
    let server = RedisServer::start();
    let (locks, other) = (client(&server), client(&server));
    let reader = locks.rwlock("a").read().acquire().await.unwrap();
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);

    let error = other.rwlock("a").read().acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("maxmemory"), "{error}");
    give_back(reader).await;
    nothing_left(&server).await;
}

async fn a_read_only_server_is_unavailable_to_a_further_reader(_: Store) {
    let server = RedisServer::start();
    let (locks, other) = (client(&server), hasty(&server));
    let reader = locks.rwlock("a").read().acquire().await.unwrap();
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);

    let error = other.rwlock("a").read().acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("replica"), "{error}");
    server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    give_back(other.rwlock("a").read().acquire().await.unwrap()).await;
    drop(reader);
}

/// The server answers MISCONF, because a background save cannot write its file.
async fn a_server_that_cannot_save_is_unavailable(_: Store) {
    let server = RedisServer::with(&["--dbfilename", "taken.rdb"]);
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.command::<()>(&["CONFIG", "SET", "save", "3600 1"]);
    let folder: Vec<String> = server.command(&["CONFIG", "GET", "dir"]);
    // The file's name is taken by a folder that is not empty. So the server cannot rename its new
    // file to this name, not even as root.
    let taken = std::path::Path::new(&folder[1]).join("taken.rdb");
    std::fs::create_dir_all(taken.join("x")).unwrap();
    let _: Result<String, _> = server.try_command(&["BGSAVE"]);
    eventually("the save has failed", SOON, async || {
        let info: String = server.command(&["INFO", "persistence"]);
        info.contains("rdb_last_bgsave_status:err")
    })
    .await;

    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("MISCONF"), "{error}");
}

/// The server answers BUSY.
async fn a_server_busy_with_a_script_is_unavailable_and_comes_back(_: Store) {
    let server = RedisServer::with(&["--busy-reply-threshold", "50"]);
    let locks = hasty(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let url = server.url();
    let busy = std::thread::spawn(move || {
        let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
        let _: Result<(), _> = redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .query(&mut connection);
    });
    eventually("the server is busy", SOON, async || {
        server
            .try_command::<String>(&["PING"])
            .is_err_and(|error| error.code() == Some("BUSY"))
    })
    .await;

    // A busy server needs a moment to refuse. If the refusal comes after the operation timeout, the
    // outcome of the operation is unknown, which is correct.
    eventually("refused in time", SOON, async || {
        let error = locks.mutex("a").try_acquire().await.unwrap_err();
        assert_eq!(
            error.may_hold(),
            error.kind() == ErrorKind::Unknown,
            "{error:?}"
        );
        error.kind() == ErrorKind::Unavailable
    })
    .await;
    server.command::<()>(&["SCRIPT", "KILL"]);
    busy.join().unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// The server answers NOSCRIPT.
async fn forgotten_scripts_are_loaded_again(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    for _ in 0..3 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        server.command::<()>(&["SCRIPT", "FLUSH"]);
        give_back(guard).await;
        server.command::<()>(&["SCRIPT", "FLUSH"]);
    }
}

async fn the_database_of_the_url_is_used(_: Store) {
    let server = RedisServer::start();
    let locks = builder(format!("{}/3", server.url().trim_end_matches('/')))
        .build()
        .unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    let keyspace: String = server.command(&["INFO", "keyspace"]);
    assert!(
        keyspace.contains("db3:") && !keyspace.contains("db0:"),
        "{keyspace}"
    );
    give_back(guard).await;
    let nowhere = format!("{}/99", server.url().trim_end_matches('/'));
    let error = builder(nowhere).build().unwrap().mutex("a").acquire().await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("out of range"), "{error}");
}

/// The server becomes a replica after the client has connected. It may become a master again later.
async fn ready_reports_a_replica(_: Store) {
    let server = RedisServer::start();
    let locks = hasty(&server);
    locks.ready(SOON).await.unwrap();
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);

    for locks in [&locks, &hasty(&server)] {
        let error = locks.ready(Duration::from_secs(3)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(
            text.contains("replica") && text.contains("connect to its master"),
            "{text}"
        );
    }
    server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    locks.ready(SOON).await.unwrap();
}

/// The server has all slots of its cluster, so a single lock would work.
async fn a_server_of_a_cluster_is_refused_before_it_costs_a_lock(_: Store) {
    let bus = tests::ports::free_port().to_string();
    let server = RedisServer::with(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    server.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    eventually("the cluster is up", SOON, async || {
        let info: String = server.command(&["CLUSTER", "INFO"]);
        info.contains("cluster_state:ok")
    })
    .await;
    let locks = client(&server);

    let refused = [
        locks.mutex("a").acquire().await.map(drop).unwrap_err(),
        locks.ready(SOON).await.unwrap_err(),
    ];

    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("redis+cluster://"), "{error}");
    }
}
