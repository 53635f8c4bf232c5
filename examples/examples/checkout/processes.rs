//! One run of the sale: in this process, or in several that this one starts.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clients::{Http, Way, buy_until_sold_out};
use crate::shop::{Server, Shop, locked_service, unlocked_service};
use crate::stock::{Buyer, Stock, Through};
use crate::stop::Stop;
use crate::{Args, Failure};

/// How long a process may take to close its shop before it is killed. This is longer than the time
/// for the release of its locks.
const CLOSING: Duration = Duration::from_secs(5);

/// The share of one process in a run.
#[derive(Debug)]
pub struct Share {
    pub locked: bool,
    pub folder: PathBuf,
    /// Whether the stock is in a table.
    pub table: bool,
    /// Counted from 1.
    pub process: u32,
    pub processes: u32,
    /// The clients of all processes together.
    pub clients: u32,
}

/// Opens a shop with its server. The clients of this process buy there until everything is sold, or
/// until `closing`.
pub async fn run_shop(share: &Share, closing: &CancellationToken) -> Result<(), Failure> {
    let shop = Arc::new(Shop {
        stock: Stock::open(&share.folder, share.table)?,
        process: share.process,
    });
    let service = match share.locked {
        true => locked_service(Arc::clone(&shop))?,
        false => unlocked_service(Arc::clone(&shop)),
    };
    let closing = closing.child_token();
    let server = Server::start(service, closing.clone()).await?;
    let http = Arc::new(Http::new(server.address));

    let mut clients = JoinSet::new();
    for buyer in share.buyers() {
        let way = match (buyer.through, share.locked) {
            (Through::Layer, _) => Way::Http(Arc::clone(&http)),
            (Through::Function, true) => Way::Call(Arc::clone(&shop)),
            (Through::Function, false) => Way::UnlockedCall(Arc::clone(&shop)),
        };
        clients.spawn(buy_until_sold_out(
            buyer,
            way,
            Arc::clone(&shop),
            closing.clone(),
        ));
    }
    while let Some(client) = clients.join_next().await {
        client?;
    }
    closing.cancel();
    Ok(server.ended().await?)
}

impl Share {
    /// Clients are assigned to the processes in turn, and in each process to the two ways in turn.
    fn buyers(&self) -> impl Iterator<Item = Buyer> {
        let (process, processes) = (self.process, self.processes);
        (1..=self.clients)
            .filter(move |client| (client - 1) % processes + 1 == process)
            .map(move |client| Buyer {
                process,
                client,
                through: match ((client - 1) / processes + process) % 2 {
                    1 => Through::Layer,
                    _ => Through::Function,
                },
            })
    }
}

/// Runs a shop in each of several processes, all with the same folder, until everything is sold or
/// `closing`.
pub async fn run_shops(
    args: &Args,
    folder: &Path,
    locked: bool,
    closing: &CancellationToken,
) -> Result<(), Failure> {
    let mut children = (1..=args.processes)
        .map(|process| ShopProcess::start(args, folder, locked, process))
        .collect::<io::Result<Vec<_>>>()?;
    let all_ended = try_join_all(children.iter_mut().map(ShopProcess::ended));
    let mut outcome = closing
        .run_until_cancelled(all_ended)
        .await
        .map_or(Ok(()), |all| all.map(drop));
    for child in &mut children {
        child.leash = None;
    }
    for mut child in children {
        outcome = match (outcome, child.closed().await) {
            // The failure of a child that could not close tells more than the failure of a child
            // that was stopped.
            (Ok(()) | Err(Failure::Stopped(_)), Err(failure)) => Err(failure),
            (outcome, _) => outcome,
        };
    }
    outcome
}

#[derive(Debug)]
struct ShopProcess {
    process: u32,
    child: Child,
    /// The child's standard input. Nothing is ever written to it: when it is closed, the child
    /// closes its shop.
    leash: Option<ChildStdin>,
}

impl ShopProcess {
    /// Starts this program again, with the hidden arguments that make it one of several shops.
    fn start(args: &Args, folder: &Path, locked: bool, process: u32) -> io::Result<Self> {
        let locks = args
            .locks
            .as_deref()
            .map(|file| [Path::new("--locks"), file]);
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--clients", &args.clients.to_string()])
            .args(["--processes", &args.processes.to_string()])
            .args(["--process", &process.to_string()])
            .arg("--folder")
            .arg(folder)
            .args((!locked).then_some("--unlocked"))
            .args(args.table.then_some("--table"))
            .args(locks.iter().flatten())
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let leash = child.stdin.take();
        Ok(Self {
            process,
            child,
            leash,
        })
    }

    async fn ended(&mut self) -> Result<(), Failure> {
        let status = self.child.wait().await?;
        if status.success() {
            return Ok(());
        }
        // Ctrl-C goes to all processes of a terminal, and the child may react before this process
        // does.
        Err(Stop::of_child(status).map_or(Failure::Failed(self.process, status), Failure::Stopped))
    }

    /// Waits for a child that has been told to close, but not forever.
    async fn closed(&mut self) -> Result<(), Failure> {
        match tokio::time::timeout(CLOSING, self.ended()).await {
            Ok(ended) => ended,
            Err(_) => {
                self.child.kill().await?;
                Err(Failure::Stuck(self.process))
            }
        }
    }
}
