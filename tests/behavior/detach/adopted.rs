//! Tests of the guard of an adopter: it works like every other guard.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;

use super::{held, number};
use crate::store::{Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        an_adopted_lock_is_renewed_and_belongs_to_its_client
        an_adopted_lock_that_is_taken_away_is_lost
        an_adopted_lock_is_entered_again_downgraded_and_dropped
        a_shutdown_releases_an_adopted_lock
        a_client_that_is_being_shut_down_can_give_its_lock_away
    ];
    let capability = store.capability();
    if capability.asks_back {
        facts.extend(crate::store_facts![store;
            an_adopted_lock_is_asked_back
            a_lock_that_somebody_asks_for_is_not_detached
            a_lock_that_is_asked_for_on_its_way_is_given_up_by_its_adopter
        ]);
    }
    if capability.counters {
        facts.extend(crate::store_facts![store;
            the_value_of_a_lock_goes_along
        ]);
    }
    facts
}

/// Facts for stores that notify a holder at once when its lock is asked back.
pub(crate) fn facts_of_messages(store: Kind) -> Vec<Trial> {
    if !store.capability().adopts {
        return Vec::new();
    }
    crate::store_facts![store;
        an_ask_reaches_the_adopter_by_a_message
    ]
}

async fn handed_over(from: &Locks, to: &Locks, ttl: Duration) -> Guard {
    let guard = from.mutex("a").ttl(ttl).wait(SOON).acquire().await.unwrap();
    to.adopt(&guard.detach().await.unwrap()).await.unwrap()
}

async fn an_adopted_lock_is_renewed_and_belongs_to_its_client(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let ttl = Duration::from_secs(6); // a stall of three seconds leaves a renewal its time
    let adopted = handed_over(&locks, &other, ttl).await;
    let waiter = begin(locks.mutex("a").ttl(LEASE).wait(3 * SOON));

    // Four renewals take longer than the ttl. The first of them may come at any time.
    for _ in 0..4 {
        let aged = ttl / 5 * 4;
        eventually("it ages", SOON, async || adopted.remaining() < aged).await;
        eventually("it is renewed", SOON, async || adopted.remaining() > aged).await;
        assert!(adopted.remaining() <= ttl);
    }
    assert!(adopted.is_valid() && !waiter.is_finished());
    let shown = other.inspect("a").await.unwrap();
    assert_eq!(shown[0].ticket, adopted.grant_id().ticket());
    adopted.extend(2 * ttl).await.unwrap();
    assert!(adopted.remaining() > ttl);
    adopted.ensure(ttl).await.unwrap();
    give_back(adopted).await;
    give_back(soon(waiter).await.unwrap().unwrap()).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_adopted_lock_that_is_taken_away_is_lost(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let adopted = handed_over(&locks, &other, Duration::from_secs(3)).await;
    let ticket = adopted.grant_id().ticket();
    let mut events = other.events();

    let work = adopted.while_held(async {
        assert_eq!(
            locks.force_release("a", ticket).await.unwrap(),
            Release::Released
        );
        std::future::pending::<()>().await
    });
    let outcome = tokio::time::timeout(SOON, work).await.expect("it goes on");

    assert_eq!(kind(outcome), ErrorKind::Lost(LostReason::Taken));
    let told = soon(events.recv()).await;
    assert!(
        matches!(told, Some(lockcore::events::Event::Lost { ref name, .. }) if name == "a"),
        "{told:?}"
    );
    assert_eq!(adopted.release().await.unwrap(), Release::AlreadyLost);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_adopted_lock_is_entered_again_downgraded_and_dropped(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut adopted = handed_over(&locks, &other, LEASE).await;
    let token = number(&adopted);

    adopted
        .while_held(async {
            let inner = other.mutex("a").acquire().await.unwrap();
            assert_eq!(number(&inner), token);
            give_back(inner).await;
        })
        .await
        .unwrap();
    // A task of the same client that is outside the scope waits at the store, like any other
    // client.
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    adopted.downgrade().await.unwrap();
    give_back(locks.rwlock("a").read().try_acquire().await.unwrap()).await;
    drop(adopted);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_shutdown_releases_an_adopted_lock(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let adopted = handed_over(&locks, &other, LEASE).await;

    other.shutdown(SOON / 2).await.unwrap();

    assert_eq!(soon(adopted.lost()).await, LostReason::Shutdown);
    give_back(held(&locks).await).await;
    let text = held(&locks).await.detach().await.unwrap();
    let late = other.adopt(&text).await;
    assert_eq!(kind(late), ErrorKind::Lost(LostReason::Shutdown));
    // The refused adoption has sent no request, so the text can be used.
    give_back(locks.adopt(&text).await.unwrap()).await;
    assert_nothing_left(&store, &locks, "a").await;
}

/// A deployment may need this: the next version of a service continues the work under the same
/// lock.
async fn a_client_that_is_being_shut_down_can_give_its_lock_away(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let guard = held(&locks).await;
    let shutdown = {
        let locks = locks.clone();
        tokio::spawn(async move { locks.shutdown(3 * SOON).await })
    };
    eventually("it takes no more locks", SOON, async || {
        locks.mutex("b").try_acquire().await.is_err()
    })
    .await;

    let text = guard.detach().await.unwrap();

    soon(shutdown).await.unwrap().unwrap();
    drop(locks);
    give_back(other.adopt(&text).await.unwrap()).await;
    assert_nothing_left(&store, &other, "a").await;
}

const TTL: Duration = Duration::from_secs(6);

async fn an_adopted_lock_is_asked_back(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let adopted = handed_over(&locks, &other, TTL).await;
    let ticket = adopted.grant_id().ticket();
    let asked = tokio::spawn(async move { operator.revoke("a", ticket, SOON, "a deploy").await });

    let told = soon(adopted.revoked()).await;

    assert_eq!(told.why, "a deploy");
    give_back(adopted).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
    assert_nothing_left(&store, &locks, "a").await;
}

/// The adopter's renewals are twenty seconds apart. So it can learn of the ask-back this soon only
/// by a message of the store.
async fn an_ask_reaches_the_adopter_by_a_message(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let adopted = handed_over(&locks, &other, LEASE).await;
    let ticket = adopted.grant_id().ticket();
    let asked = tokio::spawn(async move { operator.revoke("a", ticket, SOON, "x").await });

    assert_eq!(soon(adopted.revoked()).await.why, "x");
    give_back(adopted).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
}

async fn a_lock_that_somebody_asks_for_is_not_detached(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let guard = locks.mutex("a").ttl(TTL).acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let asked = tokio::spawn(async move { operator.revoke("a", ticket, SOON, "x").await });
    soon(guard.revoked()).await;

    let (busy, guard) = super::refused(guard).await;

    assert_eq!(busy, ErrorKind::Busy);
    give_back(guard).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
}

/// The lock is asked back between the detach and the adoption. Nobody renews the ticket in this
/// time, so no client learns of the ask-back before the adoption.
async fn a_lock_that_is_asked_for_on_its_way_is_given_up_by_its_adopter(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let guard = locks.mutex("a").ttl(TTL).acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let text = guard.detach().await.unwrap();
    let asks = operator.clone();
    let asked = tokio::spawn(async move { asks.revoke("a", ticket, SOON, "x").await });
    eventually("it is asked for", SOON, async || {
        let shown = operator.inspect("a").await.unwrap();
        shown.iter().any(|place| place.asked_back.is_some())
    })
    .await;

    let adopted = other.adopt(&text).await.unwrap();

    assert_eq!(soon(adopted.revoked()).await.why, "x");
    assert!(adopted.is_valid(), "it has its grace");
    give_back(adopted).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn the_value_of_a_lock_goes_along(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let guard = held(&locks).await;
    guard.set_value("page 7 of 12").await.unwrap();

    let adopted = other.adopt(&guard.detach().await.unwrap()).await.unwrap();

    let found = adopted.value().await.unwrap().unwrap();
    assert_eq!(&*found.text, "page 7 of 12");
    adopted.set_value("page 8 of 12").await.unwrap();
    let read = locks.value("a").get().await.unwrap().unwrap();
    assert_eq!(&*read.text, "page 8 of 12");
    give_back(adopted).await;
}
