//! The scripts of the Redis store, one call at a time: moments that no client can bring about at will.

use libtest_mimic::Trial;
use redis::Value;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use crate::store::{Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_pair_of_one_and_a_hand_over_are_so_many_calls
        what_a_verb_costs_does_not_depend_on_how_many_hold
        no_verb_reads_a_state_twice_or_prolongs_a_key_that_is_not_there
        what_a_name_takes_at_the_server
        an_enqueue_repeated_after_its_lease_does_not_hold
        a_waiter_repeated_after_its_lease_is_taken_out_of_the_line
        an_enqueue_repeated_in_time_is_the_same_ticket
        an_enqueue_after_its_release_is_refused_while_the_mark_is_there
        a_line_longer_than_a_page_is_walked_to_its_end
        who_waits_behind_an_unheard_grant_looks_again_when_it_ends
        one_ticket_alone_is_one_key_and_none_is_a_number
        ends_that_are_lost_are_made_anew
        who_held_by_a_hash_that_is_lost_is_told_and_keeps_nobody_out_for_longer_than_its_lease
        places_that_are_empty_do_not_become_many
        a_crowd_that_has_died_keeps_nobody_out
        who_comes_behind_waiters_that_died_is_told_when_to_look_again
        a_renewal_that_cannot_see_the_line_makes_nothing_smaller
        what_is_left_of_a_line_without_its_state_keeps_nobody_out
        a_holder_that_is_named_twice_in_a_batch_stays_small
        a_waiter_that_is_named_twice_in_a_batch_is_told_twice_when_to_look
        tickets_of_a_batch_that_name_one_twice_are_renewed_in_their_order
        one_that_a_batch_lets_in_and_renews_is_told_by_the_reply_alone
        a_ticket_that_is_dead_is_released_alike_in_each_form_of_the_state
        what_is_not_the_state_of_a_lock_is_refused_and_left_as_it_is
        the_next_in_line_is_woken_past_those_who_died
        the_rest_of_a_batch_is_replicated_after_a_message_was_denied
        a_verb_that_is_denied_a_command_costs_neither_permits_nor_turns
        a_denied_message_lets_in_no_more_than_there_is
        a_denied_message_costs_neither_permits_nor_the_next_its_turn
        permits_are_counted_anew_after_a_command_was_denied_half_way
        no_release_and_no_renewal_shortens_the_life_of_a_number_ahead_of_the_clock
        one_more_than_the_most_who_may_hold_is_answered_busy
        an_exhausted_name_keeps_those_it_has_let_in
        a_name_with_a_mark_is_not_forgotten
        a_lease_that_a_batch_lets_in_and_renews_is_as_long_as_it_says
        a_mark_that_has_run_out_costs_no_more_calls
        holders_of_a_lost_hash_keep_their_permits_until_the_last_has_expired
        a_replica_says_so_to_whoever_renews_or_releases
        a_server_that_may_not_write_says_so_to_whoever_asks_whatever_it_holds
        who_cannot_have_it_at_once_changes_nothing
    ]
}

/// As the store puts it together.
macro_rules! script {
    ($verb:literal) => {
        put_together(include_str!(concat!(
            "../../lockcore/src/backend/redis/scripts/",
            $verb,
            ".lua"
        )))
    };
}

fn put_together(script: &str) -> String {
    let line = include_str!("../../lockcore/src/backend/redis/scripts/line.lua");
    let record = include_str!("../../lockcore/src/backend/redis/scripts/record.lua");
    script
        .replace("-- include line.lua", line)
        .replace("-- include record.lua", record)
}

const KEY: &str = "t:1:{a}";
const LINE: &str = "t:1:{a}:line";
const ENDS: &str = "t:1:{a}:ends";

/// An id that can be read.
fn id(name: &str) -> String {
    format!("{name:.>32}")
}

/// As a client is connected, beside the harness.
fn connect(server: &RedisServer) -> redis::Connection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_connection().unwrap()
}

fn enqueue(server: &RedisServer, name: &str, permits: &str, ttl_millis: &str) -> Vec<i64> {
    let record = asking(&id(name), permits, "10", ttl_millis);
    let call = ["EVAL", &script!("enqueue"), "1", KEY, &record, UNSEEN];
    match server.command(&call) {
        ticket @ Value::BulkString(_) => vec![0, redis::from_redis_value(ticket).unwrap()],
        reply => redis::from_redis_value(reply).unwrap(),
    }
}

/// The record that an enqueue sends.
fn asking(id: &str, permits: &str, capacity: &str, ttl_millis: &str) -> String {
    format!("+{ttl_millis:0>12}{id}:{permits:0>10}:{capacity:0>10}:00:me")
}

/// No number of a ticket.
const UNSEEN: &str = "0000000000000000";

fn release(server: &RedisServer, name: &str, mark_millis: &str) -> i64 {
    let mark = if mark_millis == "0" { "" } else { mark_millis };
    let departure = id(name) + mark;
    match server.command(&["EVAL", &script!("release"), "1", KEY, &departure]) {
        Value::Int(found) => found,
        reply => redis::from_redis_value::<[i64; 1]>(reply).unwrap()[0],
    }
}

fn renew(server: &RedisServer, name: &str) -> Vec<i64> {
    renew_with(server, name, "10")
}

fn renew_with(server: &RedisServer, name: &str, permits: &str) -> Vec<i64> {
    let (id, permits) = (id(name), format!("{permits:0>10}"));
    let call = ["EVAL", &script!("renew"), "1", KEY, &id, &permits, "60000"];
    server.command(&call)
}

/// A batch: of each ticket its name, its permits and its ttl.
fn renew_all(server: &RedisServer, keys: &[&str], tickets: &[[&str; 3]]) -> Vec<i64> {
    let mut call = redis::cmd("EVAL");
    call.arg(script!("renew")).arg(keys.len()).arg(keys);
    for [name, permits, ttl] in tickets {
        call.arg(id(name)).arg(format!("{permits:0>10}")).arg(ttl);
    }
    call.query(&mut connect(server)).unwrap()
}

/// The ids of all tickets, in the order of their numbers.
fn line(server: &RedisServer) -> Vec<String> {
    let names = records(server).into_iter();
    names
        .map(|record| record[29..61].trim_start_matches('.').to_owned())
        .collect()
}

fn records(server: &RedisServer) -> Vec<String> {
    let reply: Vec<Value> = server.command(&["EVAL", &script!("inspect"), "1", KEY]);
    let records = reply.into_iter().skip(1);
    let mut records: Vec<String> = records
        .map(|record| redis::from_redis_value(record).unwrap())
        .collect();
    records.sort();
    records
}

/// Where the record of a ticket is: under which key, and in which field.
fn place(server: &RedisServer, name: &str) -> Option<(String, Option<String>)> {
    let state: Option<String> = server.command(&["GET", KEY]);
    if state?.contains(&id(name)) {
        return Some((KEY.into(), None));
    }
    let found: Option<String> = server.command(&["HGET", LINE, &id(name)]);
    let field = found.filter(|found| found.len() == 13);
    Some((LINE.into(), Some(field.unwrap_or_else(|| id(name)))))
}

fn record(server: &RedisServer, name: &str) -> Option<String> {
    let is_it = |record: &String| record[29..61] == id(name);
    records(server).into_iter().find(is_it)
}

fn expires(server: &RedisServer, name: &str) -> u64 {
    let record = record(server, name).unwrap();
    match record[16..29].strip_prefix('+') {
        Some(behind) => {
            record[..16].parse::<u64>().unwrap() / 1000 + behind.parse::<u64>().unwrap()
        }
        None => record[16..29].parse().unwrap(),
    }
}

fn now(server: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = server.command(&["TIME"]);
    seconds * 1000 + micros / 1000
}

/// Nobody has looked at the line since.
async fn lease_is_over(server: &RedisServer, name: &str) {
    let expires = expires(server, name);
    eventually("the lease is over", SOON, async || now(server) > expires).await;
}

/// Ends a lease that was long enough to do anything in.
fn end_lease(server: &RedisServer, name: &str) {
    let record = record(server, name).unwrap();
    let over = format!("{}{:013}{}", &record[..16], 1, &record[29..]);
    match place(server, name).unwrap() {
        (key, None) => {
            let state: String = server.command(&["GET", &key]);
            server.command::<()>(&["SET", &key, &state.replace(&record, &over), "KEEPTTL"]);
        }
        (key, Some(field)) => {
            server.command::<()>(&["HSET", &key, &field, &over]);
            server.command::<()>(&["ZADD", ENDS, "XX", "1", &field]);
        }
    }
}

/// Calls inside the scripts meanwhile, not of the scripts.
fn calls(server: &RedisServer, work: impl FnOnce()) -> Vec<(String, u64)> {
    let before = server.command_stats();
    work();
    let mut calls: Vec<_> = server.command_stats_since(&before).into_iter().collect();
    // Nor of the library that the test asks by, which tells newer servers its name.
    calls.retain(|(command, _)| !command.contains("eval") && !command.contains("client"));
    calls
}

fn count(calls: &[(&str, u64)]) -> Vec<(String, u64)> {
    let owned = |(command, calls): &(&str, u64)| ((*command).to_owned(), *calls);
    calls.iter().map(owned).collect()
}

/// Exact, where times depend on the machine.
async fn a_pair_of_one_and_a_hand_over_are_so_many_calls(_: Store) {
    let server = RedisServer::start();
    let pair = || {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 0);
        assert_eq!(release(&server, "x", "0"), 1);
    };
    pair();
    let alone = calls(&server, pair);
    assert_eq!(alone, count(&[("get", 2), ("set", 2), ("time", 1)]));

    // Some connection hears it.
    let mut connection = connect(&server);
    let mut hears = connection.as_pubsub();
    hears.subscribe("t:1:wake:00").unwrap();
    for id in ["holds", "next", "last"] {
        enqueue(&server, id, "10", "60000");
    }
    let hand_over = hand_over(&server, "holds");
    assert_eq!(hand_over, the_calls_of_a_hand_over());
}

/// From one holder to the next, who comes behind those who wait.
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

/// Nor does a renewal, however many of one name there are in a batch.
async fn what_a_verb_costs_does_not_depend_on_how_many_hold(_: Store) {
    let cost = |holders: usize| {
        let server = RedisServer::start();
        let ids: Vec<_> = (0..holders).map(|number| id(&number.to_string())).collect();
        for id in &ids {
            let record = asking(id, "1", "100000", "60000");
            server.command::<i64>(&["EVAL", &script!("enqueue"), "1", KEY, &record, UNSEEN]);
        }
        let more = asking(&id("more"), "1", "100000", "60000");
        let first = &ids[..2];
        calls(&server, || {
            server.command::<i64>(&["EVAL", &script!("enqueue"), "1", KEY, &more, UNSEEN]);
            assert_eq!(release(&server, "more", "0"), 1);
            let mut call = redis::cmd("EVAL");
            call.arg(script!("renew")).arg(2).arg(&[KEY, KEY]);
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

/// Where one holds, and others wait.
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

/// With a name of 12 characters and 16 of an owner, on a 64-bit server.
async fn what_a_name_takes_at_the_server(_: Store) {
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

    println!("{idle} bytes idle, {held} held, {waiter} for each who waits");
    assert!(idle <= 80 && held <= 240 && waiter <= 320);
}

/// The reply to the first was lost, and the lease ran out before the repetition.
async fn an_enqueue_repeated_after_its_lease_does_not_hold(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "z", "10", "50")[0], 0);
    lease_is_over(&server, "z").await;

    // It is still written down, as nobody has looked since.
    let repeated = enqueue(&server, "z", "10", "60000");

    assert_eq!((repeated[0], line(&server).len()), (4, 0));
    assert_eq!(enqueue(&server, "other", "10", "60000")[0], 0);
}

/// In the middle of the line, where nobody has found it dead.
async fn a_waiter_repeated_after_its_lease_is_taken_out_of_the_line(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "next", "10", "60000")[0], 1);
    assert_eq!(enqueue(&server, "w", "10", "50")[0], 1);
    lease_is_over(&server, "w").await;

    assert_eq!(enqueue(&server, "w", "10", "60000"), [4]);

    assert_eq!(line(&server), ["holds", "next"]);
    assert_eq!(server.command::<usize>(&["HLEN", LINE]), 2);
}

async fn an_enqueue_repeated_in_time_is_the_same_ticket(_: Store) {
    let server = RedisServer::start();
    let holds = enqueue(&server, "x", "10", "60000");
    let waits = enqueue(&server, "w", "1", "60000");
    assert_eq!((holds[0], waits[0]), (0, 1));

    assert_eq!(enqueue(&server, "x", "10", "60000")[..2], holds[..2]);
    assert_eq!(enqueue(&server, "w", "1", "60000")[..2], waits[..2]);
    assert_eq!(line(&server), ["x", "w"]);
}

async fn an_enqueue_after_its_release_is_refused_while_the_mark_is_there(_: Store) {
    for others in [0, 1, 2] {
        let server = RedisServer::start();
        assert_eq!(release(&server, "x", "60000"), 0);
        for other in 0..others {
            enqueue(&server, &other.to_string(), "1", "60000");
        }

        assert_eq!(enqueue(&server, "x", "1", "60000"), [4]);
        assert_eq!(line(&server).len(), others);
        for other in 0..others {
            assert_eq!(release(&server, &other.to_string(), "0"), 1);
        }

        assert_eq!(enqueue(&server, "x", "1", "60000"), [4]);
        assert_eq!(enqueue(&server, "y", "1", "60000")[0], 0);
    }
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
        assert_eq!(release(&server, &format!("r{number}"), "0"), 1);
        assert_eq!(
            enqueue(&server, "all", "10", "60000")[0],
            1,
            "let in too early"
        );
    }
    assert_eq!(release(&server, "r9", "0"), 1);
    assert_eq!(enqueue(&server, "all", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "r10", "1", "60000")[0], 1);
    assert_eq!(release(&server, "all", "0"), 1);
    // Ten of the thirty, in their order.
    for number in 10..40 {
        let status = enqueue(&server, &format!("r{number}"), "1", "60000")[0];
        assert_eq!(status, i64::from(number >= 20), "r{number}");
    }
}

/// A waiter that is dead when its turn comes costs two seconds, also those who find that out by coming later.
async fn who_waits_behind_an_unheard_grant_looks_again_when_it_ends(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "dead", "10", "60000")[0], 1);
    end_lease(&server, "holds");

    let waits = enqueue(&server, "late", "10", "60000");

    let [1, _, _, recheck] = waits[..] else {
        panic!("{waits:?}");
    };
    assert!((1..=2000).contains(&recheck), "{recheck} ms");
}

async fn one_ticket_alone_is_one_key_and_none_is_a_number(_: Store) {
    let server = RedisServer::start();
    for turn in 0..2 {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 0);
        assert_eq!(server.keys("*"), [KEY], "turn {turn}");
        assert_eq!(enqueue(&server, "w", "10", "60000")[0], 1);
        assert_eq!(line(&server), ["x", "w"]);
        assert_eq!(release(&server, "x", "0"), 1);
        assert_eq!(server.keys("*"), [KEY], "turn {turn}");
        assert_eq!(release(&server, "w", "0"), 1);
        assert_eq!(server.keys("*"), [KEY], "turn {turn}");
    }
    let last: String = server.command(&["GET", KEY]);
    assert_eq!((last.len(), last.parse::<u64>().is_ok()), (16, true));
    let encoding: String = server.command(&["OBJECT", "ENCODING", KEY]);
    assert_eq!(encoding, "int");
}

/// By whichever verb finds it gone.
async fn ends_that_are_lost_are_made_anew(_: Store) {
    for verb in [
        "enqueue",
        "renew",
        "renew another",
        "release",
        "release another",
    ] {
        let server = RedisServer::start();
        for id in ["a", "b", "c"] {
            assert_eq!(enqueue(&server, id, "3", "60000")[0], 0);
        }
        assert_eq!(enqueue(&server, "waits", "3", "60000")[0], 1);
        assert_eq!(server.command::<i64>(&["DEL", ENDS]), 1);

        match verb {
            "enqueue" => assert_eq!(enqueue(&server, "d", "1", "60000")[0], 1),
            "renew" => assert_eq!(renew(&server, "a")[0], 0),
            "renew another" => assert_eq!(renew(&server, "waits")[0], 1),
            "release" => assert_eq!(release(&server, "c", "0"), 1),
            _ => assert_eq!(release(&server, "waits", "0"), 1),
        }

        let holders = ["a", "b", if verb == "release" { "waits" } else { "c" }];
        for holder in holders {
            let ends: Option<f64> = server.command(&["ZSCORE", ENDS, &id(holder)]);
            assert_eq!(
                ends,
                Some(expires(&server, holder) as f64),
                "{verb}: {holder}"
            );
            assert_eq!(renew(&server, holder)[0], 0);
        }
        let left: i64 = server.command(&["PTTL", ENDS]);
        assert!(left > 86_400_000 - 60_000, "lives for {left} ms");
    }
}

/// Of several holders, the hash has what each of them holds.
async fn who_held_by_a_hash_that_is_lost_is_told_and_keeps_nobody_out_for_longer_than_its_lease(
    _: Store,
) {
    let server = RedisServer::start();
    for id in ["a", "b"] {
        assert_eq!(enqueue(&server, id, "5", "60000")[0], 0);
    }
    assert_eq!(server.command::<i64>(&["DEL", LINE]), 1);

    assert_eq!(enqueue(&server, "c", "1", "60000")[0], 1);
    assert_eq!(renew(&server, "a")[0], 2);
    assert_eq!(release(&server, "b", "0"), 0);
    assert_eq!(enqueue(&server, "c", "1", "60000")[0], 1);
    server.command::<()>(&["ZADD", ENDS, "1", &id("a"), "1", &id("b")]);

    assert_eq!(enqueue(&server, "c", "1", "60000")[0], 0);
    assert_eq!(line(&server), ["c"]);
}

/// Exclusive tickets `t1`, `t2` and so on that live, and behind them others that do not any more. The first holds.
fn fill(server: &RedisServer, live: u32, dead: u32) {
    const FILL: &str = "local now = redis.call('TIME')[1] * 1000 \
        local function record(i, expires) \
            return string.format('%016d%013d', i, expires) .. string.rep('.', 31 - #tostring(i)) .. 't' .. i .. ':0000000010:0000000010:00:me' \
        end \
        local line, n = KEYS[1] .. ':line', ARGV[1] + ARGV[2] \
        for i = 2, n do \
            local record = record(i, i <= tonumber(ARGV[1]) and now + 60000 or now - 1) \
            local place = string.format('%013d', i) \
            redis.call('HSET', line, place, record, string.sub(record, 30, 61), place) \
        end \
        local state = string.format('%016dL%013d%013d%013d%010d%010d', 10000, 0, 2, n + 1, 10, 10) \
        redis.call('SET', KEYS[1], state .. record(1, now + 60000), 'PX', '86400000')";
    let (live, dead) = (live.to_string(), dead.to_string());
    server.command::<()>(&["EVAL", FILL, "1", KEY, &live, &dead]);
}

/// Somebody waits from the beginning; those who come behind it leave again. When it leaves too, no verb is to look at all
/// the places between it and the next.
async fn places_that_are_empty_do_not_become_many(_: Store) {
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

/// Whether somebody who lives waits before it, behind whom nobody is looked at, or it comes next; and whether or not
/// others live behind the crowd.
async fn a_crowd_that_has_died_keeps_nobody_out(_: Store) {
    for (before, behind) in [(1, 0), (2, 0), (2, 130)] {
        let server = RedisServer::start();
        fill(&server, before, 10_000 - before - behind);
        assert_eq!(renew(&server, "t1")[0], 0);
        for number in 0..behind {
            let (id, place) = (
                id(&format!("behind{number}")),
                before + (10_000 - before - behind) + number + 1,
            );
            let place = format!("{place:013}");
            let record = format!(
                "{:016}9999999999999{id}:0000000010:0000000010:00:me",
                10_001 + number
            );
            server.command::<()>(&["HSET", LINE, &place, &record, &id, &place]);
        }
        if behind > 0 {
            let state: String = server.command(&["GET", KEY]);
            let state = format!("{}{:013}{}", &state[..43], 10_001, &state[56..]);
            server.command::<()>(&["SET", KEY, &state]);
        }

        let mut tries = 0;
        eventually("there is room", SOON, async || {
            tries += 1;
            enqueue(&server, "x", "10", "60000")[0] == 1
        })
        .await;

        // Which part of the line is looked at for dead ones, the clock says.
        assert!(tries == 1 || behind > 0, "{tries} tries");

        assert_eq!(line(&server).last().unwrap(), "x");
    }
    let server = RedisServer::start();
    fill(&server, 10_000, 0);
    for _ in 0..10 {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 2);
    }
}

/// Its reply is the place for it: a message would be there before the reply.
async fn who_comes_behind_waiters_that_died_is_told_when_to_look_again(_: Store) {
    let server = RedisServer::start();
    for id in ["holds", "dead", "dead too"] {
        enqueue(&server, id, "10", "60000");
    }
    end_lease(&server, "holds");

    let waits = enqueue(&server, "late", "10", "60000");

    let [1, _, _, recheck] = waits[..] else {
        panic!("{waits:?}");
    };
    assert!((1..=2010).contains(&recheck), "{recheck} ms");
}

/// A later one could not tell any more who is let in by it.
async fn a_renewal_that_cannot_see_the_line_makes_nothing_smaller(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "x", "10", "60000");
    enqueue(&server, "w", "1", "60000");
    server.command::<()>(&["RENAME", LINE, "aside"]);
    server.command::<()>(&["SET", LINE, "foreign"]);

    assert_eq!(renew_with(&server, "x", "1"), [3, -1, -1]);
    server.command::<()>(&["RENAME", "aside", LINE]);

    let record = record(&server, "x").unwrap();
    assert_eq!(record.split(':').nth(1), Some("0000000010"));
    assert_eq!(renew_with(&server, "x", "1")[0], 0);
    assert_eq!(renew_with(&server, "w", "1")[0], 0);
}

/// What was read of a batch before is not put down over what the batch has made of it.
async fn a_holder_that_is_named_twice_in_a_batch_stays_small(_: Store) {
    let server = RedisServer::start();
    for (name, permits) in [("x", "5"), ("y", "5"), ("w", "4")] {
        enqueue(&server, name, permits, "60000");
    }

    let batch = [["x", "1", "60000"], ["x", "5", "60000"]];
    let reply = renew_all(&server, &[KEY, KEY], &batch);

    assert_eq!(reply, [0, 60000, -1].repeat(2));
    assert_eq!(renew(&server, "w")[0], 0, "it was let in");
    assert_eq!(&record(&server, "x").unwrap()[62..72], "0000000001");
}

async fn a_waiter_that_is_named_twice_in_a_batch_is_told_twice_when_to_look(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "holds", "10", "60000");
    enqueue(&server, "w", "10", "60000");

    let reply = renew_all(&server, &[KEY, KEY], &[["w", "10", "60000"]; 2]);

    let [1, 60000, first, 1, 60000, second] = reply[..] else {
        panic!("{reply:?}");
    };
    assert_eq!(first, second);
    assert!((50_000..=60_000).contains(&first), "{first} ms");
}

/// Also if a ticket of another name stands between both, and only one of them can take the short way.
async fn tickets_of_a_batch_that_name_one_twice_are_renewed_in_their_order(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "x", "10", "60000");

    let batch = [
        ["x", "9", "60000"],
        ["y", "10", "60000"],
        ["x", "10", "500000"],
    ];
    let reply = renew_all(&server, &[KEY, "t:1:{b}", KEY], &batch);

    assert_eq!(reply, [0, 60000, -1, 2, -1, -1, 0, 500000, -1]);
    assert!(expires(&server, "x") > now(&server) + 400_000);
    assert_eq!(&record(&server, "x").unwrap()[62..72], "0000000009");
}

/// It hears of its turn once.
async fn one_that_a_batch_lets_in_and_renews_is_told_by_the_reply_alone(_: Store) {
    let server = RedisServer::start();
    let mut connection = connect(&server);
    let mut hears = connection.as_pubsub();
    hears.subscribe("t:1:wake:00").unwrap();
    for name in ["holds", "next", "last"] {
        enqueue(
            &server,
            name,
            if name == "holds" { "10" } else { "4" },
            "60000",
        );
    }

    let batch = [["holds", "2", "60000"], ["next", "4", "60000"]];
    let reply = renew_all(&server, &[KEY, KEY], &batch);

    assert_eq!(reply, [0, 60000, -1].repeat(2));
    let told: String = hears.get_message().unwrap().get_payload().unwrap();
    assert!(told.starts_with(&id("last")), "{told}");
}

/// It was there, and nobody had got in instead.
async fn a_ticket_that_is_dead_is_released_alike_in_each_form_of_the_state(_: Store) {
    let forms: [&[(&str, &str)]; 4] = [
        &[("dead", "10")],
        &[("dead", "10"), ("waits", "10")],
        &[("dead", "10"), ("reads", "1"), ("reads too", "1")],
        &[("dead", "5"), ("holds too", "5"), ("waits", "10")],
    ];
    for form in forms {
        for mark in ["0", "60000"] {
            let server = RedisServer::start();
            for (name, permits) in form {
                enqueue(&server, name, permits, "60000");
            }
            end_lease(&server, "dead");

            assert_eq!(release(&server, "dead", mark), 1, "{form:?}, {mark}");
            assert_eq!(release(&server, "dead", mark), 0, "{form:?}, {mark}");
        }
    }
    for waiters in [
        &["dead"][..],
        &["dead", "w"],
        &["w", "dead"],
        &["w", "dead", "last"],
    ] {
        let server = RedisServer::start();
        enqueue(&server, "holds", "10", "60000");
        for waiter in waiters {
            enqueue(&server, waiter, "10", "60000");
        }
        end_lease(&server, "dead");

        assert_eq!(release(&server, "dead", "0"), 1, "{waiters:?}");
        assert_eq!(release(&server, "dead", "0"), 0, "{waiters:?}");
    }
}

/// By every verb, and the message says which key it is.
async fn what_is_not_the_state_of_a_lock_is_refused_and_left_as_it_is(_: Store) {
    let server = RedisServer::start();
    let line = format!("{:016}L{}", 7, "x".repeat(59));
    let record = format!("{:016}{:013}{}", 7, 9_999_999_999_999u64, "y".repeat(60));
    let numbers = "1".repeat(200);
    let like_a_number = format!("{}e00000009", &now(&server).to_string()[..7]);
    let foreign = [
        "",
        "x",
        "12345",
        "-1",
        "0000000000000000x",
        "0000000000000000L",
        "1795321000.12345",
        "some text of 16.",
        "0x1234567890abcd",
        "1e10000000000000",
        "  12345678901234",
        &like_a_number,
        "inf             ",
        &line,
        &record,
        &numbers,
    ];
    for value in foreign {
        server.command::<()>(&["SET", KEY, value]);
        let record = asking(&id("x"), "10", "10", "60000");
        for (script, arguments) in [
            (script!("enqueue"), &[&*record, UNSEEN][..]),
            (script!("inspect"), &[]),
            (script!("forget"), &[]),
        ] {
            let mut call = redis::cmd("EVAL");
            call.arg(script).arg(1).arg(KEY).arg(arguments);
            let answer = call.query::<Value>(&mut connect(&server));
            let error = answer.expect_err(value);
            assert_eq!(error.code(), Some("WRONGTYPE"), "{value:?}");
            assert!(error.to_string().contains(KEY), "{error}");
        }
        assert_eq!(renew(&server, "x"), [3, -1, -1], "{value:?}");
        assert_eq!(release(&server, "x", "0"), 2, "{value:?}");
        assert_eq!(release(&server, "x", "60000"), 2, "{value:?}");
        assert_eq!(server.command::<String>(&["GET", KEY]), value);
        assert_eq!(server.keys("*"), [KEY]);
    }
}

/// Neither a line nor several holders.
async fn what_is_left_of_a_line_without_its_state_keeps_nobody_out(_: Store) {
    for permits in ["10", "5"] {
        let server = RedisServer::start();
        enqueue(&server, "x", permits, "60000");
        enqueue(&server, "y", permits, "60000");
        enqueue(&server, "w", "10", "60000");
        server.command::<i64>(&["DEL", KEY]);

        for lost in ["x", "y", "w"] {
            assert_eq!(renew(&server, lost)[0], 2, "{lost} is lost");
        }
        assert_eq!(enqueue(&server, "new", permits, "60000")[0], 0);
        assert_eq!(line(&server), ["new"]);
        assert_eq!(release(&server, "x", "0"), 0);
        assert_eq!(renew(&server, "y")[0], 2);
        let second = enqueue(&server, "second", permits, "60000");
        assert_eq!(second[0], i64::from(permits == "10"));
        assert_eq!(line(&server), ["new", "second"]);
        for lost in ["x", "y", "w"] {
            assert_eq!(renew(&server, lost)[0], 2, "{lost} is lost");
        }
        for id in ["new", "second"] {
            assert_eq!(renew(&server, id)[0], 0);
            assert_eq!(release(&server, id, "0"), 1);
        }
        assert_eq!(server.keys("*"), [KEY]);
    }
}

/// The short way from the holder to the next in line is for one who lives.
async fn the_next_in_line_is_woken_past_those_who_died(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "holds", "10", "60000");
    enqueue(&server, "dead", "10", "60000");
    enqueue(&server, "reads", "1", "60000");
    enqueue(&server, "reads too", "1", "60000");
    end_lease(&server, "dead");

    assert_eq!(release(&server, "holds", "0"), 1);

    assert_eq!(line(&server), ["reads", "reads too"]);
    for id in ["reads", "reads too"] {
        // Nobody listens to the channel: woken all the same, and cut short for it.
        assert!(expires(&server, id) <= now(&server) + 2000, "{id}");
    }
}

/// Messages are not replicated, all else is, whatever becomes of a message.
async fn the_rest_of_a_batch_is_replicated_after_a_message_was_denied(_: Store) {
    let server = RedisServer::start();
    let replica = RedisServer::replica_of(&server);
    let rights = ["+@all", "-publish", "~*", "nopass", "on"];
    server.command::<()>(&[&["ACL", "SETUSER", "mute"], &rights[..]].concat());
    let (holds, x) = (id("holds"), id("x"));
    let alone = format!("{:016}9999999999999{x}:0000000010:0000000010:00:me", 7);
    for verb in ["release", "renew"] {
        server.flush();
        enqueue(&server, "holds", "10", "60000");
        enqueue(&server, "reads", "1", "60000");
        let other = "t:1:{b}";
        server.command::<()>(&["SET", other, &alone]);
        let mut call = redis::cmd("EVAL");
        let (failed, done): (&[i64], &[i64]) = if verb == "release" {
            call.arg(script!("release")).arg(2).arg(&[KEY, other]);
            call.arg(&[&holds, &x]);
            (&[2], &[1])
        } else {
            call.arg(script!("renew")).arg(2).arg(&[KEY, other]);
            call.arg(&[&holds, "0000000001", "60000", &x, "0000000010", "60000"]);
            (&[3, -1, -1], &[0, 60000, -1])
        };

        let client = redis::Client::open(server.url_with_user("mute", "mute")).unwrap();
        let reply: Vec<i64> = call.query(&mut client.get_connection().unwrap()).unwrap();

        assert_eq!(reply, [failed, done].concat(), "{verb}");
        let free = if verb == "release" { "9" } else { "8" };
        assert_eq!(enqueue(&server, "rest", free, "60000")[0], 0, "{verb}");
        assert_eq!(enqueue(&server, "more", "1", "60000")[0], 1, "{verb}");
        eventually("replicated", SOON, async || {
            let at = |server: &RedisServer| -> Option<String> { server.command(&["GET", other]) };
            at(&server).as_ref() != Some(&alone) && at(&server) == at(&replica)
        })
        .await;
    }
}

/// Takes a command from whoever calls the scripts here, meanwhile.
fn without<T>(server: &RedisServer, command: &str, work: impl FnOnce() -> T) -> T {
    let user: String = server.command(&["ACL", "WHOAMI"]);
    server.command::<()>(&["ACL", "SETUSER", &user, &format!("-{command}")]);
    let done = work();
    server.command::<()>(&["ACL", "SETUSER", &user, &format!("+{command}")]);
    done
}

/// Whichever it is. What an enqueue may have left is given back, and a release repeated, as clients do.
async fn a_verb_that_is_denied_a_command_costs_neither_permits_nor_turns(_: Store) {
    let rights = include_str!("../../lockcore/src/backend/redis/scripts/rights.lua");
    let commands: Vec<_> = rights.split("{ '").skip(1).collect();
    let commands = commands.iter().map(|call| call.split('\'').next().unwrap());
    let commands: Vec<_> = commands.map(str::to_lowercase).collect();
    assert!(commands.len() > 15, "{commands:?}");
    // The tickets, oldest first, and the permits of each, out of ten.
    let lines: [&[(&str, u64)]; 5] = [
        &[("a", 10)],
        &[("a", 10), ("w", 10), ("x", 10)],
        &[("a", 4), ("w", 8), ("x", 2)],
        &[("a", 4), ("b", 3), ("w", 5), ("x", 2)],
        &[("a", 4), ("b", 3), ("w", 2)],
    ];
    let verbs = ["enqueue", "release a", "release w", "smaller a", "renew w"];
    let server = RedisServer::start();
    let mut connection = connect(&server);
    let mut hears = connection.as_pubsub();
    hears.subscribe("t:1:wake:00").unwrap();
    for (line, verb) in lines.iter().flat_map(|line| verbs.map(|verb| (line, verb))) {
        for (command, one_is_dead) in commands
            .iter()
            .flat_map(|command| [(command, false), (command, true)])
        {
            let case = format!("{line:?}, {verb} without {command}, one is dead: {one_is_dead}");
            server.flush();
            let mut there = line.to_vec();
            for (name, permits) in &there {
                enqueue(&server, name, &permits.to_string(), "60000");
            }
            if one_is_dead {
                end_lease(&server, there.remove(there.len() / 2).0);
            }

            let whole = call(verb);
            let whole: Vec<_> = whole.iter().map(String::as_str).collect();
            let _: Result<Value, _> = without(&server, command, || server.try_command(&whole));
            // Its client may have died, and nobody come after it.
            for key in server.keys("*") {
                let life: i64 = server.command(&["PTTL", &key]);
                assert!(life > 0, "{case}: {key} stays");
            }

            match verb.split_once(' ') {
                Some(("release", name)) => {
                    assert_ne!(release(&server, name, "0"), 2, "{case}");
                    there.retain(|(other, _)| *other != name);
                }
                Some(("smaller", name)) => {
                    let it = there.iter_mut().find(|(other, _)| *other == name);
                    it.into_iter().for_each(|(_, permits)| *permits = 1);
                }
                Some(_) => {}
                None => assert_ne!(release(&server, "n", "60000"), 2, "{case}"),
            }
            let mut held = 0;
            for (name, permits) in &there {
                held += permits;
                let stands = renew_with(&server, name, &permits.to_string())[0];
                assert_eq!(stands, i64::from(held > 10), "{case}: {name}");
            }
            for (name, _) in &there {
                assert_eq!(release(&server, name, "0"), 1, "{case}: {name}");
            }
            assert_eq!(enqueue(&server, "all", "10", "60000")[0], 0, "{case}");
            assert_eq!(release(&server, "all", "0"), 1, "{case}");
        }
    }
}

/// A verb of one ticket: of `n`, which is new, or of one that is there.
fn call(verb: &str) -> Vec<String> {
    let (script, arguments) = match verb.split_once(' ') {
        Some(("release", name)) => (script!("release"), vec![id(name)]),
        Some((size, name)) => {
            let permits = if size == "smaller" {
                "0000000001"
            } else {
                "0000000010"
            };
            let arguments = vec![id(name), permits.into(), "60000".into()];
            (script!("renew"), arguments)
        }
        None => {
            let record = asking(&id("n"), "2", "10", "60000");
            (script!("enqueue"), vec![record, UNSEEN.into()])
        }
    };
    [
        vec!["EVAL".into(), script, "1".into(), KEY.into()],
        arguments,
    ]
    .concat()
}

/// The asker is let in first, and the one behind it could not be told.
async fn a_denied_message_lets_in_no_more_than_there_is(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "a", "2", "60000")[0], 0);
    assert_eq!(enqueue(&server, "b", "4", "60000")[0], 0);
    assert_eq!(enqueue(&server, "w", "6", "60000")[0], 1);
    assert_eq!(enqueue(&server, "x", "2", "60000")[0], 1);
    end_lease(&server, "b");

    let renewed = without(&server, "publish", || renew_with(&server, "w", "6"));

    assert_eq!(renewed, [3, -1, -1]);
    assert_eq!(enqueue(&server, "n", "1", "60000")[0], 1);
    for (holds, permits) in [("a", "2"), ("w", "6"), ("x", "2")] {
        assert_eq!(renew_with(&server, holds, permits)[0], 0, "{holds}");
    }
}

async fn a_denied_message_costs_neither_permits_nor_the_next_its_turn(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "a", "5", "60000")[0], 0);
    assert_eq!(enqueue(&server, "b", "5", "60000")[0], 0);
    assert_eq!(enqueue(&server, "w", "5", "60000")[0], 1);

    let released = without(&server, "publish", || release(&server, "a", "0"));

    assert_eq!(released, 2);
    assert_eq!(renew_with(&server, "w", "5"), [0, 60000, -1]);
    assert_eq!(release(&server, "b", "0"), 1);
    assert_eq!(release(&server, "w", "0"), 1);
    assert_eq!(enqueue(&server, "all", "10", "60000")[0], 0);
}

/// Between the record of a holder and its end.
async fn permits_are_counted_anew_after_a_command_was_denied_half_way(_: Store) {
    let server = RedisServer::start();
    for (name, permits) in [("a", "4"), ("b", "3"), ("c", "3")] {
        assert_eq!(enqueue(&server, name, permits, "60000")[0], 0);
    }

    let released = without(&server, "zrem", || release(&server, "a", "0"));

    assert_eq!(released, 2);
    assert_eq!(enqueue(&server, "n", "4", "60000")[0], 0);
    assert_eq!(enqueue(&server, "more", "1", "60000")[0], 1);
}

/// The key lives until a day after the clock has passed the number: else a clock that was put back gives it out again.
async fn no_release_and_no_renewal_shortens_the_life_of_a_number_ahead_of_the_clock(_: Store) {
    for cause in ["unknown", "lost", "full"] {
        let server = RedisServer::start();
        let seen = (now(&server) + 23 * 3_600_000) * 1000;
        let record = asking(&id("x"), "10", "10", "60000");
        let call = ["EVAL", &script!("enqueue"), "1", KEY, &record];
        let number: u64 = server.command(&[&call[..], &[&seen.to_string()]].concat());
        assert_eq!(number, seen + 1);

        match cause {
            "unknown" => assert_eq!(release(&server, "other", "0"), 0),
            "lost" => assert_eq!(renew(&server, "other"), [2, -1, -1]),
            _ => {
                server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
                assert_eq!(release(&server, "x", "0"), 1);
            }
        }

        let life: u64 = server.command(&["PTTL", KEY]);
        assert!(life > 46 * 3_600_000, "{cause}: {life} ms");
    }
}

/// With nobody in line, among whom the dead could be looked for.
async fn one_more_than_the_most_who_may_hold_is_answered_busy(_: Store) {
    let server = RedisServer::start();
    let holders = "for i = 1, 10000 do
        local id = string.format('%032d', i)
        local record = string.format('%016d%013d%s:0000000001:0000020000:00:me', i, ARGV[1], id)
        redis.call('HSET', KEYS[1] .. ':line', id, record)
        redis.call('ZADD', KEYS[1] .. ':ends', ARGV[1], id)
      end
      local state = '0000000000010000L000000000000000000000000010000000000001'
      redis.call('SET', KEYS[1], state .. '00000100000000020000')";
    let ends = (now(&server) + 60_000).to_string();
    server.command::<()>(&["EVAL", holders, "1", KEY, &ends]);
    let record = asking(&id("more"), "10001", "20000", "60000");

    let call = ["EVAL", &script!("enqueue"), "1", KEY, &record, UNSEEN];
    let reply: Vec<i64> = server.command(&call);

    assert_eq!(reply[0], 2, "{reply:?}");
}

async fn an_exhausted_name_keeps_those_it_has_let_in(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "next", "10", "60000")[0], 1);
    end_lease(&server, "holds");
    let state: String = server.command(&["GET", KEY]);
    server.command::<()>(&["SET", KEY, &format!("{}{}", (1u64 << 53) - 1, &state[16..])]);

    assert_eq!(enqueue(&server, "late", "10", "60000"), [5]);

    assert_eq!(renew(&server, "next"), [0, 60000, -1]);
}

async fn a_name_with_a_mark_is_not_forgotten(_: Store) {
    let server = RedisServer::start();
    assert_eq!(release(&server, "x", "60000"), 0);

    let forgotten: i64 = server.command(&["EVAL", &script!("forget"), "1", KEY]);

    assert_eq!(forgotten, 0);
    assert_eq!(enqueue(&server, "x", "10", "60000"), [4]);
}

/// Though the line is never empty, and so its state never shorter.
async fn a_mark_that_has_run_out_costs_no_more_calls(_: Store) {
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

async fn holders_of_a_lost_hash_keep_their_permits_until_the_last_has_expired(_: Store) {
    let server = RedisServer::start();
    for name in ["a", "b"] {
        assert_eq!(enqueue(&server, name, "5", "60000")[0], 0);
    }
    server.command::<()>(&["DEL", LINE]);
    server.command::<()>(&["ZADD", ENDS, "XX", "1", &id("b")]);

    assert_eq!(enqueue(&server, "all", "10", "60000")[0], 1);

    server.command::<()>(&["ZADD", ENDS, "XX", "1", &id("a")]);
    assert_eq!(renew(&server, "all"), [0, 60000, -1]);
}

/// Nobody hears that it was let in, but its renewal says so.
async fn a_lease_that_a_batch_lets_in_and_renews_is_as_long_as_it_says(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "next", "5", "60000")[0], 1);

    let batch = [["holds", "5", "60000"], ["next", "5", "60000"]];
    let reply = renew_all(&server, &[KEY, KEY], &batch);

    assert_eq!(reply, [0, 60000, -1].repeat(2));
    assert!(expires(&server, "next") > now(&server) + 30_000);
}

/// Of a ticket that it has, alone or in a line, and of one that it has not: it may be behind its master.
async fn a_replica_says_so_to_whoever_renews_or_releases(_: Store) {
    let master = RedisServer::start();
    for id in ["alone", "next"] {
        enqueue(&master, id, "10", "60000");
        let replica = RedisServer::replica_of(&master);
        for ids in [&["alone"][..], &["other"], &["other", "alone", "next"]] {
            let count = ids.len();
            let (mut release, mut renew) = (redis::cmd("EVAL"), redis::cmd("EVAL"));
            release.arg(script!("release")).arg(count);
            release.arg([KEY].repeat(count));
            renew.arg(script!("renew")).arg(count);
            renew.arg([KEY].repeat(count));
            for name in ids {
                release.arg(self::id(name));
                renew.arg(self::id(name)).arg(&["0000000010", "60000"]);
            }
            for call in [renew, release] {
                let answer = call.query::<Vec<i64>>(&mut connect(&replica));
                let code = answer.as_ref().map_err(|error| error.code());
                assert_eq!(code, Err(Some("READONLY")), "{id}, {ids:?}");
            }
        }
    }
}

/// It may be behind its master, or have no room: "busy" would be an answer that a free lock changes nothing about.
async fn a_server_that_may_not_write_says_so_to_whoever_asks_whatever_it_holds(_: Store) {
    let forms: [&[(&str, &str)]; 5] = [
        &[],
        &[("holds", "10")],
        &[("holds", "10"), ("waits", "10")],
        &[("reads", "1"), ("reads too", "1")],
        &[("reads", "1"), ("reads too", "1"), ("waits", "10")],
    ];
    let refusals: [(&str, [&[&str]; 2]); 3] = [
        (
            "READONLY",
            [
                &["REPLICAOF", "127.0.0.1", "1"],
                &["REPLICAOF", "NO", "ONE"],
            ],
        ),
        (
            "OOM",
            [
                &["CONFIG", "SET", "maxmemory", "1"],
                &["CONFIG", "SET", "maxmemory", "0"],
            ],
        ),
        (
            "NOREPLICAS",
            [
                &["CONFIG", "SET", "min-replicas-to-write", "1"],
                &["CONFIG", "SET", "min-replicas-to-write", "0"],
            ],
        ),
    ];
    let server = RedisServer::start();
    for form in forms {
        for marked in [false, true] {
            server.flush();
            if marked {
                assert_eq!(release(&server, "gone", "60000"), 0);
            }
            for (name, permits) in form {
                enqueue(&server, name, permits, "60000");
            }
            let state: Option<String> = server.command(&["GET", KEY]);
            for (code, [begins, ends]) in refusals {
                server.command::<()>(begins);
                for name in ["new", "gone", "holds", "reads", "waits"] {
                    for (capacity, waits) in [(10, true), (10, false), (11, true)] {
                        let case =
                            format!("{form:?}, {marked}, {code}, {name}, {capacity}, {waits}");
                        let answer = ask(&server, name, capacity, waits).expect_err(&case);
                        assert_eq!(answer.code(), Some(code), "{case}: {answer}");
                    }
                }
                server.command::<()>(ends);
            }
            assert_eq!(server.command::<Option<String>>(&["GET", KEY]), state);
        }
    }
}

/// All ten permits.
fn ask(server: &RedisServer, name: &str, capacity: u32, waits: bool) -> redis::RedisResult<Value> {
    let record = asking(&id(name), "10", &capacity.to_string(), "60000");
    let script = script!("enqueue");
    let mut call = vec!["EVAL", &*script, "1", KEY, &record, UNSEEN];
    call.extend((!waits).then_some("0"));
    server.try_command(&call)
}

/// Neither a try nor a capacity that does not fit: nothing of them reaches a replica or the log.
async fn who_cannot_have_it_at_once_changes_nothing(_: Store) {
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
