//! Tests of the view of several locks, which has the same methods as the view of one lock. Further
//! tests show that nested code can list the locks that it runs under.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Locks, LostReason, OnLost, Release, distributed_lock};

use crate::store::{Kind, SLACK, SOON, Store, assert_nothing_left, give_back, kind, soon};
use tests::stalls::awake_since;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        several_locks_are_carried_into_a_task_and_held_until_it_ends
        several_locks_are_not_carried_when_one_was_released
        work_under_several_carried_locks_is_stopped_by_the_loss_of_one
        danger_to_one_of_several_locks_is_reported
        nested_code_can_list_the_locks_that_it_runs_under
        code_in_a_spawned_task_runs_under_the_locks_carried_into_it
        code_runs_under_a_lock_only_while_that_is_held
        code_can_tell_a_lock_of_its_client_from_one_of_another
    ]
}

async fn several_locks_are_carried_into_a_task_and_held_until_it_ends(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let guard = Locks::all(["a", "b"].map(|name| locks.mutex(name)));
    let guard = guard.acquire().await.unwrap();
    let (begun, begins) = tokio::sync::oneshot::channel();
    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let inner = locks.clone();
    let job = tokio::spawn(guard.scope(async move {
        // The locks are granted at once, because the scope holds both of them.
        let both = Locks::all(["a", "b"].map(|name| inner.mutex(name)));
        let again = both.try_acquire().await.unwrap();
        assert_eq!(again.release().await.unwrap(), Release::Released);
        begun.send(()).unwrap();
        let _ = ends.await;
    }));
    begins.await.unwrap();

    // The guard of the scope still holds both locks.
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    for name in ["a", "b"] {
        assert_eq!(kind(other.mutex(name).try_acquire().await), ErrorKind::Busy);
    }
    end.send(()).unwrap();
    job.await.unwrap().unwrap();
    for name in ["a", "b"] {
        assert_nothing_left(&store, &other, name).await;
    }
}

async fn several_locks_are_not_carried_when_one_was_released(store: Store) {
    let locks = store.client();
    let guard = Locks::all(["a", "b"].map(|name| locks.mutex(name)));
    let guard = guard.acquire().await.unwrap();
    let view = guard.held();
    assert_eq!(guard.release().await.unwrap(), Release::Released);

    let error = view.scope(async { unreachable!() }).await.unwrap_err();

    let released = ErrorKind::Lost(LostReason::Released);
    assert_eq!((error.kind(), error.name()), (released, Some("a")));
    for name in ["a", "b"] {
        assert_nothing_left(&store, &locks, name).await;
    }
}

async fn work_under_several_carried_locks_is_stopped_by_the_loss_of_one(store: Store) {
    let locks = store.client();
    let ends = locks
        .mutex("b")
        .ttl(Duration::from_millis(300))
        .renew(false);
    let guard = Locks::all([locks.mutex("a"), ends])
        .acquire()
        .await
        .unwrap();

    let job = tokio::spawn(guard.scope(std::future::pending::<()>()));

    let error = job.await.unwrap().unwrap_err();
    let lost = ErrorKind::Lost(LostReason::Expired);
    assert_eq!((error.kind(), error.name()), (lost, Some("b")));
    drop(guard);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn danger_to_one_of_several_locks_is_reported(store: Store) {
    let locks = store.client();
    let ttl = Duration::from_millis(900);
    let ends = locks.mutex("b").ttl(ttl).renew(false);
    let guard = Locks::all([locks.mutex("a"), ends])
        .acquire()
        .await
        .unwrap();
    let began = Instant::now();

    let (held, left) = guard.in_danger().await;

    assert_eq!(held.name(), "b");
    assert!(left <= ttl / 3, "{left:?}");
    // Each view gives its own warnings.
    assert_eq!(soon(guard.held().in_danger()).await.0.name(), "b");
    assert!(awake_since(began) < ttl + SLACK);
    drop(guard);
    assert_nothing_left(&store, &locks, "a").await;
    let none = Locks::all([]).acquire().await.unwrap();
    let waits = tokio::time::timeout(Duration::from_millis(20), none.in_danger());
    assert!(waits.await.is_err());
}

fn names_under() -> Vec<&'static str> {
    let mut names = vec!["a", "b", "c", "s", "r"];
    names.retain(|name| lockcore::held(name).is_some_and(|held| held.name() == *name));
    names
}

#[distributed_lock(key = "c", locks = locks)]
async fn annotated(locks: &Locks) -> Result<Vec<&'static str>, Error> {
    Ok(names_under())
}

async fn nested_code_can_list_the_locks_that_it_runs_under(store: Store) {
    let locks = store.client();
    let pool = locks.semaphore("s", 3).permits(2);
    let both = Locks::all([locks.mutex("a"), pool]);
    assert!(names_under().is_empty());

    let ran: Result<(), Error> = both
        .run(async |outer| {
            assert_eq!(names_under(), ["a", "s"]);
            let token = lockcore::held("a").unwrap().grant_id();
            assert_eq!(token, outer.get("a").unwrap().grant_id());
            assert_eq!(annotated(&locks).await?, ["a", "c", "s"]);
            let read = locks.rwlock("r").read().acquire().await?;
            // The bare guard `read` belongs to no scope.
            assert_eq!(names_under(), ["a", "s"]);
            read.while_held(async { assert_eq!(names_under(), ["a", "s", "r"]) })
                .await?;
            read.enter(|| assert_eq!(names_under(), ["a", "s", "r"]));
            give_back(read).await;
            assert_eq!(names_under(), ["a", "s"]);
            Ok(())
        })
        .await;

    ran.unwrap();
    assert!(names_under().is_empty());
    let guard = both.acquire().await.unwrap();
    assert!(names_under().is_empty());
    guard.enter(|| assert_eq!(names_under(), ["a", "s"]));
    let under = std::thread::spawn(names_under).join().unwrap();
    assert!(under.is_empty(), "outside of every runtime");
    assert_eq!(guard.release().await.unwrap(), Release::Released);
}

async fn code_in_a_spawned_task_runs_under_the_locks_carried_into_it(store: Store) {
    let locks = store.client();
    let ran: Result<(), Error> = locks
        .mutex("a")
        .run(async |a| {
            let b = locks.mutex("b").acquire().await?;
            b.while_held(async {
                let alone = tokio::spawn(async { names_under() }).await.unwrap();
                assert!(alone.is_empty());
                let one = tokio::spawn(b.scope(async { names_under() }))
                    .await
                    .unwrap();
                assert_eq!(one?, ["a", "b"]);
                assert_eq!(names_under(), ["a", "b"]);
                Ok::<_, Error>(())
            })
            .await??;
            let carried = a.scope(async { names_under() });
            assert_eq!(tokio::spawn(carried).await.unwrap()?, ["a"]);
            give_back(b).await;
            Ok(())
        })
        .await;
    ran.unwrap();
}

async fn code_runs_under_a_lock_only_while_that_is_held(store: Store) {
    let locks = store.client();
    let ends = locks.mutex("a").ttl(Duration::from_secs(3)).renew(false);
    let ran: Result<(), Error> = ends
        .on_lost(OnLost::Signal)
        .run(async |held| {
            assert_eq!(names_under(), ["a"]);
            held.lost().await;
            assert!(names_under().is_empty());
            Ok(())
        })
        .await;
    ran.unwrap();
    // The lock is released inside its own scope. After that, the same client acquires it again.
    let guard = locks.mutex("b").wait(SOON).acquire().await.unwrap();
    let view = guard.held();
    let mut guard = Some(guard);
    view.enter(|| assert_eq!(names_under(), ["b"]));
    give_back(guard.take().unwrap()).await;
    let next = locks.mutex("b").acquire().await.unwrap();
    view.enter(|| assert!(names_under().is_empty()));
    give_back(next).await;
}

async fn code_can_tell_a_lock_of_its_client_from_one_of_another(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let ran: Result<(), Error> = locks
        .mutex("a")
        .run(async |held| {
            let token = |held: Option<lockcore::Held>| held.map(|held| held.grant_id());
            let under = Some(held.grant_id());
            assert_eq!(token(lockcore::held("a")), under);
            assert_eq!(token(locks.clone().held("a")), under);
            assert_eq!(token(other.held("a")), None);
            // The innermost lock is a lock of another store.
            let elsewhere = Locks::connect("memory:").unwrap();
            let inner: Result<(), Error> = elsewhere
                .mutex("a")
                .run(async |inner| {
                    assert_eq!(token(lockcore::held("a")), Some(inner.grant_id()));
                    assert_eq!(token(locks.held("a")), under);
                    Ok(())
                })
                .await;
            inner
        })
        .await;
    ran.unwrap();
    assert_nothing_left(&store, &locks, "a").await;
}
