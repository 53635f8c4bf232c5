//! Tests with data at the server that is lost, evicted, replaced by a stranger's data, or left
//! behind. Facts about the server's clock are here too.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{ErrorKind, Locks, LostReason, Release};
use tests::faketime::Clock;
use tests::redis_server::RedisServer;

use super::{client, hasty, nothing_left};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        one_bad_name_does_not_cost_the_other_leases
        a_line_of_thousands_that_died_at_once_is_cleared
        a_server_that_lost_its_data_takes_the_lock_and_tokens_still_rise
        ready_reports_a_server_that_evicts
        an_evicted_ticket_costs_the_lock_and_the_holder_learns_it
        evicted_ends_cost_nobody_the_lock_or_the_place
        an_evicted_line_costs_waiters_their_place_and_nobody_the_lock
        a_clock_that_jumps_forward_is_noticed_and_tokens_rise
        a_clock_that_jumps_back_lets_no_second_holder_in
        one_clock_that_was_far_ahead_does_not_drive_every_token_ahead
        the_remains_of_a_name_are_gone_a_day_later
        no_request_shortens_the_life_of_a_key
    ]
}

async fn one_bad_name_does_not_cost_the_other_leases(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let ttl = Duration::from_secs(4);
    let good = locks.mutex("good").ttl(ttl).acquire().await.unwrap();
    let bad = locks.mutex("bad").ttl(ttl).acquire().await.unwrap();
    // A stranger writes a key with the name of this lock's key.
    server.command::<()>(&["SET", "test:1:{bad}", "foreign"]);

    bad.lost().await;

    let also_lost = tokio::time::timeout(2 * ttl, good.lost()).await;
    assert!(also_lost.is_err(), "the good lease went with the bad one");
    server.command::<i64>(&["DEL", "test:1:{bad}"]);
    drop(bad);
    give_back(good).await;
}

async fn a_line_of_thousands_that_died_at_once_is_cleared(_: Store) {
    let server = RedisServer::start();
    let dead = "for i = 1, 20000 do \
        local id, place = string.format('%032d', i), string.format('%013d', i) \
        local record = string.format('%016d%013d', i, 1) .. id .. ':1073741824:1073741824:00:me' \
        redis.call('HSET', KEYS[1] .. ':line', place, record, id, place) end \
        redis.call('SET', KEYS[1], string.format('%016dL%013d%013d%013d%010d%010d', 20000, 0, 1, 20001, 0, 0))";
    server.command::<()>(&["EVAL", dead, "1", "test:1:{a}"]);

    // The waiters are all dead. The lock is granted within one operation timeout.
    let guard = hasty(&server).mutex("a").acquire().await.unwrap();

    assert_eq!(server.keys("*"), ["test:1:{a}"]);
    give_back(guard).await;
    nothing_left(&server).await;
}

async fn a_server_that_lost_its_data_takes_the_lock_and_tokens_still_rise(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lock = locks.mutex("a").ttl(Duration::from_secs(6));
    let guard = lock.acquire().await.unwrap();
    server.flush();

    assert_eq!(guard.lost().await, LostReason::Taken);

    let next = lock.acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > guard.fencing_token().unwrap());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    assert!(next.is_valid());
    give_back(next).await;
}

async fn ready_reports_a_server_that_evicts(_: Store) {
    let server = RedisServer::start();
    let store = backend::open(&server.url()).unwrap();
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = store.connect(events).await.unwrap();
    let policies = "noeviction volatile-lru volatile-lfu volatile-ttl volatile-random allkeys-lru allkeys-lfu allkeys-random";
    for policy in policies.split(' ') {
        server.command::<()>(&["CONFIG", "SET", "maxmemory-policy", policy]);

        let told = connection.check().await.unwrap().join(" ");

        // All keys of the library have an expiry time. So every policy except `noeviction` may
        // evict them.
        let evicts = policy != "noeviction";
        assert_eq!(told.contains(policy), evicts, "{policy}: {told}");
        assert_eq!(
            told.contains("maxmemory-policy noeviction"),
            evicts,
            "{policy}: {told}"
        );
        client(&server).ready(SOON).await.unwrap(); // a warning does not make `ready` fail
    }
}

/// The server evicts keys one by one. Here it evicts the key with the ticket.
async fn an_evicted_ticket_costs_the_lock_and_the_holder_learns_it(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lock = locks.mutex("a").ttl(Duration::from_secs(6));
    let guard = lock.acquire().await.unwrap();
    assert_eq!(server.command::<i64>(&["DEL", "test:1:{a}"]), 1);

    assert_eq!(guard.lost().await, LostReason::Taken);
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > guard.fencing_token().unwrap());
    drop(guard);
    give_back(next).await;
    nothing_left(&server).await;
}

/// One key has the ends of several holders' leases. The server builds it again from their tickets.
async fn evicted_ends_cost_nobody_the_lock_or_the_place(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lock = |locks: &Locks| locks.semaphore("a", 2).permits(1).wait(LEASE);
    let first = lock(&locks).acquire().await.unwrap();
    let second = lock(&locks).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for place in 0..3 {
        waiters.push(begin(lock(&client(&server))));
        tickets(&locks, "a", place + 3).await;
    }
    assert_eq!(server.command::<i64>(&["DEL", "test:1:{a}:ends"]), 1);
    let mut last = second.grant_id().as_u64();

    give_back(first).await;

    for waiter in waiters {
        let guard = waiter.await.unwrap().unwrap();
        assert!(guard.grant_id().as_u64() > last, "served in their order");
        last = guard.grant_id().as_u64();
        give_back(guard).await;
    }
    give_back(second).await;
    nothing_left(&server).await;
}

/// The waiter learns of the loss at its next renewal, and enqueues again.
async fn an_evicted_line_costs_waiters_their_place_and_nobody_the_lock(_: Store) {
    let server = RedisServer::start();
    let lock = |locks: &Locks| locks.mutex("a").ttl(Duration::from_secs(6)).wait(LEASE);
    let locks = client(&server);
    let guard = lock(&locks).acquire().await.unwrap();
    let waiter = begin(lock(&client(&server)));
    tickets(&locks, "a", 2).await;
    assert_eq!(server.command::<i64>(&["DEL", "test:1:{a}:line"]), 1);
    assert_eq!(locks.inspect("a").await.unwrap().len(), 1);

    tickets(&locks, "a", 2).await;

    assert!(guard.is_valid());
    let token = guard.fencing_token().unwrap();
    give_back(guard).await;
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fencing_token().unwrap() > token);
    give_back(next).await;
    nothing_left(&server).await;
}

async fn a_clock_that_jumps_forward_is_noticed_and_tokens_rise(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let guard = client(&server)
        .mutex("a")
        .ttl(Duration::from_secs(6))
        .acquire()
        .await
        .unwrap();
    server.set_clock(Clock::Ahead(Duration::from_secs(300)));

    // For the server the lease has ended long ago. So another client is granted, with a greater
    // token …
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > guard.fencing_token().unwrap());
    // … and the old holder learns of its loss at its next renewal.
    assert_eq!(guard.lost().await, LostReason::Taken);
    give_back(next).await;
}

async fn a_clock_that_jumps_back_lets_no_second_holder_in(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let locks = client(&server);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(10))
        .acquire()
        .await
        .unwrap();
    server.set_clock(Clock::Behind(Duration::from_secs(300)));

    assert_eq!(
        kind(client(&server).mutex("a").try_acquire().await),
        ErrorKind::Busy
    );
    let token = guard.fencing_token().unwrap();
    give_back(guard).await;
    // The clock is behind the last token. But the next token is greater than the last one, for a
    // new client …
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > token);
    let token = next.fencing_token().unwrap();
    give_back(next).await;
    // … and, after a loss of data, for a client that has seen a token. This client has not seen the
    // very last token, so the new token may be behind it by a second at most.
    server.flush();
    let next = locks.mutex("a").acquire().await.unwrap();
    assert!(
        next.fencing_token().unwrap().as_i64() > token.as_i64() - (1 << 30),
        "{:?} {token:?}",
        next.fencing_token().unwrap()
    );
    give_back(next).await;
}

/// A client states the greatest token that it has seen. The store uses this token only if it is at
/// most a day ahead of the store's clock.
async fn one_clock_that_was_far_ahead_does_not_drive_every_token_ahead(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let locks = client(&server);
    let honest = locks
        .mutex("a")
        .acquire()
        .await
        .unwrap()
        .fencing_token()
        .unwrap();
    server.set_clock(Clock::Ahead(Duration::from_secs(30 * 86_400)));
    let ahead = locks
        .mutex("b")
        .acquire()
        .await
        .unwrap()
        .fencing_token()
        .unwrap();
    server.set_clock(Clock::True);

    let next = locks
        .mutex("c")
        .acquire()
        .await
        .unwrap()
        .fencing_token()
        .unwrap();

    assert!(honest < next && next < ahead, "{honest} {next} {ahead}");
}

async fn the_remains_of_a_name_are_gone_a_day_later(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    for number in 0..10 {
        give_back(locks.mutex(format!("n{number}")).acquire().await.unwrap()).await;
    }
    let keys = server.keys("*");
    assert_eq!(keys.len(), 10, "{keys:?}");
    for key in keys {
        let left: i64 = server.command(&["PTTL", &key]);
        assert!(
            // The ttl was short, and the key still lives for a day.
            left > 86_400_000 - 60_000 && left <= 86_400_000 + 1000,
            "{key} lives for {left} ms"
        );
    }
}

/// A key lives for a day after its last use, even if the ttl of holders and waiters is short.
async fn no_request_shortens_the_life_of_a_key(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lives = || {
        for key in server.keys("test:1:{a}*") {
            let left: i64 = server.command(&["PTTL", &key]);
            assert!(left > 86_400_000 - 60_000, "{key} lives for {left} ms");
        }
    };
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(30))
        .acquire()
        .await
        .unwrap();
    lives();
    // The first renewal of this waiter would set the expiry time again. It comes only after 3 s.
    let waiter = begin(
        client(&server)
            .mutex("a")
            .ttl(Duration::from_secs(9))
            .wait(LEASE),
    );
    tickets(&locks, "a", 2).await;
    lives();
    guard.ensure(Duration::from_secs(30)).await.unwrap_err(); // a renewal is sent, and gives less than 30 s
    lives();
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    lives();
    waiter.abort();
    tickets(&locks, "a", 1).await;
    lives();
    give_back(guard).await;
}
