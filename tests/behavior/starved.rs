//! Tests with futures that are polled a few times, and after that neither polled nor dropped.
//! `select!` does this with a `&mut future`. A grant to such a future would not be used, so the
//! client must give the grant to a future that is polled.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Error, ErrorKind, Fair, Guard, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tests::stores::Answers;

use crate::store::{
    Kind, SOON, STALL, Store, assert_nothing_left, begin, give_back, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_grant_that_nobody_collects_goes_to_the_next_in_another_process
        a_grant_that_nobody_collects_goes_to_the_next_in_its_process
        a_shared_grant_that_nobody_collects_lets_a_writer_in
        an_answer_that_nobody_looks_at_keeps_nobody_out
        a_task_that_is_polled_again_gets_the_lock_after_all
        max_hold_counts_from_the_grant
        shutdown_does_not_wait_for_a_waiter_that_is_not_polled
    ]
}

const TTL: Duration = Duration::from_secs(3);

/// How long a grant that nobody uses may keep others out: about twice the ttl. First the keeper
/// stops renewing, and after that the store ends the ticket by its own clock.
const SOON_AFTER_TTL: Duration = Duration::from_secs(6);

/// The operation timeout of this client is a part of the times that the facts allow. Its bound is
/// longer than the default: at its bound, a waiter that is not polled would be told to ask the store,
/// and would be in no line.
fn client(store: &Store) -> Locks {
    let fair = match store.fair {
        Fair::Strict => Fair::Strict,
        _ => Fair::Local(TTL),
    };
    let builder = Locks::builder()
        .namespace(&store.namespace)
        .backend(store.backend())
        .op_timeout(Duration::from_secs(3));
    builder.fair(fair).build().unwrap()
}

/// Waits until the name has no holders, no waiters and no other remains. At a store with sessions,
/// the keeper releases the ticket of a request whose answer nobody has read yet. So a mark may stay
/// there.
async fn assert_only_marks_left(store: &Store, locks: &Locks) {
    if !store.capability().sessions {
        return assert_nothing_left(store, locks, "a").await;
    }
    eventually("only marks are left", SOON, async || {
        locks.inspect("a").await.unwrap().is_empty() && store.litter_but_marks().is_empty()
    })
    .await;
}

/// A future that its task never polls again.
struct Starved(Pin<Box<dyn Future<Output = Result<Guard, Error>> + Send>>);

impl Starved {
    /// Polls the future at least once, and until `so_far` returns true.
    async fn until(lock: Lock, what: &str, so_far: impl AsyncFn() -> bool) -> Self {
        let mut starved = Self(Box::pin(async move { lock.acquire().await }));
        let began = Instant::now();
        loop {
            assert!(starved.poll().is_pending());
            if so_far().await {
                return starved;
            }
            assert!(began.elapsed() < SOON, "{what}");
            tokio::task::yield_now().await;
        }
    }

    fn poll(&mut self) -> Poll<Result<Guard, Error>> {
        self.0
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
    }
}

/// Whether there are `count` holders and waiters, at the store and in this client together.
async fn are_there(locks: &Locks, count: usize) -> bool {
    let places = locks.inspect("a").await.unwrap();
    let local: u32 = places.iter().map(|place| place.local_waiters).sum();
    places.len() + local as usize == count
}

async fn a_grant_that_nobody_collects_goes_to_the_next_in_another_process(store: Store) {
    let (locks, elsewhere) = (client(&store), client(&store));
    let holder = locks.mutex("a").ttl(TTL).acquire().await.unwrap();
    let lock = locks.mutex("a").ttl(TTL).wait(3 * SOON);
    let starved = Starved::until(lock, "in line", async || are_there(&locks, 2).await);
    let starved = starved.await;
    let next = begin(elsewhere.mutex("a").ttl(TTL).wait(3 * SOON));
    tickets(
        &elsewhere,
        "a",
        if store.fair == Fair::Strict { 3 } else { 2 },
    )
    .await;

    let began = Instant::now();
    give_back(holder).await;

    let next = next.await.unwrap().unwrap();
    assert!(
        awake_since(began) < SOON_AFTER_TTL + SOON,
        "{:?}",
        awake_since(began)
    );
    give_back(next).await;
    drop(starved);
    assert_only_marks_left(&store, &locks).await;
}

async fn a_grant_that_nobody_collects_goes_to_the_next_in_its_process(store: Store) {
    let locks = client(&store);
    let lock = locks.mutex("a").ttl(TTL).wait(3 * SOON);
    let holder = lock.acquire().await.unwrap();
    let starved = Starved::until(lock.clone(), "in line", async || are_there(&locks, 2).await);
    let starved = starved.await;
    let next = begin(lock.clone());
    tickets(&locks, "a", 3).await;

    let began = Instant::now();
    give_back(holder).await;

    let next = next.await.unwrap().unwrap();
    assert!(
        awake_since(began) < SOON_AFTER_TTL + SOON,
        "{:?}",
        awake_since(began)
    );
    give_back(next).await;
    drop(starved);
    assert_only_marks_left(&store, &locks).await;
}

async fn a_shared_grant_that_nobody_collects_lets_a_writer_in(store: Store) {
    let locks = client(&store);
    let catalog = locks.rwlock("a");
    let writer = catalog.write().ttl(TTL).acquire().await.unwrap();
    let read = catalog.read().ttl(TTL).wait(3 * SOON);
    let starved = Starved::until(read, "in line", async || are_there(&locks, 2).await);
    let starved = starved.await;

    let began = Instant::now();
    give_back(writer).await;
    let next = catalog.write().ttl(TTL).wait(3 * SOON).acquire().await;

    assert!(
        awake_since(began) < SOON_AFTER_TTL + SOON,
        "{:?}",
        awake_since(began)
    );
    give_back(next.unwrap()).await;
    drop(starved);
    assert_only_marks_left(&store, &locks).await;
}

/// The reply to the enqueue says "granted", and nobody polls the future that would read it.
async fn an_answer_that_nobody_looks_at_keeps_nobody_out(store: Store) {
    let (locks, elsewhere) = (client(&store), client(&store));
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").ttl(TTL).wait(3 * SOON);
    let begin = || {
        let lock = lock.clone();
        Starved(Box::pin(async move { lock.acquire().await }))
    };
    let mut starved = begin();
    let began = Instant::now();
    loop {
        assert!(
            awake_since(began) < SOON,
            "it is not taken before it is looked at"
        );
        if let Poll::Ready(outcome) = starved.poll() {
            give_back(outcome.unwrap()).await;
            match store.timings().answers {
                // On these stores the answer may be there at the first poll. Then there is no
                // future left to starve.
                Answers::TheCall | Answers::AThread => return,
                Answers::AServer => {}
            }
            starved = begin();
        } else if !elsewhere.inspect("a").await.unwrap().is_empty() {
            break;
        }
    }

    let began = Instant::now();
    let there = elsewhere.mutex("a").ttl(TTL).wait(3 * SOON);
    let uses = [lock, there]
        .map(|lock| tokio::spawn(async move { give_back(lock.acquire().await.unwrap()).await }));
    for used in uses {
        used.await.unwrap();
        assert!(
            awake_since(began) < SOON_AFTER_TTL + SOON,
            "{:?}",
            awake_since(began)
        );
    }
    drop(starved);
    assert_only_marks_left(&store, &locks).await;
}

async fn a_task_that_is_polled_again_gets_the_lock_after_all(store: Store) {
    let locks = client(&store);
    let lock = locks.mutex("a").ttl(TTL).wait(3 * SOON);
    let holder = lock.acquire().await.unwrap();
    let starved = Starved::until(lock.clone(), "in line", async || are_there(&locks, 2).await);
    let starved = starved.await;
    let next = begin(lock.clone());
    tickets(&locks, "a", 3).await;
    give_back(holder).await;
    let next = next.await.unwrap().unwrap();

    let polled_again = tokio::spawn(starved.0);
    tickets(&locks, "a", 2).await;
    assert!(!polled_again.is_finished(), "two are in");
    let before = next.fencing_token().unwrap();
    give_back(next).await;

    let last = polled_again.await.unwrap().unwrap();
    assert!(last.fencing_token().unwrap() > before);
    give_back(last).await;
    assert_only_marks_left(&store, &locks).await;
}

/// `max_hold` counts from the grant, not from the moment when the task takes the guard.
async fn max_hold_counts_from_the_grant(store: Store) {
    let (locks, limit) = (client(&store), Duration::from_secs(3));
    let ttl = Duration::from_secs(5);
    let holder = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let lock = locks.mutex("a").ttl(ttl).max_hold(limit).wait(SOON);
    let mut starved = Starved::until(lock, "in line", async || {
        locks.inspect("a").await.unwrap().len() == 2
    })
    .await;
    // Polls for long enough to read the answer to the enqueue, which takes several steps on some
    // stores.
    let polled = tokio::time::timeout(Duration::from_millis(500), &mut starved.0).await;
    assert!(polled.is_err(), "two are in");
    give_back(holder).await;
    eventually("it is granted", SOON, async || {
        locks
            .inspect("a")
            .await
            .unwrap()
            .iter()
            .any(|place| place.granted)
    })
    .await;

    // Sleeps until the limit is over. If a wake-up does not grant, the client learns of the grant
    // later than others see it.
    let learns = match store.kind.capability().wake_ups_grant {
        true => Duration::ZERO,
        false => limit,
    };
    tokio::time::sleep(limit + learns).await;

    let guard = match starved.poll() {
        Poll::Ready(outcome) => outcome.unwrap(),
        Poll::Pending => starved.0.await.unwrap(),
    };
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    let lost = guard.ensure(Duration::ZERO).await;
    assert_eq!(kind(lost), ErrorKind::Lost(LostReason::MaxHold));
}

/// The task that waits for the shutdown is the one that does not poll the waiter any more.
async fn shutdown_does_not_wait_for_a_waiter_that_is_not_polled(store: Store) {
    let (locks, elsewhere) = (store.client(), store.client());
    let holder = elsewhere.mutex("a").acquire().await.unwrap();
    let lock = locks.mutex("a").wait(3 * SOON);
    let starved = Starved::until(lock, "in line", async || are_there(&elsewhere, 2).await);
    let mut starved = starved.await;

    locks.shutdown(STALL).await.unwrap();

    let left = elsewhere.inspect("a").await.unwrap();
    assert_eq!(left.len(), 1, "{left:?}");
    let Poll::Ready(outcome) = starved.poll() else {
        panic!("it waits in a client that is shut down");
    };
    assert_eq!(kind(outcome), ErrorKind::Lost(LostReason::Shutdown));
    give_back(holder).await;
    tickets(&elsewhere, "a", 0).await;
}
