//! Several tickets of a name that are renewed in one call.

use libtest_mimic::Trial;
use tests::redis_server::RedisServer;

use super::{KEY, connect, enqueue, expires, id, now, record, renew, renew_all};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_holder_that_is_named_twice_in_a_batch_stays_small
        a_waiter_that_is_named_twice_in_a_batch_is_told_twice_when_to_look
        tickets_of_a_batch_that_name_one_twice_are_renewed_in_their_order
        one_that_a_batch_lets_in_and_renews_is_told_by_the_reply_alone
        a_lease_that_a_batch_lets_in_and_renews_is_as_long_as_it_says
    ]
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
