//! Measures how many leases one process keeps, for example `leases redis --leases 100000 --busy 2`.
//!
//! One client takes the leases, each of a name of its own, and holds them for some seconds. Some of
//! them may be lost meanwhile. The program can make this harder: with a longer way to the server,
//! with other programs on the processors, and by ending all connections. The server is started for
//! this run and ends with it. It can also let many tasks of the same client wait, strictly in order,
//! for one more lock that is held.
//!
//! The program prints one line per figure. The least remaining time is that of any lease that was
//! not lost. The processor time of the client contains that of the proxy, if there is one.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use lockcore::{Error, Fair, Guard, Locks, Wait};
use tests::child::LeashedChild;
use tests::measure::{cpu_seconds, cpu_seconds_of, resident_kb};
use tests::redis_server::RedisServer;
use tests::stores::{self, Server, Store};
use tests::zookeeper_server::ZooKeeperServer;
use tokio::task::JoinSet;

/// How many leases are taken at the same time.
const AT_A_TIME: usize = 500;
/// How often the remaining time of every lease is read.
const LOOK: Duration = Duration::from_millis(250);

/// Takes many leases in one process, and counts those that are lost.
#[derive(Parser)]
struct Arguments {
    /// The store, for example memory, redis, sqlite or zookeeper
    store: String,
    /// Number of leases
    #[arg(long, default_value_t = 100_000)]
    leases: usize,
    /// The ttl of each lease
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    ttl: Duration,
    /// How long the leases are held after the last was taken
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    hold: Duration,
    /// The round trip to the server, which a proxy adds
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    round_trip: Duration,
    /// How many times all connections are ended while the leases are held, a second apart
    #[arg(long, default_value_t = 0)]
    kills: u32,
    /// Number of endless loops beside this process, from the time when the leases are taken
    #[arg(long, default_value_t = 0)]
    busy: usize,
    /// The endless loops begin before the first lease is taken
    #[arg(long)]
    busy_from_the_start: bool,
    /// Number of tasks that ask for one more lock when the leases are taken
    #[arg(long, default_value_t = 0)]
    waiters: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let named = |store: &&dyn Store| arguments.store == store.name();
    let Some(store) = stores::by_url().find(named) else {
        let names: Vec<_> = stores::by_url().map(Store::name).collect();
        eprintln!("leases: the stores are {}", names.join(", "));
        return ExitCode::from(2);
    };
    if let Err(reason) = store.available() {
        eprintln!("leases: {reason}");
        return ExitCode::FAILURE;
    }
    measure(&arguments, &*store.start_for_load()).await;
    ExitCode::SUCCESS
}

async fn measure(arguments: &Arguments, server: &dyn Server) {
    let proxied = (!arguments.round_trip.is_zero()).then(|| {
        let process = server.process().expect("a store with a server");
        let (proxy, url) = process.through_a_proxy();
        proxy.delay(arguments.round_trip / 2, arguments.round_trip / 2);
        (proxy, url)
    });
    let url = proxied.as_ref().map(|(_, url)| url.clone());
    let mut builder = Locks::builder().ttl(arguments.ttl);
    if arguments.waiters > 0 {
        builder = builder.fair(Fair::Strict);
    }
    let locks = builder.url(url.unwrap_or_else(|| server.url())).build();
    let locks = locks.unwrap();
    println!("load before: {}", load());

    let busy = |from_the_start: bool| {
        let begins = arguments.busy_from_the_start == from_the_start;
        let loops = 0..if begins { arguments.busy } else { 0 };
        loops.map(|_| endless_loop()).collect::<Vec<_>>()
    };
    let _from_the_start = busy(true);
    let began = Instant::now();
    let held = take(&locks, arguments.leases).await;
    println!("taken: {} in {:.1?}", held.len(), began.elapsed());
    println!("lost while taken: {}", lost(&held));

    let crowd = crowd(&locks, arguments.waiters).await;
    let _from_now_on = busy(false);
    let (began, cpu, of_server) = (Instant::now(), cpu_seconds(), cpu_of(server));
    let (mut kills, mut least) = (0, arguments.ttl);
    while began.elapsed() < arguments.hold {
        if kills < arguments.kills && began.elapsed() >= kills * Duration::from_secs(1) {
            kill_connections(server);
            kills += 1;
        }
        tokio::time::sleep(LOOK).await;
        let valid = held.iter().filter(|guard| guard.is_valid());
        let remaining = valid.map(|guard| guard.held().remaining()).min();
        least = least.min(remaining.unwrap_or_default());
    }
    let seconds = began.elapsed().as_secs_f64();
    let percent = |cpu: f64| 100.0 * cpu / seconds;
    println!("lost: {} of {}", lost(&held), held.len());
    println!("least remaining time: {least:.2?} of {:?}", arguments.ttl);
    println!(
        "processor time of the client: {:.0} %",
        percent(cpu_seconds() - cpu)
    );
    println!(
        "processor time of the server: {:.0} %",
        percent(cpu_of(server) - of_server)
    );
    println!("memory of the client: {} MB", resident_kb() / 1_000);
    println!("load after: {}", load());
    if let Some(crowd) = crowd {
        crowd.disperse(&locks).await;
    }
    // Giving the leases back is not measured. The server ends, and they end with it.
    std::process::exit(0);
}

async fn take(locks: &Locks, leases: usize) -> Vec<Guard> {
    let mut taking = JoinSet::new();
    for task in 0..AT_A_TIME {
        let locks = locks.clone();
        taking.spawn(async move {
            let mut held = Vec::new();
            for number in (task..leases).step_by(AT_A_TIME) {
                match locks.mutex(format!("lease:{number}")).acquire().await {
                    Ok(guard) => held.push(guard),
                    Err(error) => eprintln!("leases: {error}"),
                }
            }
            held
        });
    }
    taking.join_all().await.into_iter().flatten().collect()
}

/// Tasks that wait for one lock, and the guard of the first that has it.
struct Crowd {
    first: Guard,
    waiting: JoinSet<Result<Guard, Error>>,
}

/// Takes one lock, and begins to wait for it in this number of tasks.
async fn crowd(locks: &Locks, waiters: usize) -> Option<Crowd> {
    if waiters == 0 {
        return None;
    }
    let lock = locks.mutex("crowd").wait(Wait::Forever);
    let first = lock.acquire().await.unwrap();
    let waiting = (0..waiters).map(|_| {
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    Some(Crowd {
        first,
        waiting: waiting.collect(),
    })
}

impl Crowd {
    /// Ends the waiting, and prints what had become of it by then. Prints how long it takes until
    /// nothing of the crowd is in line.
    async fn disperse(mut self, locks: &Locks) {
        let mut refused: BTreeMap<String, usize> = BTreeMap::new();
        while let Some(ended) = self.waiting.try_join_next() {
            let ended = ended
                .unwrap()
                .map_or_else(|error| error.to_string(), |_| "held".into());
            *refused.entry(ended).or_default() += 1;
        }
        println!("holder of the crowd: valid {}", self.first.is_valid());
        println!("waiting: {}, not any more: {refused:?}", self.waiting.len());
        self.waiting.shutdown().await;
        let (began, mut left) = (Instant::now(), usize::MAX);
        while left > 1 && began.elapsed() < Duration::from_secs(60) {
            tokio::time::sleep(LOOK).await;
            let line = locks.inspect("crowd").await;
            left = line.map_or(left, |line| line.len());
        }
        println!("in line after {:.1?}: {left}", began.elapsed());
    }
}

fn lost(held: &[Guard]) -> usize {
    held.iter().filter(|guard| !guard.is_valid()).count()
}

/// Ends all connections of clients. Does nothing at a store without a server.
fn kill_connections(server: &dyn Server) {
    if let Some(redis) = server.downcast::<RedisServer>() {
        for kind in ["normal", "pubsub"] {
            let _: i64 = redis.command(&["CLIENT", "KILL", "TYPE", kind]);
        }
    } else {
        eprintln!("leases: only the connections of redis can be killed");
    }
}

fn cpu_of(server: &dyn Server) -> f64 {
    let redis = server.downcast::<RedisServer>().map(RedisServer::pid);
    let zookeeper = server.downcast().map(ZooKeeperServer::pid);
    redis.or(zookeeper).map_or(0.0, cpu_seconds_of)
}

fn endless_loop() -> LeashedChild {
    let mut command = Command::new("sh");
    command.args(["-c", "while :; do :; done"]);
    LeashedChild::spawn(command.stdin(Stdio::null()), None).unwrap()
}

/// The load average of the last minute.
fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}
