//! Tests of the keeper's own connection: when the client opens it, and how leases are renewed while
//! it cannot be opened.

use std::future::ready;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{ErrorKind, Guard, Locks};
use tests::eventually::eventually;

use super::{TTL, kit};
use crate::store::{Kind, SOON, Store, give_back, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_keeper_connects_before_anything_is_due
        a_lease_is_renewed_while_the_keeper_cannot_connect
        a_renewal_without_an_answer_is_sent_again_when_the_keeper_has_connected
        ready_waits_for_the_connection_of_the_keeper
    ]
}

/// A lock that is held, on the only connection that the client could open so far. As long as the
/// `Hold`s live, the keeper does not connect.
async fn held(kit: &Kit, locks: &Locks) -> (Guard, Vec<Hold>) {
    let mut callers = kit.hold_next(Verb::Connect);
    let keepers = (0..20).map(|_| kit.hold_next(Verb::Connect)).collect();
    let lock = locks.mutex("a").ttl(TTL);
    let (guard, ()) = tokio::join!(lock.acquire(), async {
        callers.arrived().await;
        callers.let_go();
    });
    (guard.unwrap(), keepers)
}

/// Lets the clock advance until the renewal arrives.
async fn is_due(kit: &Kit, renewal: &mut Hold) {
    eventually("a renewal is sent", SOON, || {
        kit.clock().advance(TTL / 100);
        ready(renewal.arrived().now_or_never().is_some())
    })
    .await;
}

async fn the_keeper_connects_before_anything_is_due(_: Store) {
    let (kit, locks) = kit();
    let (_guard, mut keepers) = held(&kit, &locks).await;

    soon(keepers[0].arrived()).await; // the clock stands still
}

async fn a_lease_is_renewed_while_the_keeper_cannot_connect(_: Store) {
    let (kit, locks) = kit();
    let (guard, _keepers) = held(&kit, &locks).await;

    for _ in 0..9 {
        let mut renewal = kit.hold_next(Verb::Renew);
        is_due(&kit, &mut renewal).await;
        renewal.let_go();
        eventually("it is renewed", SOON, async || {
            guard.remaining() > TTL / 4 * 3
        })
        .await;
    }
    give_back(guard).await;
}

/// The runtime that lends its connection may be blocked, or the connection may be dead.
async fn a_renewal_without_an_answer_is_sent_again_when_the_keeper_has_connected(_: Store) {
    let (kit, locks) = kit();
    let (guard, keepers) = held(&kit, &locks).await;
    let mut unanswered = kit.hold_next(Verb::Renew);
    is_due(&kit, &mut unanswered).await;

    keepers.into_iter().for_each(Hold::let_go);

    eventually("it is renewed", SOON, async || {
        guard.remaining() > TTL / 4 * 3
    })
    .await;
    unanswered.let_go();
    give_back(guard).await;
}

async fn ready_waits_for_the_connection_of_the_keeper(_: Store) {
    let (kit, locks) = kit();
    let (guard, mut keepers) = held(&kit, &locks).await;
    soon(keepers[0].arrived()).await;
    let mut in_time = Box::pin(locks.ready(TTL));
    let mut too_late = Box::pin(locks.ready(TTL / 2));
    assert!(in_time.as_mut().now_or_never().is_none());
    assert!(too_late.as_mut().now_or_never().is_none());

    kit.clock().advance(TTL / 2);
    let error = soon(too_late).await.unwrap_err();
    keepers.into_iter().for_each(Hold::let_go);

    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    soon(in_time).await.unwrap();
    give_back(guard).await;
}
