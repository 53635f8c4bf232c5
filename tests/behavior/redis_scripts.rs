//! The scripts of the Redis store, one call at a time: moments that no client can bring about at will.

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use crate::store::{Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_enqueue_repeated_after_its_lease_does_not_hold
        an_enqueue_repeated_in_time_is_the_same_ticket
        an_enqueue_after_its_release_is_refused_while_the_mark_is_there
        a_line_longer_than_a_page_is_walked_to_its_end
        who_waits_behind_an_unheard_grant_looks_again_when_it_ends
    ]
}

macro_rules! script {
    ($verb:literal) => {
        concat!(
            include_str!("../../lockcore/src/backend/redis/scripts/line.lua"),
            "\n",
            include_str!(concat!(
                "../../lockcore/src/backend/redis/scripts/",
                $verb,
                ".lua"
            ))
        )
    };
}

const KEYS: [&str; 3] = ["t:1:{a}", "t:1:{a}:queue", "t:1:{a}:gone:x"];

fn enqueue(server: &RedisServer, id: &str, permits: &str, ttl_millis: &str) -> Vec<i64> {
    let mut call = vec!["EVAL", script!("enqueue"), "3"];
    call.extend(KEYS);
    call.extend([
        "t:1:wake:",
        id,
        permits,
        "10",
        ttl_millis,
        "1",
        "0",
        "00",
        "me",
    ]);
    server.command(&call)
}

fn release(server: &RedisServer, id: &str, mark_millis: &str) -> Vec<i64> {
    let mut call = vec!["EVAL", script!("release"), "3"];
    call.extend(KEYS);
    call.extend(["t:1:wake:", id, mark_millis]);
    server.command(&call)
}

/// Nobody has looked at the line since.
async fn lease_is_over(server: &RedisServer, id: &str) {
    let written: String = server.command(&["HGET", KEYS[0], id]);
    let expires: u64 = written.split(':').next().unwrap().parse().unwrap();
    eventually("the lease is over", SOON, async || {
        let (seconds, micros): (u64, u64) = server.command(&["TIME"]);
        seconds * 1000 + micros / 1000 > expires
    })
    .await;
}

/// The reply to the first was lost, and the lease ran out before the repetition.
async fn an_enqueue_repeated_after_its_lease_does_not_hold(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "z", "10", "50")[0], 0);
    lease_is_over(&server, "z").await;

    // It is still written down, as nobody has looked since.
    let repeated = enqueue(&server, "z", "10", "60000");

    let queued: usize = server.command(&["ZCARD", "t:1:{a}:queue"]);
    match repeated[0] {
        4 => assert_eq!(queued, 0),
        answer => panic!("answered {answer}, with {queued} tickets written down"),
    }
    assert_eq!(enqueue(&server, "other", "10", "60000")[0], 0);
}

async fn an_enqueue_repeated_in_time_is_the_same_ticket(_: Store) {
    let server = RedisServer::start();
    let holds = enqueue(&server, "x", "10", "60000");
    let waits = enqueue(&server, "w", "1", "60000");
    assert_eq!((holds[0], waits[0]), (0, 1));

    assert_eq!(enqueue(&server, "x", "10", "60000")[..2], holds[..2]);
    assert_eq!(enqueue(&server, "w", "1", "60000")[..2], waits[..2]);
    assert_eq!(server.command::<usize>(&["ZCARD", KEYS[1]]), 2);
}

async fn an_enqueue_after_its_release_is_refused_while_the_mark_is_there(_: Store) {
    let server = RedisServer::start();
    assert_eq!(release(&server, "x", "60000"), [0]);

    assert_eq!(enqueue(&server, "x", "10", "60000"), [4]);
    assert_eq!(server.command::<usize>(&["EXISTS", KEYS[0], KEYS[1]]), 0);
}

/// Readers of 1 of 10, more than one page of the walk, then one who wants all: who leaves, wakes just whom it lets in.
async fn a_line_longer_than_a_page_is_walked_to_its_end(_: Store) {
    let server = RedisServer::start();
    for number in 0..10 {
        assert_eq!(enqueue(&server, &format!("r{number}"), "1", "60000")[0], 0);
    }
    assert_eq!(enqueue(&server, "all", "10", "60000")[0], 1);
    for number in 10..40 {
        assert_eq!(enqueue(&server, &format!("r{number}"), "1", "60000")[0], 1);
    }
    for number in 0..9 {
        assert_eq!(release(&server, &format!("r{number}"), "0"), [1]);
        assert_eq!(
            enqueue(&server, "all", "10", "60000")[0],
            1,
            "let in too early"
        );
    }
    assert_eq!(release(&server, "r9", "0"), [1]);
    assert_eq!(enqueue(&server, "all", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "r10", "1", "60000")[0], 1);
    assert_eq!(release(&server, "all", "0"), [1]);
    // Ten of the thirty, in their order.
    for number in 10..40 {
        let status = enqueue(&server, &format!("r{number}"), "1", "60000")[0];
        assert_eq!(status, i64::from(number >= 20), "r{number}");
    }
}

/// A waiter that is dead when its turn comes costs two seconds, also those who find that out by coming later.
async fn who_waits_behind_an_unheard_grant_looks_again_when_it_ends(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "50")[0], 0);
    assert_eq!(enqueue(&server, "dead", "10", "60000")[0], 1);
    lease_is_over(&server, "holds").await;

    let waits = enqueue(&server, "late", "10", "60000");

    let [1, _, _, recheck] = waits[..] else {
        panic!("{waits:?}");
    };
    assert!((1..=2000).contains(&recheck), "{recheck} ms");
}
