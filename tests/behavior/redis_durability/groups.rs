//! Tests of verbs that share a `WAIT`: how few `WAIT`s they need, and what happens to the other
//! verbs when the caller of one gives up.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::backend::{self, Enqueued, EventSink, Namespace};
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::stores::Server as _;

use super::{client, durable, hasty, servers, tickets_at, waits};
use crate::hostile::{random_id, request};
use crate::store::{Kind, PATIENCE, SOON, Store, begin, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_durability";
        many_tasks_at_once_share_two_waits
        many_tasks_that_come_and_go_need_fewer_waits_than_locks
        a_request_costs_one_round_trip_and_a_release_no_wait
        a_request_that_is_given_up_leaves_nothing_and_takes_no_other_with_it
        a_server_that_has_forgotten_the_scripts_grants_what_is_acknowledged
        a_cut_of_either_connection_replaces_both
        a_script_of_others_that_runs_too_long_costs_no_connection
        a_batch_with_a_lost_ticket_says_why_the_others_were_not_renewed
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

    // The first poll makes all requests. The client sends the first group at once, and the rest
    // when the `WAIT` of this group is over.
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

/// Each `WAIT` serves at least the verbs that came during the `WAIT` before it. With 64 tasks on
/// one connection these are dozens. The number that the fact requires is lower, for a machine that
/// runs the tasks one by one.
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
    locks.ready(SOON).await.unwrap(); // opens all connections
    give_back(locks.mutex("a").acquire().await.unwrap()).await; // loads the scripts
    let before = master.command_stats();

    let durable = pairs(&locks, PAIRS).await;

    let calls = master.command_stats_since(&before);
    let count = |command: &str| *calls.get(command).unwrap_or(&0);
    assert_eq!((count("evalsha"), count("wait")), (2 * PAIRS, PAIRS));
    // A client without durability at the same server, for comparison in the same run.
    let plain = client(&master.url());
    give_back(plain.mutex("a").acquire().await.unwrap()).await;
    let plain = pairs(&plain, PAIRS).await;
    println!("the median of {PAIRS} pairs: {durable:?}, without durability {plain:?}");
}

/// Acquires and releases a lock `count` times. Returns the median time of a pair.
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
    // These two requests are sent together, after the `WAIT` of the first.
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

/// A client has two connections. If only one were replaced, requests or wake-ups would be lost.
async fn a_cut_of_either_connection_replaces_both(_: Store) {
    let (master, _replicas) = servers(1).await;
    let locks = client(&durable(&master, 1));
    for last in USED {
        // The server notices the end of those that were replaced with a delay.
        let before = in_use(&master, &locks).await;
        let (id, _) = before.iter().find(|(_, line)| line.contains(last)).unwrap();
        master.command::<()>(&["CLIENT", "KILL", "ID", id]);

        eventually("both are gone", SOON, async || {
            let after = connections(&master);
            after.keys().all(|id| !before.contains_key(id))
        })
        .await;
    }
}

/// What the two connections of a caller have sent last, when it has given a lock back.
const USED: [&str; 2] = ["cmd=wait", "cmd=evalsha"];

/// The two connections of a caller. Those of the keeper may be there too, and have sent something else.
async fn in_use(master: &RedisServer, locks: &Locks) -> BTreeMap<String, String> {
    let used = async || {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        let mut all = connections(master);
        all.retain(|_, line| USED.iter().any(|last| line.contains(last)));
        all
    };
    eventually("both are in use", SOON, async || used().await.len() == 2).await;
    used().await
}

/// The connections of clients, with their ids, as the server lists them.
fn connections(master: &RedisServer) -> BTreeMap<String, String> {
    let list = |kind| master.command::<String>(&["CLIENT", "LIST", "TYPE", kind]);
    let list = ["normal", "pubsub"].map(list).concat();
    let ours = list.lines().filter(|line| !line.contains("user=harness"));
    let id = |line: &str| line.split([' ', '=']).nth(1).unwrap().to_owned();
    ours.map(|line| (id(line), line.to_owned())).collect()
}

/// While the script runs, the server answers every command with BUSY, and also `WAIT`.
async fn a_script_of_others_that_runs_too_long_costs_no_connection(_: Store) {
    let (master, _replicas) = servers(1).await;
    let locks = hasty(&durable(&master, 1)).build().unwrap();
    let before = in_use(&master, &locks).await;
    master.command::<()>(&["CONFIG", "SET", "busy-reply-threshold", "50"]);
    let url = master.url();
    let endless = std::thread::spawn(move || {
        let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
        let mut script = redis::cmd("EVAL");
        let _: Result<(), _> = script
            .arg("while true do end")
            .arg(0)
            .query(&mut connection);
    });
    eventually("the server is busy", SOON, async || {
        let refused = master.try_command::<String>(&["PING"]);
        refused.is_err_and(|error| error.code() == Some("BUSY"))
    })
    .await;

    // If the refusal comes after the operation timeout, the outcome of the operation is unknown.
    eventually("refused in time", SOON, async || {
        kind(locks.mutex("a").try_acquire().await) == ErrorKind::Unavailable
    })
    .await;
    master.command::<()>(&["SCRIPT", "KILL"]);
    endless.join().unwrap();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let after = connections(&master);
    assert!(before.keys().all(|id| after.contains_key(id)), "{after:?}");
}

/// The holder of the lost ticket learns of its loss. The keeper learns why the other ticket was not
/// renewed.
async fn a_batch_with_a_lost_ticket_says_why_the_others_were_not_renewed(store: Store) {
    let (master, replicas) = servers(1).await;
    let namespace = Namespace::new(&store.namespace).unwrap();
    let redis = backend::open(&durable(&master, 1)).unwrap();
    let connection = redis.connect(EventSink::new(1, namespace, |_| ()));
    let connection = connection.await.unwrap();
    let [lost, kept] = ["lost", "kept"].map(|name| request(&store, name, &random_id()));
    for request in [&lost, &kept] {
        let holds = connection
            .enqueue(Arc::clone(request), PATIENCE)
            .await
            .unwrap();
        assert!(matches!(holds, Enqueued::Granted { .. }), "{holds:?}");
    }
    let key = format!("{}:1:{{lost}}", store.namespace);
    assert_eq!(master.command::<u64>(&["DEL", &key]), 1);
    replicas[0].freeze();

    let error = connection
        .renew(vec![Arc::clone(&lost), kept], PATIENCE)
        .await;

    let error = error.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    assert_eq!(error.lost(), [lost.id]);
    replicas[0].thaw();
}
