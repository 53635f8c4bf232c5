//! Verbs that wait together: how few `WAIT`s they need, and what becomes of them when one of them is given up.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::eventually;
use tests::stores::Server as _;

use super::{client, durable, servers, tickets_at, waits};
use crate::store::{Kind, SOON, Store, begin, give_back};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        many_tasks_at_once_share_two_waits
        many_tasks_that_come_and_go_need_fewer_waits_than_locks
        a_request_costs_one_round_trip_and_a_release_no_wait
        a_request_that_is_given_up_leaves_nothing_and_takes_no_other_with_it
        a_server_that_has_forgotten_the_scripts_grants_what_is_acknowledged
        a_cut_of_either_connection_replaces_both
    ]
}

/// Polls a future once.
async fn poll_once<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await
}

async fn many_tasks_at_once_share_two_waits(_: Store) {
    const TASKS: usize = 64;
    let (master, replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();
    let before = waits(&master);

    // All are asked for in the first poll. The first go out at once, and the rest when their WAIT is over.
    let acquires = (0..TASKS).map(|task| locks.mutex(format!("n{task}")));
    let acquires: Vec<_> = acquires.collect();
    let mut all = Box::pin(join_all(acquires.iter().map(|lock| lock.acquire())));
    assert!(!poll_once(&mut all).await);
    tickets_at(&master, "n0", 1).await;
    replicas[0].thaw();

    let guards = all.await;
    assert_eq!(guards.len(), TASKS);
    assert!(waits(&master) - before <= 2, "{}", waits(&master) - before);
    for guard in guards {
        give_back(guard.unwrap()).await;
    }
}

/// Each WAIT serves at least the verbs that have come during the one before. With 64 tasks on one connection there are
/// dozens of them: the bound leaves room for a machine that runs the tasks one by one.
async fn many_tasks_that_come_and_go_need_fewer_waits_than_locks(_: Store) {
    const TASKS: u64 = 64;
    const ROUNDS: u64 = 20;
    let (master, _replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let before = waits(&master);

    let tasks = (0..TASKS).map(|task| {
        let lock = locks.mutex(format!("n{task}"));
        tokio::spawn(async move {
            for _ in 0..ROUNDS {
                give_back(lock.acquire().await.unwrap()).await;
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }

    let waits = waits(&master) - before;
    println!("{} locks, {waits} WAITs", TASKS * ROUNDS);
    assert!(waits <= TASKS * ROUNDS / 4, "{waits}");
}

async fn a_request_costs_one_round_trip_and_a_release_no_wait(_: Store) {
    const PAIRS: u64 = 200;
    let (master, _replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let before = master.command_stats();

    let durable = pairs(&locks, PAIRS).await;

    let calls = master.command_stats_since(&before);
    let count = |command: &str| *calls.get(command).unwrap_or(&0);
    assert_eq!((count("evalsha"), count("wait")), (2 * PAIRS, PAIRS));
    // The same server, asked in the same run.
    let plain = client(&master.url());
    give_back(plain.mutex("a").acquire().await.unwrap()).await;
    let plain = pairs(&plain, PAIRS).await;
    println!("the median of {PAIRS} pairs: {durable:?}, without durability {plain:?}");
}

/// Takes and releases a lock so many times. Returns the median time of a pair.
async fn pairs(locks: &Locks, count: u64) -> Duration {
    let mut took = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        took.push(began.elapsed());
    }
    took.sort_unstable();
    took[took.len() / 2]
}

async fn a_request_that_is_given_up_leaves_nothing_and_takes_no_other_with_it(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    replicas[0].freeze();
    let kept = begin(locks.mutex("kept"));
    tickets_at(&master, "kept", 1).await;
    // These two go out together, behind the first.
    let (dropped, kept_too) = (
        begin(locks.mutex("dropped")),
        begin(locks.mutex("kept too")),
    );
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    let sent_and_dropped = client(&durable(&master, 1));
    let lock = sent_and_dropped.mutex("sent and dropped");
    let sent = begin(lock);
    tickets_at(&master, "sent and dropped", 1).await;
    sent.abort();
    assert!(sent.await.unwrap_err().is_cancelled());

    replicas[0].thaw();

    for guard in [kept, kept_too] {
        give_back(guard.await.unwrap().unwrap()).await;
    }
    for name in ["dropped", "sent and dropped"] {
        tickets_at(&master, name, 0).await;
    }
    eventually("nothing is left", SOON, async || {
        master.litter_but_marks("test").is_empty()
    })
    .await;
}

async fn a_server_that_has_forgotten_the_scripts_grants_what_is_acknowledged(_: Store) {
    let (master, replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    master.command::<()>(&["SCRIPT", "FLUSH"]);
    replicas[0].freeze();
    let scripts = || *master.command_stats().get("evalsha").unwrap_or(&0);
    let before = scripts();
    let acquire = begin(locks.mutex("a"));
    eventually("it was asked for", SOON, async || scripts() > before).await;
    assert!(!acquire.is_finished());

    replicas[0].thaw();

    let guard = acquire.await.unwrap().unwrap();
    assert!(!replicas[0].litter("test").is_empty(), "not at the replica");
    give_back(guard).await;
}

/// With one of them alone, requests or wake-ups would be lost.
async fn a_cut_of_either_connection_replaces_both(_: Store) {
    let (master, _replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    // By what each of them has sent last.
    for last in ["cmd=wait", "cmd=evalsha"] {
        let clients = || master.command::<String>(&["CLIENT", "LIST", "TYPE", "normal"]);
        let pubsub = || master.command::<String>(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        let ids = |list: String| {
            let id = |line: &str| line.split([' ', '=']).nth(1).map(str::to_owned);
            let ours = list.lines().filter(|line| !line.contains("user=harness"));
            ours.filter_map(id).collect::<Vec<_>>()
        };
        let all = || [ids(clients()), ids(pubsub())].concat();
        // Those of the client before this one, and the replaced ones, end a little later than their users.
        eventually("only ours are there", SOON, async || all().len() == 2).await;
        let before = all();
        let line = [clients(), pubsub()].concat();
        let line = line.lines().find(|line| line.contains(last)).unwrap();
        let id = line.split([' ', '=']).nth(1).unwrap();
        master.command::<()>(&["CLIENT", "KILL", "ID", id]);

        eventually("both are gone", SOON, async || {
            all().iter().all(|id| !before.contains(id))
        })
        .await;
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }
}
