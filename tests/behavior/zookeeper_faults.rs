//! ZooKeeper servers that are down, restarted, cut off or deposed, and sessions that end. Each fact has servers to
//! itself.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions, Process};
use tests::proxy::Proxy;
use tests::witness::{FencedResource, FileWitness, Witness};
use tests::zookeeper_server::{Ensemble, ZooKeeperServer};
use zookeeper_client::{Acls, AddWatchMode, Client, CreateMode, EventType};

use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_uncontended_pair_costs_three_requests
        one_hand_over_costs_the_same_whatever_the_number_of_waiters
        a_crowd_of_clients_costs_the_same_however_many_they_are
        a_crowd_that_comes_and_goes_never_overlaps
        a_server_that_is_down_is_unavailable_within_one_operation
        a_client_that_was_idle_through_an_outage_works_again
        a_lost_reply_is_asked_for_again_and_granted_once
        giving_up_on_a_lost_reply_leaves_nothing
        what_was_sent_to_a_stopped_server_is_found_and_deleted
        a_node_that_appears_after_its_release_is_deleted
        a_cut_that_heals_before_the_deadline_loses_nothing
        a_cut_that_outlasts_the_session_stops_the_work
        a_lease_ends_on_time_while_nothing_is_answered
        a_lost_release_is_repeated
        wake_ups_that_were_cut_off_are_caught_up_on
        a_waiter_of_before_a_reconnect_is_woken_after_it
        a_server_that_restarts_keeps_locks_and_line
        a_server_that_lost_its_data_takes_the_lock
        a_node_that_somebody_deleted_costs_the_lock_and_the_holder_learns_it
        a_killed_holder_is_followed_when_its_session_is_over
        a_frozen_holder_is_followed_and_its_late_write_is_refused
        a_process_that_ends_with_a_guard_leaves_no_lock
        a_client_that_ends_leaves_no_session
        a_ttl_beyond_the_session_is_refused_with_both_numbers
        the_chroot_of_the_url_is_used
        nodes_of_a_user_are_closed_to_others
        a_user_with_the_documented_rights_can_do_everything
        tokens_rise_although_the_sequence_starts_again
        a_follower_cut_off_from_its_leader_lets_no_second_holder_in
        a_server_that_hangs_costs_no_lease_while_others_answer
        a_crowd_overlaps_nowhere_while_leaders_die
    ]
}

/// What is looked at here is what goes over the wire, so every request has a ticket of its own.
fn builder(url: String) -> lockcore::Builder {
    Locks::builder()
        .url(url)
        .namespace("test")
        .fair(lockcore::Fair::Strict)
}

fn client(server: &ZooKeeperServer) -> Locks {
    builder(server.url()).build().unwrap()
}

fn through(proxy: &Proxy) -> Locks {
    builder(proxied(proxy))
        .op_timeout(Duration::from_millis(400))
        .build()
        .unwrap()
}

fn proxied(proxy: &Proxy) -> String {
    format!("zookeeper://127.0.0.1:{}", proxy.port())
}

async fn nothing_left(server: &ZooKeeperServer) {
    eventually("nothing is left", Duration::from_secs(3), async || {
        server.ephemerals("/").is_empty()
    })
    .await;
}

/// Somebody who looks at nodes as they are.
async fn operator(server: &ZooKeeperServer) -> Client {
    Client::connect(&format!("127.0.0.1:{}", server.port()))
        .await
        .unwrap()
}

/// A client whose probes do not fall into a count.
fn counted(server: &ZooKeeperServer) -> Locks {
    builder(server.url() + "?session_timeout=280s")
        .ttl(Duration::from_secs(120))
        .wait(3 * SOON)
        .build()
        .unwrap()
}

async fn an_uncontended_pair_costs_three_requests(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = counted(&server);
    give_back(locks.mutex("n0").acquire().await.unwrap()).await;
    // The first use makes the parent.
    for (first, pair) in [(1, 4), (0, 3)] {
        let before = server.packets();
        for _ in 0..50 {
            for number in 0..first {
                let name = format!("cold{number}-{}", fastrand::u64(..));
                give_back(locks.mutex(name).acquire().await.unwrap()).await;
            }
            if first == 0 {
                give_back(locks.mutex("n0").acquire().await.unwrap()).await;
            }
        }
        let spent = server.packets().since(before);
        println!(
            "50 pairs, {}: {spent:?}",
            if first == 1 { "cold" } else { "warm" }
        );
        assert_eq!((spent.received, spent.sent), (50 * pair, 50 * pair));
    }
}

/// S18, P7.
async fn one_hand_over_costs_the_same_whatever_the_number_of_waiters(_: Store) {
    let server = ZooKeeperServer::start();
    for waiters in [1, 10, 100] {
        let (holding, waiting) = (counted(&server), counted(&server));
        let guard = holding.mutex("a").acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..waiters {
            let lock = waiting.mutex("a");
            tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
        }
        eventually("the line has formed", SOON, async || {
            server.ephemerals("/test:1/{a}/").len() == waiters + 1
        })
        .await;
        // The last watch is set after the last ticket stands.
        tokio::time::sleep(Duration::from_millis(300)).await; // no event stands for a watch that was set

        let before = server.packets();
        give_back(guard).await;
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let spent = server.packets().since(before);

        println!("{waiters} waiters: {spent:?}");
        // A release each, and the holder's; its reply and one event to the one process that waits.
        assert_eq!(spent.received, waiters as u64 + 1);
        assert_eq!(spent.sent, 2 * (waiters as u64 + 1));
    }
}

/// S18: beyond eight processes the price of a hand-over does not rise any more.
async fn a_crowd_of_clients_costs_the_same_however_many_they_are(_: Store) {
    let server = ZooKeeperServer::start();
    for (clients, tasks) in [(4, 1), (8, 1), (16, 1), (16, 3), (32, 2)] {
        let name = format!("a{clients}-{tasks}");
        let witness = Arc::new(Witness::exclusive());
        let stop = Arc::new(AtomicBool::new(false));
        let mut crowd = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let locks = builder(server.url() + "?session_timeout=280s")
                .ttl(Duration::from_secs(120))
                .wait(3 * SOON)
                .fair(lockcore::Fair::Strict)
                .build()
                .unwrap();
            for _ in 0..tasks {
                let (lock, witness, stop) =
                    (locks.mutex(&name), Arc::clone(&witness), Arc::clone(&stop));
                crowd.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        let guard = lock.acquire().await.unwrap();
                        drop(witness.enter(1));
                        give_back(guard).await;
                    }
                });
            }
        }
        let visits = |least| {
            let witness = Arc::clone(&witness);
            eventually("the crowd moves", 3 * SOON, async move || {
                witness.seen().visits >= least
            })
        };
        // Until everybody has seen how many there are.
        visits(200 + 40 * clients as u64).await;
        let (before, began) = (server.packets(), witness.seen().visits);
        visits(began + 1000).await;
        let (spent, visited) = (
            server.packets().since(before),
            witness.seen().visits - began,
        );
        stop.store(true, Ordering::SeqCst);
        while let Some(done) = crowd.join_next().await {
            done.unwrap();
        }

        witness.assert_no_overlap();
        let each = |packets: u64| packets as f64 / visited as f64;
        let (received, sent) = (each(spent.received), each(spent.sent));
        println!(
            "{clients} clients of {tasks}: {received:.1} packets received and {sent:.1} sent per hand-over"
        );
        let most = match clients {
            // Its own request's replies, and two events to each.
            ..=8 => 3.5 + 2.0 * f64::from(clients),
            _ => 10.0,
        };
        assert!(sent <= most, "{sent} > {most}");
    }
    nothing_left(&server).await;
}

/// Readers, writers, who gives up and who does not wait, in crowds and alone: lines are followed now in this way, now in
/// that.
async fn a_crowd_that_comes_and_goes_never_overlaps(_: Store) {
    let server = ZooKeeperServer::start();
    let witness = Arc::new(Witness::readers_and_writers());
    let clients: Vec<Locks> = (0..12).map(|_| client(&server)).collect();
    for (round, crowd) in [12, 3, 12, 6, 10].into_iter().enumerate() {
        let mut tasks = tokio::task::JoinSet::new();
        for (number, locks) in clients.iter().take(crowd).enumerate() {
            for task in 0..3 {
                let (catalog, witness) = (locks.rwlock("c"), Arc::clone(&witness));
                tasks.spawn(async move {
                    for turn in 0..20 {
                        // In even rounds everybody wants all, so that a crowd is one.
                        let reads = round % 2 == 1 && (number + task + turn) % 4 == 0;
                        let lock = if reads {
                            catalog.read()
                        } else {
                            catalog.write()
                        };
                        let lock = match turn % 5 {
                            0 => lock.wait(Duration::ZERO),
                            1 => lock.wait(Duration::from_millis(20)),
                            _ => lock.wait(2 * SOON),
                        };
                        match lock.acquire().await {
                            Ok(guard) => {
                                let visit = if reads {
                                    witness.read()
                                } else {
                                    witness.write()
                                };
                                tokio::task::yield_now().await;
                                drop(visit);
                                give_back(guard).await;
                            }
                            Err(error) => assert!(
                                // Unknown is a budget shorter than the round trip.
                                turn % 5 < 2
                                    && matches!(
                                        error.kind(),
                                        ErrorKind::Busy | ErrorKind::Timeout | ErrorKind::Unknown
                                    ),
                                "{error}"
                            ),
                        }
                    }
                });
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    }
    println!("{} visits", witness.assert_no_overlap().visits);
    nothing_left(&server).await;
}

async fn a_server_that_is_down_is_unavailable_within_one_operation(_: Store) {
    let port = tests::ports::free_port();
    let locks = builder(format!("zookeeper://127.0.0.1:{port}"))
        .build()
        .unwrap();
    for waits in [true, false] {
        let lock = locks.mutex("a").wait(3 * SOON);
        let started = Instant::now();
        let outcome = if waits {
            lock.acquire().await
        } else {
            lock.try_acquire().await
        };
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(!error.may_hold());
        assert!(error.to_string().contains(&port.to_string()), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}

async fn a_client_that_was_idle_through_an_outage_works_again(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url())
        .ttl(Duration::from_secs(1))
        .build()
        .unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.stop();
    // Longer than the session.
    tokio::time::sleep(Duration::from_secs(3)).await;
    server.restart();

    eventually("works again", SOON, async || {
        match locks.mutex("a").acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}

/// H10, H16.
async fn a_lost_reply_is_asked_for_again_and_granted_once(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    for round in 0..10 {
        // The create of a ticket bears its sequence of permits and capacity; a list does not.
        proxy.lose_replies(b"-1073741824-1073741824-", 1);
        let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();

        assert_eq!(
            proxy.traffic().replies_lost,
            round + 1,
            "the reply was lost"
        );
        let left = server.ephemerals("/test:1/{a}/");
        assert_eq!(left.len(), 1, "{left:?}");
        give_back(guard).await;
    }
    nothing_left(&server).await;
}

/// S29.
async fn giving_up_on_a_lost_reply_leaves_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for waits in [true, false] {
        proxy.lose_replies(b"-1073741824-1073741824-", 1);
        let lock = locks.mutex("a").wait(Duration::from_millis(30));
        let outcome = match waits {
            true => lock.acquire().await,
            false => {
                let abandoned = tokio::time::timeout(Duration::from_millis(10), lock.try_acquire());
                match abandoned.await {
                    Ok(outcome) => outcome,
                    Err(_) => locks.mutex("other").acquire().await,
                }
            }
        };
        if let Ok(guard) = outcome {
            give_back(guard).await;
        }
        nothing_left(&server).await;
    }
}

/// What was sent to a stopped server is carried out when it goes on, however long ago its sender gave up.
async fn what_was_sent_to_a_stopped_server_is_found_and_deleted(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(200))
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for stopped in [Duration::from_millis(500), Duration::from_millis(5500)] {
        server.freeze();
        let lock = locks.mutex("a").wait(Duration::from_millis(100));
        assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
        // The longer one is more than the library waits before it gives the connection up (2/5 of 10 s).
        tokio::time::sleep(stopped).await;
        server.thaw();

        eventually("works again", SOON, async || {
            match locks.mutex("after").acquire().await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
        nothing_left(&server).await;
    }
}

/// H28: as a create does that sat in the buffer of a connection that is no more. It is played by another client, with
/// the very id.
async fn a_node_that_appears_after_its_release_is_deleted(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(200))
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let operator = operator(&server).await;
    let recursive = AddWatchMode::PersistentRecursive;
    let mut watcher = operator.watch("/test:1/{a}", recursive).await.unwrap();
    server.freeze();
    let lock = locks.mutex("a").wait(Duration::from_millis(100));
    assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
    // The keeper gives up waiting for the reply, and sends a release that leaves a mark.
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.thaw();
    let created = watcher.changed().await;
    assert_eq!(created.event_type, EventType::NodeCreated);
    nothing_left(&server).await;

    let prefix = &created.path[..created.path.len() - 10];
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    operator.create(prefix, b"late", &options).await.unwrap();

    nothing_left(&server).await;
}

/// S22, first half.
async fn a_cut_that_heals_before_the_deadline_loses_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let before = proxy.traffic().connections;
    for _ in 0..3 {
        proxy.cut();
        tokio::time::sleep(Duration::from_millis(500)).await;
        proxy.restore();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }

    eventually("renewed on a new connection", 2 * SOON, async || {
        proxy.traffic().connections > before && guard.remaining() > Duration::from_millis(5500)
    })
    .await;
    assert!(guard.is_valid());
    assert_eq!(server.ephemerals("/test:1/{a}/").len(), 1);
    give_back(guard).await;
}

/// S22, second half. Judged at what the work touches: its last step lies before the next holder's first.
async fn a_cut_that_outlasts_the_session_stops_the_work(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let ttl = Duration::from_secs(2);
    let locks = builder(proxied(&proxy))
        .op_timeout(Duration::from_millis(400))
        .ttl(ttl)
        .build()
        .unwrap();
    let lock = locks.mutex("a");
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let next_is_in = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&next_is_in);
    let work = tokio::spawn(async move {
        lock.run(async |_| {
            begun.send(()).unwrap();
            while !seen.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            Ok::<_, Error>(())
        })
        .await
    });
    has_begun.await.unwrap();
    proxy.cut();

    // The next holder waits at the store, past the cut.
    let next = client(&server).mutex("a").acquire().await.unwrap();
    next_is_in.store(true, Ordering::SeqCst);

    // Had the work made one more step, it would have seen the next holder and ended well.
    assert_eq!(
        kind(work.await.unwrap()),
        ErrorKind::Lost(LostReason::Expired)
    );
    give_back(next).await;
}

/// H3.
async fn a_lease_ends_on_time_while_nothing_is_answered(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let ttl = Duration::from_secs(2);
    let locks = builder(proxied(&proxy)).ttl(ttl).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.freeze();
    let frozen = Instant::now();

    assert_eq!(guard.lost().await, LostReason::Expired);

    assert!(
        frozen.elapsed() < ttl + Duration::from_millis(200),
        "{:?}",
        frozen.elapsed()
    );
}

async fn a_lost_release_is_repeated(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.cut();

    let failed = guard.release().await.unwrap_err();
    assert!(matches!(
        failed.kind(),
        ErrorKind::Unknown | ErrorKind::Unavailable
    ));
    assert_eq!(server.ephemerals("/test:1/{a}/").len(), 1);
    proxy.restore();

    nothing_left(&server).await;
}

/// H19.
async fn wake_ups_that_were_cut_off_are_caught_up_on(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, cut_off) = (client(&server), through(&proxy));
    for _ in 0..3 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        let lock = cut_off.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move { lock.acquire().await });
        tickets(&locks, "a", 2).await;
        proxy.cut();
        give_back(guard).await;
        proxy.restore();
        let restored = Instant::now();

        give_back(waiter.await.unwrap().unwrap()).await;
        // Not by the next renewal, which is seconds away.
        assert!(
            restored.elapsed() < Duration::from_secs(2),
            "{:?}",
            restored.elapsed()
        );
    }
}

/// H27. The library forgets standing watches when it reconnects.
async fn a_waiter_of_before_a_reconnect_is_woken_after_it(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, waiting) = (client(&server), through(&proxy));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let lock = waiting.mutex("a").wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 2).await;
    proxy.cut();
    proxy.restore();
    // What is renewed at once after the reconnect is over; the next is seconds away.
    give_back(
        waiting
            .mutex("connected")
            .wait(SOON)
            .acquire()
            .await
            .unwrap(),
    )
    .await;
    tokio::time::sleep(Duration::from_millis(500)).await;

    give_back(guard).await;
    let released = Instant::now();

    give_back(waiter.await.unwrap().unwrap()).await;
    assert!(
        released.elapsed() < Duration::from_millis(500),
        "{:?}",
        released.elapsed()
    );
}

async fn a_server_that_restarts_keeps_locks_and_line(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, waiting) = (client(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let lock = waiting.mutex("a").wait(2 * SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
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

/// H13.
async fn a_server_that_lost_its_data_takes_the_lock(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = client(&server);
    let guard = locks.mutex("a").acquire().await.unwrap();
    server.restart_empty();
    let lost = Instant::now();

    let reason = guard.lost().await;

    println!("lost {:?} after the restart: {reason:?}", lost.elapsed());
    assert!(lost.elapsed() < SOON);
    // A server that is behind what the client has seen refuses the session; it is given up when it may have ended.
    eventually("works again", 2 * SOON, async || {
        match locks.mutex("a").acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    println!("works again {:?} after the restart", lost.elapsed());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}

async fn a_node_that_somebody_deleted_costs_the_lock_and_the_holder_learns_it(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = client(&server);
    let operator = operator(&server).await;
    for contended in [false, true] {
        let guard = locks
            .mutex("a")
            .ttl(Duration::from_secs(3))
            .acquire()
            .await
            .unwrap();
        let waiter = contended.then(|| {
            let lock = locks.mutex("a").wait(SOON);
            tokio::spawn(async move { lock.acquire().await })
        });
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
            deleted.elapsed() < Duration::from_secs(2),
            "{:?}",
            deleted.elapsed()
        );
        assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
        if let Some(waiter) = waiter {
            give_back(waiter.await.unwrap().unwrap()).await;
        }
    }
}

fn holder(url: &str, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: "test".into(),
        ttl,
        ..HolderOptions::mutex(url, "a")
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// S3.
async fn a_killed_holder_is_followed_when_its_session_is_over(_: Store) {
    let server = ZooKeeperServer::start();
    let ttl = Duration::from_secs(2);
    let mut longest = Duration::ZERO;
    for _ in 0..3 {
        let mut dying = holder(&server.url(), ttl);
        let token = dying.acquire();
        let locks = client(&server);
        let lock = locks.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move { lock.acquire().await });
        tickets(&client(&server), "a", 2).await;

        dying.kill();
        let killed = Instant::now();
        let next = waiter.await.unwrap().unwrap();

        longest = longest.max(killed.elapsed());
        assert!(next.token().as_u64() > token);
        give_back(next).await;
    }
    println!("SIGKILL of the holder to the next holder, session of 2 s: {longest:?} at most");
    assert!(longest < ttl + Duration::from_secs(1), "{longest:?}");
}

/// H1, H16: its session is another's past.
async fn a_frozen_holder_is_followed_and_its_late_write_is_refused(_: Store) {
    let server = ZooKeeperServer::start();
    let resource = FencedResource::default();
    let mut frozen = holder(&server.url(), Duration::from_secs(1));
    let old = frozen.acquire();
    resource.write(old).unwrap();
    frozen.process().freeze();

    let next = client(&server)
        .mutex("a")
        .wait(SOON)
        .acquire()
        .await
        .unwrap();
    resource.write(next.token().as_u64()).unwrap();
    frozen.process().thaw();

    assert!(!frozen.is_valid(), "two valid holders");
    assert!(resource.write(old).is_err());
    assert_eq!(frozen.release(), "AlreadyLost");
    assert!(next.is_valid());
    give_back(next).await;
    // It works again, in a session of its own.
    assert!(frozen.acquire() > old);
}

/// H39.
async fn a_process_that_ends_with_a_guard_leaves_no_lock(_: Store) {
    let server = ZooKeeperServer::start();
    for _ in 0..3 {
        let mut ending = holder(&server.url(), Duration::from_secs(60));
        ending.acquire();
        ending.finish(SOON);

        nothing_left(&server).await;
    }
}

/// Which the server would carry, and count, for as long as it was to last.
async fn a_client_that_ends_leaves_no_session(_: Store) {
    let server = ZooKeeperServer::start();
    let sessions = || server.mntr().remove("zk_global_sessions").unwrap();
    for waits in [false, true] {
        let locks = counted(&server);
        let guard = locks.mutex("a").acquire().await.unwrap();
        if waits {
            let lock = locks.mutex("a").wait(SOON);
            let waiter = tokio::spawn(async move { lock.acquire().await });
            tickets(&locks, "a", 2).await;
            give_back(guard).await;
            drop(waiter.await.unwrap().unwrap());
        } else {
            drop(guard);
        }
        assert_eq!(sessions(), "1");

        let began = Instant::now();
        drop(locks);

        assert_eq!(sessions(), "0");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

async fn a_ttl_beyond_the_session_is_refused_with_both_numbers(_: Store) {
    let server = ZooKeeperServer::with(&["maxSessionTimeout=5000"]);
    let locks = builder(server.url())
        .ttl(Duration::from_secs(7))
        .build()
        .unwrap();

    let error = locks.mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(text.contains("7s") && text.contains("5s"), "{text}");
    let short = locks.mutex("a").ttl(Duration::from_secs(5));
    give_back(short.acquire().await.unwrap()).await;
}

async fn the_chroot_of_the_url_is_used(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url() + "/app/locks").build().unwrap();

    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("/app/locks"), "{error}");

    let operator = operator(&server).await;
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.mkdir("/app/locks", &options).await.unwrap();
    eventually("works now", SOON, async || locks.ready(SOON).await.is_ok()).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    assert_eq!(server.ephemerals("/app/locks/test:1/{a}/").len(), 1);
    let lock = locks.mutex("a").wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

async fn nodes_of_a_user_are_closed_to_others(_: Store) {
    let server = ZooKeeperServer::start();
    let ann = builder(server.url_with_user("ann", "p@ss:word"))
        .build()
        .unwrap();
    let guard = ann.mutex("a").acquire().await.unwrap();

    for url in [
        server.url(),
        server.url_with_user("ann", "another"),
        server.url_with_user("bob", "p@ss:word"),
    ] {
        let other = builder(url).build().unwrap();
        let error = other.mutex("a").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(!format!("{error} {error:?}").contains("another"));
    }

    let same = builder(server.url_with_user("ann", "p@ss:word"))
        .build()
        .unwrap();
    assert_eq!(kind(same.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    give_back(same.mutex("a").acquire().await.unwrap()).await;
}

/// With what the guide asks for: nothing at the root, everything below the chroot's own node but to change its rights.
async fn a_user_with_the_documented_rights_can_do_everything(_: Store) {
    use zookeeper_client::{Acl, AuthId, Permission};
    let server = ZooKeeperServer::start();
    let operator = operator(&server).await;
    operator.auth("digest", b"op:op").await.unwrap();
    let open = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create("/locks", b"", &open).await.unwrap();
    // As `setAcl /locks digest:ann:<hash>:crd` does it.
    let rights = [Acl::new(
        Permission::READ | Permission::CREATE | Permission::DELETE,
        AuthId::new("digest", "ann:qqrHIGv6wQBqTWRWAn5AN0ZlqLs="),
    )];
    let user = Client::connector()
        .with_auth("digest", b"ann:secret")
        .connect(&format!("127.0.0.1:{}", server.port()))
        .await
        .unwrap();
    // The server writes down the identity that a digest stands for.
    let creators = CreateMode::Persistent.with_acls(Acls::creator_all());
    user.create("/whoami", b"", &creators).await.unwrap();
    let (identity, _) = user.get_acl("/whoami").await.unwrap();
    let rights = [Acl::new(
        rights[0].permission(),
        identity[0].auth_id().clone(),
    )];
    operator.set_acl("/locks", &rights, None).await.unwrap();

    let locks = builder(server.url_with_user("ann", "secret") + "/locks")
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let lock = locks.mutex("a").wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

/// H7.
async fn tokens_rise_although_the_sequence_starts_again(_: Store) {
    let server = ZooKeeperServer::that_forgets_soon();
    let locks = client(&server);
    let operator = operator(&server).await;
    let mut last = 0;
    for _ in 0..3 {
        for _ in 0..3 {
            let guard = locks.mutex("a").acquire().await.unwrap();
            assert!(guard.token().as_u64() > last);
            last = guard.token().as_u64();
            give_back(guard).await;
        }
        eventually("the parent is gone", SOON, async || {
            operator.check_stat("/test:1/{a}").await.unwrap().is_none()
        })
        .await;
    }
}

/// S30, H26. Judged at what the work touches, as above; the server that serves the holder goes on answering.
async fn a_follower_cut_off_from_its_leader_lets_no_second_holder_in(_: Store) {
    let ensemble = Ensemble::with_bridges();
    let bridged = ensemble.bridged();
    assert_eq!(bridged.role().as_deref(), Some("follower"));
    let ttl = Duration::from_secs(3);
    let cut_off = builder(bridged.url()).ttl(ttl).build().unwrap();
    let elsewhere = builder(ensemble.servers()[0].url()).build().unwrap();
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let next_is_in = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&next_is_in);
    let lock = cut_off.mutex("a");
    let work = tokio::spawn(async move {
        lock.run(async |held| {
            begun.send(held).unwrap();
            while !seen.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            Ok::<_, Error>(())
        })
        .await
    });
    let held = has_begun.await.unwrap();
    // Beyond the first proof, which is the session's creation.
    tokio::time::sleep(ttl).await;
    assert!(held.is_valid());
    let lock = elsewhere.mutex("a").wait(3 * SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&elsewhere, "a", 2).await;

    ensemble.cut_off();
    let cut = Instant::now();
    let lost = tokio::spawn(async move {
        held.lost().await;
        Instant::now()
    });
    let next = waiter.await.unwrap().unwrap();
    let granted = Instant::now();
    next_is_in.store(true, Ordering::SeqCst);

    assert_eq!(
        kind(work.await.unwrap()),
        ErrorKind::Lost(LostReason::Expired)
    );
    let lost = lost.await.unwrap();
    println!(
        "cut off: lost after {:?}, the next granted after {:?}; the server that was cut off: {:?}",
        lost - cut,
        granted - cut,
        bridged.role()
    );
    assert!(lost < granted, "two valid holders");
    assert_eq!(
        bridged.role().as_deref(),
        Some("follower"),
        "it noticed too early for this to be a test"
    );
    give_back(next).await;
}

/// Four processes of sixteen tasks each on one key.
/// The connections stay, and nothing is said on them.
async fn a_server_that_hangs_costs_no_lease_while_others_answer(_: Store) {
    let ensemble = Ensemble::start();
    let ttl = Duration::from_secs(4);
    let mut guards = Vec::new();
    // So many that some are served by the one that will hang, and some of those try it once more.
    for number in 0..24 {
        let locks = builder(ensemble.url()).ttl(ttl).build().unwrap();
        let lock = locks.mutex(format!("a{number}"));
        guards.push(lock.acquire().await.unwrap());
    }
    // Beyond the first proof, which is the session's creation.
    tokio::time::sleep(ttl).await;
    let followers = ensemble.followers();
    let hangs = followers.iter().max_by_key(|server| server.sessions());
    let hangs = hangs.unwrap();
    println!("{} of 24 are served by the one", hangs.sessions());
    assert!(hangs.sessions() >= 6);

    hangs.freeze();
    let frozen = Instant::now();
    let mut lost = tokio::task::JoinSet::new();
    for guard in &guards {
        let held = (**guard).clone();
        lost.spawn(async move { held.lost().await });
    }
    let first = tokio::time::timeout(2 * ttl, lost.join_next()).await;

    assert!(first.is_err(), "lost after {:?}", frozen.elapsed());
    for guard in guards {
        give_back(guard).await;
    }
    hangs.thaw();
}

async fn a_crowd_overlaps_nowhere_while_leaders_die(_: Store) {
    let ensemble = Ensemble::start();
    let folder = tempfile::tempdir().unwrap();
    let seconds = if tests::fact::long() { 60 } else { 25 };
    let mut crowd: Vec<Process> = (0..4)
        .map(|_| {
            Process::start(
                Command::new(env!("CARGO_BIN_EXE_crowd"))
                    .args(["a", "16", &seconds.to_string()])
                    .arg(folder.path())
                    .env("LOCK_URL", ensemble.url())
                    .env("LOCK_NAMESPACE", "test")
                    .env("LOCK_TTL", "6s")
                    .env("LOCK_WAIT", "20s")
                    .env("LOCK_FAIR", "strict"),
            )
        })
        .collect();
    let witness = FileWitness::in_folder(folder.path());
    let mut visits = 0;
    for _ in 0..2 {
        eventually("the crowd moves", 2 * SOON, async || {
            witness.visits() > visits + 200
        })
        .await;
        let leader = ensemble.leader();
        leader.kill();
        let killed = Instant::now();
        visits = witness.visits();
        eventually("the crowd moves again", 2 * SOON, async || {
            witness.visits() > visits + 200
        })
        .await;
        println!("leader killed, 200 visits later: {:?}", killed.elapsed());
        leader.restart();
        ensemble.wait_until_complete();
        visits = witness.visits();
    }
    let (mut done, mut errors) = (0, 0);
    for process in &mut crowd {
        let told = process.expect("DONE", Duration::from_secs(seconds) + 2 * SOON);
        let (visited, failed) = told.split_once(' ').unwrap();
        done += visited.parse::<u64>().unwrap();
        errors += failed.parse::<u64>().unwrap();
    }
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    let out_of_order = tokens.windows(2).filter(|pair| pair[0] >= pair[1]).count();

    println!(
        "{done} visits, {errors} errors, {} overlaps, {out_of_order} tokens out of order",
        witness.overlaps().len()
    );
    witness.assert_no_overlap();
    assert_eq!(out_of_order, 0);
    let leader = ensemble.leader();
    eventually("nothing is left", SOON, async || {
        leader.ephemerals("/test:1/").is_empty()
    })
    .await;
}
