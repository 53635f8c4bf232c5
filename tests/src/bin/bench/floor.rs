//! The code that all floors share. A floor is the least that a lock can cost at a store. One part
//! of this file measures pairs of acquire and release, of one task and of many tasks. The other
//! part measures hand-overs of a thing that many tasks contend for, or that two processes hand to
//! each other. The files `floor_*.rs` define what is acquired and released at each store.
//!
//! Contenders run in processes of their own and obey the same commands as `load`.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Subcommand;
use tests::measure::{Durations, cpu_seconds, now};
use tests::turns::{self, Contention, Turn};
use tokio::runtime::Runtime;
use tokio::task::{JoinSet, coop};

use crate::store::scheme;
use crate::terms;

/// The number of keys of a pair, as in `load`.
const KEYS: usize = 256;

/// The floor of one store. It is the least that a lock can cost there, or the cost of a lock that
/// is built with the store's client library.
pub(crate) struct Floor {
    /// Warms the server up before the first measurement.
    pub(crate) warm_up: Option<fn(url: &str)>,
    /// Measures `times` round trips. Returns the time of one in microseconds.
    pub(crate) ping: Option<fn(url: String, times: usize) -> f64>,
    /// The name of what the floor measures in place of a pair of acquire and release: see [`pairs`]
    /// and [`many`].
    pub(crate) pair: &'static str,
    pub(crate) pairs: fn(url: String, pairs: usize, cold: bool) -> f64,
    pub(crate) many: fn(url: String, tasks: usize, secs: f64) -> f64,
    /// The name of the thing that the floor hands over in place of a lock.
    pub(crate) turn: &'static str,
    pub(crate) turns: Turns,
    /// The name of a second thing to hand over, if there is one. Its keys begin with [`SECOND`].
    pub(crate) second: Option<&'static str>,
}

/// The beginning of the keys of a [second](Floor::second) thing.
pub(crate) const SECOND: &str = "second-";

/// Which tasks hand the thing over.
pub(crate) enum Turns {
    /// Tasks of this process. The arguments are their number and a duration. Returns true
    /// hand-overs per second.
    Here(fn(tasks: usize, secs: f64) -> f64),
    /// Tasks of processes that this program starts: see [`Process`].
    OfProcesses {
        contend: fn(&Runtime, url: &str, key: &str, tasks: usize, secs: f64, out: &Path),
        obey: fn(&Runtime, url: &str, key: &str),
    },
}

/// Acquires and releases a key that no other task uses.
pub(crate) trait Pair: Clone + Send + 'static {
    fn pair(&mut self, key: &str) -> impl Future<Output = ()> + Send;
}

/// One task's access to a thing that only one task can have at a time.
pub(crate) trait Token: Send + 'static {
    fn take(&mut self) -> impl Future<Output = ()> + Send;
    fn give_back(&mut self) -> impl Future<Output = ()> + Send;
}

/// Acquires and releases in one task: over 256 keys, or with each key once if `cold`. Returns the
/// p50 in microseconds.
pub(crate) fn pairs<L: Pair>(
    lock: impl Future<Output = L> + Send + 'static,
    pairs: usize,
    cold: bool,
) -> f64 {
    on_a_runtime(async move {
        let mut lock = lock.await;
        let run = now();
        let keys = if cold { pairs } else { KEYS };
        let keys: Vec<String> = (0..keys).map(|i| format!("raw{run}-{i}")).collect();
        if cold {
            lock.pair("warm-up").await;
        } else {
            for key in &keys {
                lock.pair(key).await;
            }
        }
        let mut took = Vec::with_capacity(pairs);
        let mut began = now();
        for key in keys.iter().cycle().take(pairs) {
            lock.pair(key).await;
            let ended = now();
            took.push(ended - began);
            began = ended;
        }
        Durations::new(took).percentile_us(50)
    })
}

/// The pairs per second of many tasks, each with its own key.
pub(crate) fn many<L: Pair>(
    lock: impl Future<Output = L> + Send + 'static,
    tasks: usize,
    secs: f64,
) -> f64 {
    on_a_runtime(async move {
        let lock = lock.await;
        let end = now() + (secs * 1e9) as u64;
        let mut working: JoinSet<usize> = (0..tasks)
            .map(|task| {
                let (mut lock, key) = (lock.clone(), format!("raw{task}"));
                async move {
                    let mut pairs = 0;
                    while now() < end {
                        lock.pair(&key).await;
                        pairs += 1;
                        // `load` does the same: memory answers at once, so without this call a task
                        // would never let other tasks use its thread.
                        coop::consume_budget().await;
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

/// True hand-overs per second of tasks in this process.
pub(crate) fn contend_here<T: Token>(tokens: Vec<T>, secs: f64) -> f64 {
    on_a_runtime(async move {
        let start = now();
        let turns = take_turns(tokens, start + (secs * 1e9) as u64).await;
        Contention::of(&turns, start, secs).true_hand_overs_s
    })
}

async fn take_turns<T: Token>(tokens: Vec<T>, end: u64) -> Vec<Turn> {
    let mut working: JoinSet<Vec<Turn>> = (0..)
        .zip(tokens)
        .map(|(task, mut token)| async move {
            let mut turns = Vec::new();
            loop {
                let asked = now();
                if asked >= end {
                    return turns;
                }
                token.take().await;
                turns.push(Turn {
                    asked,
                    acquired: now(),
                    release_called: now(),
                    task,
                });
                token.give_back().await;
            }
        })
        .collect();
    let mut turns = Vec::new();
    while let Some(done) = working.join_next().await {
        turns.extend(done.unwrap());
    }
    turns
}

/// A part of a floor that runs in a process of its own, started from this program.
#[derive(Subcommand)]
pub(crate) enum Process {
    /// The floor of `load URL w3`
    #[command(hide = true)]
    FloorContend {
        url: String,
        tasks: usize,
        secs: f64,
        key: String,
        out: PathBuf,
    },
    /// The floor of `load URL w5`
    #[command(hide = true)]
    FloorObey { url: String, key: String },
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

fn this_program(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments);
    command
}

impl Process {
    pub(crate) fn run(self) {
        let runtime = runtime();
        let turns = |url: &str| terms::of(scheme(url)).floor.map(|floor| &floor.turns);
        let url = match &self {
            Self::FloorContend { url, .. } | Self::FloorObey { url, .. } => url,
        };
        let Some(Turns::OfProcesses { contend, obey }) = turns(url) else {
            panic!("no floor of processes at {}", scheme(url));
        };
        match &self {
            Self::FloorContend {
                url,
                tasks,
                secs,
                key,
                out,
            } => contend(&runtime, url, key, *tasks, *secs, out),
            Self::FloorObey { url, key } => obey(&runtime, url, key),
        }
    }
}

/// Acts like `load URL w3`, with one of these tokens for each task.
pub(crate) fn contend_when_told<T: Token>(
    runtime: &Runtime,
    tokens: impl Future<Output = Vec<T>>,
    secs: f64,
    out: &Path,
) {
    runtime.block_on(async { contend_with(tokens.await, secs, out).await });
}

async fn contend_with<T: Token>(tokens: Vec<T>, secs: f64, out: &Path) {
    let mut driver = io::stdin().lines();
    say("READY");
    let start: u64 = driver.next().unwrap().unwrap().parse().unwrap();
    tokio::time::sleep(Duration::from_nanos(start.saturating_sub(now()))).await;
    let cpu = cpu_seconds();
    let turns = take_turns(tokens, start + (secs * 1e9) as u64).await;
    let cpu = cpu_seconds() - cpu;
    let mut file = BufWriter::new(File::create(out).unwrap());
    turns::write(&turns, &mut file).unwrap();
    file.flush().unwrap();
    let acquisitions = turns.len();
    let report = serde_json::json!({"errors": 0, "acquisitions": acquisitions, "cpu_s": cpu});
    say(&report.to_string());
    // The process stays until its input ends. A library may still release something in a task of
    // its own, and other processes wait for this release.
    driver.for_each(drop);
}

/// Acts like `load URL w5`, with the first of these tokens.
pub(crate) fn obey_here<T: Token>(runtime: &Runtime, tokens: impl Future<Output = Vec<T>>) {
    let mut token = runtime.block_on(tokens).remove(0);
    say("READY");
    for line in io::stdin().lines() {
        let acquires = line.unwrap() == "a";
        // The work runs on the runtime's own threads, as in `load`.
        let done = runtime.spawn(async move {
            let before = now();
            match acquires {
                true => token.take().await,
                false => token.give_back().await,
            }
            (token, before, now())
        });
        let (after, before, time) = runtime.block_on(done).unwrap();
        token = after;
        match acquires {
            true => say(&format!("A {time}")),
            false => say(&format!("R {before} {time}")),
        }
    }
    say(r#"{"errors": 0}"#);
}

/// Runs work on the threads of a runtime, as `load` does.
pub(crate) fn on_a_runtime<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let runtime = runtime();
    runtime.block_on(runtime.spawn(work)).unwrap()
}

fn runtime() -> Runtime {
    Runtime::new().unwrap()
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}
