//! Other lock libraries in the modes `w1`, `w2` and `w3` of the program `load`, with the same
//! output.
//!
//! ```text
//! cargo build --release --manifest-path tests/peers/Cargo.toml --target-dir target
//! peers redis://127.0.0.1/ w1 20000
//! ```
//!
//! So far there is one library, rslock. Its lock is a key that `SET NX PX` sets on one server, or on
//! a majority of several servers (`redlock://host,host,host`). If another task holds it, rslock
//! tries again every 200 ms. `--poll` sets a shorter pause.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fs::File;
use std::io::{BufRead as _, BufWriter, Write as _};
use std::time::Duration;

use clap::{Parser, Subcommand};
use rslock::{LockError, LockManager};
use serde_json::{Value, json};
use tests::measure::{Durations, cpu_seconds, now, seconds};
use tests::turns::{self, Turn};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The same lease as in `load`.
const LEASE: Duration = Duration::from_secs(30);
const KEYS: usize = 256;
const GRACE: Duration = Duration::from_secs(1);

/// Drives rslock in one way; the last line of the output is one JSON object with what it took.
#[derive(Parser)]
struct Arguments {
    /// As redis://host or redlock://host,host,host
    url: String,
    #[command(subcommand)]
    mode: Mode,
    /// How many milliseconds a task waits before it looks again
    #[arg(long, global = true)]
    poll: Option<u64>,
}

#[derive(Subcommand)]
enum Mode {
    W1 {
        n: usize,
        cold: Option<String>,
    },
    W2 {
        tasks: usize,
        secs: f64,
    },
    W3 {
        tasks: usize,
        secs: f64,
        key: String,
        start: u64,
        out: String,
    },
}

/// One task's measurements, in nanoseconds.
#[derive(Default)]
struct Record {
    lock: Vec<u64>,
    unlock: Vec<u64>,
    errors: u64,
}

impl Record {
    async fn pair(&mut self, locks: &LockManager, key: &str) {
        let began = now();
        match locks.lock(key.as_bytes(), LEASE).await {
            Ok(lock) => {
                let held = now();
                locks.unlock(&lock).await;
                self.lock.push(held - began);
                self.unlock.push(now() - held);
            }
            Err(_) => self.errors += 1,
        }
    }

    fn merge(&mut self, other: Self) {
        self.lock.extend(other.lock);
        self.unlock.extend(other.unlock);
        self.errors += other.errors;
    }

    fn figures(self, nanos: u64) -> Value {
        let pairs = self.lock.len();
        let whole = Durations::new(
            self.lock
                .iter()
                .zip(&self.unlock)
                .map(|(lock, unlock)| lock + unlock),
        );
        json!({
            "pairs": pairs,
            "pairs_s": (pairs as f64 / seconds(nanos.max(1))).round(),
            "p50_us": whole.percentile_us(50),
            "p99_us": whole.percentile_us(99),
            "lock_p50_us": Durations::new(self.lock).percentile_us(50),
            "unlock_p50_us": Durations::new(self.unlock).percentile_us(50),
            "errors": self.errors,
        })
    }
}

async fn one_client(locks: LockManager, n: usize, cold: bool) -> Value {
    let run = now();
    let keys: Vec<String> = match cold {
        true => (0..n).map(|i| format!("peer{run}-{i}")).collect(),
        false => (0..KEYS).map(|i| format!("peer-{i}")).collect(),
    };
    let mut untimed = Record::default();
    untimed.pair(&locks, "warm-up").await;
    if !cold {
        for key in &keys {
            untimed.pair(&locks, key).await;
        }
    }
    let mut record = Record::default();
    let began = now();
    for key in keys.iter().cycle().take(n) {
        record.pair(&locks, key).await;
    }
    record.figures(now() - began)
}

async fn many_clients(locks: LockManager, tasks: usize, secs: f64) -> Value {
    let mut all = Record::default();
    all.pair(&locks, "warm-up").await;
    all = Record::default();
    let began = now();
    let end = began + (secs * 1e9) as u64;
    let mut working: JoinSet<Record> = (0..tasks)
        .map(|task| {
            let (locks, key) = (locks.clone(), format!("peer{task}"));
            async move {
                let mut record = Record::default();
                while now() < end {
                    record.pair(&locks, &key).await;
                }
                record
            }
        })
        .collect();
    while let Some(record) = working.join_next().await {
        all.merge(record.unwrap());
    }
    all.figures(now() - began)
}

async fn contend(
    locks: LockManager,
    tasks: usize,
    secs: f64,
    key: String,
    start: u64,
    out: &str,
) -> Value {
    Record::default()
        .pair(&locks, &format!("warm-up{}", std::process::id()))
        .await;
    println!("READY");
    let start = match start {
        0 => {
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).unwrap();
            line.trim().parse().unwrap()
        }
        start => start,
    };
    tokio::time::sleep(Duration::from_nanos(start.saturating_sub(now()))).await;
    let cpu = cpu_seconds();
    let end = start + (secs * 1e9) as u64;
    let mut working: JoinSet<(Vec<Turn>, u64)> = (0..tasks as u64)
        .map(|task| {
            let (locks, key) = (locks.clone(), key.clone());
            async move {
                let (mut turns, mut errors) = (Vec::new(), 0);
                let left = Duration::from_nanos(end.saturating_sub(now()));
                let _ = timeout(
                    left + GRACE,
                    take_turns(&locks, &key, task, end, &mut turns, &mut errors),
                )
                .await;
                (turns, errors)
            }
        })
        .collect();
    let (mut all, mut errors) = (Vec::new(), 0);
    while let Some(done) = working.join_next().await {
        let (turns, failed) = done.unwrap();
        all.extend(turns);
        errors += failed;
    }
    let cpu = cpu_seconds() - cpu;
    if out != "-" {
        let mut file = BufWriter::new(File::create(out).unwrap());
        turns::write(&all, &mut file).unwrap();
        file.flush().unwrap();
    }
    json!({"acquisitions": all.len(), "cpu_s": cpu, "errors": errors})
}

async fn take_turns(
    locks: &LockManager,
    key: &str,
    task: u64,
    end: u64,
    turns: &mut Vec<Turn>,
    errors: &mut u64,
) {
    loop {
        let asked = now();
        if asked >= end {
            return;
        }
        let lock = loop {
            match locks.lock(key.as_bytes(), LEASE).await {
                Ok(lock) => break lock,
                // Another task holds the lock, and rslock has used up its retries. This task calls
                // `lock` again, because a task of `load` also waits until it gets the lock.
                Err(LockError::Unavailable) if now() < end => {}
                Err(LockError::Unavailable) => return,
                Err(_) => {
                    *errors += 1;
                    return;
                }
            }
        };
        let acquired = now();
        turns.push(Turn {
            asked,
            acquired,
            release_called: now(),
            task,
        });
        locks.unlock(&lock).await;
    }
}

fn main() {
    let Arguments { url, mode, poll } = Arguments::parse();
    let urls = match url.strip_prefix("redlock://") {
        Some(hosts) => hosts
            .split(',')
            .map(|host| format!("redis://{host}"))
            .collect(),
        None => vec![url],
    };
    let mut locks = LockManager::new(urls);
    if let Some(millis) = poll {
        locks.set_retry(3, Duration::from_millis(millis));
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let work = async move {
        match mode {
            Mode::W1 { n, cold } => one_client(locks, n, cold.is_some()).await,
            Mode::W2 { tasks, secs } => many_clients(locks, tasks, secs).await,
            Mode::W3 {
                tasks,
                secs,
                key,
                start,
                out,
            } => contend(locks, tasks, secs, key, start, &out).await,
        }
    };
    // The work runs on the runtime's own threads, as in `load`.
    println!("{}", runtime.block_on(runtime.spawn(work)).unwrap());
}
