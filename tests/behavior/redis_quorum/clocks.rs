//! Tests with nodes that have a wrong clock.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Guard;
use lockcore::backend::{self, EventSink, FULL, Fault, Id, Name, Namespace, Request};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::stores::Server as _;

use super::{client, has_drawn, has_ticket, held_everywhere, warnings};
use crate::store::{Kind, LEASE, PATIENCE, SOON, Store, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        tokens_rise_although_a_node_is_an_hour_ahead
        tokens_rise_although_a_clock_jumps_ahead_after_it_was_read
        a_ticket_lives_for_its_ttl_although_its_number_is_ahead_of_the_clocks
        a_node_whose_clock_is_days_ahead_does_not_raise_the_numbers
        a_ticket_is_shown_with_its_number_whatever_nodes_answer
    ]
}

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The URL for a client that reaches only these nodes. Each client is new, so it has seen no
/// tokens.
fn of(set: &Quorum, reached: [usize; 3]) -> String {
    let reached = reached.map(|at| set.nodes[at].port());
    url(reached.into_iter().chain([free_port(), free_port()]))
}

/// Each majority shares one node with the majority before it. Only the first majority includes the
/// node whose clock is ahead.
async fn tokens_rise_although_a_node_is_an_hour_ahead(_: Store) {
    let set = Quorum::forgetful(5);
    set.nodes[0].set_clock(Clock::Ahead(2 * HOUR));
    let mut last = 0;
    for reached in [[0, 1, 2], [2, 3, 4], [4, 1, 3], [0, 3, 2], [1, 2, 4]] {
        let locks = client(&of(&set, reached));
        let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
        let token = guard.grant_id().as_u64();
        assert!(token > last, "{token} after {last}");
        last = token;
        give_back(guard).await;
    }
    let warnings = warnings(&set.url()).await;
    let differ = warnings
        .iter()
        .any(|text| text.contains("the clocks of the nodes differ"));
    assert!(differ, "{warnings:?}");
}

/// Tokens rise too if the clients connect before the clock jumps, so that they believe this node.
async fn tokens_rise_although_a_clock_jumps_ahead_after_it_was_read(_: Store) {
    let set = Quorum::forgetful(5);
    let reached = [[0, 1, 2], [2, 3, 4], [4, 1, 3], [0, 3, 2], [1, 2, 4]];
    let clients = reached.map(|reached| client(&of(&set, reached)));
    for locks in &clients {
        give_back(locks.mutex("warm").wait(SOON).acquire().await.unwrap()).await;
    }

    set.nodes[0].set_clock(Clock::Ahead(2 * HOUR));

    let mut last = 0;
    for locks in &clients {
        let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
        let token = guard.grant_id().as_u64();
        assert!(token > last, "{token} after {last}");
        last = token;
        give_back(guard).await;
    }
}

async fn a_ticket_lives_for_its_ttl_although_its_number_is_ahead_of_the_clocks(_: Store) {
    let set = Quorum::forgetful(3);
    set.nodes[0].set_clock(Clock::Ahead(2 * HOUR));
    let locks = client(&set.url());

    let guard = held_everywhere(&locks, &set.nodes).await;

    for node in &set.nodes {
        let tickets = client(&node.url()).inspect("a").await.unwrap();
        assert!(tickets[0].remaining <= LEASE, "{tickets:?}");
    }
    give_back(guard).await;
}

async fn a_node_whose_clock_is_days_ahead_does_not_raise_the_numbers(_: Store) {
    let set = Quorum::forgetful(5);
    set.nodes[0].set_clock(Clock::Ahead(10 * DAY));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap();

    for reached in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]] {
        let locks = client(&url(reached.map(|at| set.nodes[at].port())));
        for _ in 0..5 {
            let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
            let number = u128::from(guard.grant_id().as_u64() >> 10);
            assert!(number < (now + DAY).as_micros(), "{number}");
            give_back(guard).await;
        }
    }

    // The node cannot complete a majority with two others.
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let three = backend::open(&of(&set, [0, 1, 2])).unwrap();
    let three = three.connect(events).await.unwrap();
    let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
    let id = Id::parse(&"1".repeat(32));
    let request = Request::new(name, id.unwrap(), FULL, FULL, SOON);
    let error = three
        .enqueue(Arc::new(request), PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(error.fault(), Fault::Retry);
    let text = error.to_string();
    assert!(text.contains("more than a day ahead"), "{text}");
}

/// The third node gets the request late, and assigns a greater number than the ticket has.
async fn a_ticket_is_shown_with_its_number_whatever_nodes_answer(_: Store) {
    let set = Quorum::start(3);
    let slow = Proxy::to(set.nodes[2].port());
    let locks = client(&url([
        set.nodes[0].port(),
        set.nodes[1].port(),
        slow.port(),
    ]));
    give_back(held_everywhere(&locks, &set.nodes).await).await;
    slow.delay(Duration::from_millis(300), Duration::ZERO);

    // In the first round, the first two nodes assign the number that the client proposes. In the
    // second round, they have seen a greater number, so the client tells them the number of the
    // ticket. In the third round, they assign the number after it.
    for ahead in [None, Some(HOUR / 2), None] {
        for node in &set.nodes[..2] {
            ahead.into_iter().for_each(|ahead| has_drawn(node, ahead));
        }
        has_drawn(&set.nodes[2], HOUR);
        let guard = locks.mutex("a").acquire().await.unwrap();
        has_ticket(&client(&set.nodes[2].url())).await;
        shows_its_number(&set, &guard).await;
        give_back(guard).await;
        eventually("the slow node is free again", SOON, async || {
            set.nodes
                .iter()
                .all(|node| node.litter_but_marks("test").is_empty())
        })
        .await;
    }
}

/// Checks that the ticket is shown with its number by every two nodes.
async fn shows_its_number(set: &Quorum, guard: &Guard) {
    let [one, other, ahead] = [0, 1, 2].map(|at| set.nodes[at].port());
    let number = guard.grant_id().as_u64() >> 10;
    for ports in [
        [one, other, free_port()],
        [one, ahead, free_port()],
        [other, ahead, free_port()],
    ] {
        let tickets = client(&url(ports)).inspect("a").await.unwrap();
        let numbers: Vec<_> = tickets.iter().map(|ticket| ticket.ticket).collect();
        assert_eq!(numbers, [number]);
    }
}
