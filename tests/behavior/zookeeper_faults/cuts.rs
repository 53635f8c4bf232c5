//! Tests with a network that is cut, and with wake-ups that do not arrive.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::zookeeper_server::ZooKeeperServer;

use super::{client, nothing_left, operator, through};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, tickets};

/// The parent of the tickets of `a`.
const PARENT: &str = "/test:1/{a}";

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_waiter_from_before_a_reconnect_is_woken_after_it
        a_watch_that_is_lost_costs_a_third_of_a_ttl
        a_waiter_is_granted_although_its_client_has_seen_nobody_in_line
        late_events_of_a_parent_that_is_gone_grant_nothing
    ]
}

/// The client library forgets its watches when it reconnects, so the client must set them again.
async fn a_waiter_from_before_a_reconnect_is_woken_after_it(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, waiting) = (client(&server), through(&proxy));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(waiting.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    eventually("it is watched", SOON, async || server.watches() > 0).await;
    proxy.cut();
    eventually("the watch is gone", SOON, async || server.watches() == 0).await;
    proxy.restore();
    eventually("it is watched again", SOON, async || server.watches() > 0).await;
    // When this is answered, the renewal right after the reconnect is complete. The next renewal is
    // twenty seconds later.
    tickets(&waiting, "a", 2).await;

    give_back(guard).await;
    let released = Instant::now();

    give_back(waiter.await.unwrap().unwrap()).await;
    let after = awake_since(released);
    assert!(after < SOON, "{after:?}");
}

/// The fact checks a mutex and a semaphore. At the mutex, one ticket is in front of the waiter. At
/// the semaphore, two tickets are in front of the waiter, and the older one is released.
async fn a_watch_that_is_lost_costs_a_third_of_a_ttl(_: Store) {
    let server = ZooKeeperServer::start();
    for capacity in [1, 2] {
        let proxy = Proxy::to(server.port());
        let (locks, deaf) = (client(&server), through(&proxy));
        let ttl = Duration::from_secs(20);
        let lock = |of: &lockcore::Locks| of.semaphore("a", capacity).permits(1).ttl(ttl);
        let mut guards = Vec::new();
        for _ in 0..capacity {
            guards.push(lock(&locks).acquire().await.unwrap());
        }
        let waiter = begin(lock(&deaf).wait(LEASE));
        tickets(&locks, "a", capacity as usize + 1).await;
        eventually("it is watched", SOON, async || server.watches() > 0).await;
        tickets(&deaf, "a", capacity as usize + 1).await;
        proxy.lose_events();

        give_back(guards.remove(0)).await;
        let released = Instant::now();
        let guard = waiter.await.unwrap().unwrap();

        println!("granted {:?} later", released.elapsed());
        let after = awake_since(released);
        assert!(after < ttl / 2, "{after:?}");
        give_back(guard).await;
        for guard in guards {
            give_back(guard).await;
        }
        nothing_left(&server).await;
    }
}

/// The client still watches the line, in which its first waiter was, and misses that others came.
async fn a_waiter_is_granted_although_its_client_has_seen_nobody_in_line(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, deaf) = (client(&server), through(&proxy));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(deaf.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    eventually("it is watched", SOON, async || server.watches() > 0).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    // The events of the releases come before this answer.
    tickets(&deaf, "a", 0).await;
    assert!(server.watches() > 0, "the client still follows");
    proxy.lose_events();

    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(deaf.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;

    give_back(waiter.await.unwrap().unwrap()).await;
    nothing_left(&server).await;
}

/// A new parent numbers its nodes from the beginning. So a late event of the old parent may have
/// the number of a node of the new parent. The slow client first reads the line of the new parent,
/// where its waiter is not the first. After that it gets the events of the old parent.
async fn late_events_of_a_parent_that_is_gone_grant_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, slow, alone) = (client(&server), through(&proxy), client(&server));
    let admin = operator(&server).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(slow.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    assert!(server.watches() > 0, "the slow client still follows");
    proxy.delay(Duration::ZERO, Duration::from_millis(200));
    admin.delete(PARENT, None).await.unwrap();
    // This pair creates the parent, and deletes it.
    give_back(alone.mutex("a").acquire().await.unwrap()).await;
    assert!(admin.check_stat(PARENT).await.unwrap().is_none());
    let holder = alone.mutex("a").acquire().await.unwrap();

    let waiter = begin(slow.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    // Each answer arrives after all events that the server sent before it.
    for _ in 0..8 {
        slow.inspect("a").await.unwrap();
        assert!(!waiter.is_finished(), "two hold at once");
    }

    assert!(holder.is_valid());
    give_back(holder).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}
