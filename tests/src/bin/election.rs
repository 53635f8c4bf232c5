//! Measures an election whose leader is killed:
//! `election [--store redis] [--candidates 5] [--rounds 20] [--ttl 2s]`.
//!
//! Each candidate is a process that campaigns and observes. The leader enters a resource, which
//! notices if another leader is inside. The program kills the leader with SIGKILL and starts a new
//! process in its place. A round is over when another candidate leads and the observers of all
//! processes know it.
//!
//! Prints a row for each round, and at the end these totals:
//!
//! - the longest time from a kill to the next leader
//! - how often two leaders were inside
//! - how many tokens were not greater than the token before
//! - how many observers missed the last leader of a round

#![allow(
    clippy::unwrap_used,
    reason = "a panic is the report, as in the harness"
)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use lockcore::Locks;
use tests::candidate::{Campaign, Candidate};
use tests::eventually::poll;
use tests::stores;
use tests::witness::FileWitness;

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Parser)]
#[command(name = "election")]
struct Arguments {
    #[arg(long, default_value = "redis")]
    store: String,
    #[arg(long, default_value_t = 5)]
    candidates: usize,
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    #[arg(long, default_value = "2s")]
    ttl: humantime::Duration,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Subcommand)]
enum Part {
    /// Campaigns and observes until it is killed. Prints `LEADS <token>` when it begins to lead.
    /// Prints `SEES <token>` or `SEES nobody` when its observer sees a change. The `LOCK_…`
    /// variables choose the store, namespace and ttl.
    Candidate { name: String, folder: PathBuf },
}

fn main() {
    let arguments = Arguments::parse();
    match &arguments.part {
        Some(Part::Candidate { name, folder }) => candidate(name, folder),
        None => rounds(&arguments),
    }
}

#[tokio::main]
async fn candidate(name: &str, folder: &Path) {
    let locks = Locks::from_env().unwrap();
    let witness = FileWitness::in_folder(folder);
    let election = locks
        .election(name)
        .value(format!("process {}", std::process::id()));
    let mut leaders = election.observe();
    tokio::spawn(async move {
        loop {
            match leaders.next().await.unwrap() {
                Some(leader) => println!("SEES {}", leader.token),
                None => println!("SEES nobody"),
            }
        }
    });
    let led = election.run_as_leader(async |leader| {
        let _visit = witness.write();
        println!("LEADS {}", leader.fencing_token().unwrap());
        std::future::pending::<ControlFlow<()>>().await
    });
    led.await.unwrap();
}

fn rounds(arguments: &Arguments) {
    let named = |store: &&dyn stores::Store| store.name() == arguments.store;
    let store = stores::by_url().find(named).expect("no such store");
    let server = store.start();
    let (url, folder) = (server.url(), tempfile::tempdir().unwrap());
    let campaign = Campaign {
        url: &url,
        namespace: "election",
        name: "a",
        folder: folder.path(),
        ttl: arguments.ttl.into(),
    };
    let start = || campaign.start(std::env::current_exe().unwrap());
    let mut candidates: Vec<_> = (0..arguments.candidates).map(|_| start()).collect();
    let (mut leader, mut last) = next_leader(&mut candidates);
    let mut missed = observers_without(&mut candidates, last);
    let (mut longest, mut not_greater) = (Duration::ZERO, 0);
    for round in 1..=arguments.rounds {
        let killed = Instant::now();
        candidates.swap_remove(leader).kill();
        candidates.push(start());
        let (next, token) = next_leader(&mut candidates);
        let without = killed.elapsed();
        longest = longest.max(without);
        not_greater += u32::from(token <= last);
        (leader, last) = (next, token);
        let blind = observers_without(&mut candidates, last);
        missed += blind;
        println!("{round:>2} another leader after {without:>7.2?}, missed by {blind} observers");
    }
    let witness = FileWitness::in_folder(folder.path());
    println!(
        "\n{}: {} candidates, ttl {}, leader killed {} times: longest without a leader {longest:.2?}, overlaps {}, tokens \
         not greater {not_greater}, observers that missed the last leader {missed}",
        arguments.store,
        arguments.candidates,
        arguments.ttl,
        arguments.rounds,
        witness.overlaps().len(),
    );
}

/// Waits for the next candidate that begins to lead. Returns its index in `candidates` and its
/// token.
fn next_leader(candidates: &mut [Candidate]) -> (usize, u64) {
    let begun = poll(PATIENCE, || {
        let mut begun = candidates.iter_mut().map(Candidate::has_begun).enumerate();
        begun.find_map(|(at, token)| Some((at, token?)))
    });
    begun.expect("nobody leads")
}

/// How many observers do not see this leader in time.
fn observers_without(candidates: &mut [Candidate], leader: u64) -> usize {
    let blind = |candidates: &mut [Candidate]| {
        let mut seen = 0;
        for candidate in candidates.iter_mut() {
            seen += usize::from(candidate.sees() == Some(leader));
        }
        candidates.len() - seen
    };
    match poll(PATIENCE, || (blind(candidates) == 0).then_some(())) {
        Some(()) => 0,
        None => blind(candidates),
    }
}
