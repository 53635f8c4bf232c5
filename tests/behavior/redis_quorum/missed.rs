//! Releases that one node has missed, because it got them too early or could not carry them out. They are repeated there.

use std::time::Duration;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_quorum::Quorum;
use tokio::runtime::Handle;

use super::late::{in_another_runtime, with_the_last_behind};
use super::{client, held_everywhere, nothing_is_left_at};
use crate::store::{Kind, SOON, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_release_that_overtakes_the_enqueue_at_a_slow_node_is_repeated_there
        a_release_that_one_node_could_not_carry_out_is_repeated_there
    ]
}

/// They are on connections of two runtimes. Both go on running.
async fn a_release_that_overtakes_the_enqueue_at_a_slow_node_is_repeated_there(_: Store) {
    let set = Quorum::start(3);
    let proxy = Proxy::to(set.nodes[2].port());
    let locks = with_the_last_behind(&proxy, &set).await;
    let connected = proxy.open_connections();

    let (runtime, guard, proxy, locks) = in_another_runtime(move |runtime, here: Handle| {
        let warm = runtime.block_on(locks.mutex("there").acquire()).unwrap();
        runtime.block_on(give_back(warm));
        here.block_on(eventually("all are connected", SOON, async || {
            proxy.open_connections() > connected
        }));
        proxy.delay(Duration::from_secs(2), Duration::ZERO);
        let before = proxy.traffic().chunks_up;
        let guard = runtime.block_on(locks.mutex("a").acquire()).unwrap();
        here.block_on(eventually("it is under way", SOON, async || {
            proxy.traffic().chunks_up > before
        }));
        proxy.delay(Duration::ZERO, Duration::ZERO);
        (runtime, guard, proxy, locks)
    })
    .await;
    let scripts = || set.nodes[2].command_stats()["evalsha"];
    let before = scripts();

    give_back(guard).await;

    eventually("both have arrived", SOON, async || scripts() >= before + 2).await;
    nothing_is_left_at(&set.nodes).await;
    drop((locks, proxy));
    runtime.shutdown_background();
}

/// At this node the key of the lock has something else in it for a moment.
async fn a_release_that_one_node_could_not_carry_out_is_repeated_there(_: Store) {
    let set = Quorum::start(3);
    let locks = client(&set.url());
    let guard = held_everywhere(&locks, &set.nodes).await;
    let (node, key) = (&set.nodes[2], "test:1:{a}");
    let ticket: String = node.command(&["GET", key]);
    node.command::<()>(&["SET", key, "something else"]);

    give_back(guard).await;
    node.command::<()>(&["SET", key, &ticket]);

    nothing_is_left_at(&set.nodes).await;
}
