//! Tests with keys of a name that are lost, and with keys that have a stranger's values.

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use redis::Value;
use tests::redis_server::RedisServer;

use super::{
    ENDS, KEY, LINE, UNSEEN, asking, connect, enqueue, expires, id, line, now, record, release,
    renew, renew_with, script,
};
use crate::store::{Kind, LEASE, STALL, Store, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        lost_ends_are_rebuilt
        a_holder_in_a_lost_hash_is_told_and_blocks_others_only_until_its_lease_ends
        a_renewal_that_cannot_read_the_line_gives_up_no_permits
        the_rest_of_a_line_without_its_state_keeps_nobody_out
        a_value_that_is_not_the_state_of_a_lock_is_refused_and_left_unchanged
        holders_of_a_lost_hash_keep_their_permits_until_the_last_has_expired
        a_damaged_counter_is_an_error_and_stays_as_it_is
        a_damaged_value_is_an_error
    ]
}

/// The first verb that does not find the key with the ends of the leases builds this key again.
async fn lost_ends_are_rebuilt(_: Store) {
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

/// If a name has several holders, the records of all of them are in the hash.
async fn a_holder_in_a_lost_hash_is_told_and_blocks_others_only_until_its_lease_ends(_: Store) {
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

/// The renewal must keep its permits. If it gave them up without reading the line, no later renewal
/// would give them up, and the waiter would not be granted.
async fn a_renewal_that_cannot_read_the_line_gives_up_no_permits(_: Store) {
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

/// Each verb finds a value that is not the state of a lock, and refuses it. Where the answer is an
/// error message, the message names the key.
async fn a_value_that_is_not_the_state_of_a_lock_is_refused_and_left_unchanged(_: Store) {
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
            (script("enqueue"), &[&*record, UNSEEN][..]),
            (script("inspect"), &[]),
            (script("forget"), &[]),
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

/// The state of the name is lost. Its line stays, behind one holder or behind several.
async fn the_rest_of_a_line_without_its_state_keeps_nobody_out(_: Store) {
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

/// The values may come from another program, or from a fault of a server. The last values have
/// numbers that this library never writes, and cannot count with.
async fn a_damaged_counter_is_an_error_and_stays_as_it_is(_: Store) {
    let server = RedisServer::start();
    let locks = Locks::builder().namespace("t").url(server.url());
    let counter = locks.build().unwrap().counter("a");
    for damaged in [
        "",
        "5",
        "5 1 1 1 64",
        "5 1 1 1 64 60 7",
        "x 1 1 1 64 60",
        "5 -1 1 1 64 60",
        "5 1.5 1 1 64 60",
        "0x5 1 1 1 64 60",
        " 5 1 1 1 64 60",
        "9007199254740992 1 1 1 64 60",
        "-9007199254740992 1 1 1 64 60",
        "99999999999999999999 1 1 1 64 60",
        "5 99999999999999999999 1 1 64 60",
        "5 1 9007199254740992 1 64 60",
        "5 1 99999999999999999999 1 64 60",
        "5 1 1 99999999999999999999 64 60",
        "5 1 1 1 99999999999999999999 60",
        "5 1 1 1 64 3155760001",
        "5 1 1 1 64 99999999999999999999",
    ] {
        server.command::<()>(&["HSET", COUNTER, "is", damaged]);

        let answers = [
            counter.get().await.map(drop),
            counter.add(1).await.map(drop),
            counter.set(7).await.map(drop),
        ];

        for answer in answers {
            let error = answer.expect_err(damaged);
            assert_eq!(error.kind(), ErrorKind::Config, "{damaged}: {error}");
            let text = error.to_string();
            assert!(text.contains(COUNTER) && text.contains("remove"), "{text}");
        }
        let is: String = server.command(&["HGET", COUNTER, "is"]);
        assert_eq!(is, damaged);
        assert_eq!(server.command::<i64>(&["HLEN", COUNTER]), 1);
    }
    server.command::<()>(&["DEL", COUNTER]);
    server.command::<()>(&["SET", COUNTER, "5"]);
    assert_eq!(kind(counter.get().await), ErrorKind::Config);
    assert_eq!(kind(counter.add(1).await), ErrorKind::Config);
    server.command::<()>(&["DEL", COUNTER]);
    assert_eq!(counter.add(1).await.unwrap().count, 1);
}

/// The key of the counter and the value.
const COUNTER: &str = "t:1:{a}:count";

async fn a_damaged_value_is_an_error(_: Store) {
    let server = RedisServer::start();
    let locks = Locks::builder().namespace("t").url(server.url());
    // A stalled machine must not look like a failing store.
    let locks = locks.op_timeout(STALL).ttl(LEASE).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    guard.set_value("page 7").await.unwrap();
    let key = server.keys("*count*").pop().unwrap();
    for damaged in [
        "x",
        "7",
        "x page 7",
        "-7 page 7",
        "99999999999999999999 page 7",
    ] {
        server.command::<()>(&["HSET", &key, "text", damaged]);

        let error = locks.value("a").get().await.expect_err(damaged);

        assert_eq!(error.kind(), ErrorKind::Config, "{damaged}: {error}");
        assert!(error.to_string().contains(&key), "{error}");
    }
    server.command::<()>(&["HDEL", &key, "text"]);
    guard.set_value("page 8").await.unwrap();
    let read = locks.value("a").get().await.unwrap().unwrap();
    assert_eq!(&*read.text, "page 8");
    guard.release().await.unwrap();
}
