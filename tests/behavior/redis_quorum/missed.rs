//! Tests of releases that one node has missed, because they came before the enqueue or because the
//! node could not execute them.

use std::sync::Arc;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_quorum::Quorum;

use super::late::{acquired_with_an_enqueue_under_way, with_the_last_behind};
use super::{client, held_everywhere, nothing_is_left_at};
use crate::store::{Kind, SOON, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_release_that_overtakes_the_enqueue_at_a_slow_node_leaves_nothing
        a_release_that_one_node_could_not_carry_out_is_repeated_there
    ]
}

/// The enqueue and the release are on connections of two runtimes. Both runtimes continue to run.
async fn a_release_that_overtakes_the_enqueue_at_a_slow_node_leaves_nothing(_: Store) {
    let set = Quorum::start(3);
    let proxy = Arc::new(Proxy::to(set.nodes[2].port()));
    let locks = with_the_last_behind(&proxy, &set).await;
    let (runtime, guard) = acquired_with_an_enqueue_under_way(&proxy, &locks).await;
    let scripts = || set.nodes[2].command_stats()["evalsha"];
    let before = scripts();

    give_back(guard).await;

    eventually("both have arrived", SOON, async || scripts() >= before + 2).await;
    nothing_is_left_at(&set.nodes).await;
    drop((locks, proxy));
    runtime.shutdown_background();
}

/// For a moment, a stranger's value is in the key of the lock at one node, so the release fails
/// there.
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
