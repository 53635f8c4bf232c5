//! The command line of lockcore. Here is what all commands share: the arguments are parsed, the
//! client is made and shut down, and the outcome becomes an exit code. Each command has a file of
//! its own.

#![deny(
    clippy::print_stderr,
    reason = "it panics if nobody can read: `say` does not"
)]

mod args;
mod bench;
mod child;
mod counter;
mod doctor;
mod elect;
mod exit;
mod findings;
mod inspect;
mod latch;
mod ls;
mod revoke;
mod run;
mod say;
mod show;
mod signals;
mod supervise;
mod top;
mod tree;
mod watch;

use std::future::Future;
use std::iter;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory as _;
use futures_util::future::join_all;
use lockcore::{Fair, Locks};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use args::{Args, Command};
use exit::Exit;
use say::say;
use signals::Signals;

/// How long the end may take. What is held then is released by the client, or ends with its lease.
const END: Duration = Duration::from_secs(5);

/// A look that took long is followed by a pause of this many times as long. So `top` and `watch` take
/// at most a fifth of the store's time with one connection.
const PAUSES: u32 = 4;

fn main() -> ExitCode {
    let code = carry_out_arguments();
    say::finish();
    code
}

fn carry_out_arguments() -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Some(start) = child::asked_to_start(std::env::args_os()) {
        return child::become_command(&start).report();
    }
    let args = match Args::read(std::env::args_os()) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are "errors" without a failure. If standard output is closed, nobody
            // reads them.
            let _ = error.print();
            return match error.use_stderr() {
                true => exit::USAGE.into(),
                false => ExitCode::SUCCESS,
            };
        }
    };
    let outcome = match args.command {
        Command::Completions { shell } => show::completions(shell, &mut Args::command()),
        Command::Man { folder } => show::manual(&folder, Args::command()),
        command => with_client(command, args.namespace),
    };
    outcome.unwrap_or_else(Exit::report)
}

fn with_client(command: Command, namespace: Option<String>) -> Result<ExitCode, Exit> {
    // A line between the rows of a full screen would damage it.
    match command {
        Command::Top(_) => {}
        // It shows the warnings about the store itself.
        Command::Doctor(_) => log_to_standard_error("error"),
        _ => log_to_standard_error("warn"),
    }
    // One thread: the parent-death signal of a command comes when the *thread* ends that has started
    // the command, and the main thread lives as long as the process. Leases do not depend on this
    // runtime, because the client renews them on a thread of its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Exit::internal(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let mut builder = lockcore::Builder::from_env()?;
        if let Some(namespace) = namespace {
            builder = builder.namespace(namespace);
        }
        if let Some(owner) = command.owner() {
            builder = builder.owner(owner);
        }
        if let Command::Bench(_) = command {
            builder = builder.fair(Fair::Strict);
        }
        let other = match command {
            Command::Bench(_) | Command::Doctor(_) => Some(builder.clone().build()?),
            _ => None,
        };
        let locks = builder.build()?;
        if !locks.capability().cross_process {
            let text = "memory: is the memory of this one process, so its locks exclude nobody; \
                        set LOCK_URL to a store that the other processes use too";
            return Err(Exit::new(exit::CONFIG, text));
        }
        let outcome = carry_out(command, &locks, other.as_ref(), &mut signals).await;
        // Signals that came until now have had their effect. The next one ends the tool at once.
        signals.forget();
        let end = join_all(
            iter::once(&locks)
                .chain(&other)
                .map(|locks| locks.shutdown(END)),
        );
        let ends = until_signal(&mut signals, end).await.unwrap_or_default();
        for error in ends.into_iter().filter_map(Result::err) {
            // The outcome stands: a command that has run has run.
            say(error);
        }
        outcome
    })
}

async fn carry_out(
    command: Command,
    locks: &Locks,
    other: Option<&Locks>,
    signals: &mut Signals,
) -> Result<ExitCode, Exit> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Run(run) => run::run(locks, run, signals).await,
        Command::Elect(elect) => elect::elect(locks, elect, signals).await,
        Command::Ls(ls) => until_signal(signals, ls::ls(locks, ls)).await?.map(done),
        Command::Inspect(inspect) => until_signal(signals, inspect::inspect(locks, inspect))
            .await?
            .map(done),
        Command::Watch(watch) => until_signal(signals, watch::watch(locks, watch))
            .await?
            .map(done),
        Command::Top(top) => until_signal(signals, top::top(locks, top)).await?.map(done),
        Command::Revoke(revoke) => until_signal(signals, revoke::revoke(locks, revoke)).await?,
        Command::Release(release) => until_signal(signals, revoke::release(locks, release)).await?,
        Command::Latch(latch) => until_signal(signals, latch::latch(locks, latch))
            .await?
            .map(done),
        Command::Counter(counter) => until_signal(signals, counter::counter(locks, counter))
            .await?
            .map(done),
        Command::Doctor(doctor) => {
            let clients = [locks, other.unwrap_or(locks)];
            until_signal(signals, doctor::doctor(clients, doctor)).await?
        }
        Command::Bench(bench) => {
            let clients = [locks, other.unwrap_or(locks)];
            until_signal(signals, bench::bench(clients, bench))
                .await?
                .map(done)
        }
        Command::Completions { .. } | Command::Man { .. } => Ok(ExitCode::SUCCESS), // no client
    }
}

/// Drops the work at the first signal that asks the process to end. The client gives back what the
/// work held or waited for.
async fn until_signal<T>(signals: &mut Signals, work: impl Future<Output = T>) -> Result<T, Exit> {
    tokio::select! {
        biased;
        signal = signals.next_to_end() => Err(Exit::interrupted(signal)),
        done = work => Ok(done),
    }
}

/// The library's log goes to standard error, from this level on. `RUST_LOG` asks for more or less.
fn log_to_standard_error(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| say::StandardError)
        // It would be said by `eprintln!`.
        .log_internal_errors(false)
        .with_target(false)
        .with_filter(filter);
    let findings = findings::Findings.with_filter(filter_fn(findings::may_be_one));
    tracing_subscriber::registry()
        .with(lines)
        .with(findings)
        .init();
}
