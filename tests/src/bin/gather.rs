//! How long the parties of a barrier need to meet: `gather PROCESSES PARTIES…`.
//!
//! For each number of parties, processes are started and connected, and each has its share of the
//! parties, all of one barrier. The time is measured from the word to wait until all parties have
//! passed. The `LOCK_…` variables choose the store. For example:
//!
//! ```text
//! cargo build -p tests --bin gather --bin with-store
//! target/debug/with-store redis target/debug/gather 4 100 300 1000 2000
//! ```

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Parser;
use lockcore::Locks;
use tests::process::Process;
use tokio::task::JoinSet;

/// The longest time for one meeting.
const LONGEST: Duration = Duration::from_secs(60);

/// Measures how long the parties of a barrier need to meet.
#[derive(Parser)]
struct Arguments {
    /// Number of processes
    processes: u32,
    /// Numbers of parties, each a multiple of the number of processes
    #[arg(required = true)]
    parties: Vec<u32>,
    /// For the started processes: wait here with the parties of one process
    #[arg(long, hide = true)]
    here: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Arguments {
        processes,
        parties,
        here,
    } = Arguments::parse();
    if here {
        return wait_here(parties[0] / processes, parties[0]);
    }
    println!("parties  all passed after");
    for parties in parties {
        let start = |_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let arguments = [processes.to_string(), parties.to_string()];
            Process::start(command.args(arguments).arg("--here"))
        };
        let mut all: Vec<_> = (0..processes).map(start).collect();
        for process in &mut all {
            process.expect("READY", LONGEST);
        }
        let began = Instant::now();
        for process in &mut all {
            process.say("wait");
        }
        let mut leaders = 0;
        for process in &mut all {
            let told = process.expect("PASSED", LONGEST);
            leaders += told.parse::<u32>()?;
        }
        let took = began.elapsed();
        assert_eq!(leaders, 1, "{parties} parties");
        println!("{parties:7}  {took:8.3?}");
    }
    Ok(())
}

/// Waits with some of the parties, and says how many of them were the last to come.
#[tokio::main]
async fn wait_here(number: u32, parties: u32) -> Result<(), Box<dyn std::error::Error>> {
    let locks = Locks::from_env()?;
    locks.ready(LONGEST).await?;
    println!("READY");
    io::stdin().read_line(&mut String::new())?;

    let mut waiting = JoinSet::new();
    let barrier = locks
        .barrier(format!("of-{parties}"), parties)
        .wait(LONGEST);
    for _ in 0..number {
        let barrier = barrier.clone();
        waiting.spawn(async move { barrier.wait_for_all().await });
    }
    let mut leaders = 0;
    while let Some(passed) = waiting.join_next().await {
        leaders += u32::from(passed??.is_leader());
    }

    println!("PASSED {leaders}");
    Ok(locks.shutdown(Duration::from_secs(5)).await?)
}
