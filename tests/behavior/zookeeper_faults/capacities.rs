//! Tests of stored capacities: the nodes that they leave, what they cost, and changes that are
//! interrupted.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Fault, Id, Name, Resize, ResizeOp, ResizeOutcome};
use lockcore::semaphore::Semaphore;
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::zookeeper_server::ZooKeeperServer;
use tokio::task::JoinSet;
use zookeeper_client::{Acls, Client, CreateMode};

use super::{
    builder, client, connection, counted, namespace, nothing_left, operator, proxied, through,
};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, kind, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_stored_capacity_stays_while_nobody_uses_the_name
        a_stored_capacity_costs_no_request_more_than_a_name_that_others_use
        a_forgotten_capacity_that_holders_exceed_leaves_a_node_until_nobody_waits
        nobody_is_granted_permits_while_a_halt_is_in_the_line
        a_mutex_does_not_wait_in_a_line_whose_capacity_is_being_stored
        a_mutex_that_is_in_line_when_a_capacity_is_stored_is_refused
        a_grant_that_its_waiter_has_not_seen_outlives_a_smaller_capacity
        more_permits_that_a_lost_watch_does_not_tell_cost_a_third_of_a_ttl
        a_change_whose_answer_is_lost_counts_once
        a_change_of_a_name_that_was_forgotten_meanwhile_is_not_made_again
        a_change_that_is_repeated_before_its_answer_leaves_no_halt
        a_halt_whose_create_is_not_answered_is_taken_away
        a_change_that_is_dropped_leaves_no_halt
        every_grant_fits_under_the_capacity_of_its_moment
    ]
}

/// The parent of the tickets of `a`.
const PARENT: &str = "/test:1/{a}";

/// A part of each request that creates a halt: the halt of a change that stores a capacity.
const HALT: &[u8] = b"-0-0-0-";

fn five(locks: &Locks) -> Semaphore {
    locks.semaphore("a", 5)
}

async fn pair(semaphore: &Semaphore) {
    give_back(semaphore.acquire().await.unwrap()).await;
}

/// The nodes of stored capacities in the line.
async fn stored(operator: &Client) -> Vec<String> {
    let children = operator.list_children(PARENT).await.unwrap_or_default();
    let is_stored = |node: &String| node.starts_with("capacity-");
    children.into_iter().filter(is_stored).collect()
}

/// Puts a halt into the line. A client that is stopped in the middle of a change leaves the same
/// node.
async fn halt(operator: &Client) -> String {
    let prefix = format!("{PARENT}/{:032x}-0-0-0-0000c11e-", 7);
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = operator.create(&prefix, b"", &options).await.unwrap();
    format!("{prefix}{sequence}")
}

/// The server removes an empty container. The node of the stored capacity keeps the parent from
/// being empty.
async fn a_stored_capacity_stays_while_nobody_uses_the_name(_: Store) {
    let server = ZooKeeperServer::that_forgets_soon();
    let (locks, other) = (client(&server), client(&server));
    for client in [&locks, &other] {
        client.ready(SOON).await.unwrap();
    }
    let gone = client(&server);
    five(&gone).resize(7).await.unwrap();
    five(&gone).resize(6).await.unwrap();
    gone.shutdown(SOON).await.unwrap();
    drop(gone);
    eventually("its session is over", SOON, async || server.sessions() == 2).await;
    assert_eq!(server.ephemerals("/"), Vec::<String>::new());
    pair(&five(&other)).await;
    // The parent of this name is a container too, and it has had a ticket.
    let guard = locks.mutex("b").acquire().await.unwrap();
    let refused = other.mutex("b").try_acquire().await;
    assert_eq!(kind(refused), ErrorKind::Busy);
    give_back(guard).await;

    for _ in 0..2 {
        // The session of an operator may end during a restart, so each turn opens another one.
        let operator = operator(&server).await;
        let exists = async |path| operator.check_stat(path).await.unwrap().is_some();
        eventually("the other name is forgotten", 2 * SOON, async || {
            !exists("/test:1/{b}").await
        })
        .await;
        assert_eq!(five(&other).capacity().await.unwrap(), 6);
        assert_eq!(stored(&operator).await.len(), 1);
        // A list of names shows only names with tickets.
        let mut pages = locks.list("");
        assert_eq!(pages.next().await.unwrap(), None);
        server.restart();
        for client in [&locks, &other] {
            eventually("a client is connected again", 2 * SOON, async || {
                five(client).capacity().await.is_ok()
            })
            .await;
        }
    }

    let operator = operator(&server).await;
    let exists = async |path| operator.check_stat(path).await.unwrap().is_some();
    five(&locks).forget_capacity().await.unwrap();
    eventually("the name is forgotten", 2 * SOON, async || {
        !exists(PARENT).await
    })
    .await;
}

async fn a_stored_capacity_costs_no_request_more_than_a_name_that_others_use(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = counted(&server);
    let semaphore = five(&locks);
    let spent = async || {
        let before = server.packets();
        for _ in 0..50 {
            pair(&semaphore).await;
        }
        let spent = server.packets().since(before);
        (spent.received, spent.sent)
    };
    pair(&semaphore).await;
    assert_eq!(spent().await, (100, 100));

    semaphore.resize(7).await.unwrap();

    // A pair costs the same as for each name whose parent stays: create, list, delete.
    assert_eq!(spent().await, (150, 150));
    let before = server.packets();
    semaphore.resize(8).await.unwrap();
    let spent = server.packets().since(before);
    println!("a change: {spent:?}");
    // The core reads the capacity (3 requests). The change reads the line (3), creates the halt and
    // reads the line again (3), and commits the transaction (1).
    assert!(spent.received <= 3 + 3 + 3 + 1, "{spent:?}");
    semaphore.forget_capacity().await.unwrap();
    assert_eq!(semaphore.capacity().await.unwrap(), 5);
}

async fn a_forgotten_capacity_that_holders_exceed_leaves_a_node_until_nobody_waits(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let operator = operator(&server).await;
    five(&locks).resize(8).await.unwrap();
    let four = five(&locks).permits(4).acquire().await.unwrap();
    let three = five(&locks).permits(3).acquire().await.unwrap();

    five(&locks).forget_capacity().await.unwrap();

    let waits = begin(five(&other).permits(2).wait(LEASE));
    tickets(&locks, "a", 3).await;
    let shown = async || {
        let line = other.inspect("a").await.unwrap();
        line.iter()
            .map(|ticket| (ticket.granted, ticket.capacity))
            .collect::<Vec<_>>()
    };
    assert_eq!(shown().await, [(true, 5), (true, 5), (false, 5)]);
    assert_eq!(stored(&operator).await.len(), 1);
    give_back(four).await;
    give_back(waits.await.unwrap().unwrap()).await;
    give_back(three).await;
    pair(&five(&locks)).await;
    eventually("the node is gone", SOON, async || {
        stored(&operator).await.is_empty()
    })
    .await;
    assert_eq!(five(&other).capacity().await.unwrap(), 5);
}

async fn nobody_is_granted_permits_while_a_halt_is_in_the_line(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let operator = operator(&server).await;
    let all = five(&locks).permits(5).acquire().await.unwrap();
    let waits = begin(five(&other).permits(3).wait(LEASE));
    tickets(&locks, "a", 2).await;

    let halt = halt(&operator).await;
    give_back(all).await;
    let late = begin(five(&locks).permits(2).wait(LEASE));
    tickets(&locks, "a", 2).await;

    // The answer is busy because of the waiters in front of the halt, and not because of the halt.
    let refused = five(&other).permits(1).try_acquire().await;
    assert_eq!(kind(refused), ErrorKind::Busy, "there are waiters");
    // No event reports that a grant does not come, so the test waits. A client that ignores a halt
    // grants at once.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waits.is_finished() && !late.is_finished());
    operator.delete(&halt, None).await.unwrap();
    let began = Instant::now();
    let guards = [waits.await.unwrap().unwrap(), late.await.unwrap().unwrap()];
    let after = awake_since(began);
    assert!(after < SOON, "{after:?}"); // renewals are twenty seconds apart
    for guard in guards {
        give_back(guard).await;
    }
    nothing_left(&server).await;
}

/// If the mutex waited, and the capacity was then stored, the mutex would wait for ever.
async fn a_mutex_does_not_wait_in_a_line_whose_capacity_is_being_stored(_: Store) {
    let server = ZooKeeperServer::start();
    let patience = Duration::from_millis(500);
    let locks = builder(server.url()).op_timeout(patience).build().unwrap();
    let operator = operator(&server).await;
    // These two may take longer than the operations below.
    pair(&five(&client(&server))).await;
    locks.ready(SOON).await.unwrap();
    let container = CreateMode::Container.with_acls(Acls::anyone_all());
    operator.create(PARENT, b"", &container).await.unwrap();
    let halt = halt(&operator).await;

    let mutex = locks.mutex("a").wait(LEASE).acquire().await;
    // If the last attempt was not answered in time, the keeper deletes its ticket. Until then this
    // ticket states another capacity than the semaphore.
    eventually("only the halt is there", SOON, async || {
        operator.list_children(PARENT).await.unwrap().len() == 1
    })
    .await;
    let permit = five(&locks).permits(1).try_acquire().await;
    // The client repeats both requests until the operation timeout is over. The last request may
    // have no answer.
    for refused in [kind(mutex), kind(permit)] {
        let expected = [ErrorKind::Unavailable, ErrorKind::Unknown];
        assert!(expected.contains(&refused), "{refused:?}");
    }

    // When the client is shut down, the keeper has completed its work, and the client has no
    // ticket.
    locks.shutdown(SOON).await.unwrap();
    operator.delete(&halt, None).await.unwrap();
    let after = client(&server);
    give_back(after.mutex("a").acquire().await.unwrap()).await;
    nothing_left(&server).await;
}

/// The store refuses to store a capacity while a mutex is in the line. But a mutex may be enqueued
/// at the same moment. To get this state, the test creates the node of the capacity itself.
async fn a_mutex_that_is_in_line_when_a_capacity_is_stored_is_refused(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let operator = operator(&server).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waits = begin(other.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    eventually("the line is followed", SOON, async || server.watches() > 0).await;

    let stored = format!("{PARENT}/capacity-5-0-{:032x}", 7);
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create(&stored, b"", &persistent).await.unwrap();

    // The client that waits has a copy of the line by now. Its next mutex finds the capacity in
    // this copy.
    assert_eq!(
        kind(soon(waits).await.unwrap()),
        ErrorKind::CapacityMismatch
    );
    for _ in 0..3 {
        let refused = soon(other.mutex("a").wait(LEASE).acquire()).await;
        assert_eq!(kind(refused), ErrorKind::CapacityMismatch);
    }
    give_back(guard).await;
    pair(&five(&other)).await;
    five(&other).forget_capacity().await.unwrap();
    nothing_left(&server).await;
}

/// The client of the waiter gets no event, so it learns of its grant after the capacity has become
/// smaller again.
async fn a_grant_that_its_waiter_has_not_seen_outlives_a_smaller_capacity(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, deaf) = (client(&server), through(&proxy));
    let ttl = Duration::from_secs(20);
    let all = five(&locks).permits(5).ttl(ttl).acquire().await.unwrap();
    let waits = begin(five(&deaf).permits(5).ttl(ttl).wait(LEASE));
    tickets(&locks, "a", 2).await;
    eventually("it is watched", SOON, async || server.watches() > 0).await;
    tickets(&deaf, "a", 2).await;
    proxy.lose_events();

    five(&locks).resize(10).await.unwrap();
    five(&locks).resize(3).await.unwrap();
    let began = Instant::now();

    let line = locks.inspect("a").await.unwrap();
    assert!(line.iter().all(|ticket| ticket.granted), "{line:?}");
    let guard = waits.await.unwrap().unwrap();
    assert!(awake_since(began) < ttl / 2);
    all.held().ensure(ttl / 2).await.unwrap();
    give_back(guard).await;
    give_back(all).await;
    five(&locks).forget_capacity().await.unwrap();
    nothing_left(&server).await;
}

/// For the first waiter, no capacity was stored before.
async fn more_permits_that_a_lost_watch_does_not_tell_cost_a_third_of_a_ttl(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = client(&server);
    let ttl = Duration::from_secs(20);
    let mut guards = vec![five(&locks).permits(5).ttl(ttl).acquire().await.unwrap()];
    let mut proxies = Vec::new();
    for capacity in [10, 15] {
        let proxy = Proxy::to(server.port());
        let deaf = through(&proxy);
        let waits = begin(five(&deaf).permits(5).ttl(ttl).wait(LEASE));
        let line = guards.len() + 1;
        tickets(&locks, "a", line).await;
        eventually("it is watched", SOON, async || server.watches() > 0).await;
        tickets(&deaf, "a", line).await;
        proxy.lose_events();

        five(&locks).resize(capacity).await.unwrap();
        let began = Instant::now();

        let guard = waits.await.unwrap().unwrap();
        println!("granted {:?} later", began.elapsed());
        assert!(awake_since(began) < ttl / 2);
        guards.push(guard);
        proxies.push(proxy);
    }
    for guard in guards {
        give_back(guard).await;
    }
}

async fn a_change_whose_answer_is_lost_counts_once(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, other) = (through(&proxy), client(&server));
    for (before, more) in [(5, true), (7, true), (9, false)] {
        let after = if more { before + 2 } else { before - 2 };
        proxy.lose_replies(format!("capacity-{after}-").as_bytes(), 1);
        let changed = match more {
            true => five(&locks).add_permits(2).await,
            false => five(&locks).reduce_permits(2).await,
        };
        assert_eq!(changed.unwrap(), after);
        assert_eq!(five(&other).capacity().await.unwrap(), after);
    }
    nothing_left(&server).await;
    pair(&five(&other)).await;
}

/// The id of the change goes with the node of the name. Nobody has changed the capacity before. The
/// fact makes both attempts itself, as the core does, so that the second one comes late enough.
async fn a_change_of_a_name_that_was_forgotten_meanwhile_is_not_made_again(_: Store) {
    let server = ZooKeeperServer::that_forgets_soon();
    let proxy = Proxy::to(server.port());
    let (other, operator) = (client(&server), operator(&server).await);
    let store = backend::open(&proxied(&proxy)).unwrap();
    let connect = async || {
        let events = EventSink::new(1, namespace(), |_| ());
        store.connect(events).await
    };
    let resize = |capacity| {
        let op = ResizeOp::Set {
            capacity: Some(capacity),
            after: None,
            stated: NonZeroU32::new(5).unwrap(),
        };
        let id = Id::parse(&format!("{capacity:032x}")).unwrap();
        Arc::new(Resize::new(Name::new(namespace(), "a").unwrap(), id, op))
    };
    let is_forgotten = async || {
        other.semaphore("a", 5).forget_capacity().await.unwrap();
        eventually("the name is forgotten", 2 * SOON, async || {
            operator.check_stat(PARENT).await.unwrap().is_none()
        })
        .await;
    };
    proxy.lose_replies(b"capacity-7-", 1);
    let first = connect().await.unwrap().resize(resize(7)).await;
    assert_eq!(first.unwrap_err().fault(), Fault::Unknown);
    assert_eq!(five(&other).capacity().await.unwrap(), 7);
    is_forgotten().await;

    let again = Mutex::new(None);
    eventually("it is connected again", SOON, async || {
        let connected = connect().await.ok();
        let is_connected = connected.is_some();
        *again.lock().unwrap() = connected;
        is_connected
    })
    .await;
    let connection = again.into_inner().unwrap().unwrap();
    let second = connection.resize(resize(7)).await.unwrap();

    assert_eq!(
        (second.outcome, second.capacity),
        (ResizeOutcome::Kept, None)
    );
    assert_eq!(five(&other).capacity().await.unwrap(), 5);
    // Another change that finds no change before it is made.
    let next = connection.resize(resize(8)).await.unwrap();
    assert_eq!(next.outcome, ResizeOutcome::Applied);
    assert_eq!(five(&other).capacity().await.unwrap(), 8);
    is_forgotten().await;
}

/// The core repeats a change when the server stalls, and the task of the first attempt goes on. In
/// this fact, the repetition reads the line before the first attempt changes it, and puts its own
/// halt into the line after that. The fact makes both attempts itself, on one connection.
async fn a_change_that_is_repeated_before_its_answer_leaves_no_halt(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let name = Name::new(namespace(), "a").unwrap();
    let connection = connection(&proxied(&proxy), 1).await;
    let operator = operator(&server).await;
    // The server counts the creates and the deletes of children together.
    let creates = async || {
        let stat = operator.check_stat(PARENT).await.unwrap();
        stat.map_or(0, |stat| (stat.cversion + stat.num_children) / 2)
    };
    let mut after = None;
    let mut came_late = 0;
    for turn in 1..=20 {
        if came_late == 3 {
            break;
        }
        let id = Id::parse(&format!("{turn:032x}")).unwrap();
        let op = ResizeOp::Set {
            capacity: Some(5 + turn),
            after,
            stated: NonZeroU32::new(5).unwrap(),
        };
        let resize = Arc::new(Resize::new(name.clone(), id, op));
        let (before, created) = (proxy.traffic().delayed, creates().await);

        // The request for the first halt is on its way when the second attempt sends its reads.
        proxy.delay_requests(HALT, Duration::from_millis(500));
        let first = tokio::spawn(connection.resize(Arc::clone(&resize)));
        eventually("the first halt is sent", SOON, async || {
            proxy.traffic().delayed > before
        })
        .await;
        proxy.freeze();
        proxy.delay_requests(HALT, Duration::ZERO);
        let sent = proxy.traffic().chunks_up;
        let second = tokio::spawn(connection.resize(resize));
        eventually("the second attempt reads", SOON, async || {
            proxy.traffic().chunks_up > sent
        })
        .await;
        proxy.thaw();

        let first = soon(first).await.unwrap().unwrap();
        assert_eq!(
            (first.outcome, first.change),
            (ResizeOutcome::Applied, Some(id))
        );
        match soon(second).await.unwrap() {
            Ok(second) => {
                assert_eq!(second, first);
                // The node of the capacity, and two halts.
                came_late += u32::from(creates().await - created == 3);
            }
            // The second halt was in the line before the first attempt was done.
            Err(error) => assert_eq!(error.fault(), Fault::Retry, "{error}"),
        }
        nothing_left(&server).await;
        after = Some(id);
    }
    assert!(came_late > 0);
    pair(&five(&client(&server))).await;
}

async fn a_halt_whose_create_is_not_answered_is_taken_away(_: Store) {
    let server = ZooKeeperServer::start();
    let proxy = Proxy::to(server.port());
    let (locks, other) = (through(&proxy), client(&server));
    for capacity in [6, 7] {
        proxy.lose_replies(HALT, 1);
        five(&locks).resize(capacity).await.unwrap();
        assert_eq!(five(&other).capacity().await.unwrap(), capacity);
        nothing_left(&server).await;
    }
    pair(&five(&other)).await;
}

async fn a_change_that_is_dropped_leaves_no_halt(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let held = five(&other).permits(2).acquire().await.unwrap();
    let mut dropped = 0;
    // Each change is dropped 150 µs later than the change before it, so at another of its requests.
    for turn in 0..60u32 {
        let semaphore = five(&locks);
        let change = tokio::spawn(async move { semaphore.resize(2 + turn % 4).await });
        tokio::time::sleep(Duration::from_micros(u64::from(turn) * 150)).await;
        change.abort();
        dropped += u32::from(change.await.is_err());
    }
    println!("{dropped} of 60 changes were dropped");
    assert!(dropped > 0);
    eventually("only the ticket is there", SOON, async || {
        server.ephemerals(PARENT).len() == 1
    })
    .await;
    five(&locks).resize(3).await.unwrap();
    pair(&five(&locks)).await;
    give_back(held).await;
    nothing_left(&server).await;
}

/// What the tasks of this fact know about the semaphore.
#[derive(Default)]
struct Pool {
    /// How many permits the callers hold.
    out: u32,
    /// How many changes have begun, and how many are done.
    begun: u32,
    done: u32,
    capacity: u32,
    /// How many grants were checked.
    checked: u32,
}

/// When a request begins after a change and ends before the next change, all permits that are held
/// fit into the capacity. Other requests are not checked, because they may be granted under an
/// earlier capacity.
async fn every_grant_fits_under_the_capacity_of_its_moment(_: Store) {
    let server = ZooKeeperServer::start();
    let pool = Arc::new(Mutex::new(Pool {
        capacity: 5,
        ..Pool::default()
    }));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let locks = client(&server);
        for _ in 0..2 {
            let (semaphore, pool) = (five(&locks), Arc::clone(&pool));
            tasks.spawn(async move {
                for turn in 0..40 {
                    let permits = fastrand::u32(1..=3);
                    let settled = {
                        let pool = pool.lock().unwrap();
                        (pool.begun == pool.done).then_some(pool.done)
                    };
                    let lock = semaphore.permits(permits).wait(6 * SOON);
                    let guard = match turn % 4 {
                        0 => lock.wait(Duration::ZERO).acquire().await,
                        _ => lock.acquire().await,
                    };
                    let guard = match guard {
                        Ok(guard) => guard,
                        Err(error) => {
                            let expected = [ErrorKind::Busy, ErrorKind::Unavailable];
                            assert!(expected.contains(&error.kind()), "{error}");
                            continue;
                        }
                    };
                    {
                        let mut pool = pool.lock().unwrap();
                        pool.out += permits;
                        let (out, capacity) = (pool.out, pool.capacity);
                        if settled == Some(pool.begun) {
                            pool.checked += 1;
                            assert!(out <= capacity, "{out} of {capacity}");
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(..4))).await;
                    pool.lock().unwrap().out -= permits;
                    give_back(guard).await;
                }
            });
        }
    }
    let semaphore = five(&client(&server));
    let mut capacity = 5;
    while !tasks.is_empty() {
        // The capacity is never too small for long.
        capacity = match capacity {
            0..3 => 5,
            _ => fastrand::u32(0..=5),
        };
        pool.lock().unwrap().begun += 1;
        semaphore.resize(capacity).await.unwrap();
        {
            let mut pool = pool.lock().unwrap();
            pool.capacity = capacity;
            pool.done += 1;
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..40))).await;
        while let Some(done) = tasks.try_join_next() {
            done.unwrap();
        }
    }
    {
        let pool = pool.lock().unwrap();
        println!(
            "{} grants were checked, {} changes",
            pool.checked, pool.done
        );
        assert!(pool.checked > 0);
    }
    semaphore.forget_capacity().await.unwrap();
    nothing_left(&server).await;
}
