//! Tests with masters that are replaced while locks are granted. A fenced resource decides: if a
//! holder can still write after another holder has written, two clients held the lock at the same
//! time.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Guard};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_sentinels::Sentinels;
use tests::redis_server::RedisServer;
use tests::witness::FencedResource;

use super::{acknowledges, client, durable, hasty, promote, servers, tickets_at};
use crate::faults::{builder, patient, works_again};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        a_master_that_its_replica_has_left_grants_nothing
        a_lock_is_kept_by_the_replica_that_is_promoted
        a_failover_between_a_script_and_its_acknowledgement_leaves_nothing
        masters_that_are_killed_right_after_a_grant_let_nobody_in_beside_it
        a_wait_in_line_is_kept_by_the_replica_that_is_promoted
    ]
}

/// Two clients request the same lock: one at the old master, and one at the server that has
/// replaced it.
async fn ask_both(old: &str, new: &str) -> [Result<Guard, Error>; 2] {
    let [old, new] = [old, new].map(|url| hasty(url).build().unwrap());
    let first = old.mutex("a").acquire().await;
    let second = new.mutex("a").acquire().await;
    [first, second]
}

/// With durability, only the client at the new master holds the lock. Without it, both clients hold
/// the lock.
async fn a_master_that_its_replica_has_left_grants_nothing(_: Store) {
    for is_durable in [false, true] {
        let (old, replicas) = servers(1).await;
        let new = &replicas[0];
        let option = if is_durable {
            "?durability=replicas:1"
        } else {
            ""
        };
        let followed = hasty(&format!("{}{option}", old.url())).build().unwrap();
        give_back(followed.mutex("warm").acquire().await.unwrap()).await;
        promote(new);

        let [at_old, at_new] = ask_both(&format!("{}{option}", old.url()), &new.url()).await;

        let resource = FencedResource::default();
        let at_new = at_new.unwrap();
        resource.write(at_new.grant_id().as_u64()).unwrap();
        match (is_durable, at_old) {
            (false, Ok(at_old)) => {
                resource.write(at_old.grant_id().as_u64()).unwrap_err();
            }
            (true, Err(error)) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
                tickets_at(&old, "a", 0).await;
            }
            (_, at_old) => panic!("durable: {is_durable}, {at_old:?}"),
        }
        give_back(at_new).await;
    }
}

/// The replica gets each write a little later than the master. After the master's death it gets
/// nothing.
async fn a_lock_is_kept_by_the_replica_that_is_promoted(_: Store) {
    let lag = Duration::from_millis(200);
    for _ in 0..3 {
        let old = RedisServer::start();
        let link = Proxy::to(old.port());
        let port = link.port().to_string();
        let new = RedisServer::with(&["--replicaof", "127.0.0.1", &port]);
        acknowledges(&durable(&old, 1)).await;
        // When the client ends, it tries to reach the dead server for this long.
        let locks = builder(durable(&old, 1)).op_timeout(Duration::from_secs(4));
        let locks = locks.build().unwrap();
        give_back(locks.mutex("warm").acquire().await.unwrap()).await;
        link.delay(Duration::ZERO, lag);

        let guard = locks.mutex("a").acquire().await.unwrap();
        link.cut();
        old.kill();
        promote(&new);

        let resource = FencedResource::default();
        let asks = client(&new.url()).mutex("a").try_acquire().await;
        if let Ok(next) = &asks {
            resource.write(next.grant_id().as_u64()).unwrap();
        }
        let writes = resource.write(guard.grant_id().as_u64());
        writes.expect("another holder has come beside it");
        assert_eq!(kind(asks), ErrorKind::Busy);
    }
}

/// Only the old master has the ticket. The master dies before it can say that no replica has
/// acknowledged the ticket.
async fn a_failover_between_a_script_and_its_acknowledgement_leaves_nothing(_: Store) {
    let (old, replicas) = servers(1).await;
    let new = &replicas[0];
    let proxy = Proxy::to(old.port());
    let locks = patient(format!("{}?durability=replicas:1", proxy.url()));
    let locks = locks.op_timeout(Duration::from_secs(3)).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    promote(new);
    let acquire = begin(locks.mutex("a"));
    tickets_at(&old, "a", 1).await;

    proxy.cut();
    old.kill();
    let error = acquire.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");

    // The new master needs a replica of its own.
    let next = RedisServer::replica_of(new);
    proxy.lead_to(new.port());
    proxy.restore();
    works_again(&locks, "a", SOON).await;
    tickets_at(new, "a", 0).await;
    drop(next);
}

/// How many masters are killed. Most of a round is spent waiting until the sentinels know the old
/// master as a replica.
const ROUNDS: usize = 2;

/// Locks are granted one after another. Meanwhile the replicas stop following, and the master dies.
/// A lock is granted only when both replicas have it, so the promoted replica has it too.
async fn masters_that_are_killed_right_after_a_grant_let_nobody_in_beside_it(_: Store) {
    let set = Sentinels::start(Duration::from_secs(5)); // a master that only stalls stays
    let url = format!("{}?durability=replicas:2", set.url());
    acknowledges(&url).await;
    for round in 0..ROUNDS {
        let holds = hasty(&url).build().unwrap();
        give_back(holds.mutex("warm").acquire().await.unwrap()).await;
        let old = set.master();
        let name = |number: usize| format!("n{round}:{number}");
        let mut guards = Vec::new();
        // Without durability, the locks after the tenth would be granted and lost.
        for number in 0..20 {
            if number == 10 {
                set.stop_replication();
            }
            match holds.mutex(name(number)).try_acquire().await {
                Ok(guard) => guards.push(guard),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                    break;
                }
            }
        }
        old.kill();
        assert!(guards.len() >= 10);

        set.wait_for_another_master_than(old.port());
        // These requests go to a URL without durability, because there is one replica less than
        // before.
        let other = client(&set.url());
        for (number, guard) in guards.iter().enumerate() {
            let resource = FencedResource::default();
            let asks = other.mutex(name(number)).try_acquire().await;
            if let Ok(next) = &asks {
                resource.write(next.grant_id().as_u64()).unwrap();
            }
            let writes = resource.write(guard.grant_id().as_u64());
            writes.expect("another holder has come beside it");
            assert_eq!(kind(asks), ErrorKind::Busy);
        }

        for server in &set.servers {
            if server.is_running() {
                server.command::<()>(&["ACL", "SETUSER", "replica", "on"]);
            }
        }
        old.restart();
        set.wait_until_complete();
        acknowledges(&url).await;
        for guard in guards {
            give_back(guard).await;
        }
        tickets(&other, &name(0), 0).await;
    }
}

/// The release and the next grant are lost with the master. No other client gets in front of the
/// waiter.
async fn a_wait_in_line_is_kept_by_the_replica_that_is_promoted(_: Store) {
    let (old, replicas) = servers(1).await;
    let new = &replicas[0];
    let proxy = Proxy::to(old.port());
    let url = format!("{}?durability=replicas:1", proxy.url());
    let (holds, waits) = (client(&durable(&old, 1)), client(&url));
    let guard = holds.mutex("a").acquire().await.unwrap();
    let waiter = begin(waits.mutex("a").wait(STALL));
    tickets(&waits, "a", 2).await;
    // The holder and the waiter were acknowledged before the replica was promoted, so the replica
    // has both.
    eventually("the replica has the waiter", SOON, async || {
        !new.keys("test:1:{a}:line").is_empty()
    })
    .await;
    promote(new);

    give_back(guard).await;
    tickets_at(&old, "a", 1).await;
    let next = RedisServer::replica_of(new);
    proxy.lead_to(new.port());
    proxy.cut();
    proxy.restore();

    // The release never reached the new master. So there the first holder is in front of the
    // waiter, and both are in front of this client.
    let other = client(&new.url());
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    assert!(!waiter.is_finished());
    waiter.abort();
    drop(next);
}
