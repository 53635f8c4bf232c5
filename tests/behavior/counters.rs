//! Tests of counters and latches that several processes use, with lost answers, messages and
//! connections. The facts that apply to every store are in the conformance kit of the library.

mod cost;
mod kit;
pub(crate) mod servers;

use std::process::Command;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::Locks;
use tests::process::Process;

use crate::store::{DEFAULT, Kind, SOON, STALL, Store};

pub(crate) use self::cost::facts as facts_of_redis;
pub(crate) use self::kit::facts as facts_of_the_kit;
pub(crate) use self::servers::facts as facts_of_servers;

/// Facts for stores that several processes share.
pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, DEFAULT;
        a_latch_that_several_processes_count_down_opens_in_all_of_them
        changes_of_several_processes_all_count
        twenty_writers_of_one_counter_all_count
    ];
    // At etcd, PostgreSQL, SQLite and ZooKeeper, thousands of changes at the same time may take
    // minutes: of those in flight, one is carried out, and all others are sent again.
    if !matches!(
        store.name(),
        "etcd" | "mysql" | "postgres" | "sqlite" | "zookeeper"
    ) {
        facts.extend(crate::store_facts![store, DEFAULT;
            a_burst_of_more_changes_than_a_store_remembers_counts_whole
        ]);
    }
    facts
}

/// A process that uses the latch and the counter of a name.
fn process(url: &str, namespace: &str, name: &str) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command
        .arg(name)
        .env("LOCK_URL", url)
        .env("LOCK_NAMESPACE", namespace)
        .env("LOCK_OP_TIMEOUT", "30s")
        .env("LOCK_WAIT", "60s");
    Process::start(&mut command)
}

async fn a_latch_that_several_processes_count_down_opens_in_all_of_them(store: Store) {
    let start = || process(&store.url(), &store.namespace, "a");
    let latch = store.client().latch("a");
    assert!(latch.try_set(5).await.unwrap());
    let mut waiting = [start(), start()];
    for waiters in &mut waiting {
        waiters.say("wait 10");
    }
    // This process is killed while it waits. The other waiters lose nothing.
    let mut dies = start();
    dies.say("wait 3");
    let here = latch.clone();
    let here = tokio::spawn(async move { here.wait_for_zero().await });

    let mut counting = [start(), start()];
    for (left, at) in [(4, 0), (3, 1), (2, 0)] {
        counting[at].say("down 1");
        assert_eq!(counting[at].expect("LEFT", SOON), left.to_string());
    }
    dies.kill();
    assert_eq!(latch.count().await.unwrap(), 2);
    counting[1].say("down 2");
    assert_eq!(counting[1].expect("LEFT", SOON), "0");

    for waiters in &mut waiting {
        assert_eq!(waiters.expect("OPEN", SOON), "10");
    }
    here.await.unwrap().unwrap();
    // A latch that is open lets a waiter pass at once.
    counting[0].say("wait 1");
    assert_eq!(counting[0].expect("OPEN", SOON), "1");
    counting[0].say("down 1");
    assert_eq!(counting[0].expect("LEFT", SOON), "0");
}

async fn changes_of_several_processes_all_count(store: Store) {
    const EACH: i64 = 50;
    let mut adding: Vec<_> = (0..4)
        .map(|_| process(&store.url(), &store.namespace, "sum"))
        .collect();
    for adder in &mut adding {
        adder.say(&format!("add {EACH}"));
    }
    for adder in &mut adding {
        adder.expect("DONE", 3 * SOON);
    }
    let sum = store.client().counter("sum").get().await.unwrap();
    assert_eq!(sum.count, 4 * EACH);
}

/// Each writer has a connection of its own, and the default timeouts.
async fn twenty_writers_of_one_counter_all_count(store: Store) {
    const EACH: i64 = 30;
    let writers = (0..20).map(|_| {
        let locks = Locks::builder().op_timeout(STALL).wait(6 * SOON);
        let counter = store.client_with(locks).counter("a");
        tokio::spawn(async move {
            for _ in 0..EACH {
                counter.add(1).await.unwrap();
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let sum = store.client().counter("a").get().await.unwrap();
    assert_eq!(sum.count, 20 * EACH);
}

/// A store remembers 5,000 changes whose answers may not have come, and a server of Redis up to
/// 8,192. All futures are polled before the first answer comes.
async fn a_burst_of_more_changes_than_a_store_remembers_counts_whole(store: Store) {
    const BURST: i64 = 9_000;
    let patient = Locks::builder().op_timeout(6 * SOON);
    let counter = store.client_with(patient).counter("a");

    let changes = join_all((0..BURST).map(|_| counter.add(1))).await;

    let mut values: Vec<_> = changes.into_iter().map(|now| now.unwrap().count).collect();
    values.sort_unstable();
    assert!(values.into_iter().eq(1..=BURST));
}
