//! Tests of leases that are extended beyond the ttl that the lock was requested with.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{ErrorKind, Locks, LostReason};
use tests::eventually::eventually;

use crate::protocol::is_not_renewed;
use crate::store::{
    DEFAULT, Kind, SOON, STALL, Store, assert_nothing_left, begin, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        an_extended_lease_keeps_others_out_beyond_its_first_ttl
        an_extended_lease_that_is_renewed_stays_so
        an_extended_lease_is_shown_with_its_longer_ttl
        a_ttl_that_does_not_extend_is_refused_and_changes_nothing
        a_lost_lease_is_not_extended
        max_hold_stays_the_end_of_an_extended_lease
        a_waiter_that_comes_after_an_extended_lease_has_its_own_ttl
    ]
}

/// Facts about renewals that are in flight, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_extended_lease_is_renewed_at_its_own_pace
        an_extension_waits_for_a_shorter_renewal_that_is_under_way
        a_shorter_renewal_that_arrives_late_cuts_no_valid_lease
        a_lease_whose_first_enqueue_was_not_answered_is_extended_a_minute_later
        an_unacknowledged_extension_is_repeated_by_later_renewals
    ]
}

const TTL: Duration = Duration::from_secs(3);
const LONGER: Duration = Duration::from_secs(12);

async fn an_extended_lease_keeps_others_out_beyond_its_first_ttl(store: Store) {
    let (locks, other) = (store.client(), store.client());
    other.ready(SOON).await.unwrap();
    for lock in [locks.mutex("a"), locks.semaphore("a", 3).permits(3)] {
        let guard = lock.ttl(TTL).renew(false).acquire().await.unwrap();
        let asked = Instant::now();

        guard.extend(LONGER).await.unwrap();

        let remaining = guard.remaining() + asked.elapsed();
        assert!(
            remaining > LONGER - SOON / 10 && guard.remaining() < LONGER,
            "{remaining:?}"
        );
        guard.ensure(LONGER / 2).await.unwrap();
        let asked = Instant::now();
        let late = match guard.fencing_token() {
            Ok(_) => other.mutex("a"),
            Err(_) => other.semaphore("a", 3).permits(1),
        };
        let late = late.wait(TTL / 2 * 3).acquire().await;
        assert_eq!(kind(late), ErrorKind::Timeout);
        assert!(asked.elapsed() > TTL && guard.is_valid());
        give_back(guard).await;
        assert_nothing_left(&store, &other, "a").await;
    }
}

async fn an_extended_lease_that_is_renewed_stays_so(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a").ttl(TTL);
    let guard = lock.acquire().await.unwrap();

    guard.extend(LONGER).await.unwrap();

    // The keeper's first renewal was planned for a third of the shorter ttl. This fact is about the
    // renewal after it.
    for late in [false, true] {
        eventually("aged, and renewed", SOON, async || {
            late == (guard.remaining() > LONGER - TTL / 2)
        })
        .await;
    }
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_extended_lease_is_shown_with_its_longer_ttl(store: Store) {
    let (locks, other) = (store.client(), store.client());
    for renews in [true, false] {
        let lock = locks.mutex("a").ttl(TTL).renew(renews);
        let guard = lock.acquire().await.unwrap();

        guard.extend(LONGER).await.unwrap();

        let shown = other.inspect("a").await.unwrap()[0].remaining;
        let believed = guard.remaining();
        assert!(
            believed > TTL && believed <= shown,
            "{believed:?}, {shown:?}"
        );
        assert!(shown <= LONGER, "{shown:?}");
        give_back(guard).await;
        assert_nothing_left(&store, &other, "a").await;
    }
}

async fn a_ttl_that_does_not_extend_is_refused_and_changes_nothing(store: Store) {
    let guard = store.client().mutex("a").ttl(LONGER).acquire().await;
    let guard = guard.unwrap();
    let beyond = store.backend().capability().longest_ttl + TTL;

    for bad in [Duration::ZERO, TTL, beyond, Duration::MAX] {
        let error = guard.extend(bad).await.unwrap_err();
        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("a")));
        assert!(error.to_string().contains("it has 12s"), "{error}");
    }
    let remaining = guard.remaining();
    assert!(
        remaining > LONGER / 2 && remaining < LONGER,
        "{remaining:?}"
    );
    guard.extend(LONGER).await.unwrap();
    give_back(guard).await;
}

async fn a_lost_lease_is_not_extended(store: Store) {
    let lock = store.client().mutex("a").ttl(Duration::from_millis(300));
    let guard = lock.renew(false).acquire().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::Expired);

    let lost = ErrorKind::Lost(LostReason::Expired);
    // Whatever ttl is asked for, the loss is what the caller must know.
    for ttl in [LONGER, Duration::from_millis(100), Duration::MAX] {
        assert_eq!(kind(guard.extend(ttl).await), lost);
    }
    assert!(!guard.is_valid());
}

async fn max_hold_stays_the_end_of_an_extended_lease(store: Store) {
    let limit = 2 * TTL;
    let lock = store.client().mutex("a").ttl(TTL).max_hold(limit);
    let guard = lock.acquire().await.unwrap();

    guard.extend(LONGER).await.unwrap();

    assert!(guard.remaining() > TTL && guard.remaining() <= limit);
    assert_eq!(guard.lost().await, LostReason::MaxHold);
}

/// The waiter is in this process, which normally passes the ticket on in memory.
async fn a_waiter_that_comes_after_an_extended_lease_has_its_own_ttl(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a").ttl(TTL).wait(SOON);
    let guard = lock.acquire().await.unwrap();
    let waits = begin(lock.clone());
    tickets(&locks, "a", 2).await;

    guard.extend(LONGER).await.unwrap();
    give_back(guard).await;

    let next = waits.await.unwrap().unwrap();
    assert!(next.remaining() <= TTL, "{:?}", next.remaining());
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_extended_lease_is_renewed_at_its_own_pace(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let locks = kit.client().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    guard.extend(Duration::from_secs(60)).await.unwrap();
    let whole = guard.remaining();
    assert_eq!(whole, Duration::from_millis(60_000 - 605));
    // The keeper sends the renewal that it had planned before the extension.
    kit.clock().advance(Duration::from_secs(4));
    eventually("renewed", SOON, async || guard.remaining() == whole).await;

    let mut renewal = kit.hold_next(Verb::Renew);
    // A third of the ttl is 20 s. Drift allowance and jitter make it at most 2.6 s less.
    kit.clock().advance(Duration::from_secs(17));
    is_not_renewed(&locks, &guard, &mut renewal).await;
    kit.clock().advance(Duration::from_secs(3));
    let arrived = tokio::time::timeout(SOON, renewal.arrived());
    arrived.await.expect("not renewed");
    drop(renewal);
    eventually("renewed", SOON, async || guard.remaining() == whole).await;
    give_back(guard).await;
}

/// Without the wait, the store could carry out the shorter renewal after the extension, and shorten
/// the lease again.
async fn an_extension_waits_for_a_shorter_renewal_that_is_under_way(_: Store) {
    let kit = Kit::new();
    let patient = Locks::builder().op_timeout(STALL);
    let locks = kit.client_with(patient).unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut shorter = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(4));
    shorter.arrived().await;
    let longer = Duration::from_secs(60);

    let mut extension = Box::pin(guard.extend(longer));
    let waits = tokio::time::timeout(Duration::from_millis(100), &mut extension);
    assert!(waits.await.is_err(), "it did not wait");
    assert!(guard.remaining() < Duration::from_secs(10));
    shorter.let_go();
    extension.await.unwrap();

    assert!(guard.remaining() > longer - SOON);
    let at_the_store = locks.inspect("a").await.unwrap()[0].remaining;
    assert!(guard.remaining() <= at_the_store, "{at_the_store:?}");
    give_back(guard).await;
}

/// The keeper has given up waiting for the answer to the shorter renewal.
async fn a_shorter_renewal_that_arrives_late_cuts_no_valid_lease(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut shorter = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(4));
    shorter.arrived().await;
    // The keeper renews again only after it has stopped waiting for the first renewal.
    let before = guard.remaining();
    eventually("renewed", SOON, async || guard.remaining() > before).await;
    let longer = Duration::from_secs(60);
    let check = async |when: &str| {
        let believed = guard.remaining();
        let at_the_store = locks.inspect("a").await.unwrap()[0].remaining;
        assert!(
            believed <= at_the_store,
            "{when}: {believed:?}, {at_the_store:?}"
        );
    };

    let error = guard.extend(longer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("may still arrive"), "{error}");
    check("before it arrives").await;
    shorter.let_go();
    check("after it").await;

    // While the earlier renewal may still arrive, no renewal extends the lease. After that time, a
    // renewal does.
    let mut passed = Duration::ZERO;
    while guard.remaining() < Duration::from_secs(10) {
        let before = guard.remaining();
        let step = Duration::from_secs(4);
        kit.clock().advance(step);
        passed += step;
        eventually("renewed", SOON, async || {
            guard.remaining() + step / 2 > before
        })
        .await;
        check("meanwhile").await;
    }
    assert!(passed > Duration::from_secs(45), "{passed:?}");
    guard.extend(longer).await.unwrap();
    assert!(guard.remaining() > longer - SOON);
    check("at last").await;
    give_back(guard).await;
}

async fn a_lease_whose_first_enqueue_was_not_answered_is_extended_a_minute_later(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    // A request that is lost would break the connection. The client would renew the lease after the
    // reconnect, perhaps while the clock moves.
    kit.fail_next(Verb::Enqueue, Fault::Unknown);
    let guard = locks.mutex("a").acquire().await.unwrap();
    // While the clock stands still, no pause between two renewals ends. So a call that returns has
    // sent one renewal.
    kit.clock().stop();
    let (whole, longer) = (Duration::from_millis(10_000 - 105), Duration::from_secs(60));
    for _ in 0..2 {
        let error = soon(guard.extend(longer)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("to its ttl of 10s"), "{error}");
        assert_eq!(guard.remaining(), whole);
    }

    for _ in 0..15 {
        kit.clock().advance(Duration::from_secs(4));
        eventually("renewed", SOON, async || guard.remaining() >= whole).await;
    }
    soon(guard.extend(longer)).await.unwrap();

    assert_eq!(guard.remaining(), Duration::from_millis(60_000 - 605));
    give_back(guard).await;
}

async fn an_unacknowledged_extension_is_repeated_by_later_renewals(_: Store) {
    for (request, expected) in [(true, ErrorKind::Unknown), (false, ErrorKind::Unavailable)] {
        let kit = Kit::new();
        let patient = Locks::builder().op_timeout(STALL);
        let locks = kit.client_with(patient).unwrap();
        let guard = locks.mutex("a").acquire().await.unwrap();
        match request {
            true => kit.lose_next_reply(Verb::Renew),
            false => kit.fail_next(Verb::Renew, Fault::Config),
        }
        let longer = Duration::from_secs(60);

        assert_eq!(kind(guard.extend(longer).await), expected);
        assert!(guard.is_valid());

        kit.clock().advance(Duration::from_secs(4));
        eventually("extended", SOON, async || guard.remaining() > longer - SOON).await;
        give_back(guard).await;
    }
}
