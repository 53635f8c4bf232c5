//! Tests of holders, waiters, expired waiters in line, and the limits of a line.

use std::future::ready;

use libtest_mimic::Trial;
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

use super::{
    KEY, LINE, UNSEEN, asking, end_lease, enqueue, expires, fill, id, line, now, record, release,
    renew, renew_with, script,
};
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_line_longer_than_a_page_is_walked_to_its_end
        a_waiter_behind_an_unheard_grant_rechecks_when_it_ends
        a_name_with_one_ticket_is_one_key_and_an_unused_one_is_a_number
        a_crowd_of_expired_waiters_keeps_nobody_out
        a_waiter_behind_expired_ones_is_told_when_to_recheck
        an_expired_ticket_is_released_in_each_form_of_the_state
        expired_waiters_are_passed_over_when_the_next_is_woken
        no_release_or_renewal_shortens_the_life_of_a_number_ahead_of_the_clock
        a_request_beyond_the_limit_of_holders_is_answered_busy
        an_exhausted_name_keeps_its_tickets
        an_adopted_waiter_whose_turn_has_just_come_is_held_by_its_new_client_alone
    ]
}

/// Ten readers hold one permit each. A waiter needs all ten permits. Thirty readers wait behind it,
/// more than the script reads at a time. Each release grants exactly the tickets that fit after it.
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
    // The first ten of the thirty readers hold now.
    for number in 10..40 {
        let status = enqueue(&server, &format!("r{number}"), "1", "60000")[0];
        assert_eq!(status, i64::from(number >= 20), "r{number}");
    }
}

/// If nobody hears the wake-up of a waiter, its grant ends after two seconds. A later waiter is
/// told to recheck at that time.
async fn a_waiter_behind_an_unheard_grant_rechecks_when_it_ends(_: Store) {
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

async fn a_name_with_one_ticket_is_one_key_and_an_unused_one_is_a_number(_: Store) {
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

/// The expired waiters stand directly behind the holder, or behind a live waiter. Behind them are
/// live waiters, or none.
async fn a_crowd_of_expired_waiters_keeps_nobody_out(_: Store) {
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
        eventually("there is room", SOON, || {
            tries += 1;
            ready(enqueue(&server, "x", "10", "60000")[0] == 1)
        })
        .await;

        // An enqueue searches a part of the line for expired tickets. The time decides which part,
        // so several tries may be needed.
        assert!(tries == 1 || behind > 0, "{tries} tries");

        assert_eq!(line(&server).last().unwrap(), "x");
    }
    let server = RedisServer::start();
    fill(&server, 10_000, 0);
    for _ in 0..10 {
        assert_eq!(enqueue(&server, "x", "10", "60000")[0], 2);
    }
}

/// The reply tells the waiter when to recheck. A message could arrive before the reply.
async fn a_waiter_behind_expired_ones_is_told_when_to_recheck(_: Store) {
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

/// The release succeeds, because no other ticket has been granted in place of the expired one.
async fn an_expired_ticket_is_released_in_each_form_of_the_state(_: Store) {
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

/// The script has a short cut from the holder to the next ticket in line. It must not take this
/// short cut if the next ticket has expired.
async fn expired_waiters_are_passed_over_when_the_next_is_woken(_: Store) {
    let server = RedisServer::start();
    enqueue(&server, "holds", "10", "60000");
    enqueue(&server, "dead", "10", "60000");
    enqueue(&server, "reads", "1", "60000");
    enqueue(&server, "reads too", "1", "60000");
    end_lease(&server, "dead");

    assert_eq!(release(&server, "holds", "0"), 1);

    assert_eq!(line(&server), ["reads", "reads too"]);
    for id in ["reads", "reads too"] {
        // No connection hears the wake-up, so the grant ends early.
        assert!(expires(&server, id) <= now(&server) + 2000, "{id}");
    }
}

/// The client states that it has seen a number from 23 hours ahead of the server's clock. So the
/// server assigns a number that is ahead of its clock, and keeps this number in the key of the
/// line. The key must live until a day after the clock has passed the number. If the key expired
/// earlier and the clock was set back, the server could assign the same number again.
async fn no_release_or_renewal_shortens_the_life_of_a_number_ahead_of_the_clock(_: Store) {
    for cause in ["unknown", "lost", "full"] {
        let server = RedisServer::start();
        let seen = (now(&server) + 23 * 3_600_000) * 1000;
        let record = asking(&id("x"), "10", "10", "60000");
        let call = ["EVAL", &script("enqueue"), "1", KEY, &record];
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

/// There are 10,000 holders and no waiters. So there are no expired waiters to remove.
async fn a_request_beyond_the_limit_of_holders_is_answered_busy(_: Store) {
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

    let call = ["EVAL", &script("enqueue"), "1", KEY, &record, UNSEEN];
    let reply: Vec<i64> = server.command(&call);

    assert_eq!(reply[0], 2, "{reply:?}");
}

async fn an_exhausted_name_keeps_its_tickets(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "next", "10", "60000")[0], 1);
    end_lease(&server, "holds");
    let state: String = server.command(&["GET", KEY]);
    server.command::<()>(&["SET", KEY, &format!("{}{}", (1u64 << 53) - 1, &state[16..])]);

    assert_eq!(enqueue(&server, "late", "10", "60000"), [5]);

    assert_eq!(renew(&server, "next"), [0, 60000, -1]);
}

/// The holder has expired, and the adoption is the first request that finds it so. It grants the
/// ticket, and gives it away. Nobody hears messages for the client that had the ticket.
async fn an_adopted_waiter_whose_turn_has_just_come_is_held_by_its_new_client_alone(_: Store) {
    let lines: [&[(&str, &str)]; 2] = [
        &[("a", "10"), ("w", "4")],
        &[("a", "7"), ("b", "3"), ("w", "4")],
    ];
    for tickets in lines {
        let server = RedisServer::start();
        for (name, permits) in tickets {
            enqueue(&server, name, permits, "60000");
        }
        let record = record(&server, "w").unwrap();
        end_lease(&server, "a");

        let (permits, capacity) = (&record[62..72], &record[73..83]);
        let (from, to) = (id("w"), id("n"));
        let arguments = [
            &from,
            &record[..16],
            permits,
            capacity,
            &to,
            "60000",
            "00:me",
            "0",
        ];
        let call = ["EVAL", &script("adopt"), "1", KEY];
        let adopted: i64 = server.command(&[&call[..], &arguments[..]].concat());

        assert_eq!(adopted, 1);
        assert!(expires(&server, "n") > now(&server) + 30_000);
        assert_eq!(renew(&server, "w")[0], 2);
        assert_eq!(renew_with(&server, "n", "4")[0], 0);
        let mut left: Vec<_> = tickets.iter().map(|(name, _)| *name).collect();
        left.retain(|name| *name == "b");
        left.push("n");
        assert_eq!(line(&server), left);
    }
}
