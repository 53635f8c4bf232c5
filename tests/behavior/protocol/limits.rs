//! Tests with more requests than a store takes at a time, and with requests whose futures are not
//! polled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Renewed, Request};
use lockcore::{ErrorKind, Locks, Release};
use tests::eventually::eventually;

use super::player::{Player, granted, played, played_with, wire};
use super::{TTL, still_granted};
use crate::store::{Kind, SOON, Store, begin, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        requests_beyond_the_limit_of_a_store_wait_and_a_release_passes_them
        a_renewal_passes_the_requests_that_wait
        requests_of_futures_that_are_not_polled_keep_nobody_out
        an_enqueue_of_a_future_that_is_not_polled_keeps_no_try_out
        a_place_that_is_lost_while_its_future_is_not_polled_goes_to_the_next
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
    let (locks, mut store) = played_with(Capability::new().in_flight(1));
    let guard = store.grant(&locks.mutex("held").ttl(TTL)).await;
    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
        .collect();
    let (_, _unanswered) = store.enqueue().await;

    let (tickets, reply) = store.renewal().await;

    reply.send(Ok(still_granted(&tickets))).unwrap();
    eventually("it is renewed", SOON, async || guard.remaining() > TTL / 2).await;
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
