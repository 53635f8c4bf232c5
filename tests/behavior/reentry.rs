//! Tests of re-entry by scope: code acquires the locks again that it already holds, and no others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Fair, Locks, LostReason, distributed_lock};
use tests::witness::Witness;
use tokio::task::JoinSet;

use crate::store::{DEFAULT, Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        an_inner_acquisition_has_the_same_token_and_asks_nobody
        five_clients_that_re_enter_never_overlap
        an_annotated_function_may_call_itself
        a_lock_that_is_not_reentrant_would_deadlock_at_once
        the_write_side_inside_the_read_side_would_deadlock_at_once
        the_read_side_inside_the_write_side_re_enters
        branches_that_re_enter_take_turns
        readers_that_re_enter_do_not_wait_for_each_other
        another_client_does_not_re_enter
        a_spawned_task_is_a_stranger
        a_scope_carries_the_lock_into_a_spawned_task
        a_scope_carries_the_locks_held_around_it_too
        an_inner_guard_that_outlives_the_outer_keeps_the_lock
        the_lock_lasts_until_the_last_of_several_guards
        a_semaphore_is_not_re_entered
        work_inside_is_stopped_when_the_lock_is_lost
        a_dropped_inner_wait_leaves_its_turn
    ]
}

async fn an_inner_acquisition_has_the_same_token_and_asks_nobody(store: Store) {
    let (locks, counts) = store.counted(DEFAULT);
    let (lock, inner) = (locks.mutex("a"), locks.mutex("a"));
    lock.run(async |held| {
        let before = counts.all();
        let guard = inner.acquire().await?;
        assert_eq!(guard.grant_id(), held.grant_id());
        give_back(guard).await;
        let deeper = inner.clone();
        inner
            .run(async |again| {
                assert_eq!(again.grant_id(), held.grant_id());
                give_back(deeper.try_acquire().await?).await;
                Ok::<_, Error>(())
            })
            .await?;
        assert_eq!(counts.all(), before);
        Ok::<_, Error>(())
    })
    .await
    .unwrap();

    assert_eq!(counts.all(), 2);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn five_clients_that_re_enter_never_overlap(store: Store) {
    let witness = Arc::new(Witness::exclusive());
    let mut clients = JoinSet::new();
    for _ in 0..5 {
        let (locks, witness) = (store.client(), Arc::clone(&witness));
        clients.spawn(async move {
            for _ in 0..10 {
                let (outer, inner) = (locks.mutex("r").wait(SOON), locks.mutex("r"));
                let ran = outer.run(async |_| {
                    let visit = witness.enter(1);
                    inner
                        .run(async |_| {
                            tokio::task::yield_now().await;
                            Ok::<_, Error>(())
                        })
                        .await?;
                    drop(visit);
                    Ok::<_, Error>(())
                });
                ran.await.unwrap();
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    assert_eq!(witness.assert_no_overlap().visits, 50);
}

#[distributed_lock(key = "countdown", locks = locks, try)]
async fn count_down(locks: &Locks, from: u32) -> Result<u32, Error> {
    match from {
        0 => Ok(0),
        more => Ok(Box::pin(count_down(locks, more - 1)).await? + 1),
    }
}

async fn an_annotated_function_may_call_itself(store: Store) {
    let locks = store.client();
    assert_eq!(count_down(&locks, 20).await.unwrap(), 20);
    assert_nothing_left(&store, &locks, "countdown").await;
}

async fn a_lock_that_is_not_reentrant_would_deadlock_at_once(store: Store) {
    let locks = store.client();
    let (outer, inner) = (locks.mutex("a"), locks.mutex("a").reentrant(false));
    let ran: Result<(), Error> = outer
        .run(async |held| {
            let error = inner.acquire().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
            assert_eq!(error.name(), Some("a"));
            assert!(!error.may_hold() && held.is_valid());
            inner.run(async |_| Ok(())).await
        })
        .await;
    assert_eq!(kind(ran), ErrorKind::WouldDeadlock);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn the_write_side_inside_the_read_side_would_deadlock_at_once(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let read = catalog.read();
    read.run(async |held| {
        assert_eq!(
            kind(catalog.write().acquire().await),
            ErrorKind::WouldDeadlock
        );
        assert_eq!(
            kind(locks.mutex("c").acquire().await),
            ErrorKind::WouldDeadlock
        );
        let again = catalog.read().acquire().await?;
        assert_eq!(again.grant_id(), held.grant_id());
        give_back(again).await;
        Ok::<_, Error>(())
    })
    .await
    .unwrap();
}

async fn the_read_side_inside_the_write_side_re_enters(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let (write, read) = (catalog.write(), catalog.read());
    write
        .run(async |held| {
            read.run(async |inner| {
                assert_eq!(inner.grant_id(), held.grant_id());
                // Inside the read, the request for the write side comes from a reader.
                let error = kind(catalog.write().acquire().await);
                assert_eq!(error, ErrorKind::WouldDeadlock);
                Ok::<_, Error>(())
            })
            .await
        })
        .await
        .unwrap();
}

/// An account. Only the lock `acct:<number>` protects its balance.
struct Account {
    number: u32,
    locks: Locks,
    balance: AtomicU32,
    witness: Witness,
}

impl Account {
    #[distributed_lock(key = "acct:{self.number}", locks = &self.locks, wait = SOON)]
    async fn add(&self, amount: u32) -> Result<(), Error> {
        let visit = self.witness.enter(1);
        let before = self.balance.load(Ordering::SeqCst);
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        self.balance.store(before + amount, Ordering::SeqCst);
        drop(visit);
        Ok(())
    }

    #[distributed_lock(key = "acct:{self.number}", locks = &self.locks)]
    async fn add_both(&self) -> Result<(), Error> {
        let (one, other) = tokio::join!(self.add(1), self.add(2));
        one.and(other)
    }
}

async fn branches_that_re_enter_take_turns(store: Store) {
    let account = Account {
        number: 7,
        locks: store.client(),
        balance: AtomicU32::new(0),
        witness: Witness::exclusive(),
    };

    account.add_both().await.unwrap();

    assert_eq!(account.witness.assert_no_overlap().visits, 2);
    assert_eq!(account.balance.into_inner(), 3);
}

async fn readers_that_re_enter_do_not_wait_for_each_other(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("c");
    let write = catalog.write();
    write
        .run(async |_| {
            let one = catalog.read().acquire().await?;
            let other = catalog.read().try_acquire().await?;
            // Both reads are inside the write side. So a further request for the write side must
            // wait for them.
            assert_eq!(kind(catalog.write().try_acquire().await), ErrorKind::Busy);
            let hasty = catalog.write().wait(Duration::from_millis(50));
            assert_eq!(kind(hasty.acquire().await), ErrorKind::Timeout);
            drop((one, other));
            give_back(catalog.write().try_acquire().await?).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
}

/// A client re-enters only its own locks, not those of another client of the same store.
async fn another_client_does_not_re_enter(store: Store) {
    let (locks, _) = store.counted(DEFAULT);
    let elsewhere = Locks::connect("memory:").unwrap();
    let (other, counts) = store.counted(DEFAULT);
    let outer = locks.mutex("a");
    outer
        .run(async |held| {
            // This task waits, and it is the task that holds the lock.
            let inner = other.mutex("a").wait(SOON);
            tokio::select! {
                biased;
                outcome = inner.acquire() => panic!("{outcome:?}"),
                () = tickets(&other, "a", 2) => {}
            }
            assert_eq!(counts.enqueued(), 1);
            // On another store the name is free and can be acquired.
            let guard = elsewhere.mutex("a").try_acquire().await?;
            assert_ne!(guard.grant_id(), held.grant_id());
            assert_eq!(elsewhere.inspect("a").await?.len(), 1);
            give_back(guard).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
}

async fn a_spawned_task_is_a_stranger(store: Store) {
    let locks = store.client();
    let (outer, inner) = (locks.mutex("a"), locks.mutex("a"));
    outer
        .run(async |_| {
            let task = tokio::spawn(async move { inner.try_acquire().await });
            assert_eq!(kind(task.await.unwrap()), ErrorKind::Busy);
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
}

async fn a_scope_carries_the_lock_into_a_spawned_task(store: Store) {
    let locks = store.client();
    let (outer, inner) = (locks.mutex("a"), locks.mutex("a"));
    let (go, gone) = tokio::sync::oneshot::channel::<()>();
    let task = outer
        .run(async |held| {
            let view = held.clone();
            Ok::<_, Error>(tokio::spawn(held.scope(async move {
                gone.await.unwrap();
                let again = inner.acquire().await.unwrap();
                assert_eq!(again.grant_id(), view.grant_id());
                give_back(again).await;
                view.is_valid()
            })))
        })
        .await
        .unwrap();

    // `run` has returned. The task that was spawned in it has not ended.
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    go.send(()).unwrap();
    assert!(task.await.unwrap().unwrap());
    give_back(locks.mutex("a").try_acquire().await.unwrap()).await;
}

async fn a_scope_carries_the_locks_held_around_it_too(store: Store) {
    let locks = store.client();
    let (a, b, again) = (locks.mutex("a"), locks.mutex("b"), locks.mutex("a"));
    a.run(async |_| {
        b.run(async |held| {
            let task = held.scope(async move { again.try_acquire().await.map(drop) });
            tokio::spawn(task).await.unwrap()?
        })
        .await
    })
    .await
    .unwrap();
}

async fn an_inner_guard_that_outlives_the_outer_keeps_the_lock(store: Store) {
    let locks = store.client();
    let (outer, inner) = (locks.mutex("a"), locks.mutex("a"));
    let guard = outer.run(async |_| inner.acquire().await).await.unwrap();

    assert!(guard.is_valid());
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    give_back(locks.mutex("a").try_acquire().await.unwrap()).await;
}

async fn the_lock_lasts_until_the_last_of_several_guards(store: Store) {
    let locks = store.client();
    let one = locks.mutex("a").acquire().await.unwrap();
    let other = one.reenter().unwrap();
    let view = one.held();
    assert_eq!(one.grant_id(), other.grant_id());

    give_back(one).await;
    assert!(view.is_valid());
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    drop(other);
    assert!(!view.is_valid());
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_semaphore_is_not_re_entered(store: Store) {
    let locks = store.client();
    let pool = locks.semaphore("s", 2);
    let outer = pool.permits(1);
    outer
        .run(async |held| {
            let second = pool.permits(1).try_acquire().await?;
            assert_ne!(second.grant_id(), held.grant_id());
            assert_eq!(kind(pool.permits(1).try_acquire().await), ErrorKind::Busy);
            give_back(second).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
}

async fn work_inside_is_stopped_when_the_lock_is_lost(store: Store) {
    let (locks, counts) = store.counted(Fair::Strict);
    let ttl = Duration::from_millis(600);
    let (outer, inner) = (locks.mutex("a").ttl(ttl), locks.mutex("a").ttl(ttl));
    counts.refuse_renewals(true);
    let ran: Result<(), Error> = outer
        .run(async |_| inner.run(async |_| std::future::pending().await).await)
        .await;

    let lost = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(kind(ran), lost);
}

/// The inner request that waits is dropped before it is granted. The next inner request must not
/// wait for it.
async fn a_dropped_inner_wait_leaves_its_turn(store: Store) {
    let locks = store.client();
    let (outer, inner) = (locks.mutex("a"), locks.mutex("a").wait(SOON));
    outer
        .run(async |_| {
            let first = inner.acquire().await?;
            let waits = tokio::time::timeout(Duration::from_millis(20), inner.acquire());
            assert!(waits.await.is_err());
            give_back(first).await;
            give_back(inner.try_acquire().await?).await;
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    assert_nothing_left(&store, &locks, "a").await;
}
