//! Several locks that are taken together.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Fault, Id, Released, Request, StoreError};
use lockcore::multi::MultiGuard;
use lockcore::{Error, ErrorKind, Locks};
use tokio::task::unconstrained;

use super::player::{Asked, Player, Reply, granted, played, played_with, wire};
use crate::store::{Kind, LEASE, SOON, Store, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        several_locks_are_asked_for_before_the_first_answer
        a_free_lock_behind_one_that_is_held_is_given_back
        an_error_of_one_that_is_asked_for_early_is_no_result
        what_is_given_back_does_not_linger
        a_lock_that_is_lost_while_others_are_asked_for_is_an_error
        what_is_free_behind_a_lock_that_is_waited_for_is_given_back_at_once
        nothing_behind_a_lock_that_this_process_holds_is_asked_for
        a_caller_that_does_not_wait_asks_for_one_after_the_other
    ]
}

/// A client whose requests time out later than the fact.
fn patient() -> (Locks, Player) {
    let (wire, store) = wire(Capability::new());
    let locks = Locks::builder().backend(wire).op_timeout(SOON * 3 / 2);
    (locks.build().unwrap(), store)
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

/// The caller asks again, and waits, as if it had asked for one lock after the other.
async fn an_error_of_one_that_is_asked_for_early_is_no_result(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks, SOON));
    let [(first, a), (_, b), (third, c)] = all_three(&mut store).await;
    let refused = || StoreError::new(Fault::Refused, "the store is full");
    b.send(Err(refused())).unwrap();
    grant(c);
    grant(a);

    let mut asked = released(&mut store, vec![third.id]).await;
    let (b, reply) = match asked.pop() {
        Some(asked) => asked,
        None => store.enqueue().await,
    };
    assert_eq!((b.name.as_str(), b.wait), ("b", true));
    reply.send(Err(refused())).unwrap();

    let asked = released(&mut store, vec![first.id]).await;
    assert!(asked.is_empty(), "{asked:?}");
    let error = soon(asking).await.unwrap().expect_err("refused");
    assert!(error.to_string().contains("the store is full"), "{error}");
}

async fn what_is_free_behind_a_lock_that_is_waited_for_is_given_back_at_once(_: Store) {
    let (locks, mut store) = patient();
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

async fn what_is_given_back_does_not_linger(_: Store) {
    let can = Capability::new().queues(true).pushes(true);
    let (locks, mut store) = played_with(can.tells_holders(true));
    let three = ["a", "b", "c"].map(|name| locks.mutex(name).ttl(LEASE));
    let all = Locks::all(three.map(|lock| lock.linger(Duration::from_secs(1)))).wait(SOON);
    let asking = tokio::spawn(async move { all.acquire().await });
    let [(_, a), (_, b), (free, c)] = all_three(&mut store).await;
    grant(c);
    grant(a);
    b.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();

    let mut left = vec!["b waits", "c waits", "c is released"];
    while !left.is_empty() {
        let came = match store.next().await {
            Asked::Enqueue(request, reply) => {
                assert!(request.wait, "{request:?}");
                grant(reply);
                format!("{} waits", request.name.as_str())
            }
            Asked::Release(tickets, reply) => {
                assert_eq!(tickets[0].request.id, free.id);
                reply.send(Ok(vec![Released::Released])).unwrap();
                "c is released".to_owned()
            }
            other => panic!("{other:?}"),
        };
        left.retain(|awaited| *awaited != came);
    }

    assert!(soon(asking).await.unwrap().unwrap().is_valid());
}

async fn a_lock_that_is_lost_while_others_are_asked_for_is_an_error(_: Store) {
    let (locks, mut store) = patient();
    let [short, long] = [("a", 1), ("b", 60)].map(|(name, ttl)| {
        let lock = locks.mutex(name).ttl(Duration::from_secs(ttl));
        lock.renew(false)
    });
    let all = Locks::all([short, long]).wait(Duration::MAX);
    let asking = tokio::spawn(async move { all.acquire().await });
    let mut asked = [store.enqueue().await, store.enqueue().await];
    asked.sort_by(|(one, _), (other, _)| one.name.as_str().cmp(other.name.as_str()));
    let [(short, reply), (_, _unanswered)] = asked;
    reply.send(Ok(granted(short.ttl))).unwrap();

    let lost = kind(soon(asking).await.unwrap());
    assert!(matches!(lost, ErrorKind::Lost(_)), "{lost:?}");
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
