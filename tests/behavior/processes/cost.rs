//! Tests of the cost of locks between processes, counted with the server's own statistics.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Fair, Locks};
use tests::eventually::eventually;

use crate::store::{Kind, SOON, STALL, Store, give_back, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        one_hand_over_costs_two_scripts_and_one_message_with_any_number_of_waiters
        a_release_wakes_exactly_the_waiters_that_it_lets_in
        a_line_inside_one_process_costs_the_store_next_to_nothing
        an_uncontended_pair_costs_two_scripts
    ]
}

/// A client with leases so long that no renewal falls into the counted time.
fn client(store: &Store, url: String, fair: Fair) -> Locks {
    let locks = Locks::builder().url(url).namespace(&store.namespace);
    let locks = locks.fair(fair).ttl(Duration::from_secs(120));
    locks.wait(3 * SOON).op_timeout(STALL).build().unwrap()
}

/// The counts are exact, so this fact has its own server. Each waiter has a ticket of its own, because
/// the lock has an owner text.
async fn one_hand_over_costs_two_scripts_and_one_message_with_any_number_of_waiters(store: Store) {
    let server = tests::redis_server::RedisServer::start();
    for waiters in [1, 10, 100] {
        let client = || client(&store, server.url(), Fair::Strict);
        let (holding, waiting) = (client(), client());
        give_back(holding.mutex("warm").acquire().await.unwrap()).await;
        let guard = holding.mutex("a").acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..waiters {
            let lock = waiting.mutex("a").owner("each");
            tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
        }
        // If a client inspected the line, its scripts would be counted. So the harness reads the
        // line with another command.
        eventually("the line has formed", SOON, async || {
            let key = format!("{}:1:{{a}}:line", store.namespace);
            server.command::<usize>(&["HLEN", &key]) == 2 * waiters
        })
        .await;

        connect(&holding).await;
        connect(&waiting).await;
        let before = server.command_stats();
        give_back(guard).await;
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let spent = server.command_stats_since(&before);

        let calls = |command: &str| spent.get(command).copied().unwrap_or(0);
        println!(
            "{waiters} waiters: {} scripts, {} messages",
            calls("evalsha"),
            calls("publish")
        );
        // The enqueues came before the counting began. The count has one release for each waiter,
        // and one for the first holder.
        assert_eq!(calls("evalsha"), waiters as u64 + 1);
        assert_eq!(calls("publish"), waiters as u64);
        assert_eq!(calls("eval"), 0);
    }
}

/// Makes both connections of a client: that of the caller and that of the keeper. Each of them checks its
/// rights once, by an `EVAL`.
async fn connect(locks: &lockcore::Locks) {
    locks.ready(SOON).await.unwrap();
}

/// With the default policy, a hundred waiters of one process are one ticket.
async fn a_line_inside_one_process_costs_the_store_next_to_nothing(store: Store) {
    let server = tests::redis_server::RedisServer::start();
    let fair = Fair::Local(Duration::from_secs(60));
    let client = || client(&store, server.url(), fair);
    let (holding, waiting) = (client(), client());
    let guard = holding.mutex("a").acquire().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let lock = waiting.mutex("a").wait(SOON);
        tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    tickets(&waiting, "a", 101).await;

    let before = server.command_stats();
    give_back(guard).await;
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let spent = server.command_stats_since(&before);

    let calls = |command: &str| spent.get(command).copied().unwrap_or(0);
    // The two scripts are the release of the first holder, and the release after the last of the
    // hundred waiters. The message is the wake-up of the process of these waiters.
    assert_eq!((calls("evalsha"), calls("publish")), (2, 1));
}

async fn an_uncontended_pair_costs_two_scripts(store: Store) {
    let server = tests::redis_server::RedisServer::start();
    let locks = lockcore::Locks::builder()
        .url(server.url())
        .namespace(&store.namespace)
        .op_timeout(STALL)
        .build()
        .unwrap();
    let warm = locks.mutex("warm").acquire().await.unwrap();
    connect(&locks).await;
    give_back(warm).await;

    let before = server.command_stats();
    for number in 0..50 {
        give_back(locks.mutex(format!("n{number}")).acquire().await.unwrap()).await;
    }
    let spent = server.command_stats_since(&before);

    let calls = |command: &str| spent.get(command).copied().unwrap_or(0);
    assert_eq!(
        (calls("evalsha"), calls("eval"), calls("publish")),
        (100, 0, 0)
    );
}

/// The locks of this fact may have several holders at once. The counts are exact, so this fact has
/// its own server.
async fn a_release_wakes_exactly_the_waiters_that_it_lets_in(store: Store) {
    let server = tests::redis_server::RedisServer::start();
    let client = || client(&store, server.url(), Fair::Strict);
    let (holding, waiting) = (client(), client());
    let three = holding
        .semaphore("s", 3)
        .permits(3)
        .acquire()
        .await
        .unwrap();
    let writer = holding.rwlock("c").write().acquire().await.unwrap();
    let (served, mut let_in) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..20 {
        // Two waiters fit into the semaphore. In the line of the other lock, a writer is behind the
        // fourth reader.
        let two_of_them = waiting.semaphore("s", 3).permits(1 + number % 2);
        let catalog = waiting.rwlock("c");
        let reader = if number == 4 {
            catalog.write()
        } else {
            catalog.read()
        };
        for lock in [two_of_them, reader] {
            let served = served.clone();
            tokio::spawn(async move { served.send(lock.acquire().await.unwrap()) });
        }
        tickets(&holding, "s", number as usize + 2).await;
        tickets(&holding, "c", number as usize + 2).await;
    }
    let mut guards = Vec::new();
    for (guard, fit) in [(three, 2), (writer, 4)] {
        let before = server.command_stats();
        give_back(guard).await;
        for _ in 0..fit {
            guards.push(let_in.recv().await.unwrap());
        }
        let spent = server.command_stats_since(&before);

        assert_eq!((spent["evalsha"], spent["publish"]), (1, fit));
    }
    assert!(let_in.try_recv().is_err(), "more than fit were let in");

    // The other three readers hold and know it. The writer waits for them, so this release wakes
    // nobody.
    let reader = guards.pop().unwrap();
    assert_eq!(reader.name(), "c");
    let before = server.command_stats();
    give_back(reader).await;
    let spent = server.command_stats_since(&before);
    assert_eq!((spent["evalsha"], spent.get("publish")), (1, None));
}
