//! Tests of waiters on the store for tests: lost wake-ups, breaks, freezes, and the cost of a
//! hand-over.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Fair, Guard, Locks, Release};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tokio::sync::mpsc;

use super::{kit, soon};
use crate::store::{Kind, LEASE, SLACK, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, Fair::Strict;
        a_leader_that_runs_out_of_time_does_not_fail_the_others
        a_lost_wake_up_is_made_up_for_by_a_renewal
        a_waiter_from_before_a_break_is_woken_after_it
        requests_sent_into_a_freeze_are_carried_out_in_order_after_it
        one_process_is_cut_off_while_another_works
        cancelled_and_cut_off_waiters_leave_the_order_of_the_others
        a_hand_over_costs_as_many_requests_with_a_hundred_waiters_as_with_one
        a_process_keeps_a_lock_among_its_own_until_the_bound_and_no_longer
    ]
}

async fn a_lost_wake_up_is_made_up_for_by_a_renewal(_: Store) {
    let (kit, locks) = kit();
    kit.clock().stop();
    // A waiter of the same client would not need the wake-up.
    let other = kit.client().unwrap();
    for _ in 0..20 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        let waiter = begin(other.mutex("a").wait(SOON));
        tickets(&locks, "a", 2).await;

        kit.lose_next_wake_up();
        give_back(guard).await;
        // If there were a wake-up, it would have arrived before the answer to this request.
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
    // A client that reconnects renews all its tickets. These renewals are held back, so only the
    // wake-up can tell the waiter.
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

/// A test in one process cannot kill one of its clients. So clients that are cut off for ever act
/// like clients that were killed.
async fn cancelled_and_cut_off_waiters_leave_the_order_of_the_others(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let (served, mut order) = mpsc::unbounded_channel();
    // A waiter behind a ticket that is gone learns of this at its renewal, after a third of its own
    // ttl.
    let (short, look) = (Duration::from_secs(3), Duration::from_secs(3));
    let (mut cancelled, mut cut_off) = (Vec::new(), Vec::new());
    for number in 1..=20 {
        let process = kit.another_process();
        let patient = Locks::builder().op_timeout(STALL);
        let (client, served) = (process.client_with(patient).unwrap(), served.clone());
        let dies = number == 5 || number == 15;
        let task = tokio::spawn(async move {
            let ttl = if dies { short } else { 3 * look };
            let guard = client.mutex("a").ttl(ttl).wait(LEASE).acquire().await;
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
    // The leases of the two that were cut off, and one renewal behind each of them.
    let awake = awake_since(left);
    assert!(awake < short + 2 * look + SLACK, "{awake:?}");
    for (process, task) in cut_off {
        task.abort();
        process.thaw();
    }
    tickets(&locks, "a", 0).await;
}

/// The fact counts the requests to the store. Each waiter has a ticket of its own, because the lock has
/// an owner text.
async fn a_hand_over_costs_as_many_requests_with_a_hundred_waiters_as_with_one(store: Store) {
    for waiters in [1, 10, 100] {
        let (locks, counts) = store.counted(Fair::Strict);
        let lock = locks.mutex("a").owner("each");
        let lock = lock.ttl(Duration::from_secs(120)).wait(SOON);
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

        // Each waiter releases its ticket and sends nothing else: a woken waiter holds without a
        // further request.
        assert_eq!(counts.all() - before.0, waiters + 1);
        assert_eq!(counts.renewals(), before.1);
    }
}

/// The bound of `Fair::Local` is exact to the nanosecond, for a holder that continues its work and
/// for tasks that pass the ticket on.
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
    // When this lock is released, the keeper has read the clock.
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

/// The leader of a lane runs out of time. The store has not failed, so the tasks behind the leader
/// get no error.
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

    // The reader gives up. The writer behind it cannot use the reader's ticket, so it sends its own
    // request.
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
