//! Tests of what a client reports about single nodes: nodes that are down, that come back, that are
//! named twice, and whose addresses are moved.

use libtest_mimic::Trial;
use lockcore::events::Event;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::RedisServer;
use tracing::Level;

use crate::faults::builder;
use crate::moved::{self, Place};
use crate::store::{Kind, SOON, Store, give_back, soon};
use crate::traces::{self, LOGGED};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        a_node_that_is_down_is_reported_once_and_so_is_its_return
        a_node_that_is_down_from_the_start_is_reported
        nodes_are_reported_once_through_an_outage_of_the_quorum
        a_server_under_two_names_is_reported_while_locks_work
        clients_exclude_each_other_after_the_addresses_of_a_majority_are_moved
    ]
}

fn address(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

/// How many warnings of this client contain `part`.
fn warnings(owner: &str, part: &str) -> usize {
    let lines = traces::lines(owner);
    let is_warning = |line: &&traces::Line| line.level == Level::WARN && line.text.contains(part);
    lines.iter().filter(is_warning).count()
}

/// The client has two connections to each node. Both of them lose the node.
async fn a_node_that_is_down_is_reported_once_and_so_is_its_return(_: Store) {
    let set = Quorum::start(3);
    let owner = format!("{LOGGED}node-down");
    let locks = builder(set.url()).owner(&owner).op_timeout(SOON);
    let locks = locks.build().unwrap();
    locks.ready(SOON).await.unwrap();
    let mut events = locks.events();
    let node = &set.nodes[0];

    for round in 1..=2 {
        node.kill();
        let next = soon(events.recv()).await.unwrap();
        assert_eq!(next, Event::NodeDown(address(node.port())));
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        node.restart();
        let next = soon(events.recv()).await.unwrap();
        assert_eq!(next, Event::NodeUp(address(node.port())));
        let of_node = || warnings(&owner, &address(node.port()));
        eventually("both are logged", SOON, async || of_node() >= 2 * round).await;
        assert_eq!(warnings(&owner, "has lost a node"), round);
    }
    locks.shutdown(SOON).await.unwrap();
    assert_eq!(warnings(&owner, &address(node.port())), 4);
}

async fn a_node_that_is_down_from_the_start_is_reported(_: Store) {
    let set = Quorum::start(3);
    let node = &set.nodes[2];
    node.kill();
    let locks = builder(set.url()).op_timeout(SOON).build().unwrap();
    let mut events = locks.events();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let next = soon(events.recv()).await.unwrap();
    assert_eq!(next, Event::NodeDown(address(node.port())));
}

/// The client tries to connect again and again while two of three nodes are down.
async fn nodes_are_reported_once_through_an_outage_of_the_quorum(_: Store) {
    let set = Quorum::start(3);
    let owner = format!("{LOGGED}quorum-down");
    let locks = builder(set.url()).owner(&owner).op_timeout(SOON);
    let locks = locks.build().unwrap();
    locks.ready(SOON).await.unwrap();
    let mut events = locks.events();
    let nodes = &set.nodes[..2];

    for node in nodes {
        node.kill();
    }
    eventually(
        "it has tried in vain for three times",
        2 * SOON,
        async || {
            let lines = traces::lines(&owner);
            let tries = lines
                .iter()
                .filter(|line| line.text.contains("still out of reach"));
            tries.count() >= 3
        },
    )
    .await;
    for node in nodes {
        node.restart();
    }

    let (mut down, mut up) = (0, 0);
    while up < 2 {
        match soon(events.recv()).await.unwrap() {
            Event::NodeDown(_) => down += 1,
            Event::NodeUp(_) => up += 1,
            _ => {}
        }
    }
    assert_eq!((down, warnings(&owner, "has lost a node")), (2, 2));
}

async fn a_server_under_two_names_is_reported_while_locks_work(_: Store) {
    let set = Quorum::start(2);
    let [one, other] = [0, 1].map(|at| set.nodes[at].port());
    let again = Proxy::to(one);
    let owner = format!("{LOGGED}two-names");
    let url = url([one, other, again.port()]);
    let locks = builder(url).owner(&owner).op_timeout(SOON).build().unwrap();
    let mut events = locks.events();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let next = soon(events.recv()).await.unwrap();
    let of_both = [one, again.port()].map(|port| Event::NodeDown(address(port)));
    assert!(of_both.contains(&next), "{next:?}");
    eventually("it is logged", SOON, async || {
        warnings(&owner, "it is the same server as") >= 1
    })
    .await;
}

/// Two of three nodes are moved. Without a comparison, one client would have a majority with the
/// earlier two, and the other one with the later two.
async fn clients_exclude_each_other_after_the_addresses_of_a_majority_are_moved(_: Store) {
    let [earlier, later] = [(); 2].map(|()| Quorum::start(2));
    let third = Quorum::start(1);
    let ways: Vec<_> = (earlier.nodes.iter())
        .map(|node| Proxy::to(node.port()))
        .collect();
    let ports = ways.iter().map(Proxy::port);
    let place = Place {
        url: url(ports.chain(third.nodes.iter().map(RedisServer::port))),
        ways,
        earlier: earlier.nodes,
        later: later.nodes,
        beside: Box::new(third),
    };
    moved::clients_exclude_each_other_after_the_move(place).await;
}
