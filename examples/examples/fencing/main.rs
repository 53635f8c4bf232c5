//! A holder is frozen and writes too late, and a resource refuses its write.
//!
//! ```text
//! cargo run --release --example fencing                                 # locks in a file: nothing to set up
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example fencing
//! ```
//!
//! Process A takes the lock and is stopped, as can happen to any process at any time. Its lease
//! ends, and B gets the lock and sets the price. Then A continues. `run` stops the work that A does
//! *under* the lock. But A has also spawned a task. That task checked the lock before the stop, and
//! writes now. No lock can prevent this. The resource can.
//!
//! | file | |
//! |---|---|
//! | `main.rs` | the story: stops A, lets it continue, and checks the result |
//! | `holder.rs` | A and B |
//! | `prices.rs` | the resource: one price with a fence, and one without |

mod holder;
mod prices;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use prices::Prices;

/// The ttl of A's lock: how long B has to wait if A does not answer.
const LEASE: Duration = Duration::from_secs(1);
/// The longest time for a step of this example. If a step takes longer, lockcore has broken a
/// promise.
const PATIENCE: Duration = Duration::from_secs(5);

/// Shows that a write that comes late is refused by a resource that checks fencing tokens.
#[derive(Debug, Parser)]
#[command(name = "fencing")]
struct Args {
    // The program uses these options to start itself.
    #[arg(long, hide = true, requires = "folder")]
    holder: Option<Who>,
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    A,
    B,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match (args.holder, &args.folder) {
        (Some(Who::A), Some(folder)) => holder::a(folder).await,
        (Some(Who::B), Some(folder)) => holder::b(folder).await,
        // The parent has no locks. Those of A and B end with their processes.
        _ => return examples::tell([], tell()).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fencing: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Tells the story.
async fn tell() -> Result<(), Failure> {
    let folder = tempfile::Builder::new().prefix("fencing-").tempdir()?;
    let prices = Prices::create(folder.path()).await?;
    let story = Story(Instant::now());

    let mut a = Holder::start(Who::A, folder.path())?;
    let a_token: u64 = a.says("has the lock").await?.parse()?;
    story.step(format_args!(
        "A has the lock, with token {a_token}; a task that it spawned finds the lock held, and is about to write"
    ));
    a.freeze()?;
    let frozen = Instant::now();
    story.step("A is stopped, as by SIGSTOP, with all its threads");

    let mut b = Holder::start(Who::B, folder.path())?;
    story.step(format_args!(
        "B asks for the lock, and waits: A's lease of {LEASE:?} must end first"
    ));
    let b_token: u64 = b.says("has the lock").await?.parse()?;
    story.step(format_args!("B has the lock, with token {b_token}"));
    promise(b_token > a_token, "a later holder has a higher token")?;
    promise(
        frozen.elapsed() < 2 * LEASE,
        "a dead holder costs its lease, and not much more",
    )?;
    promise(b.says("wrote").await? == "both", "the holder may write")?;
    story.step("B sets both prices");

    a.signal(Signal::CONT)?;
    story.step("A goes on");
    let why = a.says("was stopped").await?;
    story.step(format_args!(
        "A: the body under `run` was stopped before its next step: {why}"
    ));
    a.tell("write").await?;
    let wrote = a.says("wrote").await?;
    story.step(format_args!(
        "A: the spawned task wrote late, and got through to: {wrote}"
    ));
    a.ended().await?;
    b.tell("release").await?;
    b.ended().await?;

    let (fenced, unfenced) = (prices.fenced().await?, prices.unfenced().await?);
    println!("\nprice with a fence: {fenced}'s; price without: {unfenced}'s");
    promise(
        wrote == "the one without a fence",
        "a late write is refused",
    )?;
    promise(
        fenced == "B" && unfenced == "A",
        "the fence makes the difference",
    )?;
    println!(
        "the late write was refused where there is a fence, and got through where there is none"
    );
    Ok(())
}

fn promise(kept: bool, what: &str) -> Result<(), Failure> {
    match kept {
        true => Ok(()),
        false => Err(format!("not as promised: {what}").into()),
    }
}

/// Prints each step, with the time since the beginning.
struct Story(Instant);

impl Story {
    fn step(&self, what: impl fmt::Display) {
        println!("{:5.2} s  {what}", self.0.elapsed().as_secs_f64());
    }
}

/// One of the two processes. It reports to the parent with lines on its standard output.
struct Holder {
    who: Who,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    fn start(who: Who, folder: &Path) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--holder", if who == Who::A { "a" } else { "b" }])
            .arg("--folder")
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // This also kills a process that is stopped.
            .kill_on_drop(true)
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            who,
            child,
            input: input.ok_or("no standard input")?,
            output: BufReader::new(output.ok_or("no standard output")?).lines(),
        })
    }

    /// Waits for the next line, which must be `what: …`, and returns its rest.
    async fn says(&mut self, what: &str) -> Result<String, Failure> {
        let who = self.who;
        let line = tokio::time::timeout(PATIENCE, self.output.next_line()).await;
        let line = line.map_err(|_| format!("{who:?} does not say that it {what}"))??;
        let line = line.ok_or_else(|| format!("{who:?} ended before it {what}"))?;
        let rest = line
            .strip_prefix(what)
            .and_then(|rest| rest.strip_prefix(": "));
        Ok(rest.ok_or_else(|| format!("{who:?} {line}"))?.to_owned())
    }

    async fn tell(&mut self, what: &str) -> Result<(), Failure> {
        Ok(self.input.write_all(format!("{what}\n").as_bytes()).await?)
    }

    /// Stops the process, and returns when all its threads have stopped.
    fn freeze(&self) -> Result<(), Failure> {
        self.signal(Signal::STOP)?;
        waitid(WaitId::Pid(self.pid()?), WaitIdOptions::STOPPED)?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        Ok(kill_process(self.pid()?, signal)?)
    }

    fn pid(&self) -> Result<Pid, Failure> {
        let pid = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(id.try_into().ok()?));
        Ok(pid.ok_or("it has ended")?)
    }

    async fn ended(&mut self) -> Result<(), Failure> {
        let who = self.who;
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        match status.map_err(|_| format!("{who:?} does not end"))?? {
            status if status.success() => Ok(()),
            status => Err(format!("{who:?} failed: {status}").into()),
        }
    }
}
