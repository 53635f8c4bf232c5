//! Tests of turns: a ticket that ends lets in the ticket of its client right behind it, before the
//! store knows of the end. The test polls the waiters itself, so nothing happens between its steps.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::{
    Capability, Enqueued, FULL, Fault, Id, Released, Renewed, Request, StoreError, TicketInfo,
};
use lockcore::{Error, ErrorKind, Fair, Guard, Lock, Locks, LostReason, Release};

use super::player::{Asked, Player, Reply, STALLED, granted, wire};
use super::still_granted;
use crate::store::{Kind, LEASE, Store, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_ticket_that_ends_lets_in_the_one_right_behind_it
        a_ticket_lets_in_one_whose_answer_comes_after_its_end
        a_waiter_that_gives_up_lets_nobody_in
        a_lock_that_was_lost_lets_nobody_in
        a_lock_that_is_kept_lets_nobody_in
        a_lock_that_was_detached_lets_nobody_in
        only_the_last_use_of_a_ticket_lets_in_the_next
        a_turn_stays_although_the_store_says_that_the_ticket_waits
        after_a_gap_a_turn_counts_when_the_store_has_confirmed_the_ticket
        a_turn_does_not_count_after_a_gap_although_its_renewal_has_failed
        a_lock_held_by_a_turn_is_detached_when_the_store_says_that_it_holds
        a_lock_held_by_a_turn_can_be_downgraded_at_once
        a_lock_held_by_a_turn_can_be_taken_away
        a_lock_held_by_a_turn_can_be_asked_back
        a_ticket_that_is_asked_back_is_not_removed_before_the_store_calls_it_a_holder
        a_waiter_behind_another_client_is_not_taken_for_a_holder
        the_ticket_ahead_is_asked_for_only_to_wait_for_everything
    ]
}

/// The client of a store that names the ticket ahead. A request that comes while no other one is
/// being answered has a ticket of its own.
fn named() -> (Locks, Player) {
    let (wire, store) = wire(
        Capability::new()
            .names_ahead(true)
            .adopts(true)
            .asks_back(true),
    );
    let strict = Locks::builder().fair(Fair::Strict).ttl(LEASE);
    let strict = strict.op_timeout(STALLED);
    (strict.backend(wire).build().unwrap(), store)
}

/// The number of the tickets that wait.
const NUMBER: u64 = 8;

fn waits(request: &Request) -> Renewed {
    Renewed::Waiting {
        valid_for: request.ttl,
        recheck_in: None,
        grace: None,
    }
}

/// A task that waits at the store.
struct Waiter {
    id: Id,
    acquire: Pin<Box<dyn Future<Output = Result<Guard, Error>> + Send>>,
}

impl Waiter {
    /// Asks for a lock. The store has not answered.
    async fn asks(lock: &Lock, store: &mut Player) -> (Self, Arc<Request>, Reply<Enqueued>) {
        let lock = lock.clone();
        let mut acquire = Box::pin(async move { lock.acquire().await });
        assert!(acquire.as_mut().now_or_never().is_none());
        let (request, reply) = store.enqueue().await;
        let id = request.id;
        (Self { id, acquire }, request, reply)
    }

    /// Stands in line, right behind a ticket.
    async fn behind(lock: &Lock, store: &mut Player, ahead: Id) -> Self {
        let (mut waiter, request, reply) = Self::asks(lock, store).await;
        assert!(request.name_ahead);
        reply.send(Ok(behind(ahead, &request))).unwrap();
        assert!(waiter.try_collect().is_none());
        waiter
    }

    /// Polls the waiter once. Returns the guard if it was let in.
    fn try_collect(&mut self) -> Option<Guard> {
        self.acquire.as_mut().now_or_never().map(Result::unwrap)
    }

    fn collect(&mut self) -> Guard {
        self.try_collect().expect("it was not let in")
    }

    /// The store wakes the waiter.
    async fn woken_by(self, store: &Player) -> Guard {
        store.wake_with(self.id, NUMBER);
        soon(self.acquire).await.unwrap()
    }
}

fn behind(ahead: Id, request: &Request) -> Enqueued {
    Enqueued::Waiting {
        ticket: NUMBER,
        valid_for: request.ttl,
        recheck_in: None,
        ahead: Some(ahead),
    }
}

async fn holds(lock: &Lock, store: &mut Player) -> (Guard, Id) {
    let (guard, id) = tokio::join!(lock.acquire(), async {
        let (request, reply) = store.enqueue().await;
        reply.send(Ok(granted(request.ttl))).unwrap();
        request.id
    });
    (guard.unwrap(), id)
}

/// A holder and a waiter right behind it.
async fn two(lock: &Lock, store: &mut Player) -> (Guard, Waiter) {
    let (holder, id) = holds(lock, store).await;
    (holder, Waiter::behind(lock, store, id).await)
}

/// The holder ends in one of two ways, and its release is sent and not answered. Returns the
/// answer.
async fn ends(holder: Guard, dropped: bool, store: &mut Player) -> Reply<Vec<Released>> {
    match dropped {
        true => drop(holder),
        false => drop(tokio::spawn(holder.release())),
    }
    match store.next().await {
        Asked::Release(_, reply) => reply,
        other => panic!("not a release: {other:?}"),
    }
}

async fn a_ticket_that_ends_lets_in_the_one_right_behind_it(_: Store) {
    for dropped in [true, false] {
        let (locks, mut store) = named();
        let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;

        let not_answered = ends(holder, dropped, &mut store).await;

        let next = waiter.collect();
        assert!(next.is_valid());
        drop(not_answered);
    }
}

async fn a_ticket_lets_in_one_whose_answer_comes_after_its_end(_: Store) {
    let (locks, mut store) = named();
    let lock = locks.mutex("a");
    let (holder, id) = holds(&lock, &mut store).await;
    let (mut waiter, request, reply) = Waiter::asks(&lock, &mut store).await;
    // This one does not gather behind the other, because it has a limit.
    let limited = lock.max_hold(LEASE);
    let (mut second, again, reply_to_second) = Waiter::asks(&limited, &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;

    reply.send(Ok(behind(id, &request))).unwrap();

    drop(waiter.collect());
    // A store that has lost its data may name the same ticket again.
    reply_to_second.send(Ok(behind(id, &again))).unwrap();
    assert!(second.try_collect().is_none(), "the ticket has let in two");
    drop(not_answered);
}

async fn a_waiter_that_gives_up_lets_nobody_in(_: Store) {
    let (locks, mut store) = named();
    let lock = locks.mutex("a");
    let (holder, waiter) = two(&lock, &mut store).await;
    let mut last = Waiter::behind(&lock, &mut store, waiter.id).await;

    drop(waiter);
    store.release().await;
    assert!(last.try_collect().is_none(), "beside the holder");
    drop(holder);
    store.release().await;
    assert!(last.try_collect().is_none());

    drop(last.woken_by(&store).await);
}

async fn a_lock_that_was_lost_lets_nobody_in(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    let ((), lost) = tokio::join!(
        async {
            store.events.lock().unwrap()[0].gap();
            for _ in 0..2 {
                let (tickets, reply) = store.renewal().await;
                let answer = match tickets[0].id == waiter.id {
                    true => waits(&tickets[0]),
                    false => Renewed::Lost,
                };
                reply.send(Ok(vec![answer])).unwrap();
            }
        },
        holder.lost()
    );
    assert_eq!(lost, LostReason::Taken);

    // The work of the holder may have gone on until now.
    drop(holder);

    store.release().await;
    assert!(waiter.try_collect().is_none());
    drop(waiter.woken_by(&store).await);
}

async fn a_lock_that_is_kept_lets_nobody_in(_: Store) {
    let (locks, mut store) = named();
    let lock = locks.mutex("a").min_hold(LEASE / 2);
    let (holder, mut waiter) = two(&lock, &mut store).await;

    drop(holder);

    assert!(waiter.try_collect().is_none());
    drop(waiter.woken_by(&store).await);
}

async fn a_lock_that_was_detached_lets_nobody_in(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;

    let (detached, ()) = tokio::join!(holder.detach(), async {
        let (tickets, reply) = store.renewal().await;
        reply.send(Ok(still_granted(&tickets))).unwrap();
    });

    detached.unwrap();
    assert!(waiter.try_collect().is_none(), "beside the adopter");
    drop(waiter.woken_by(&store).await);
}

async fn only_the_last_use_of_a_ticket_lets_in_the_next(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    let second = holder.reenter().unwrap();

    drop(holder);
    assert!(waiter.try_collect().is_none(), "beside the second guard");

    drop(second);
    drop(waiter.collect());
}

/// Without renewal, a grant is renewed once before the user gets it.
async fn a_turn_stays_although_the_store_says_that_the_ticket_waits(_: Store) {
    let (locks, mut store) = named();
    let lock = locks.mutex("a").renew(false);
    let (holder, mut waiter) = two(&lock, &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    assert!(waiter.try_collect().is_none());

    let (tickets, reply) = store.renewal().await;
    reply.send(Ok(vec![waits(&tickets[0])])).unwrap();

    assert!(waiter.collect().is_valid());
    drop(not_answered);
}

/// A failover may have lost the waiter.
async fn after_a_gap_a_turn_counts_when_the_store_has_confirmed_the_ticket(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    store.events.lock().unwrap()[0].gap();
    let mut of_waiter = None;
    for _ in 0..2 {
        let (tickets, reply) = store.renewal().await;
        match tickets[0].id == waiter.id {
            true => of_waiter = Some((tickets, reply)),
            false => reply.send(Ok(still_granted(&tickets))).unwrap(),
        }
    }

    drop(holder);
    assert!(waiter.try_collect().is_none(), "the store may have lost it");

    let (tickets, reply) = of_waiter.expect("the waiter was not renewed");
    reply.send(Ok(vec![waits(&tickets[0])])).unwrap();
    assert!(soon(waiter.acquire).await.unwrap().is_valid());
}

/// Without renewal, a grant is renewed once before the user gets it. A gap begins meanwhile.
async fn a_turn_does_not_count_after_a_gap_although_its_renewal_has_failed(_: Store) {
    let (locks, mut store) = named();
    let lock = locks.mutex("a").renew(false);
    let (holder, mut waiter) = two(&lock, &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    assert!(waiter.try_collect().is_none());
    let (_, of_turn) = store.renewal().await;

    store.events.lock().unwrap()[0].gap();
    let (tickets, after_gap) = store.renewal().await;
    of_turn
        .send(Err(StoreError::new(Fault::Refused, "not renewed")))
        .unwrap();
    assert!(waiter.try_collect().is_none(), "the store may have lost it");

    after_gap.send(Ok(still_granted(&tickets))).unwrap();
    assert!(soon(waiter.acquire).await.unwrap().is_valid());
    drop(not_answered);
}

async fn a_lock_held_by_a_turn_is_detached_when_the_store_says_that_it_holds(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    let mut detach = Box::pin(waiter.collect().detach());

    let (detached, ()) = tokio::join!(detach.as_mut(), async {
        let (tickets, reply) = store.renewal().await;
        reply.send(Ok(vec![waits(&tickets[0])])).unwrap();
        let (tickets, reply) = store.renewal().await;
        reply.send(Ok(still_granted(&tickets))).unwrap();
    });

    detached.unwrap();
    drop(not_answered);
}

async fn a_lock_held_by_a_turn_can_be_downgraded_at_once(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.rwlock("a").write(), &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    let mut writer = waiter.collect();

    let (downgraded, ()) = tokio::join!(writer.downgrade(), async {
        let (tickets, reply) = store.renewal().await;
        assert_eq!(tickets[0].permits.get(), 1);
        reply.send(Ok(vec![waits(&tickets[0])])).unwrap();
    });

    downgraded.unwrap();
    drop(not_answered);
}

/// A ticket as the store shows it.
fn place(ticket: u64, granted: bool, owner: &str) -> TicketInfo {
    let all = FULL.get();
    TicketInfo::new(ticket, granted, all, all, Duration::ZERO, owner.to_owned())
}

/// The store calls the waiter a waiter, behind a holder.
fn shows_two(store: &Player, owners: [&str; 2], id: Id) {
    let [ahead, behind] = owners;
    let ahead = place(NUMBER - 1, true, ahead);
    let behind = place(NUMBER, false, behind).with_id(id);
    *store.line.lock().unwrap() = vec![ahead, behind];
}

async fn a_lock_held_by_a_turn_can_be_taken_away(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    let _guard = waiter.collect();
    shows_two(&store, ["host/1/1"; 2], waiter.id);

    let (taken, departure) = tokio::join!(locks.force_release("a", NUMBER), store.release());

    assert_eq!(taken.unwrap(), Release::Released);
    assert_eq!(departure.request.id, waiter.id);
    drop(not_answered);
}

/// The holder learns of the ask-back although the store calls it a waiter.
async fn a_lock_held_by_a_turn_can_be_asked_back(_: Store) {
    let (locks, mut store) = named();
    let (holder, mut waiter) = two(&locks.mutex("a"), &mut store).await;
    let not_answered = ends(holder, true, &mut store).await;
    let guard = waiter.collect();
    shows_two(&store, ["host/1/1"; 2], waiter.id);
    let grace = LEASE / 2;
    let revoke = tokio::spawn({
        let locks = locks.clone();
        async move { locks.revoke("a", NUMBER, grace, "x").await }
    });
    match store.next().await {
        Asked::AskBack(id, reply) => {
            assert_eq!(id, waiter.id);
            reply.send(Ok(true)).unwrap();
        }
        other => panic!("not an ask-back: {other:?}"),
    }

    let ((), ensured) = tokio::join!(
        async {
            let (tickets, reply) = store.renewal().await;
            let told = Renewed::Waiting {
                valid_for: tickets[0].ttl,
                recheck_in: None,
                grace: Some(grace),
            };
            reply.send(Ok(vec![told])).unwrap();
        },
        guard.ensure(guard.remaining() + Duration::from_millis(1))
    );

    drop(ensured); // it may have less time than it wants
    soon(guard.revoked()).await;
    store.line.lock().unwrap().clear();
    assert_eq!(soon(revoke).await.unwrap().unwrap(), Release::Released);
    drop(not_answered);
}

/// Until then its client may not have learned of the ask-back, so its grace has not begun.
async fn a_ticket_that_is_asked_back_is_not_removed_before_the_store_calls_it_a_holder(_: Store) {
    // The caller gives up on a holder after this, once it has seen the ask-back.
    let patience = Duration::from_millis(500);
    let (wire, mut store) = wire(Capability::new().names_ahead(true).asks_back(true));
    let locks = Locks::builder().op_timeout(patience).backend(wire);
    let locks = locks.build().unwrap();
    let (id, asked) = (
        Id::parse(&"1".repeat(32)).unwrap(),
        "host/1/1\n0 host/1/2 x",
    );
    shows_two(&store, ["host/1/1", asked], id);
    let revoke = tokio::spawn(async move { locks.revoke("a", NUMBER, Duration::ZERO, "x").await });
    match store.next().await {
        Asked::AskBack(_, reply) => reply.send(Ok(true)).unwrap(),
        other => panic!("not an ask-back: {other:?}"),
    }

    let early = tokio::time::timeout(4 * patience, store.next()).await;
    assert!(early.is_err(), "{early:?}");

    *store.line.lock().unwrap() = vec![place(NUMBER, true, asked).with_id(id)];
    assert_eq!(store.release().await.request.id, id);
    assert_eq!(soon(revoke).await.unwrap().unwrap(), Release::Released);
}

async fn a_waiter_behind_another_client_is_not_taken_for_a_holder(_: Store) {
    let (locks, mut store) = named();
    let (_holder, waiter) = two(&locks.mutex("a"), &mut store).await;
    shows_two(&store, ["host/1/2", "host/1/1"], waiter.id);

    let taken = locks.force_release("a", NUMBER).await;

    assert_eq!(crate::store::kind(taken), ErrorKind::Config);
    assert!(store.asked.try_recv().is_err(), "it asked the store");
}

async fn the_ticket_ahead_is_asked_for_only_to_wait_for_everything(_: Store) {
    let (locks, mut store) = named();
    let (_holder, _) = holds(&locks.mutex("other"), &mut store).await; // connects
    let mut waiters = Vec::new(); // whose releases would come between
    for lock in [
        locks.rwlock("a").read(),
        locks.semaphore("b", 2).permits(2),
        locks.mutex("c").wait(Duration::ZERO),
    ] {
        let (waiter, request, reply) = Waiter::asks(&lock, &mut store).await;
        assert!(!request.name_ahead, "{request:?}");
        waiters.push((waiter, reply));
    }
}
