//! Tests with a keeper that cannot connect in time, although the connection of the caller works.

use std::future::ready;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard};
use tests::eventually::eventually;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use super::{client, hasty, through};
use crate::faults::builder;
use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_lock_is_kept_while_the_server_accepts_no_further_connection
        a_dropped_guard_is_released_while_the_server_accepts_no_further_connection
        a_first_lock_is_kept_where_it_takes_long_to_connect
        a_caller_that_blocks_its_runtime_keeps_its_lock_when_the_keeper_connects_late
    ]
}

/// A machine that stands still for two thirds of this time costs a lease.
const TTL: Duration = Duration::from_secs(9);

/// Holds a lock for much longer than its ttl.
async fn is_kept(guard: &Guard) {
    let kept = tokio::time::timeout(2 * TTL, guard.lost()).await;
    kept.expect_err("the lock was lost");
}

/// Opens a connection that the server has accepted, and keeps it.
fn takes_a_place(server: &RedisServer) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port())).ok()?;
    stream.write_all(b"PING\r\n").ok()?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).ok()?;
    (&answer == b"+PONG").then_some(stream)
}

/// A server that accepts one more connection. It accepts others when the stream is dropped.
async fn nearly_full() -> (RedisServer, Option<TcpStream>) {
    let server = RedisServer::start();
    server.command::<()>(&["CONFIG", "SET", "maxclients", "2"]);
    let mut filler = None;
    eventually("a place is taken", SOON, || {
        filler = takes_a_place(&server);
        ready(filler.is_some())
    })
    .await;
    (server, filler)
}

/// The lease is so long that only a release can end it in time.
async fn a_dropped_guard_is_released_while_the_server_accepts_no_further_connection(_: Store) {
    let (server, _filler) = nearly_full().await;
    let locks = hasty(&server);
    let lock = locks.mutex("a").ttl(100 * SOON);
    let guard = lock.acquire().await.unwrap();

    drop(guard);

    tickets(&locks, "a", 0).await;
}

async fn a_lock_is_kept_while_the_server_accepts_no_further_connection(_: Store) {
    let (server, filler) = nearly_full().await;
    let locks = hasty(&server);
    let guard = locks.mutex("a").ttl(TTL).acquire().await.unwrap();

    is_kept(&guard).await;

    let error = locks.ready(TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("max number of clients"), "{text}");
    give_back(guard).await;
    drop(filler);
    locks.ready(SOON).await.unwrap();
}

/// The handshake takes so long that the keeper cannot connect and renew in time, if it begins when
/// the first renewal is due.
async fn a_first_lock_is_kept_where_it_takes_long_to_connect(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    // Each connection says hello twice.
    proxy.delay_requests(b"HELLO", TTL / 8 * 3);
    let locks = through(&proxy);
    let guard = locks.mutex("a").ttl(TTL).acquire().await.unwrap();

    is_kept(&guard).await;

    give_back(guard).await;
    tickets(&client(&server), "a", 0).await;
}

/// New connections are refused at first, so the keeper connects after the caller has blocked its
/// runtime.
async fn a_caller_that_blocks_its_runtime_keeps_its_lock_when_the_keeper_connects_late(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let (url, ttl) = (proxy.url(), TTL);
    let (holds, held) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let holder = std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        let locks = builder(url).ttl(ttl).build().unwrap();
        let guard = runtime.block_on(locks.mutex("a").acquire()).unwrap();
        holds.send(()).unwrap();
        ended.recv().unwrap(); // the runtime is blocked until here
        let valid = guard.is_valid();
        runtime.block_on(give_back(guard));
        valid
    });
    held.recv().unwrap();
    proxy.lead_to(free_port());

    let others = client(&server);
    let began = Instant::now();
    while began.elapsed() < 3 * ttl {
        if began.elapsed() > ttl / 3 {
            proxy.lead_to(server.port());
        }
        let outcome = others.mutex("a").try_acquire().await;
        assert_eq!(kind(outcome), ErrorKind::Busy);
    }

    end.send(()).unwrap();
    assert!(holder.join().unwrap(), "the lock was lost");
}
