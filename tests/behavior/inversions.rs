//! Tests of the warnings that a debug build logs if locks are acquired in different orders. The
//! tests of `inversions` in the library say which circles count. These facts show typical code and
//! the warnings that it causes. Each fact has its own lock names, because it finds its warnings by
//! their names.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Lock, Locks, OnLost, distributed_lock};
use tokio::sync::Barrier;

use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};
use crate::traces;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let facts = crate::store_facts![store, crate::store::DEFAULT;
        two_opposite_orders_are_reported_once_and_can_deadlock
        annotated_functions_are_reported_by_their_templates
        a_single_order_is_never_reported
        a_try_has_no_order
        a_re_entry_has_no_order
        a_bare_guard_has_no_order
        locks_taken_together_are_in_order_only_with_locks_around_them
        a_lock_that_is_over_has_no_order
        a_carried_scope_counts_in_a_task_and_locks_around_the_task_do_not
        readers_in_two_orders_deadlock_behind_writers_and_are_reported
        a_semaphore_that_is_used_up_deadlocks_and_is_reported
        a_gate_prevents_a_deadlock_until_it_is_downgraded
        each_client_has_orders_of_its_own
        a_caller_that_holds_more_than_thirty_two_is_not_checked
    ];
    if cfg!(debug_assertions) {
        return facts;
    }
    let ignored = |fact: Trial| fact.with_kind("debug builds only").with_ignored_flag(true);
    facts.into_iter().map(ignored).collect()
}

/// Acquires `inner` inside `outer`, and releases both.
async fn nest(outer: &Lock, inner: &Lock) {
    let inside = async |_| inner.run(async |_| Ok::<_, Error>(())).await;
    outer.run(inside).await.unwrap();
}

/// Acquires `inner` inside `outer`, but only when all tasks that wait at `all_inside` hold their
/// outer lock.
async fn nest_at_once(outer: &Lock, all_inside: &Barrier, inner: &Lock) -> Result<(), Error> {
    outer
        .run(async |_| {
            all_inside.wait().await;
            inner.run(async |_| Ok(())).await
        })
        .await
}

async fn two_opposite_orders_are_reported_once_and_can_deadlock(store: Store) {
    let locks = store.client();
    let (a, b) = (locks.mutex("two:a"), locks.mutex("two:b").label("b of two"));
    for _ in 0..3 {
        nest(&a, &b).await;
    }
    assert_eq!(traces::inversions("two:"), [""; 0]);

    for _ in 0..3 {
        nest(&b, &a).await;
        nest(&a, &b).await;
    }

    let told = traces::inversions("two:");
    assert_eq!(told.len(), 1, "{told:#?}");
    for part in [
        "lock=two:a ",
        "under=two:b ",
        "under_label=\"b of two\" ",
        "circle=two:b → two:a → two:b ",
        "Locks::all",
        "in the same order",
    ] {
        assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
    }
    // The warning is right: with the same two orders at the same time, both tasks wait for each
    // other.
    let both = Barrier::new(2);
    let wait = Duration::from_millis(300);
    let (hasty_a, hasty_b) = (a.wait(wait), b.wait(wait));
    let (one, other) = tokio::join!(
        nest_at_once(&hasty_a, &both, &hasty_b),
        nest_at_once(&hasty_b, &both, &hasty_a)
    );
    assert_eq!(kind(one.and(other)), ErrorKind::Timeout);
}

#[distributed_lock(key = "annotated:order:{id}", locks = locks)]
async fn settle(locks: &Locks, id: u32, inside: bool) -> Result<(), Error> {
    match inside {
        true => Ok(()),
        false => Box::pin(count(locks, id, true)).await,
    }
}

#[distributed_lock(key = "annotated:stock:{id}", locks = locks)]
async fn count(locks: &Locks, id: u32, inside: bool) -> Result<(), Error> {
    match inside {
        true => Ok(()),
        false => Box::pin(settle(locks, id, true)).await,
    }
}

/// The two functions are called with many keys, and cause one warning.
async fn annotated_functions_are_reported_by_their_templates(store: Store) {
    let locks = store.client();
    for id in 0..20 {
        settle(&locks, id, false).await.unwrap();
        count(&locks, id, false).await.unwrap();
    }

    let told = traces::inversions("annotated:");
    assert_eq!(told.len(), 1, "{told:#?}");
    for part in [
        "lock=annotated:order:0 label=\"annotated:order:{id}\" ",
        "under=annotated:stock:0 under_label=\"annotated:stock:{id}\" ",
    ] {
        assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
    }
}

/// Every round uses a new name. A test of the library checks that the memory for names is bounded.
async fn a_single_order_is_never_reported(store: Store) {
    let locks = store.client();
    let shop = locks.mutex("one:shop");
    for number in 0..5_000 {
        let (order, stock) = (locks.mutex(format!("one:{number}")), locks.mutex("one:z"));
        let inside = async |_| {
            nest(&order, &stock).await;
            Ok::<_, Error>(())
        };
        shop.run(inside).await.unwrap();
    }

    assert_eq!(traces::inversions("one:"), [""; 0]);
}

async fn a_try_has_no_order(store: Store) {
    let locks = store.client();
    let (a, b) = (locks.mutex("try:a"), locks.mutex("try:b"));
    nest(&a, &b).await;
    b.run(async |_| {
        give_back(a.try_acquire().await?).await;
        give_back(a.clone().wait(Duration::ZERO).acquire().await?).await;
        Ok::<_, Error>(())
    })
    .await
    .unwrap();
    assert_eq!(traces::inversions("try:"), [""; 0]);

    // A lock that was acquired without waiting is held like any other. So the order of the lock
    // that is acquired inside it counts.
    let guard = b.try_acquire().await.unwrap();
    guard
        .run(a.run(async |_| Ok::<_, Error>(())))
        .await
        .unwrap();
    assert_eq!(traces::inversions("try:").len(), 1);
}

async fn a_re_entry_has_no_order(store: Store) {
    let locks = store.client();
    let (a, b) = (locks.mutex("again:a"), locks.mutex("again:b"));
    a.run(async |_| {
        nest(&b, &a).await;
        nest(&a, &b).await;
        Ok::<_, Error>(())
    })
    .await
    .unwrap();

    assert_eq!(traces::inversions("again:"), [""; 0]);
}

/// A bare guard belongs to the code that has it. The library cannot know whether the same code
/// acquires the next lock.
async fn a_bare_guard_has_no_order(store: Store) {
    let locks = store.client();
    let (a, b) = (locks.mutex("bare:a"), locks.mutex("bare:b"));
    nest(&a, &b).await;
    let guard = b.acquire().await.unwrap();
    give_back(a.acquire().await.unwrap()).await;
    give_back(guard).await;

    assert_eq!(traces::inversions("bare:"), [""; 0]);
}

async fn locks_taken_together_are_in_order_only_with_locks_around_them(store: Store) {
    let locks = store.client();
    let [a, b, c] = ["all:a", "all:b", "all:c"].map(|name| locks.mutex(name));
    for order in [[&a, &b, &c], [&c, &b, &a]] {
        let all = Locks::all(order.map(Lock::clone));
        all.run(async |_| Ok::<_, Error>(())).await.unwrap();
    }
    let others = Locks::all([c.clone(), a.clone()]);
    b.run(async |_| others.run(async |_| Ok::<_, Error>(())).await)
        .await
        .unwrap();
    assert_eq!(traces::inversions("all:"), [""; 0]);

    for other in [&a, &c] {
        nest(other, &b).await;
    }
    assert_eq!(traces::inversions("all:").len(), 2);
}

async fn a_lock_that_is_over_has_no_order(store: Store) {
    let locks = store.client();
    let (a, b) = (locks.mutex("over:a"), locks.mutex("over:b"));
    nest(&a, &b).await;
    let guard = b.on_lost(OnLost::Signal).acquire().await.unwrap();
    let held = guard.held();
    held.while_held(async {
        give_back(guard).await;
        give_back(a.acquire().await.unwrap()).await;
    })
    .await
    .unwrap();

    assert_eq!(traces::inversions("over:"), [""; 0]);
}

/// The code that spawned the task need not wait for it. It can release its own locks meanwhile.
async fn a_carried_scope_counts_in_a_task_and_locks_around_the_task_do_not(store: Store) {
    let locks = store.client();
    let [a, b, c] = ["task:a", "task:b", "task:c"].map(|name| locks.mutex(name));
    let last = c.clone();
    a.run(async |held| {
        b.run(async |_| {
            let work = async move { last.run(async |_| Ok::<_, Error>(())).await };
            tokio::spawn(held.scope(work)).await.unwrap()?
        })
        .await
    })
    .await
    .unwrap();

    nest(&c, &b).await;
    assert_eq!(traces::inversions("task:"), [""; 0]);
    nest(&c, &a).await;
    assert_eq!(traces::inversions("task:").len(), 1);
}

async fn readers_in_two_orders_deadlock_behind_writers_and_are_reported(store: Store) {
    let locks = store.client();
    let [a, b] = ["readers:a", "readers:b"].map(|name| locks.rwlock(name));
    nest(&a.read(), &b.read()).await;
    nest(&b.read(), &a.read()).await;
    assert_eq!(traces::inversions("readers:").len(), 1);

    // The warning is right: two readers in opposite orders and two writers between them deadlock
    // here.
    let [one, other, writes] = [(); 3].map(|()| store.client());
    let writers_wait = Barrier::new(3);
    let wait = Duration::from_millis(300);
    let read = |locks: &Locks, name: &str| locks.rwlock(name).read().wait(wait);
    let (one_a, one_b) = (read(&one, "readers:a"), read(&one, "readers:b"));
    let (other_a, other_b) = (read(&other, "readers:a"), read(&other, "readers:b"));
    let begin_to_write = async {
        let mut writers = Vec::new();
        for name in ["readers:a", "readers:b"] {
            tickets(&writes, name, 1).await;
            let lock = writes.mutex(name).wait(SOON);
            writers.push(begin(lock));
            tickets(&writes, name, 2).await;
        }
        writers_wait.wait().await;
        writers
    };
    let (one, other, writers) = tokio::join!(
        nest_at_once(&one_a, &writers_wait, &one_b),
        nest_at_once(&other_b, &writers_wait, &other_a),
        begin_to_write
    );
    assert_eq!(kind(one.and(other)), ErrorKind::Timeout);
    for writer in writers {
        give_back(writer.await.unwrap().unwrap()).await;
    }
}

async fn a_semaphore_that_is_used_up_deadlocks_and_is_reported(store: Store) {
    let locks = store.client();
    let wait = Duration::from_millis(300);
    let (permit, a) = (
        locks.semaphore("permits", 2).permits(1).wait(wait),
        locks.mutex("permits:a").wait(wait),
    );
    nest(&permit, &a).await;
    nest(&a, &permit).await;
    assert_eq!(traces::inversions("permits:").len(), 1);

    let all_inside = Barrier::new(3);
    let (one, other, third) = tokio::join!(
        nest_at_once(&permit, &all_inside, &a),
        nest_at_once(&permit, &all_inside, &a),
        nest_at_once(&a, &all_inside, &permit)
    );
    assert_eq!(kind(one.and(other).and(third)), ErrorKind::Timeout);
}

async fn a_gate_prevents_a_deadlock_until_it_is_downgraded(store: Store) {
    let locks = store.client();
    let gate = locks.rwlock("gate").write();
    for reads_on in [false, true] {
        let [a, b] = ["a", "b"].map(|name| locks.mutex(format!("gate:{reads_on}:{name}")));
        for (outer, inner) in [(&a, &b), (&b, &a)] {
            let mut guard = gate.acquire().await.unwrap();
            if reads_on {
                guard.downgrade().await.unwrap();
            }
            guard.while_held(nest(outer, inner)).await.unwrap();
            give_back(guard).await;
        }
        assert_eq!(traces::inversions("gate:").len(), usize::from(reads_on));
    }
}

async fn each_client_has_orders_of_its_own(store: Store) {
    let [one, other] = [(); 2].map(|()| {
        let locks = store.client();
        ["each:a", "each:b"].map(|name| locks.mutex(name))
    });
    nest(&one[0], &one[1]).await;
    nest(&other[1], &other[0]).await;
    nest(&one[0], &other[1]).await;
    assert_eq!(traces::inversions("each:"), [""; 0]);

    nest(&one[1], &one[0]).await;
    nest(&other[0], &other[1]).await;
    assert_eq!(traces::inversions("each:").len(), 2);
}

/// Acquires `last` inside all the other locks.
async fn nest_all(outer: &[Lock], last: &Lock) -> Result<(), Error> {
    match outer {
        [] => last.run(async |_| Ok(())).await,
        [first, rest @ ..] => {
            let inside = async |_| Box::pin(nest_all(rest, last)).await;
            first.run(inside).await
        }
    }
}

async fn a_caller_that_holds_more_than_thirty_two_is_not_checked(store: Store) {
    let locks = store.client();
    for (held, told) in [(33, 0), (32, 1)] {
        let lock = |number| locks.mutex(format!("many{held}:{number}"));
        let (outer, last) = ((0..held).map(lock).collect::<Vec<_>>(), lock(held));
        nest(&last, &outer[0]).await;
        nest_all(&outer, &last).await.unwrap();

        let inversions = traces::inversions(&format!("many{held}:"));
        assert_eq!(inversions.len(), told, "{inversions:#?}");
    }
}
