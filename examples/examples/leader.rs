//! Three processes of a service campaign, one leads, and the leader is replaced when it dies and
//! when it resigns.
//!
//! ```text
//! cargo run --release --example leader                                # locks in a file: nothing to set up
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example leader
//! ```
//!
//! The parent process observes the election. It learns the address of each leader, like a proxy
//! that sends requests to the leader. First it kills the leader: another process leads when the
//! lease of the dead leader has ended. Then it asks this next leader to resign, and another process
//! leads at once. Each leader writes its token to a journal. The tokens only rise.

use std::error::Error;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use examples::expect;
use lockcore::election::Leaders;
use lockcore::value::Written;
use lockcore::{Held, Locks};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, stdin};
use tokio::process::{Child, Command};

type Failure = Box<dyn Error + Send + Sync>;

const PROCESSES: usize = 3;
/// The longest time without a leader after a leader has died. It is short, because this is an
/// example.
const TTL: Duration = Duration::from_secs(1);

#[derive(Debug, Parser)]
struct Args {
    // The program uses these options to start itself.
    #[arg(long, hide = true, requires = "folder")]
    address: Option<String>,
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let args = Args::parse();
    let (Some(address), Some(folder)) = (args.address, args.folder) else {
        let folder = tempfile::tempdir()?;
        let locks = examples::locks_in(folder.path())?;
        return Ok(examples::tell([&locks], story(&locks, folder.path())).await);
    };
    let locks = examples::locks_in(&folder)?;
    Ok(examples::tell([&locks], candidate(&locks, address, &folder)).await)
}

/// One process of the service: it leads until the parent asks it to resign.
async fn candidate(locks: &Locks, address: String, folder: &Path) -> Result<(), Failure> {
    let election = locks.election("service").ttl(TTL).value(address);
    let journal = folder.join("journal");
    election
        .run_as_leader(async |leader| match lead(&leader, &journal).await {
            // This process does not campaign again, because it ends. With `Continue` it would
            // campaign again.
            Ok(()) => ControlFlow::Break(Ok(())),
            Err(error) => ControlFlow::Break(Err(error)),
        })
        .await?
}

/// The work of the leader. This future is dropped if the leadership is lost.
async fn lead(leader: &Held, journal: &Path) -> Result<(), Failure> {
    let mut journal = std::fs::File::options()
        .append(true)
        .create(true)
        .open(journal)?;
    journal.write_all(format!("{}\n", leader.fencing_token()?).as_bytes())?;
    let mut resign = String::new();
    BufReader::new(stdin()).read_line(&mut resign).await?;
    Ok(())
}

/// The part of the parent process: observes the leaders, and ends two of them.
async fn story(locks: &Locks, folder: &Path) -> Result<(), Failure> {
    let mut processes = Vec::new();
    for number in 1..=PROCESSES {
        let address = format!("10.0.0.{number}:8080");
        processes.push((address.clone(), start(&address, folder)?));
    }
    let mut leaders = locks.election("service").observe();

    let first = next(&mut leaders).await?;
    println!("{} leads, token {}", first.text, first.token);
    let died = Instant::now();
    let mut dies = take(&mut processes, &first)?;
    dies.kill().await?;
    let second = next(&mut leaders).await?;
    println!(
        "it was killed: {} leads after {:?}",
        second.text,
        died.elapsed()
    );

    let resigned = Instant::now();
    let mut resigns = take(&mut processes, &second)?;
    let mut input = resigns.stdin.take().ok_or("no input")?;
    input.write_all(b"resign\n").await?;
    let third = next(&mut leaders).await?;
    println!(
        "it has resigned: {} leads after {:?}",
        third.text,
        resigned.elapsed()
    );
    expect("the process ends well", resigns.wait().await?.success())?;

    let journal = std::fs::read_to_string(folder.join("journal"))?;
    let written: Vec<&str> = journal.lines().collect();
    let tokens = [first, second, third].map(|leader| leader.token);
    expect("each leader has greater tokens", tokens.is_sorted())?;
    expect(
        "each leader has written once, in this order",
        written == tokens.map(|token| token.to_string()),
    )?;
    println!("3 leaders, one after the other, each with a greater token");
    // The processes that are left are killed when they are dropped.
    Ok(())
}

/// The next leader. Before that there may be a time without a leader.
async fn next(leaders: &mut Leaders) -> Result<Written, lockcore::Error> {
    loop {
        if let Some(leader) = leaders.next().await? {
            return Ok(leader);
        }
    }
}

fn start(address: &str, folder: &Path) -> Result<Child, Failure> {
    let child = Command::new(std::env::current_exe()?)
        .args(["--address", address, "--folder"])
        .arg(folder)
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    Ok(child)
}

/// The process of this leader.
fn take(processes: &mut Vec<(String, Child)>, leader: &Written) -> Result<Child, Failure> {
    let at = processes
        .iter()
        .position(|(address, _)| **address == *leader.text);
    let (_, child) = processes.remove(at.ok_or("no process has this address")?);
    Ok(child)
}
