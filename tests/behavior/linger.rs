//! Tests of locks that stay with their process for a moment after their use: `Lock::linger`.
//!
//! The clock of the client with such locks stands still, so no linger ends by itself before the test
//! moves the clock.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::events::Event;
use lockcore::testing;
use lockcore::{Error, ErrorKind, Fair, Lock, Locks, Release};
use tests::eventually::eventually;

use crate::counted::{Counted, Counts};
use crate::store::{
    DEFAULT, Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().tells_holders {
        return crate::store_facts![store, DEFAULT;
            a_lock_does_not_linger_at_a_store_that_does_not_tell_who_waits
        ];
    }
    crate::store_facts![store, DEFAULT;
        a_lock_that_lingers_is_taken_again_without_a_request
        somebody_who_begins_to_wait_ends_a_linger
        somebody_who_is_refused_ends_a_linger
        a_lock_that_somebody_waits_for_does_not_linger
        a_lock_that_was_waited_for_does_not_linger
        other_locks_of_the_name_end_a_linger
        a_lock_that_lingers_can_be_taken_back
        a_shutdown_releases_a_lock_that_lingers
        the_end_of_a_client_releases_a_lock_that_lingers
        tokens_rise_over_a_linger
    ]
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, DEFAULT;
        a_linger_ends_after_its_time
        a_linger_ends_a_second_after_the_grant
        a_linger_ends_after_a_thousand_uses
        a_linger_ends_when_half_of_the_lease_is_left
        a_leader_that_resigns_does_not_linger
        a_lock_of_a_lost_connection_does_not_linger
        a_linger_of_more_than_a_second_is_refused
    ];
    facts.extend(crate::store_facts![store, Fair::Strict;
        a_lock_in_strict_order_does_not_linger
    ]);
    facts
}

const LINGER: Duration = Duration::from_millis(20);

/// A client of the store, whose clock stands still and whose requests are counted.
struct Lingering {
    locks: Locks,
    counts: Arc<Counts>,
}

impl Lingering {
    fn at(store: &Store) -> Self {
        let clock = testing::Store::new().clock().clone();
        clock.stop();
        let (counted, counts) = Counted::around(store.backend());
        let builder = Locks::builder().backend(counted).fair(store.fair);
        let builder = builder.namespace(&store.namespace).ttl(LEASE);
        Self {
            locks: clock.client_with(builder).unwrap(),
            counts,
        }
    }

    fn lock(&self) -> Lock {
        self.locks.mutex("a").linger(LINGER)
    }

    /// Takes the lock and drops it, so that it lingers.
    async fn used(store: &Store) -> Self {
        let ours = Self::at(store);
        drop(soon(ours.lock().acquire()).await.unwrap());
        ours
    }
}

/// Resolves when the store has no ticket of the lock. A request for the lock would end the linger.
async fn is_free(locks: &Locks) {
    tickets(locks, "a", 0).await;
}

async fn is_taken(locks: &Locks) {
    assert_eq!(locks.inspect("a").await.unwrap().len(), 1);
}

async fn a_lock_that_lingers_is_taken_again_without_a_request(store: Store) {
    let ours = Lingering::used(&store).await;
    assert_eq!(ours.counts.all(), 1);

    for _ in 0..50 {
        drop(ours.lock().acquire().await.unwrap());
        let guard = ours.lock().try_acquire().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), Release::Released);
        let lock = ours.lock();
        let is_valid = lock.run(async |held| Ok::<_, Error>(held.is_valid()));
        assert!(is_valid.await.unwrap());
    }

    assert_eq!(ours.counts.all(), 1, "requests were sent");
    is_taken(&store.client()).await;
}

async fn somebody_who_begins_to_wait_ends_a_linger(store: Store) {
    let theirs = store.client();
    for _ in 0..20 {
        let _ours = Lingering::used(&store).await;

        give_back(soon(theirs.mutex("a").acquire()).await.unwrap()).await;
    }
}

/// It is refused once.
async fn somebody_who_is_refused_ends_a_linger(store: Store) {
    let theirs = store.client();
    let _ours = Lingering::used(&store).await;

    assert_eq!(kind(theirs.mutex("a").try_acquire().await), ErrorKind::Busy);

    is_free(&theirs).await;
    give_back(theirs.mutex("a").try_acquire().await.unwrap()).await;
}

async fn a_lock_that_somebody_waits_for_does_not_linger(store: Store) {
    let (ours, theirs) = (Lingering::at(&store), store.client());
    let guard = soon(ours.lock().acquire()).await.unwrap();
    let waits = begin(theirs.mutex("a"));
    tickets(&theirs, "a", 2).await;

    drop(guard);

    give_back(soon(waits).await.unwrap().unwrap()).await;
}

/// Others may wait behind it, and the store has not told of them.
async fn a_lock_that_was_waited_for_does_not_linger(store: Store) {
    let (ours, theirs) = (Lingering::at(&store), store.client());
    let first = soon(theirs.mutex("a").acquire()).await.unwrap();
    let waits = begin(ours.lock());
    tickets(&theirs, "a", 2).await;
    give_back(first).await;

    drop(soon(waits).await.unwrap().unwrap());

    is_free(&theirs).await;
}

/// Locks that cannot use the ticket do not find the name taken by their own client.
async fn other_locks_of_the_name_end_a_linger(store: Store) {
    let others = |locks: &Locks| {
        [
            locks.mutex("a").owner("another text"),
            locks.mutex("a").max_hold(LEASE),
            locks.mutex("a").ttl(LEASE * 2),
            locks.rwlock("a").read(),
        ]
    };
    let ours = Lingering::at(&store);
    for other in others(&ours.locks) {
        drop(soon(ours.lock().acquire()).await.unwrap());

        let guard = soon(other.try_acquire())
            .await
            .expect("free for its client");

        give_back(guard).await;
    }
}

async fn a_lock_that_lingers_can_be_taken_back(store: Store) {
    let (_ours, operator) = (Lingering::used(&store).await, store.client());
    let shown = operator.inspect("a").await.unwrap();

    let revoked = operator.revoke("a", shown[0].ticket, SOON, "it is not in use");

    assert_eq!(soon(revoked).await.unwrap(), Release::Released);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn a_shutdown_releases_a_lock_that_lingers(store: Store) {
    let ours = Lingering::used(&store).await;

    let left = soon(ours.locks.shutdown(SOON)).await;

    assert!(left.is_ok(), "{left:?}");
    assert_nothing_left(&store, &store.client(), "a").await;
}

async fn the_end_of_a_client_releases_a_lock_that_lingers(store: Store) {
    let Lingering { locks, .. } = Lingering::used(&store).await;

    drop(locks);

    assert_nothing_left(&store, &store.client(), "a").await;
}

async fn tokens_rise_over_a_linger(store: Store) {
    let (ours, theirs) = (Lingering::at(&store), store.client());
    let mut last = None;
    for round in 0..30 {
        let lock = match round % 5 {
            4 => theirs.mutex("a"),
            _ => ours.lock(),
        };
        let guard = soon(lock.acquire()).await.unwrap();
        let token = guard.fencing_token().unwrap();
        assert!(last < Some(token), "{last:?}, then {token:?}");
        last = Some(token);
        drop(guard);
    }
}

async fn a_lock_does_not_linger_at_a_store_that_does_not_tell_who_waits(store: Store) {
    let theirs = store.client();
    let _ours = Lingering::used(&store).await;

    is_free(&theirs).await;
}

/// A store in the test. The clock of its clients, and its own, stand still.
struct Kit {
    store: testing::Store,
    locks: Locks,
    counts: Arc<Counts>,
}

impl Kit {
    fn new(fair: Fair) -> Self {
        let store = testing::Store::new();
        store.clock().stop();
        let (counted, counts) = Counted::around(Arc::new(store.clone()));
        let builder = Locks::builder().backend(counted).fair(fair).ttl(LEASE);
        Self {
            locks: store.clock().client_with(builder).unwrap(),
            store,
            counts,
        }
    }

    fn lock(&self) -> Lock {
        self.locks.mutex("a").linger(LINGER)
    }

    async fn used(&self, lock: &Lock) {
        drop(soon(lock.acquire()).await.unwrap());
    }

    fn other(&self) -> Locks {
        self.store.client().unwrap()
    }
}

async fn a_linger_ends_after_its_time(store: Store) {
    let kit = Kit::new(store.fair);
    kit.used(&kit.lock()).await;
    kit.store.clock().advance(LINGER / 2);
    is_taken(&kit.other()).await;

    kit.store.clock().advance(LINGER / 2);

    is_free(&kit.other()).await;
}

/// The one who is told may not hear it. So another process gets the lock all the same.
async fn a_linger_ends_a_second_after_the_grant(store: Store) {
    let kit = Kit::new(store.fair);
    for _ in 0..100 {
        kit.used(&kit.lock()).await;
        kit.store.clock().advance(LINGER / 2);
    }
    assert_eq!(kit.counts.enqueued(), 1);

    is_free(&kit.other()).await;
}

async fn a_linger_ends_after_a_thousand_uses(store: Store) {
    let kit = Kit::new(store.fair);
    for _ in 0..1_000 {
        kit.used(&kit.lock()).await;
    }
    assert_eq!(kit.counts.enqueued(), 1);

    kit.used(&kit.lock()).await;

    is_free(&kit.other()).await;
    assert_eq!(kit.counts.enqueued(), 1);
}

/// A lease that cannot be renewed is not kept to its end.
async fn a_linger_ends_when_half_of_the_lease_is_left(store: Store) {
    let kit = Kit::new(store.fair);
    let ttl = Duration::from_millis(100);
    let lock = kit.lock().ttl(ttl);
    let guard = soon(lock.acquire()).await.unwrap();
    kit.counts.refuse_renewals(true);
    kit.store.clock().advance(ttl / 2 - LINGER / 2);
    drop(guard);
    is_taken(&kit.other()).await;

    kit.store.clock().advance(LINGER / 2);

    is_free(&kit.other()).await;
}

/// The store may have given the lock to others meanwhile.
async fn a_lock_of_a_lost_connection_does_not_linger(store: Store) {
    let kit = Kit::new(store.fair);
    let lock = kit.lock().linger(Duration::from_secs(1));
    kit.used(&lock).await;
    let mut events = kit.locks.events();
    kit.store.lose_data();
    kit.store.break_connections();
    assert_eq!(soon(events.recv()).await, Some(Event::Suspended));
    let theirs = kit.other();
    let guard = soon(theirs.mutex("a").acquire()).await.unwrap();

    let ours = begin(lock);
    eventually("ours is in line", SOON, async || {
        // Less than the linger in all: the client waits a little before it connects again.
        kit.store.clock().advance(Duration::from_millis(1));
        theirs.inspect("a").await.unwrap().len() == 2
    })
    .await;

    give_back(guard).await;
    give_back(soon(ours).await.unwrap().unwrap()).await;
}

async fn a_leader_that_resigns_does_not_linger(store: Store) {
    let kit = Kit::new(store.fair);
    let lingering = Locks::builder()
        .backend(Arc::new(kit.store.clone()))
        .linger(LINGER);
    let locks = kit.store.clock().client_with(lingering).unwrap();
    let leader = soon(locks.election("a").campaign()).await.unwrap();

    assert_eq!(leader.resign().await.unwrap(), Release::Released);

    assert!(kit.other().inspect("a").await.unwrap().is_empty());
}

async fn a_linger_of_more_than_a_second_is_refused(store: Store) {
    let kit = Kit::new(store.fair);
    let more = Duration::from_millis(1_001);
    let refused = kit.locks.mutex("a").linger(more).acquire().await;
    assert_eq!(kind(refused), ErrorKind::Config);
    let refused = Locks::builder().url("memory:").linger(more).build();
    assert_eq!(kind(refused), ErrorKind::Config);
}

async fn a_lock_in_strict_order_does_not_linger(store: Store) {
    let kit = Kit::new(store.fair);

    kit.used(&kit.lock()).await;

    is_free(&kit.other()).await;
}
