//! Tests with a server that denies a command in the middle of a script, and with a server that
//! denies all writes.

use libtest_mimic::Trial;
use redis::Value;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use super::{
    KEY, UNSEEN, ask, asking, connect, end_lease, enqueue, id, release, renew_with, script,
};
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_rest_of_a_batch_is_replicated_after_a_message_was_denied
        a_verb_that_is_denied_a_command_loses_neither_permits_nor_turns
        a_denied_message_grants_no_more_permits_than_there_are
        a_denied_message_loses_neither_permits_nor_the_turn_of_the_next
        permits_are_recounted_after_a_command_was_denied_half_way
        a_replica_answers_renewals_and_releases_with_readonly
        a_server_that_may_not_write_answers_each_enqueue_with_its_error
    ]
}

/// A wake-up is denied in the middle of a batch. Redis does not replicate such messages, but it
/// must replicate all writes of the script.
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
            call.arg(script("release")).arg(2).arg(&[KEY, other]);
            call.arg(&[&holds, &x]);
            (&[2], &[1])
        } else {
            call.arg(script("renew")).arg(2).arg(&[KEY, other]);
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

/// Takes the right to a command from the user of this test while `work` runs.
pub(super) fn without<T>(server: &RedisServer, command: &str, work: impl FnOnce() -> T) -> T {
    let user: String = server.command(&["ACL", "WHOAMI"]);
    server.command::<()>(&["ACL", "SETUSER", &user, &format!("-{command}")]);
    let done = work();
    server.command::<()>(&["ACL", "SETUSER", &user, &format!("+{command}")]);
    done
}

/// The commands that the scripts use, in lower case.
pub(super) fn commands() -> Vec<String> {
    let rights = include_str!("../../../lockcore/src/backend/redis/scripts/rights.lua");
    let commands: Vec<_> = rights.split("{ '").skip(1).collect();
    let commands = commands.iter().map(|call| call.split('\'').next().unwrap());
    let commands: Vec<_> = commands.map(str::to_lowercase).collect();
    assert!(commands.len() > 15, "{commands:?}");
    commands
}

/// The fact denies each command of the scripts in turn. As a client does, the test releases a
/// ticket that an enqueue may have left, and repeats a denied release.
async fn a_verb_that_is_denied_a_command_loses_neither_permits_nor_turns(_: Store) {
    let commands = commands();
    // The tickets, oldest first, and the permits of each, out of ten.
    let lines: [&[(&str, u64)]; 7] = [
        &[("a", 10)],
        &[("a", 10), ("w", 10), ("x", 10)],
        &[("a", 4), ("w", 8), ("x", 2)],
        &[("a", 4), ("b", 3), ("w", 5), ("x", 2)],
        &[("a", 4), ("b", 3), ("w", 2)],
        &[("a", 4), ("b", 3)],
        &[("a", 4), ("b", 6), ("w", 4), ("x", 2)],
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
            // The client of this verb may have died, and nobody may use this name again. So each
            // key must expire.
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

/// The command line for a verb: an enqueue of the new ticket `n`, or a verb for an existing ticket.
fn call(verb: &str) -> Vec<String> {
    let (script, arguments) = match verb.split_once(' ') {
        Some(("release", name)) => (script("release"), vec![id(name)]),
        Some((size, name)) => {
            let permits = if size == "smaller" {
                "0000000001"
            } else {
                "0000000010"
            };
            let arguments = vec![id(name), permits.into(), "60000".into()];
            (script("renew"), arguments)
        }
        None => {
            let record = asking(&id("n"), "2", "10", "60000");
            (script("enqueue"), vec![record, UNSEEN.into()])
        }
    };
    [
        vec!["EVAL".into(), script, "1".into(), KEY.into()],
        arguments,
    ]
    .concat()
}

/// The renewal first grants its own ticket. After that, the wake-up for the ticket behind it is
/// denied.
async fn a_denied_message_grants_no_more_permits_than_there_are(_: Store) {
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

async fn a_denied_message_loses_neither_permits_nor_the_turn_of_the_next(_: Store) {
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

/// The release removes the holder's record. After that, the server denies the command that removes
/// the end of the holder's lease.
async fn permits_are_recounted_after_a_command_was_denied_half_way(_: Store) {
    let server = RedisServer::start();
    for (name, permits) in [("a", "4"), ("b", "3"), ("c", "3")] {
        assert_eq!(enqueue(&server, name, permits, "60000")[0], 0);
    }

    let released = without(&server, "zrem", || release(&server, "a", "0"));

    assert_eq!(released, 2);
    assert_eq!(enqueue(&server, "n", "4", "60000")[0], 0);
    assert_eq!(enqueue(&server, "more", "1", "60000")[0], 1);
}

/// The tickets are alone, in a line, or unknown to the replica. A replica must not answer that an
/// unknown ticket is lost: it may be behind its master.
async fn a_replica_answers_renewals_and_releases_with_readonly(_: Store) {
    let master = RedisServer::start();
    for id in ["alone", "next"] {
        enqueue(&master, id, "10", "60000");
        let replica = RedisServer::replica_of(&master);
        for ids in [&["alone"][..], &["other"], &["other", "alone", "next"]] {
            let count = ids.len();
            let (mut release, mut renew) = (redis::cmd("EVAL"), redis::cmd("EVAL"));
            release.arg(script("release")).arg(count);
            release.arg([KEY].repeat(count));
            renew.arg(script("renew")).arg(count);
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

/// The server may be a replica, may have no memory left, or may have too few replicas. An answer of
/// "busy" would be wrong: such a server refuses a request for a free lock too.
async fn a_server_that_may_not_write_answers_each_enqueue_with_its_error(_: Store) {
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
