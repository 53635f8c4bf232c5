//! Tests of the events that report each grant of one lock and its end.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::events::GrantEvent;
use lockcore::{Fair, Lock, LostReason, Release};

use crate::store::{Kind, SOON, Store, assert_nothing_left, begin, give_back, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        each_grant_of_a_lock_is_told_with_its_end
        readers_that_lose_their_lock_together_are_told_of_one_by_one
        a_listener_whose_waker_panics_keeps_no_lock_back
    ];
    if store.capability().asks_back {
        facts.extend(crate::store_facts![store;
            a_request_for_the_lock_is_told_between_grant_and_release
        ]);
    }
    facts
}

async fn each_grant_of_a_lock_is_told_with_its_end(store: Store) {
    let (locks, counts) = store.counted(Fair::Strict);
    let lock = locks.mutex("a").ttl(Duration::from_secs(9));
    let mut grants = lock.grants();

    let guard = lock.acquire().await.unwrap();
    let given_back = guard.grant_id();
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    let inner = guard.reenter().unwrap();
    give_back(inner).await;
    give_back(guard).await;
    counts.refuse_renewals(true);
    let short = lock.clone().ttl(Duration::from_millis(600));
    let guard = short.acquire().await.unwrap();
    let lost = guard.grant_id();

    let told = [
        GrantEvent::Granted(given_back),
        GrantEvent::Released(given_back),
        GrantEvent::Granted(lost),
        GrantEvent::Lost(lost, LostReason::Expired),
    ];
    for expected in told {
        assert_eq!(soon(grants.recv()).await, Some(expected));
    }
    drop((guard, lock, short, locks));
    assert_eq!(soon(grants.recv()).await, None);
}

async fn readers_that_lose_their_lock_together_are_told_of_one_by_one(store: Store) {
    let (locks, counts) = store.counted(Fair::Local(Duration::from_secs(1)));
    let catalog = locks.rwlock("a");
    let read = || catalog.read().ttl(Duration::from_secs(3));
    let mut grants = read().grants();
    counts.refuse_renewals(true);

    let (first, second) = (
        read().acquire().await.unwrap(),
        read().acquire().await.unwrap(),
    );
    let ids = [first.grant_id(), second.grant_id()];
    assert_eq!(soon(second.lost()).await, LostReason::Expired);
    drop((first, second));

    for id in ids {
        assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Granted(id)));
    }
    let mut lost = Vec::new();
    for _ in ids {
        match soon(grants.recv()).await {
            Some(GrantEvent::Lost(id, LostReason::Expired)) => lost.push(id),
            other => panic!("{other:?}"),
        }
    }
    lost.sort_by_key(ToString::to_string);
    let mut ids = ids.to_vec();
    ids.sort_by_key(ToString::to_string);
    assert_eq!(lost, ids);
}

async fn a_request_for_the_lock_is_told_between_grant_and_release(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let lock = locks.mutex("a").ttl(Duration::from_secs(6));
    let mut grants = lock.grants();
    let guard = lock.acquire().await.unwrap();
    let id = guard.grant_id();
    assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Granted(id)));

    let asked = operator.revoke("a", id.ticket(), SOON, "the disk is full");
    let mut asked = std::pin::pin!(asked);
    let told = tokio::select! {
        outcome = &mut asked => panic!("it did not wait for the holder: {outcome:?}"),
        told = soon(grants.recv()) => told,
    };

    assert_eq!(told, Some(GrantEvent::AskedBack(id)));
    give_back(guard).await;
    assert_eq!(soon(grants.recv()).await, Some(GrantEvent::Released(id)));
    assert_eq!(soon(asked).await.unwrap(), Release::Released);
}

/// A listener that waits with a waker that panics, as that of a broken executor may.
struct Listener {
    waits: Pin<Box<dyn Future<Output = ()> + Send>>,
    told: Arc<Mutex<Vec<GrantEvent>>>,
    alarm: Arc<Alarm>,
}

/// Counts its calls.
#[derive(Default)]
struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("on purpose");
    }
}

impl Listener {
    fn to(lock: &Lock) -> Self {
        let mut grants = lock.grants();
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        let waits = Box::pin(async move {
            while let Some(event) = grants.recv().await {
                hears.lock().unwrap().push(event);
            }
        });
        let alarm = Arc::default();
        let mut listener = Self { waits, told, alarm };
        listener.wait();
        listener
    }

    fn wait(&mut self) {
        let waker = Waker::from(Arc::clone(&self.alarm));
        let ended = self.waits.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(ended.is_pending());
    }

    /// Resolves when the listener has got these events since the last call. Checks that its waker
    /// was called. Afterwards the listener waits again.
    async fn hears(&mut self, events: &[GrantEvent]) {
        let told = async {
            while self.told.lock().unwrap().len() < events.len() {
                tokio::task::yield_now().await;
                self.wait();
            }
        };
        soon(told).await;
        assert_eq!(std::mem::take(&mut *self.told.lock().unwrap()), events);
        // Another thread may have made the event visible, and call the waker only now.
        let called = async {
            while self.alarm.0.swap(0, Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
        };
        soon(called).await;
    }
}

/// The waker is called by the task that takes the lock or gives it back, or by the keeper.
async fn a_listener_whose_waker_panics_keeps_no_lock_back(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let lock = locks.mutex("a").ttl(Duration::from_secs(6)).wait(SOON);
    let theirs = other.mutex("a").wait(SOON);
    let mut listener = Listener::to(&lock);

    let guard = lock.acquire().await.unwrap();
    let id = guard.grant_id();
    listener.hears(&[GrantEvent::Granted(id)]).await;
    give_back(guard).await;
    listener.hears(&[GrantEvent::Released(id)]).await;
    give_back(theirs.acquire().await.unwrap()).await;

    // It goes on to the next task of this process.
    let guard = lock.acquire().await.unwrap();
    let id = guard.grant_id();
    listener.hears(&[GrantEvent::Granted(id)]).await;
    let next = begin(lock);
    drop(guard);
    let guard = soon(next).await.unwrap().unwrap();
    let next = guard.grant_id();
    let told = [GrantEvent::Released(id), GrantEvent::Granted(next)];
    listener.hears(&told).await;

    // The keeper finds that it was taken away.
    let taken = other.force_release("a", next.ticket()).await;
    assert_eq!(taken.unwrap(), Release::Released);
    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    let lost = GrantEvent::Lost(next, LostReason::Taken);
    listener.hears(&[lost]).await;
    drop(guard);
    give_back(theirs.acquire().await.unwrap()).await;
    assert_nothing_left(&store, &other, "a").await;
}
