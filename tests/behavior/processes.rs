//! Tests with holders and waiters in other processes. These processes are killed, are frozen, or
//! end. The facts about their cost are in the folder of this file.

mod cost;

use std::collections::VecDeque;
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use rustix::process::Signal;
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions, Process};
use tests::stalls::awake_since;
use tests::witness::{FencedResource, FileWitness};

use crate::store::{
    Kind, LEASE, SLACK, SOON, Store, assert_nothing_left, begin, give_back, in_line, kind, tickets,
};

pub(crate) use self::cost::facts as facts_of_redis;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, crate::store::DEFAULT;
        a_killed_holder_is_followed_when_its_lease_is_over
        the_permits_of_a_killed_holder_are_back_after_its_lease
        killed_readers_let_the_writer_in_after_their_leases
        cancelled_and_killed_waiters_leave_the_order_of_the_others
        a_frozen_holder_is_followed_and_its_late_write_is_refused
        a_process_that_ends_with_a_guard_leaves_no_lock
        a_signal_that_ends_a_service_leaves_no_lock
        a_crowd_of_processes_that_are_killed_overlaps_nowhere
    ];
    if store.timings().cuts_unheard_grants {
        facts.extend(crate::store_facts![store, crate::store::DEFAULT;
            a_killed_waiter_holds_up_the_line_for_two_seconds_at_most
        ]);
    } else if !store.capability().sessions {
        facts.extend(crate::store_facts![store, crate::store::DEFAULT;
            killed_waiters_hold_up_the_line_for_one_lease_at_most
        ]);
    }
    facts
}

/// Facts that need no store.
pub(crate) fn facts_of_none(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_signal_that_comes_before_anybody_looks_is_not_missed
    ]
}

/// The signals are SIGTERM, which a deployment sends, and that of Ctrl-C. The fact shows little on
/// stores with sessions, because there the locks end with the process in any case.
async fn a_signal_that_ends_a_service_leaves_no_lock(store: Store) {
    let locks = store.client();
    for signal in [Signal::TERM, Signal::INT] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_service"));
        command
            .arg("deployed")
            .env("LOCK_URL", store.url())
            .env("LOCK_NAMESPACE", &store.namespace)
            .env("LOCK_TTL", "60s")
            .env("LOCK_OP_TIMEOUT", "30s"); // the machine may stand still
        let mut service = Process::start(&mut command);
        service.expect("HELD", SOON);
        assert_eq!(tickets_of(&locks, "deployed").await, 1);

        service.signal(signal);

        let started = Instant::now();
        let next = locks.mutex("deployed").wait(LEASE / 2).acquire().await;
        give_back(next.unwrap()).await;
        // The time limit is much longer than a release takes, and much shorter than the lease.
        let waited = awake_since(started);
        assert!(waited < SOON, "{signal:?}: free after {waited:?}");
        service.expect("ENDED", SOON);
        assert!(service.ended(SOON).success());
    }
}

/// The signal comes while the service does something else.
async fn a_signal_that_comes_before_anybody_looks_is_not_missed(_: Store) {
    for signal in [Signal::TERM, Signal::INT] {
        let mut service = Process::start(&mut Command::new(env!("CARGO_BIN_EXE_service")));
        service.expect("LISTENS", SOON);

        service.signal(signal);
        service.say("look");

        service.expect("ENDED", SOON);
        assert!(service.ended(SOON).success());
    }
}

async fn tickets_of(locks: &Locks, name: &str) -> usize {
    locks.inspect(name).await.unwrap().len()
}

fn holder(store: &Store, name: &str, ttl: Duration) -> Holder {
    holder_of(store, &format!("mutex {name}"), ttl)
}

/// A helper process that holds the lock `lock`, written as in [`HolderOptions::lock`].
fn holder_of(store: &Store, lock: &str, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: store.namespace.clone(),
        ttl,
        lock: lock.into(),
        ..HolderOptions::mutex(&store.url(), "")
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// The time that is allowed from the end of a dead holder's lease to the next grant. The server may
/// stall for three seconds of it.
pub(crate) fn moments(store: &Store) -> Duration {
    store.timings().follows_the_dead + SLACK + Duration::from_secs(3)
}

async fn a_killed_holder_is_followed_when_its_lease_is_over(store: Store) {
    let ttl = Duration::from_secs(4); // a helper that stalls keeps its lease until it is killed
    let rounds = if tests::fact::long() { 12 } else { 3 };
    let mut longest = Duration::ZERO;
    for _ in 0..rounds {
        let mut dying = holder(&store, "a", ttl);
        let token = dying.acquire();
        let locks = store.client();
        // The waiter's renewals are 20 s apart, so only a recheck at the end of the holder's lease
        // is fast enough.
        let lock = locks.mutex("a").ttl(Duration::from_secs(60));
        let waiter = begin(lock.wait(3 * SOON));
        in_line(&store, &store.client(), "a", 1, 1).await;

        dying.kill();
        let killed = Instant::now();
        let next = waiter.await.unwrap().unwrap();

        longest = longest.max(awake_since(killed));
        assert!(next.grant_id().as_u64() > token);
        give_back(next).await;
    }
    println!(
        "SIGKILL of the holder to the next holder, ttl 4 s: {longest:?} at most in {rounds} runs"
    );
    assert!(longest < ttl + moments(&store), "{longest:?}");
}

/// The waiters that are killed, in the order of the line.
const DEAD: [&[&str]; 4] = [
    &["mutex a"],
    &["mutex a", "mutex a"],
    &["read a"],
    &["read a", "mutex a"],
];

async fn a_killed_waiter_holds_up_the_line_for_two_seconds_at_most(store: Store) {
    for dead in DEAD {
        let locks = store.client();
        let guard = locks.mutex("a").acquire().await.unwrap();
        let mut dying = Vec::new();
        for lock in dead {
            let mut process = holder_of(&store, lock, Duration::from_secs(60));
            process.ask_to_acquire();
            dying.push(process);
            tickets(&locks, "a", 1 + dying.len()).await;
        }
        // If the store does not ask the waiter to recheck, the waiter learns of its grant at its
        // renewal, after a third of this ttl.
        let told = store.timings().tells_when_to_recheck;
        let ttl = Duration::from_secs(if told { 60 } else { 9 });
        let patient = begin(store.client().mutex("a").ttl(ttl).wait(LEASE));
        tickets(&locks, "a", dead.len() + 2).await;

        dying.into_iter().for_each(Holder::kill);
        drop(guard);
        let started = Instant::now();
        give_back(patient.await.unwrap().unwrap()).await;

        let after = awake_since(started);
        println!("{dead:?} before it: {after:?}");
        let found_out = if told { Duration::ZERO } else { ttl / 3 };
        let each = Duration::from_secs(2) + found_out;
        assert!(
            after < each * dead.len() as u32 + moments(&store),
            "{after:?}"
        );
    }
}

/// The leases of the dead end by themselves, whether they wait or were granted by then. So two dead
/// waiters cost no more than one. The next waiter learns of the end at its own renewal.
async fn killed_waiters_hold_up_the_line_for_one_lease_at_most(store: Store) {
    let ttl = Duration::from_secs(9);
    for dead in DEAD {
        let locks = store.client();
        let guard = locks.mutex("a").acquire().await.unwrap();
        let mut dying = Vec::new();
        for lock in dead {
            let mut process = holder_of(&store, lock, ttl);
            process.ask_to_acquire();
            dying.push(process);
            tickets(&locks, "a", 1 + dying.len()).await;
        }
        let patient = begin(store.client().mutex("a").ttl(ttl).wait(LEASE));
        tickets(&locks, "a", dead.len() + 2).await;

        dying.into_iter().for_each(Holder::kill);
        let killed = Instant::now();
        drop(guard);
        give_back(patient.await.unwrap().unwrap()).await;

        let after = awake_since(killed);
        println!("{dead:?} before it: {after:?}");
        assert!(after < ttl + ttl / 3 + moments(&store), "{after:?}");
    }
}

/// Twenty waiters are in line. Three of them are cancelled and two are killed.
async fn cancelled_and_killed_waiters_leave_the_order_of_the_others(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let (mut cancelled, mut killed) = (Vec::new(), Vec::new());
    // A grant that no client hears of ends early, or else with its lease or its session.
    let cuts = store.timings().cuts_unheard_grants;
    let dying = Duration::from_secs(if cuts { 60 } else { 9 });
    // If the store does not ask a waiter to recheck, the waiter learns at its renewal that the one
    // in front of it is gone.
    let ttl = match store.timings().tells_when_to_recheck {
        true => LEASE,
        false => Duration::from_secs(9),
    };
    for number in 1..=20 {
        if number == 5 || number == 15 {
            let mut process = holder(&store, "a", dying);
            process.ask_to_acquire();
            killed.push(process);
        } else {
            // One client for each waiter. For the store, these are twenty processes.
            let (client, served) = (store.client(), served.clone());
            let task = tokio::spawn(async move {
                let lock = client.mutex("a").ttl(ttl).wait(LEASE);
                let guard = lock.acquire().await.unwrap();
                served
                    .send((number, guard.fencing_token().unwrap()))
                    .unwrap();
                give_back(guard).await;
            });
            if [4, 10, 20].contains(&number) {
                cancelled.push(task);
            }
        }
        tickets(&locks, "a", number + 1).await;
    }
    drop(served);

    for process in killed {
        process.kill();
    }
    for task in cancelled {
        task.abort();
    }
    eventually("the cancelled have gone", SOON, async || {
        let line = locks.inspect("a").await.unwrap();
        line.len() <= 21 - 3 // sessions of killed processes may have expired by now
    })
    .await;
    give_back(guard).await;

    let mut last = None;
    for expected in (1..=20).filter(|number| ![4, 5, 10, 15, 20].contains(number)) {
        let (number, token) = order.recv().await.unwrap();
        assert_eq!(number, expected);
        assert!(Some(token) > last);
        last = Some(token);
    }
    assert_eq!(order.recv().await, None);
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_frozen_holder_is_followed_and_its_late_write_is_refused(store: Store) {
    let resource = FencedResource::default();
    let mut frozen = holder(&store, "a", Duration::from_secs(1));
    let old = frozen.acquire();
    resource.write(old).unwrap();
    frozen.process().freeze();

    let next = store
        .client()
        .mutex("a")
        .wait(SOON)
        .acquire()
        .await
        .unwrap();
    resource.write(next.grant_id().as_u64()).unwrap();
    frozen.process().thaw();

    assert!(!frozen.is_valid(), "two valid holders");
    assert!(resource.write(old).is_err());
    assert_eq!(frozen.release(), "AlreadyLost");
    assert!(next.is_valid());
    give_back(next).await;
    // After the thaw the process works again, with a new session if the store has sessions.
    assert!(frozen.acquire() > old);
}

/// The `main` of this process returns right after its guard is dropped.
async fn a_process_that_ends_with_a_guard_leaves_no_lock(store: Store) {
    for _ in 0..3 {
        let mut ending = holder(&store, "a", Duration::from_secs(60));
        ending.acquire();
        ending.finish(SOON);

        assert_nothing_left(&store, &store.client(), "a").await;
    }
}

/// Processes are killed one after another, while they enqueue, wait, hold or release.
async fn a_crowd_of_processes_that_are_killed_overlaps_nowhere(store: Store) {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        Process::start(
            Command::new(env!("CARGO_BIN_EXE_crowd"))
                .args(["a", "8", "600"])
                .arg(folder.path())
                .env("LOCK_URL", store.url())
                .env("LOCK_NAMESPACE", &store.namespace)
                // If a process stalls for longer than the lease between its check and its step, its
                // step overlaps with another one. No lock can prevent that.
                .env("LOCK_TTL", "5s")
                .env("LOCK_WAIT", "30s"),
        )
    };
    let mut random = fastrand::Rng::new();
    let mut crowd: VecDeque<Process> = (0..4).map(|_| start()).collect();
    let witness = FileWitness::in_folder(folder.path());
    // Where the tickets of a dead process end only with their leases, each kill costs five seconds.
    let ends_soon = store.timings().cuts_unheard_grants || store.capability().sessions;
    let rounds = match (tests::fact::long(), ends_soon) {
        (true, true) => 36,
        (true, false) => 15,
        (false, _) => 6,
    };
    for _ in 0..rounds {
        // The kill comes at a random moment of the next visits.
        let visits = witness.visits() + 100 + random.usize(..20);
        eventually("the crowd moves", 3 * SOON, async || {
            witness.visits() > visits
        })
        .await;
        crowd.pop_front().unwrap().kill();
        crowd.push_back(start());
    }
    crowd.into_iter().for_each(Process::kill);

    witness.assert_no_overlap();
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    println!("{} visits, {rounds} killed", tokens.len());
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens fell");
    let next = store.client().mutex("a").wait(2 * SOON).acquire().await;
    give_back(next.unwrap()).await;
}

async fn the_permits_of_a_killed_holder_are_back_after_its_lease(store: Store) {
    let ttl = Duration::from_secs(4); // a helper that stalls keeps its lease until it is killed
    let locks = store.client();
    let pool = locks.semaphore("s", 5);
    let living = pool.permits(1).acquire().await.unwrap();
    let mut dying = holder_of(&store, "permits 3 5 s", ttl);
    dying.acquire();
    let rest = pool.permits(1).try_acquire().await.unwrap();
    assert_eq!(kind(pool.permits(1).try_acquire().await), ErrorKind::Busy);
    // The waiter's renewals are 20 s apart, so only a recheck at the end of the holder's lease is
    // fast enough.
    let three = pool.permits(3).ttl(Duration::from_secs(60)).wait(3 * SOON);
    let waiter = tokio::spawn(async move { three.acquire().await.unwrap() });
    in_line(&store, &locks, "s", 3, 1).await;

    dying.kill();
    let killed = Instant::now();
    let three = waiter.await.unwrap();

    let after = awake_since(killed);
    assert!(after < ttl + moments(&store), "{after:?}");
    assert_eq!(kind(pool.permits(1).try_acquire().await), ErrorKind::Busy);
    for guard in [living, rest, three] {
        give_back(guard).await;
    }
    give_back(pool.permits(5).try_acquire().await.unwrap()).await;
}

async fn killed_readers_let_the_writer_in_after_their_leases(store: Store) {
    let locks = store.client();
    let short = Duration::from_secs(4); // a helper that stalls keeps its lease until it is killed
    let mut dying: Vec<Holder> = (0..2).map(|_| holder_of(&store, "read c", short)).collect();
    for reader in &mut dying {
        reader.acquire();
    }
    let write = locks.rwlock("c").write();
    let write = write.ttl(Duration::from_secs(60)).wait(3 * SOON);
    let waiter = tokio::spawn(async move { write.acquire().await.unwrap() });
    in_line(&store, &locks, "c", 2, 1).await;

    dying.into_iter().for_each(Holder::kill);
    let killed = Instant::now();
    give_back(waiter.await.unwrap()).await;

    let after = awake_since(killed);
    assert!(after < short + moments(&store), "{after:?}");
}
