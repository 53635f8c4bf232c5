//! Tests with messages that are lost or late while a lock is handed over.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Fair, Locks, LostReason, Release};
use tests::eventually::eventually;

use super::{TAKEN, held, refused};
use crate::giving_up::polled;
use crate::store::{Kind, LEASE, SOON, STALL, Store, begin, give_back, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Strict;
        an_adoption_whose_messages_are_lost_is_asked_again_and_granted_once
        an_adoption_that_is_never_answered_is_unknown_and_takes_nothing_later
        an_adoption_that_arrives_after_its_caller_gave_up_is_released
        an_adoption_that_the_store_refuses_leaves_the_text_as_it_was
        a_detach_that_the_store_does_not_acknowledge_gives_the_guard_back
        a_guard_that_a_view_makes_during_the_detach_keeps_the_lock
        a_lock_that_a_shutdown_takes_during_the_detach_is_not_handed_over
        a_renewal_that_is_late_disturbs_nobody
        a_lock_is_detached_when_its_min_hold_is_over
        a_late_enqueue_of_a_lock_that_was_handed_over_takes_nothing
        a_lock_that_is_adopted_after_somebody_asked_is_not_taken_before_its_holder_could_know
        a_forced_release_finds_a_lock_that_is_adopted_at_that_moment
    ]
}

fn kit() -> (Kit, Locks, Locks) {
    let kit = Kit::new();
    let client = || {
        kit.client_with(Locks::builder().fair(Fair::Strict))
            .unwrap()
    };
    let (locks, other) = (client(), client());
    (kit, locks, other)
}

async fn an_adoption_whose_messages_are_lost_is_asked_again_and_granted_once(_: Store) {
    let (kit, locks, other) = kit();
    let guard = held(&locks).await;
    let token = guard.fencing_token().unwrap();
    let text = guard.detach().await.unwrap();
    kit.lose_next_request(Verb::Adopt);
    kit.lose_next_reply(Verb::Adopt);
    kit.lose_next_reply(Verb::Adopt);
    kit.fail_next(Verb::Adopt, Fault::Retry);

    let adopted = soon(other.adopt(&text)).await.unwrap();

    assert_eq!(adopted.fencing_token().unwrap(), token);
    assert_eq!(locks.inspect("a").await.unwrap().len(), 1);
    assert_eq!(kind(locks.adopt(&text).await), TAKEN);
    give_back(adopted).await;
    tickets(&locks, "a", 0).await;
}

/// Moves the clock until `outcome` is ready.
async fn in_time<T>(kit: &Kit, outcome: impl Future<Output = T>) -> T {
    let clock = async {
        loop {
            kit.clock().advance(Duration::from_millis(50));
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        outcome = outcome => outcome,
        () = clock => unreachable!(),
    }
}

async fn an_adoption_that_is_never_answered_is_unknown_and_takes_nothing_later(_: Store) {
    let (kit, locks, other) = kit();
    let lock = locks.mutex("a").ttl(Duration::from_secs(600));
    let text = lock.acquire().await.unwrap().detach().await.unwrap();
    other.ready(SOON).await.unwrap();
    let mut adoption = kit.hold_next(Verb::Adopt);
    let mut release = kit.hold_next(Verb::Release);

    let outcome = in_time(&kit, other.adopt(&text)).await;

    assert_eq!(kind(outcome), ErrorKind::Unknown);
    soon(adoption.arrived()).await;
    // The keeper waits for the reply to the adoption for a limited time. After that it sends a
    // release of the ticket, which leaves a mark.
    in_time(&kit, release.arrived()).await;
    release.let_go();
    adoption.let_go();
    give_back(locks.adopt(&text).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn an_adoption_that_arrives_after_its_caller_gave_up_is_released(_: Store) {
    let (kit, locks, other) = kit();
    let text = held(&locks).await.detach().await.unwrap();
    let mut adoption = kit.hold_next(Verb::Adopt);
    let mut release = kit.hold_next(Verb::Release);
    let task = tokio::spawn(async move { other.adopt(&text).await.map(drop) });
    soon(adoption.arrived()).await;

    task.abort();
    assert!(task.await.is_err());
    adoption.let_go();

    soon(release.arrived()).await;
    tickets(&locks, "a", 1).await;
    release.let_go();
    tickets(&locks, "a", 0).await;
}

async fn an_adoption_that_the_store_refuses_leaves_the_text_as_it_was(_: Store) {
    let (kit, locks, other) = kit();
    let text = held(&locks).await.detach().await.unwrap();
    for (fault, expected) in [
        (Fault::Refused, ErrorKind::Unavailable),
        (Fault::Config, ErrorKind::Config),
    ] {
        kit.fail_next(Verb::Adopt, fault);
        assert_eq!(kind(other.adopt(&text).await), expected);
    }

    give_back(other.adopt(&text).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn a_detach_that_the_store_does_not_acknowledge_gives_the_guard_back(_: Store) {
    let (kit, locks, other) = kit();
    let mut guard = held(&locks).await;
    for (fault, expected) in [
        (Fault::Refused, ErrorKind::Unavailable),
        (Fault::Retry, ErrorKind::Unavailable),
        (Fault::Config, ErrorKind::Unavailable),
        (Fault::Unknown, ErrorKind::Unknown),
    ] {
        kit.fail_next(Verb::Renew, fault);
        let (failed, back) = refused(guard).await;
        assert_eq!(failed, expected);
        guard = back;
    }
    // After the refused detaches, the keeper renews the ticket again.
    for _ in 0..4 {
        let before = guard.remaining();
        kit.clock().advance(Duration::from_secs(4));
        eventually("it is renewed", SOON, async || {
            guard.remaining() > before - Duration::from_secs(3)
        })
        .await;
    }

    let text = guard.detach().await.unwrap();
    give_back(other.adopt(&text).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn a_guard_that_a_view_makes_during_the_detach_keeps_the_lock(_: Store) {
    let kit = Kit::new();
    let patient = Locks::builder().fair(Fair::Strict).op_timeout(STALL);
    let locks = kit.client_with(patient).unwrap();
    let guard = held(&locks).await;
    let view = guard.held();
    let mut renewal = kit.hold_next(Verb::Renew);
    let mut detach = Box::pin(guard.detach());
    assert!(polled(detach.as_mut(), 1).await.is_none());
    soon(renewal.arrived()).await;

    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let work = tokio::spawn(view.scope(async { ends.await.unwrap() }));
    renewal.let_go();

    let refused = soon(detach).await.unwrap_err();
    assert_eq!(refused.error().kind(), ErrorKind::Busy);
    let guard = refused.into_guard();
    assert!(guard.is_valid());
    give_back(guard).await;
    assert!(view.is_valid(), "the work has the lock");
    tickets(&locks, "a", 1).await;
    end.send(()).unwrap();
    work.await.unwrap().unwrap();
    tickets(&locks, "a", 0).await;
}

async fn a_lock_that_a_shutdown_takes_during_the_detach_is_not_handed_over(_: Store) {
    let (kit, _, other) = kit();
    let patient = Locks::builder().fair(Fair::Strict).op_timeout(STALL);
    let locks = kit.client_with(patient.ttl(LEASE)).unwrap();
    let guard = held(&locks).await;
    let view = guard.held();
    let mut renewal = kit.hold_next(Verb::Renew);
    let mut detach = Box::pin(guard.detach());
    assert!(polled(detach.as_mut(), 1).await.is_none());
    soon(renewal.arrived()).await;

    locks.shutdown(SOON / 4).await.unwrap();
    renewal.let_go();

    let refused = soon(detach).await.unwrap_err();
    let lost = ErrorKind::Lost(LostReason::Shutdown);
    assert_eq!(refused.error().kind(), lost);
    assert_eq!(soon(view.lost()).await, LostReason::Shutdown);
    assert!(!refused.into_guard().is_valid());
    tickets(&other, "a", 0).await;
}

async fn a_renewal_that_is_late_disturbs_nobody(_: Store) {
    let (kit, locks, other) = kit();
    let lock = locks.mutex("a").ttl(Duration::from_secs(600));
    let guard = lock.acquire().await.unwrap();
    let view = guard.held();
    let mut events = locks.events();
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(250));
    soon(renewal.arrived()).await; // the keeper's renewal

    let adopted = other.adopt(&guard.detach().await.unwrap()).await.unwrap();
    renewal.let_go();

    // The answer to the renewal says that the ticket is gone.
    eventually("the answer has arrived", SOON, async || {
        locks.ready(SOON).await.is_ok()
    })
    .await;
    assert_eq!(polled(view.lost(), 1).await, Some(LostReason::Released));
    assert!(polled(events.recv(), 1).await.is_none());
    adopted.ensure(Duration::from_millis(1)).await.unwrap();
    give_back(adopted).await;
    tickets(&locks, "a", 0).await;
}

async fn a_lock_is_detached_when_its_min_hold_is_over(_: Store) {
    let (kit, locks, other) = kit();
    let minute = Duration::from_secs(60);
    let lock = locks.mutex("a").ttl(10 * minute).min_hold(minute);
    let guard = lock.acquire().await.unwrap();
    let (mistake, guard) = refused(guard).await;
    assert_eq!(mistake, ErrorKind::Config);

    kit.clock().advance(minute);

    let text = guard.detach().await.unwrap();
    give_back(other.adopt(&text).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

/// The client sends the enqueue twice, because the connection breaks. The first copy arrives only
/// after the adoption.
async fn a_late_enqueue_of_a_lock_that_was_handed_over_takes_nothing(_: Store) {
    let (kit, locks, other) = kit();
    let mut first = kit.hold_next(Verb::Enqueue);
    let acquiring = begin(locks.mutex("a").wait(SOON));
    soon(first.arrived()).await;
    kit.break_connections();
    let guard = acquiring.await.unwrap().unwrap();

    let adopted = other.adopt(&guard.detach().await.unwrap()).await.unwrap();
    first.let_go();

    assert_eq!(other.inspect("a").await.unwrap().len(), 1);
    give_back(adopted).await;
    assert!(other.inspect("a").await.unwrap().is_empty());
}

/// Resolves when the client of `kit` has decided by a look that began after this call.
async fn has_looked(kit: &Kit) {
    for _ in 0..2 {
        let mut look = kit.hold_next(Verb::Inspect);
        soon(look.arrived()).await;
        look.let_go();
    }
}

/// The lock is detached, so no client renews it, and no client learns of the ask-back. The client
/// that adopts it is frozen and cannot learn of the ask-back either, before its lease is nearly
/// over.
async fn a_lock_that_is_adopted_after_somebody_asked_is_not_taken_before_its_holder_could_know(
    _: Store,
) {
    let ours = Kit::new();
    let (theirs, operators) = (ours.another_process(), ours.another_process());
    let (locks, other) = (ours.client().unwrap(), theirs.client().unwrap());
    // A step is shorter, so that no request of the operator fails.
    let patient = Locks::builder().op_timeout(2 * STEP);
    let operator = operators.client_with(patient).unwrap();
    let guard = locks.mutex("a").ttl(4 * STEP).acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let text = guard.detach().await.unwrap();
    let mut takes = operators.hold_next(Verb::Release);
    let mut asked =
        tokio::spawn(async move { operator.revoke("a", ticket, Duration::ZERO, "x").await });
    has_looked(&operators).await;

    for _ in 0..3 {
        ours.clock().advance(STEP);
        has_looked(&operators).await;
    }
    let adopted = other.adopt(&text).await.unwrap();
    theirs.freeze();
    has_looked(&operators).await;

    // The time of the client that gave the lock away ends in the middle of this.
    for part in [1, 1, 1, 2] {
        ours.clock().advance(STEP / part);
        tokio::select! {
            () = soon(takes.arrived()) => panic!("it is taken away, and its holder does not know"),
            () = has_looked(&operators) => {}
        }
        assert!(adopted.is_valid() && !asked.is_finished());
    }
    theirs.thaw();
    assert_eq!(soon(adopted.lost()).await, LostReason::Revoked);
    assert_eq!(soon(&mut asked).await.unwrap().unwrap(), Release::Released);
    drop(takes);
}

/// A part of a lease.
const STEP: Duration = Duration::from_secs(600);

async fn a_forced_release_finds_a_lock_that_is_adopted_at_that_moment(_: Store) {
    let kit = Kit::new();
    let operators = kit.another_process();
    let client = |kit: &Kit| {
        let patient = Locks::builder().op_timeout(STALL).ttl(LEASE);
        kit.client_with(patient.fair(Fair::Strict)).unwrap()
    };
    let (locks, other, operator) = (client(&kit), client(&kit), client(&operators));
    let guard = held(&locks).await;
    let ticket = guard.grant_id().ticket();
    let text = guard.detach().await.unwrap();
    let mut release = operators.hold_next(Verb::Release);
    let forced = tokio::spawn(async move { operator.force_release("a", ticket).await });
    soon(release.arrived()).await;

    // The request names the ticket by the id that it had.
    let adopted = other.adopt(&text).await.unwrap();
    release.let_go();

    assert_eq!(soon(forced).await.unwrap().unwrap(), Release::Released);
    tickets(&locks, "a", 0).await;
    assert_eq!(adopted.release().await.unwrap(), Release::AlreadyLost);
}
