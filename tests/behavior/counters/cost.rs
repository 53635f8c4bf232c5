//! Tests of the cost of counters and latches, counted with the server's own statistics.

use std::time::Duration;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use super::process;
use crate::store::{DEFAULT, Kind, SOON, STALL, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_request_is_one_script_and_a_change_one_message
        a_latch_costs_one_message_for_each_process_and_change_however_many_wait
        changes_that_are_answered_are_not_remembered
        a_counter_stays_for_as_long_as_its_clients_say
    ]
}

fn client(server: &RedisServer, store: &Store) -> lockcore::Locks {
    let builder = lockcore::Locks::builder().url(server.url());
    let builder = builder.namespace(&store.namespace).op_timeout(STALL);
    builder.build().unwrap()
}

async fn a_request_is_one_script_and_a_change_one_message(store: Store) {
    let server = RedisServer::start();
    let counter = client(&server, &store).counter("a");
    counter.set(1).await.unwrap();

    let before = server.command_stats();
    for _ in 0..10 {
        counter.add(1).await.unwrap();
        counter.get().await.unwrap();
    }
    let spent = server.command_stats_since(&before);

    let calls = |command: &str| spent.get(command).copied().unwrap_or(0);
    let all = (calls("evalsha"), calls("eval"), calls("publish"));
    assert_eq!(all, (20, 0, 10));
    assert_eq!(calls("subscribe") + calls("unsubscribe"), 0);
}

/// A latch of 5, and 100 waiters in 4 processes.
async fn a_latch_costs_one_message_for_each_process_and_change_however_many_wait(store: Store) {
    const PROCESSES: u64 = 4;
    let server = RedisServer::start();
    let latch = client(&server, &store).latch("a");
    assert!(latch.try_set(5).await.unwrap());
    let before = server.command_stats();
    let mut waiting: Vec<_> = (0..PROCESSES)
        .map(|_| process(&server.url(), &store.namespace, "a"))
        .collect();
    for process in &mut waiting {
        process.say("wait 25");
    }
    let channel = format!("{}:1:wake:{{a}}", store.namespace);
    eventually("all wait", SOON, async || {
        let listening: (String, u64) = server.command(&["PUBSUB", "NUMSUB", &channel]);
        listening.1 == PROCESSES
    })
    .await;
    let began = server.command_stats_since(&before);
    // The test makes the changes without a pause between them. A push that comes during a look
    // causes one more look.
    let before = server.command_stats();
    for left in [4, 3, 2, 1, 0] {
        assert_eq!(latch.count_down().await.unwrap(), left);
    }
    for process in &mut waiting {
        assert_eq!(process.expect("OPEN", SOON), "25");
    }
    let spent = server.command_stats_since(&before);

    let calls = |of: &std::collections::BTreeMap<String, u64>, command: &str| {
        of.get(command).copied().unwrap_or(0)
    };
    println!(
        "a latch of 5, 100 waiters in 4 processes: {} scripts and {} subscriptions until all wait; then {} scripts and {} \
         messages, each to {PROCESSES} processes",
        calls(&began, "evalsha") + calls(&began, "eval"),
        calls(&began, "subscribe"),
        calls(&spent, "evalsha"),
        calls(&spent, "publish"),
    );
    assert_eq!(calls(&spent, "publish"), 5);
    // The five changes are five scripts. Each process reads at most once for each change, and may
    // finish one read that had begun before the changes.
    assert!(calls(&spent, "evalsha") <= 5 + 6 * PROCESSES, "{spent:?}");
    // Until all wait, each process looks at most three times: a first look, the look of the watch,
    // and one for callers that came meanwhile. It also checks its rights.
    let looks = calls(&began, "evalsha") + calls(&began, "eval");
    assert!(looks <= 6 * PROCESSES, "{began:?}");
}

async fn changes_that_are_answered_are_not_remembered(store: Store) {
    let server = RedisServer::start();
    let counter = client(&server, &store).counter("a");
    for _ in 0..200 {
        counter.add(1).await.unwrap();
    }
    let key = format!("{}:1:{{a}}:count", store.namespace);
    // The key has two fields: the state of the counter, and the id of the last change with its
    // answer.
    assert_eq!(server.command::<usize>(&["HLEN", &key]), 2);
    let lives: u64 = server.command(&["PTTL", &key]);
    // It stays for 30 days after its last use. A read prolongs its life only after half a day.
    assert_eq!(lives.div_ceil(3_600_000), 30 * 24 + 12, "{lives} ms");
}

async fn a_counter_stays_for_as_long_as_its_clients_say(store: Store) {
    const HOUR: Duration = Duration::from_secs(60 * 60);
    let server = RedisServer::start();
    let locks = client(&server, &store);
    let key = format!("{}:1:{{a}}:count", store.namespace);
    // How many hours the key lives, rounded up.
    let hours = || server.command::<u64>(&["PTTL", &key]).div_ceil(3_600_000);
    let latch = locks.latch("a").keep(10_000 * HOUR);
    assert!(latch.try_set(3).await.unwrap());
    assert_eq!(hours(), 10_000 + 12);

    // These change nothing of it.
    assert_eq!(locks.latch("a").count_down().await.unwrap(), 2);
    locks.counter("a").set(4).await.unwrap();
    assert!(!locks.latch("a").keep(HOUR).try_set(5).await.unwrap());
    locks.counter("a").keep(HOUR).add(1).await.unwrap();
    assert_eq!(hours(), 10_000 + 12);
    // A set makes it shorter, and an addition longer.
    locks.counter("a").keep(10 * HOUR).set(7).await.unwrap();
    assert_eq!(hours(), 15);
    locks.counter("a").keep(20 * HOUR).add(1).await.unwrap();
    assert_eq!(hours(), 30);

    // A read prolongs the life of a counter that was not used for longer than the half of it.
    let data: String = server.command(&["HGET", &key, "is"]);
    let mut fields: Vec<_> = data
        .split(' ')
        .map(|field| field.parse::<i64>().unwrap())
        .collect();
    fields[3] -= 36_001;
    let fields = fields
        .iter()
        .map(i64::to_string)
        .collect::<Vec<_>>()
        .join(" ");
    server.command::<()>(&["HSET", &key, "is", &fields]);
    server.command::<()>(&["PEXPIRE", &key, "100000"]);
    assert_eq!(locks.counter("a").get().await.unwrap().count, 8);
    assert_eq!(hours(), 30);
}
