//! Tests of the queue inside one process: what the client passes on in memory, in which order, and
//! when it must not do so. The facts about readers are in the folder of this file.

mod readers;

use std::collections::BTreeSet;
use std::future::ready;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Fair, Locks};
use tests::eventually::eventually;
use tests::witness::Witness;
use tokio::task::JoinSet;
use tokio::task::coop::unconstrained;

use crate::store::{
    Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, crate::store::DEFAULT;
        a_contended_lock_is_passed_on_without_asking_the_store
        a_ticket_is_passed_on_a_thousand_times_at_most
        everybody_in_a_process_is_served_a_few_times_in_a_turn
        tokens_rise_over_hand_overs_of_both_kinds
        a_holder_of_many_tasks_lets_other_processes_in
        at_the_bound_the_next_stands_in_line_at_the_store
        a_bound_of_zero_passes_nothing_on
        a_long_chain_of_dropped_waiters_ends_without_recursion
        a_waiter_dropped_with_the_lock_in_its_hands_passes_it_on
        a_leader_that_gives_up_leaves_its_place_at_the_store_to_the_next
        a_waiter_that_has_gone_does_not_cost_its_process_the_place_of_the_leader
        a_lost_lock_whose_guard_remains_does_not_stop_the_line
        an_aged_ticket_is_not_passed_on
        try_asks_nobody_when_the_process_itself_holds_the_lock
        another_ttl_is_another_ticket
        a_view_of_a_lock_that_was_passed_on_is_over
    ];
    facts.extend(readers::facts(store));
    facts
}

/// The purpose of the queue: many tasks use the lock, with few requests to the store.
async fn a_contended_lock_is_passed_on_without_asking_the_store(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let witness = Arc::new(Witness::exclusive());
    let guard = locks.mutex("hot").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let (lock, witness) = (locks.mutex("hot").wait(SOON), Arc::clone(&witness));
        tasks.spawn(async move {
            for _ in 0..10 {
                let guard = lock.acquire().await.unwrap();
                let visit = witness.enter(1);
                tokio::task::yield_now().await;
                drop(visit);
                give_back(guard).await;
            }
        });
    }
    tickets(&locks, "hot", 65).await;
    let before = counts.all();
    drop(guard);
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }

    assert_eq!(witness.assert_no_overlap().visits, 640);
    // While the process has the lock, it uses one ticket. It releases this ticket only when none of
    // its tasks waits.
    let asked = counts.all() - before;
    assert!(asked <= 60, "{asked} requests for 640 hand-overs");
}

/// A token has 10 low bits to count hand-overs, so it has no room for more.
async fn a_ticket_is_passed_on_a_thousand_times_at_most(store: Store) {
    let (locks, _) = store.counted(Fair::Local(Duration::from_secs(3600)));
    let guard = locks.mutex("hot").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..600 {
        let lock = locks.mutex("hot").wait(3 * SOON);
        tasks.spawn(async move {
            let mut tokens = Vec::new();
            for _ in 0..4 {
                let guard = lock.acquire().await.unwrap();
                tokens.push(guard.grant_id().as_u64());
                tokio::task::yield_now().await;
                give_back(guard).await;
            }
            tokens
        });
    }
    tickets(&locks, "hot", 601).await;
    give_back(guard).await;
    let mut tokens = tasks.join_all().await.concat();
    let all = tokens.len();
    tokens.sort_unstable();
    tokens.dedup();

    assert_eq!(tokens.len(), all, "a token was given twice");
    let most = tokens.iter().map(|token| token & 1023).max();
    assert_eq!(most, Some(1000));
}

/// The bound of `Fair::Local` is an hour here. So a process releases its ticket because all its
/// tasks have been served, and not because of the bound.
async fn everybody_in_a_process_is_served_a_few_times_in_a_turn(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(3600)));
    let guard = locks.mutex("hot").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let lock = locks.mutex("hot").wait(3 * SOON);
        tasks.spawn(async move {
            for _ in 0..10 {
                let guard = lock.acquire().await.unwrap();
                tokio::task::yield_now().await;
                give_back(guard).await;
            }
        });
    }
    tickets(&locks, "hot", 51).await;
    give_back(guard).await;
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }

    // When the first ticket was granted, no other task waited, so it is passed on 64 times. Each
    // later ticket is passed on 200 times, and fewer times towards the end.
    assert!((4..=9).contains(&counts.enqueued()), "{counts:?}");
}

async fn tokens_rise_over_hand_overs_of_both_kinds(store: Store) {
    let highest = Arc::new(std::sync::Mutex::new(0));
    let mut tasks = JoinSet::new();
    for locks in [store.client(), store.client()] {
        for _ in 0..8 {
            let (lock, highest) = (locks.mutex("hot").wait(SOON), Arc::clone(&highest));
            tasks.spawn(async move {
                for _ in 0..25 {
                    let guard = lock.acquire().await.unwrap();
                    let token = guard.grant_id();
                    {
                        let mut highest = highest.lock().unwrap();
                        assert!(token.as_u64() > *highest, "{token} after {highest}");
                        *highest = token.as_u64();
                    }
                    tokio::task::yield_now().await;
                    give_back(guard).await;
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

/// This fact counts turns at the store, because counts are exact and measured times are not.
async fn a_holder_of_many_tasks_lets_other_processes_in(store: Store) {
    let stop = Arc::new(AtomicBool::new(false));
    let busy = store.client();
    let turns = Arc::new(Mutex::new(BTreeSet::new()));
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let (lock, stop) = (busy.mutex("hot").wait(SOON), Arc::clone(&stop));
        let turns = Arc::clone(&turns);
        tasks.spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let guard = lock.acquire().await.unwrap();
                turns
                    .lock()
                    .unwrap()
                    .insert(guard.grant_id().as_u64() >> 10);
                tokio::task::yield_now().await;
                give_back(guard).await;
            }
        });
    }
    let had = |least: usize| {
        let turns = Arc::clone(&turns);
        move || ready(turns.lock().unwrap().len() >= least)
    };
    eventually("it is busy", SOON, had(3)).await;
    let before = turns.lock().unwrap().len();
    let mut others = JoinSet::new();
    for _ in 0..3 {
        let lock = store.client().mutex("hot").wait(SOON);
        others.spawn(async move {
            for _ in 0..20 {
                give_back(lock.acquire().await.unwrap()).await;
            }
        });
    }
    while let Some(done) = others.join_next().await {
        done.unwrap();
    }
    let during = turns.lock().unwrap().len() - before;
    // Each of the three other clients held the lock 20 times, which is 60 in total. A turn of the
    // busy client is one of its tickets. The busy client has one or two turns between two of these
    // 60. It has more if one of the three is slow to enqueue again, and none if the busy client is
    // slow itself.
    assert!(during <= 80, "{during} turns");
    // The other clients did not keep the busy client out.
    eventually("it goes on", SOON, had(before + during + 3)).await;
    stop.store(true, Ordering::SeqCst);
    tasks.join_all().await;
}

/// The bound is the time for which a process may hand a lock over among its own tasks:
/// `Fair::Local`. The holder works for longer than this bound. Its process then enqueues a ticket
/// for its own next waiter. So this waiter is in line before waiters of other processes that come
/// later.
async fn at_the_bound_the_next_stands_in_line_at_the_store(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;

    eventually("the waiter is in line at the store", SOON, async || {
        locks.inspect("a").await.unwrap().len() == 2
    })
    .await;
    let first = guard.fencing_token().unwrap();
    give_back(guard).await;

    let second = waiter.await.unwrap().unwrap();
    assert!(second.fencing_token().unwrap() > first);
    assert_eq!(second.grant_id().as_u64() & 1023, 0, "a ticket of its own");
    give_back(second).await;
}

async fn a_bound_of_zero_passes_nothing_on(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::ZERO));
    let mut tasks = JoinSet::new();
    for _ in 0..10 {
        let lock = locks.mutex("a").wait(SOON);
        tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(counts.enqueued(), 10);
}

/// The chain runs on a thread with a small stack. A recursion would overflow it.
async fn a_long_chain_of_dropped_waiters_ends_without_recursion(store: Store) {
    // This test must not reach the bound of `Fair::Local`. At the bound the process takes a second
    // ticket, and the rest of the waiters would wait for that ticket. So the bound is longer than a
    // thousand polls take on a busy machine.
    let (locks, _) = store.counted(Fair::Local(Duration::from_secs(60)));
    let chain = {
        let locks = locks.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                for reversed in [false, true] {
                    let guard = locks.mutex("a").acquire().await.unwrap();
                    let mut waiters: Vec<Pin<Box<dyn Future<Output = ()> + Send>>> = Vec::new();
                    for _ in 0..1_000 {
                        let lock = locks.mutex("a").wait(SOON);
                        // Without `unconstrained`, tokio would let only the first hundred waiters
                        // do anything within one poll. The others would yield.
                        waiters.push(Box::pin(unconstrained(async move {
                            drop(lock.acquire().await);
                        })));
                    }
                    for waiter in &mut waiters {
                        let mut cx = Context::from_waker(Waker::noop());
                        assert!(waiter.as_mut().poll(&mut cx).is_pending());
                    }
                    tickets(&locks, "a", 1_001).await;
                    // The first waiter was granted the lock and does not know it yet. Now all
                    // waiters are dropped.
                    give_back(guard).await;
                    if reversed {
                        waiters.reverse();
                    }
                    drop(waiters);
                    give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
                }
            });
        }
    };
    let thread = std::thread::Builder::new().stack_size(256 * 1024);
    let joined = tokio::task::spawn_blocking(move || thread.spawn(chain).unwrap().join());
    joined.await.unwrap().expect("no panic");
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_waiter_dropped_with_the_lock_in_its_hands_passes_it_on(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let lock = locks.mutex("a").wait(SOON);
    let mut first = Box::pin(async { lock.acquire().await.map(drop) });
    let mut cx = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut cx).is_pending());
    let second = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 3).await;

    let ticket = guard.grant_id().as_u64() >> 10;
    give_back(guard).await;
    assert!(!second.is_finished(), "the first waiter comes first");
    drop(first);

    let second = second.await.unwrap().unwrap();
    if second.grant_id().as_u64() >> 10 == ticket {
        assert_eq!(second.grant_id().as_u64() & 1023, 2, "passed on twice");
    } // otherwise a slow machine has reached the bound
    give_back(second).await;
}

/// The leader's ticket is in line at the store for its process, and the leader gives up. The next
/// task of the process must take this ticket over, so that it is granted before later requests of
/// other processes.
async fn a_leader_that_gives_up_leaves_its_place_at_the_store_to_the_next(store: Store) {
    let (holding, ours, theirs) = (store.client(), store.client(), store.client());
    let guard = holding.mutex("a").acquire().await.unwrap();
    let lock = ours.mutex("a").wait(SOON);
    let quitter = tokio::spawn(async move { lock.acquire().await.map(drop) });
    tickets(&holding, "a", 2).await;
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let wait = |locks: &Locks, who: &'static str| {
        let (lock, served) = (locks.mutex("a").wait(SOON), served.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            served.send(who).unwrap();
            give_back(guard).await;
        })
    };
    let heir = wait(&ours, "heir");
    tickets(&ours, "a", 3).await;
    let later = wait(&theirs, "later");
    tickets(&ours, "a", 4).await;

    quitter.abort();
    tickets(&ours, "a", 3).await;
    give_back(guard).await;

    assert_eq!(order.recv().await, Some("heir"));
    assert_eq!(order.recv().await, Some("later"));
    heir.await.unwrap();
    later.await.unwrap();
}

/// As above, but a reader is between the two, and gives up first. It could not have used the ticket
/// of a writer.
async fn a_waiter_that_has_gone_does_not_cost_its_process_the_place_of_the_leader(store: Store) {
    let (holding, ours, theirs) = (store.client(), store.client(), store.client());
    let guard = holding.mutex("a").acquire().await.unwrap();
    let leader = begin(ours.mutex("a").wait(SOON));
    tickets(&holding, "a", 2).await;
    let reader = begin(ours.rwlock("a").read().wait(SOON));
    tickets(&ours, "a", 3).await;
    let heir = begin(ours.mutex("a").wait(SOON));
    tickets(&ours, "a", 4).await;
    let later = begin(theirs.mutex("a").wait(SOON));
    tickets(&ours, "a", 5).await;

    for (quitter, left) in [(reader, 4), (leader, 3)] {
        quitter.abort();
        tickets(&ours, "a", left).await;
    }
    give_back(guard).await;

    let first = tokio::select! {
        heir = heir => heir,
        _ = later => panic!("the place was given up"),
    };
    give_back(first.unwrap().unwrap()).await;
}

/// The lease has expired and its guard still exists. The waiters of the process send requests of
/// their own.
async fn a_lost_lock_whose_guard_remains_does_not_stop_the_line(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let lock = locks.mutex("a").ttl(Duration::from_secs(6));
    let lock = lock.wait(3 * SOON);
    let guard = lock.acquire().await.unwrap();
    let waiter = begin(lock);
    tickets(&locks, "a", 2).await;

    counts.refuse_renewals(true);
    let reason = guard.lost().await;
    assert_eq!(reason, lockcore::LostReason::Expired);
    counts.refuse_renewals(false);

    let next = waiter.await.unwrap().unwrap();
    assert!(next.is_valid() && !guard.is_valid());
    assert!(next.fencing_token().unwrap() > guard.fencing_token().unwrap());
    assert_eq!(
        guard.release().await.unwrap(),
        lockcore::Release::AlreadyLost
    );
    assert!(next.is_valid(), "the late release took the next one's lock");
    give_back(next).await;
}

/// A new holder gets at least half of its ttl, so a ticket with less time is released.
async fn an_aged_ticket_is_not_passed_on(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let lock = locks.mutex("a").ttl(Duration::from_secs(9));
    let lock = lock.wait(3 * SOON);
    let guard = lock.acquire().await.unwrap();
    let waiter = begin(lock);
    tickets(&locks, "a", 2).await;

    counts.refuse_renewals(true);
    guard.in_danger().await; // three seconds of the ttl are left
    give_back(guard).await;
    counts.refuse_renewals(false);

    let next = waiter.await.unwrap().unwrap();
    assert_eq!(counts.enqueued(), 2);
    give_back(next).await;
}

async fn try_asks_nobody_when_the_process_itself_holds_the_lock(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let lock = locks.mutex("a").ttl(LEASE);
    let guard = lock.acquire().await.unwrap();

    let error = lock.try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.retry_after().unwrap() > LEASE / 2);
    assert_eq!(
        kind(locks.rwlock("a").read().ttl(LEASE).try_acquire().await),
        ErrorKind::Busy
    );

    assert_eq!(counts.enqueued(), 1);
    give_back(guard).await;
    give_back(locks.mutex("a").try_acquire().await.unwrap()).await;
}

/// A caller that requests a lease of 30 s must not get a ticket with a lease of 10 s.
async fn another_ttl_is_another_ticket(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(60)));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").ttl(Duration::from_secs(30)).wait(SOON));
    tickets(&locks, "a", 2).await;
    assert_eq!(counts.enqueued(), 2);

    give_back(guard).await;
    let guard = waiter.await.unwrap().unwrap();
    assert!(guard.remaining() > Duration::from_secs(20));
    give_back(guard).await;
}

async fn a_view_of_a_lock_that_was_passed_on_is_over(store: Store) {
    let (locks, _) = store.counted(Fair::Local(Duration::from_secs(60)));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let view = guard.held();
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;

    give_back(guard).await;
    let next = waiter.await.unwrap().unwrap();

    assert!(next.is_valid() && !view.is_valid());
    assert!(view.remaining().is_zero());
    assert!(view.fencing_token().unwrap() < next.fencing_token().unwrap());
    let released = ErrorKind::Lost(lockcore::LostReason::Released);
    assert_eq!(kind(view.ensure(Duration::ZERO).await), released);
    assert_eq!(kind(view.scope(async {}).await), released);
    give_back(next).await;
}
