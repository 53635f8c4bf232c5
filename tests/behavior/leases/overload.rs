//! A test of more leases than the store can renew in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{Answer, Backend, Capability, Connection, EventSink, Renewed, Request};
use lockcore::testing::around;
use lockcore::{Guard, Locks, LostReason};
use tests::eventually::eventually;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::store::{DEFAULT, Kind, LEASE, SOON, STALL, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    // At a quorum a renewal is a request to each node. On a small machine the client, and not the
    // store, would decide how many leases are kept. Other work on the machine takes leases too. So
    // this needs an idle machine; the unit tests of the client's table check the rule in a time of
    // their own.
    if !store.capability().queues || !tests::fact::long() {
        return Vec::new();
    }
    crate::store_facts![store, DEFAULT;
        of_more_leases_than_the_store_can_renew_only_the_surplus_is_lost
    ]
}

/// How many renewals are in one request. The core asks for this many at once.
const BATCH: usize = 100;
/// How long the store takes for a request. This is 500 renewals in a second.
const TAKES: Duration = Duration::from_millis(200);
/// How many requests are on their way to the store or wait there. An answer takes as long as this
/// many requests. So a lease that is nearer to its end than that is renewed in vain.
const IN_FLIGHT: usize = 4;

/// A store that carries out one request for renewals at a time, each of which takes [`TAKES`].
#[derive(Debug)]
struct Slow {
    store: Arc<dyn Backend>,
}

#[derive(Debug)]
struct SlowConnection {
    connection: Arc<dyn Connection>,
    turn: Arc<Mutex<()>>,
    answered: Arc<AtomicUsize>,
}

impl Slow {
    /// Returns the store, and the number of requests for renewals that it has answered.
    fn around(store: Arc<dyn Backend>) -> (Arc<dyn Backend>, Arc<AtomicUsize>) {
        let answered = Arc::<AtomicUsize>::default();
        let (turn, counter) = (Arc::default(), Arc::clone(&answered));
        let store = around(store, move |connection| SlowConnection {
            connection,
            turn: Arc::clone(&turn),
            answered: Arc::clone(&counter),
        });
        (Arc::new(Self { store }), answered)
    }
}

impl Backend for Slow {
    fn capability(&self) -> Capability {
        self.store
            .capability()
            .renewals_in_flight((IN_FLIGHT * BATCH) as u32)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        self.store.connect(events)
    }
}

impl Connection for SlowConnection {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        let answer = self.connection.renew(tickets, patience);
        let (turn, answered) = (Arc::clone(&self.turn), Arc::clone(&self.answered));
        Box::pin(async move {
            let _turn = turn.lock().await;
            let answer = answer.await;
            tokio::time::sleep(TAKES).await;
            answered.fetch_add(1, Ordering::SeqCst);
            answer
        })
    }
}

async fn take(locks: &Locks, leases: usize, ttl: Duration) -> Vec<Guard> {
    const AT_A_TIME: usize = 50;
    let mut tasks = JoinSet::new();
    for task in 0..AT_A_TIME {
        let locks = locks.clone();
        tasks.spawn(async move {
            let mut held = Vec::new();
            for number in (task..leases).step_by(AT_A_TIME) {
                let lock = locks.mutex(format!("a{number}")).ttl(ttl);
                held.push(lock.acquire().await.unwrap());
            }
            held
        });
    }
    tasks.join_all().await.into_iter().flatten().collect()
}

/// Each lease is renewed in time, or it is lost and tells so. After the surplus is lost, the others
/// stay. If the earliest deadline were always first, all requests would be for leases that end before
/// the answer, and nearly all leases would be lost. If the latest deadline were first, the same few
/// leases would be renewed again and again, half as many as are possible.
async fn of_more_leases_than_the_store_can_renew_only_the_surplus_is_lost(store: Store) {
    let ttl = Duration::from_secs(4);
    let (slow, answered) = Slow::around(store.backend());
    let locks = Locks::builder()
        .namespace(&store.namespace)
        .op_timeout(STALL)
        .ttl(LEASE)
        .backend(slow)
        .build()
        .unwrap();
    // Each request is for `BATCH` leases, and no lease is kept for longer than its ttl.
    let most = BATCH * (ttl.as_millis() / TAKES.as_millis()) as usize;
    let held = take(&locks, 2 * most, ttl).await;
    let requests = async |count: usize| {
        let until = answered.load(Ordering::SeqCst) + count;
        eventually("so many are answered", 4 * SOON, async || {
            answered.load(Ordering::SeqCst) >= until
        })
        .await;
    };

    let count = 3 * most / BATCH;
    let began = Instant::now();
    requests(count).await;
    let takes = began.elapsed() / count as u32;

    // Leases that would be answered with less than an eighth of their ttl left are left out. A busy
    // machine takes longer for a request than the store does.
    let in_time = (ttl / 8 * 7).saturating_sub(takes * IN_FLIGHT as u32);
    let promised = BATCH * (in_time.as_millis() / takes.as_millis()) as usize;
    assert!(
        promised > 0,
        "a request took {takes:?}, and this says nothing about the order"
    );
    let (kept, lost): (Vec<_>, Vec<_>) = held.into_iter().partition(|guard| guard.is_valid());
    println!("kept {} of {}", kept.len(), kept.len() + lost.len());
    assert!(kept.len() <= most + BATCH, "the store was fast enough");
    assert!(
        kept.len() >= promised * 3 / 5,
        "{} of {promised}",
        kept.len()
    );
    for guard in &lost {
        assert_eq!(guard.lost().await, LostReason::Expired);
    }
    requests(2 * most / BATCH).await;
    let still = kept.iter().filter(|guard| guard.is_valid()).count();
    println!("still {still}");
    // A stall of the machine costs what would have been renewed meanwhile.
    assert!(still >= kept.len() * 9 / 10, "{still} of {}", kept.len());
}
