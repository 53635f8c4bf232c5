//! Several locks that are taken together.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{Enqueued, Released, Request};
use lockcore::multi::MultiGuard;
use lockcore::{Error, Locks};
use tokio::task::unconstrained;

use super::player::{Asked, Player, Reply, granted, played};
use crate::store::{Kind, LEASE, SOON, Store, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        several_locks_are_asked_for_before_the_first_answer
        a_free_lock_behind_one_that_is_held_is_given_back
        nothing_behind_a_lock_that_this_process_holds_is_asked_for
    ]
}

type Asking = Pin<Box<dyn Future<Output = Result<MultiGuard, Error>> + Send>>;

/// A caller that asks when it is polled.
fn three(locks: &Locks) -> Asking {
    // The order of the list is not the order of the names.
    let three = ["c", "a", "b"].map(|name| locks.mutex(name).ttl(LEASE));
    let all = Locks::all(three).wait(SOON);
    Box::pin(unconstrained(async move { all.acquire().await }))
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

async fn several_locks_are_asked_for_before_the_first_answer(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks));

    let (_, a) = enqueue(&mut store, "a", false).await;
    let (_, b) = enqueue(&mut store, "b", false).await;
    let (_, c) = enqueue(&mut store, "c", false).await;
    for reply in [b, c, a] {
        grant(reply);
    }

    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

/// If the caller kept it while it waits, it could wait for somebody who waits for this one.
async fn a_free_lock_behind_one_that_is_held_is_given_back(_: Store) {
    let (locks, mut store) = played();
    let asking = tokio::spawn(three(&locks));
    let (_, a) = enqueue(&mut store, "a", false).await;
    let (_, b) = enqueue(&mut store, "b", false).await;
    let (free, c) = enqueue(&mut store, "c", false).await;
    grant(a);
    grant(c);
    b.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();

    // The keeper sends the one and the caller the other, so either may be the first.
    let (mut left, mut waits) = (None, None);
    for _ in 0..2 {
        match store.next().await {
            Asked::Release(tickets, reply) => {
                reply.send(Ok(vec![Released::Released])).unwrap();
                left = tickets.first().map(|ticket| ticket.request.id);
            }
            Asked::Enqueue(request, reply) => waits = Some((request, reply)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(left, Some(free.id));
    let (request, reply) = waits.expect("waits for b");
    assert_eq!((request.name.as_str(), request.wait), ("b", true));
    grant(reply);
    grant(enqueue(&mut store, "c", true).await.1);

    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}

async fn nothing_behind_a_lock_that_this_process_holds_is_asked_for(_: Store) {
    let (locks, mut store) = played();
    let held = store.grant(&locks.mutex("b").ttl(LEASE)).await;
    let mut asking = three(&locks);
    assert!((&mut asking).now_or_never().is_none());
    grant(enqueue(&mut store, "a", false).await.1);
    assert!((&mut asking).now_or_never().is_none());
    drop(held); // the caller waits for it, and gets it in memory
    let asking = tokio::spawn(asking);
    grant(enqueue(&mut store, "c", true).await.1);

    let all = soon(asking).await.unwrap().unwrap();
    assert!(all.is_valid() && all.len() == 3);
}
