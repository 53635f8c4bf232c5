//! Tests with very many leases in one process: leases of different names, whose connections are
//! killed, and leases of one name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Guard, Locks, Release};
use tests::redis_server::RedisServer;

use super::client;
use crate::faults::builder;
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_crowd_of_leases_survives_the_kills_of_its_connections
        permits_of_one_semaphore_are_renewed_in_time_however_many
    ]
}

/// The default ttl. The facts check that leases are renewed in time, so a machine that stalls for
/// longer than a ttl loses some.
const TTL: Duration = Duration::from_secs(10);

/// After each kill, the client renews all tickets. If it sent all renewals at once, the answers
/// would come too late, and the client would replace the connections that they come on.
async fn a_crowd_of_leases_survives_the_kills_of_its_connections(_: Store) {
    let (leases, kills) = if tests::fact::long() {
        (100_000, 10)
    } else {
        (20_000, 4)
    };
    let server = RedisServer::start();
    let locks = builder(server.url()).ttl(TTL).build().unwrap();
    let tasks = (0..64).map(|task| tokio::spawn(hold(locks.clone(), task, leases / 64)));
    let tasks: Vec<_> = tasks.collect();
    let mut held = Vec::new();
    for task in tasks {
        held.push(task.await.unwrap());
    }

    let began = Instant::now();
    for kill in 1..=kills {
        let _: i64 = server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
        let next = kill * Duration::from_secs(1);
        tokio::time::sleep(next.saturating_sub(began.elapsed())).await; // the client has a second to recover
    }
    // After this pause, a lease without a renewal since the last kill has expired.
    tokio::time::sleep(TTL.saturating_sub(began.elapsed())).await;

    let lost = || held.iter().flatten().filter(|guard| !guard.is_valid());
    assert_eq!(lost().count(), 0, "by the kills");
    if tests::fact::long() {
        let busy = Busy::on_every_core();
        tokio::time::sleep(3 * TTL).await; // without a renewal in time, each lease would be over
        drop(busy);
        assert_eq!(lost().count(), 0, "on a busy machine");
    }
    // Each task releases its guards one by one. If all were released at once, some releases would
    // take longer than an operation may take.
    let releasing = held.into_iter().map(|guards| tokio::spawn(release(guards)));
    for released in releasing.collect::<Vec<_>>() {
        released.await.unwrap();
    }
}

async fn release(guards: Vec<Guard>) {
    for guard in guards {
        // The fact has counted the losses before.
        if let Ok(release) = guard.release().await {
            assert_eq!(release, Release::Released);
        }
    }
}

/// Keeps every core busy with one thread each, until this value is dropped.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn on_every_core() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(over)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes leases. A machine that stands still in this time does no harm.
async fn hold(locks: Locks, task: usize, count: usize) -> Vec<Guard> {
    let mut held = Vec::with_capacity(count);
    for number in 0..count {
        let lock = locks.mutex(format!("n{task}-{number}"));
        let lock = lock.wait(SOON).through_outages(true);
        held.push(lock.acquire().await.unwrap());
    }
    held
}

/// Each permit has its own ticket. The cost of one ticket does not depend on the number of tickets.
async fn permits_of_one_semaphore_are_renewed_in_time_however_many(_: Store) {
    const PERMITS: u32 = 1_000;
    let server = RedisServer::start();
    let locks = client(&server);
    let ttl = Duration::from_secs(5); // a busy machine has two thirds of it for each renewal
    let uploads = locks.semaphore("uploads", PERMITS).permits(1).ttl(ttl);
    let tasks = (0..PERMITS).map(|_| {
        let uploads = uploads.clone();
        tokio::spawn(async move { uploads.acquire().await.unwrap() })
    });
    let mut held = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        held.push(task.await.unwrap());
    }

    tokio::time::sleep(2 * ttl).await; // each lease is renewed several times

    let lost = held.iter().filter(|guard| !guard.is_valid()).count();
    assert_eq!(lost, 0);
    assert_eq!(locks.inspect("uploads").await.unwrap().len(), held.len());
}
