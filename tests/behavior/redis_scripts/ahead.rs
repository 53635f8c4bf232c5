//! Tests of the name of the ticket ahead in the answer to an enqueue.

use libtest_mimic::Trial;
use redis::Value;
use tests::redis_server::RedisServer;

use super::{KEY, UNSEEN, end_lease, expires, id, line, now, record, release, renew_with, script};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_waiter_is_named_the_ticket_right_ahead_of_the_same_client
        the_lease_of_a_waiter_that_was_named_the_ticket_ahead_is_never_cut_short
    ]
}

const FULL: u32 = 1 << 30;

/// A request that stands in line, and asks for the name of the ticket ahead.
#[derive(Clone, Copy)]
struct Wish {
    name: &'static str,
    client: &'static str,
    permits: u32,
    asks: bool,
}

const fn wish(name: &'static str, client: &'static str) -> Wish {
    Wish {
        name,
        client,
        permits: FULL,
        asks: true,
    }
}

/// Returns the name of the ticket ahead, if the answer names one.
fn enqueue(server: &RedisServer, wish: Wish) -> Option<String> {
    let Wish {
        name,
        client,
        permits,
        asks,
    } = wish;
    let id = id(name);
    let record = format!("+000000060000{id}:{permits:010}:{FULL:010}:{client}:me");
    let script = script("enqueue");
    let mut call = vec!["EVAL", &script, "1", KEY, &record, UNSEEN];
    call.extend(asks.then_some("1"));
    match server.command(&call) {
        Value::Array(answer) if answer.len() == 5 => {
            let ahead: String = redis::from_redis_value(answer[4].clone()).unwrap();
            Some(ahead.trim_start_matches('.').to_owned())
        }
        Value::Array(answer) => {
            assert_eq!(answer.len(), 4, "{answer:?}");
            None
        }
        granted => {
            assert!(matches!(granted, Value::BulkString(_)), "{granted:?}");
            None
        }
    }
}

async fn a_waiter_is_named_the_ticket_right_ahead_of_the_same_client(_: Store) {
    let server = RedisServer::start();
    let reader = |wish: Wish| Wish { permits: 1, ..wish };
    let silent = |wish: Wish| Wish {
        asks: false,
        ..wish
    };
    let cases: [(&str, &[Wish], Option<&str>); 11] = [
        ("a holder", &[wish("a", "00"), wish("b", "00")], Some("a")),
        (
            "a waiter",
            &[wish("a", "01"), wish("b", "00"), wish("c", "00")],
            Some("b"),
        ),
        (
            "the second waiter",
            &[
                wish("a", "00"),
                wish("b", "00"),
                wish("c", "00"),
                wish("d", "00"),
            ],
            Some("c"),
        ),
        (
            "a holder of another client",
            &[wish("a", "01"), wish("b", "00")],
            None,
        ),
        (
            "a client whose name begins in the same way",
            &[wish("a", "000"), wish("b", "00")],
            None,
        ),
        (
            "a waiter of another client, behind a holder of the same",
            &[wish("a", "00"), wish("b", "01"), wish("c", "00")],
            None,
        ),
        (
            "a reader holds",
            &[reader(wish("a", "00")), wish("b", "00")],
            None,
        ),
        (
            "a reader waits",
            &[wish("a", "00"), reader(wish("b", "00")), wish("c", "00")],
            None,
        ),
        (
            "a reader asks",
            &[wish("a", "00"), reader(wish("b", "00"))],
            None,
        ),
        (
            "several hold",
            &[
                reader(wish("a", "00")),
                reader(wish("b", "00")),
                wish("c", "00"),
            ],
            None,
        ),
        (
            "the request does not ask",
            &[wish("a", "00"), silent(wish("b", "00"))],
            None,
        ),
    ];
    for (case, line, expected) in cases {
        server.flush();

        let named = line.iter().map(|wish| enqueue(&server, *wish)).last();

        let named = named.flatten();
        assert_eq!(named.as_deref(), expected, "{case}");
        let last = record(&server, line.last().unwrap().name).unwrap();
        let is_kept = &last[83..84] == ">";
        assert_eq!(is_kept, expected.is_some(), "{case}: {last}");
    }

    // A ticket that has left is not ahead.
    server.flush();
    for name in ["a", "b", "c"] {
        enqueue(&server, wish(name, "00"));
    }
    assert_eq!(release(&server, "c", "0"), 1);
    assert_eq!(enqueue(&server, wish("d", "00")), None);
    assert_eq!(enqueue(&server, wish("e", "00")).as_deref(), Some("d"));
}

/// The client of the waiter may have been told of the end of the ticket ahead, and then it holds
/// until the end of its whole lease. So the store must not give the lock to the next waiter
/// earlier, although no connection has heard the wake-up.
async fn the_lease_of_a_waiter_that_was_named_the_ticket_ahead_is_never_cut_short(_: Store) {
    let server = RedisServer::start();
    for (asks, way) in [
        (true, "a release"),
        (true, "an expired holder"),
        (true, "a release of an expired holder"),
        (true, "a holder that becomes smaller"),
        (false, "a release"),
        (false, "an expired holder"),
    ] {
        server.flush();
        enqueue(&server, wish("holds", "00"));
        let waits = Wish {
            asks,
            ..wish("named", "00")
        };
        let named = enqueue(&server, waits);
        assert_eq!(named.is_some(), asks);
        enqueue(&server, wish("next", "00"));
        if way.contains("expired") {
            end_lease(&server, "holds");
        }

        match way {
            "an expired holder" => assert_eq!(renew_with(&server, "next", "1073741824")[0], 1),
            "a holder that becomes smaller" => {
                // The waiter fits beside it after it has become smaller, too.
                assert_eq!(renew_with(&server, "named", "1")[0], 1);
                assert_eq!(renew_with(&server, "holds", "1")[0], 0);
            }
            _ => assert_eq!(release(&server, "holds", "0"), 1),
        }

        let left = expires(&server, "named").saturating_sub(now(&server));
        assert_eq!(left > 30_000, asks, "{way}: {left} ms are left");
        assert!(line(&server).contains(&"named".to_owned()), "{way}");
    }
}
