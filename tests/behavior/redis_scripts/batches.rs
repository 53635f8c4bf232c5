//! Tests of the renewal script with several tickets of a name in one call.

use libtest_mimic::Trial;
use tests::redis_server::RedisServer;

use super::{KEY, connect, enqueue, expires, id, now, record, renew, renew_all};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_holder_named_twice_in_a_batch_does_not_grow_again
        a_waiter_named_twice_in_a_batch_is_told_twice_when_to_recheck
        a_batch_that_names_a_ticket_twice_is_carried_out_in_order
        a_waiter_that_a_batch_grants_and_renews_is_told_only_by_the_reply
        a_waiter_that_a_batch_grants_and_renews_gets_the_lease_of_the_reply
    ]
}

/// The first renewal makes the ticket smaller. The second must not write the number of permits that
/// the script read before the first.
async fn a_holder_named_twice_in_a_batch_does_not_grow_again(_: Store) {
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

async fn a_waiter_named_twice_in_a_batch_is_told_twice_when_to_recheck(_: Store) {
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

/// The batch names `x` twice, with a ticket of another name in between. Only one of the two
/// renewals of `x` can take the short cut.
async fn a_batch_that_names_a_ticket_twice_is_carried_out_in_order(_: Store) {
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

/// The reply tells the waiter that it is granted, so the script sends it no wake-up. The first
/// wake-up goes to the waiter behind it.
async fn a_waiter_that_a_batch_grants_and_renews_is_told_only_by_the_reply(_: Store) {
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

/// No connection hears wake-ups, so the script would shorten the lease of a grant. It does not
/// shorten this lease, because the reply tells the client of the grant.
async fn a_waiter_that_a_batch_grants_and_renews_gets_the_lease_of_the_reply(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "holds", "10", "60000")[0], 0);
    assert_eq!(enqueue(&server, "next", "5", "60000")[0], 1);

    let batch = [["holds", "5", "60000"], ["next", "5", "60000"]];
    let reply = renew_all(&server, &[KEY, KEY], &batch);

    assert_eq!(reply, [0, 60000, -1].repeat(2));
    assert!(expires(&server, "next") > now(&server) + 30_000);
}
