//! Tests of how long a verb waits for its replicas: as long as its own caller waits, whatever other
//! verbs of the same `WAIT` need.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::eventually::eventually;
use tests::stalls::awake_since;

use super::{Distant, OP_TIMEOUT, durable, hasty, servers, tickets_at};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        a_verb_with_little_time_costs_the_others_of_its_turn_nothing
        a_verb_that_goes_through_two_turns_is_answered_within_one_operation
        a_wait_that_is_shorter_than_the_servers_ends_as_unavailable_and_leaves_nothing
        a_waiter_behind_a_refused_request_asks_for_a_ticket_of_its_own
        a_lease_that_was_extended_is_renewed_with_the_time_of_its_new_ttl
    ]
}

/// Two verbs have less time than the replica needs: the renewal of a short lease, and a request
/// with a short wait. They share a `WAIT` with a request that has more time.
async fn a_verb_with_little_time_costs_the_others_of_its_turn_nothing(_: Store) {
    let servers = Distant::start().await;
    let locks = hasty(&servers.url()).build().unwrap();
    let ttl = Duration::from_millis(800);
    let short = locks.mutex("short").ttl(ttl).renew(false);
    let short = short.acquire().await.unwrap();
    servers.is_away(Duration::from_millis(300));
    // The `WAIT` of this request has begun when the others come.
    let first = begin(locks.mutex("first"));
    tickets_at(&servers.master, "first", 1).await;

    let patient = begin(locks.mutex("patient"));
    let brief = begin(locks.mutex("brief").wait(Duration::from_millis(450)));
    // Requires nearly the whole ttl, so that the client sends a renewal.
    let _ = short.ensure(ttl / 100 * 97).await;

    for guard in [first, patient] {
        give_back(guard.await.unwrap().unwrap()).await;
    }
    assert_eq!(kind(brief.await.unwrap()), ErrorKind::Unavailable);
    tickets_at(&servers.master, "brief", 0).await;
}

/// The server has forgotten the script, so the request is sent twice. Another request is sent
/// before it.
async fn a_verb_that_goes_through_two_turns_is_answered_within_one_operation(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();
    let first = begin(locks.mutex("first"));
    tickets_at(&master, "first", 1).await;
    master.command::<()>(&["SCRIPT", "FLUSH"]);

    let began = Instant::now();
    let error = locks.mutex("a").wait(3 * SOON).acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    assert!(awake_since(began) < OP_TIMEOUT, "{:?}", began.elapsed());
    tickets_at(&master, "a", 0).await;
    assert_eq!(kind(first.await.unwrap()), ErrorKind::Unavailable);
    replicas[0].thaw();
}

/// The first request is sent, and waits for the replica. The second is never sent, because it would
/// have to wait behind another request.
async fn a_wait_that_is_shorter_than_the_servers_ends_as_unavailable_and_leaves_nothing(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();
    let wait = OP_TIMEOUT / 8;

    let error = locks.mutex("a").wait(wait).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    tickets_at(&master, "a", 0).await;

    let patient = begin(locks.mutex("patient"));
    tickets_at(&master, "patient", 1).await;
    let error = locks.mutex("b").wait(wait).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(!error.may_hold(), "{error}");
    tickets_at(&master, "b", 0).await;
    assert!(!patient.is_finished(), "its time was cut short");
    replicas[0].thaw();
    give_back(patient.await.unwrap().unwrap()).await;
    tickets_at(&master, "b", 0).await;
}

/// Both waiters are tasks of one process. The first is the leader of the lane. Its request is
/// refused, so the second cannot use the ticket that this request has left.
async fn a_waiter_behind_a_refused_request_asks_for_a_ticket_of_its_own(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();
    let brief = begin(locks.mutex("a").wait(OP_TIMEOUT / 2));
    tickets_at(&master, "a", 1).await;
    let patient = begin(locks.mutex("a").wait(STALL));
    eventually("it waits in this process", SOON, async || {
        let places = locks.inspect("a").await.unwrap();
        places.iter().any(|place| place.local_waiters == 1)
    })
    .await;

    assert_eq!(kind(brief.await.unwrap()), ErrorKind::Unavailable);
    replicas[0].thaw();

    let patient = tokio::time::timeout(SOON, patient).await;
    give_back(patient.expect("it hangs").unwrap().unwrap()).await;
    tickets_at(&master, "a", 0).await;
}

/// A renewal waits for the replica for a quarter of the ttl. A quarter of the first ttl would be
/// too short for this replica.
async fn a_lease_that_was_extended_is_renewed_with_the_time_of_its_new_ttl(_: Store) {
    let servers = Distant::start().await;
    let locks = hasty(&servers.url()).build().unwrap();
    let (taken, extended) = (Duration::from_secs(6), Duration::from_secs(24));
    let guard = locks.mutex("a").ttl(taken).acquire().await.unwrap();
    guard.extend(extended).await.unwrap();
    servers.is_away(Duration::from_secs(2));

    // The keeper renews the lease when two thirds of the ttl are left.
    for (is_renewed, what) in [(false, "it ages"), (true, "it is renewed")] {
        eventually(what, SOON, async || {
            is_renewed == (guard.remaining() > extended / 4 * 3)
        })
        .await;
    }
    give_back(guard).await;
}
