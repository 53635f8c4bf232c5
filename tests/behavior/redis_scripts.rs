//! The scripts of the Redis store, one call at a time: moments that no client can bring about at will.

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use crate::store::{Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_enqueue_repeated_after_its_lease_does_not_hold
        a_waiter_repeated_after_its_lease_is_taken_out_of_the_line
        an_enqueue_repeated_in_time_is_the_same_ticket
        an_enqueue_after_its_release_is_refused_while_the_mark_is_there
        a_line_longer_than_a_page_is_walked_to_its_end
        who_waits_behind_an_unheard_grant_looks_again_when_it_ends
        one_ticket_alone_is_one_key
        a_queue_that_is_lost_is_made_anew_in_its_order
        a_queue_of_thousands_that_is_lost_is_made_anew
        a_crowd_that_has_died_keeps_nobody_out
        who_comes_behind_waiters_that_died_is_told_when_to_look_again
        a_renewal_that_cannot_see_the_line_makes_nothing_smaller
        a_queue_without_its_tickets_keeps_nobody_out
        the_next_in_line_is_woken_past_those_who_died
        the_rest_of_a_batch_is_replicated_after_a_message_was_denied
        a_replica_says_so_to_whoever_renews_or_releases
    ]
}

macro_rules! script {
    ($verb:literal) => {
        concat!(
            include_str!("../../lockcore/src/backend/redis/scripts/record.lua"),
            "\n",
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
    let record = format!("{permits}:10:00:me");
    let mut call = vec!["EVAL", script!("enqueue"), "3"];
    call.extend(KEYS);
    call.extend(["t:1:wake:", id, ttl_millis, &record, "1", "0"]);
    server.command(&call)
}

fn release(server: &RedisServer, id: &str, mark_millis: &str) -> Vec<i64> {
    let mut call = vec!["EVAL", script!("release"), "3"];
    call.extend(KEYS);
    call.extend(["t:1:wake:", id, mark_millis]);
    server.command(&call)
}

fn renew(server: &RedisServer, id: &str) -> Vec<i64> {
    renew_with(server, id, "10")
}

fn renew_with(server: &RedisServer, id: &str, permits: &str) -> Vec<i64> {
    let mut call = vec!["EVAL", script!("renew"), "2"];
    call.extend(&KEYS[..2]);
    call.extend(["t:1:wake:", id, permits, "60000"]);
    server.command(&call)
}

fn line(server: &RedisServer) -> Vec<String> {
    server.command(&["LRANGE", KEYS[1], "0", "-1"])
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

/// Ends a lease that was long enough to do anything in.
fn end_lease(server: &RedisServer, id: &str) {
    let written: String = server.command(&["HGET", KEYS[0], id]);
    let (_expires, rest) = written.split_once(':').unwrap();
    server.command::<()>(&["HSET", KEYS[0], id, &format!("1:{rest}")]);
}

/// The reply to the first was lost, and the lease ran out before the repetition.
async fn an_enqueue_repeated_after_its_lease_does_not_hold(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "z", "10", "50")[0], 0);
    lease_is_over(&server, "z").await;

    // It is still written down, as nobody has looked since.
    let repeated = enqueue(&server, "z", "10", "60000");

    let written: usize = server.command(&["HEXISTS", KEYS[0], "z"]);
    assert_eq!((repeated[0], written), (4, 0), "answer, tickets written");
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
    assert_eq!(server.command::<usize>(&["HEXISTS", KEYS[0], "w"]), 0);
}

async fn an_enqueue_repeated_in_time_is_the_same_ticket(_: Store) {
    let server = RedisServer::start();
    let holds = enqueue(&server, "x", "10", "60000");
    let waits = enqueue(&server, "w", "1", "60000");
    assert_eq!((holds[0], waits[0]), (0, 1));

    assert_eq!(enqueue(&server, "x", "10", "60000")[..2], holds[..2]);
    assert_eq!(enqueue(&server, "w", "1", "60000")[..2], waits[..2]);
    assert_eq!(server.command::<usize>(&["LLEN", KEYS[1]]), 2);
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
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "dead", "10", "60000")[0], 1);
    end_lease(&server, "holds");

    let waits = enqueue(&server, "late", "10", "60000");

    let [1, _, _, recheck] = waits[..] else {
        panic!("{waits:?}");
    };
    assert!((1..=2000).contains(&recheck), "{recheck} ms");
}

async fn one_ticket_alone_is_one_key(_: Store) {
    let server = RedisServer::start();
    for turn in 0..2 {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 0);
        assert_eq!(server.keys("*"), [KEYS[0]], "turn {turn}");
        assert_eq!(enqueue(&server, "w", "10", "60000")[0], 1);
        assert_eq!(line(&server), ["x", "w"]);
        assert_eq!(release(&server, "x", "0"), [1]);
        assert_eq!(release(&server, "w", "0"), [1]);
        assert_eq!(server.keys("*"), [KEYS[0]], "turn {turn}");
    }
    assert_eq!(server.command::<usize>(&["HLEN", KEYS[0]]), 1);
}

/// By whichever verb finds it gone.
async fn a_queue_that_is_lost_is_made_anew_in_its_order(_: Store) {
    let server = RedisServer::start();
    let all = ["holds", "b", "a", "c"];
    for (place, id) in all.into_iter().enumerate() {
        assert_eq!(
            enqueue(&server, id, "10", "60000")[0],
            i64::from(place > 0),
            "{id}"
        );
    }
    let lose = || assert_eq!(server.command::<i64>(&["DEL", KEYS[1]]), 1);

    lose();
    assert_eq!(enqueue(&server, "d", "10", "60000")[0], 1);
    assert_eq!(line(&server), ["holds", "b", "a", "c", "d"]);
    lose();
    assert_eq!(renew(&server, "a")[0], 1);
    assert_eq!(line(&server), ["holds", "b", "a", "c", "d"]);
    lose();
    assert_eq!(release(&server, "holds", "0"), [1]);
    assert_eq!(line(&server), ["b", "a", "c", "d"]);
    assert_eq!(renew(&server, "b")[0], 0, "it holds");
    assert_eq!(renew(&server, "a")[0], 1, "and nobody else does");
    let left: i64 = server.command(&["PTTL", KEYS[1]]);
    assert!(left > 86_400_000 - 60_000, "lives for {left} ms");
}

/// Exclusive tickets `t1`, `t2` and so on that live, and behind them others that do not any more; without a queue.
fn fill(server: &RedisServer, live: u32, dead: u32) {
    const FILL: &str = "local now = redis.call('TIME')[1] * 1000 \
        local function put(i, expires) \
            redis.call('HSET', KEYS[1], 't' .. i, string.format('%.0f:%d:10:10:00:me', expires, i)) \
        end \
        for i = 1, ARGV[1] do put(i, now + 60000) end \
        for i = ARGV[1] + 1, ARGV[1] + ARGV[2] do put(i, now - 1) end \
        redis.call('HSET', KEYS[1], 'last', '10000')";
    let (live, dead) = (live.to_string(), dead.to_string());
    server.command::<()>(&["EVAL", FILL, "1", KEYS[0], &live, &dead]);
}

/// Of as many as may wait, which is more than a script can have in hand at once.
async fn a_queue_of_thousands_that_is_lost_is_made_anew(_: Store) {
    for verb in ["release", "renew", "enqueue"] {
        let server = RedisServer::start();
        fill(&server, 10_000, 0);

        match verb {
            "release" => assert_eq!(release(&server, "t1", "0"), [1]),
            "renew" => assert_eq!(renew(&server, "t1")[0], 0),
            _ => assert_eq!(enqueue(&server, "t10000", "10", "60000")[0], 1),
        }

        let line = line(&server);
        let first = if verb == "release" { "t2" } else { "t1" };
        let (front, end) = (line.first().unwrap(), line.last().unwrap());
        assert_eq!((front.as_str(), end.as_str()), (first, "t10000"));
        assert_eq!(renew(&server, first)[0], 0, "it holds");
    }
}

/// Whether somebody who lives waits before it, behind whom nobody is looked at, or it comes next; and whether or not
/// others live behind the crowd.
async fn a_crowd_that_has_died_keeps_nobody_out(_: Store) {
    for (before, behind) in [(1, 0), (2, 0), (2, 130)] {
        let server = RedisServer::start();
        fill(&server, before, 10_000 - before - behind);
        assert_eq!(renew(&server, "t1")[0], 0);
        for number in 0..behind {
            let (id, place) = (format!("behind{number}"), 10_001 + number);
            let record = format!("9999999999999:{place}:10:10:00:me");
            server.command::<()>(&["HSET", KEYS[0], &id, &record]);
            server.command::<()>(&["RPUSH", KEYS[1], &id]);
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
    server.command::<()>(&["SET", KEYS[1], "foreign"]);

    assert_eq!(renew_with(&server, "x", "1"), [3, -1, -1]);
    server.command::<()>(&["DEL", KEYS[1]]);

    let record: String = server.command(&["HGET", KEYS[0], "x"]);
    assert_eq!(record.split(':').nth(2), Some("10"));
    assert_eq!(renew_with(&server, "x", "1")[0], 0);
    assert_eq!(renew_with(&server, "w", "1")[0], 0);
}

async fn a_queue_without_its_tickets_keeps_nobody_out(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "x", "10", "60000");
    enqueue(&server, "w", "10", "60000");
    server.command::<i64>(&["DEL", KEYS[0]]);

    assert_eq!(renew(&server, "x")[0], 2, "lost");
    assert_eq!(enqueue(&server, "new", "10", "60000")[0], 0);
    assert_eq!(line(&server), ["new"]);
    assert_eq!(release(&server, "x", "0"), [0]);
    assert_eq!(renew(&server, "new")[0], 0);
    assert_eq!(release(&server, "new", "0"), [1]);
    assert_eq!(server.keys("*"), [KEYS[0]]);
}

/// The short way from the holder to the next in line is for one who lives.
async fn the_next_in_line_is_woken_past_those_who_died(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "holds", "10", "60000");
    enqueue(&server, "dead", "10", "60000");
    enqueue(&server, "reads", "1", "60000");
    enqueue(&server, "reads too", "1", "60000");
    end_lease(&server, "dead");

    assert_eq!(release(&server, "holds", "0"), [1]);

    assert_eq!(line(&server), ["reads", "reads too"]);
    for id in ["reads", "reads too"] {
        // Nobody listens to the channel: woken all the same, and cut short for it.
        let written: String = server.command(&["HGET", KEYS[0], id]);
        let expires: u64 = written.split(':').next().unwrap().parse().unwrap();
        let (seconds, micros): (u64, u64) = server.command(&["TIME"]);
        assert!(expires <= seconds * 1000 + micros / 1000 + 2000, "{id}");
    }
}

/// Messages are not replicated, all else is, whatever becomes of a message.
async fn the_rest_of_a_batch_is_replicated_after_a_message_was_denied(_: Store) {
    let server = RedisServer::start();
    let replica = RedisServer::replica_of(&server);
    let rights = ["+@all", "-publish", "~*", "nopass", "on"];
    server.command::<()>(&[&["ACL", "SETUSER", "mute"], &rights[..]].concat());
    let alone = "9999999999999:7:10:10:00:me";
    for verb in ["release", "renew"] {
        server.flush();
        enqueue(&server, "holds", "10", "60000");
        enqueue(&server, "reads", "1", "60000");
        server.command::<()>(&["HSET", "t:1:{b}", "last", "7", "x", alone]);
        let other = ["t:1:{b}", "t:1:{b}:queue", "t:1:{b}:gone:x"];
        let mut call = redis::cmd("EVAL");
        let (failed, done): (&[i64], &[i64]) = if verb == "release" {
            call.arg(script!("release")).arg(6).arg(&KEYS).arg(&other);
            call.arg(&["t:1:wake:", "holds", "0", "x", "0"]);
            (&[2], &[1])
        } else {
            call.arg(script!("renew")).arg(4);
            call.arg(&KEYS[..2]).arg(&other[..2]);
            call.arg(&["t:1:wake:", "holds", "1", "60000", "x", "10", "60000"]);
            (&[3, -1, -1], &[0, 60000, -1])
        };

        let client = redis::Client::open(server.url_with_user("mute", "mute")).unwrap();
        let reply: Vec<i64> = call.query(&mut client.get_connection().unwrap()).unwrap();

        assert_eq!(reply, [failed, done].concat(), "{verb}");
        eventually("replicated", SOON, async || {
            let at = |server: &RedisServer| -> Option<String> {
                server.command(&["HGET", "t:1:{b}", "x"])
            };
            at(&server).as_deref() != Some(alone) && at(&server) == at(&replica)
        })
        .await;
    }
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
            release.arg(script!("release")).arg(3 * count);
            release.arg(KEYS.repeat(count)).arg("t:1:wake:");
            renew.arg(script!("renew")).arg(2 * count);
            renew.arg(KEYS[..2].repeat(count)).arg("t:1:wake:");
            for id in ids {
                release.arg(&[id, "0"]);
                renew.arg(&[id, "10", "60000"]);
            }
            for call in [renew, release] {
                let client = redis::Client::open(replica.url()).unwrap();
                let answer = call.query::<Vec<i64>>(&mut client.get_connection().unwrap());
                let code = answer.as_ref().map_err(|error| error.code());
                assert_eq!(code, Err(Some("READONLY")), "{id}, {ids:?}");
            }
        }
    }
}
