//! The bench driver. It runs every mode of the program `load` against servers that it starts,
//! together with floors and peers. It reports which figures miss their bars. A floor is the least
//! that a lock can cost. A peer is another crate's lock. A bar is the value that a figure must
//! reach.
//!
//! ```text
//! cargo build --release -p tests --bin load --bin bench
//! target/release/bench                            Redis, on a server of its own, then memory:
//! target/release/bench zookeeper sqlite           on a server of its own, and in a file of its own
//! target/release/bench redis durable sentinel cluster quorum --only w1,w4,w5,w7
//!                                                 the ways to run Redis: a quorum of 5, a cluster of 3
//! target/release/bench memory: --only w1 --runs 5
//! target/release/bench redis --only slopes --runs 1
//! target/release/bench memory: redis --only metrics
//! target/release/bench redis --only linger
//! ```
//!
//! To run the peers too, build them first:
//!
//! ```text
//! cargo build --release --manifest-path tests/peers/Cargo.toml --target-dir target
//! ```
//!
//! W1 is one task. W2 is many tasks with a lock each. W3 is one process with 64 tasks at one lock.
//! W4 is four processes with 16 tasks each at one lock. W5 is a hand-over to another process. W6 is
//! a release with many waiters. W7 is many leases that are kept alive. Absolute figures depend on
//! the machine, so floors are measured in the same run, alternating with our lock. The counts of
//! the server's commands and packets are exact.
//!
//! | file | |
//! |---|---|
//! | `pairs.rs` `contention.rs` `handover.rs` `herd.rs` `leases.rs` | the workloads W1 and W2, W3 and W4, W5, W6, W7, each with its bars |
//! | `choices.rs` | what metrics cost, and what a linger saves |
//! | `slopes.rs` | how the costs grow with leases, names and waiters |
//! | `store.rs` | the store under test: the server, and the requests that it received |
//! | `program.rs` | starts `load`, and reads its report |
//! | `floor.rs` | the parts that all floors share, and their processes |
//! | `floor_redis.rs` `floor_memory.rs` | the least that a lock can cost there |
//! | `floor_etcd.rs` | a key that is written and deleted, and two locks (the peers) |
//! | `floor_mysql.rs` | the writes of a pair without procedures, and `GET_LOCK` (the peer) |
//! | `floor_postgres.rs` | a row that is flushed to the disk, and an advisory lock (the peer) |
//! | `floor_zookeeper.rs` | the cost with its client library, step by step and as a lock (the peer) |
//! | `terms.rs` | the floors, peers and bars of each store |
//! | `table.rs` | medians, bars, the table |

#![allow(
    clippy::unwrap_used,
    reason = "a panic is the report, as in the harness"
)]

mod choices;
mod contention;
mod floor;
mod floor_etcd;
mod floor_memory;
mod floor_mysql;
mod floor_postgres;
mod floor_redis;
mod floor_zookeeper;
mod handover;
mod herd;
mod leases;
mod pairs;
mod program;
mod slopes;
mod store;
mod table;
mod terms;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use program::Policy;
use store::Store;
use table::Table;

/// Measures lock stores with the program load, and compares each with its floor: the least that a
/// lock can cost there. Floors are measured in the same run
#[derive(Parser)]
#[command(name = "bench", args_conflicts_with_subcommands = true)]
struct Arguments {
    /// redis, durable, sentinel, cluster, quorum, zookeeper, etcd, postgres, mysql or sqlite for servers or a file that
    /// the bench starts itself; or URLs, for example memory: or redis://host
    #[arg(default_values = ["redis", "memory:"])]
    stores: Vec<String>,
    /// Run only these workloads, for example w1,w3
    #[arg(long, value_delimiter = ',')]
    only: Vec<Workload>,
    /// Run only with this policy of fairness
    #[arg(long)]
    policy: Option<Policy>,
    /// Number of runs; each figure is the median of them
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Duration of W2, W3 and W4 in seconds
    #[arg(long, default_value_t = 2.5)]
    secs: f64,
    /// Also write all rows to this file, with the columns
    /// store,workload,figure,value,unit,floor,floor value
    #[arg(long)]
    csv: Option<PathBuf>,
    #[command(subcommand)]
    floor: Option<floor::Process>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Workload {
    W1,
    W2,
    W3,
    W4,
    W5,
    W6,
    W7,
    /// What metrics cost; only if it is asked for
    Metrics,
    /// What a linger saves; only if it is asked for
    Linger,
    /// How the costs grow; only if it is asked for, because it takes ten minutes for each run
    Slopes,
}

/// The columns of the CSV file.
const HEADING: [&str; 7] = [
    "store",
    "workload",
    "figure",
    "value",
    "unit",
    "floor",
    "floor value",
];

/// The settings of all workloads.
struct Bench {
    store: Store,
    policies: Vec<Policy>,
    runs: u32,
    secs: f64,
}

impl Bench {
    /// Yields each run, and prints to standard error what is running.
    fn each_run(&self, what: &str) -> impl Iterator<Item = u32> {
        (1..=self.runs).inspect(move |run| {
            eprintln!(
                "bench: {} {what}, run {run} of {}",
                self.store.name, self.runs
            );
        })
    }

    fn work(&self, workload: Workload, table: &mut Table) {
        let across_processes = self.store.is_shared();
        match workload {
            Workload::W1 => pairs::one_client(self, table),
            Workload::W2 => pairs::many_clients(self, table),
            Workload::W3 => contention::one_process(self, table),
            Workload::W4 if across_processes => contention::several_processes(self, table),
            Workload::W5 if across_processes => handover::between_processes(self, table),
            Workload::W4 | Workload::W5 => {}
            Workload::W6 => herd::many_waiters(self, table),
            Workload::W7 => leases::many_leases(self, table),
            Workload::Metrics => choices::metrics(self, table),
            Workload::Linger => choices::linger(self, table),
            Workload::Slopes => slopes::measure(self, table),
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(floor) = arguments.floor {
        floor.run();
        return ExitCode::SUCCESS;
    }
    if cfg!(debug_assertions) {
        eprintln!("bench: a debug build; figures are worth something with --release");
    }
    if let Err(reason) = program::available() {
        eprintln!("bench: {reason}");
        return ExitCode::FAILURE;
    }
    if let Err(reason) = program::peers_available() {
        eprintln!("bench: without peers: {reason}");
    }

    let mut rows = match &arguments.csv {
        // The file is created before the work, so that an error is noticed early.
        Some(path) => match csv::Writer::from_path(path) {
            Ok(file) => Some(file),
            Err(error) => {
                eprintln!("bench: cannot write {}: {error}", path.display());
                return ExitCode::FAILURE;
            }
        },
        None => None,
    };
    if let Some(file) = &mut rows {
        file.write_record(HEADING).unwrap();
    }
    let mut sound = true;
    for store in &arguments.stores {
        let store = match Store::open(store) {
            Ok(store) => store,
            Err(reason) => {
                eprintln!("bench: {reason}");
                return ExitCode::FAILURE;
            }
        };
        let bench = Bench {
            store,
            policies: match arguments.policy {
                Some(policy) => vec![policy],
                None => vec![Policy::Strict, Policy::Default],
            },
            runs: arguments.runs,
            secs: arguments.secs,
        };
        let busy = busy();
        if let Some(warm_up) = bench.store.terms.floor.and_then(|floor| floor.warm_up) {
            warm_up(&bench.store.url);
        }
        let mut table = Table::default();
        for workload in Workload::value_variants() {
            let by_default = arguments.only.is_empty()
                && !matches!(
                    workload,
                    Workload::Metrics | Workload::Linger | Workload::Slopes
                );
            if by_default || arguments.only.contains(workload) {
                bench.work(*workload, &mut table);
            }
        }
        println!(
            "\n{}, medians of {}{}\n\n{table}",
            bench.store.name, arguments.runs, busy
        );
        if let Some(file) = &mut rows {
            table.write(&bench.store.name, file).unwrap();
        }
        sound &= table.is_sound();
    }
    // A missed bar is only a finding. Errors and overlaps mean that a lock failed.
    if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// How busy the machine was before the start. Other load disturbs every figure. It also changes the
/// cost of a wake-up, which is greater on a core that sleeps.
fn busy() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    match load.split(' ').next() {
        Some(last_minute) if !last_minute.is_empty() => {
            format!("; load of the machine before: {last_minute}")
        }
        _ => String::new(),
    }
}
