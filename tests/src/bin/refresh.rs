//! How many requests one refresh of `top` takes: `refresh redis etcd --names 1000`.
//!
//! One client holds a lock of each name, and a task of another client waits at every tenth. A third
//! client lists all names with their summaries, as `top` does. Its requests go through a proxy.
//!
//! The first refresh is left out, because it connects. A request is what the proxy reads from the
//! client at once. So several requests that the client sends together may count as one, and a
//! message of the protocol that is no request counts too. Stores of one server only: the proxy does
//! not stand before the others. For Redis, the last column has the server's time in scripts.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use lockcore::{Fair, Guard, Locks, Wait};
use tests::redis_server::{RedisServer, parse_command_micros};
use tests::stores::{self, Server, Store};
use tokio::task::JoinSet;

/// No lease ends or is renewed while the program runs.
const TTL: Duration = Duration::from_secs(600);

/// How many locks are acquired or released at the same time.
const AT_A_TIME: usize = 100;

/// Counts the requests of a refresh of `top`.
#[derive(Parser)]
struct Arguments {
    /// The stores, for example redis, etcd, mysql, postgres or zookeeper
    #[arg(required = true)]
    stores: Vec<String>,
    /// Number of names in use
    #[arg(long, default_value_t = 1_000)]
    names: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    println!("store      names  pages  requests  kB sent  kB received  took  in scripts");
    for wanted in &arguments.stores {
        let Some(store) = stores::by_url().find(|store| store.name() == *wanted) else {
            let names: Vec<_> = stores::by_url().map(Store::name).collect();
            eprintln!("refresh: the stores are {}", names.join(", "));
            return ExitCode::from(2);
        };
        if let Err(reason) = store.available() {
            eprintln!("refresh: {reason}");
            return ExitCode::FAILURE;
        }
        measure(store, &arguments).await;
    }
    ExitCode::SUCCESS
}

async fn measure(store: &dyn Store, arguments: &Arguments) {
    let names = arguments.names;
    let server = store.start_for_load();
    let (proxy, url) = server.process().expect("a server").through_a_proxy();
    let client = |url: String| {
        let builder = Locks::builder().ttl(TTL).fair(Fair::Strict);
        builder.url(url).build().unwrap()
    };
    let (holder, waiter, looker) = (client(server.url()), client(server.url()), client(url));
    let held: Vec<Guard> = stream::iter(0..names)
        .map(|name| holder.mutex(format!("order:{name}")).into_future())
        .buffer_unordered(AT_A_TIME)
        .try_collect()
        .await
        .unwrap();
    let mut waiting = JoinSet::new();
    for name in (0..names).step_by(10) {
        let lock = waiter.mutex(format!("order:{name}")).wait(Wait::Forever);
        waiting.spawn(lock.into_future());
    }
    while refresh(&looker).await.waiters < waiting.len() as u64 {}

    let (began, before, scripts_before) = (Instant::now(), proxy.traffic(), in_scripts(&*server));
    let seen = refresh(&looker).await;
    let (took, after) = (began.elapsed(), proxy.traffic());
    let scripts = in_scripts(&*server).zip(scripts_before);

    assert_eq!(seen.names, names, "of {}", store.name());
    println!(
        "{:9}  {names:5}  {:5}  {:8}  {:7.1}  {:11.1}  {took:.1?}  {}",
        store.name(),
        seen.pages,
        after.chunks_up - before.chunks_up,
        (after.bytes_up - before.bytes_up) as f64 / 1e3,
        (after.bytes_down - before.bytes_down) as f64 / 1e3,
        scripts.map_or_else(String::new, |(after, before)| format!(
            "{:.1?}",
            after - before
        )),
    );
    waiting.shutdown().await;
    join_all(held.into_iter().map(Guard::release)).await;
}

/// How long a Redis server has run scripts so far.
fn in_scripts(server: &dyn Server) -> Option<Duration> {
    let redis: &RedisServer = server.downcast()?;
    let micros = parse_command_micros(&redis.command::<String>(&["INFO", "commandstats"]));
    Some(Duration::from_micros(micros["evalsha"]))
}

#[derive(Default)]
struct Seen {
    pages: u32,
    names: usize,
    waiters: u64,
}

/// Asks the store for what `top` shows.
async fn refresh(locks: &Locks) -> Seen {
    let (mut pages, mut seen) = (
        locks.list("").with_summaries().page_size(1_000),
        Seen::default(),
    );
    let mut names = Vec::new();
    while let Some(page) = pages.next().await.unwrap() {
        seen.pages += 1;
        names.extend(page);
    }
    names.sort();
    names.dedup_by(|one, other| one.name == other.name); // on Redis a name may be listed twice
    seen.names = names.len();
    let waiters = names.iter().filter_map(|used| used.summary.as_ref());
    seen.waiters = waiters.map(|line| line.waiters).sum();
    seen
}
