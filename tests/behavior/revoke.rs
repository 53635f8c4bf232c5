//! Tests of locks that an operator asks back or takes away. The store tells the client of the
//! holder. The holder has a grace, and loses the lock when the grace ends.

mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Guard, Lock, Locks, LostReason, OnLost, OnRevoke, Release};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tests::witness::Witness;
use tokio::sync::oneshot;

use crate::store::{
    Kind, LEASE, SLACK, SOON, Store, assert_nothing_left, begin, give_back, kind, soon, tickets,
};

pub(crate) use self::processes::facts as facts_of_processes;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().asks_back {
        return Vec::new();
    }
    crate::store_facts![store;
        a_holder_that_is_asked_gives_up_and_the_next_holds
        a_holder_that_does_not_give_up_is_lost_when_its_time_is_over
        a_lock_that_is_revoked_is_never_held_twice
        an_extended_lease_that_is_revoked_is_never_held_twice
        a_request_with_more_time_that_replaces_another_is_kept_to
        a_holder_that_renews_by_hand_in_its_grace_is_renewed_all_the_same
        a_holder_that_is_asked_is_told_that_it_cannot_have_more_time
        work_that_can_be_repeated_stops_as_soon_as_somebody_asks
        work_that_is_stopped_because_somebody_asks_has_released_its_locks_when_it_returns
        several_locks_tell_which_of_them_is_asked_for
        work_that_only_hears_of_its_loss_goes_on
        a_lock_that_was_asked_back_is_not_handed_over_inside_its_process
        readers_and_permits_are_asked_back_one_by_one
        a_revocation_whose_caller_goes_away_still_ends_the_hold
        an_ask_that_is_not_usable_is_refused_and_changes_nothing
        a_forced_release_ends_exactly_the_grant_that_it_names
        a_holder_whose_lock_was_taken_away_learns_it
    ]
}

/// The ttl is short, because some stores report an ask-back to the holder only at its renewal.
const TTL: Duration = Duration::from_secs(6);

/// How long it takes at most until a holder learns of an ask-back. It learns of it at a renewal,
/// which comes after a third of the ttl. A batch of renewals may come later by the rest of this
/// time.
const LEARNS: Duration = Duration::from_secs(4);

const GRACE: Duration = Duration::from_millis(300);

fn lock(locks: &Locks) -> Lock {
    locks.mutex("a").ttl(TTL).wait(LEASE)
}

fn ticket(guard: &Guard) -> u64 {
    guard.grant_id().ticket()
}

async fn a_holder_that_is_asked_gives_up_and_the_next_holds(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();
    let next = begin(lock(&other));
    tickets(&operator, "a", 2).await;
    let asked = operator.revoke("a", ticket(&guard), SOON, "the disk is full");
    let mut asked = std::pin::pin!(asked);

    let by_whom = tokio::select! {
        outcome = &mut asked => panic!("it did not wait for the holder: {outcome:?}"),
        by_whom = soon(guard.revoked()) => by_whom,
    };

    assert_eq!(by_whom.why, "the disk is full");
    assert_eq!(by_whom.grace, SOON);
    assert!(by_whom.by.contains(&format!("/{}/", std::process::id())));
    assert!(guard.is_valid(), "it has its grace");
    let shown = operator.inspect("a").await.unwrap();
    assert_eq!(shown[0].asked_back.as_ref(), Some(&by_whom));
    give_back(guard).await;
    let outcome = tokio::time::timeout(SOON, asked).await.expect("hangs");
    assert_eq!(outcome.unwrap(), Release::Released);
    let next = next.await.unwrap().unwrap();
    assert!(next.is_valid());
    give_back(next).await;
    assert_nothing_left(&store, &operator, "a").await;
}

async fn a_holder_that_does_not_give_up_is_lost_when_its_time_is_over(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();
    let next = begin(lock(&other));
    tickets(&operator, "a", 2).await;

    let began = Instant::now();
    let outcome = operator.revoke("a", ticket(&guard), GRACE, "x").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    let took = awake_since(began);
    assert!(took >= GRACE && took < GRACE + LEARNS + SLACK, "{took:?}");
    assert_eq!(soon(guard.lost()).await, LostReason::Revoked);
    give_back(next.await.unwrap().unwrap()).await;
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    assert_nothing_left(&store, &operator, "a").await;
}

/// The holder may have learnt only of the second ask-back, which gives it more time. So the first
/// caller must not take the lock away when its own, shorter grace is over.
async fn a_request_with_more_time_that_replaces_another_is_kept_to(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let brief = Duration::from_secs(3);
    let operator = store.client_with(Locks::builder().op_timeout(brief));
    operator.ready(SOON).await.unwrap();
    let ttl = Duration::from_secs(2);
    let guard = lock(&locks).ttl(ttl).acquire().await.unwrap();
    let ticket = ticket(&guard);
    let first = {
        let operator = operator.clone();
        tokio::spawn(async move { operator.revoke("a", ticket, GRACE, "first").await })
    };
    eventually("it is asked for", SOON, async || {
        let shown = other.inspect("a").await.unwrap();
        shown.iter().any(|place| place.asked_back.is_some())
    })
    .await;
    let more = 2 * (ttl + GRACE + brief);

    let (second, waits) = (operator.revoke("a", ticket, more, "second"), lock(&other));
    let (second, next) = tokio::join!(second, waits.acquire());

    assert!(!guard.is_valid(), "two hold at once");
    assert!(second.is_ok() && soon(first).await.unwrap().is_ok());
    give_back(next.unwrap()).await;
}

async fn a_holder_that_renews_by_hand_in_its_grace_is_renewed_all_the_same(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let ttl = TTL;
    let guard = lock(&locks).ttl(ttl).acquire().await.unwrap();
    let ticket = ticket(&guard);
    let asked = tokio::spawn(async move { operator.revoke("a", ticket, 4 * ttl, "x").await });
    soon(guard.revoked()).await;

    eventually("it has aged", SOON, async || {
        guard.remaining() < ttl / 10 * 9
    })
    .await;
    let more = guard.remaining() + Duration::from_millis(1);
    guard.ensure(more).await.unwrap();

    // Without a renewal it would be lost after its ttl.
    let lost = tokio::time::timeout(ttl + SLACK, guard.lost()).await;
    assert!(lost.is_err(), "{lost:?} long before the end of its grace");
    give_back(guard).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
}

async fn a_holder_that_is_asked_is_told_that_it_cannot_have_more_time(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let ttl = 2 * TTL;
    let guard = lock(&locks).ttl(ttl).acquire().await.unwrap();
    let ticket = ticket(&guard);
    let grace = ttl - LEARNS;
    let asked = tokio::spawn(async move { operator.revoke("a", ticket, grace, "x").await });
    soon(guard.revoked()).await;

    let ensured = guard.ensure(ttl - SLACK).await.unwrap_err();
    let extended = guard.extend(ttl).await.unwrap_err();

    for error in [ensured, extended] {
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.to_string().contains("somebody asks"), "{error}");
    }
    assert!(guard.is_valid());
    give_back(guard).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
}

/// The work is stopped before the next holder begins.
async fn a_lock_that_is_revoked_is_never_held_twice(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let witness = Arc::new(Witness::exclusive());
    let seen = Arc::clone(&witness);
    let works = lock(&locks);
    let work = tokio::spawn(async move {
        let body = async |held: lockcore::Held| {
            let _visit = seen.enter(1);
            assert!(held.is_valid());
            std::future::pending::<Result<(), Error>>().await
        };
        works.run(body).await
    });
    tickets(&operator, "a", 1).await;
    let next = begin(lock(&other));
    tickets(&operator, "a", 2).await;
    let holder = operator.inspect("a").await.unwrap()[0].ticket;

    let outcome = operator.revoke("a", holder, GRACE, "x").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    let guard = next.await.unwrap().unwrap();
    let visit = witness.enter(1);
    drop(visit);
    give_back(guard).await;
    assert_eq!(
        kind(work.await.unwrap()),
        ErrorKind::Lost(LostReason::Revoked)
    );
    assert_eq!(witness.assert_no_overlap().visits, 2);
}

/// The holder learns of the ask-back long after the ttl with which it has taken the lock, or never.
async fn an_extended_lease_that_is_revoked_is_never_held_twice(store: Store) {
    let (locks, other) = (store.client(), store.client());
    // The first ttl and this time together are shorter than the time until the holder learns of it.
    let brief = Duration::from_millis(2100);
    let operator = store.client_with(Locks::builder().op_timeout(brief));
    operator.ready(SOON).await.unwrap();
    for (renews, longer) in [(true, 3 * TTL), (false, TTL)] {
        let first = lock(&locks).ttl(Duration::from_millis(2700)).renew(renews);
        let guard = first.acquire().await.unwrap();
        let holder = ticket(&guard);
        guard.extend(longer).await.unwrap();
        let witness = Arc::new(Witness::exclusive());
        let seen = Arc::clone(&witness);
        let (enters, entered) = oneshot::channel();
        let work = tokio::spawn(async move {
            let body = async move {
                let _visit = seen.enter(1);
                enters.send(()).unwrap();
                std::future::pending::<Result<(), Error>>().await
            };
            guard.run(body).await
        });
        entered.await.unwrap();
        let next = begin(lock(&other).wait(4 * SOON));
        tickets(&other, "a", 2).await;

        let outcome = operator.revoke("a", holder, Duration::ZERO, "x").await;

        assert_eq!(outcome.unwrap(), Release::Released);
        let guard = next.await.unwrap().unwrap();
        drop(witness.enter(1));
        give_back(guard).await;
        assert!(matches!(kind(work.await.unwrap()), ErrorKind::Lost(_)));
        assert_eq!(witness.assert_no_overlap().visits, 2);
        assert_nothing_left(&store, &other, "a").await;
    }
}

async fn work_that_can_be_repeated_stops_as_soon_as_somebody_asks(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let works = lock(&locks).on_revoke(OnRevoke::Cancel);
    let work = tokio::spawn(async move {
        let body = async |_| std::future::pending::<Result<(), Error>>().await;
        works.run(body).await
    });
    tickets(&operator, "a", 1).await;
    let holder = operator.inspect("a").await.unwrap()[0].ticket;

    let began = Instant::now();
    let outcome = operator.revoke("a", holder, 6 * SOON, "x").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    assert!(awake_since(began) < 2 * SOON);
    let error = work.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Revoked));
    let text = error.to_string();
    assert!(
        text.contains("on_revoke") && !text.contains("is over"),
        "{text}"
    );
    assert_nothing_left(&store, &operator, "a").await;
}

/// A caller that repeats the work at once finds the locks free.
async fn work_that_is_stopped_because_somebody_asks_has_released_its_locks_when_it_returns(
    store: Store,
) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let names = ["a", "b"];
    for both in [false, true] {
        // The client has a connection, so its request below is fast.
        give_back(lock(&other).acquire().await.unwrap()).await;
        let work = async {
            let works = names.map(|name| {
                let lock = locks.mutex(name).ttl(TTL);
                lock.on_revoke(OnRevoke::Cancel)
            });
            let ended = match both {
                false => works[0].run(async |_| never_ends().await).await,
                true => Locks::all(works).run(async |_| never_ends().await).await,
            };
            let free = names.map(|name| other.mutex(name).ttl(TTL));
            (ended, Locks::all(free).try_acquire().await)
        };
        let asks = async {
            tickets(&operator, "a", 1).await;
            let holder = operator.inspect("a").await.unwrap()[0].ticket;
            operator.revoke("a", holder, 6 * SOON, "x").await.unwrap()
        };

        let ((ended, again), asked) = tokio::join!(work, asks);

        assert_eq!(kind(ended), ErrorKind::Lost(LostReason::Revoked));
        assert_eq!(again.unwrap().release().await.unwrap(), Release::Released);
        assert_eq!(asked, Release::Released);
        for name in names {
            assert_nothing_left(&store, &operator, name).await;
        }
    }
}

async fn never_ends() -> Result<(), Error> {
    std::future::pending().await
}

async fn several_locks_tell_which_of_them_is_asked_for(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let both = ["a", "b"].map(|name| locks.mutex(name).ttl(TTL));
    let guard = Locks::all(both).acquire().await.unwrap();
    let ticket = guard.get("b").unwrap().grant_id().ticket();
    let asked = tokio::spawn(async move { operator.revoke("b", ticket, SOON, "x").await });

    let (which, by_whom) = soon(guard.revoked()).await;

    assert_eq!((which.name(), by_whom.why.as_str()), ("b", "x"));
    assert!(by_whom.by.contains(&format!("/{}/", std::process::id())));
    assert!(guard.is_valid(), "they have their grace");
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
}

async fn work_that_only_hears_of_its_loss_goes_on(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let works = lock(&locks).on_lost(OnLost::Signal);
    let guard = works.acquire().await.unwrap();
    let holder = ticket(&guard);
    let work = tokio::spawn(async move {
        let held = guard.held();
        guard
            .run(async move { Ok::<_, Error>(held.lost().await) })
            .await
    });

    let outcome = operator.revoke("a", holder, GRACE, "x").await;

    assert_eq!(outcome.unwrap(), Release::Released);
    assert_eq!(soon(work).await.unwrap().unwrap(), LostReason::Revoked);
    assert_nothing_left(&store, &operator, "a").await;
}

/// If the client handed the lock over, its process could keep the lock for as long as its tasks
/// want it.
async fn a_lock_that_was_asked_back_is_not_handed_over_inside_its_process(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();
    let first = ticket(&guard);
    let stranger = begin(lock(&other));
    tickets(&operator, "a", 2).await;
    let ours = begin(lock(&locks));
    let asks = operator.clone();
    let asked = tokio::spawn(async move { asks.revoke("a", first, SOON, "x").await });
    soon(guard.revoked()).await;

    give_back(guard).await;

    assert_eq!(asked.await.unwrap().unwrap(), Release::Released);
    let stranger = stranger.await.unwrap().unwrap();
    assert!(!ours.is_finished(), "it was handed over");
    give_back(stranger).await;
    let ours = ours.await.unwrap().unwrap();
    assert_ne!(ticket(&ours), first);
    give_back(ours).await;
    assert_nothing_left(&store, &operator, "a").await;
}

async fn readers_and_permits_are_asked_back_one_by_one(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let read = |locks: &Locks| locks.rwlock("a").read().ttl(TTL);
    let permit = |locks: &Locks| locks.semaphore("s", 3).permits(1).ttl(TTL);
    for (name, kind) in [("a", &read as &dyn Fn(&Locks) -> Lock), ("s", &permit)] {
        let ours = kind(&locks).acquire().await.unwrap();
        let theirs = kind(&other).acquire().await.unwrap();

        let outcome = operator.revoke(name, ticket(&ours), GRACE, "x").await;

        assert_eq!(outcome.unwrap(), Release::Released);
        assert_eq!(soon(ours.lost()).await, LostReason::Revoked);
        assert!(theirs.is_valid());
        tickets(&operator, name, 1).await;
        give_back(theirs).await;
        drop(ours);
        assert_nothing_left(&store, &operator, name).await;
    }
}

async fn a_revocation_whose_caller_goes_away_still_ends_the_hold(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();
    let (asks, holder) = (operator.clone(), ticket(&guard));
    // Long enough that the test sees the request before the hold is over.
    let grace = Duration::from_secs(4);
    let asking = tokio::spawn(async move { asks.revoke("a", holder, grace, "x").await });
    eventually("it is asked", SOON, async || {
        let shown = operator.inspect("a").await.unwrap();
        shown.iter().any(|place| place.asked_back.is_some())
    })
    .await;

    asking.abort();

    assert_eq!(soon(guard.lost()).await, LostReason::Revoked);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn an_ask_that_is_not_usable_is_refused_and_changes_nothing(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();
    let holder = ticket(&guard);
    let waiting = begin(lock(&operator));
    tickets(&operator, "a", 2).await;
    let waits = operator.inspect("a").await.unwrap()[1].ticket;
    let day = Duration::from_secs(86_400);

    for (ticket, grace, why) in [
        (holder, GRACE, "two\nlines"),
        (holder, GRACE, &"x".repeat(65)),
        (holder, 2 * day, "x"),
        (holder, Duration::MAX, "x"),
        (waits, GRACE, "x"),
    ] {
        let refused = operator.revoke("a", ticket, grace, why).await;
        assert_eq!(
            kind(refused),
            ErrorKind::Config,
            "{ticket} {grace:?} {why:?}"
        );
    }
    assert_eq!(
        kind(operator.force_release("a", waits).await),
        ErrorKind::Config
    );
    assert_eq!(
        kind(operator.force_release("", holder).await),
        ErrorKind::Config
    );
    for (name, ticket) in [("a", holder - 1), ("a", 0), ("a", u64::MAX), ("b", holder)] {
        let gone = operator.revoke(name, ticket, GRACE, "x").await;
        assert_eq!(gone.unwrap(), Release::AlreadyLost);
        let gone = operator.force_release(name, ticket).await;
        assert_eq!(gone.unwrap(), Release::AlreadyLost);
    }

    assert_eq!(operator.inspect("a").await.unwrap()[0].asked_back, None);
    guard.ensure(Duration::from_millis(1)).await.unwrap();
    give_back(guard).await;
    give_back(waiting.await.unwrap().unwrap()).await;
}

async fn a_forced_release_ends_exactly_the_grant_that_it_names(store: Store) {
    let (locks, other, operator) = (store.client(), store.client(), store.client());
    let first = lock(&locks).acquire().await.unwrap();
    let second = begin(lock(&other).ttl(LEASE));
    tickets(&operator, "a", 2).await;
    let third = begin(lock(&operator));
    tickets(&operator, "a", 3).await;
    let named = ticket(&first);

    assert_eq!(
        operator.force_release("a", named).await.unwrap(),
        Release::Released
    );

    // The forced release must wake the second holder. Without a wake-up, its own renewal would come
    // only after a third of its ttl.
    let began = Instant::now();
    let second = second.await.unwrap().unwrap();
    assert!(awake_since(began) < SOON);
    // A forced release that is repeated, late, or for a ticket that is gone ends no other grant.
    for _ in 0..3 {
        let again = operator.force_release("a", named).await.unwrap();
        assert_eq!(again, Release::AlreadyLost);
    }
    second.ensure(Duration::from_millis(1)).await.unwrap();
    tickets(&operator, "a", 2).await;
    assert!(second.fencing_token().unwrap() > first.fencing_token().unwrap());
    give_back(second).await;
    give_back(third.await.unwrap().unwrap()).await;
    drop(first);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn a_holder_whose_lock_was_taken_away_learns_it(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let guard = lock(&locks).acquire().await.unwrap();

    let outcome = operator.force_release("a", ticket(&guard)).await;

    assert_eq!(outcome.unwrap(), Release::Released);
    let began = Instant::now();
    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    assert!(awake_since(began) < LEARNS + SLACK);
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    give_back(lock(&locks).acquire().await.unwrap()).await;
    assert_nothing_left(&store, &operator, "a").await;
}
