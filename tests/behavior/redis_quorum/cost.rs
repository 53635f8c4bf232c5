//! Tests of the cost of a pair of acquire and release.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::{CommandStats, RedisServer};
use tokio::task::JoinSet;

use super::{client, has_drawn, held_everywhere, nothing_is_left_at, proxied};
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_pair_is_two_round_trips_and_so_many_commands
        a_pair_is_two_round_trips_with_two_of_five_nodes_down
        nodes_that_draw_different_numbers_cost_one_round_trip_more
        tasks_of_one_process_that_wait_ask_as_one
        no_pair_waits_for_a_slow_node_of_five
    ]
}

fn count(calls: [(&str, u64); 4]) -> CommandStats {
    calls
        .map(|(command, calls)| (command.to_owned(), calls))
        .into()
}

/// The third node does not exist, so every request needs both nodes, and the counts are exact. The
/// clock of one node is two hours ahead.
async fn a_pair_is_two_round_trips_and_so_many_commands(_: Store) {
    let set = Quorum::forgetful(2);
    set.nodes[1].set_clock(Clock::Ahead(Duration::from_secs(2 * 3600)));
    let proxy = Proxy::to(set.nodes[0].port());
    let locks = client(&url([proxy.port(), set.nodes[1].port(), free_port()]));
    locks.ready(SOON).await.unwrap(); // opens all connections, which load scripts
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let before = [0, 1].map(|at| set.nodes[at].command_stats());
    let requests = proxy.traffic().chunks_up;

    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let spent = |at: usize| {
        let mut spent = set.nodes[at].command_stats_since(&before[at]);
        // The harness tells newer servers its name. These commands do not count.
        spent.retain(|command, _| !command.contains("client"));
        spent
    };
    for at in [0, 1] {
        eventually("the last request is counted", SOON, async || {
            spent(at).get("evalsha") == Some(&2)
        })
        .await;
        assert_eq!(
            spent(at),
            count([("evalsha", 2), ("get", 2), ("set", 2), ("time", 1)])
        );
    }
    assert_eq!(proxy.traffic().chunks_up - requests, 2);
}

/// No node gets a request twice, even if the client has not waited for its answer.
async fn a_pair_is_two_round_trips_with_two_of_five_nodes_down(_: Store) {
    const PAIRS: u64 = 20;
    let set = Quorum::start(5);
    let ways: Vec<_> = set
        .nodes
        .iter()
        .map(|node| Proxy::to(node.port()))
        .collect();
    for up in [5, 4, 3] {
        if let Some(node) = set.nodes.get(up) {
            node.kill();
        }
        let locks = client(&url(ways.iter().map(Proxy::port)));
        locks.ready(SOON).await.unwrap(); // opens all connections
        give_back(held_everywhere(&locks, &set.nodes[..up]).await).await;
        let evaluated = |at: usize| *set.nodes[at].command_stats().get("evalsha").unwrap_or(&0);
        let sent = |at: usize| ways[at].traffic().chunks_up;
        let before: Vec<_> = (0..up).map(|at| (evaluated(at), sent(at))).collect();

        for _ in 0..PAIRS {
            let guard = locks.mutex("a").acquire().await.unwrap();
            let number = guard.grant_id().as_u64() >> 10;
            let now = std::time::UNIX_EPOCH.elapsed().unwrap() + Duration::from_secs(1);
            assert!(u128::from(number) < now.as_micros(), "{number}");
            give_back(guard).await;
        }

        let seldom = PAIRS / 5; // for moments in which the machine stalls
        for (at, (evaluated_before, sent_before)) in before.into_iter().enumerate() {
            eventually("the last request is counted", SOON, async || {
                evaluated(at) >= evaluated_before + 2 * PAIRS
            })
            .await;
            let scripts = evaluated(at) - evaluated_before;
            let chunks = sent(at) - sent_before;
            println!(
                "{up} nodes up, node {at}: {scripts} scripts, {chunks} flushes in {PAIRS} pairs"
            );
            assert!(scripts <= 2 * PAIRS + seldom, "{scripts}");
            assert!(chunks <= 2 * PAIRS + seldom, "{chunks}");
        }
    }
}

async fn nodes_that_draw_different_numbers_cost_one_round_trip_more(_: Store) {
    let set = Quorum::start(2);
    let ports = set.nodes.iter().map(RedisServer::port);
    let locks = client(&url(ports.chain([free_port()])));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let evaluated = || set.nodes[1].command_stats()["evalsha"];
    for (apart, scripts) in [(true, 3), (false, 2)] {
        if apart {
            has_drawn(&set.nodes[0], Duration::from_secs(3600));
        }
        let before = evaluated();

        give_back(locks.mutex("a").acquire().await.unwrap()).await;

        eventually("the last request is counted", SOON, async || {
            evaluated() == before + scripts
        })
        .await;
    }
}

/// The tasks share one lane. When the leader gives up, the next task becomes the leader and
/// continues with the same pauses.
async fn tasks_of_one_process_that_wait_ask_as_one(store: Store) {
    let in_the_way = store.client().mutex("a").acquire().await.unwrap();
    let (locks, counts) = store.counted(crate::store::DEFAULT);
    locks.ready(SOON).await.unwrap();
    let seconds = 8;
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for millis in (4_000..=seconds * 1_000).step_by(200) {
        let lock = locks.mutex("a").wait(Duration::from_millis(millis));
        tasks.spawn(async move { lock.acquire().await });
    }
    while let Some(outcome) = tasks.join_next().await {
        assert_eq!(kind(outcome.unwrap()), ErrorKind::Timeout);
    }
    let asked = counts.enqueued();
    let elapsed = began.elapsed();
    println!("asked {asked} times in {elapsed:?}");
    // At most five requests a second, and a few more because the first pauses are shorter.
    let most = 5 * elapsed.as_secs() as usize + 8;
    assert!((5..=most).contains(&asked), "{asked}");
    give_back(in_the_way).await;
}

/// All its answers come after all pairs. The other nodes are asked as often as without it.
async fn no_pair_waits_for_a_slow_node_of_five(_: Store) {
    const PAIRS: u64 = 20;
    let set = Quorum::start(5);
    let (ways, url) = proxied(&set);
    let locks = client(&url);
    locks.ready(SOON).await.unwrap(); // opens all connections
    let evaluated = |at: usize| *set.nodes[at].command_stats().get("evalsha").unwrap_or(&0);
    for slow in [0, 2, 4] {
        give_back(held_everywhere(&locks, &set.nodes).await).await;
        nothing_is_left_at(&set.nodes).await;
        ways[slow].freeze();
        let heard = ways[slow].traffic().bytes_down;
        let before: Vec<_> = (0..5)
            .map(|at| (evaluated(at), ways[at].traffic().chunks_up))
            .collect();

        for _ in 0..PAIRS {
            give_back(locks.mutex("a").acquire().await.unwrap()).await;
        }

        assert_eq!(ways[slow].traffic().bytes_down, heard);
        let seldom = PAIRS / 5; // if the machine stands still for a moment
        let others = (0..5).filter(|at| *at != slow);
        for at in others {
            let (evaluated_before, sent_before) = before[at];
            eventually("the last request is counted", SOON, async || {
                evaluated(at) >= evaluated_before + 2 * PAIRS
            })
            .await;
            let scripts = evaluated(at) - evaluated_before;
            let chunks = ways[at].traffic().chunks_up - sent_before;
            println!("node {slow} is slow, node {at}: {scripts} scripts, {chunks} flushes");
            assert!(scripts <= 2 * PAIRS + seldom, "{scripts}");
            assert!(chunks <= 2 * PAIRS + seldom, "{chunks}");
        }
        ways[slow].thaw();
        nothing_is_left_at(&set.nodes).await;
    }
}
