//! A shop that sells each ticket once, because it uses a lock; and the same shop without the lock.
//!
//! ```text
//! cargo run --release --example checkout                    # one process, locks in its memory
//! cargo run --release --example checkout -- --processes 4   # locks in a file: nothing to set up either
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example checkout -- --processes 4
//! LOCK_URL=postgres://user@127.0.0.1/database cargo run --release --example checkout -- --processes 4 --table
//! ```
//!
//! | file | |
//! |---|---|
//! | `shop.rs` | two ways to buy, a layer and an annotated function. Start there |
//! | `stock.rs` | what they protect: a count in a file, and the log that the verdict is read from |
//! | `table.rs` | with `--table`: the same in a table of PostgreSQL, where a sale is a transaction that holds the lock |
//! | `clients.rs` | the customers |
//! | `processes.rs` | one run, in this process or in several |
//! | `verdict.rs` | what was sold, and whether that is right |
//! | `stop.rs` | Ctrl-C, SIGTERM and other reasons to stop |
//! | `main.rs` | which store, both runs, and an end that leaves no lock behind |

mod clients;
mod print;
mod processes;
mod shop;
mod stock;
mod stop;
mod table;
mod verdict;

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use clap::{CommandFactory as _, Parser};
use lockcore::Locks;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};

use processes::{Share, run_shop};
use stop::Stop;
use verdict::Run;

/// How long a store may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(3);
/// After Ctrl-C, a holder may continue for this long. A sale takes milliseconds.
const GRACE: Duration = Duration::from_secs(2);

/// Sells a stock of tickets to many clients at once: first with a lock, then without.
///
/// The locks are kept where LOCK_URL says, as in LOCK_URL=redis://127.0.0.1/. Without LOCK_URL, one
/// process keeps them in its memory, and several processes share a temporary file.
#[derive(Debug, Parser)]
#[command(name = "checkout", allow_negative_numbers = true)]
struct Args {
    /// How many tickets there are
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    stock: u32,

    // Half of the clients have two sockets in this process, and 1,024 open files are the usual
    // limit.
    /// How many clients buy: half through the layer, half through the annotated function
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=500))]
    clients: u32,

    /// How many processes the clients are spread over
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    processes: u32,

    /// Keep the stock in a table of the PostgreSQL in LOCK_URL, and not in a file
    #[arg(long)]
    table: bool,

    // The program uses the other options to start itself: see `ShopProcess::start`.
    #[arg(long, hide = true, requires = "folder")]
    process: Option<u32>,
    #[arg(long, hide = true, requires = "process")]
    folder: Option<PathBuf>,
    #[arg(long, hide = true, requires = "process")]
    unlocked: bool,
    /// The file of the locks
    #[arg(long, hide = true)]
    locks: Option<PathBuf>,
}

/// Why the program does not end well.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(
        "{0} processes need a store that they share, and memory is not shared: set LOCK_URL to another, or not at all"
    )]
    NothingShared(u32),
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Panicked(#[from] tokio::task::JoinError),
    #[error("--table needs the locks in PostgreSQL: set LOCK_URL to postgres://…")]
    NoTable,
    #[error("process {0} failed ({1})")]
    Failed(u32, ExitStatus),
    #[error(
        "process {0} did not end when it was told to, and was killed; a lock of its own lasts until its lease ends"
    )]
    Stuck(u32),
    #[error("the lock did not do its job: {0}")]
    NotExact(String),
    #[error("{0}")]
    Stopped(Stop),
    /// The shop closed before all tickets were sold.
    #[error("closed early")]
    Closed,
}

#[tokio::main]
async fn main() -> ExitCode {
    let mut args = Args::parse();
    args.check();
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_env_filter(
            EnvFilter::builder()
                .with_default_directive(LevelFilter::WARN.into())
                .from_env_lossy(),
        )
        .init();
    // The folder and its contents are removed at the end.
    let outcome = match args.locks_to_share() {
        Ok(_folder) => checkout(&args).await,
        Err(error) => Err(error.into()),
    };
    let Err(failure) = outcome else {
        return ExitCode::SUCCESS;
    };
    match (args.process, &failure) {
        // The parent process prints this once for all processes.
        (Some(_), Failure::Stopped(_)) => {}
        (Some(process), _) => eprintln!("checkout: process {process}: {failure}"),
        (None, _) => eprintln!("checkout: {failure}"),
    }
    failure.exit_code()
}

/// The structure of a service: connect, work, and then release the locks, also after an error.
async fn checkout(args: &Args) -> Result<(), Failure> {
    // Signals are caught from here on.
    let signal = lockcore::stop_signal();
    // From here on, the annotated function uses this client.
    lockcore::set_default(connect(args)?)?;

    let closing = CancellationToken::new();
    let mut work = pin!(work(args, &closing));
    let reason = tokio::select! {
        outcome = &mut work => {
            lockcore::shutdown(GRACE).await?;
            return outcome;
        }
        reason = stop::asked(signal, args) => reason,
    };
    // The server takes no new requests, and the clients stop buying.
    closing.cancel();
    // Requests that wait for a lock are refused at once. Holders may finish.
    let (outcome, released) = tokio::join!(work, lockcore::shutdown(GRACE));
    released?;
    match outcome {
        Ok(()) | Err(Failure::Closed | Failure::Stopped(_)) => Err(Failure::Stopped(reason)),
        Err(failure) => Err(failure),
    }
}

fn connect(args: &Args) -> Result<Locks, Failure> {
    let store = store();
    if args.processes > 1 && store.as_deref() == Some("memory") {
        return Err(Failure::NothingShared(args.processes));
    }
    if args.table && !matches!(store.as_deref(), Some("postgres" | "postgresql")) {
        return Err(Failure::NoTable);
    }
    Ok(match (store, &args.locks) {
        (Some(_), _) => Locks::from_env()?,
        // These two stores need no setup: a file that all processes open, or the memory of this
        // process.
        (None, Some(file)) => Locks::connect(&format!("sqlite:{}", file.display()))?,
        (None, None) => Locks::connect("memory:")?,
    })
}

/// The kind of store in LOCK_URL, if it is set. The rest of the URL is not returned, because it may
/// contain a password.
fn store() -> Option<String> {
    let url = std::env::var_os("LOCK_URL")?;
    let scheme = url
        .to_string_lossy()
        .split(':')
        .next()?
        .trim()
        .to_lowercase();
    Some(scheme)
}

async fn work(args: &Args, closing: &CancellationToken) -> Result<(), Failure> {
    match (args.process, &args.folder) {
        (Some(process), Some(folder)) => {
            let share = args.share(!args.unlocked, process, folder);
            run_shop(&share, closing).await
        }
        _ => {
            // This check is not necessary, but it finds problems before the first sale. It also
            // warns of settings of the store that can lose locks.
            let locks = lockcore::default_locks()?;
            let ready = closing.run_until_cancelled(locks.ready(PATIENCE)).await;
            ready.ok_or(Failure::Closed)??;
            compare(args, closing).await
        }
    }
}

/// Runs the sale with and without the lock, and prints the verdict.
async fn compare(args: &Args, closing: &CancellationToken) -> Result<(), Failure> {
    print::line(args.headline());
    print::line("\nwith the lock, in the order in which it was granted:");
    print::heading();
    let with = Run::of(args, true, closing).await?;
    print::line(with.summary());

    print::line("\nthe same without the lock …");
    let without = Run::of(args, false, closing).await?;
    print::line(without.summary());

    let (sold, stock) = (with.sales.len(), args.stock);
    print::line(format_args!(
        "\nwith lock: sold {sold} of {stock}; without: sold {} of {stock}",
        without.sales.len()
    ));
    with.check()
}

impl Args {
    /// Checks what clap cannot check by itself.
    fn check(&self) {
        if self.processes > self.clients {
            let (processes, clients) = (self.processes, self.clients);
            let message = format!(
                "{clients} clients are not enough for {processes} processes: each needs one at least"
            );
            Self::command()
                .error(clap::error::ErrorKind::ValueValidation, message)
                .exit();
        }
    }

    /// If LOCK_URL names no store, several processes share a file. Returns the folder that was
    /// created for it.
    fn locks_to_share(&mut self) -> io::Result<Option<TempDir>> {
        if self.processes == 1 || self.process.is_some() || store().is_some() {
            return Ok(None);
        }
        let folder = tempfile::Builder::new()
            .prefix("checkout-locks-")
            .tempdir()?;
        self.locks = Some(folder.path().join("locks.db"));
        Ok(Some(folder))
    }

    fn headline(&self) -> String {
        let Self {
            stock,
            clients,
            processes,
            ..
        } = self;
        let in_processes = match processes {
            1 => "one process".to_owned(),
            _ => format!("{processes} processes"),
        };
        let embedded = match self.locks {
            Some(_) => "a file",
            None => "memory",
        };
        let store = store().unwrap_or_else(|| embedded.to_owned());
        format!("{stock} tickets, {clients} clients in {in_processes}, locks in {store}")
    }

    fn share(&self, locked: bool, process: u32, folder: &Path) -> Share {
        Share {
            locked,
            folder: folder.to_owned(),
            table: self.table,
            process,
            processes: self.processes,
            clients: self.clients,
        }
    }
}

impl Failure {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Stopped(stop) => stop.exit_code(),
            _ => ExitCode::FAILURE,
        }
    }
}
