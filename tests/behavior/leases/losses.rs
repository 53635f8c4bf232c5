//! Tests of the end of a lock: losses, how they are reported, and the end of the work under the
//! lock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::events::Event;
use lockcore::{Error, ErrorKind, Fair, Guard, Locks, LostReason, OnLost};

use crate::giving_up::polled;
use crate::store::{
    Kind, SOON, Store, assert_nothing_left, begin, give_back, in_line, kind, tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_lost_lock_stops_the_work_and_the_caller_is_told
        the_body_is_gone_before_the_next_holder_gets_in
        the_lock_is_held_until_the_last_of_the_body_is_gone
        a_body_that_asked_for_a_signal_is_not_stopped
        an_error_of_the_body_is_passed_on_and_the_lock_is_free
        a_loss_is_reported_to_a_view_whose_guard_is_gone
        a_view_is_told_that_its_lock_was_released
        a_client_that_ends_in_order_tells_of_no_trouble
        danger_is_reported_before_the_loss_and_not_without_need
    ]
}

async fn a_lost_lock_stops_the_work_and_the_caller_is_told(store: Store) {
    let lock = store
        .client()
        .mutex("a")
        .ttl(Duration::from_millis(150))
        .renew(false);
    let went_on = AtomicBool::new(false);

    let outcome: Result<(), Error> = lock
        .run(async |held| {
            held.lost().await;
            went_on.store(true, Ordering::SeqCst);
            Ok(())
        })
        .await;

    assert_eq!(kind(outcome), ErrorKind::Lost(LostReason::Expired));
    assert!(
        !went_on.load(Ordering::SeqCst),
        "the body was polled after the loss"
    );
}

/// The future of the body is dropped before the release is queued.
async fn the_body_is_gone_before_the_next_holder_gets_in(store: Store) {
    struct InBody(Arc<AtomicBool>);
    impl Drop for InBody {
        fn drop(&mut self) {
            self.0.store(false, Ordering::SeqCst);
        }
    }
    let inside = Arc::new(AtomicBool::new(false));
    let locks = store.client();
    for _ in 0..20 {
        let entered = Arc::new(tokio::sync::Notify::new());
        let task = {
            let (lock, inside, entered) =
                (locks.mutex("a"), Arc::clone(&inside), Arc::clone(&entered));
            tokio::spawn(async move {
                lock.run(async |_| {
                    inside.store(true, Ordering::SeqCst);
                    let _in_body = InBody(Arc::clone(&inside));
                    entered.notify_one();
                    std::future::pending::<Result<(), Error>>().await
                })
                .await
            })
        };
        entered.notified().await;
        task.abort();

        let next = locks.mutex("a").wait(SOON).acquire().await.unwrap();
        assert!(
            !inside.load(Ordering::SeqCst),
            "the dropped body was still there"
        );
        give_back(next).await;
        let _ = task.await;
    }
}

/// While the body is being dropped, the release has not been requested yet. One body is cancelled
/// half-way. Another has returned, and a part of it is dropped later.
async fn the_lock_is_held_until_the_last_of_the_body_is_gone(store: Store) {
    /// Looks at the lock while it is dropped. It is the last part of the body.
    struct Last {
        locks: Locks,
        fence: Option<Guard>,
        held: Arc<AtomicBool>,
    }
    impl Drop for Last {
        fn drop(&mut self) {
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(async {
                    // The keeper cleans up in order. When this lock is released, everything that
                    // was dropped before it is released too.
                    drop(self.fence.take());
                    tickets(&self.locks, "fence", 0).await;
                    let held = !self.locks.inspect("a").await.unwrap().is_empty();
                    self.held.store(held, Ordering::SeqCst);
                });
            });
        }
    }
    /// A future that is ready at once. Its values are freed when it is dropped.
    struct Returned(#[expect(dead_code, reason = "dropping it is what counts")] Last);
    impl Future for Returned {
        type Output = Result<(), Error>;
        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            Poll::Ready(Ok(()))
        }
    }
    let locks = store.client();
    drop(locks.mutex("warm").acquire().await.unwrap());
    tickets(&locks, "warm", 0).await; // the keeper is connected
    for cancelled in [true, false] {
        let held = Arc::new(AtomicBool::new(false));
        let last = Last {
            locks: locks.clone(),
            fence: Some(locks.mutex("fence").acquire().await.unwrap()),
            held: Arc::clone(&held),
        };
        let guard = locks.mutex("a").acquire().await.unwrap();
        if cancelled {
            let mut work = Box::pin(guard.run(async move {
                let _last = last;
                std::future::pending::<Result<(), Error>>().await
            }));
            assert!(
                std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx).is_pending())).await
            );
            drop(work);
        } else {
            guard.run(Returned(last)).await.unwrap();
        }

        assert!(
            held.load(Ordering::SeqCst),
            "released under its body; cancelled: {cancelled}"
        );
        assert_nothing_left(&store, &locks, "a").await;
    }
}

async fn a_body_that_asked_for_a_signal_is_not_stopped(store: Store) {
    let lock = store
        .client()
        .mutex("a")
        .ttl(Duration::from_millis(150))
        .renew(false);

    let outcome: Result<_, Error> = lock
        .on_lost(OnLost::Signal)
        .run(async |held| Ok(held.lost().await))
        .await;

    assert_eq!(outcome.unwrap(), LostReason::Expired);
}

async fn an_error_of_the_body_is_passed_on_and_the_lock_is_free(store: Store) {
    #[derive(Debug, PartialEq)]
    enum Mine {
        Body,
        Lock,
    }
    impl From<Error> for Mine {
        fn from(_: Error) -> Self {
            Self::Lock
        }
    }
    let locks = store.client();

    let outcome: Result<(), Mine> = locks.mutex("a").run(async |_| Err(Mine::Body)).await;

    assert_eq!(outcome, Err(Mine::Body));
    // `run` waits for the answer to its release, so no other caller finds the lock busy.
    let guard = locks.mutex("a").try_acquire().await.unwrap();
    let outcome: Result<(), Mine> = locks
        .mutex("a")
        .wait(Duration::ZERO)
        .run(async |_| Ok(()))
        .await;
    assert_eq!(outcome, Err(Mine::Lock));
    give_back(guard).await;
}

/// The work was stopped, and its guard dropped, before the view is first polled.
async fn a_loss_is_reported_to_a_view_whose_guard_is_gone(store: Store) {
    let (locks, counts) = store.counted(Fair::Strict);
    counts.refuse_renewals(true);
    let lock = locks.mutex("a").ttl(Duration::from_millis(600));
    let mut view = None;
    let ran: Result<(), Error> = lock
        .run(async |held| {
            view = Some(held);
            std::future::pending().await
        })
        .await;
    assert_eq!(kind(ran), ErrorKind::Lost(LostReason::Expired));

    let view = view.unwrap();
    assert_eq!(view.lost().await, LostReason::Expired);
    assert!(!view.is_valid() && view.in_danger().await.is_zero());
}

/// Tasks that wait for the end of a lock must not wait for ever.
async fn a_view_is_told_that_its_lock_was_released(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a").wait(SOON);
    for dropped in [true, false] {
        let guard = lock.acquire().await.unwrap();
        let second = guard.reenter().unwrap();
        let (view, waits) = (guard.held(), guard.held());
        let waits = tokio::spawn(async move { waits.lost().await });
        // A task of this process gets the lock next, perhaps with the same ticket.
        let next = begin(lock.clone());
        in_line(&store, &locks, "a", 1, 1).await;

        give_back(second).await;
        assert!(polled(view.lost(), 1).await.is_none(), "it is still held");
        assert!(!waits.is_finished());
        match dropped {
            true => drop(guard),
            false => give_back(guard).await,
        }

        let told = tokio::time::timeout(SOON, waits).await;
        assert_eq!(told.expect("not told").unwrap(), LostReason::Released);
        let next = next.await.unwrap().unwrap();
        for _ in 0..2 {
            assert_eq!(polled(view.lost(), 1).await, Some(LostReason::Released));
        }
        assert!(polled(next.lost(), 1).await.is_none(), "it is held");
        give_back(next).await;
    }

    let kept = locks.mutex("a").min_hold(Duration::from_millis(50));
    let guards = Locks::all([kept, locks.mutex("b")])
        .acquire()
        .await
        .unwrap();
    let both = guards.held();
    guards.release().await.unwrap();
    let (_, reason) = polled(both.lost(), 1).await.unwrap();
    assert_eq!(reason, LostReason::Released);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_client_that_ends_in_order_tells_of_no_trouble(store: Store) {
    for round in 0..5 {
        let locks = store.client();
        let mut events = locks.events();
        give_back(locks.mutex("a").acquire().await.unwrap()).await;

        drop(locks);

        let told = tokio::time::timeout(SOON, events.recv()).await;
        let told = told.expect("the end");
        assert!(told.is_none(), "{told:?} in round {round}");
    }
}

async fn danger_is_reported_before_the_loss_and_not_without_need(store: Store) {
    let (locks, counts) = store.counted(Fair::Strict);
    let mut events = locks.events();
    let ttl = Duration::from_secs(6);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();

    // The lease is renewed in time, so there is no danger. Without a renewal, there would be some
    // after two thirds of the ttl.
    let calm = tokio::time::timeout(ttl, guard.in_danger()).await;
    assert!(calm.is_err(), "in danger with {calm:?} left");

    counts.refuse_renewals(true);
    let left = guard.in_danger().await;
    assert!(guard.is_valid() && left <= ttl / 3);
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(guard.in_danger().await, Duration::ZERO);
    let again = polled(guard.in_danger(), 1).await;
    assert_eq!(again, None, "it has told the loss");
    let lost = Event::Lost {
        name: "a".into(),
        grant_id: guard.grant_id(),
        reason: LostReason::Expired,
    };
    assert_eq!(events.recv().await, Some(lost));
    // The guard keeps its client alive, so the stream of events has not ended. There is no further
    // event.
    let none = tokio::time::timeout(Duration::from_millis(50), events.recv()).await;
    assert!(none.is_err(), "{none:?}");
    drop((guard, locks));
    assert_eq!(events.recv().await, None);
}
