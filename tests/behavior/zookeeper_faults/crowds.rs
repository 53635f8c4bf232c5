//! Tests of the number of requests and bytes, for one client and for many clients. Also tests with
//! many clients whose number changes.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, Answer, Connection, Enqueued, Renewed, Request};
use lockcore::testing::around;
use lockcore::{ErrorKind, Fair, Locks, Wait};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::witness::Witness;
use tests::zookeeper_server::ZooKeeperServer;

use super::{builder, client, counted, nothing_left, proxied};
use crate::faults;
use crate::store::{Kind, SOON, Store, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        only_a_client_with_tickets_has_its_leader_checked
        one_hand_over_costs_the_same_with_any_number_of_waiters
        a_crowd_of_clients_costs_the_same_however_many_they_are
        a_waiter_costs_the_same_bytes_however_many_others_wait
        a_crowd_that_comes_and_goes_never_overlaps
        a_burst_of_a_process_costs_no_lease_and_nothing_is_unknown
        a_burst_that_is_dropped_is_gone_soon
        few_of_a_crowd_are_in_front_of_a_renewal_if_enqueues_are_answered_late
    ]
}

async fn only_a_client_with_tickets_has_its_leader_checked(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let locks = builder(proxied(&proxy) + "?session_timeout=6s")
        .ttl(Duration::from_secs(5))
        .build()
        .unwrap();
    let written_in_a_session = async || {
        let (packets, written) = (proxy.traffic().chunks_up, server.transactions());
        eventually("a session's probes are sent", SOON, async || {
            proxy.traffic().chunks_up >= packets + 12
        })
        .await;
        let written = server.transactions() - written;
        (written, proxy.traffic().chunks_up - packets)
    };
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    assert_eq!(written_in_a_session().await.0, 0);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let (written, sent) = written_in_a_session().await;

    // The client checks in every quarter of a session that the leader leads. It sends eleven probes
    // in a session, so a check comes with every third probe.
    assert!((1..=sent / 3 + 1).contains(&written), "{written} of {sent}");
    give_back(guard).await;
}

async fn one_hand_over_costs_the_same_with_any_number_of_waiters(_: Store) {
    let server = ZooKeeperServer::start();
    for waiters in [1, 10, 100] {
        let (holding, waiting) = (counted(&server), counted(&server));
        let name = format!("a{waiters}");
        let guard = holding.mutex(&name).acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..waiters {
            // Locks with an owner text do not share a ticket.
            let lock = waiting.mutex(&name).owner("a");
            tasks.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
        }
        eventually("the line has formed", SOON, async || {
            server.ephemerals(&format!("/test:1/{{{name}}}/")).len() == waiters + 1
        })
        .await;
        // The client sets its watch when its ticket is in line, and then reads the line. The answer
        // to this `inspect` comes after both.
        eventually("the line is watched", SOON, async || server.watches() > 0).await;
        tickets(&waiting, &name, waiters + 1).await;

        let before = server.packets();
        give_back(guard).await;
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let spent = server.packets().since(before);

        println!("{waiters} waiters: {spent:?}");
        // Received: one release of each waiter, one release of the holder, and one more request of
        // the holder. The holder came when the name was unused, so it first tries to delete the
        // parent too. This fails because of the waiters. Sent: a reply to each request, and for
        // each release one event to the waiting process.
        let releases = waiters as u64 + 1;
        assert_eq!(
            (spent.received, spent.sent),
            (releases + 1, 2 * releases + 1)
        );
    }
}

/// With more than eight clients, the cost of a hand-over does not rise further.
async fn a_crowd_of_clients_costs_the_same_however_many_they_are(_: Store) {
    let server = ZooKeeperServer::start();
    for (clients, tasks) in [(4, 1), (8, 1), (16, 1), (16, 3), (32, 2)] {
        let name = format!("a{clients}-{tasks}");
        let witness = Arc::new(Witness::exclusive());
        let stop = Arc::new(AtomicBool::new(false));
        let mut crowd = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let locks = builder(server.url() + "?session_timeout=280s")
                .ttl(Duration::from_secs(120))
                .wait(3 * SOON)
                .fair(lockcore::Fair::Strict)
                .build()
                .unwrap();
            for _ in 0..tasks {
                let (lock, witness, stop) =
                    (locks.mutex(&name), Arc::clone(&witness), Arc::clone(&stop));
                crowd.spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        let guard = lock.acquire().await.unwrap();
                        drop(witness.enter(1));
                        give_back(guard).await;
                    }
                });
            }
        }
        let visits = |least| {
            let witness = Arc::clone(&witness);
            eventually("the crowd moves", 3 * SOON, move || {
                ready(witness.seen().visits >= least)
            })
        };
        // After this many visits, every client knows how many clients there are.
        visits(200 + 40 * clients as u64).await;
        let (before, began) = (server.packets(), witness.seen().visits);
        visits(began + 1000).await;
        let (spent, visited) = (
            server.packets().since(before),
            witness.seen().visits - began,
        );
        stop.store(true, Ordering::SeqCst);
        while let Some(done) = crowd.join_next().await {
            done.unwrap();
        }

        witness.assert_no_overlap();
        let each = |packets: u64| packets as f64 / visited as f64;
        let (received, sent) = (each(spent.received), each(spent.sent));
        println!(
            "{clients} clients of {tasks}: {received:.1} packets received and {sent:.1} sent per hand-over"
        );
        let most = match clients {
            // The replies to the requests of the client itself, and two events for each client.
            ..=8 => 3.5 + 2.0 * f64::from(clients),
            _ => 10.0,
        };
        assert!(sent <= most, "{sent} > {most}");
    }
    nothing_left(&server).await;
}

/// The holder keeps the lock, so only the cost of waiting is measured.
async fn a_waiter_costs_the_same_bytes_however_many_others_wait(_: Store) {
    let server = ZooKeeperServer::start();
    let mut each = Vec::new();
    for clients in [10, 30] {
        let proxy = Proxy::to(server.port());
        let name = format!("a{clients}");
        let holder = client(&server);
        let guard = holder.mutex(&name).acquire().await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let locks = builder(proxied(&proxy)).ttl(Duration::from_secs(6));
            let lock = locks.build().unwrap().mutex(&name).wait(6 * SOON);
            tasks.spawn(async move { lock.acquire().await });
        }
        tickets(&holder, &name, clients + 1).await;

        // In the first pause, the new waiters get the events of each other's creates. The second
        // pause counts the renewals of one ttl.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (before, began) = (proxy.traffic(), Instant::now());
        tokio::time::sleep(Duration::from_secs(6)).await;
        let (spent, took) = (proxy.traffic(), awake_since(began).as_secs_f64());

        let bytes = spent.bytes_up + spent.bytes_down - before.bytes_up - before.bytes_down;
        let of_each = bytes as f64 / clients as f64 / took;
        println!("{clients} clients: {of_each:.0} bytes a second for each");
        each.push(of_each);
        tasks.shutdown().await;
        give_back(guard).await;
    }
    assert!(each[1] < 1.5 * each[0], "{each:?}");
}

/// The crowd has readers, writers, callers that give up and callers that do not wait. Some rounds
/// have many clients, and others have few. A client watches the whole line if few clients wait, and
/// only the ticket ahead if many wait. So the clients change between these two watches.
async fn a_crowd_that_comes_and_goes_never_overlaps(_: Store) {
    let server = ZooKeeperServer::start();
    let witness = Arc::new(Witness::readers_and_writers());
    let clients: Vec<Locks> = (0..12).map(|_| client(&server)).collect();
    for (round, crowd) in [12, 3, 12, 6, 10].into_iter().enumerate() {
        let mut tasks = tokio::task::JoinSet::new();
        for (number, locks) in clients.iter().take(crowd).enumerate() {
            for task in 0..3 {
                let (catalog, witness) = (locks.rwlock("c"), Arc::clone(&witness));
                tasks.spawn(async move {
                    for turn in 0..20 {
                        // In even rounds every request is exclusive, so that a crowd forms.
                        let reads = round % 2 == 1 && (number + task + turn) % 4 == 0;
                        let lock = if reads {
                            catalog.read()
                        } else {
                            catalog.write()
                        };
                        let lock = match turn % 5 {
                            0 => lock.wait(Duration::ZERO),
                            1 => lock.wait(Duration::from_millis(20)),
                            _ => lock.wait(2 * SOON),
                        };
                        match lock.acquire().await {
                            Ok(guard) => {
                                let visit = if reads {
                                    witness.read()
                                } else {
                                    witness.write()
                                };
                                tokio::task::yield_now().await;
                                drop(visit);
                                give_back(guard).await;
                            }
                            Err(error) => assert!(
                                // The outcome is unknown if the wait ends before the answer of the
                                // server arrives.
                                turn % 5 < 2
                                    && matches!(
                                        error.kind(),
                                        ErrorKind::Busy | ErrorKind::Timeout | ErrorKind::Unknown
                                    ),
                                "{error}"
                            ),
                        }
                    }
                });
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    }
    println!("{} visits", witness.assert_no_overlap().visits);
    nothing_left(&server).await;
}

/// The fact sends many requests at the same time, with all default settings. Meanwhile this client
/// and another client each hold a lock.
async fn a_burst_of_a_process_costs_no_lease_and_nothing_is_unknown(_: Store) {
    let server = ZooKeeperServer::start();
    let clients = [(); 2].map(|()| faults::builder(server.url()).build().unwrap());
    let [locks, other] = &clients;
    let held = locks.mutex("a").acquire().await.unwrap();
    let uninvolved = other.mutex("b").acquire().await.unwrap();
    let burst = burst();

    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..burst {
        let lock = locks.semaphore("uploads", 5).permits(1);
        tasks.spawn(async move {
            let guard = lock.acquire().await?;
            guard.release().await
        });
    }
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(outcome) = tasks.join_next().await {
        let outcome = match outcome.unwrap() {
            Ok(_) => "released".into(),
            Err(error) => format!("{:?}", error.kind()),
        };
        *outcomes.entry(outcome).or_default() += 1;
    }

    println!("{burst} at once: {outcomes:?}, {:?}", began.elapsed());
    assert!(held.is_valid() && uninvolved.is_valid());
    // A caller that is not granted within the default `wait` gets a timeout.
    outcomes.remove("Timeout");
    assert_eq!(outcomes.keys().collect::<Vec<_>>(), ["released"]);
    eventually("nothing is left", 2 * SOON, async || {
        server.ephemerals("/test:1/{uploads}/").is_empty()
    })
    .await;
    assert!(held.is_valid() && uninvolved.is_valid());
    give_back(held).await;
    give_back(uninvolved).await;
}

/// The burst is dropped half-way: some requests are in line, some are in flight, and some have not
/// been sent.
async fn a_burst_that_is_dropped_is_gone_soon(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = faults::builder(server.url()).build().unwrap();
    let held = locks.semaphore("uploads", 5).permits(5);
    let held = held.acquire().await.unwrap();
    let in_line = || server.ephemerals("/test:1/{uploads}/").len();

    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..burst() {
        let lock = locks.semaphore("uploads", 5).permits(1);
        tasks.spawn(async move { lock.acquire().await });
    }
    eventually("half of them are in line", SOON, async || {
        in_line() > burst() / 2
    })
    .await;
    tasks.shutdown().await;

    eventually("the others are gone", 2 * SOON, async || in_line() == 1).await;
    assert!(held.is_valid());
    give_back(held).await;
}

fn burst() -> usize {
    if tests::fact::long() { 10_000 } else { 5_000 }
}

/// A connection that answers one enqueue after another, each after [`TAKES`].
#[derive(Debug)]
struct LateEnqueues {
    connection: Arc<dyn Connection>,
    seen: Arc<SeenInFlight>,
}

/// How many enqueues were in flight, and what renewals found.
#[derive(Debug, Default)]
struct SeenInFlight {
    turn: tokio::sync::Mutex<()>,
    answered: AtomicUsize,
    enqueues: AtomicUsize,
    renewals: AtomicUsize,
    /// The most enqueues that were in flight when a renewal was sent.
    in_front: AtomicUsize,
}

/// An enqueue that is in flight.
struct InFlight(Arc<SeenInFlight>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.enqueues.fetch_sub(1, Ordering::SeqCst);
    }
}

const TAKES: Duration = Duration::from_millis(30);

impl Connection for LateEnqueues {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        let answer = self.connection.enqueue(request, patience);
        let seen = Arc::clone(&self.seen);
        seen.enqueues.fetch_add(1, Ordering::SeqCst);
        let in_flight = InFlight(Arc::clone(&seen));
        Box::pin(async move {
            let answer = answer.await;
            let turn = seen.turn.lock().await;
            tokio::time::sleep(TAKES).await;
            seen.answered.fetch_add(1, Ordering::SeqCst);
            drop((turn, in_flight));
            answer
        })
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        let before = self.seen.enqueues.load(Ordering::SeqCst);
        self.seen.in_front.fetch_max(before, Ordering::SeqCst);
        self.seen.renewals.fetch_add(1, Ordering::SeqCst);
        self.connection.renew(tickets, patience)
    }
}

/// The server answers the requests of a session in order. So the enqueues that are in flight are in
/// front of a renewal, and those that wait in the process are not.
async fn few_of_a_crowd_are_in_front_of_a_renewal_if_enqueues_are_answered_late(_: Store) {
    const CROWD: usize = 2_000;
    let server = ZooKeeperServer::start();
    let seen = Arc::<SeenInFlight>::default();
    let store = backend::open(&(server.url() + "?session_timeout=30s")).unwrap();
    let for_store = Arc::clone(&seen);
    let late = around(store, move |connection| LateEnqueues {
        connection,
        seen: Arc::clone(&for_store),
    });
    let locks = Locks::builder()
        .namespace("test")
        .fair(Fair::Strict)
        .ttl(Duration::from_secs(9))
        .backend(late)
        .build()
        .unwrap();
    let take = async |name: &str| {
        let lock = locks.mutex(name).through_outages(true);
        lock.acquire().await.unwrap()
    };
    let (held, first) = (take("a").await, take("crowd").await);
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..CROWD {
        // With an owner text, each waiter takes a ticket of its own.
        let lock = locks.mutex("crowd").owner("crowd").wait(Wait::Forever);
        crowd.spawn(async move { lock.acquire().await });
    }

    let renewals = seen.renewals.load(Ordering::SeqCst);
    eventually(
        "many enqueues and renewals are answered",
        4 * SOON,
        async || {
            seen.answered.load(Ordering::SeqCst) > 200
                && seen.renewals.load(Ordering::SeqCst) > renewals + 5
        },
    )
    .await;

    let (in_front, answered) = (
        seen.in_front.load(Ordering::SeqCst),
        seen.answered.load(Ordering::SeqCst),
    );
    println!("{in_front} in front of a renewal, {answered} answered");
    assert!(answered < CROWD, "the crowd has no one left to wait");
    assert!((1..=64).contains(&in_front), "{in_front}");
    assert!(held.is_valid() && first.is_valid());
    crowd.shutdown().await;
}
