//! How long a lock is held, and what happens when it is lost.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Event, Fair, Guard, Locks, LostReason, OnLost, Release};

use crate::store::{
    A_FEW_MILLIS, Kind, LEASE, SLACK, SOON, STALL, Store, assert_nothing_left, begin, give_back,
    kind, tickets,
};
use tests::stalls::awake_since;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_stalled_holder_is_lost_before_its_next_step_and_cannot_take_the_lock_back
        work_that_lasts_three_leases_keeps_the_lock
        a_lease_without_renewal_ends_and_says_so
        a_lease_without_renewal_is_handed_over_with_its_whole_ttl
        a_lost_lock_stops_the_work_and_the_caller_is_told
        the_body_is_gone_before_the_next_holder_gets_in
        the_lock_is_held_until_the_last_of_the_body_is_gone
        a_body_that_asked_for_a_signal_is_not_stopped
        ensure_renews_when_less_remains
        ensure_refuses_a_time_that_no_renewal_can_give
        renewals_do_not_outlive_the_release
        a_waiter_with_a_short_ttl_does_not_shorten_the_holder
        a_waiter_outlives_many_of_its_own_leases_in_line
        a_leaked_guard_is_not_renewed_beyond_its_limit
        a_lock_stays_taken_as_long_as_asked_however_its_user_ends
        a_lock_kept_by_min_hold_does_not_hold_up_a_shutdown
        a_min_hold_that_no_lease_can_keep_is_refused
        a_lock_kept_by_min_hold_is_free_on_time_though_its_client_ends
        a_lock_kept_for_longer_than_its_ttl_outlives_its_client
        a_loss_is_reported_to_a_view_whose_guard_is_gone
        a_client_that_ends_in_order_tells_of_no_trouble
        danger_is_reported_before_the_loss_and_not_without_need
        an_error_of_the_body_is_passed_on_and_the_lock_is_free
    ]
}

/// How much of a whole ttl the holder counts on: a few milliseconds less, because its clock may be slower than the
/// store's.
fn by_its_own_clock(ttl: Duration) -> Duration {
    ttl - ttl / 100 - Duration::from_millis(5) - A_FEW_MILLIS
}

async fn a_stalled_holder_is_lost_before_its_next_step_and_cannot_take_the_lock_back(store: Store) {
    let lease = Duration::from_millis(400);
    let asked = Instant::now(); // the store starts the lease after this moment
    let stalled = store
        .client()
        .mutex("a")
        .ttl(lease)
        .renew(false)
        .acquire()
        .await
        .unwrap();
    let started = Instant::now();

    let next = store
        .client()
        .mutex("a")
        .wait(LEASE)
        .acquire()
        .await
        .unwrap();
    let awake = awake_since(started);

    assert!(!stalled.is_valid(), "two valid holders");
    assert!(
        asked.elapsed() >= lease - A_FEW_MILLIS,
        "{:?}",
        asked.elapsed()
    );
    assert!(awake < lease + SOON / 4, "{awake:?}");
    assert!(stalled.fencing_token().unwrap() < next.fencing_token().unwrap());
    assert_eq!(stalled.release().await.unwrap(), Release::AlreadyLost);
    assert!(next.is_valid());
    give_back(next).await;
}

async fn work_that_lasts_three_leases_keeps_the_lock(store: Store) {
    let lease = Duration::from_secs(2); // a renewal has two thirds of it, enough for a machine that is busy or stalls
    let guard = store
        .client()
        .mutex("a")
        .ttl(lease)
        .acquire()
        .await
        .unwrap();
    let started = Instant::now();
    let other = store.client();

    while started.elapsed() < 3 * lease {
        assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
        assert!(guard.is_valid());
        tokio::task::yield_now().await;
    }

    give_back(guard).await;
    give_back(other.mutex("a").try_acquire().await.unwrap()).await;
}

async fn a_lease_without_renewal_ends_and_says_so(store: Store) {
    let lease = Duration::from_millis(200);
    let locks = store.client();
    let mut late = Duration::ZERO;
    for round in 0..10 {
        let lock = locks.mutex(format!("a{round}")).ttl(lease).renew(false);
        let guard = lock.acquire().await.unwrap();
        let held = Instant::now();

        assert_eq!(guard.lost().await, LostReason::Expired);

        late += awake_since(held).saturating_sub(lease);
        assert_eq!(guard.remaining(), Duration::ZERO);
        let error = guard.ensure(Duration::from_millis(1)).await;
        assert_eq!(kind(error), ErrorKind::Lost(LostReason::Expired));
    }
    // Checked as a sum: in a single wait, a client that looks only once a second could be late by less than the slack.
    assert!(late < SLACK, "{late:?}");
}

/// The waiter's ticket has aged in line. Without renewal it must not be granted with only the rest of its ttl.
async fn a_lease_without_renewal_is_handed_over_with_its_whole_ttl(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let ttl = STALL;
    let lock = locks.mutex("a").ttl(ttl).renew(false).wait(LEASE);
    let waiter = begin(lock);
    tickets(&locks, "a", 2).await;
    tokio::time::sleep(Duration::from_millis(500)).await; // the ticket ages, which no event reports
    let left = Instant::now();
    drop(guard);

    let guard = waiter.await.unwrap().unwrap();
    let whole = guard.remaining() + left.elapsed();
    assert!(whole >= by_its_own_clock(ttl), "{whole:?}");
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

/// The inner future is dropped before the release is queued.
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

/// While the body is being dropped, the release has not been requested yet. Tested for a body that is cancelled
/// half-way and for one that has returned while a part of it still exists.
async fn the_lock_is_held_until_the_last_of_the_body_is_gone(store: Store) {
    /// Looks at the lock while the last part of the body is dropped.
    struct Last {
        locks: Locks,
        fence: Option<Guard>,
        held: Arc<AtomicBool>,
    }
    impl Drop for Last {
        fn drop(&mut self) {
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(async {
                    // The keeper cleans up in order: when this is gone, everything dropped before it is gone too.
                    drop(self.fence.take());
                    tickets(&self.locks, "fence", 0).await;
                    let held = !self.locks.inspect("a").await.unwrap().is_empty();
                    self.held.store(held, Ordering::SeqCst);
                });
            });
        }
    }
    /// A future that returns at once. What it owns is freed when it is dropped.
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

async fn ensure_renews_when_less_remains(store: Store) {
    let ttl = STALL;
    let lock = store.client().mutex("a").ttl(ttl).renew(false);
    let guard = lock.acquire().await.unwrap();
    while guard.remaining() > by_its_own_clock(ttl) - Duration::from_secs(2) {
        tokio::task::yield_now().await;
    }
    let asked = Instant::now();

    let more = by_its_own_clock(ttl) - Duration::from_secs(1);
    guard.ensure(more).await.unwrap();

    let whole = guard.remaining() + asked.elapsed();
    assert!(whole >= by_its_own_clock(ttl), "{whole:?}");
    give_back(guard).await;
}

async fn ensure_refuses_a_time_that_no_renewal_can_give(store: Store) {
    let guard = store.client().mutex("a").ttl(STALL).acquire().await;
    let guard = guard.unwrap();

    assert_eq!(kind(guard.ensure(LEASE).await), ErrorKind::Config);
    give_back(guard).await;
}

/// With leases this short, a renewal is always due or under way when the release is sent.
async fn renewals_do_not_outlive_the_release(store: Store) {
    let locks = store.client();
    let end = Instant::now() + Duration::from_secs(2);
    let mut rounds = 0;
    while Instant::now() < end {
        let guard = locks
            .mutex("a")
            .ttl(Duration::from_millis(100))
            .acquire()
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(20 + rounds % 20)).await; // varies the moment within the renewal
        guard.release().await.unwrap();
        let free = store
            .client()
            .mutex("a")
            .ttl(Duration::from_secs(60))
            .try_acquire()
            .await;
        give_back(free.unwrap()).await;
        rounds += 1;
    }
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_waiter_with_a_short_ttl_does_not_shorten_the_holder(store: Store) {
    let holder = store.client();
    let ttl = LEASE;
    let asked = Instant::now();
    let guard = holder.mutex("a").ttl(ttl).acquire().await.unwrap();
    let impatient = store.client().mutex("a").ttl(Duration::from_millis(100));
    assert_eq!(
        kind(impatient.wait(Duration::from_millis(400)).acquire().await),
        ErrorKind::Timeout
    );

    let places = holder.inspect("a").await.unwrap();

    let whole = places[0].remaining + asked.elapsed();
    assert!(
        places[0].granted && whole >= ttl - A_FEW_MILLIS,
        "{places:?}"
    );
    assert_eq!(
        kind(store.client().mutex("a").try_acquire().await),
        ErrorKind::Busy
    );
    give_back(guard).await;
}

async fn a_waiter_outlives_many_of_its_own_leases_in_line(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    // Its place in line is renewed even if the lease that it will get is not.
    let (mut waiters, mut places) = (Vec::new(), Vec::new());
    for renew in [true, false] {
        let lock = store
            .client()
            .mutex("a")
            .ttl(Duration::from_secs(1)) // a busy machine has two thirds of it for each renewal
            .renew(renew)
            .wait(LEASE);
        waiters.push(begin(lock));
        tickets(&locks, "a", waiters.len() + 1).await;
        places.push(locks.inspect("a").await.unwrap()[waiters.len()].ticket);
    }
    tokio::time::sleep(Duration::from_secs(5)).await; // five leases, which no event reports

    let line = locks.inspect("a").await.unwrap();
    let line: Vec<u64> = line[1..].iter().map(|place| place.ticket).collect();
    assert_eq!(line, places, "a place was lost");
    drop(guard);
    for waiter in waiters {
        give_back(waiter.await.unwrap().unwrap()).await;
    }
}

async fn a_leaked_guard_is_not_renewed_beyond_its_limit(store: Store) {
    let (ttl, limit) = (Duration::from_millis(300), Duration::from_millis(700));
    let lock = store.client().mutex("a").ttl(ttl).max_hold(limit);
    // Taken before the request: the time counts from the grant, and the caller learns of that later.
    let started = Instant::now();
    let leaked: &'static lockcore::Guard = Box::leak(Box::new(lock.acquire().await.unwrap()));

    assert_eq!(leaked.lost().await, LostReason::MaxHold);
    assert!(started.elapsed() >= limit);
    let next = store
        .client()
        .mutex("a")
        .wait(STALL)
        .acquire()
        .await
        .unwrap();

    assert!(
        awake_since(started) < limit + ttl + Duration::from_secs(2),
        "{:?}",
        awake_since(started)
    );
    assert!(next.fencing_token().unwrap() > leaked.fencing_token().unwrap());
    give_back(next).await;
}

/// The next holder gets in when `min_hold` is over, after several leases, and not before.
async fn a_lock_stays_taken_as_long_as_asked_however_its_user_ends(store: Store) {
    let (ttl, least) = (Duration::from_millis(800), Duration::from_millis(2600));
    let locks = store.client();
    let lock = |name: &str| locks.mutex(name).ttl(ttl).min_hold(least);
    let next = store.client();
    let began = Instant::now();
    let kept = lock("released").acquire().await.unwrap();
    assert_eq!(kept.release().await.unwrap(), Release::Released);
    drop(lock("dropped").acquire().await.unwrap());
    let failed: Result<(), Error> = lock("failed")
        .run(async |_| locks.mutex("").run(async |_| Ok(())).await)
        .await;
    assert_eq!(kind(failed), ErrorKind::Config);
    let panics = lock("panicked");
    let task = tokio::spawn(async move {
        let _: Result<(), Error> = panics.run(async |_| panic!("on purpose")).await;
    });
    assert!(task.await.unwrap_err().is_panic());
    let done = began.elapsed();
    assert!(done < least / 2, "{done:?}");

    let names = ["released", "dropped", "failed", "panicked"];
    for name in names {
        let busy = next.mutex(name).try_acquire().await;
        assert_eq!(kind(busy), ErrorKind::Busy, "{name}");
    }
    for name in names {
        let guard = next.mutex(name).wait(STALL).acquire().await.unwrap();
        let taken = began.elapsed();
        assert!(taken >= least, "{name}: {taken:?}");
        give_back(guard).await;
    }
    assert_nothing_left(&store, &locks, "released").await;
}

async fn a_lock_kept_by_min_hold_does_not_hold_up_a_shutdown(store: Store) {
    let ttl = Duration::from_millis(600);
    let locks = store.client();
    let lock = locks.mutex("a").ttl(ttl).min_hold(LEASE);
    give_back(lock.acquire().await.unwrap()).await;
    let again = lock.clone();
    let began = Instant::now();

    locks.shutdown(SOON).await.unwrap();

    let awake = awake_since(began);
    assert!(awake < SOON / 4, "{awake:?}");
    let late = again.acquire().await;
    assert_eq!(kind(late), ErrorKind::Lost(LostReason::Shutdown));
    let busy = store.client().mutex("a").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy, "it was given back too early");
}

async fn a_min_hold_that_no_lease_can_keep_is_refused(store: Store) {
    let lock = store.client().mutex("a").min_hold(Duration::from_secs(3));
    let ttl = Duration::from_secs(2);

    for lock in [lock.clone().max_hold(ttl), lock.ttl(ttl).renew(false)] {
        let error = lock.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("min_hold of 3s"), "{error}");
    }
    assert_nothing_left(&store, &store.client(), "a").await;
}

/// The stopped work has dropped its guard before the task of the view is polled.
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
    let ttl = Duration::from_secs(3);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();

    // Renewed in time, over two leases.
    let calm = tokio::time::timeout(2 * ttl, guard.in_danger()).await;
    assert!(calm.is_err(), "in danger with {calm:?} left");

    counts.refuse_renewals(true);
    let left = guard.in_danger().await;
    assert!(guard.is_valid() && left <= ttl / 3);
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(guard.in_danger().await, Duration::ZERO);
    let lost = Event::Lost {
        name: "a".into(),
        grant_id: guard.grant_id(),
        reason: LostReason::Expired,
    };
    assert_eq!(events.recv().await, Some(lost));
    // The guard keeps its client alive, so the next event is awaited, and there is none.
    let none = tokio::time::timeout(Duration::from_millis(50), events.recv()).await;
    assert!(none.is_err(), "{none:?}");
    drop((guard, locks));
    assert_eq!(events.recv().await, None);
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
    // The release was awaited, so no other caller finds the lock busy.
    let guard = locks.mutex("a").try_acquire().await.unwrap();
    let outcome: Result<(), Mine> = locks
        .mutex("a")
        .wait(Duration::ZERO)
        .run(async |_| Ok(()))
        .await;
    assert_eq!(outcome, Err(Mine::Lock));
    give_back(guard).await;
}

/// The lock becomes free after `min_hold`, neither earlier nor only at the end of the lease.
async fn a_lock_kept_by_min_hold_is_free_on_time_though_its_client_ends(store: Store) {
    let (ttl, least) = (Duration::from_secs(8), Duration::from_millis(800));
    let elsewhere = store.client();
    for shuts_down in [true, false] {
        let locks = store.client();
        let began = Instant::now();
        let kept = locks.mutex("a").ttl(ttl).min_hold(least).acquire().await;
        give_back(kept.unwrap()).await;
        if shuts_down {
            locks.shutdown(SOON).await.unwrap();
        }
        drop(locks);

        let next = elsewhere.mutex("a").wait(STALL).acquire().await.unwrap();

        let taken = began.elapsed();
        assert!(taken >= least - A_FEW_MILLIS, "{taken:?}");
        assert!(awake_since(began) < least + SLACK, "{taken:?}");
        give_back(next).await;
    }
}

async fn a_lock_kept_for_longer_than_its_ttl_outlives_its_client(store: Store) {
    if store.capability().sessions {
        // A session that has ended keeps nothing: see `Lock::min_hold`.
        return;
    }
    let (ttl, least) = (Duration::from_millis(600), Duration::from_millis(2500));
    let elsewhere = store.client();
    let locks = store.client();
    let began = Instant::now();
    let kept = locks.mutex("a").ttl(ttl).min_hold(least).acquire().await;
    give_back(kept.unwrap()).await;
    drop(locks);

    let next = elsewhere.mutex("a").wait(STALL).acquire().await.unwrap();

    let taken = began.elapsed();
    assert!(taken >= least - A_FEW_MILLIS, "{taken:?}");
    assert!(awake_since(began) < least + SLACK, "{taken:?}");
    give_back(next).await;
}
