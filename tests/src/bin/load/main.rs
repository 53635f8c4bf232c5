//! The program `load` measures the cost of one way to use one store, and reports it. The first
//! argument is the URL of the store. The second is the mode. The arguments of the mode follow. The
//! program uses only the public API. So a program for another lock library can offer the same
//! modes, and `bench` can judge both in the same way.
//!
//! ```text
//! cargo build --release -p tests --bin load
//! load redis://127.0.0.1/ w1 20000          LOCK_FAIR=strict load redis://127.0.0.1/ w3 64 2.5 key 0 rows
//! ```
//!
//! The last line of standard output is one JSON object. All times are nanoseconds of
//! `CLOCK_MONOTONIC`, which all processes of a machine share. The lease is 30 s. The program
//! `bench` starts `load` in each mode and judges the results.
//!
//! | file | modes |
//! |---|---|
//! | `pairs.rs` | `w1`, `w2`: acquire and release without contention |
//! | `contention.rs` | `w3`: many tasks at one lock |
//! | `handover.rs` | `w5`: from the release in one process to the waiter in another |
//! | `herd.rs` | `w6`, `give-up`: the cost of a release with many waiters, and of a waiter that gives up |
//! | `leases.rs` | `w7`: many leases kept alive |
//! | `recorder.rs` | the recorder of `--metrics` |
//! | `client.rs` | used by all modes: locks, failures, the report, lines to and from the driver |

#![allow(
    clippy::unwrap_used,
    reason = "a panic is the report, as in the harness"
)]

mod client;
mod contention;
mod handover;
mod herd;
mod leases;
mod pairs;
mod recorder;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use lockcore::{Fair, Locks};

use client::Client;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// How long a store may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the end may take. Locks that are held when Ctrl-C comes are released within this time.
const END: Duration = Duration::from_secs(10);
/// The exit code that a shell reports for a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Drives a lock store in one way. The last line of the output is one JSON object with the cost.
#[derive(Parser)]
#[command(name = "load")]
struct Arguments {
    /// The URL of the store, for example memory: or redis://host
    url: String,
    #[command(subcommand)]
    mode: Mode,
    /// How long a process may serve its own tasks first, for example 50ms; strict: not at all
    #[arg(long, env = "LOCK_FAIR", value_parser = fair)]
    fair: Option<Fair>,
    /// The first part of all names
    #[arg(long, env = "LOCK_NAMESPACE")]
    namespace: Option<String>,
    /// How long one operation at the store may take, for example 1s
    #[arg(long, env = "LOCK_OP_TIMEOUT", value_parser = humantime::parse_duration)]
    op_timeout: Option<Duration>,
    /// The ttl of all locks, and of the session if the store has sessions. All programs that are
    /// compared use 30s
    #[arg(long, global = true, default_value = "30s", value_parser = humantime::parse_duration)]
    ttl: Duration,
    /// The process has a recorder of metrics
    #[arg(long, global = true)]
    metrics: bool,
    /// How long the locks stay with the process after their use
    #[arg(long, env = "LOCK_LINGER", global = true, value_parser = humantime::parse_duration)]
    linger: Option<Duration>,
    /// Number of threads of the runtime; one for each core if not given
    #[arg(long)]
    threads: Option<usize>,
}

impl Arguments {
    fn locks(&self) -> Result<Locks, lockcore::Error> {
        let mut builder = Locks::builder().url(&self.url).ttl(self.ttl);
        if let Some(fair) = self.fair {
            builder = builder.fair(fair);
        }
        if let Some(linger) = self.linger {
            builder = builder.linger(linger);
        }
        if let Some(namespace) = &self.namespace {
            builder = builder.namespace(namespace);
        }
        if let Some(timeout) = self.op_timeout {
            builder = builder.op_timeout(timeout);
        }
        builder.build()
    }
}

#[derive(Subcommand)]
enum Mode {
    /// One task acquires and releases, over 256 keys
    W1 {
        /// Number of pairs
        n: usize,
        /// Uses each key once
        cold: Option<Cold>,
    },
    /// Many tasks acquire and release, each with a key of its own
    W2 {
        /// Number of tasks
        tasks: usize,
        /// Duration in seconds
        secs: f64,
    },
    /// Many tasks acquire and release one key
    W3 {
        /// Number of tasks
        tasks: usize,
        /// Duration in seconds
        secs: f64,
        /// Name of the lock
        key: String,
        /// Common start of several processes, in nanoseconds of CLOCK_MONOTONIC; 0: read it from
        /// standard input after READY is printed
        start: u64,
        /// File for the rows, or - for none. A row is four little-endian u64: t_start, t_acquired,
        /// t_release_call, task
        out: String,
    },
    /// Acquires at each line `a` of standard input, and releases at each line `r`
    W5 {
        /// Name of the lock
        key: String,
    },
    /// A line of waiters behind one holder; begins at the line `go` of standard input
    W6 {
        /// Number of waiters
        n: usize,
        /// How long each winner keeps the lock, in milliseconds
        hold_ms: u64,
        /// Number of releases until DONE; if there are more than N + 1, waiters queue again
        k: usize,
        /// Name of the lock
        key: String,
    },
    /// A line of waiters behind one holder, of which some give up at the line `go` of standard
    /// input
    GiveUp {
        /// Number of waiters
        n: usize,
        /// Number of waiters that give up
        k: usize,
        /// Name of the lock
        key: String,
    },
    /// Many leases, kept alive until standard input closes
    W7 {
        /// Number of leases
        n: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cold {
    Cold,
}

impl Mode {
    fn name(&self) -> &'static str {
        match self {
            Self::W1 { .. } => "w1",
            Self::W2 { .. } => "w2",
            Self::W3 { .. } => "w3",
            Self::W5 { .. } => "w5",
            Self::W6 { .. } => "w6",
            Self::W7 { .. } => "w7",
            Self::GiveUp { .. } => "give-up",
        }
    }

    async fn run(self, client: Client) -> Result<(), Failed> {
        match self {
            Self::W1 { n, cold } => pairs::one_client(&client, n, cold.is_some()).await,
            Self::W2 { tasks, secs } => pairs::many_clients(&client, tasks, secs).await,
            Self::W3 {
                tasks,
                secs,
                key,
                start,
                out,
            } => contention::contend(&client, tasks, secs, &key, start, &out).await?,
            Self::W5 { key } => handover::obey(&client, &key).await,
            Self::W6 { n, hold_ms, k, key } => {
                herd::run(&client, n, Duration::from_millis(hold_ms), k, &key).await?
            }
            Self::W7 { n } => leases::hold(&client, n).await,
            Self::GiveUp { n, k, key } => herd::give_up(&client, n, k, &key).await?,
        }
        Ok(())
    }
}

/// Reads the text in the same way as the library reads `LOCK_FAIR`.
fn fair(text: &str) -> Result<Fair, humantime::DurationError> {
    match text {
        "strict" => Ok(Fair::Strict),
        _ => humantime::parse_duration(text).map(Fair::Local),
    }
}

/// The scheme and the host of a URL. The rest may be secret.
fn redacted(url: &str) -> String {
    match url::Url::parse(url) {
        Ok(url) => match url.host_str() {
            Some(host) => format!("{}://{host}", url.scheme()),
            None => format!("{}:", url.scheme()),
        },
        Err(_) => "?".into(),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.metrics {
        metrics::set_global_recorder(recorder::InMemory).unwrap();
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = arguments.threads {
        runtime.worker_threads(threads.max(1));
    }
    let runtime = runtime.enable_all().build().unwrap();
    let outcome = runtime.block_on(run(arguments));
    // Does not wait for work that Ctrl-C has interrupted.
    runtime.shutdown_background();
    outcome.unwrap_or_else(|error| {
        eprintln!("load: {error}");
        ExitCode::FAILURE
    })
}

async fn run(arguments: Arguments) -> Result<ExitCode, Failed> {
    let locks = arguments.locks()?;
    locks.ready(PATIENCE).await?;

    let client = Client::new(&locks, arguments.mode.name(), redacted(&arguments.url));
    // The task runs on the runtime's own threads. If `block_on` ran the work on this thread, each
    // answer of the store would cost a change of threads.
    let mut work = tokio::spawn(arguments.mode.run(client));
    let code = tokio::select! {
        outcome = &mut work => {
            outcome??;
            ExitCode::SUCCESS
        }
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            work.abort();
            ExitCode::from(INTERRUPTED)
        }
    };
    locks.shutdown(END).await?;
    Ok(code)
}
