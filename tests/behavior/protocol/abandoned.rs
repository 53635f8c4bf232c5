//! Tests of requests whose caller gives up, and of requests that are denied, refused or not
//! answered. They show which tickets the client releases, and when a release leaves a mark.

use std::sync::Arc;

use libtest_mimic::Trial;
use lockcore::backend::{Enqueued, Fault, Request, StoreError};
use lockcore::{ErrorKind, Locks, Release};

use super::TTL;
use super::player::{Asked, Player, granted, patient, played};
use crate::store::{Kind, SOON, Store, begin, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_abandoned_request_is_released_after_its_reply_and_not_before
        an_abandoned_request_that_is_never_answered_leaves_a_mark
        a_refusal_does_not_settle_an_earlier_try_of_an_abandoned_request
        a_ticket_that_a_denied_request_may_have_left_is_given_back
        a_request_that_was_denied_from_the_start_leaves_nothing_to_give_back
        a_release_leaves_a_mark_when_an_earlier_try_is_still_under_way
        an_unanswered_try_makes_the_outcome_unknown_with_any_next_answer
        a_release_that_the_store_leaves_out_is_repeated
    ]
}

async fn abandon<T>(task: tokio::task::JoinHandle<T>) {
    task.abort();
    assert!(task.await.is_err_and(|ended| ended.is_cancelled()));
}

/// If a release arrived before its enqueue, the enqueue would leave a ticket that nobody uses.
async fn an_abandoned_request_is_released_after_its_reply_and_not_before(_: Store) {
    let (locks, mut store) = patient();
    drop(store.grant(&locks.mutex("warm")).await);
    store.release().await; // the keeper is connected
    let other = store.grant(&locks.mutex("other")).await;
    let task = begin(locks.mutex("a"));
    let (request, reply) = store.enqueue().await;

    abandon(task).await;
    // The keeper does clean-ups in order. If it released the abandoned request too early, that
    // release would come before this one.
    drop(other);
    assert_eq!(store.release().await.request.name.as_str(), "other");
    reply.send(Ok(granted(TTL))).unwrap();

    let departure = store.release().await;
    assert_eq!(departure.request.id, request.id);
    assert!(
        !departure.enqueue_may_follow,
        "the reply was here: no mark is needed"
    );
}

async fn an_abandoned_request_that_is_never_answered_leaves_a_mark(_: Store) {
    let (locks, mut store) = played();
    let task = begin(locks.mutex("a"));
    let (request, _never_answered) = store.enqueue().await;

    abandon(task).await;

    let departure = store.release().await;
    assert_eq!(departure.request.id, request.id);
    assert!(departure.enqueue_may_follow);
}

async fn a_refusal_does_not_settle_an_earlier_try_of_an_abandoned_request(_: Store) {
    let refusals = [
        Ok(Enqueued::Busy { retry_in: None }),
        Err(StoreError::new(Fault::Refused, "full")),
    ];
    for refusal in refusals {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        let (request, lost) = store.enqueue().await;
        drop(lost);
        let (again, reply) = store.enqueue().await;
        assert_eq!(again.id, request.id);

        abandon(task).await;
        reply.send(refusal).unwrap();

        let departure = store.release().await;
        assert_eq!(departure.request.id, request.id);
        assert!(departure.enqueue_may_follow);
    }
}

/// Acquires a lock, and answers its request with this error. The caller drops the future before the
/// answer comes, or waits for the answer.
async fn is_denied(
    locks: &Locks,
    store: &mut Player,
    denied: StoreError,
    dropped: bool,
) -> Arc<Request> {
    let task = begin(locks.mutex("a"));
    let (request, reply) = store.enqueue().await;
    if dropped {
        abandon(task).await;
        reply.send(Err(denied)).unwrap();
    } else {
        reply.send(Err(denied)).unwrap();
        assert_eq!(kind(task.await.unwrap()), ErrorKind::Config);
    }
    request
}

/// The right to run a command may be taken away in the middle of a script, so the store may have a
/// ticket.
async fn a_ticket_that_a_denied_request_may_have_left_is_given_back(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = patient();
        let denied = StoreError::halfway(Fault::Config, "denied");
        let request = is_denied(&locks, &mut store, denied, dropped).await;

        let departure = store.release().await;
        assert_eq!(departure.request.id, request.id);
        assert!(!departure.enqueue_may_follow, "it was answered");
    }
}

/// The store has no ticket, so the keeper sends no release. A release could be denied too, and on a
/// store with sessions the keeper would repeat it without end.
async fn a_request_that_was_denied_from_the_start_leaves_nothing_to_give_back(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = patient();
        let denied = StoreError::new(Fault::Config, "denied");
        is_denied(&locks, &mut store, denied, dropped).await;

        locks.shutdown(SOON).await.unwrap();

        let asked = store.asked.try_recv();
        assert!(asked.is_err(), "{asked:?}");
    }
}

async fn a_release_leaves_a_mark_when_an_earlier_try_is_still_under_way(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        drop(store.enqueue().await); // the connection breaks in the first try
        let (request, reply) = store.enqueue().await;
        reply.send(Ok(granted(request.ttl))).unwrap();
        let guard = task.await.unwrap().unwrap();

        let departure = if dropped {
            drop(guard);
            store.release().await
        } else {
            let (released, departure) = tokio::join!(guard.release(), store.release());
            assert_eq!(released.unwrap(), Release::Released);
            departure
        };

        assert!(departure.enqueue_may_follow, "dropped: {dropped}");
    }
}

async fn an_unanswered_try_makes_the_outcome_unknown_with_any_next_answer(_: Store) {
    let (locks, mut store) = played();
    let task = begin(locks.mutex("a"));
    drop(store.enqueue().await); // the connection breaks in the first try
    let (_, reply) = store.enqueue().await;
    reply
        .send(Err(StoreError::new(Fault::Refused, "full")))
        .unwrap();

    let error = task.await.unwrap().unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.may_hold());
    assert!(store.release().await.enqueue_may_follow);
}

/// A third-party store answers for fewer tickets than the request has.
async fn a_release_that_the_store_leaves_out_is_repeated(_: Store) {
    let (locks, mut store) = played();
    drop(store.grant(&locks.mutex("a")).await);
    for _ in 0..2 {
        let Asked::Release(tickets, reply) = store.next().await else {
            panic!("not a release");
        };
        assert_eq!(tickets.len(), 1);
        reply.send(Ok(Vec::new())).unwrap();
    }
    store.release().await;
    locks.shutdown(SOON).await.unwrap();
}
