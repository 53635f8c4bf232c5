//! Tests of enqueues that are repeated, and of enqueues that arrive after their release.

use libtest_mimic::Trial;
use tests::redis_server::RedisServer;

use super::{KEY, LINE, enqueue, lease_is_over, line, release, script};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_enqueue_repeated_after_its_lease_does_not_hold
        a_waiter_repeated_after_its_lease_is_taken_out_of_the_line
        an_enqueue_repeated_in_time_is_the_same_ticket
        an_enqueue_after_its_release_is_refused_while_the_mark_is_there
        a_name_with_a_mark_is_not_forgotten
    ]
}

/// The reply to the first enqueue was lost. The lease ended before the second enqueue.
async fn an_enqueue_repeated_after_its_lease_does_not_hold(_: Store) {
    let server = RedisServer::start();
    assert_eq!(enqueue(&server, "z", "10", "50")[0], 0);
    lease_is_over(&server, "z").await;

    // The store still has the expired record, because no script has read the line since.
    let repeated = enqueue(&server, "z", "10", "60000");

    assert_eq!((repeated[0], line(&server).len()), (4, 0));
    assert_eq!(enqueue(&server, "other", "10", "60000")[0], 0);
}

/// The expired waiter is not the first in line, so no script has removed it.
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

async fn a_name_with_a_mark_is_not_forgotten(_: Store) {
    let server = RedisServer::start();
    assert_eq!(release(&server, "x", "60000"), 0);

    let forgotten: i64 = server.command(&["EVAL", &script("forget"), "1", KEY]);

    assert_eq!(forgotten, 0);
    assert_eq!(enqueue(&server, "x", "10", "60000"), [4]);
}
