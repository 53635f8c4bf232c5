//! Requests of one process that gather while the store is asked, with [`Fair::Strict`].

use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Id, Request};
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Guard, Lock, Locks, LostReason};
use tokio::task::unconstrained;

use super::player::{Asked, Player, wire};
use crate::store::{Kind, LEASE, SOON, Store, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Strict;
        requests_that_come_while_the_store_is_asked_share_a_ticket_in_their_order
        a_request_that_comes_after_the_answer_takes_a_ticket_of_its_own
        a_group_whose_first_gives_up_is_asked_for_by_the_next
        a_ticket_of_a_group_whose_first_gives_up_in_line_goes_to_the_next
        a_request_that_cannot_share_does_not_gather
        a_request_that_may_not_join_a_group_does_not_overtake_it
        a_group_that_gives_up_makes_room_for_the_next
        a_group_does_not_wait_for_a_task_that_is_not_polled
        a_shutdown_ends_a_group_that_gathers
    ]
}

/// A client whose clock stands. So no group waits too long for an answer, and no stall of the machine
/// changes who gathers.
async fn strict() -> (Locks, Player) {
    let (wire, store) = wire(Capability::new());
    let strict = Locks::builder().fair(Fair::Strict).ttl(LEASE).wait(SOON);
    let clock = Kit::new().clock().clone();
    clock.stop();
    let locks = clock.client_with(strict.backend(wire)).unwrap();
    locks.ready(SOON).await.unwrap();
    (locks, store)
}

fn granted(request: &Request, ticket: u64) -> Enqueued {
    Enqueued::Granted {
        ticket,
        valid_for: request.ttl,
    }
}

fn waits(request: &Request, ticket: u64) -> Enqueued {
    Enqueued::Waiting {
        ticket,
        valid_for: request.ttl,
        recheck_in: None,
        ahead: None,
    }
}

/// A task that asks. The fact polls it. It may do more in one poll of the fact than tokio allows a task.
struct Task(Pin<Box<dyn Future<Output = Result<Guard, Error>> + Send>>);

impl Task {
    fn asks(lock: &Lock) -> Self {
        let lock = lock.clone();
        let mut task = Self(Box::pin(unconstrained(async move { lock.acquire().await })));
        assert!(task.poll().is_none());
        task
    }

    fn poll(&mut self) -> Option<Guard> {
        self.0.as_mut().now_or_never().map(Result::unwrap)
    }
}

fn ticket(guard: &Guard) -> (u64, u64) {
    let id = guard.grant_id().as_u64();
    (id >> 10, id & 1023)
}

/// The next request to the store, if it was sent already.
fn asked(store: &mut Player) -> Option<Asked> {
    store.next().now_or_never()
}

async fn requests_that_come_while_the_store_is_asked_share_a_ticket_in_their_order(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let mut first = Task::asks(&lock);
    let (request, reply) = store.enqueue().await;
    let mut gathered = [(); 3].map(|()| Task::asks(&lock));
    assert!(asked(&mut store).is_none(), "one did not gather");

    reply.send(Ok(granted(&request, 7))).unwrap();
    let holder = first.poll().expect("granted");
    assert!(gathered.iter_mut().all(|task| task.poll().is_none()));
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waits(&request, 8))).unwrap();
    assert!(gathered.iter_mut().all(|task| task.poll().is_none()));
    drop(holder);
    store.release().await;
    store.wake_with(request.id, 8);

    for (number, task) in gathered.iter_mut().enumerate() {
        let guard = soon(&mut task.0).await;
        assert_eq!(ticket(&guard), (8, number as u64));
        assert!(asked(&mut store).is_none(), "it is not the last");
        drop(guard);
    }
    assert_eq!(store.release().await.request.id, request.id);
}

async fn soon(task: &mut (impl Future<Output = Result<Guard, Error>> + Unpin)) -> Guard {
    let guard = tokio::time::timeout(SOON, task).await.expect("hangs");
    guard.unwrap()
}

/// Asks for the lock, and gets this ticket at once.
async fn holds(lock: &Lock, store: &mut Player, number: u64) -> (Guard, Id) {
    let mut task = Task::asks(lock);
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(granted(&request, number))).unwrap();
    (soon(&mut task.0).await, request.id)
}

/// Otherwise it would overtake other processes that have asked in between.
async fn a_request_that_comes_after_the_answer_takes_a_ticket_of_its_own(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let (holder, first) = holds(&lock, &mut store, 7).await;

    let mut second = Task::asks(&lock);
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waits(&request, 8))).unwrap();
    assert!(second.poll().is_none());
    let mut third = Task::asks(&lock);
    let (last, _reply) = store.enqueue().await;

    drop(holder);
    assert_eq!(store.release().await.request.id, first);
    assert!(second.poll().is_none() && third.poll().is_none());
    store.wake_with(request.id, 8);
    drop(soon(&mut second.0).await);
    assert_eq!(store.release().await.request.id, request.id);
    assert!(third.poll().is_none(), "it has the ticket of another");
    assert_ne!(last.id, request.id);
}

async fn a_group_whose_first_gives_up_is_asked_for_by_the_next(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let mut first = Task::asks(&lock);
    let (request, reply) = store.enqueue().await;
    let [leader, mut second, gone, mut third] = [(); 4].map(|()| Task::asks(&lock));

    drop((leader, gone));
    assert!(second.poll().is_none() && third.poll().is_none());
    assert!(asked(&mut store).is_none(), "it does not gather any more");
    reply.send(Ok(granted(&request, 7))).unwrap();
    let holder = first.poll().expect("granted");

    assert!(second.poll().is_none() && third.poll().is_none());
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waits(&request, 8))).unwrap();
    assert!(second.poll().is_none());
    drop(holder);
    store.release().await;
    store.wake_with(request.id, 8);
    drop(soon(&mut second.0).await);
    assert_eq!(ticket(&soon(&mut third.0).await), (8, 1));
}

async fn a_ticket_of_a_group_whose_first_gives_up_in_line_goes_to_the_next(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let mut first = Task::asks(&lock);
    let (request, reply) = store.enqueue().await;
    let [mut leader, mut second] = [(); 2].map(|()| Task::asks(&lock));
    reply.send(Ok(granted(&request, 7))).unwrap();
    let holder = first.poll().expect("granted");
    assert!(leader.poll().is_none());
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waits(&request, 8))).unwrap();
    assert!(leader.poll().is_none());

    drop(leader);
    drop(holder);

    store.release().await;
    store.wake_with(request.id, 8);
    assert_eq!(ticket(&soon(&mut second.0).await), (8, 0));
}

/// Each of these asks the store at once: a caller that does not wait, a reader, a lock with a limit.
async fn a_request_that_cannot_share_does_not_gather(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let _first = Task::asks(&lock);
    let (_, _reply) = store.enqueue().await;
    let _gathers = Task::asks(&lock);

    let hasty = lock.clone().wait(Duration::ZERO);
    // A task that is dropped sends a release.
    let mut kept = Vec::new();
    for lock in [hasty, locks.rwlock("a").read(), lock.max_hold(LEASE)] {
        let task = Task::asks(&lock);
        kept.push((task, store.enqueue().await));
    }
}

/// The answer to the first is there, and nobody takes it.
async fn a_group_does_not_wait_for_a_task_that_is_not_polled(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let strict = Locks::builder().fair(Fair::Strict).wait(SOON);
    let locks = kit.client_with(strict).unwrap();
    locks.ready(SOON).await.unwrap();
    let mut held = kit.hold_next(Verb::Enqueue);
    let mut first = Task::asks(&locks.mutex("a"));
    held.arrived().await;
    let mut next = kit.hold_next(Verb::Enqueue);
    let second = tokio::spawn(Task::asks(&locks.mutex("a")).0);
    assert!(next.arrived().now_or_never().is_none());

    kit.clock().advance(Duration::from_millis(200));
    let arrived = tokio::time::timeout(SOON, next.arrived()).await;
    arrived.expect("it waits for the first");
    held.let_go();
    next.let_go();

    drop(soon(&mut first.0).await);
    give_back(second.await.unwrap().unwrap()).await;
}

async fn a_shutdown_ends_a_group_that_gathers(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let _first = Task::asks(&lock);
    let (_, _reply) = store.enqueue().await;
    let gathered = [(); 2].map(|()| tokio::spawn(Task::asks(&lock).0));

    let shutdown = tokio::spawn(async move { locks.shutdown(Duration::ZERO).await });
    for task in gathered {
        let outcome = tokio::time::timeout(SOON, task).await.expect("hangs");
        let lost = ErrorKind::Lost(LostReason::Shutdown);
        assert_eq!(kind(outcome.unwrap()), lost);
    }
    shutdown.abort();
}

/// A group has a thousand requests at most, and one ttl.
async fn a_request_that_may_not_join_a_group_does_not_overtake_it(_: Store) {
    for (size, ttl) in [(1_000, LEASE), (1, LEASE / 2)] {
        let (locks, mut store) = strict().await;
        let lock = locks.mutex("a");
        let _first = Task::asks(&lock);
        let (_, _reply) = store.enqueue().await;
        let mut group: Vec<_> = (0..size).map(|_| Task::asks(&lock)).collect();
        let mut next = [(); 2].map(|()| Task::asks(&lock.clone().ttl(ttl)));
        assert!(asked(&mut store).is_none(), "one asks before the group");

        assert!(group[0].poll().is_none());
        let (request, reply) = store.enqueue().await;
        assert_eq!(request.ttl, LEASE);
        assert!(next.iter_mut().all(|task| task.poll().is_none()));
        assert!(
            asked(&mut store).is_none(),
            "one does not wait for the group"
        );
        reply.send(Ok(waits(&request, 8))).unwrap();
        assert!(group[0].poll().is_none());

        assert!(next[0].poll().is_none());
        assert_eq!(store.enqueue().await.0.ttl, ttl);
        assert!(next[1].poll().is_none());
        assert!(asked(&mut store).is_none(), "these do not gather");
    }
}

async fn a_group_that_gives_up_makes_room_for_the_next(_: Store) {
    let (locks, mut store) = strict().await;
    let lock = locks.mutex("a");
    let mut first = Task::asks(&lock);
    let (request, reply) = store.enqueue().await;
    drop([(); 2].map(|()| Task::asks(&lock)));

    let mut next = [(); 2].map(|()| Task::asks(&lock));
    assert!(asked(&mut store).is_none(), "they do not gather");
    reply.send(Ok(granted(&request, 7))).unwrap();
    let _holder = first.poll().expect("granted");
    assert!(next.iter_mut().all(|task| task.poll().is_none()));
    let (_, _reply) = store.enqueue().await;
    assert!(asked(&mut store).is_none(), "they do not share a ticket");
}
