//! A shop that sells each ticket once, because it locks; and the same shop without the lock.
//!
//! ```text
//! cargo run --release --example checkout                                      # one process, nothing to set up
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example checkout -- --processes 4
//! ```
//!
//! | file | |
//! |---|---|
//! | `shop.rs` | two ways to buy, a layer and an annotated function. Start there |
//! | `stock.rs` | what they protect: a count in a file, and the log that the verdict is read from |
//! | `clients.rs` | the customers |
//! | `processes.rs` | one run, in this process or in several |
//! | `main.rs` | which store, both runs, the verdict; and how to stop: Ctrl-C and SIGTERM leave no lock |

mod clients;
mod print;
mod processes;
mod shop;
mod stock;

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser};
use lockcore::Locks;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use processes::{Share, parent_gone, run_shop, run_shops};
use stock::{Sale, Stock, Through};

/// How long a store may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long what holds a lock may go on after Ctrl-C. A sale takes milliseconds.
const GRACE: Duration = Duration::from_secs(2);

/// Sells a stock of tickets to many clients at once: first with a lock, then without.
///
/// The locks are kept where LOCK_URL says, as in LOCK_URL=redis://127.0.0.1/; without it in the memory of this process.
#[derive(Debug, Parser)]
#[command(name = "checkout")]
struct Args {
    /// How many tickets there are
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    stock: u32,

    // Half of them have two sockets here, and 1,024 open files are the usual limit.
    /// How many clients buy: half through the layer, half through the annotated function
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=500))]
    clients: u32,

    /// How many processes the clients are spread over; more than one needs a store that they share
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    processes: u32,

    // The rest is how the program starts itself: see `ShopProcess::start`.
    #[arg(long, hide = true, requires = "folder")]
    process: Option<u32>,
    #[arg(long, hide = true, requires = "process")]
    folder: Option<PathBuf>,
    #[arg(long, hide = true, requires = "process")]
    unlocked: bool,
}

/// Why there is no good end.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{} processes need a store that they share, and the memory store is in one process: set LOCK_URL, as in LOCK_URL=redis://127.0.0.1/", .0)]
    NothingShared(u32),
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Panicked(#[from] tokio::task::JoinError),
    #[error("process {0} died ({1})")]
    Died(u32, ExitStatus),
    #[error("the lock did not do its job: {0}")]
    NotExact(String),
    #[error("{0}")]
    Stopped(Stop),
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    args.check();
    let child = args.process;
    match checkout(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            match (child, &failure) {
                // The parent says it once for all.
                (Some(_), Failure::Stopped(_)) => {}
                (Some(process), _) => eprintln!("checkout: process {process}: {failure}"),
                (None, _) => eprintln!("checkout: {failure}"),
            }
            failure.exit_code()
        }
    }
}

/// A service's frame: connect, work, and whatever ends the work, give the locks back.
async fn checkout(args: Args) -> Result<(), Failure> {
    let mut signals = Signals::listen()?;
    let locks = connect(&args)?;
    locks.ready(PATIENCE).await?;
    // From here on the annotated functions find it, and the layer is given it.
    lockcore::init(locks)?;

    let closing = CancellationToken::new();
    let mut work = pin!(work(&args, &closing));
    tokio::select! {
        outcome = &mut work => {
            lockcore::shutdown(GRACE).await?;
            outcome
        }
        reason = signals.stop(&args) => {
            // The servers take no new requests, the clients ask for nothing more …
            closing.cancel();
            // … who waits for a lock is refused at once, and who holds one may finish.
            let (_, released) = tokio::join!(work, lockcore::shutdown(GRACE));
            released?;
            Err(Failure::Stopped(reason))
        }
    }
}

fn connect(args: &Args) -> Result<Locks, Failure> {
    let url = std::env::var_os("LOCK_URL");
    let shared = url.as_ref().is_some_and(|url| !url.to_string_lossy().starts_with("memory:"));
    if args.processes > 1 && !shared {
        return Err(Failure::NothingShared(args.processes));
    }
    Ok(match url {
        Some(_) => Locks::from_env()?,
        None => Locks::connect("memory:")?,
    })
}

async fn work(args: &Args, closing: &CancellationToken) -> Result<(), Failure> {
    match (args.process, &args.folder) {
        (Some(process), Some(folder)) => {
            let share = args.share(!args.unlocked, process, folder);
            run_shop(&share, closing).await
        }
        _ => compare(args, closing).await,
    }
}

/// Both runs, and the verdict.
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

/// What came of one run.
struct Run {
    stock: u32,
    sales: Vec<Sale>,
    failures: Vec<String>,
    took: Duration,
}

impl Run {
    /// Sells a full stock in a folder of its own, which is gone afterwards.
    async fn of(args: &Args, locked: bool, closing: &CancellationToken) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("checkout-").tempdir()?;
        let stock = Stock::open(folder.path());
        stock.fill(args.stock)?;
        let started = Instant::now();
        if args.processes == 1 {
            run_shop(&args.share(locked, 1, folder.path()), closing).await?;
        } else {
            run_shops(args, folder.path(), locked, closing).await?;
        }
        Ok(Self {
            stock: args.stock,
            took: started.elapsed(),
            sales: stock.sales()?,
            failures: stock.failures()?,
        })
    }

    /// With a lock that works the log says 100, 99, … 1: each ticket once, and in this order.
    fn check(&self) -> Result<(), Failure> {
        let sold = self.sales.iter().map(|sale| sale.ticket);
        if sold.eq((1..=self.stock).rev()) {
            return Ok(());
        }
        Err(Failure::NotExact(self.most_sold()))
    }

    fn summary(&self) -> String {
        todo!()
    }
}
