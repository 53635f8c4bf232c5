//! Tests with nodes that restart, with their data or without.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::ports::free_port;
use tests::redis_quorum::{KEEPS_ALL, Quorum, folder, url};
use tests::redis_server::RedisServer;
use tests::stores::Server as _;

use super::{client, held_everywhere, warnings};
use crate::store::{Kind, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_node_that_restarted_empty_does_not_vote
        a_node_that_keeps_every_write_votes_at_once
        a_node_that_does_not_wait_for_its_disk_while_it_rewrites_its_file_does_not_vote_at_once
    ]
}

/// One client holds the lock at the first three nodes. The third node restarts without its data. If
/// it voted now, it would make a majority with the last two nodes.
async fn a_node_that_restarted_empty_does_not_vote(_: Store) {
    let set = Quorum::forgetful(5);
    let ports: Vec<_> = set.nodes.iter().map(|node| node.port()).collect();
    let holds = client(&url([
        ports[0],
        ports[1],
        ports[2],
        free_port(),
        free_port(),
    ]));
    let other = client(&url(ports.clone()));
    give_back(other.mutex("b").acquire().await.unwrap()).await;
    let guard = holds.mutex("a").acquire().await.unwrap();

    set.nodes[2].restart();
    assert_eq!(set.nodes[2].litter("test"), Vec::<String>::new());

    // First a client that was connected before the restart, and then a new one.
    for locks in [&other, &client(&url(ports.clone()))] {
        let outcome = locks.mutex("a").wait(SOON / 2).acquire().await;
        assert_eq!(kind(outcome), ErrorKind::Timeout);
    }
    let warnings = warnings(&url(ports.clone())).await;
    let aside = warnings
        .iter()
        .find(|text| text.contains("it does not vote for another"));
    assert!(
        aside.is_some_and(|text| text.contains(&ports[2].to_string())),
        "{warnings:?}"
    );
    assert!(guard.is_valid());
    give_back(guard).await;
    give_back(other.mutex("a").wait(SOON).acquire().await.unwrap()).await;

    // With one more node down, three nodes can vote, which is enough. With two more down, two nodes
    // can vote, which is not enough.
    set.nodes[0].kill();
    give_back(other.mutex("a").wait(SOON).acquire().await.unwrap()).await;
    set.nodes[1].kill();
    let error = other
        .mutex("a")
        .wait(SOON / 10)
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error
            .to_string()
            .contains("3 of 5 nodes are up, 2 of them can vote"),
        "{error}"
    );

    // By its clock, the node has now been up for long enough to vote.
    set.nodes[2].set_clock(Clock::Ahead(Duration::from_secs(2 * 3600)));
    let later = client(&url(ports));
    give_back(later.mutex("a").wait(SOON).acquire().await.unwrap()).await;
}

async fn a_node_that_keeps_every_write_votes_at_once(_: Store) {
    let set = Quorum::start(3);
    let locks = client(&set.url());
    let guard = held_everywhere(&locks, &set.nodes).await;

    for node in &set.nodes[..2] {
        node.kill();
        node.restart();
    }

    let other = client(&set.url());
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    set.nodes[2].kill();
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    eventually("the nodes that are back renew it", SOON, async || {
        let longer = guard.remaining() + Duration::from_millis(1);
        guard.ensure(longer).await.is_ok()
    })
    .await;
    give_back(guard).await;
    give_back(other.mutex("a").wait(SOON).acquire().await.unwrap()).await;
}

async fn a_node_that_does_not_wait_for_its_disk_while_it_rewrites_its_file_does_not_vote_at_once(
    _: Store,
) {
    let set = Quorum::start(2);
    let (folder, lossy) = (folder(), ["--no-appendfsync-on-rewrite", "yes"]);
    let dir = ["--dir", folder.path().to_str().unwrap()];
    let node = RedisServer::with(&[&KEEPS_ALL[..], &lossy, &dir].concat());
    let ports = [set.nodes[0].port(), set.nodes[1].port(), node.port()];

    let warnings = warnings(&url(ports)).await;

    let aside = warnings
        .iter()
        .filter(|text| text.contains("it does not vote for another"));
    let aside: Vec<_> = aside.collect();
    assert!(
        aside.len() == 1 && aside[0].contains(&ports[2].to_string()),
        "{warnings:?}"
    );
}
