//! The cost of a pair of acquire and release.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::CommandStats;
use tokio::task::JoinSet;

use super::client;
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_pair_is_three_round_trips_and_so_many_commands
        tasks_of_one_process_that_wait_ask_as_one
    ]
}

fn count(calls: [(&str, u64); 4]) -> CommandStats {
    calls
        .map(|(command, calls)| (command.to_owned(), calls))
        .into()
}

/// No third node answers earlier than one of these two, so the counts are exact.
async fn a_pair_is_three_round_trips_and_so_many_commands(_: Store) {
    let set = Quorum::forgetful(2);
    set.nodes[1].set_clock(Clock::Ahead(Duration::from_secs(2 * 3600)));
    let proxy = Proxy::to(set.nodes[0].port());
    let locks = client(&url([proxy.port(), set.nodes[1].port(), free_port()]));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let before = [0, 1].map(|at| set.nodes[at].command_stats());
    let requests = proxy.traffic().chunks_up;

    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let spent = |at: usize| {
        let mut spent = set.nodes[at].command_stats_since(&before[at]);
        // Of the harness, which tells newer servers its name.
        spent.retain(|command, _| !command.contains("client"));
        spent
    };
    eventually("the last request is counted", SOON, async || {
        spent(1).get("evalsha") == Some(&3)
    })
    .await;
    for at in [0, 1] {
        assert_eq!(
            spent(at),
            count([("evalsha", 3), ("get", 3), ("set", 3), ("time", 2)])
        );
    }
    assert_eq!(proxy.traffic().chunks_up - requests, 3);
}

/// Tasks that give up early leave their turn to the others, which need not begin anew.
async fn tasks_of_one_process_that_wait_ask_as_one(store: Store) {
    let in_the_way = store.client().mutex("a").acquire().await.unwrap();
    let (locks, counts) = store.counted(crate::store::DEFAULT);
    let seconds = 4;
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for millis in (200..=seconds * 1_000).step_by(200) {
        let lock = locks.mutex("a").wait(Duration::from_millis(millis));
        tasks.spawn(async move { lock.acquire().await });
    }
    while let Some(outcome) = tasks.join_next().await {
        assert_eq!(kind(outcome.unwrap()), ErrorKind::Timeout);
    }
    let asked = counts.enqueued();
    let elapsed = began.elapsed();
    println!("asked {asked} times in {elapsed:?}");
    // Five times a second, and the short pauses of the begin.
    let most = 5 * elapsed.as_secs() as usize + 8;
    assert!((5..=most).contains(&asked), "{asked}");
    give_back(in_the_way).await;
}
