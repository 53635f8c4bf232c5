//! Tests of how long a lease lasts: renewals, `ensure`, and leases without renewal.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::stalls::awake_since;

use crate::store::{
    A_FEW_MILLIS, DEFAULT, Kind, LEASE, SLACK, SOON, STALL, Store, assert_nothing_left, begin,
    give_back, kind, soon, tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_stalled_holder_is_lost_before_its_next_step_and_cannot_take_the_lock_back
        work_that_lasts_three_leases_keeps_the_lock
        a_lease_without_renewal_ends_and_says_so
        a_lease_without_renewal_is_handed_over_with_its_whole_ttl
        ensure_renews_when_less_remains
        ensure_refuses_a_time_that_no_renewal_can_give
        renewals_do_not_outlive_the_release
        a_waiter_with_a_short_ttl_does_not_shorten_the_holder
        a_waiter_outlives_many_of_its_own_leases_in_line
        a_leaked_guard_is_not_renewed_beyond_its_limit
    ]
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_renewal_that_takes_longer_than_an_operation_may_keeps_the_lock
    ]
}

/// How much of a whole ttl the holder relies on. It is a little less than the ttl, because the
/// holder's clock may be slower than the store's.
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
    // The waiter's own renewal would come after twenty seconds.
    assert!(awake < lease + SOON, "{awake:?}");
    assert!(stalled.fencing_token().unwrap() < next.fencing_token().unwrap());
    assert_eq!(stalled.release().await.unwrap(), Release::AlreadyLost);
    assert!(next.is_valid());
    give_back(next).await;
}

async fn work_that_lasts_three_leases_keeps_the_lock(store: Store) {
    let lease = Duration::from_secs(4); // a renewal has two thirds of it, enough for a machine that is busy or stalls
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
        tokio::time::sleep(A_FEW_MILLIS).await; // a busy loop would make the machine stall
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
    // The fact checks the sum of ten losses. A client that checks the time only once a second could
    // report a single loss late by less than the slack.
    assert!(late < SLACK, "{late:?}");
}

/// The waiter's ticket grows old in line. If the lease is not renewed, a grant with only the rest
/// of its ttl would be too short.
async fn a_lease_without_renewal_is_handed_over_with_its_whole_ttl(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let ttl = STALL;
    let lock = locks.mutex("a").ttl(ttl).renew(false).wait(LEASE);
    let waiter = begin(lock);
    tickets(&locks, "a", 2).await;
    // The ticket ages by more than the tolerance of the check below.
    let aged = 2 * (ttl - by_its_own_clock(ttl));
    eventually("the ticket has aged", SOON, async || {
        locks.inspect("a").await.unwrap()[1].age > Some(aged)
    })
    .await;
    let left = Instant::now();
    drop(guard);

    let guard = waiter.await.unwrap().unwrap();
    let whole = guard.remaining() + left.elapsed();
    assert!(whole >= by_its_own_clock(ttl), "{whole:?}");
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

/// With leases this short, a renewal is always due or in flight when the release is sent.
async fn renewals_do_not_outlive_the_release(store: Store) {
    let locks = store.client();
    let ttl = Duration::from_millis(100);
    let renewed_after = ttl / 3;
    let end = Instant::now() + Duration::from_secs(2);
    let mut rounds = 0;
    while Instant::now() < end {
        let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
        // No event tells when a renewal begins. These pauses end before, during and after it.
        tokio::time::sleep(renewed_after * (12 + rounds % 12) / 20).await;
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
    let other = store.client();
    let impatient = other.mutex("a").ttl(Duration::from_secs(1));
    assert_eq!(
        kind(impatient.wait(Duration::from_secs(3)).acquire().await),
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
    let ttl = Duration::from_secs(4); // a busy machine has two thirds of it for each renewal
    // The keeper renews the ticket while it waits, even if `renew(false)` says that a granted lease
    // is not renewed.
    let (mut waiters, mut places) = (Vec::new(), Vec::new());
    for renew in [true, false] {
        let lock = store.client().mutex("a").ttl(ttl).renew(renew).wait(LEASE);
        waiters.push(begin(lock));
        tickets(&locks, "a", waiters.len() + 1).await;
        places.push(locks.inspect("a").await.unwrap()[waiters.len()].ticket);
    }
    tokio::time::sleep(3 * ttl).await; // no event reports that leases would be over

    let line = locks.inspect("a").await.unwrap();
    let line: Vec<u64> = line[1..].iter().map(|place| place.ticket).collect();
    assert_eq!(line, places, "a place was lost");
    drop(guard);
    for waiter in waiters {
        give_back(waiter.await.unwrap().unwrap()).await;
    }
}

async fn a_leaked_guard_is_not_renewed_beyond_its_limit(store: Store) {
    let (ttl, limit) = (Duration::from_secs(3), Duration::from_secs(4));
    let lock = store.client().mutex("a").ttl(ttl).max_hold(limit);
    // This moment is before the request. The limit counts from the grant, and the caller learns of
    // the grant only later.
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
        awake_since(started) < limit + ttl + SOON / 2,
        "{:?}",
        awake_since(started)
    );
    assert!(next.fencing_token().unwrap() > leaked.fencing_token().unwrap());
    give_back(next).await;
}

/// A busy store answers late, but it has renewed. If the client gave up first, it would ask such a
/// store again and again, and lose the lock. The clock stands still, so only the first renewal can
/// be the one that counts.
async fn a_renewal_that_takes_longer_than_an_operation_may_keeps_the_lock(_: Store) {
    let (ttl, op_timeout) = (Duration::from_secs(12), Duration::from_secs(1));
    let kit = Kit::new();
    kit.clock().stop();
    let locks = kit.client_with(Locks::builder().ttl(ttl).op_timeout(op_timeout));
    let locks = locks.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.clock().advance(ttl / 3);
    soon(renewal.arrived()).await;
    let mut look = kit.hold_next(Verb::Inspect);
    let other = tokio::spawn(async move { locks.inspect("a").await });
    soon(look.arrived()).await;

    kit.clock().advance(op_timeout * 2);
    // By now the client has given up what it gives up after one operation timeout.
    assert!(soon(other).await.unwrap().is_err());
    renewal.let_go();

    eventually("renewed", SOON, async || guard.remaining() > ttl / 4 * 3).await;
}
