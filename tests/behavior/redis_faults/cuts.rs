//! Tests with a network that is cut, and with wake-ups that are lost or forged.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;

use super::{client, through};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_waiter_from_before_a_reconnect_is_woken_after_it
        a_forged_wake_up_grants_nothing
    ]
}

/// A ticket names the channel of its wake-up. The client subscribes to the same channel after the
/// reconnect.
async fn a_waiter_from_before_a_reconnect_is_woken_after_it(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = client(&server).mutex("a").acquire().await.unwrap();
    // Only the wake-up and the renewal after the reconnect matter here: ordinary renewals are 40 s
    // apart.
    let waiter = begin(locks.mutex("a").ttl(Duration::from_secs(120)).wait(LEASE));
    tickets(&client(&server), "a", 2).await;
    let before = server.command_stats();
    proxy.cut();
    proxy.restore();
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    eventually("the waiter has asked about its place", SOON, async || {
        // Two of these scripts acquire and release the lock `b`. The third script is the renewal.
        server
            .command_stats_since(&before)
            .get("evalsha")
            .copied()
            .unwrap_or(0)
            >= 3
    })
    .await;

    give_back(guard).await;

    let released = Instant::now();
    give_back(waiter.await.unwrap().unwrap()).await;
    let after = awake_since(released);
    assert!(after < SOON, "{after:?}");
}

async fn a_forged_wake_up_grants_nothing(_: Store) {
    let server = RedisServer::start();
    let (locks, waiting) = (client(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(waiting.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS", "test:1:wake:*"]);
    assert!(channels.len() >= 2);
    // The forger may publish and may not read. So it can send any id, any number and any garbage.
    // If it has stolen an id, it can send any number except the right one.
    let mut ids: Vec<String> = server.command(&["HKEYS", "test:1:{a}:line"]);
    ids.retain(|field| field.len() == 32);
    let [id] = &ids[..] else { panic!("{ids:?}") };
    for channel in &channels {
        for message in [
            String::new(),
            "x".repeat(100_000),
            "00000000000000000000000000000000 1".into(),
            format!("{id} 1"),
            format!("{id} {}", u64::MAX),
            format!("{id} again 0"),
            format!("{id} again {}", u64::MAX),
        ] {
            server.command::<i64>(&["PUBLISH", channel, &message]);
        }
    }
    // The server writes to a connection in order. So when this answer has arrived, all forged
    // messages have arrived too.
    tickets(&waiting, "a", 2).await;

    assert!(!waiter.is_finished(), "a forged wake-up granted the lock");
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}
