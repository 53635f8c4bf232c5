//! Tests with more requests than a store takes at a time, and with requests whose futures are not
//! polled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Released, Renewed, Request};
use lockcore::events::Event;
use lockcore::{Error, ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;

use super::player::{
    Asked, Player, Reply, granted, patient_with, played, played_with, waiting, wire,
};
use super::{TTL, still_granted};
use crate::store::{Kind, SOON, Store, begin, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        requests_beyond_the_limit_of_a_store_wait_and_a_release_passes_them
        a_renewal_passes_the_requests_that_wait
        requests_of_futures_that_are_not_polled_keep_nobody_out
        an_enqueue_of_a_future_that_is_not_polled_keeps_no_try_out
        a_place_that_is_lost_while_its_future_is_not_polled_goes_to_the_next
        a_shutdown_releases_at_once_what_a_future_that_is_not_polled_has_in_line
        a_shutdown_releases_what_a_future_that_is_not_polled_has_asked_for
        a_shutdown_releases_what_a_future_that_is_not_polled_was_releasing
        an_abandoned_request_counts_as_in_flight_until_its_answer_and_no_longer
    ]
}

async fn requests_beyond_the_limit_of_a_store_wait_and_a_release_passes_them(_: Store) {
    let (wire, mut store) = wire(Capability::new().in_flight(2));
    let may_take = Duration::from_secs(4);
    // The ttl is so long that no renewal is due in this fact.
    let locks = Locks::builder().ttl(30 * may_take);
    let locks = locks.backend(wire).op_timeout(may_take).build().unwrap();
    let guard = store.grant(&locks.mutex("held")).await;
    let waits = 3 * may_take;
    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(waits)))
        .collect();
    let first = [store.enqueue().await, store.enqueue().await];
    let beyond = tokio::time::timeout(Duration::from_millis(200), store.next()).await;
    assert!(beyond.is_err(), "{beyond:?}");

    let releasing = tokio::spawn(guard.release());
    store.release().await;
    assert_eq!(releasing.await.unwrap().unwrap(), Release::Released);

    // The store is slow. The last request is sent only when others have been answered, which takes
    // longer than an operation timeout. The time before the sending does not count, so each request
    // is sent once.
    let began = Instant::now();
    tokio::time::sleep(may_take * 2 / 5).await;
    for (request, reply) in first {
        reply.send(Ok(granted(request.ttl))).unwrap();
    }
    for _ in 0..2 {
        let (request, reply) = store.enqueue().await;
        tokio::time::sleep(may_take * 2 / 5).await;
        reply.send(Ok(granted(request.ttl))).unwrap();
    }
    assert!(began.elapsed() > may_take);
    for asked in asking {
        drop(asked.await.unwrap().unwrap());
        store.release().await;
    }
}

async fn a_renewal_passes_the_requests_that_wait(_: Store) {
    let (locks, mut store) = patient_with(Capability::new().in_flight(1));
    let ttl = 9 * TTL;
    let guard = store.grant(&locks.mutex("held").ttl(ttl)).await;
    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
        .collect();
    let (_, _unanswered) = store.enqueue().await;

    let (tickets, reply) = store.renewal().await;

    reply.send(Ok(still_granted(&tickets))).unwrap();
    eventually("it is renewed", SOON, async || {
        guard.remaining() > ttl / 4 * 3
    })
    .await;
    for asked in asking {
        asked.abort();
    }
}

async fn requests_of_futures_that_are_not_polled_keep_nobody_out(_: Store) {
    let (locks, mut store) = played_with(Capability::new().in_flight(2));
    locks.ready(SOON).await.unwrap();
    let mut starved = Vec::new();
    for number in 0..2 {
        let lock = locks.mutex(format!("starved{number}"));
        let mut future = Box::pin(async move { lock.acquire().await });
        assert!(future.as_mut().now_or_never().is_none());
        let (request, reply) = store.enqueue().await;
        reply.send(Ok(granted(request.ttl))).unwrap();
        starved.push(future);
    }

    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
        .collect();

    for _ in &asking {
        let (_, reply) = store.enqueue().await;
        reply.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();
    }
    for asked in asking {
        assert_eq!(kind(asked.await.unwrap()), ErrorKind::Busy);
    }
}

async fn an_enqueue_of_a_future_that_is_not_polled_keeps_no_try_out(_: Store) {
    let (locks, mut store) = played();
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").ttl(TTL);
    let waits = lock.clone();
    let mut starved = Box::pin(async move { waits.acquire().await });
    assert!(starved.as_mut().now_or_never().is_none());
    let (_, _unanswered) = store.enqueue().await;

    let asked = eventually_asked(&lock, &mut store);

    let request = tokio::time::timeout(SOON, asked)
        .await
        .expect("it is busy for ever");
    assert_eq!(request.name.as_str(), "a");
}

/// Calls `try_acquire` until a request arrives at the store.
async fn eventually_asked(lock: &lockcore::Lock, store: &mut Player) -> Arc<Request> {
    let lock = lock.clone();
    let trying = tokio::spawn(async move {
        eventually("a try asks the store", SOON, async || {
            assert_eq!(kind(lock.try_acquire().await), ErrorKind::Busy);
            false
        })
        .await;
    });
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();
    trying.abort();
    request
}

async fn a_place_that_is_lost_while_its_future_is_not_polled_goes_to_the_next(_: Store) {
    let (locks, mut store) = played();
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").ttl(TTL).wait(SOON);
    let waits = lock.clone();
    let mut starved = Box::pin(async move { waits.acquire().await });
    assert!(starved.as_mut().now_or_never().is_none());
    let (request, reply) = store.enqueue().await;
    let waiting = Enqueued::Waiting {
        ticket: 7,
        valid_for: request.ttl,
        recheck_in: None,
        ahead: None,
    };
    reply.send(Ok(waiting)).unwrap();
    assert!(starved.as_mut().now_or_never().is_none());
    let next = begin(lock);

    let (_, reply) = store.renewal().await;
    reply.send(Ok(vec![Renewed::Lost])).unwrap();

    let (request, reply) = store.enqueue().await;
    reply.send(Ok(granted(request.ttl))).unwrap();
    drop(next.await.unwrap().unwrap());
}

/// Polls an acquire once, and receives its request.
async fn starved(
    locks: &Locks,
    store: &mut Player,
) -> (
    BoxFuture<'static, Result<Guard, Error>>,
    Arc<Request>,
    Reply<Enqueued>,
) {
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").wait(SOON);
    let mut starved = Box::pin(async move { lock.acquire().await });
    assert!(starved.as_mut().now_or_never().is_none());
    let (request, reply) = store.enqueue().await;
    (starved, request, reply)
}

async fn a_shutdown_releases_at_once_what_a_future_that_is_not_polled_has_in_line(_: Store) {
    let (locks, mut store) = played();
    let (mut starved, request, reply) = starved(&locks, &mut store).await;
    reply.send(Ok(waiting(request.ttl, None))).unwrap();
    assert!((&mut starved).now_or_never().is_none());

    // Most of the deadline is for locks that are held.
    let shutdown = soon(locks.shutdown(10 * SOON));
    let (shutdown, departure) = tokio::join!(shutdown, store.release());

    shutdown.unwrap();
    assert_eq!(departure.request.id, request.id);
    assert!(!departure.enqueue_may_follow, "it was answered");
    let shut_down = ErrorKind::Lost(LostReason::Shutdown);
    assert_eq!(kind(soon(starved).await), shut_down);
}

async fn a_shutdown_releases_what_a_future_that_is_not_polled_has_asked_for(_: Store) {
    let (locks, mut store) = played();
    let (starved, request, _reply) = starved(&locks, &mut store).await;

    let shutdown = locks.shutdown(2 * TTL);
    let (shutdown, departure) = tokio::join!(shutdown, store.release());

    shutdown.unwrap();
    assert_eq!(departure.request.id, request.id);
    assert!(departure.enqueue_may_follow);
    drop(starved);
}

async fn a_shutdown_releases_what_a_future_that_is_not_polled_was_releasing(_: Store) {
    let (locks, mut store) = played();
    let guard = store.grant(&locks.mutex("a")).await;
    let mut starved = Box::pin(guard.release());
    assert!(starved.as_mut().now_or_never().is_none());
    let Asked::Release(_, reply) = store.next().await else {
        panic!("not a release");
    };
    let mut events = locks.events();

    let (shutdown, departure) = tokio::join!(locks.shutdown(2 * TTL), store.release());

    shutdown.unwrap();
    assert_eq!(departure.request.name.as_str(), "a");
    // The request of the future was overtaken by that of the shutdown. Nobody has lost a lock.
    reply.send(Ok(vec![Released::NotFound])).unwrap();
    assert_eq!(soon(starved).await.unwrap(), Release::AlreadyLost);
    while let Some(Some(event)) = events.recv().now_or_never() {
        assert!(!matches!(event, Event::Lost { .. }), "{event:?}");
    }
}

/// The release of an abandoned request may take long.
async fn an_abandoned_request_counts_as_in_flight_until_its_answer_and_no_longer(_: Store) {
    let (wire, mut store) = wire(Capability::new().in_flight(1));
    // No wait in this fact is so long that the gate would make a new pass.
    let locks = Locks::builder().backend(wire).op_timeout(10 * SOON);
    let locks = locks.build().unwrap();
    let abandoned = begin(locks.mutex("a"));
    let (_, reply) = store.enqueue().await;
    let next = begin(locks.mutex("b"));
    abandoned.abort();
    let early = tokio::time::timeout(Duration::from_millis(200), store.next()).await;
    assert!(early.is_err(), "{early:?}");

    reply.send(Ok(granted(TTL))).unwrap();
    let (mut enqueue, mut release) = (None, None);
    while enqueue.is_none() || release.is_none() {
        match store.next().await {
            Asked::Enqueue(_, reply) => enqueue = Some(reply),
            Asked::Release(_, reply) => release = Some(reply), // not answered
            other => panic!("{other:?}"),
        }
    }
    next.abort();
}
