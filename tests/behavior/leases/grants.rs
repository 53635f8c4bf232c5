//! Tests of the events that report each grant of one lock and its end.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Fair, GrantEvent, LostReason, Release};

use crate::store::{Kind, SOON, Store, give_back, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        each_grant_of_a_lock_is_told_with_its_end
        readers_that_lose_their_lock_together_are_told_of_one_by_one
    ];
    if store.capability().asks_back {
        facts.extend(crate::store_facts![store;
            a_request_for_the_lock_is_told_between_grant_and_release
        ]);
    }
    facts
}

async fn each_grant_of_a_lock_is_told_with_its_end(store: Store) {
    let (locks, counts) = store.counted(Fair::Strict);
    let lock = locks.mutex("a").ttl(Duration::from_millis(600));
    let mut grants = lock.grants();

    let guard = lock.acquire().await.unwrap();
    let given_back = guard.grant_id();
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    let inner = guard.reenter().unwrap();
    give_back(inner).await;
    give_back(guard).await;
    counts.refuse_renewals(true);
    let guard = lock.acquire().await.unwrap();
    let lost = guard.grant_id();

    let told = [
        GrantEvent::Granted(given_back),
        GrantEvent::Released(given_back),
        GrantEvent::Granted(lost),
        GrantEvent::Lost(lost, LostReason::Expired),
    ];
    for expected in told {
        assert_eq!(soon(grants.recv()).await, Some(expected));
    }
    drop((guard, lock, locks));
    assert_eq!(soon(grants.recv()).await, None);
}

async fn readers_that_lose_their_lock_together_are_told_of_one_by_one(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(1)));
    let catalog = locks.rwlock("a");
    let read = || catalog.read().ttl(Duration::from_millis(600));
    let mut grants = read().grants();
    counts.refuse_renewals(true);

    let (first, second) = (
        read().acquire().await.unwrap(),
        read().acquire().await.unwrap(),
    );
    let ids = [first.grant_id(), second.grant_id()];
    assert_eq!(soon(second.lost()).await, LostReason::Expired);
    drop((first, second));

    for id in ids {
        assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Granted(id)));
    }
    let mut lost = Vec::new();
    for _ in ids {
        match soon(grants.recv()).await {
            Some(GrantEvent::Lost(id, LostReason::Expired)) => lost.push(id),
            other => panic!("{other:?}"),
        }
    }
    lost.sort_by_key(ToString::to_string);
    let mut ids = ids.to_vec();
    ids.sort_by_key(ToString::to_string);
    assert_eq!(lost, ids);
}

async fn a_request_for_the_lock_is_told_between_grant_and_release(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let lock = locks.mutex("a").ttl(Duration::from_secs(2));
    let mut grants = lock.grants();
    let guard = lock.acquire().await.unwrap();
    let id = guard.grant_id();
    assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Granted(id)));

    let asked = operator.revoke("a", id.ticket(), SOON, "the disk is full");
    let mut asked = std::pin::pin!(asked);
    let told = tokio::select! {
        outcome = &mut asked => panic!("it did not wait for the holder: {outcome:?}"),
        told = soon(grants.recv()) => told,
    };

    assert_eq!(told, Some(GrantEvent::AskedBack(id)));
    give_back(guard).await;
    assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Released(id)));
    assert_eq!(soon(asked).await.unwrap(), Release::Released);
}
