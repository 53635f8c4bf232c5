//! Tests of double barriers: parties enter together, leave together, and learn how many of them are
//! missing.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::double_barrier::{DoubleBarrier, Inside, Left};
use lockcore::{Error, ErrorKind, Locks};
use tests::eventually::eventually;
use tokio::task::JoinHandle;

use super::{ANSWERED, BRIEF};
use crate::store::{DEFAULT, Kind, LEASE, SOON, Store, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        parties_enter_together_and_leave_together
        the_next_group_enters_when_all_have_left
        a_party_that_drops_its_place_is_missing
        the_others_learn_of_a_dropped_place_long_before_its_lease_would_end
        a_party_leaves_in_the_grace_of_a_shutdown
        a_party_that_enters_at_the_last_moment_is_inside
        a_party_that_does_not_leave_is_waited_for
    ]
}

/// The ttl is short, because the others notice a dropped place only when its lease could have
/// ended.
const TTL: Duration = Duration::from_secs(6);

fn barrier(locks: &Locks) -> DoubleBarrier {
    locks.double_barrier("a", 3).ttl(TTL).wait(4 * SOON)
}

async fn entered(locks: &Locks) -> [Inside; 3] {
    let barrier = barrier(locks);
    let all = tokio::join!(barrier.enter(), barrier.enter(), barrier.enter());
    let inside = [all.0, all.1, all.2].map(Result::unwrap);
    assert_eq!(inside.iter().filter(|party| party.is_leader()).count(), 1);
    inside
}

fn leaves(inside: Inside) -> JoinHandle<Result<Left, Error>> {
    tokio::spawn(inside.leave())
}

async fn left(leaving: JoinHandle<Result<Left, Error>>) -> Left {
    let left = tokio::time::timeout(2 * TTL + SOON, leaving).await;
    left.expect("hangs").unwrap().unwrap()
}

/// Waits until two parties have left. Their tickets are kept, with one permit each, until all have
/// left.
async fn two_have_left(locks: &Locks) {
    eventually("they leave", SOON, async || {
        let places = locks.inspect("a").await.unwrap();
        places.iter().filter(|place| place.permits == 1).count() == 2
    })
    .await;
}

async fn parties_enter_together_and_leave_together(store: Store) {
    let (locks, other) = (store.client(), store.client());
    for _ in 0..3 {
        let two = [&locks, &other].map(|locks| {
            let barrier = barrier(locks);
            tokio::spawn(async move { barrier.enter().await })
        });
        tickets(&locks, "a", 2).await;
        assert!(two.iter().all(|party| !party.is_finished()));
        let third = soon(barrier(&other).enter()).await.unwrap();
        let [first, second] = two.map(|party| async move { soon(party).await.unwrap().unwrap() });
        let (first, second) = (first.await, second.await);
        assert!(first.is_valid() && second.is_valid() && third.is_valid());

        let two = [leaves(second), leaves(third)];
        two_have_left(&locks).await;
        assert!(
            two.iter().all(|party| !party.is_finished()),
            "one is inside"
        );
        assert_eq!(soon(first.leave()).await.unwrap(), Left::All);
        for party in two {
            assert_eq!(left(party).await, Left::All);
        }
        tickets(&locks, "a", 0).await;
    }
}

async fn the_next_group_enters_when_all_have_left(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let [first, second, third] = entered(&locks).await;
    let (enters, there) = (other.clone(), other.clone());
    let next = tokio::spawn(async move { entered(&enters).await });
    tickets(&there, "a", 6).await;
    let leaving = [leaves(first), leaves(second)];
    two_have_left(&there).await;

    // These two have given up enough permits for one party of the next group.
    eventually("it has its place", SOON, async || {
        let places = there.inspect("a").await.unwrap();
        places.iter().filter(|place| place.granted).count() == 4
    })
    .await;
    assert!(!next.is_finished(), "one is inside");
    assert_eq!(soon(third.leave()).await.unwrap(), Left::All);
    for party in leaving {
        assert_eq!(left(party).await, Left::All);
    }

    let inside = soon(next).await.unwrap();
    for leaving in inside.map(leaves) {
        assert_eq!(left(leaving).await, Left::All);
    }
    tickets(&locks, "a", 0).await;
}

async fn a_party_that_drops_its_place_is_missing(store: Store) {
    let locks = store.client();
    let [first, second, third] = entered(&locks).await;
    let early = tokio::time::timeout(BRIEF, second.missing()).await;
    assert!(early.is_err(), "all are inside");

    drop(first);

    let told = tokio::time::timeout(TTL + SOON, second.missing()).await;
    assert_eq!(told.expect("told"), 1);
    let leaving = [leaves(second), leaves(third)];
    for party in leaving {
        assert_eq!(left(party).await, Left::NotAll);
    }
    tickets(&locks, "a", 0).await;

    // The last party inside drops its place after the others have left. It is missing too.
    let [first, second, third] = entered(&locks).await;
    let leaving = [leaves(second), leaves(third)];
    two_have_left(&locks).await;
    drop(first);
    for party in leaving {
        assert_eq!(left(party).await, Left::NotAll);
    }
    tickets(&locks, "a", 0).await;
}

async fn the_others_learn_of_a_dropped_place_long_before_its_lease_would_end(store: Store) {
    for leaves_first in [false, true] {
        let locks = store.client();
        let barrier = locks.double_barrier("a", 2).wait(LEASE);
        let (first, second) = tokio::join!(barrier.enter(), barrier.enter());
        let (first, second) = (first.unwrap(), second.unwrap());
        let other = tokio::spawn(async move {
            if !leaves_first {
                assert_eq!(second.missing().await, 1);
            }
            second.leave().await
        });
        if leaves_first {
            eventually("it has left", SOON, async || {
                let places = locks.inspect("a").await.unwrap();
                places.iter().any(|place| place.permits == 1)
            })
            .await;
        }

        drop(first);

        assert_eq!(soon(other).await.unwrap().unwrap(), Left::NotAll);
        tickets(&locks, "a", 0).await;
    }
}

async fn a_party_leaves_in_the_grace_of_a_shutdown(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let enter = |locks: &Locks| {
        let barrier = barrier(locks);
        async move { barrier.enter().await.unwrap() }
    };
    let [first, second, third] =
        <[_; 3]>::from(tokio::join!(enter(&locks), enter(&locks), enter(&other)));
    // One party leaves before the shutdown begins, and waits for the others.
    let first = leaves(first);
    eventually("it has left", SOON, async || {
        let places = other.inspect("a").await.unwrap();
        places.iter().any(|place| place.permits == 1)
    })
    .await;

    let ends = locks.clone();
    let ends = tokio::spawn(async move { ends.shutdown(4 * SOON).await });
    eventually("it is shut down", SOON, async || {
        locks.mutex("b").try_acquire().await.is_err()
    })
    .await;

    let leaving = [first, leaves(second), leaves(third)];
    for party in leaving {
        assert_eq!(left(party).await, Left::All);
    }
    soon(ends).await.unwrap().unwrap();
    tickets(&other, "a", 0).await;
}

/// How long before the end of the first party's wait the second party comes. This is about as long
/// as a party takes to enter. So the first party is about to give up, is giving up, or has just
/// given up.
const LAST_MOMENT: Duration = Duration::from_millis(4);

/// The second party comes when the wait of the first is nearly over, and the first may have begun
/// to give up. Either both parties enter, or both get an error.
async fn a_party_that_enters_at_the_last_moment_is_inside(store: Store) {
    let locks = store.client();
    let mut entered = 0;
    for round in 0..20 {
        let wait = Duration::from_millis(60 + 5 * round);
        let barrier = locks.double_barrier("a", 2).wait(wait);
        let late = locks.double_barrier("a", 2).wait(4 * wait);
        let (first, second) = tokio::join!(barrier.enter(), async {
            // No event tells when the first party gives up, so the test sleeps.
            tokio::time::sleep(wait - LAST_MOMENT).await;
            late.enter().await
        });
        match (first, second) {
            (Ok(first), Ok(second)) => {
                entered += 1;
                assert!(first.is_valid() && second.is_valid());
                // Both parties are dropped and do not call `leave`, because the wait of the first
                // is too short for it.
                drop((first, second));
                tickets(&locks, "a", 0).await;
            }
            (first, second) => {
                // On a busy machine an answer may take longer than the whole wait. A party whose
                // answer is late gets `Unknown`, and the other party may be inside. A party whose
                // first look is not answered gets `Unavailable`, and has asked for nothing yet.
                let told =
                    |outcome: &Result<Inside, Error>| outcome.as_ref().err().map(Error::kind);
                let told = [told(&first), told(&second)];
                let is_unknown = told.contains(&Some(ErrorKind::Unknown));
                let is_outside = |kind: &Option<ErrorKind>| {
                    matches!(kind, Some(ErrorKind::Timeout | ErrorKind::Unavailable))
                };
                assert!(is_unknown || told.iter().all(is_outside), "{told:?}");
            }
        }
    }
    println!("{entered} of 20 entered");
    tickets(&locks, "a", 0).await;
}

async fn a_party_that_does_not_leave_is_waited_for(store: Store) {
    let locks = store.client();
    let barrier = locks.double_barrier("a", 2).ttl(TTL).wait(SOON);
    let brief = locks.double_barrier("a", 2).ttl(TTL).wait(ANSWERED);
    let (stays, second) = (barrier.enter(), async {
        tickets(&locks, "a", 1).await;
        brief.enter().await
    });
    let (stays, second) = tokio::join!(stays, second);

    let error = second.unwrap().leave().await.unwrap_err();

    assert_eq!(
        (error.kind(), error.name()),
        (ErrorKind::Timeout, Some("a"))
    );
    // The work inside of the barrier may be done.
    assert!(error.was_held());
    tickets(&locks, "a", 1).await;
    assert_eq!(soon(stays.unwrap().leave()).await.unwrap(), Left::NotAll);
    tickets(&locks, "a", 0).await;
}
