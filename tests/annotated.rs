//! Tests of the options of `#[distributed_lock]`. They use a store that can lose locks on purpose.
//! A second client acts as another process.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::cell::Cell;
use std::fmt::Debug;
use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Mutex;
use std::task::Poll;
use std::time::Duration;

use lockcore::backend::Fault;
use lockcore::testing::{Store, Verb};
use lockcore::{Error, ErrorKind, Held, Locks, LostReason, distributed_lock, with_default};

const LOST: ErrorKind = ErrorKind::Lost(LostReason::Expired);

/// A store, a client of it, and a second client that acts as another process.
fn store() -> (Store, Locks, Locks) {
    let store = Store::new();
    let (ours, theirs) = (store.client().unwrap(), store.client().unwrap());
    (store, ours, theirs)
}

/// Ends the leases of all held locks: the store does not answer, and time passes.
async fn lose_all(store: &Store) {
    store.freeze();
    store.clock().advance(Duration::from_secs(60));
    tokio::task::yield_now().await;
}

/// Whether another client is granted the lock. Waits for a release that the keeper has not sent
/// yet.
async fn is_released(theirs: &Locks, name: &str) -> bool {
    let lock = theirs.mutex(name).wait(Duration::from_secs(5));
    lock.acquire().await.is_ok()
}

// ---- on_busy

#[distributed_lock(key = "a", try, on_busy = skip, on_error = panic!("{error}"))]
async fn skips(runs: &Cell<u32>) {
    runs.set(runs.get() + 1);
}

#[distributed_lock(key = "a", try, on_busy = skip, on_error = panic!("{error}"))]
async fn skips_to_none() -> Option<u8> {
    Some(1)
}

#[distributed_lock(key = "a", wait = "20ms", on_busy = skip)]
async fn skips_after_a_while(runs: &Cell<u32>) -> Result<(), Error> {
    runs.set(runs.get() + 1);
    Ok(())
}

#[tokio::test]
async fn skip_leaves_the_work_to_the_holder() {
    let (_, ours, theirs) = store();
    let runs = Cell::new(0);
    let guard = theirs.mutex("a").acquire().await.unwrap();

    with_default(ours.clone(), async {
        skips(&runs).await;
        assert_eq!(skips_to_none().await, None);
        skips_after_a_while(&runs).await.unwrap();
    })
    .await;
    assert_eq!(runs.get(), 0);

    guard.release().await.unwrap();
    with_default(ours, async {
        // This call must come first: the keeper has not yet removed the waiter above from the line.
        skips_after_a_while(&runs).await.unwrap();
        skips(&runs).await;
        assert_eq!(skips_to_none().await, Some(1));
    })
    .await;
    assert_eq!(runs.get(), 2);
}

#[distributed_lock(
    key = "a",
    wait = wait,
    locks = locks,
    on_busy = {
        tokio::task::yield_now().await;
        seen.set(Some(error.kind()));
        if instead == 0 {
            return Err(error);
        }
        Ok(instead)
    },
)]
async fn instead(
    locks: &Locks,
    wait: Duration,
    instead: u8,
    seen: &Cell<Option<ErrorKind>>,
) -> Result<u8, Error> {
    Ok(100)
}

#[tokio::test]
async fn on_busy_is_evaluated_only_when_another_holds_the_lock() {
    let (_, ours, theirs) = store();
    let seen = Cell::new(None);
    let briefly = Duration::from_millis(500); // long enough for an answer on a busy machine
    assert_eq!(instead(&ours, briefly, 3, &seen).await.unwrap(), 100);
    assert_eq!(seen.take(), None);
    let _guard = theirs.mutex("a").acquire().await.unwrap();

    assert_eq!(instead(&ours, Duration::ZERO, 3, &seen).await.unwrap(), 3);
    assert_eq!(seen.take(), Some(ErrorKind::Busy));

    assert_eq!(instead(&ours, briefly, 4, &seen).await.unwrap(), 4);
    assert_eq!(seen.take(), Some(ErrorKind::Timeout));

    let error = instead(&ours, briefly, 0, &seen).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[tokio::test]
async fn on_busy_is_not_evaluated_when_the_store_refuses() {
    let (store, ours, _) = store();
    let seen = Cell::new(None);
    store.fail_next(Verb::Enqueue, Fault::Refused);

    let error = instead(&ours, Duration::from_secs(5), 3, &seen).await;

    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(seen.take(), None);
}

#[distributed_lock(key = "outer", locks = locks, on_busy = Ok(()))]
async fn fails_at_an_inner_lock(locks: &Locks) -> Result<(), Error> {
    locks.mutex("inner").try_acquire().await.map(drop)
}

#[tokio::test]
async fn on_busy_is_not_evaluated_for_errors_of_the_body() {
    let (_, ours, theirs) = store();
    let _guard = theirs.mutex("inner").acquire().await.unwrap();

    let error = fails_at_an_inner_lock(&ours).await;

    assert_eq!(error.unwrap_err().kind(), ErrorKind::Busy);
}

// ---- on_error

#[distributed_lock(key = "a", try, locks = locks, on_error = error.kind())]
async fn kind_of<F: Future<Output = ErrorKind>>(locks: &Locks, body: F) -> ErrorKind {
    body.await
}

#[distributed_lock(key = "a", try, locks = locks, on_busy = None, on_error = Some(error.kind()))]
async fn kind_but_busy(locks: &Locks) -> Option<ErrorKind> {
    panic!("runs")
}

#[tokio::test]
async fn on_error_sees_every_error_of_the_lock() {
    let (store, ours, theirs) = store();
    let guard = theirs.mutex("a").acquire().await.unwrap();
    assert_eq!(kind_of(&ours, pending()).await, ErrorKind::Busy);
    guard.release().await.unwrap();

    store.fail_next(Verb::Enqueue, Fault::Refused);
    assert_eq!(kind_of(&ours, pending()).await, ErrorKind::Unavailable);

    let body = async {
        lose_all(&store).await;
        pending().await
    };
    assert_eq!(kind_of(&ours, body).await, LOST);
}

#[tokio::test]
async fn on_error_sees_the_errors_that_on_busy_does_not() {
    let (store, ours, theirs) = store();
    let _guard = theirs.mutex("a").acquire().await.unwrap();

    assert_eq!(kind_but_busy(&ours).await, None);
    store.fail_next(Verb::Enqueue, Fault::Refused);
    assert_eq!(kind_but_busy(&ours).await, Some(ErrorKind::Unavailable));
}

// ---- on_lost

#[distributed_lock(key = "a", locks = locks, on_lost = signal, held = lock)]
async fn goes_on(locks: &Locks, store: &Store) -> Result<LostReason, Error> {
    lose_all(store).await;
    Ok(lock.lost().await)
}

#[distributed_lock(key = "a", locks = locks, on_lost = cancel)]
async fn is_stopped(locks: &Locks, store: &Store, went_on: &Cell<bool>) -> Result<(), Error> {
    lose_all(store).await;
    went_on.set(true);
    Ok(())
}

#[tokio::test]
async fn with_signal_the_body_continues_and_sees_the_loss() {
    let (store, ours, _) = store();

    assert_eq!(goes_on(&ours, &store).await.unwrap(), LostReason::Expired);
}

#[tokio::test]
async fn with_cancel_the_body_is_stopped_at_its_await() {
    let (store, ours, _) = store();
    let went_on = Cell::new(false);

    let error = is_stopped(&ours, &store, &went_on).await.unwrap_err();

    assert_eq!(error.kind(), LOST);
    assert!(!went_on.get());
}

// ---- min_hold, max_hold

#[distributed_lock(key = "a", try, locks = locks, min_hold = "30s", ttl = "60s")]
async fn once_in_a_while(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[tokio::test]
async fn with_min_hold_the_lock_stays_taken_after_the_work() {
    let (store, ours, theirs) = store();

    once_in_a_while(&ours).await.unwrap();

    let error = once_in_a_while(&theirs).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    store.clock().advance(Duration::from_secs(31));
    assert!(is_released(&theirs, "a").await);
}

#[distributed_lock(key = "a", locks = locks, max_hold = limit)]
async fn not_for_ever(locks: &Locks, store: &Store, limit: Duration) -> Result<(), Error> {
    store.clock().advance(Duration::from_secs(3)); // the lease lasts longer
    tokio::task::yield_now().await;
    Ok(())
}

#[tokio::test]
async fn with_max_hold_the_lock_is_lost_after_that_time() {
    let (store, ours, _) = store();
    not_for_ever(&ours, &store, Duration::from_secs(60))
        .await
        .unwrap();

    let error = not_for_ever(&ours, &store, Duration::from_secs(2)).await;

    assert_eq!(
        error.unwrap_err().kind(),
        ErrorKind::Lost(LostReason::MaxHold)
    );
}

// ---- reentrant

#[distributed_lock(key = "a", locks = locks, reentrant = reentrant)]
async fn again(locks: &Locks, reentrant: bool, depth: u8) -> Result<u8, Error> {
    match depth {
        0 => Ok(0),
        _ => Ok(1 + Box::pin(again(locks, reentrant, depth - 1)).await?),
    }
}

#[tokio::test]
async fn with_reentrant_false_taking_the_lock_again_is_refused() {
    let (_, ours, _) = store();

    assert_eq!(again(&ours, true, 2).await.unwrap(), 2);
    assert_eq!(again(&ours, false, 0).await.unwrap(), 0);
    let error = again(&ours, false, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
}

// ---- through_outages

#[distributed_lock(key = "a", locks = locks, through_outages = yes)]
async fn through_outages(locks: &Locks, yes: bool) -> Result<u8, Error> {
    Ok(1)
}

#[distributed_lock(keys = ["a", "b"], locks = locks, through_outages = true)]
async fn several_through_outages(locks: &Locks) -> Result<u8, Error> {
    Ok(2)
}

#[tokio::test]
async fn with_through_outages_a_call_waits_until_the_store_is_back() {
    let (store, ours, _) = store();

    store.fail_next(Verb::Enqueue, Fault::Refused);
    let error = through_outages(&ours, false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for _ in 0..2 {
        store.fail_next(Verb::Enqueue, Fault::Refused);
    }
    assert_eq!(through_outages(&ours, true).await.unwrap(), 1);
    store.fail_next(Verb::Enqueue, Fault::Refused);
    assert_eq!(several_through_outages(&ours).await.unwrap(), 2);
}

// ---- when

#[distributed_lock(key = "a", try, locks = locks, when = locked, held = lock)]
async fn perhaps_locked(locks: &Locks, locked: bool) -> Result<bool, Error> {
    tokio::task::yield_now().await;
    Ok(lock.is_some_and(|lock| lock.is_valid()))
}

#[tokio::test]
async fn with_when_false_the_body_runs_without_the_lock() {
    let (_, ours, theirs) = store();
    assert!(perhaps_locked(&ours, true).await.unwrap());

    let _guard = theirs.mutex("a").acquire().await.unwrap();

    assert!(!perhaps_locked(&ours, false).await.unwrap());
    let error = perhaps_locked(&ours, true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
}

// ---- permits

#[distributed_lock(key = "a", permits = some, of = 3, try, locks = locks)]
async fn with_permits<F: Future<Output = ()>>(
    locks: &Locks,
    some: u32,
    inside: F,
) -> Result<(), Error> {
    inside.await;
    Ok(())
}

#[tokio::test]
async fn no_more_permits_are_taken_than_of_allows() {
    let (_, ours, theirs) = store();

    with_permits(&ours, 2, async {
        with_permits(&theirs, 1, async {}).await.unwrap();
        let error = with_permits(&theirs, 2, async {}).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
    })
    .await
    .unwrap();
    with_permits(&theirs, 3, async {}).await.unwrap();

    let error = with_permits(&ours, 4, async {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}

// ---- keys

struct Account {
    id: u8,
}

#[distributed_lock(
    keys = ["account:{from.id}", "account:{to.id}"],
    try,
    locks = locks,
    held = lock,
)]
async fn transfer<F: Future<Output = ()>>(
    locks: &Locks,
    from: &Account,
    to: &Account,
    inside: F,
) -> Result<Vec<String>, Error> {
    inside.await;
    Ok(lock.iter().map(|held| held.name().to_owned()).collect())
}

#[distributed_lock(
    keys = names.iter().copied(),
    shared,
    try,
    locks = locks,
    when = names.len() < 9,
    held = lock,
)]
async fn read_all(locks: &Locks, names: &[&str]) -> Result<usize, Error> {
    Ok(lock.map_or(0, |lock| lock.len()))
}

#[tokio::test]
async fn several_keys_are_held_all_together_or_not_at_all() {
    let (_, ours, theirs) = store();
    let (one, two) = (&Account { id: 1 }, &Account { id: 2 });

    let names = transfer(&ours, two, one, async {
        for name in ["account:1", "account:2"] {
            assert!(theirs.mutex(name).try_acquire().await.is_err(), "{name}");
        }
    });
    assert_eq!(names.await.unwrap(), ["account:1", "account:2"]);
    assert_eq!(
        transfer(&ours, one, one, async {}).await.unwrap(),
        ["account:1"]
    );

    let _guard = theirs.mutex("account:2").acquire().await.unwrap();
    let error = transfer(&ours, one, two, pending()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(is_released(&theirs, "account:1").await);
}

#[tokio::test]
async fn an_expression_for_keys_gives_any_number_of_them() {
    let (_, ours, theirs) = store();
    let _reader = theirs.rwlock("b").read().acquire().await.unwrap();

    assert_eq!(read_all(&ours, &["a", "b", "c"]).await.unwrap(), 3);
    assert_eq!(read_all(&ours, &["b"; 9]).await.unwrap(), 0);
}

#[distributed_lock(keys = names.iter().copied(), permits = 1, of = 1, try, locks = locks)]
async fn one_of_each(locks: &Locks, names: &[&str]) -> Result<(), Error> {
    Ok(())
}

#[tokio::test]
async fn a_key_that_is_given_twice_is_one_lock_and_takes_its_permits_once() {
    let (_, ours, theirs) = store();

    one_of_each(&ours, &["b", "a", "b"]).await.unwrap();

    let _one = theirs.semaphore("b", 1).permits(1).acquire().await.unwrap();
    let error = one_of_each(&ours, &["a", "b"]).await.unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Busy, Some("b")));
}

// ---- the end of a call

/// When this value is dropped, it records whether its lock is held.
struct Witness<'a> {
    lock: Held,
    held: &'a Mutex<Vec<bool>>,
}

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        self.held.lock().unwrap().push(self.lock.is_valid());
    }
}

#[distributed_lock(key = "a", locks = locks, held = lock)]
async fn watched(
    locks: &Locks,
    held: &Mutex<Vec<bool>>,
    last: impl Future<Output = ()>,
) -> Result<(), Error> {
    let _witness = Witness { lock, held };
    last.await;
    Ok(())
}

/// Polls the call `times` times: once now, and after that each time when its waker is called.
async fn poll_times(mut call: Pin<&mut (impl Future<Output: Debug> + ?Sized)>, mut times: usize) {
    poll_fn(|cx| {
        if times == 0 {
            return Poll::Ready(());
        }
        times -= 1;
        let polled = call.as_mut().poll(cx);
        assert!(polled.is_pending(), "{polled:?}");
        Poll::Pending
    })
    .await;
}

async fn for_ever() {
    loop {
        tokio::task::yield_now().await;
    }
}

/// The call is dropped at each of its awaits in turn.
#[tokio::test]
async fn a_dropped_call_drops_its_body_before_it_releases() {
    let mut in_the_body = 0;
    for polls in 0..20 {
        let (_, ours, theirs) = store();
        let held = Mutex::default();
        {
            let mut call = pin!(watched(&ours, &held, for_ever()));
            poll_times(call.as_mut(), polls).await;
        }

        let held = held.into_inner().unwrap();
        assert!(held.iter().all(|held| *held), "{polls} polls");
        in_the_body += held.len();
        assert!(is_released(&theirs, "a").await, "{polls} polls");
    }
    assert!(in_the_body > 3, "dropped {in_the_body} times in the body");
}

#[tokio::test]
async fn a_call_that_returns_has_released() {
    let (_, ours, theirs) = store();
    let held = Mutex::default();

    watched(&ours, &held, async {}).await.unwrap();

    assert!(theirs.mutex("a").try_acquire().await.is_ok());
    assert_eq!(*held.lock().unwrap(), [true]);
}

#[tokio::test]
async fn a_body_that_panics_releases() {
    let (_, ours, theirs) = store();

    let call = tokio::spawn(async move {
        let held = Mutex::default();
        watched(&ours, &held, async { panic!("on purpose") }).await
    });

    assert!(call.await.unwrap_err().is_panic());
    assert!(is_released(&theirs, "a").await);
}
