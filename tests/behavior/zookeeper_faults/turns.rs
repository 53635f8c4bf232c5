//! Tests of turns on a real server: a ticket that ends lets in the ticket of its client right
//! behind it, before the server knows of the end. So the server may show the holder as a waiter,
//! and a process may end between the two.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Guard, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::witness::FileWitness;
use tests::zookeeper_server::ZooKeeperServer;

use super::{builder, client, nothing_left, operator, proxied, through};
use crate::faults::passing_on;
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, soon, tickets};

/// The parent of the tickets of `a`.
const PARENT: &str = "/test:1/{a}";

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_lock_passes_inside_its_client_while_the_server_is_silent
        a_lock_held_by_a_turn_can_be_taken_away_while_its_client_is_cut_off
        a_lock_held_by_a_turn_gives_up_when_somebody_asks
        a_ticket_of_an_earlier_parent_lets_nobody_in
        a_process_that_is_killed_before_its_releases_arrive_holds_nobody_up_for_longer_than_its_session
        processes_that_are_killed_or_cut_off_while_they_pass_a_lock_on_overlap_nowhere
    ]
}

/// The tickets of the next facts: of a holder, and of a waiter of the same client right behind it.
/// The proxy is frozen when the holder ends. Returns the waiter, and the number of its ticket.
async fn passed_on(proxy: &Proxy, locks: &Locks, operator: &Locks) -> (Guard, u64) {
    let holder = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(LEASE));
    tickets(operator, "a", 2).await;
    // When this is answered, the answer to the enqueue has arrived.
    locks.inspect("a").await.unwrap();
    proxy.freeze();
    drop(holder);
    let guard = soon(waiter).await.unwrap().unwrap();
    let shown = operator.inspect("a").await.unwrap();
    let shown: Vec<_> = shown
        .iter()
        .map(|place| (place.ticket, place.granted))
        .collect();
    let ticket = guard.grant_id().ticket();
    assert_eq!((shown.len(), shown[1]), (2, (ticket, false)));
    (guard, ticket)
}

async fn a_lock_passes_inside_its_client_while_the_server_is_silent(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, operator) = (through(&proxy), client(&server));

    let (guard, _) = passed_on(&proxy, &locks, &operator).await;

    assert!(guard.is_valid());
    proxy.thaw();
    give_back(guard).await;
    nothing_left(&server).await;
}

async fn a_lock_held_by_a_turn_can_be_taken_away_while_its_client_is_cut_off(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, operator) = (through(&proxy), client(&server));
    let (guard, ticket) = passed_on(&proxy, &locks, &operator).await;

    let taken = soon(operator.force_release("a", ticket)).await;

    assert_eq!(taken.unwrap(), Release::Released);
    proxy.thaw();
    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    give_back(operator.mutex("a").wait(SOON).acquire().await.unwrap()).await;
    drop(guard);
    nothing_left(&server).await;
}

async fn a_lock_held_by_a_turn_gives_up_when_somebody_asks(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    // The holder learns of the ask-back at its renewal, after a third of this.
    let locks = builder(proxied(&proxy)).ttl(Duration::from_secs(15));
    let locks = locks.build().unwrap();
    let operator = client(&server);
    let (guard, ticket) = passed_on(&proxy, &locks, &operator).await;
    let asks = operator.clone();
    let asked = tokio::spawn(async move { asks.revoke("a", ticket, SOON, "x").await });
    eventually("it is asked", SOON, async || {
        operator.inspect("a").await.unwrap()[1].asked_back.is_some()
    })
    .await;

    proxy.thaw();

    assert_eq!(soon(guard.revoked()).await.why, "x");
    assert!(guard.is_valid(), "it has its grace");
    give_back(guard).await;
    assert_eq!(soon(asked).await.unwrap().unwrap(), Release::Released);
    nothing_left(&server).await;
}

/// Under a new parent the numbers of nodes begin anew. So the ticket with the number before may be
/// of an earlier line, from which somebody has deleted it. Its client learns of this late.
async fn a_ticket_of_an_earlier_parent_lets_nobody_in(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (slow, other) = (through(&proxy), client(&server));
    let admin = operator(&server).await;
    let first = slow.mutex("a").acquire().await.unwrap();
    let second = begin(slow.mutex("a").wait(LEASE));
    tickets(&slow, "a", 2).await;
    eventually("it is watched", SOON, async || server.watches() > 0).await;
    give_back(first).await;
    let second = second.await.unwrap().unwrap();
    tickets(&slow, "a", 1).await;
    proxy.delay(Duration::ZERO, Duration::from_millis(500));

    for node in admin.list_children(PARENT).await.unwrap() {
        admin
            .delete(&format!("{PARENT}/{node}"), None)
            .await
            .unwrap();
    }
    admin.delete(PARENT, None).await.unwrap();
    let holder = other.mutex("a").acquire().await.unwrap();
    let next = begin(other.mutex("a").wait(LEASE));
    tickets(&other, "a", 2).await;
    let waiter = begin(slow.mutex("a").wait(LEASE)); // right behind the number of `second`
    tickets(&other, "a", 3).await;
    drop(second);

    // Each answer arrives after all that the server has sent before it.
    for _ in 0..3 {
        slow.inspect("a").await.unwrap();
        assert!(!waiter.is_finished(), "two hold at once");
    }
    assert!(holder.is_valid());
    give_back(holder).await;
    give_back(next.await.unwrap().unwrap()).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

const SESSION: Duration = Duration::from_secs(3);

/// How long each task of a crowd has the lock. The others are in line by then.
const STAY: Duration = Duration::from_millis(20);

/// The tasks that wait at the server pass the lock on to each other while nothing reaches the
/// server. Then the process is killed.
async fn a_process_that_is_killed_before_its_releases_arrive_holds_nobody_up_for_longer_than_its_session(
    _: Store,
) {
    let server = ZooKeeperServer::start();
    for late in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let witness = FileWitness::in_folder(folder.path());
        let proxy = Proxy::to(server.port());
        let process = passing_on(&proxied(&proxy), folder.path(), SESSION, STAY);
        let visits = async |more: usize| {
            let before = witness.visits();
            eventually("the lock passes", 3 * SOON, async || {
                witness.visits() >= before + more
            })
            .await;
        };
        visits(50).await;

        proxy.freeze();
        visits(1).await; // whose release does not arrive
        process.kill();
        let killed = Instant::now();
        if late {
            proxy.thaw();
        }
        let lock = client(&server).mutex("a").wait(SOON);
        let guard = lock.acquire().await.unwrap();

        let visit = witness.write();
        let after = awake_since(killed);
        println!("late {late}: free after {after:?}");
        assert!(after < 2 * SESSION, "{after:?}");
        drop(visit);
        give_back(guard).await;
        witness.assert_no_overlap();
        nothing_left(&server).await;
    }
}

/// A client that is cut off passes the lock on among its tasks until its leases are over, and not
/// longer. The others get the lock after that.
async fn processes_that_are_killed_or_cut_off_while_they_pass_a_lock_on_overlap_nowhere(_: Store) {
    let server = ZooKeeperServer::start();
    let folder = tempfile::tempdir().unwrap();
    let witness = FileWitness::in_folder(folder.path());
    let ttl = 2 * SESSION; // longer than a visit during which the machine stands still
    let start = || {
        let proxy = Proxy::to(server.port());
        let process = passing_on(&proxied(&proxy), folder.path(), ttl, STAY);
        (proxy, process)
    };
    let mut random = fastrand::Rng::new();
    let mut crowds: Vec<_> = (0..3).map(|_| start()).collect();
    let rounds = if tests::fact::long() { 16 } else { 6 };
    for round in 0..rounds {
        let visits = witness.visits() + 30 + random.usize(..30);
        eventually("the lock passes", 6 * SOON, async || {
            witness.visits() > visits
        })
        .await;
        let (proxy, process) = crowds.remove(0);
        if round % 2 == 0 {
            process.kill();
            crowds.push(start());
        } else {
            proxy.freeze();
            // The session of this process ends meanwhile, if the others go on.
            let visits = witness.visits() + 60;
            eventually("the others go on", 6 * SOON, async || {
                witness.visits() > visits
            })
            .await;
            proxy.thaw();
            crowds.push((proxy, process));
        }
    }
    for (_, process) in crowds {
        process.kill();
    }

    witness.assert_no_overlap();
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    println!("{} visits in {rounds} rounds", tokens.len());
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens fell");
    give_back(
        client(&server)
            .mutex("a")
            .wait(2 * SOON)
            .acquire()
            .await
            .unwrap(),
    )
    .await;
}
