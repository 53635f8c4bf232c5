//! Redis servers that are down, full, read-only, slow, restarted or lying. Each fact has a server to itself.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Event, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use crate::store::{Kind, SOON, Store, give_back, kind, litter, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_server_that_is_down_is_unavailable_within_one_operation
        the_wait_bounds_connecting_and_asking_too
        tasks_in_line_behind_one_another_learn_together_that_the_store_is_down
        a_client_that_was_idle_through_an_outage_works_again
        a_lost_reply_is_asked_for_again_and_granted_once
        giving_up_on_a_lost_reply_leaves_nothing
        a_release_that_overtakes_its_enqueue_is_obeyed
        a_server_stopped_for_longer_than_a_lease_still_gets_the_release
        an_enqueue_that_arrives_after_its_release_takes_nothing
        a_slow_reply_counts_against_the_lease
        a_lease_ends_on_time_while_its_renewal_hangs
        a_budget_shorter_than_a_round_trip_does_not_cost_the_connection
        one_bad_name_does_not_cost_the_other_leases
        a_line_of_thousands_that_died_at_once_is_cleared
        a_handle_dropped_in_mid_acquire_leaves_no_lock_on_a_runtime_of_one_thread
        shutdown_waits_for_a_release_that_is_under_way
        shutdown_gives_up_waiters_while_the_server_is_down
        a_cut_that_heals_before_the_deadline_loses_nothing
        a_cut_that_outlasts_the_lease_stops_the_work
        a_lost_release_is_repeated
        wake_ups_that_were_cut_off_are_caught_up_on
        a_waiter_of_before_a_reconnect_is_woken_after_it
        a_forged_wake_up_grants_nothing
        a_server_that_lost_its_data_takes_the_lock_and_tokens_still_rise
        an_evicted_ticket_costs_the_lock_and_the_holder_learns_it
        an_evicted_queue_costs_nobody_the_lock_or_the_place
        waiters_survive_a_server_that_restarts_empty
        a_full_server_refuses_locks_but_renews_and_releases
        a_full_server_takes_back_a_lock_and_keeps_its_mark
        a_read_only_server_is_unavailable
        a_server_that_cannot_save_is_unavailable
        a_server_busy_with_a_script_is_unavailable_and_comes_back
        forgotten_scripts_are_loaded_again
        the_database_of_the_url_is_used
        a_clock_that_jumps_forward_is_noticed_and_tokens_rise
        a_clock_that_jumps_back_lets_no_second_holder_in
        one_clock_that_was_far_ahead_does_not_drive_every_token_ahead
        what_remains_of_a_name_is_gone_a_day_later
        no_request_shortens_the_life_of_a_key
        ready_reports_a_replica
    ]
}

fn builder(url: String) -> lockcore::Builder {
    Locks::builder().url(url).namespace("test")
}

fn client(server: &RedisServer) -> Locks {
    builder(server.url()).build().unwrap()
}

fn through(proxy: &Proxy) -> Locks {
    builder(proxy.url())
        .op_timeout(Duration::from_millis(400))
        .build()
        .unwrap()
}

async fn nothing_left(server: &RedisServer) {
    eventually("nothing is left", Duration::from_secs(3), async || {
        litter(server, "test").is_empty()
    })
    .await;
}

async fn a_server_that_is_down_is_unavailable_within_one_operation(_: Store) {
    let port = tests::ports::free_port();
    let locks = builder(format!("redis://127.0.0.1:{port}"))
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
        assert!(error.to_string().contains("refused"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
    assert_eq!(
        kind(locks.ready(Duration::from_millis(200)).await),
        ErrorKind::Unavailable
    );
}

/// P8.
async fn the_wait_bounds_connecting_and_asking_too(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    let wait = Duration::from_millis(150);
    for (connected, expected) in [(false, ErrorKind::Unavailable), (true, ErrorKind::Unknown)] {
        if connected {
            give_back(locks.mutex("warm").acquire().await.unwrap()).await;
        }
        proxy.freeze();
        let started = Instant::now();

        let outcome = locks.mutex("a").wait(wait).acquire().await;
        let waited = started.elapsed();

        assert_eq!(kind(outcome), expected);
        assert!(
            waited >= wait && waited < wait + Duration::from_millis(500),
            "{waited:?}"
        );
        proxy.thaw();
    }
    tickets(&client(&server), "a", 0).await;
}

/// H20.
async fn a_client_that_was_idle_through_an_outage_works_again(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.kill();
    // A request into a connection whose end has not been noticed yet has an unknown outcome, rightly.
    eventually("the client has noticed", SOON, async || {
        let error = locks.mutex("a").try_acquire().await.unwrap_err();
        error.kind() == ErrorKind::Unavailable
    })
    .await;
    server.restart();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// H10, S29.
async fn a_lost_reply_is_asked_for_again_and_granted_once(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for round in 0..10 {
        proxy.lose_replies(b"EVALSHA", 1);

        let name = format!("n{round}");
        let asked = Instant::now();
        let guard = locks.mutex(&name).acquire().await.unwrap();

        // By the repetition itself; a ticket that was taken twice is granted by its first renewal, after 3.3 s.
        assert!(
            asked.elapsed() < Duration::from_secs(1),
            "{:?}",
            asked.elapsed()
        );
        assert_eq!(client(&server).inspect(&name).await.unwrap().len(), 1);
        assert_eq!(
            kind(client(&server).mutex(&name).try_acquire().await),
            ErrorKind::Busy
        );
        give_back(guard).await;
        // The mark that a late repetition would obey stays for a minute; no ticket does.
        assert!(client(&server).inspect(&name).await.unwrap().is_empty());
    }
}

async fn giving_up_on_a_lost_reply_leaves_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    proxy.lose_replies(b"EVALSHA", usize::MAX);

    let error = locks
        .mutex("a")
        .wait(Duration::from_millis(300))
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.may_hold());
    proxy.restore();
    proxy.lose_replies(b"EVALSHA", 0);

    tickets(&client(&server), "a", 0).await;
    give_back(client(&server).mutex("a").try_acquire().await.unwrap()).await;
}

/// H28: the requests of a client that gave up sit in a frozen network; when it thaws, enqueue and
/// release arrive over different connections, in any order.
async fn a_release_that_overtakes_its_enqueue_is_obeyed(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    for round in 0..10 {
        let name = format!("n{round}");
        proxy.freeze();
        let outcome = locks
            .mutex(&name)
            .wait(Duration::from_millis(50))
            .acquire()
            .await;
        assert_eq!(kind(outcome), ErrorKind::Unknown);
        proxy.thaw();

        // What was on its way has arrived when this, sent after it, has come back …
        eventually("the client works again", SOON, async || {
            match locks.mutex("after").try_acquire().await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            }
        })
        .await;
        // … and is gone long before its lease of 10 s is over.
        eventually("nothing is left", Duration::from_secs(3), async || {
            client(&server).inspect(&name).await.unwrap().is_empty()
        })
        .await;
    }
}

/// What was sent to a stopped server runs when it goes on, however long ago its sender gave up.
async fn a_server_stopped_for_longer_than_a_lease_still_gets_the_release(_: Store) {
    let server = RedisServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(200))
        .build()
        .unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    server.freeze();
    let lease = Duration::from_millis(300);
    let lock = locks.mutex("a").ttl(lease).wait(Duration::from_millis(100));
    assert_eq!(kind(lock.acquire().await), ErrorKind::Unknown);
    tokio::time::sleep(4 * lease).await; // the stop outlasts lease and operation; no event stands for that
    server.thaw();

    // The release leaves its mark, which an enqueue that comes even later obeys.
    eventually("the release has come", SOON, async || {
        !server.keys("test:1:{a}:gone:*").is_empty()
    })
    .await;
    tickets(&client(&server), "a", 0).await;
}

/// H28: byte for byte the request that was answered to nobody, when its release has been carried out.
async fn an_enqueue_that_arrives_after_its_release_takes_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    server.command::<()>(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
    proxy.lose_replies(b"EVALSHA", usize::MAX);
    let wait = Duration::from_millis(300);
    assert_eq!(
        kind(locks.mutex("a").wait(wait).acquire().await),
        ErrorKind::Unknown
    );
    proxy.lose_replies(b"EVALSHA", 0);
    tickets(&client(&server), "a", 0).await;

    // The log has every command with its arguments: an enqueue has three keys, the third being the mark.
    let log: Vec<(u64, u64, u64, Vec<String>, String, String)> =
        server.command(&["SLOWLOG", "GET", "-1"]);
    let enqueue = log.into_iter().map(|entry| entry.3).find(|command| {
        command[0] == "EVALSHA"
            && command.len() == 12
            && command[2] == "3"
            && command[3] == "test:1:{a}"
    });
    let enqueue = enqueue.expect("the enqueue is in the log");
    let enqueue: Vec<&str> = enqueue.iter().map(String::as_str).collect();
    let answer: Vec<i64> = server.command(&enqueue);

    assert_eq!(answer, [4], "released before");
    assert!(client(&server).inspect("a").await.unwrap().is_empty());
}

/// H2, P3.
async fn a_slow_reply_counts_against_the_lease(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let late = Duration::from_millis(500);
    proxy.delay(Duration::ZERO, late);

    let ttl = Duration::from_secs(2);
    let guard = locks
        .mutex("a")
        .ttl(ttl)
        .renew(false)
        .acquire()
        .await
        .unwrap();

    assert!(guard.remaining() <= ttl - late, "{:?}", guard.remaining());
    proxy.delay(Duration::ZERO, Duration::ZERO);
    give_back(guard).await;
}

/// H3.
async fn a_lease_ends_on_time_while_its_renewal_hangs(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    let ttl = Duration::from_millis(900);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    proxy.freeze();
    let frozen = Instant::now();

    let reason = guard.lost().await;

    assert_eq!(reason, LostReason::Expired);
    assert!(
        frozen.elapsed() < ttl + Duration::from_millis(300),
        "{:?}",
        frozen.elapsed()
    );
    // The acknowledgement that comes now revives nothing.
    proxy.thaw();
    tickets(&client(&server), "a", 0).await;
    assert!(!guard.is_valid());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}

async fn a_budget_shorter_than_a_round_trip_does_not_cost_the_connection(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    proxy.delay(Duration::ZERO, Duration::from_millis(50));
    let before = proxy.traffic().connections;
    for _ in 0..20 {
        let hasty = locks.mutex("a").wait(Duration::from_millis(1));
        assert_eq!(kind(hasty.acquire().await), ErrorKind::Unknown);
    }
    proxy.delay(Duration::ZERO, Duration::ZERO);

    nothing_left(&server).await;
    // The keeper's own, which the clean-up needed.
    assert!(proxy.traffic().connections <= before + 1);
}

async fn one_bad_name_does_not_cost_the_other_leases(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let ttl = Duration::from_secs(1);
    let good = locks.mutex("good").ttl(ttl).acquire().await.unwrap();
    let bad = locks.mutex("bad").ttl(ttl).acquire().await.unwrap();
    // Somebody else's key in the place of ours.
    server.command::<i64>(&["DEL", "test:1:{bad}:queue"]);
    server.command::<()>(&["SET", "test:1:{bad}:queue", "foreign"]);

    bad.lost().await;

    let also_lost = tokio::time::timeout(2 * ttl, good.lost()).await;
    assert!(also_lost.is_err(), "the good lease went with the bad one");
    server.command::<i64>(&["DEL", "test:1:{bad}:queue"]);
    drop(bad);
    give_back(good).await;
}

async fn a_line_of_thousands_that_died_at_once_is_cleared(_: Store) {
    let server = RedisServer::start();
    let dead = "for i = 1, 20000 do \
        redis.call('RPUSH', KEYS[1], i) \
        redis.call('HSET', KEYS[2], i, '1:1:1073741824:1073741824:1:00:me') end";
    server.command::<()>(&["EVAL", dead, "2", "test:1:{a}:queue", "test:1:{a}"]);

    let guard = client(&server).mutex("a").acquire().await.unwrap();

    assert_eq!(server.command::<usize>(&["LLEN", "test:1:{a}:queue"]), 1);
    give_back(guard).await;
    nothing_left(&server).await;
}

/// The dropping thread is the one that would have to read the reply.
async fn a_handle_dropped_in_mid_acquire_leaves_no_lock_on_a_runtime_of_one_thread(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let dropped = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            locks.ready(SOON).await.unwrap();
            let lock = locks.mutex("a");
            let mut acquire = Box::pin(async move { lock.acquire().await.map(drop) });
            // Sent, and not answered.
            let sent = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
            assert!(sent.is_pending());
            tokio::task::yield_now().await;
            drop(acquire);
            drop(locks);
        });
    });
    dropped.await.unwrap();

    tickets(&client(&server), "a", 0).await;
    assert!(client(&server).mutex("a").try_acquire().await.is_ok());
}

async fn shutdown_waits_for_a_release_that_is_under_way(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.freeze();
    let mut release = Box::pin(guard.release());
    let sent = std::future::poll_fn(|cx| Poll::Ready(release.as_mut().poll(cx))).await;
    assert!(sent.is_pending());

    let closing = locks.clone();
    let mut shutdown = Box::pin(async move { closing.shutdown(SOON).await });
    let early = std::future::poll_fn(|cx| Poll::Ready(shutdown.as_mut().poll(cx))).await;
    assert!(early.is_pending(), "shut down with a release under way");
    proxy.thaw();

    assert_eq!(release.await.unwrap(), Release::Released);
    shutdown.await.unwrap();
}

async fn shutdown_gives_up_waiters_while_the_server_is_down(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = client(&server).mutex("a").acquire().await.unwrap();
    let lock = locks
        .mutex("a")
        .ttl(Duration::from_millis(300))
        .wait(lockcore::Wait::Forever);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&client(&server), "a", 2).await;
    server.kill();
    // Its ticket runs out, and it asks a server that is not there, for ever.
    drop(guard);
    tokio::time::sleep(Duration::from_millis(600)).await; // past its ttl; no event stands for that

    locks.shutdown(Duration::from_secs(2)).await.unwrap();

    let outcome = tokio::time::timeout(SOON, waiter)
        .await
        .expect("the waiter hangs");
    assert_eq!(
        kind(outcome.unwrap()),
        ErrorKind::Lost(LostReason::Shutdown)
    );
}

/// One of them asks; the others must not find out one after the other.
async fn tasks_in_line_behind_one_another_learn_together_that_the_store_is_down(_: Store) {
    let server = RedisServer::start();
    let locks = builder(server.url())
        .op_timeout(Duration::from_millis(300))
        .build()
        .unwrap();
    server.kill();
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let lock = locks.mutex("a").wait(6 * SOON);
        tasks.spawn(async move { kind(lock.acquire().await) });
    }
    for error in tasks.join_all().await {
        assert_eq!(error, ErrorKind::Unavailable);
    }
    // One after the other would be 15 s.
    assert!(started.elapsed() < Duration::from_secs(5));
}

/// S22, first half.
async fn a_cut_that_heals_before_the_deadline_loses_nothing(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(3))
        .acquire()
        .await
        .unwrap();
    let before = proxy.traffic().connections;
    let mut events = locks.events();
    proxy.cut();
    assert_eq!(events.next().await, Some(Event::Suspended));
    proxy.restore();
    assert_eq!(events.next().await, Some(Event::Restored));

    // Both connections come back by themselves, and the lease is renewed.
    eventually("renewed on a new connection", SOON, async || {
        proxy.traffic().connections > before && guard.remaining() > Duration::from_millis(2700)
    })
    .await;
    assert!(guard.is_valid());
    give_back(guard).await;
}

/// S22, second half. Judged at what the work touches: its last step lies before the next holder's first.
async fn a_cut_that_outlasts_the_lease_stops_the_work(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let lock = locks.mutex("a").ttl(Duration::from_secs(2));
    let mut events = locks.events();
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
    assert_eq!(events.next().await, Some(Event::Suspended));
    let lost = events.next().await;
    let Some(Event::Lost { name, reason, .. }) = &lost else {
        panic!("{lost:?}");
    };
    assert_eq!((name.as_str(), *reason), ("a", LostReason::Expired));
    give_back(next).await;
}

async fn a_lost_release_is_repeated(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.cut();

    let failed = guard.release().await.unwrap_err();
    assert!(matches!(
        failed.kind(),
        ErrorKind::Unknown | ErrorKind::Unavailable
    ));
    assert!(!client(&server).inspect("a").await.unwrap().is_empty());
    proxy.restore();

    nothing_left(&server).await;
}

/// H19.
async fn wake_ups_that_were_cut_off_are_caught_up_on(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    for _ in 0..5 {
        let guard = client(&server).mutex("a").acquire().await.unwrap();
        let lock = locks.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move { lock.acquire().await });
        tickets(&client(&server), "a", 2).await;
        proxy.cut();
        give_back(guard).await; // its message reaches nobody
        proxy.restore();

        let healed = Instant::now();
        give_back(waiter.await.unwrap().unwrap()).await;
        // By the renewal after the reconnect, not by the ordinary one after 3.3 s.
        assert!(
            healed.elapsed() < Duration::from_millis(2500),
            "{:?}",
            healed.elapsed()
        );
    }
}

/// A ticket says where its wake-up goes, and that outlives the connection.
async fn a_waiter_of_before_a_reconnect_is_woken_after_it(_: Store) {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let locks = through(&proxy);
    let guard = client(&server).mutex("a").acquire().await.unwrap();
    // No renewal but those of the reconnect comes into it: the ordinary ones are 40 s apart.
    let lock = locks.mutex("a").ttl(Duration::from_secs(120)).wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&client(&server), "a", 2).await;
    let before = server.command_stats();
    proxy.cut();
    proxy.restore();
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    eventually("it has asked after its place", SOON, async || {
        // Two for the lock that shows that it works again, the third is the renewal.
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
    assert!(
        released.elapsed() < Duration::from_secs(1),
        "{:?}",
        released.elapsed()
    );
}

async fn a_forged_wake_up_grants_nothing(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let lock = client(&server).mutex("a").wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 2).await;
    let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS", "test:1:wake:*"]);
    assert!(channels.len() >= 2);
    // What somebody can forge who may publish but not read: any id, any number, any garbage; and with
    // a stolen id, any number but the right one.
    let ids: Vec<String> = server.command(&["LRANGE", "test:1:{a}:queue", "0", "-1"]);
    for channel in &channels {
        for message in [
            String::new(),
            "x".repeat(100_000),
            "00000000000000000000000000000000 1".into(),
            format!("{} 1", ids[1]),
            format!("{} {}", ids[1], u64::MAX),
        ] {
            server.command::<i64>(&["PUBLISH", channel, &message]);
        }
    }
    // All of it has arrived when a round trip on the same connection has come back.
    tickets(&locks, "a", 2).await;

    assert!(!waiter.is_finished(), "a forged wake-up granted the lock");
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

/// H13, H7.
async fn a_server_that_lost_its_data_takes_the_lock_and_tokens_still_rise(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lock = locks.mutex("a").ttl(Duration::from_millis(900));
    let guard = lock.acquire().await.unwrap();
    server.flush();

    assert_eq!(guard.lost().await, LostReason::Taken);

    let next = lock.acquire().await.unwrap();
    assert!(next.token() > guard.token());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    assert!(next.is_valid());
    give_back(next).await;
}

/// H12: eviction takes keys one by one.
async fn an_evicted_ticket_costs_the_lock_and_the_holder_learns_it(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let lock = locks.mutex("a").ttl(Duration::from_millis(900));
    let guard = lock.acquire().await.unwrap();
    assert_eq!(server.command::<i64>(&["DEL", "test:1:{a}"]), 1);

    assert_eq!(guard.lost().await, LostReason::Taken);
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.token() > guard.token());
    drop(guard);
    give_back(next).await;
    nothing_left(&server).await;
}

/// H12.
async fn an_evicted_queue_costs_nobody_the_lock_or_the_place(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut waiters = Vec::new();
    for place in 0..3 {
        let lock = client(&server).mutex("a").wait(SOON);
        waiters.push(tokio::spawn(async move { lock.acquire().await }));
        tickets(&locks, "a", place + 2).await;
    }
    assert_eq!(server.command::<i64>(&["DEL", "test:1:{a}:queue"]), 1);
    let mut last = guard.token();

    give_back(guard).await;

    for waiter in waiters {
        let guard = waiter.await.unwrap().unwrap();
        assert!(guard.token() > last, "served in their order");
        last = guard.token();
        give_back(guard).await;
    }
    nothing_left(&server).await;
}

async fn waiters_survive_a_server_that_restarts_empty(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let lock = client(&server)
            .mutex("a")
            .ttl(Duration::from_secs(1))
            .wait(3 * SOON);
        tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    tickets(&locks, "a", 11).await;
    server.kill();
    server.restart();

    guard.lost().await;
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    nothing_left(&server).await;
}

/// H11: OOM.
async fn a_full_server_refuses_locks_but_renews_and_releases(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_millis(600))
        .acquire()
        .await
        .unwrap();
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);

    let error = locks.mutex("b").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("maxmemory"), "{error}");
    let until = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < until {
        assert!(guard.is_valid(), "the renewal was refused");
        tokio::task::yield_now().await;
    }
    give_back(guard).await;
    nothing_left(&server).await;
}

/// H11, H28: the release of a lock that was asked for twice leaves a mark, which is one more key.
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

/// H11: READONLY.
async fn a_read_only_server_is_unavailable(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);

    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("replica"), "{error}");
    server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// H11: MISCONF. A background save that cannot write its file.
async fn a_server_that_cannot_save_is_unavailable(_: Store) {
    let server = RedisServer::with(&["--dbfilename", "taken.rdb"]);
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    server.command::<()>(&["CONFIG", "SET", "save", "3600 1"]);
    let folder: Vec<String> = server.command(&["CONFIG", "GET", "dir"]);
    // The file's name is taken by a folder that is not empty, so that renaming onto it fails, for root too.
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

/// H11: BUSY.
async fn a_server_busy_with_a_script_is_unavailable_and_comes_back(_: Store) {
    let server = RedisServer::with(&["--busy-reply-threshold", "50"]);
    let locks = client(&server);
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

    // A busy server takes a moment to refuse. The last refusal may come too late for this operation, and then its
    // outcome is unknown, rightly.
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

/// H11: NOSCRIPT.
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

/// H4.
async fn a_clock_that_jumps_forward_is_noticed_and_tokens_rise(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let guard = client(&server)
        .mutex("a")
        .ttl(Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    server.set_clock(Clock::Ahead(Duration::from_secs(300)));

    // To the server the lease is long over: another gets in, with a greater token …
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.token() > guard.token());
    // … and the old holder learns it at its next renewal.
    assert_eq!(guard.lost().await, LostReason::Taken);
    give_back(next).await;
}

async fn a_clock_that_jumps_back_lets_no_second_holder_in(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let locks = client(&server);
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    server.set_clock(Clock::Behind(Duration::from_secs(300)));

    assert_eq!(
        kind(client(&server).mutex("a").try_acquire().await),
        ErrorKind::Busy
    );
    let token = guard.token();
    give_back(guard).await;
    // The clock is behind the last token; the next is greater all the same, also for a new client …
    let next = client(&server).mutex("a").acquire().await.unwrap();
    assert!(next.token() > token);
    let token = next.token();
    give_back(next).await;
    // … and even without data, for a client that has seen it.
    server.flush();
    let next = locks.mutex("a").acquire().await.unwrap();
    assert!(
        next.token().as_u64() > token.as_u64() - (1 << 30),
        "{:?} {token:?}",
        next.token()
    );
    give_back(next).await;
}

/// P6: what a client has seen counts up to a day beyond the store's clock.
async fn one_clock_that_was_far_ahead_does_not_drive_every_token_ahead(_: Store) {
    let server = RedisServer::with_clock(&[]);
    let locks = client(&server);
    let honest = locks.mutex("a").acquire().await.unwrap().token();
    server.set_clock(Clock::Ahead(Duration::from_secs(30 * 86_400)));
    let ahead = locks.mutex("b").acquire().await.unwrap().token();
    server.set_clock(Clock::True);

    let next = locks.mutex("c").acquire().await.unwrap().token();

    assert!(honest < next && next < ahead, "{honest} {next} {ahead}");
}

/// H8.
async fn what_remains_of_a_name_is_gone_a_day_later(_: Store) {
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
            // And no earlier, whatever the ttl was.
            left > 86_400_000 - 60_000 && left <= 86_400_000 + 1000,
            "{key} lives for {left} ms"
        );
    }
}

/// H25: with whatever ttl holders and waiters come and go, keys live on for a day.
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
    // Its first renewal, which would raise it again, is 3 s away.
    let lock = client(&server)
        .mutex("a")
        .ttl(Duration::from_secs(9))
        .wait(SOON);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    tickets(&locks, "a", 2).await;
    lives();
    guard.ensure(Duration::from_secs(30)).await.unwrap_err(); // renews, and says that it is not enough
    lives();
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    lives();
    waiter.abort();
    tickets(&locks, "a", 1).await;
    lives();
    give_back(guard).await;
}

async fn ready_reports_a_replica(_: Store) {
    let server = RedisServer::start();
    client(&server).ready(SOON).await.unwrap();
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);

    let error = client(&server).ready(SOON).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("replica"), "{error}");
}
