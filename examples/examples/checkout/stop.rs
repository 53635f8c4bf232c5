//! Reasons to stop before everything is sold.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::Args;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM: how service managers and container runtimes stop a process.
    Terminate,
    /// The process that started this one wants it to end, or is gone.
    Parent,
    /// It takes so long that something must be wrong.
    TimeIsUp,
}

/// Both signals, caught from the moment that this exists.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }
}

/// Resolves when there is a reason to stop.
pub async fn asked(signals: &mut Signals, args: &Args) -> Stop {
    let child = args.process.is_some();
    tokio::select! {
        _ = signals.interrupt.recv() => Stop::Interrupt,
        _ = signals.terminate.recv() => Stop::Terminate,
        () = parent_gone(), if child => Stop::Parent,
        // A sale takes 3 ms.
        () = tokio::time::sleep(Duration::from_secs(60) + Duration::from_millis(100) * args.stock), if !child => Stop::TimeIsUp,
    }
}

/// Resolves when standard input ends. For a child that is a pipe which the parent closes to stop it, and which the
/// kernel closes when the parent is killed.
async fn parent_gone() {
    let (ended, end) = oneshot::channel();
    // A plain thread, because `tokio::io::stdin` keeps the runtime from shutting down while it reads.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = ended.send(());
    });
    let _ = end.await;
}

impl Stop {
    /// 128 + the number of the signal, as shells have it.
    const INTERRUPTED: u8 = 130;
    const TERMINATED: u8 = 143;

    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Interrupt => ExitCode::from(Self::INTERRUPTED),
            Self::Terminate => ExitCode::from(Self::TERMINATED),
            Self::Parent => ExitCode::SUCCESS, // it did as it was told
            Self::TimeIsUp => ExitCode::FAILURE,
        }
    }

    /// What stopped a child that has ended, if it was stopped.
    pub fn of_child(status: ExitStatus) -> Option<Self> {
        // The signal itself, when it came before the child listened: it had no locks then.
        let signal = status.signal().map(|signal| 128 + signal);
        match u8::try_from(status.code().or(signal)?).ok()? {
            Self::INTERRUPTED => Some(Self::Interrupt),
            Self::TERMINATED => Some(Self::Terminate),
            _ => None,
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "interrupted; all locks are released",
            Self::Terminate => "terminated; all locks are released",
            Self::Parent => "stopped by the process that started it",
            Self::TimeIsUp => "this takes too long, it gives up; all locks are released",
        })
    }
}
