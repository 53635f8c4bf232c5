//! Tests with a server that goes down and comes back, with its data or without.

use std::cell::Cell;
use std::future::ready;
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{LostReason, Release};
use tests::certificates::Authority;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::zookeeper_server::ZooKeeperServer;

use super::{builder, client, operator};
use crate::faults::{holder, works_again};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_silent_server_among_others_delays_no_first_acquisition
        a_connection_attempt_that_came_second_leaves_no_session
        a_client_that_was_idle_through_an_outage_works_again
        a_server_that_restarts_keeps_locks_and_line
        a_server_that_lost_its_data_takes_the_lock
        a_node_that_somebody_deleted_costs_the_lock_and_the_holder_learns_it
        tokens_rise_although_the_sequence_starts_again
        a_process_out_of_descriptors_is_refused_and_recovers
    ]
}

/// The silent server is only a listening port: the system accepts connections for it, as it does
/// for a stopped process.
async fn a_silent_server_among_others_delays_no_first_acquisition(_: Store) {
    // The timeout is shorter than the 2.5 s for which the client library waits for a silent server.
    let one_operation = Duration::from_secs(2);
    let ca = Authority::new();
    for server in [
        ZooKeeperServer::start(),
        ZooKeeperServer::with_tls(&ca.server(&["127.0.0.1"]), None, &[]),
    ] {
        let silent = tests::ports::listen();
        let url = format!("{},{}", server.url(), silent.local_addr().unwrap());
        // If the silent server delayed first acquisitions, about half of them would be late. On a
        // busy machine, one may be late for another reason.
        let mut late = 0;
        for _ in 0..30 {
            let mut builder = builder(url.clone())
                .wait(3 * SOON)
                .op_timeout(one_operation);
            if url.contains("tls") {
                builder = builder.ca_file(ca.file());
            }
            let locks = builder.build().unwrap();
            let began = Instant::now();
            let guard = locks.mutex("a").acquire().await;
            late += u32::from(guard.is_err() || awake_since(began) >= one_operation);
            if let Ok(guard) = guard {
                late += u32::from(guard.release().await.is_err());
            }
        }
        assert!(late <= 3, "{late} of 30 with {url} are late");
    }
}

async fn a_connection_attempt_that_came_second_leaves_no_session(_: Store) {
    let server = ZooKeeperServer::start();
    let proxies = [(); 2].map(|()| Proxy::to(server.port()));
    for proxy in &proxies {
        // The delay is so long that a second connection attempt begins, and this attempt is
        // answered too.
        proxy.delay(Duration::from_millis(250), Duration::ZERO);
    }
    let [one, other] = [0, 1].map(|number| format!("127.0.0.1:{}", proxies[number].port()));
    let locks = builder(format!("zookeeper://{one},{other}?session_timeout=60s"))
        .build()
        .unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    assert!(proxies.iter().all(|proxy| proxy.traffic().connections > 0));
    eventually("one connection is left", SOON, async || {
        proxies.iter().map(Proxy::open_connections).sum::<usize>() == 1
    })
    .await;
    eventually("one session is left", SOON, async || {
        server.mntr()["zk_global_sessions"] == "1"
    })
    .await;
    give_back(guard).await;
}

async fn a_client_that_was_idle_through_an_outage_works_again(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url())
        .ttl(Duration::from_secs(1))
        .build()
        .unwrap();
    works_again(&locks, "a", SOON).await;
    server.stop();
    // The pause is longer than the session. The test cannot see when the session ends.
    tokio::time::sleep(Duration::from_secs(3)).await;
    server.restart();

    works_again(&locks, "a", SOON).await;
}

async fn a_server_that_restarts_keeps_locks_and_line(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, waiting) = (client(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(waiting.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    let places = locks.inspect("a").await.unwrap();

    server.kill();
    server.restart();

    eventually("reads again", SOON, async || {
        locks.inspect("a").await.is_ok()
    })
    .await;
    let after = locks.inspect("a").await.unwrap();
    assert_eq!(
        places.iter().map(|p| p.ticket).collect::<Vec<_>>(),
        after.iter().map(|p| p.ticket).collect::<Vec<_>>()
    );
    assert!(guard.is_valid());
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

async fn a_server_that_lost_its_data_takes_the_lock(_: Store) {
    let server = ZooKeeperServer::start();
    // The length of the session. When the session may have ended, the client gives it up.
    let session = Duration::from_secs(10);
    let locks = builder(server.url()).ttl(session).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    server.restart_empty();
    let lost = Instant::now();

    let reason = guard.lost().await;

    println!("lost {:?} after the restart: {reason:?}", lost.elapsed());
    assert!(awake_since(lost) < session);
    // The server is behind the client's last transaction, so it refuses the client's session until
    // it has caught up.
    works_again(&locks, "a", 2 * session).await;
    println!("works again {:?} after the restart", lost.elapsed());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}

async fn a_node_that_somebody_deleted_costs_the_lock_and_the_holder_learns_it(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = client(&server);
    let operator = operator(&server).await;
    for contended in [false, true] {
        let ttl = Duration::from_secs(12);
        let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
        let waiter = contended.then(|| begin(locks.mutex("a").wait(LEASE)));
        tickets(&locks, "a", 1 + usize::from(contended)).await;
        let node = server.ephemerals("/test:1/{a}/").remove(0);
        let node = if contended {
            let places = operator.list_children("/test:1/{a}").await.unwrap();
            let oldest = places
                .iter()
                .min_by_key(|node| node[node.len() - 10..].to_owned());
            format!("/test:1/{{a}}/{}", oldest.unwrap())
        } else {
            node
        };
        operator.delete(&node, None).await.unwrap();
        let deleted = Instant::now();

        assert_eq!(guard.lost().await, LostReason::Taken);
        assert!(
            awake_since(deleted) < ttl * 2 / 3, // the holder learns of it at its next renewal
            "{:?}",
            awake_since(deleted)
        );
        assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
        if let Some(waiter) = waiter {
            give_back(waiter.await.unwrap().unwrap()).await;
        }
    }
}

async fn tokens_rise_although_the_sequence_starts_again(_: Store) {
    let server = ZooKeeperServer::that_forgets_soon();
    let locks = client(&server);
    let operator = operator(&server).await;
    let mut last = 0;
    for _ in 0..3 {
        for _ in 0..3 {
            let guard = locks.mutex("a").acquire().await.unwrap();
            assert!(guard.grant_id().as_u64() > last);
            last = guard.grant_id().as_u64();
            give_back(guard).await;
        }
        eventually("the parent is gone", SOON, async || {
            operator.check_stat("/test:1/{a}").await.unwrap().is_none()
        })
        .await;
    }
}

/// The number of free descriptors differs in each turn, so they run out at different points of an
/// operation.
async fn a_process_out_of_descriptors_is_refused_and_recovers(_: Store) {
    let server = ZooKeeperServer::start();
    let mut refused = 0;
    for spare in 0..12 {
        let mut holder = holder(&server.url(), "a", SOON);
        let process = holder.process();
        let pid = process.pid();
        let limit = |limit: usize| {
            let limit = format!("--nofile={limit}:"); // the soft limit
            let set = Command::new("prlimit")
                .args(["--pid", &pid.to_string(), &limit])
                .status();
            assert!(set.unwrap().success());
        };
        // The descriptors of the runtimes are counted too.
        let open = || {
            std::fs::read_dir(format!("/proc/{pid}/fd"))
                .unwrap()
                .count()
        };
        let counted = Cell::new((0, 0));
        eventually("the new server has started", SOON, async || {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let (_, before) = counted.replace((counted.get().1, open()));
            before == counted.get().1 && before > 7
        })
        .await;
        limit(counted.get().1 + spare);

        process.say("try");
        let told = process.hear(SOON).expect("an answer");
        // On a busy machine, the answer may be late.
        if ["FAILED Unavailable", "FAILED Unknown"].contains(&told.as_str()) {
            refused += u32::from(told == "FAILED Unavailable");
            limit(1024);
            eventually("it recovers", SOON, || {
                process.say("try");
                let told = process.hear(SOON).expect("an answer");
                ready(told.starts_with("HELD"))
            })
            .await;
        } else {
            assert!(told.starts_with("HELD"), "{spare} spare: {told}");
        }
        holder.release();
        holder.finish(SOON);
    }
    println!("refused with {refused} of 12 limits");
    assert!(refused > 0);
}
