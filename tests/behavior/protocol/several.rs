//! Several locks that are taken together.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{Enqueued, Fault, Id, Released, Request, StoreError};
use lockcore::multi::MultiGuard;
use lockcore::{Error, ErrorKind, Locks};
use tokio::task::unconstrained;

use super::player::{Asked, Player, Reply, granted, played};
use crate::store::{Kind, LEASE, SOON, Store, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        several_locks_are_asked_for_before_the_first_answer
        a_free_lock_behind_one_that_is_held_is_given_back
        an_error_of_one_that_is_asked_for_early_is_the_result
        what_is_free_behind_a_lock_that_is_waited_for_is_given_back_at_once
        nothing_behind_a_lock_that_this_process_holds_is_asked_for
        a_caller_that_does_not_wait_asks_for_one_after_the_other
    ]
}

type Asking = Pin<Box<dyn Future<Output = Result<MultiGuard, Error>> + Send>>;

/// A caller that asks when it is polled.
fn three(locks: &Locks, wait: Duration) -> Asking {
    // The order of the list is not the order of the names.
    let three = ["c", "a", "b"].map(|name| locks.mutex(name).ttl(LEASE));
    let all = Locks::all(three).wait(wait);
    Box::pin(unconstrained(async move { all.acquire().await }))
}

/// Receives the requests for the three locks, in the order of the names. They may come in any order.
async fn all_three(store: &mut Player) -> [(Arc<Request>, Reply<Enqueued>); 3] {
    let mut all = [
        store.enqueue().await,
        store.enqueue().await,
        store.enqueue().await,
    ];
    all.sort_by(|(one, _), (other, _)| one.name.as_str().cmp(other.name.as_str()));
    let asked = all
        .each_ref()
        .map(|(request, _)| (request.name.as_str(), request.wait));
    assert_eq!(asked, [("a", true), ("b", false), ("c", false)]);
    all
}

/// Receives the next request. It must be an enqueue of this lock.
async fn enqueue(store: &mut Player, name: &str, wait: bool) -> (Arc<Request>, Reply<Enqueued>) {
    let (request, reply) = store.enqueue().await;
    assert_eq!((request.name.as_str(), request.wait), (name, wait));
    (request, reply)
}

fn grant(reply: Reply<Enqueued>) {
    reply.send(Ok(granted(LEASE))).unwrap();
}

/// Answers releases until these tickets are released. Returns the enqueues that come meanwhile.
async fn released(store: &mut Player, mut ids: Vec<Id>) -> Vec<(Arc<Request>, Reply<Enqueued>)> {
    let mut asked = Vec::new();
    while !ids.is_empty() {
        match store.next().await {
            Asked::Release(tickets, reply) => {
                for ticket in &tickets {
                    let id = ticket.request.id;
                    assert!(ids.contains(&id), "released in vain: {ticket:?}");
                    ids.retain(|other| *other != id);
                }
                let answers = tickets.iter().map(|_| Released::Released);
                reply.send(Ok(answers.collect())).unwrap();
            }
            Asked::Enqueue(request, reply) => asked.push((request, reply)),
            other => panic!("{other:?}"),
        }
    }
    asked
}

async fn several_locks_are_asked_for_before_the_first_answer(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, SOON));

    let [(_, a), (_, b), (_, c)] = all_three(&mut store).await;
    for reply in [c, b, a] {
        grant(reply);
        tokio::task::yield_now().await;
    }

    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

/// If the caller kept it while it waits, it could wait for somebody who waits for this one.
async fn a_free_lock_behind_one_that_is_held_is_given_back(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, SOON));
    let [(_, a), (_, b), (free, c)] = all_three(&mut store).await;
    grant(a);
    grant(c);
    b.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();

    let mut asked = released(&mut store, vec![free.id]).await;

    let (b, reply) = match asked.pop() {
        Some(asked) => asked,
        None => store.enqueue().await,
    };
    assert!(asked.is_empty(), "{asked:?}");
    assert_eq!((b.name.as_str(), b.wait), ("b", true));
    grant(reply);
    grant(enqueue(&mut store, "c", true).await.1);
    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

/// As a caller that asks for one after the other.
async fn an_error_of_one_that_is_asked_for_early_is_the_result(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, SOON));
    let [(first, a), (_, b), (third, c)] = all_three(&mut store).await;
    let refused = StoreError::new(Fault::Refused, "the store is full");
    b.send(Err(refused)).unwrap();
    grant(c);
    grant(a);

    // Both are given back, and nothing else is asked.
    let asked = released(&mut store, vec![first.id, third.id]).await;

    assert!(asked.is_empty(), "{asked:?}");
    let error = soon(asking).await.unwrap().expect_err("refused");
    assert!(error.to_string().contains("the store is full"), "{error}");
}

async fn what_is_free_behind_a_lock_that_is_waited_for_is_given_back_at_once(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, SOON));
    let [(first, a), (second, b), (third, c)] = all_three(&mut store).await;
    grant(b);
    grant(c);
    let waits = Enqueued::Waiting {
        ticket: 9,
        valid_for: LEASE,
        recheck_in: None,
        ahead: None,
    };
    a.send(Ok(waits)).unwrap();

    let early = released(&mut store, vec![second.id, third.id]).await;

    assert!(early.is_empty(), "{early:?}");
    store.wake_with(first.id, 9);
    grant(enqueue(&mut store, "b", true).await.1);
    grant(enqueue(&mut store, "c", true).await.1);
    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

async fn nothing_behind_a_lock_that_this_process_holds_is_asked_for(_: Store) {
    let (locks, mut store) = played();
    let held = store.grant(&locks.mutex("a").ttl(LEASE)).await;
    let mut asking = three(&locks, SOON);
    for _ in 0..3 {
        assert!((&mut asking).now_or_never().is_none());
    }
    drop(held); // the caller waits for it, and gets it in memory
    let asking = tokio::spawn(asking);

    // It is the first request.
    grant(enqueue(&mut store, "b", true).await.1);
    grant(enqueue(&mut store, "c", true).await.1);

    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

/// Of two callers that ask for all at the same time, each could get one lock and be refused another.
async fn a_caller_that_does_not_wait_asks_for_one_after_the_other(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, Duration::ZERO));
    let (_, a) = enqueue(&mut store, "a", false).await;

    a.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();

    assert_eq!(kind(soon(asking).await.unwrap()), ErrorKind::Busy);
    assert!(store.asked.try_recv().is_err(), "it has asked for others");
}
