//! Tests of the cost of a verb at the server: calls and bytes.

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use super::{KEY, UNSEEN, ask, asking, connect, enqueue, id, line, now, release, renew, script};
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_uncontended_pair_and_a_hand_over_take_a_fixed_number_of_calls
        the_cost_of_a_verb_does_not_depend_on_the_number_of_holders
        no_verb_reads_a_state_twice_or_prolongs_a_key_that_is_not_there
        the_memory_of_a_name_at_the_server_is_bounded
        empty_places_in_line_do_not_accumulate
        an_expired_mark_costs_no_more_calls
        a_request_that_is_refused_at_once_changes_nothing
    ]
}

/// The calls that scripts make during `work`. The calls of EVAL and EVALSHA are left out.
fn calls(server: &RedisServer, work: impl FnOnce()) -> Vec<(String, u64)> {
    let before = server.command_stats();
    work();
    let mut calls: Vec<_> = server.command_stats_since(&before).into_iter().collect();
    // The Redis client of this test sends its name to newer servers. These calls are left out too.
    calls.retain(|(command, _)| !command.contains("eval") && !command.contains("client"));
    calls
}

fn count(calls: &[(&str, u64)]) -> Vec<(String, u64)> {
    let owned = |(command, calls): &(&str, u64)| ((*command).to_owned(), *calls);
    calls.iter().map(owned).collect()
}

/// The fact compares numbers of calls, which are exact. Times would depend on the machine.
async fn an_uncontended_pair_and_a_hand_over_take_a_fixed_number_of_calls(_: Store) {
    let server = RedisServer::start();
    let pair = || {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 0);
        assert_eq!(release(&server, "x", "0"), 1);
    };
    pair();
    let alone = calls(&server, pair);
    assert_eq!(alone, count(&[("get", 2), ("set", 2), ("time", 1)]));

    // This connection hears the wake-ups.
    let mut connection = connect(&server);
    let mut hears = connection.as_pubsub();
    hears.subscribe("t:1:wake:00").unwrap();
    for id in ["holds", "next", "last"] {
        enqueue(&server, id, "10", "60000");
    }
    let hand_over = hand_over(&server, "holds");
    assert_eq!(hand_over, the_calls_of_a_hand_over());
}

/// The calls of a hand-over: the holder releases and enqueues again, behind the waiters.
fn hand_over(server: &RedisServer, holds: &str) -> Vec<(String, u64)> {
    calls(server, || {
        assert_eq!(release(server, holds, "0"), 1);
        assert_eq!(enqueue(server, holds, "10", "60000")[0], 1);
    })
}

fn the_calls_of_a_hand_over() -> Vec<(String, u64)> {
    let once = [("hdel", 1), ("hget", 1), ("hmget", 1), ("hset", 1)];
    let rest = [("get", 2), ("publish", 1), ("set", 2), ("time", 2)];
    let mut expected = count(&[&once[..], &rest[..]].concat());
    expected.sort();
    expected
}

/// Enqueue, release and renew make as many calls for 3 holders as for 1,000. This includes a
/// renewal of several tickets of one name.
async fn the_cost_of_a_verb_does_not_depend_on_the_number_of_holders(_: Store) {
    let cost = |holders: usize| {
        let server = RedisServer::start();
        let ids: Vec<_> = (0..holders).map(|number| id(&number.to_string())).collect();
        for id in &ids {
            let record = asking(id, "1", "100000", "60000");
            server.command::<i64>(&["EVAL", &script("enqueue"), "1", KEY, &record, UNSEEN]);
        }
        let more = asking(&id("more"), "1", "100000", "60000");
        let first = &ids[..2];
        calls(&server, || {
            server.command::<i64>(&["EVAL", &script("enqueue"), "1", KEY, &more, UNSEEN]);
            assert_eq!(release(&server, "more", "0"), 1);
            let mut call = redis::cmd("EVAL");
            call.arg(script("renew")).arg(2).arg(&[KEY, KEY]);
            for id in first {
                call.arg(&[id, "0000000001", "60000"]);
            }
            let reply: Vec<i64> = call.query(&mut connect(&server)).unwrap();
            assert_eq!(reply, [0, 60000, -1].repeat(2));
        })
    };
    let few = cost(3);

    assert_eq!(cost(1_000), few);

    let all: u64 = few.iter().map(|(_, calls)| calls).sum();
    assert!(all <= 29, "{few:?}");
}

/// One ticket holds, and others wait.
async fn no_verb_reads_a_state_twice_or_prolongs_a_key_that_is_not_there(_: Store) {
    let server = RedisServer::start();
    for name in ["holds", "w", "x"] {
        enqueue(&server, name, "10", "60000");
    }
    let verbs: [(&str, &dyn Fn()); 4] = [
        ("renew the holder", &|| {
            assert_eq!(renew(&server, "holds")[0], 0)
        }),
        ("renew a waiter", &|| assert_eq!(renew(&server, "w")[0], 1)),
        ("repeat a waiter", &|| {
            assert_eq!(enqueue(&server, "w", "10", "60000")[0], 1)
        }),
        ("release a waiter", &|| {
            assert_eq!(release(&server, "w", "0"), 1)
        }),
    ];
    for (verb, work) in verbs {
        let calls = calls(&server, work);
        let calls = |name: &str| {
            calls
                .iter()
                .find(|call| call.0 == name)
                .map_or(0, |call| call.1)
        };
        assert_eq!(calls("get"), 1, "{verb}");
        let releases = verb.starts_with("release");
        assert_eq!(calls("pexpire"), u64::from(!releases), "{verb}");
    }
}

/// The limits are for a 64-bit server.
async fn the_memory_of_a_name_at_the_server_is_bounded(_: Store) {
    let server = RedisServer::start();
    let taken = || {
        let usage = |key: &String| -> usize { server.command(&["MEMORY", "USAGE", key]) };
        server.keys("*").iter().map(usage).sum::<usize>()
    };
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    let held = taken();
    for number in 0..1_000 {
        enqueue(&server, &number.to_string(), "10", "60000");
    }
    let waiter = (taken() - held) / 1_000;
    for number in 0..1_000 {
        release(&server, &number.to_string(), "0");
    }
    assert_eq!(release(&server, "holds", "0"), 1);
    let idle = taken();

    println!("{idle} bytes idle, {held} held, {waiter} for each waiter");
    assert!(idle <= 80 && held <= 240 && waiter <= 320);
}

/// One waiter stays while thousands behind it come and leave. When this waiter leaves too, no verb
/// may have to read all the empty entries of the line up to the next waiter.
async fn empty_places_in_line_do_not_accumulate(_: Store) {
    let server = RedisServer::start();
    for id in ["holds", "stays"] {
        enqueue(&server, id, "10", "60000");
    }
    for turn in 0..2_000 {
        assert_eq!(enqueue(&server, "comes", "10", "60000")[0], 1);
        assert_eq!(release(&server, "comes", "0"), 1);
        if turn % 500 == 0 {
            enqueue(&server, &format!("late {turn}"), "10", "60000");
        }
    }

    let state: String = server.command(&["GET", KEY]);
    let places = |at: usize| state[at..at + 13].parse::<u64>().unwrap();
    assert!(places(43) - places(30) <= 256, "{state}");
    let all = [
        "holds",
        "stays",
        "late 0",
        "late 500",
        "late 1000",
        "late 1500",
    ];
    assert_eq!(line(&server), all);
    for (place, next) in all.into_iter().enumerate() {
        assert_eq!(renew(&server, next)[0], 0, "{next} holds");
        assert_eq!(release(&server, next, "0"), 1, "{place}");
    }
    assert_eq!(server.keys("*"), [KEY]);
}

/// The mark is removed although the line is never empty. Only for an empty line is the state
/// written in the short form.
async fn an_expired_mark_costs_no_more_calls(_: Store) {
    let server = RedisServer::start();
    let mut connection = connect(&server);
    let mut hears = connection.as_pubsub();
    hears.subscribe("t:1:wake:00").unwrap();
    for id in ["holds", "next", "last"] {
        enqueue(&server, id, "10", "60000");
    }
    assert_eq!(release(&server, "other", "1"), 0);
    let marked = now(&server);
    eventually("run out", SOON, async || now(&server) > marked + 1).await;
    hand_over(&server, "holds");

    assert_eq!(hand_over(&server, "next"), the_calls_of_a_hand_over());
}

/// The request is refused because it does not wait, or because its capacity does not fit. The
/// script writes nothing, so nothing reaches a replica or the append-only file.
async fn a_request_that_is_refused_at_once_changes_nothing(_: Store) {
    let forms: [&[(&str, &str)]; 3] = [
        &[("holds", "10")],
        &[("holds", "10"), ("waits", "10")],
        &[("reads", "1"), ("reads too", "1")],
    ];
    for form in forms {
        let server = RedisServer::start();
        for (name, permits) in form {
            enqueue(&server, name, permits, "60000");
        }
        let changes = || -> u64 {
            let info: String = server.command(&["INFO", "persistence"]);
            let line = info
                .lines()
                .find_map(|line| line.strip_prefix("rdb_changes_since_last_save:"));
            line.unwrap().parse().unwrap()
        };
        let before = changes();

        for (capacity, waits, status) in [(10, false, 2), (11, true, 3)] {
            let reply = ask(&server, "new", capacity, waits).unwrap();
            let reply: Vec<i64> = redis::from_redis_value(reply).unwrap();
            assert_eq!(reply[0], status, "{form:?}");
        }

        assert_eq!(changes(), before, "{form:?}");
    }
}
