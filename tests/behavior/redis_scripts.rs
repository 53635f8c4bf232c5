//! Tests of the scripts of the Redis store. The tests call one script at a time. So they create
//! situations that a client cannot create at will. The groups of facts are in the folder
//! `redis_scripts`. This file has what they share.

mod batches;
mod cost;
mod damaged;
mod denied;
mod interrupted;
mod lines;
mod repeated;
mod short_cuts;

use std::collections::HashMap;
use std::sync::LazyLock;

use libtest_mimic::Trial;
use redis::Value;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use crate::store::{Kind, SOON};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        cost::facts,
        repeated::facts,
        lines::facts,
        batches::facts,
        damaged::facts,
        denied::facts,
        interrupted::facts,
        short_cuts::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// The scripts that these tests call, as they are in their files.
const SCRIPTS: [(&str, &str); 7] = [
    (
        "enqueue",
        include_str!("../../lockcore/src/backend/redis/scripts/enqueue.lua"),
    ),
    (
        "renew",
        include_str!("../../lockcore/src/backend/redis/scripts/renew.lua"),
    ),
    (
        "release",
        include_str!("../../lockcore/src/backend/redis/scripts/release.lua"),
    ),
    (
        "inspect",
        include_str!("../../lockcore/src/backend/redis/scripts/inspect.lua"),
    ),
    (
        "forget",
        include_str!("../../lockcore/src/backend/redis/scripts/forget.lua"),
    ),
    (
        "adopt",
        include_str!("../../lockcore/src/backend/redis/scripts/adopt.lua"),
    ),
    (
        "resize",
        include_str!("../../lockcore/src/backend/redis/scripts/resize.lua"),
    ),
];

/// The text of a script, as the store sends it.
fn script(verb: &str) -> String {
    static SENT: LazyLock<HashMap<&str, String>> =
        LazyLock::new(|| SCRIPTS.map(|(verb, text)| (verb, sent(text))).into());
    let sent = SENT.get(verb);
    sent.unwrap_or_else(|| panic!("no script for {verb}"))
        .clone()
}

/// The text of a script with its includes, and with the numbers of the places in place of their
/// names.
fn sent(text: &str) -> String {
    let shared = [
        (
            "-- include tickets.lua",
            include_str!("../../lockcore/src/backend/redis/scripts/tickets.lua"),
        ),
        (
            "-- include line.lua",
            include_str!("../../lockcore/src/backend/redis/scripts/line.lua"),
        ),
        (
            "-- include fields.lua",
            include_str!("../../lockcore/src/backend/redis/scripts/fields.lua"),
        ),
        (
            "-- include record.lua",
            include_str!("../../lockcore/src/backend/redis/scripts/record.lua"),
        ),
    ];
    // A file that is included twice is there only once, at the first place.
    let script = shared
        .iter()
        .fold(text.to_owned(), |script, (include, file)| {
            script.replacen(include, file, 1).replace(include, "")
        });
    let mut places = HashMap::new();
    for line in include_str!("../../lockcore/src/backend/redis/scripts/places.txt").lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if let [name, from, to] = words[..] {
            places.insert(name.to_owned(), from);
            places.insert(format!("{name}_END"), to);
        }
    }
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let words = script.split_inclusive(is_end).map(|word| {
        let name = word.trim_end_matches(is_end);
        match places.get(name) {
            Some(number) => format!("{number}{}", &word[name.len()..]),
            None => word.to_owned(),
        }
    });
    words.collect()
}

const KEY: &str = "t:1:{a}";

const LINE: &str = "t:1:{a}:line";

const ENDS: &str = "t:1:{a}:ends";

/// An id of the right length that contains a readable name.
fn id(name: &str) -> String {
    format!("{name:.>32}")
}

/// A new connection, beside that of the harness.
fn connect(server: &RedisServer) -> redis::Connection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_connection().unwrap()
}

fn enqueue(server: &RedisServer, name: &str, permits: &str, ttl_millis: &str) -> Vec<i64> {
    let record = asking(&id(name), permits, "10", ttl_millis);
    let call = ["EVAL", &script("enqueue"), "1", KEY, &record, UNSEEN];
    match server.command(&call) {
        ticket @ Value::BulkString(_) => vec![0, redis::from_redis_value(ticket).unwrap()],
        reply => redis::from_redis_value(reply).unwrap(),
    }
}

/// The record that an enqueue sends.
fn asking(id: &str, permits: &str, capacity: &str, ttl_millis: &str) -> String {
    format!("+{ttl_millis:0>12}{id}:{permits:0>10}:{capacity:0>10}:00:me")
}

/// The token argument of an enqueue, if the client has seen no ticket of this name.
const UNSEEN: &str = "0000000000000000";

fn release(server: &RedisServer, name: &str, mark_millis: &str) -> i64 {
    let mark = if mark_millis == "0" { "" } else { mark_millis };
    let departure = id(name) + mark;
    match server.command(&["EVAL", &script("release"), "1", KEY, &departure]) {
        Value::Int(found) => found,
        reply => redis::from_redis_value::<[i64; 1]>(reply).unwrap()[0],
    }
}

fn renew(server: &RedisServer, name: &str) -> Vec<i64> {
    renew_with(server, name, "10")
}

fn renew_with(server: &RedisServer, name: &str, permits: &str) -> Vec<i64> {
    let (id, permits) = (id(name), format!("{permits:0>10}"));
    let call = ["EVAL", &script("renew"), "1", KEY, &id, &permits, "60000"];
    server.command(&call)
}

/// Renews several tickets in one call. Each ticket is its name, its permits and its ttl in
/// milliseconds.
fn renew_all(server: &RedisServer, keys: &[&str], tickets: &[[&str; 3]]) -> Vec<i64> {
    let mut call = redis::cmd("EVAL");
    call.arg(script("renew")).arg(keys.len()).arg(keys);
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
    let reply: Vec<Value> = server.command(&["EVAL", &script("inspect"), "1", KEY]);
    let records = reply.into_iter().skip(3);
    let mut records: Vec<String> = records
        .map(|record| redis::from_redis_value(record).unwrap())
        .collect();
    records.sort();
    records
}

/// The key that has a ticket's record, and the field if the key is a hash.
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

/// Waits for the end of a lease, and calls no script meanwhile.
async fn lease_is_over(server: &RedisServer, name: &str) {
    let expires = expires(server, name);
    eventually("the lease is over", SOON, async || now(server) > expires).await;
}

/// Ends a lease early, so that no test has to wait for the end of a long lease.
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

/// Makes a line of exclusive tickets `t1`, `t2` and so on: first the live ones, and then the
/// expired ones. The first ticket holds.
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

/// Enqueues a request for ten permits.
fn ask(server: &RedisServer, name: &str, capacity: u32, waits: bool) -> redis::RedisResult<Value> {
    let record = asking(&id(name), "10", &capacity.to_string(), "60000");
    let script = script("enqueue");
    let mut call = vec!["EVAL", &*script, "1", KEY, &record, UNSEEN];
    call.extend((!waits).then_some("0"));
    server.try_command(&call)
}
