//! Barriers on the store for tests, which loses, holds and forgets what a fact names.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Barrier, ErrorKind, Left, Locks, LostReason};

use super::{BRIEF, passed, waits};
use crate::store::{DEFAULT, Kind, SOON, Store, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        lost_requests_and_replies_keep_no_party_back
        lost_requests_and_replies_keep_nobody_inside
        a_party_that_gave_up_before_the_round_was_counted_is_not_in_it
        a_party_whose_time_is_over_goes_on_if_it_was_counted
        a_store_that_has_lost_its_data_lets_nobody_go_on
        a_party_that_was_frozen_beyond_its_lease_does_not_go_on
        a_client_that_is_shut_down_does_not_wait
    ]
}

const VERBS: [Verb; 5] = [
    Verb::Count,
    Verb::Enqueue,
    Verb::Renew,
    Verb::Watch,
    Verb::Release,
];

async fn lost_requests_and_replies_keep_no_party_back(_: Store) {
    for verb in VERBS {
        for after in 0..6 {
            for lose in [Kit::lose_next_reply, Kit::lose_next_request] {
                let kit = Kit::new();
                let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
                let first = waits(&locks.barrier("a", 2).wait(SOON));
                tickets(&other, "a", 1).await;
                let second = other.barrier("a", 2).wait(SOON);
                let mut second = Box::pin(second.wait_for_all());
                // The fault comes at the next request of this kind, wherever the two are by then.
                for _ in 0..after {
                    tokio::select! {
                        biased;
                        _ = &mut second => break,
                        () = tokio::task::yield_now() => {}
                    }
                }
                lose(&kit, verb);
                if after == 0 {
                    assert!(soon(second).await.unwrap().is_leader(), "{verb:?}");
                }
                assert!(!passed(first).await, "{verb:?}");
            }
        }
    }
}

async fn lost_requests_and_replies_keep_nobody_inside(_: Store) {
    for verb in VERBS {
        for lose in [Kit::lose_next_reply, Kit::lose_next_request] {
            let kit = Kit::new();
            let (locks, other) = (kit.client().unwrap(), kit.client().unwrap());
            let barrier = |locks: &Locks| locks.double_barrier("a", 2).wait(2 * SOON);
            lose(&kit, verb);
            let (first, second) = (barrier(&locks), barrier(&other));
            let (first, second) = soon(async { tokio::join!(first.enter(), second.enter()) }).await;
            lose(&kit, verb);
            let both = async { tokio::join!(first.unwrap().leave(), second.unwrap().leave()) };
            let (first, second) = soon(both).await;
            assert_eq!(
                (first.unwrap(), second.unwrap()),
                (Left::All, Left::All),
                "{verb:?}"
            );
        }
    }
}

/// Two processes, and a barrier for two parties.
fn two() -> (Kit, Barrier, Kit, Barrier) {
    let here = Kit::new();
    let there = here.another_process();
    let barrier = |kit: &Kit| kit.client().unwrap().barrier("a", 2).wait(SOON);
    let (ours, theirs) = (barrier(&here), barrier(&there));
    (here, ours, there, theirs)
}

async fn a_party_that_gave_up_before_the_round_was_counted_is_not_in_it(_: Store) {
    let (here, ours, there, _) = two();
    let locks = here.client().unwrap();
    let first = waits(&ours.wait(3 * BRIEF));
    tickets(&locks, "a", 1).await;
    // It reads the counter, sees two places, and its change is late. It does not send the change a second time.
    let patient = there.client_with(Locks::builder().op_timeout(2 * SOON));
    let second = patient.unwrap().barrier("a", 2).wait(3 * SOON);
    let mut read = there.hold_next(Verb::Count);
    let mut second = waits(&second);
    read.arrived().await;
    let mut change = there.hold_next(Verb::Count);
    read.let_go();
    change.arrived().await;

    assert_eq!(kind(soon(first).await.unwrap()), ErrorKind::Timeout);
    change.let_go();

    // It is alone, and waits for another.
    let early = tokio::time::timeout(BRIEF, &mut second).await;
    assert!(early.is_err(), "it went on alone: {early:?}");
    let third = soon(locks.barrier("a", 2).wait_for_all()).await.unwrap();
    assert!(third.is_leader() && !passed(second).await);
}

async fn a_party_whose_time_is_over_goes_on_if_it_was_counted(_: Store) {
    let (here, ours, _, theirs) = two();
    let mut watch = here.hold_next(Verb::Watch);
    let first = waits(&ours.wait(3 * BRIEF));
    watch.arrived().await;
    let mut read = here.hold_next(Verb::Count);
    watch.let_go();
    read.arrived().await;
    // What it reads from here on is the news. It does not hear them before its time is over.
    let news = here.hold_next(Verb::Count);
    read.let_go();

    assert!(soon(theirs.wait_for_all()).await.unwrap().is_leader());

    let outcome = soon(first).await.unwrap();
    assert!(!outcome.unwrap().is_leader());
    drop(news);
}

async fn a_store_that_has_lost_its_data_lets_nobody_go_on(_: Store) {
    for breaks in [false, true] {
        let (here, ours, _, theirs) = two();
        let other = here.client().unwrap();
        // A first round, so that the counter is there. Or none.
        if breaks {
            let (one, two) = tokio::join!(ours.wait_for_all(), theirs.wait_for_all());
            assert!(one.is_ok() && two.is_ok());
            tickets(&other, "a", 0).await;
        }
        let old = waits(&ours);
        tickets(&other, "a", 1).await;

        here.lose_data();
        if breaks {
            here.break_connections();
        }
        let (one, two) = tokio::join!(theirs.wait_for_all(), theirs.wait_for_all());

        assert!(one.is_ok() && two.is_ok());
        let error = soon(old)
            .await
            .unwrap()
            .expect_err("it went on as a third of two");
        let is_told = matches!(
            error.kind(),
            ErrorKind::Unavailable | ErrorKind::Lost(LostReason::Taken)
        );
        assert!(is_told, "{error}");
    }
}

async fn a_party_that_was_frozen_beyond_its_lease_does_not_go_on(_: Store) {
    let (here, ours, there, theirs) = two();
    let other = here.client().unwrap();
    let frozen = waits(&theirs.wait(6 * SOON));
    tickets(&other, "a", 1).await;

    there.freeze();
    here.clock().advance(Duration::from_secs(20));
    let (one, two) = tokio::join!(ours.wait_for_all(), ours.wait_for_all());
    assert!(one.is_ok() && two.is_ok());
    there.thaw();

    let kind = kind(soon(frozen).await.unwrap());
    assert!(matches!(kind, ErrorKind::Lost(_)), "{kind:?}");
}

async fn a_client_that_is_shut_down_does_not_wait(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let waiting = waits(&locks.barrier("a", 2).wait(6 * SOON));
    tickets(&kit.client().unwrap(), "a", 1).await;

    locks.shutdown(Duration::from_secs(1)).await.unwrap();

    let kind = kind(soon(waiting).await.unwrap());
    assert_eq!(kind, ErrorKind::Lost(LostReason::Shutdown));
}
