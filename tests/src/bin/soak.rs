//! Kills holders and waiters for minutes, and looks for overlaps: `soak [--minutes 10] [--processes
//! 4] [--kill-every 2s]`. The store is the one of `LOCK_URL`, for example `with-store redis soak`.
//!
//! Each process is the program `crowd`: eight tasks that want the same mutex. At random moments a
//! random process is killed and replaced. The file witness notices visits that overlap. The lease of
//! a killed holder ends after `LOCK_TTL`, here 3 s by default; a killed waiter that comes to the front
//! holds up the others for at most two seconds at the stores that cut such a lease.
//!
//! Prints a line for each minute, and then the sections, the overlaps and the longest time without
//! a new section. Ends with 1 if visits overlapped or tokens fell.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use tests::process::Process;
use tests::witness::FileWitness;

/// How often the program looks for new sections. The longest time without one is exact to that.
const LOOK: Duration = Duration::from_millis(5);

/// Kills processes that want one mutex, and looks for overlaps.
#[derive(Parser)]
struct Arguments {
    /// Duration in minutes
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Number of processes, of eight tasks each
    #[arg(long, default_value_t = 4)]
    processes: usize,
    /// The time between two kills, on average
    #[arg(long, default_value = "2s", value_parser = humantime::parse_duration)]
    kill_every: Duration,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    fs::write(&tokens, "").unwrap();
    let start = || start(folder.path(), arguments.minutes);
    let mut crowd: Vec<Process> = (0..arguments.processes.max(1)).map(|_| start()).collect();
    let mut random = fastrand::Rng::new();

    while size(&tokens) == 0 {
        std::thread::sleep(LOOK); // until the first section
        crowd.iter_mut().for_each(Process::expect_alive);
    }
    let began = Instant::now();
    let (mut seen, mut last, mut longest) = (size(&tokens), began, Duration::ZERO);
    let (mut kills, mut minutes) = (0, 0);
    let mut next_kill = began + arguments.kill_every;
    while minutes < arguments.minutes {
        std::thread::sleep(LOOK);
        let now = Instant::now();
        let written = size(&tokens);
        longest = longest.max(now - last);
        if written > seen {
            (seen, last) = (written, now);
        }
        if now >= next_kill {
            crowd.iter_mut().for_each(Process::expect_alive);
            crowd.swap_remove(random.usize(..crowd.len())).kill();
            crowd.push(start());
            kills += 1;
            next_kill = now + arguments.kill_every.mul_f64(0.5 + random.f64());
        }
        if now - began >= Duration::from_secs(60 * (minutes + 1)) {
            minutes += 1;
            println!("{minutes} min: {kills} killed, longest without a section {longest:.1?}");
        }
    }
    crowd.into_iter().for_each(Process::kill);

    let tokens = fs::read_to_string(tokens).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|line| line.parse().unwrap()).collect();
    let fell = tokens.windows(2).filter(|pair| pair[0] >= pair[1]).count();
    let overlaps = FileWitness::in_folder(folder.path()).overlaps().len();
    println!(
        "{} sections, {kills} killed, {overlaps} overlaps, {fell} tokens that fell, longest without a section {longest:.1?}",
        tokens.len()
    );
    if overlaps + fell == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Starts a process that lasts longer than the soak.
fn start(folder: &Path, minutes: u64) -> Process {
    let crowd = std::env::current_exe().unwrap().with_file_name("crowd");
    let seconds = (minutes + 1) * 60;
    Process::start(
        Command::new(crowd)
            .args(["soak", "8", &seconds.to_string()])
            .arg(folder)
            .env(
                "LOCK_TTL",
                std::env::var_os("LOCK_TTL").unwrap_or("3s".into()),
            )
            .env("LOCK_WAIT", "30s"),
    )
}

/// The size of the file to which each section appends its token.
fn size(tokens: &Path) -> u64 {
    fs::metadata(tokens).unwrap().len()
}
