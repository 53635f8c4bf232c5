//! Every process of a service has a job in its schedule, and one process runs it each time.
//!
//! ```text
//! cargo run --release --example scheduled_job                                # locks in a file: nothing to set up
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example scheduled_job
//! ```
//!
//! Three processes start the same report every second, and their clocks differ a little. A process
//! that tries while another writes the report skips the report. But a report takes less time than
//! the difference between the clocks. So the next process can find the lock free and write the
//! report again. With `min_hold`, the lock stays taken until all processes have tried.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use examples::expect;
use lockcore::distributed_lock;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, stdin};
use tokio::process::{Child, Command};

type Failure = Box<dyn Error + Send + Sync>;

const PROCESSES: u32 = 3;
/// How often the job is due: once a `NIGHT`.
const NIGHT: Duration = Duration::from_secs(1);
const NIGHTS: u32 = 3;
/// The clock of each process is behind the clock of the one before by this time.
const CLOCKS_DIFFER: Duration = Duration::from_millis(60);
/// How long a report takes.
const WORK: Duration = Duration::from_millis(5);

/// `try` does not wait. With `skip` it is not an error if another process does the work. `min_hold`
/// keeps the lock for more than half of the period, so that no other process does the work again.
#[distributed_lock(key = "report", try, on_busy = skip, min_hold = "600ms")]
async fn report(job: &Job, night: u32) -> Result<(), Failure> {
    job.write(night).await
}

/// The same job without `min_hold`: a process that tries after the report was written finds the
/// lock free.
#[distributed_lock(key = "hasty-report", try, on_busy = skip)]
async fn hasty_report(job: &Job, night: u32) -> Result<(), Failure> {
    job.write(night).await
}

#[derive(Debug, Parser)]
struct Args {
    // The program uses these options to start itself.
    #[arg(long, hide = true, requires = "folder")]
    process: Option<u32>,
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
    #[arg(long, hide = true)]
    hasty: bool,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let args = Args::parse();
    let (Some(process), Some(shared)) = (args.process, args.folder) else {
        let folder = tempfile::tempdir()?;
        return Ok(examples::tell([], story(folder.path())).await);
    };
    let locks = examples::locks_in(&shared)?;
    // From here on, the annotated functions use this client.
    lockcore::set_default(locks.clone())?;
    let job = Job {
        process,
        log: shared.join("log"),
    };
    Ok(examples::tell([&locks], schedule(&job, args.hasty)).await)
}

/// The job, in one of the processes.
#[derive(Debug)]
struct Job {
    process: u32,
    log: PathBuf,
}

impl Job {
    async fn write(&self, night: u32) -> Result<(), Failure> {
        println!(
            "  night {night}: process {} writes the report",
            self.process
        );
        let mut log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(&self.log)?;
        log.write_all(format!("{night}\n").as_bytes())?;
        tokio::time::sleep(WORK).await;
        Ok(())
    }
}

/// The schedule that every process has.
async fn schedule(job: &Job, hasty: bool) -> Result<(), Failure> {
    println!("ready");
    let mut first = String::new();
    BufReader::new(stdin()).read_line(&mut first).await?;
    let first = UNIX_EPOCH + Duration::from_millis(first.trim().parse()?);
    for night in 1..=NIGHTS {
        let due = first + night * NIGHT + job.process * CLOCKS_DIFFER;
        tokio::time::sleep(due.duration_since(SystemTime::now()).unwrap_or_default()).await;
        match hasty {
            true => hasty_report(job, night).await?,
            false => report(job, night).await?,
        }
    }
    Ok(())
}

/// The part of the parent process: runs the same nights twice.
async fn story(folder: &Path) -> Result<(), Failure> {
    println!("with the lock given back when the report is written:");
    let hasty = nights(&folder.join("hasty"), &["--hasty"]).await?;
    println!("with `min_hold`:");
    let held = nights(&folder.join("held"), &[]).await?;

    let all = |counts: &BTreeMap<String, u32>| counts.values().sum::<u32>();
    println!(
        "\n{NIGHTS} nights: {} reports without min_hold, {} with it",
        all(&hasty),
        all(&held)
    );
    let once_each = (1..=NIGHTS).map(|night| (night.to_string(), 1)).collect();
    expect("one report each night", held == once_each)
}

/// Counts the reports of each night.
async fn nights(folder: &Path, mode: &[&str]) -> Result<BTreeMap<String, u32>, Failure> {
    std::fs::create_dir(folder)?;
    let mut processes = Vec::new();
    for process in 0..PROCESSES {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--process", &process.to_string(), "--folder"])
            .arg(folder)
            .args(mode)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child
            .stdout
            .take()
            .ok_or_else(|| io::Error::other("no output"))?;
        let mut lines = BufReader::new(output).lines();
        let ready = lines.next_line().await?;
        expect("each process is ready", ready.as_deref() == Some("ready"))?;
        let prints = tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                println!("{line}");
            }
        });
        processes.push((child, prints));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    for (child, _) in &mut processes {
        begin(child, now).await?;
    }
    for (mut child, prints) in processes {
        expect("each process ends well", child.wait().await?.success())?;
        prints.await?;
    }
    let mut counts = BTreeMap::new();
    for night in std::fs::read_to_string(folder.join("log"))?.lines() {
        *counts.entry(night.to_owned()).or_default() += 1;
    }
    Ok(counts)
}

async fn begin(child: &mut Child, at_millis: u128) -> io::Result<()> {
    let mut input = child
        .stdin
        .take()
        .ok_or_else(|| io::Error::other("no input"))?;
    input.write_all(format!("{at_millis}\n").as_bytes()).await
}
