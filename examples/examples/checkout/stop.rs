//! Reasons to stop before everything is sold.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::Args;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Ctrl-C or SIGTERM. Service managers and container runtimes stop processes with SIGTERM.
    Signal,
    /// The process that started this one asked it to stop, or has died.
    Parent,
    /// The run takes so long that something must be wrong.
    TimeIsUp,
}

/// Resolves when there is a reason to stop.
pub async fn asked(signal: impl Future<Output = ()>, args: &Args) -> Stop {
    let child = args.process.is_some();
    tokio::select! {
        () = signal => Stop::Signal,
        () = parent_gone(), if child => Stop::Parent,
        // A sale takes 3 ms.
        () = tokio::time::sleep(Duration::from_secs(60) + Duration::from_millis(100) * args.stock), if !child => Stop::TimeIsUp,
    }
}

/// Resolves when standard input ends. In a child process it is a pipe. The parent closes the pipe
/// to stop the child, and the kernel closes it when the parent is killed.
async fn parent_gone() {
    let (ended, end) = oneshot::channel();
    // This uses a plain thread, because `tokio::io::stdin` keeps the runtime from shutting down
    // while it reads.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = ended.send(());
    });
    let _ = end.await;
}

impl Stop {
    /// The exit code that shells show after Ctrl-C.
    const SIGNALLED: u8 = 130;

    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Signal => ExitCode::from(Self::SIGNALLED),
            Self::Parent => ExitCode::SUCCESS, // it stopped because it was asked to
            Self::TimeIsUp => ExitCode::FAILURE,
        }
    }

    /// The reason why a child stopped, if it was stopped.
    pub fn of_child(status: ExitStatus) -> Option<Self> {
        // If SIGINT or SIGTERM arrives before the child listens for it, the signal kills the child.
        // The child has no locks at that time.
        let signalled = matches!(status.signal(), Some(2 | 15));
        let stopped = signalled || status.code() == Some(Self::SIGNALLED.into());
        stopped.then_some(Self::Signal)
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Signal => "stopped by a signal; all locks are released",
            Self::Parent => "stopped by the process that started it",
            Self::TimeIsUp => "this takes too long, it gives up; all locks are released",
        })
    }
}
