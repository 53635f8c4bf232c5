//! The store for users' tests: each fault does what its name says, and the test controls the clock. How the core reacts
//! to answers is in `protocol`.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Guard, Locks, LostReason, Release, distributed_lock};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tokio::sync::mpsc;

use crate::store::{Kind, SLACK, SOON, Store, begin, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Strict;
        a_lock_lost_in_a_frozen_store_stops_the_work
        a_restart_without_data_is_learnt_at_once
        lost_data_is_learnt_at_the_next_renewal
        a_turn_of_the_clock_is_acted_on_at_once
        a_stopped_clock_ends_a_lease_at_its_exact_time
        a_jump_over_the_whole_lease_loses_it
        a_lost_request_and_a_lost_reply_are_asked_again_and_granted_once
        an_error_of_each_fault_is_passed_on_or_tried_again
        a_connection_that_fails_is_tried_again_unless_it_is_a_mistake
        a_lost_request_has_not_arrived_and_a_lost_reply_comes_after_the_deed
        an_enqueue_let_go_after_its_caller_gave_up_leaves_nothing
        an_enqueue_that_arrives_after_its_release_takes_nothing
        a_hold_that_is_dropped_holds_nothing
        a_leader_that_runs_out_of_time_does_not_fail_the_others
        a_lost_wake_up_is_made_up_for_by_a_renewal
        a_waiter_from_before_a_break_is_woken_after_it
        requests_sent_into_a_freeze_are_carried_out_in_order_after_it
        one_process_is_cut_off_while_another_works
        cancelled_and_cut_off_waiters_leave_the_order_of_the_others
        a_hand_over_costs_as_many_requests_with_a_hundred_waiters_as_with_one
        a_process_keeps_a_lock_among_its_own_until_the_bound_and_no_longer
        the_innermost_default_counts_and_tasks_are_outside
    ]
}

/// These facts look at requests to the store, so every acquisition gets its own ticket.
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

/// A keeper that slept until the end of its pause would need up to a second each time.
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

    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    give_back(guard).await;
}

async fn a_stopped_clock_ends_a_lease_at_its_exact_time(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    let lock = locks.mutex("a").ttl(Duration::from_secs(10)).renew(false);
    let guard = lock.acquire().await.unwrap();
    // The allowance for drift is a hundredth of the ttl and 5 ms.
    let usable = Duration::from_millis(10_000 - 105);
    assert_eq!(guard.remaining(), usable);

    kit.clock().advance(usable - Duration::from_nanos(1));
    assert!(guard.is_valid());
    kit.clock().advance(Duration::from_nanos(1));
    assert!(!guard.is_valid());

    // The lease ends later at the store.
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

    // A renewal that fails changes nothing and is tried again.
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

async fn a_connection_that_fails_is_tried_again_unless_it_is_a_mistake(_: Store) {
    let (kit, locks) = kit();
    kit.lose_next_request(Verb::Connect);
    kit.lose_next_reply(Verb::Connect);
    kit.fail_next(Verb::Connect, Fault::Retry);
    give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;

    let locks = kit.client().unwrap();
    // Twice: if the first failure is known before the caller waits for it, it counts as an old one, and the client
    // tries again.
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

/// The mark of a release stops an enqueue that arrives later than every operation timeout.
async fn an_enqueue_that_arrives_after_its_release_takes_nothing(_: Store) {
    let (kit, locks) = kit();
    locks.ready(SOON).await.unwrap();
    let mut enqueue = kit.hold_next(Verb::Enqueue);
    let mut release = kit.hold_next(Verb::Release);
    let task = begin(locks.mutex("a").wait(SOON));
    soon(enqueue.arrived()).await;
    task.abort();
    assert!(task.await.is_err());
    // The clock moves until the keeper has given up waiting for the reply.
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

async fn a_lost_wake_up_is_made_up_for_by_a_renewal(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    for _ in 0..20 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        let waiter = begin(locks.mutex("a").wait(SOON));
        tickets(&locks, "a", 2).await;

        kit.lose_next_wake_up();
        give_back(guard).await;
        // A wake-up would have arrived together with this release.
        give_back(locks.mutex("other").acquire().await.unwrap()).await;
        assert!(locks.inspect("a").await.unwrap()[0].granted);
        assert!(!waiter.is_finished());
        kit.clock().advance(Duration::from_secs(4));

        give_back(soon(waiter).await.unwrap().unwrap()).await;
    }
}

async fn a_waiter_from_before_a_break_is_woken_after_it(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let theirs = kit.another_process();
    let waiter = begin(theirs.client().unwrap().mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    // A client that reconnects asks about all its tickets. Here the wake-up has to bring the news.
    let _no_renewal = [(); 30].map(|()| theirs.hold_next(Verb::Renew));
    let mut again = theirs.hold_next(Verb::Connect);

    theirs.break_connections();
    soon(again.arrived()).await;
    again.let_go();
    give_back(guard).await;

    give_back(soon(waiter).await.unwrap().unwrap()).await;
}

async fn requests_sent_into_a_freeze_are_carried_out_in_order_after_it(_: Store) {
    let (kit, locks) = kit();
    let elsewhere = kit.another_process().client().unwrap();
    locks.ready(SOON).await.unwrap();
    let first = locks.mutex("a").acquire().await.unwrap();
    kit.freeze();
    let release = tokio::spawn(first.release());
    let waiter = begin(locks.mutex("a").wait(SOON));
    for _ in 0..20 {
        give_back(elsewhere.mutex("b").acquire().await.unwrap()).await;
    }
    assert!(!release.is_finished() && !waiter.is_finished());
    tickets(&elsewhere, "a", 1).await;

    kit.thaw();

    assert_eq!(soon(release).await.unwrap().unwrap(), Release::Released);
    give_back(soon(waiter).await.unwrap().unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn one_process_is_cut_off_while_another_works(_: Store) {
    let (kit, locks) = kit();
    let elsewhere = kit.another_process();
    let theirs = elsewhere.client().unwrap();
    let cut_off = theirs.mutex("a").acquire().await.unwrap();
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);

    elsewhere.freeze();
    kit.clock().advance(Duration::from_secs(10));

    assert!(!cut_off.is_valid());
    let next = locks.mutex("a").try_acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > cut_off.fencing_token().unwrap());
    elsewhere.thaw();
    assert_eq!(cut_off.release().await.unwrap(), Release::AlreadyLost);
    give_back(next).await;
}

/// This shows as much as one process can: a client that is cut off for ever is as good as killed.
async fn cancelled_and_cut_off_waiters_leave_the_order_of_the_others(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let (served, mut order) = mpsc::unbounded_channel();
    // A waiter behind one that is gone learns it at its renewal, after a third of its own ttl.
    let (short, look) = (Duration::from_millis(400), Duration::from_secs(1));
    let (mut cancelled, mut cut_off) = (Vec::new(), Vec::new());
    for number in 1..=20 {
        let process = kit.another_process();
        let (client, served) = (process.client().unwrap(), served.clone());
        let dies = number == 5 || number == 15;
        let task = tokio::spawn(async move {
            let ttl = if dies { short } else { 3 * look };
            let guard = client.mutex("a").ttl(ttl).wait(SOON).acquire().await;
            let guard = guard.unwrap();
            served
                .send((number, guard.fencing_token().unwrap()))
                .unwrap();
            give_back(guard).await;
        });
        match number {
            5 | 15 => cut_off.push((process, task)),
            4 | 10 | 20 => cancelled.push(task),
            _ => {}
        }
        tickets(&locks, "a", number + 1).await;
    }
    drop(served);

    for (process, _) in &cut_off {
        process.freeze();
    }
    for task in cancelled {
        task.abort();
    }
    eventually("the cancelled have gone", SOON, async || {
        let line = locks.inspect("a").await.unwrap();
        line.len() <= 21 - 3 // tickets of clients that were cut off may have expired by now
    })
    .await;
    let left = Instant::now();
    give_back(guard).await;

    let mut last = None;
    for expected in (1..=20).filter(|number| ![4, 5, 10, 15, 20].contains(number)) {
        let (number, token) = soon(order.recv()).await.unwrap();
        assert_eq!(number, expected);
        assert!(Some(token) > last);
        last = Some(token);
    }
    assert!(
        awake_since(left) < 2 * look + SLACK, // one renewal for each waiter that was cut off
        "{:?}",
        awake_since(left)
    );
    for (process, task) in cut_off {
        task.abort();
        process.thaw();
    }
    tickets(&locks, "a", 0).await;
}

/// Counts requests to the store.
async fn a_hand_over_costs_as_many_requests_with_a_hundred_waiters_as_with_one(store: Store) {
    for waiters in [1, 10, 100] {
        let (locks, counts) = store.counted(Fair::Strict);
        let lock = locks.mutex("a").ttl(Duration::from_secs(120)).wait(SOON);
        let guard = lock.acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..waiters {
            let lock = lock.clone();
            tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
        }
        tickets(&locks, "a", waiters + 1).await;
        let before = (counts.all(), counts.renewals());

        give_back(guard).await;
        tasks.join_all().await;

        // Each releases its ticket and sends nothing else: a woken waiter holds without a further request.
        assert_eq!(counts.all() - before.0, waiters + 1);
        assert_eq!(counts.renewals(), before.1);
    }
}

/// Exact to the nanosecond, for a holder that keeps working and for tasks that pass the ticket on.
async fn a_process_keeps_a_lock_among_its_own_until_the_bound_and_no_longer(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let bound = Duration::from_millis(50);
    let locks = kit
        .client_with(Locks::builder().fair(Fair::Local(bound)))
        .unwrap();
    let at_the_store = async || locks.inspect("a").await.unwrap().len();
    let ticket = |guard: &Guard| guard.grant_id().as_u64() >> 10;
    let first = locks.mutex("a").acquire().await.unwrap();
    let ours = ticket(&first);
    let second = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;

    kit.clock().advance(bound - Duration::from_nanos(1));
    give_back(first).await;
    let second = soon(second).await.unwrap().unwrap();
    assert_eq!(ticket(&second), ours, "not passed on within the bound");
    let third = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    // When this is done, the keeper has looked at the clock.
    give_back(locks.mutex("other").acquire().await.unwrap()).await;
    assert_eq!(at_the_store().await, 1);

    kit.clock().advance(Duration::from_nanos(1));
    eventually("the next stands in line at the store", SOON, async || {
        at_the_store().await == 2
    })
    .await;
    give_back(second).await;
    let third = soon(third).await.unwrap().unwrap();
    assert_ne!(ticket(&third), ours, "passed on beyond the bound");
    give_back(third).await;
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
        // This process has no default client and no LOCK_URL.
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

/// The leader of a process's queue has used up its time. The store has not failed.
async fn a_leader_that_runs_out_of_time_does_not_fail_the_others(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let theirs = kit.client().unwrap();
    let short = Locks::builder().op_timeout(Duration::from_millis(100));
    let ours = kit.client_with(short).unwrap();
    let guard = theirs.mutex("a").acquire().await.unwrap();
    let side = ours.rwlock("a");
    let reader = begin(side.read().wait(Duration::from_millis(300)));
    tickets(&ours, "a", 2).await;
    let hasty = begin(side.write().wait(Duration::from_millis(310)));
    tickets(&ours, "a", 3).await;
    let patient = begin(side.write().wait(SOON));
    tickets(&ours, "a", 4).await;
    let mut asked = kit.hold_next(Verb::Enqueue);

    // The reader gives up. The writer behind it cannot use its place and sends its own request.
    kit.clock().advance(Duration::from_millis(301));
    assert_eq!(kind(soon(reader).await.unwrap()), ErrorKind::Timeout);
    soon(asked.arrived()).await;
    kit.clock().advance(Duration::from_millis(60));
    assert_eq!(kind(soon(hasty).await.unwrap()), ErrorKind::Unknown);
    drop(asked);

    tickets(&ours, "a", 2).await;
    give_back(guard).await;
    give_back(soon(patient).await.unwrap().unwrap()).await;
}
