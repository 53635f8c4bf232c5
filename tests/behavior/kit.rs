//! Tests of the store for users' tests: each fault does what its name says, and the test controls
//! the clock. How the core reacts to answers is tested in `protocol`. Facts about waiters are in
//! the folder of this file.

mod line;

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Locks, LostReason, Release, Wait, distributed_lock};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::giving_up::polled;
use crate::store::{A_FEW_MILLIS, Kind, SOON, Store, begin, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, Fair::Strict;
        a_lock_lost_in_a_frozen_store_stops_the_work
        a_restart_without_data_is_learnt_at_once
        lost_data_is_learnt_at_the_next_renewal
        a_turn_of_the_clock_is_acted_on_at_once
        a_stopped_clock_ends_a_lease_at_its_exact_time
        a_jump_over_the_whole_lease_loses_it
        each_view_warns_once_each_time_that_little_is_left
        a_loop_of_warnings_can_be_stopped
        a_lost_request_and_a_lost_reply_are_asked_again_and_granted_once
        an_error_of_each_fault_is_passed_on_or_tried_again
        a_wait_through_outages_covers_refusals_and_no_mistakes
        a_wait_through_an_outage_ends_in_time_or_with_the_client
        a_connection_that_fails_is_tried_again_unless_it_is_a_mistake
        a_lost_request_has_not_arrived_and_a_lost_reply_comes_after_the_deed
        an_enqueue_let_go_after_its_caller_gave_up_leaves_nothing
        an_enqueue_that_arrives_after_its_release_takes_nothing
        a_hold_that_is_dropped_holds_nothing
        the_innermost_default_counts_and_tasks_are_outside
    ];
    facts.extend(line::facts(store));
    facts
}

/// A store and a client. The facts examine requests to the store, so every acquisition gets its own
/// ticket.
fn kit() -> (Kit, Locks) {
    let kit = Kit::new();
    let strict = Locks::builder().fair(Fair::Strict);
    let locks = kit.client_with(strict).unwrap();
    (kit, locks)
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("hangs")
}

async fn a_lock_lost_in_a_frozen_store_stops_the_work(_: Store) {
    let (kit, locks) = kit();
    let mut went_on = false;

    let outcome: Result<(), Error> = locks
        .mutex("a")
        .run(async |_| {
            kit.freeze();
            kit.clock().advance(Duration::from_secs(10));
            tokio::task::yield_now().await;
            went_on = true;
            Ok(())
        })
        .await;

    assert_eq!(kind(outcome), ErrorKind::Lost(LostReason::Expired));
    assert!(!went_on);
}

async fn a_restart_without_data_is_learnt_at_once(_: Store) {
    let (kit, locks) = kit();
    let lock = locks.mutex("a").ttl(Duration::from_secs(3600));
    let guard = lock.acquire().await.unwrap();

    kit.lose_data();
    kit.break_connections();

    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    let next = locks.mutex("a").try_acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > guard.fencing_token().unwrap());
}

async fn lost_data_is_learnt_at_the_next_renewal(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();

    kit.lose_data();
    tickets(&locks, "a", 0).await;
    assert!(guard.is_valid());
    kit.clock().advance(Duration::from_secs(4));

    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
}

/// The keeper must notice at once that the clock has moved. If it slept until the end of its pause,
/// it would need up to a second each time.
async fn a_turn_of_the_clock_is_acted_on_at_once(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    let hour = Duration::from_secs(3600);
    let guard = locks.mutex("a").ttl(hour).acquire().await.unwrap();
    let began = Instant::now();

    for _ in 0..30 {
        let mut renewal = kit.hold_next(Verb::Renew);
        kit.clock().advance(hour / 3);
        soon(renewal.arrived()).await;
        let before = guard.remaining();
        renewal.let_go();
        eventually("it is renewed", SOON, async || guard.remaining() > before).await;
    }

    let awake = awake_since(began);
    assert!(awake < SOON, "{awake:?}");
    give_back(guard).await;
}

async fn a_stopped_clock_ends_a_lease_at_its_exact_time(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    let lock = locks.mutex("a").ttl(Duration::from_secs(10)).renew(false);
    let guard = lock.acquire().await.unwrap();
    // The allowance for drift is a hundredth of the ttl, and 5 ms more.
    let usable = Duration::from_millis(10_000 - 105);
    assert_eq!(guard.remaining(), usable);

    kit.clock().advance(usable - Duration::from_nanos(1));
    assert!(guard.is_valid());
    kit.clock().advance(Duration::from_nanos(1));
    assert!(!guard.is_valid());

    // At the store the lease ends later, by this allowance.
    assert_eq!(kind(lock.try_acquire().await), ErrorKind::Busy);
    kit.clock().advance(Duration::from_millis(105));
    give_back(lock.try_acquire().await.unwrap()).await;
}

async fn a_jump_over_the_whole_lease_loses_it(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();

    kit.clock().advance(Duration::from_secs(11));

    assert_eq!(soon(guard.lost()).await, LostReason::Expired);
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}

async fn each_view_warns_once_each_time_that_little_is_left(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    let lock = locks.mutex("a").ttl(Duration::from_secs(10)).renew(false);
    let guard = lock.acquire().await.unwrap();
    let view = guard.held();
    let left = Duration::from_millis(10_000 - 105 - 7_000);
    let mut waits = Box::pin(view.in_danger());
    assert!(polled(&mut waits, 1).await.is_none());

    kit.clock().advance(Duration::from_secs(7));
    assert_eq!(soon(waits).await, left);
    let mut again = Box::pin(view.in_danger());
    assert!(polled(&mut again, 1).await.is_none(), "it has warned");
    for other in [guard.held(), view.clone()] {
        assert_eq!(soon(other.in_danger()).await, left);
    }

    guard.ensure(Duration::from_secs(9)).await.unwrap();
    assert!(polled(&mut again, 1).await.is_none());
    kit.clock().advance(Duration::from_secs(7));
    assert_eq!(soon(again).await, left);

    kit.clock().advance(Duration::from_secs(3));
    assert_eq!(soon(view.in_danger()).await, Duration::ZERO);
    let more = polled(view.in_danger(), 1).await;
    assert_eq!(more, None, "it has told the loss");
    assert_eq!(soon(view.lost()).await, LostReason::Expired);
    assert_eq!(soon(guard.in_danger()).await, Duration::ZERO);
}

/// One loop uses one view. The other loop makes a new view for each call, so each call is ready at
/// once.
async fn a_loop_of_warnings_can_be_stopped(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();
    kit.clock().advance(Duration::from_secs(11));
    assert_eq!(soon(guard.lost()).await, LostReason::Expired);
    let (one, anew) = (guard.held(), guard.held());
    let (tell, mut told) = mpsc::unbounded_channel();
    let loops = [
        tokio::spawn(async move {
            loop {
                tell.send(one.in_danger().await).unwrap();
            }
        }),
        tokio::spawn(async move {
            loop {
                anew.clone().in_danger().await;
            }
        }),
    ];

    assert_eq!(soon(told.recv()).await, Some(Duration::ZERO));
    for task in loops {
        task.abort();
        assert!(soon(task).await.unwrap_err().is_cancelled());
    }
    assert_eq!(told.recv().await, None, "told more than once");
}

async fn a_lost_request_and_a_lost_reply_are_asked_again_and_granted_once(_: Store) {
    let (kit, locks) = kit();
    kit.lose_next_request(Verb::Enqueue);
    kit.lose_next_reply(Verb::Enqueue);
    kit.lose_next_reply(Verb::Enqueue);

    let guard = soon(locks.mutex("a").acquire()).await.unwrap();

    assert_eq!(locks.inspect("a").await.unwrap().len(), 1);
    give_back(guard).await;
    tickets(&locks, "a", 0).await;
}

async fn an_error_of_each_fault_is_passed_on_or_tried_again(_: Store) {
    let (kit, locks) = kit();
    for fault in [Fault::Retry, Fault::Unknown] {
        kit.fail_next(Verb::Enqueue, fault);
        give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;
    }
    for (fault, expected) in [
        (Fault::Refused, ErrorKind::Unavailable),
        (Fault::Config, ErrorKind::Config),
    ] {
        kit.fail_next(Verb::Enqueue, fault);
        assert_eq!(kind(locks.mutex("a").acquire().await), expected);
    }

    // A renewal that fails changes nothing, and the keeper sends it again.
    let guard = locks.mutex("a").acquire().await.unwrap();
    for fault in [Fault::Retry, Fault::Refused, Fault::Unknown, Fault::Config] {
        kit.fail_next(Verb::Renew, fault);
        kit.clock().advance(Duration::from_secs(4));
        eventually("it is renewed", SOON, async || {
            guard.remaining() > Duration::from_secs(9)
        })
        .await;
    }
}

async fn a_wait_through_outages_covers_refusals_and_no_mistakes(_: Store) {
    let kit = Kit::new();
    let strict = Locks::builder().fair(Fair::Strict);
    let locks = kit.client_with(strict.through_outages(true)).unwrap();
    for fault in [Fault::Refused, Fault::Retry, Fault::Unknown] {
        for _ in 0..3 {
            kit.fail_next(Verb::Enqueue, fault);
        }
        give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;
    }
    kit.fail_next(Verb::Enqueue, Fault::Config);
    assert_eq!(kind(locks.mutex("a").acquire().await), ErrorKind::Config);

    // A caller that does not wait, and a lock that has its own choice.
    for lock in [
        locks.mutex("a").wait(Duration::ZERO),
        locks.mutex("a").through_outages(false),
    ] {
        kit.fail_next(Verb::Enqueue, Fault::Refused);
        assert_eq!(kind(soon(lock.acquire()).await), ErrorKind::Unavailable);
    }
    // One of several locks.
    kit.fail_next(Verb::Enqueue, Fault::Refused);
    let any = Locks::any([locks.mutex("a")]);
    give_back(soon(any.acquire()).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn a_wait_through_an_outage_ends_in_time_or_with_the_client(_: Store) {
    let (kit, locks) = kit();
    kit.freeze();
    kit.clock().stop();
    let lock = locks.mutex("a").through_outages(true);
    let short = begin(lock.clone().wait(Duration::from_secs(3)));
    let long = begin(lock.wait(Wait::Forever));
    // Moves the clock until the task has ended, and returns how far.
    let until_the_end_of = async |task: &JoinHandle<_>| {
        let mut passed = Duration::ZERO;
        while !task.is_finished() {
            kit.clock().advance(Duration::from_millis(50));
            passed += Duration::from_millis(50);
            tokio::time::sleep(A_FEW_MILLIS).await;
        }
        passed
    };

    let passed = soon(until_the_end_of(&short)).await;

    assert!(passed >= Duration::from_secs(3), "{passed:?}");
    let error = short.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(!long.is_finished());
    let shutdown = tokio::spawn(async move { locks.shutdown(Duration::ZERO).await });
    soon(until_the_end_of(&long)).await;
    let lost = kind(long.await.unwrap());
    assert_eq!(lost, ErrorKind::Lost(LostReason::Shutdown));
    shutdown.abort();
}

async fn a_connection_that_fails_is_tried_again_unless_it_is_a_mistake(_: Store) {
    let (kit, locks) = kit();
    kit.lose_next_request(Verb::Connect);
    kit.lose_next_reply(Verb::Connect);
    kit.fail_next(Verb::Connect, Fault::Retry);
    give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;

    let locks = kit.client().unwrap();
    // The connection fails twice. If the client knows of the first failure before the caller waits,
    // it counts this failure as an old one and connects again.
    for _ in 0..2 {
        kit.fail_next(Verb::Connect, Fault::Config);
    }
    assert_eq!(kind(locks.mutex("a").acquire().await), ErrorKind::Config);
}

async fn a_lost_request_has_not_arrived_and_a_lost_reply_comes_after_the_deed(_: Store) {
    let (kit, locks) = kit();
    for arrived in [false, true] {
        let guard = locks.mutex("a").acquire().await.unwrap();
        if arrived {
            kit.lose_next_reply(Verb::Release);
        } else {
            kit.lose_next_request(Verb::Release);
        }
        let mut repeated = kit.hold_next(Verb::Release);

        assert_eq!(kind(guard.release().await), ErrorKind::Unknown);

        soon(repeated.arrived()).await;
        assert_eq!(locks.inspect("a").await.unwrap().is_empty(), arrived);
        repeated.let_go();
        tickets(&locks, "a", 0).await;
    }
}

async fn an_enqueue_let_go_after_its_caller_gave_up_leaves_nothing(_: Store) {
    let (kit, locks) = kit();
    let mut enqueue = kit.hold_next(Verb::Enqueue);
    let mut release = kit.hold_next(Verb::Release);
    let task = begin(locks.mutex("a").wait(SOON));
    soon(enqueue.arrived()).await;

    task.abort();
    assert!(task.await.is_err());
    enqueue.let_go();

    soon(release.arrived()).await;
    tickets(&locks, "a", 1).await;
    release.let_go();
    tickets(&locks, "a", 0).await;
}

/// The enqueue arrives later than every operation timeout. The mark of the release refuses it.
async fn an_enqueue_that_arrives_after_its_release_takes_nothing(_: Store) {
    let (kit, locks) = kit();
    locks.ready(SOON).await.unwrap();
    let mut enqueue = kit.hold_next(Verb::Enqueue);
    let mut release = kit.hold_next(Verb::Release);
    let task = begin(locks.mutex("a").wait(SOON));
    soon(enqueue.arrived()).await;
    task.abort();
    assert!(task.await.is_err());
    // The clock moves until the keeper stops waiting for the reply to the enqueue, and releases.
    let released = async {
        loop {
            kit.clock().advance(Duration::from_millis(100));
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = release.arrived() => {}
        () = released => {}
    }

    release.let_go();
    enqueue.let_go();

    assert!(locks.inspect("a").await.unwrap().is_empty());
    give_back(locks.mutex("a").try_acquire().await.unwrap()).await;
}

async fn a_hold_that_is_dropped_holds_nothing(_: Store) {
    let (kit, locks) = kit();
    drop(kit.hold_next(Verb::Enqueue));

    give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;
}

#[distributed_lock(key = "a", try)]
async fn once() -> Result<(), Error> {
    Ok(())
}

async fn the_innermost_default_counts_and_tasks_are_outside(_: Store) {
    let (one, other) = (kit().1, kit().1);
    let _guard = one.mutex("a").acquire().await.unwrap();

    lockcore::with_default(one, async {
        assert_eq!(kind(once().await), ErrorKind::Busy);
        lockcore::with_default(other.clone(), once()).await.unwrap();
        assert_eq!(kind(once().await), ErrorKind::Busy);
        // The spawned task has no default client: the process has none and no `LOCK_URL`.
        let spawned = tokio::spawn(once()).await.unwrap();
        assert_eq!(kind(spawned), ErrorKind::Config);
        tokio::spawn(lockcore::with_default(other, once()))
            .await
            .unwrap()
            .unwrap();
    })
    .await;
    assert_eq!(kind(once().await), ErrorKind::Config);
}
