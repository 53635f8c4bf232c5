//! The least that a lock can cost on Redis: `SET NX` and a script that compares and deletes, without a line, a token or
//! a clock; and a token in a list that `BLPOP` hands on, without an owner. Nobody should use either as a lock.
//!
//! What contends runs in processes of its own, as `load` does, and keeps to the same words.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue, IntoConnectionInfo as _, cmd};
use tests::measure::{Durations, cpu_seconds, now};
use tests::turns::{self, Turn};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Keys of the pair, as many as `load` takes.
const KEYS: usize = 256;
const LEASE_MS: u64 = 30_000;
const DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

pub(crate) struct Floor {
    pub(crate) p50_us: f64,
}

/// `SET key id NX PX 30000`, and a compare-and-delete.
#[derive(Clone)]
pub(crate) struct RawLock {
    connection: MultiplexedConnection,
    delete: Arc<str>,
}

impl RawLock {
    /// One task, over 256 keys, or every key once.
    pub(crate) fn pairs(url: &str, pairs: usize, cold: bool) -> Floor {
        let keys = if cold { pairs } else { KEYS };
        let keys: Vec<String> = (0..keys).map(|i| format!("raw{}-{i}", now())).collect();
        on_a_runtime(url, async move |connection| {
            let mut lock = Self::new(connection).await;
            for key in keys.iter().take(KEYS) {
                lock.pair(key, 0).await;
            }
            let mut took = Vec::with_capacity(pairs);
            let mut began = now();
            for (i, key) in keys.iter().cycle().take(pairs).enumerate() {
                lock.pair(key, i).await;
                let ended = now();
                took.push(ended - began);
                began = ended;
            }
            Floor {
                p50_us: Durations::new(took).percentile_us(50),
            }
        })
    }

    /// The time of a round trip, in microseconds.
    pub(crate) fn ping(url: &str, times: usize) -> f64 {
        on_a_runtime(url, async move |mut connection| {
            let mut took = Vec::with_capacity(times);
            let mut began = now();
            for _ in 0..times {
                let _: String = ask(&mut connection, &cmd("PING")).await;
                let ended = now();
                took.push(ended - began);
                began = ended;
            }
            Durations::new(took).percentile_us(50)
        })
    }

    /// Pairs a second of many tasks on one connection, each with a key of its own.
    pub(crate) fn many(url: &str, tasks: usize, secs: f64) -> f64 {
        on_a_runtime(url, async move |connection| {
            let lock = Self::new(connection).await;
            let end = now() + (secs * 1e9) as u64;
            let mut working: JoinSet<usize> = (0..tasks)
                .map(|task| {
                    let (mut lock, key) = (lock.clone(), format!("raw{task}"));
                    async move {
                        let mut pairs = 0;
                        while now() < end {
                            lock.pair(&key, pairs).await;
                            pairs += 1;
                        }
                        pairs
                    }
                })
                .collect();
            let mut pairs = 0;
            while let Some(done) = working.join_next().await {
                pairs += done.unwrap();
            }
            pairs as f64 / secs
        })
    }

    async fn new(mut connection: MultiplexedConnection) -> Self {
        let load = cmd("SCRIPT").arg("LOAD").arg(DELETE).to_owned();
        let delete: String = ask(&mut connection, &load).await;
        Self {
            connection,
            delete: delete.into(),
        }
    }

    async fn pair(&mut self, key: &str, number: usize) {
        // As long as an id that nobody else draws.
        let id = format!("{number:032x}");
        let mut set = cmd("SET");
        set.arg(key).arg(&id).arg("NX").arg("PX").arg(LEASE_MS);
        let set: Option<String> = ask(&mut self.connection, &set).await;
        assert_eq!(set.as_deref(), Some("OK"));
        let mut delete = cmd("EVALSHA");
        delete.arg(&*self.delete).arg(1).arg(key).arg(&id);
        let deleted: u32 = ask(&mut self.connection, &delete).await;
        assert_eq!(deleted, 1);
    }
}

/// What runs in a process of its own, started by this program.
#[derive(Subcommand)]
pub(crate) enum Process {
    /// As `load URL w3`, with a list instead of a lock
    #[command(hide = true)]
    FloorContend {
        url: String,
        tasks: u64,
        secs: f64,
        key: String,
        out: PathBuf,
    },
    /// As `load URL w5`
    #[command(hide = true)]
    FloorObey { url: String, key: String },
}

fn this_program(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments);
    command
}

pub(crate) fn contend(url: &str, tasks: usize, secs: f64, key: &str, out: &Path) -> Command {
    let (tasks, secs) = (tasks.to_string(), secs.to_string());
    let mut command = this_program(&["floor-contend", url, &tasks, &secs, key]);
    command.arg(out);
    command
}

pub(crate) fn obey(url: &str, key: &str) -> Command {
    this_program(&["floor-obey", url, key])
}

impl Process {
    pub(crate) fn run(self) {
        match self {
            Self::FloorContend {
                url,
                tasks,
                secs,
                key,
                out,
            } => runtime().block_on(contend_here(&url, tasks, secs, &key, &out)),
            Self::FloorObey { url, key } => obey_here(&url, &key),
        }
    }
}

async fn contend_here(url: &str, tasks: u64, secs: f64, key: &str, out: &Path) {
    let client = client(url);
    let mut lists = Vec::new();
    for task in 0..tasks {
        // A pop blocks its connection, so that each task has its own.
        lists.push((task, List::new(connect(&client).await, key)));
    }
    say("READY");
    let start: u64 = io::stdin()
        .lines()
        .next()
        .unwrap()
        .unwrap()
        .parse()
        .unwrap();
    tokio::time::sleep(Duration::from_nanos(start.saturating_sub(now()))).await;
    let cpu = cpu_seconds();
    let end = start + (secs * 1e9) as u64;
    let mut working: JoinSet<Vec<Turn>> = lists
        .into_iter()
        .map(|(task, mut list)| async move {
            let mut turns = Vec::new();
            loop {
                let asked = now();
                if asked >= end {
                    return turns;
                }
                list.pop().await;
                let acquired = now();
                turns.push(Turn {
                    asked,
                    acquired,
                    release_called: now(),
                    task,
                });
                list.push().await;
            }
        })
        .collect();
    let mut turns = Vec::new();
    while let Some(done) = working.join_next().await {
        turns.extend(done.unwrap());
    }
    let cpu = cpu_seconds() - cpu;
    let mut file = BufWriter::new(File::create(out).unwrap());
    turns::write(&turns, &mut file).unwrap();
    file.flush().unwrap();
    let acquisitions = turns.len();
    let report = serde_json::json!({"errors": 0, "acquisitions": acquisitions, "cpu_s": cpu});
    say(&report.to_string());
}

fn obey_here(url: &str, key: &str) {
    let runtime = runtime();
    let mut list = runtime.block_on(async { List::new(connect(&client(url)).await, key) });
    for line in io::stdin().lines() {
        let acquires = line.unwrap() == "a";
        // On the runtime's own threads, as in `load`.
        let done = runtime.spawn(async move {
            let before = now();
            match acquires {
                true => list.pop().await,
                false => list.push().await,
            }
            (list, before, now())
        });
        let (after, before, time) = runtime.block_on(done).unwrap();
        list = after;
        match acquires {
            true => say(&format!("A {time}")),
            false => say(&format!("R {before} {time}")),
        }
    }
    say(r#"{"errors": 0}"#);
}

/// A token in a list: who has popped it may work.
struct List {
    connection: MultiplexedConnection,
    pop: Cmd,
    push: Cmd,
}

impl List {
    fn new(connection: MultiplexedConnection, key: &str) -> Self {
        Self {
            connection,
            pop: cmd("BLPOP").arg(key).arg(0).to_owned(),
            push: cmd("LPUSH").arg(key).arg("token").to_owned(),
        }
    }

    async fn pop(&mut self) {
        let _: (String, String) = ask(&mut self.connection, &self.pop).await;
    }

    async fn push(&mut self) {
        let _: u64 = ask(&mut self.connection, &self.push).await;
    }
}

async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, command: &Cmd) -> T {
    command.query_async(connection).await.unwrap()
}

/// One connection, and a task on the threads of a runtime, as in `load`.
fn on_a_runtime<T: Send + 'static, F>(
    url: &str,
    work: impl FnOnce(MultiplexedConnection) -> F + Send + 'static,
) -> T
where
    F: Future<Output = T> + Send + 'static,
{
    let (runtime, client) = (runtime(), client(url));
    runtime
        .block_on(runtime.spawn(async move { work(connect(&client).await).await }))
        .unwrap()
}

fn runtime() -> Runtime {
    Runtime::new().unwrap()
}

fn client(url: &str) -> Client {
    let info = url.into_connection_info().unwrap();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Client::open(info.set_tcp_settings(tcp)).unwrap()
}

async fn connect(client: &Client) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .unwrap()
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}
