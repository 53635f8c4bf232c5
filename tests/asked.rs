//! Tests of annotated functions whose lock an operator asks back. The option `on_revoke` says what
//! happens to these functions.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::future::pending;
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use lockcore::testing::{Store, Verb};
use lockcore::{Error, ErrorKind, Locks, LostReason, OnRevoke, Release, distributed_lock};

/// A time that is much longer than any step of a test.
const LONG: Duration = Duration::from_secs(60);

const REVOKED: ErrorKind = ErrorKind::Lost(LostReason::Revoked);

#[distributed_lock(key = "a", locks = locks, on_revoke = cancel)]
async fn is_repeated_later(locks: &Locks) -> Result<(), Error> {
    pending().await
}

#[distributed_lock(keys = ["a", "b"], locks = locks, on_revoke = cancel)]
async fn several_are_repeated_later(locks: &Locks) -> Result<(), Error> {
    pending().await
}

#[distributed_lock(key = "a", locks = locks, on_revoke = finish, held = held)]
async fn finishes(locks: &Locks) -> Result<String, Error> {
    Ok(held.revoked().await.why)
}

#[distributed_lock(key = "a", locks = locks)]
async fn does_not_finish(locks: &Locks) -> Result<(), Error> {
    pending().await
}

/// Asks the lock `a` back as soon as somebody holds it. Returns when it is free.
async fn ask_for(locks: &Locks, grace: Duration) {
    let holder = loop {
        let places = locks.inspect("a").await.unwrap();
        match places.first() {
            Some(place) => break place.ticket,
            None => tokio::task::yield_now().await,
        }
    };
    let outcome = locks.revoke("a", holder, grace, "maintenance").await;
    assert_eq!(outcome.unwrap(), Release::Released);
}

#[tokio::test]
async fn with_cancel_the_body_is_stopped_as_soon_as_somebody_asks() {
    let locks = Locks::connect("memory:").unwrap();
    let began = Instant::now();

    let (one, ()) = tokio::join!(is_repeated_later(&locks), ask_for(&locks, LONG));
    let (several, ()) = tokio::join!(several_are_repeated_later(&locks), ask_for(&locks, LONG));

    for outcome in [one, several] {
        assert_eq!(outcome.unwrap_err().kind(), REVOKED);
    }
    assert!(began.elapsed() < LONG / 2);
    assert_eq!(locks.inspect("b").await.unwrap(), []);
}

/// A caller that repeats the call at once finds the lock free.
#[tokio::test]
async fn with_cancel_the_call_returns_after_its_release() {
    let store = Store::new();
    let there = store.another_process();
    let (locks, operator) = (there.client().unwrap(), store.client().unwrap());
    let lock = |name| locks.mutex(name).on_revoke(OnRevoke::Cancel);
    let carried = async {
        let guard = lock("a").acquire().await?;
        let work = guard.scope(pending());
        drop(guard); // the last guard is that of the work
        work.await
    };
    let carried_under_several = async {
        let guard = Locks::all([lock("a"), lock("b")]).acquire().await?;
        let work = guard.scope(pending());
        drop(guard);
        work.await
    };
    let calls: [LocalBoxFuture<'_, Result<(), Error>>; 4] = [
        Box::pin(is_repeated_later(&locks)),
        Box::pin(several_are_repeated_later(&locks)),
        Box::pin(carried),
        Box::pin(carried_under_several),
    ];
    for mut call in calls {
        let mut release = there.hold_next(Verb::Release);
        let asks = operator.clone();
        let asked = tokio::spawn(async move { ask_for(&asks, LONG).await });

        tokio::select! {
            biased;
            outcome = &mut call => panic!("its lock is taken: {outcome:?}"),
            () = release.arrived() => {}
        }
        release.let_go();

        assert_eq!(call.await.unwrap_err().kind(), REVOKED);
        for name in ["a", "b"] {
            assert_eq!(operator.inspect(name).await.unwrap(), []);
        }
        asked.await.unwrap();
    }
}

#[tokio::test]
async fn with_finish_the_body_goes_on_for_the_time_that_it_is_given() {
    let locks = Locks::connect("memory:").unwrap();

    let (finished, ()) = tokio::join!(finishes(&locks), ask_for(&locks, LONG));
    assert_eq!(finished.unwrap(), "maintenance");

    let (began, grace) = (Instant::now(), Duration::from_millis(300));
    let (stopped, ()) = tokio::join!(does_not_finish(&locks), ask_for(&locks, grace));
    assert_eq!(stopped.unwrap_err().kind(), REVOKED);
    assert!(began.elapsed() >= grace);
}
