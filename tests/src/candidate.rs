//! Processes that campaign in an election and observe it. They run the part `candidate` of this
//! package's program `election`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;

/// A process with one candidate and one observer of the same election. Dropping the value kills the
/// process.
#[derive(Debug)]
pub struct Candidate {
    process: Process,
    led: Option<u64>,
    sees: Option<u64>,
}

/// The settings of a candidate.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    pub url: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    /// The folder of the [witness](crate::witness::FileWitness) that each leader enters.
    pub folder: &'a Path,
    pub ttl: Duration,
}

impl Campaign<'_> {
    /// Starts a candidate.
    pub fn start(&self, program: impl AsRef<OsStr>) -> Candidate {
        let mut command = Command::new(program);
        command
            .args(["candidate", self.name])
            .arg(self.folder)
            .env("LOCK_URL", self.url)
            .env("LOCK_NAMESPACE", self.namespace)
            .env("LOCK_OP_TIMEOUT", "30s") // the machine may stand still
            .env("LOCK_TTL", format!("{}ms", self.ttl.as_millis()));
        Candidate {
            process: Process::start(&mut command),
            led: None,
            sees: None,
        }
    }
}

impl Candidate {
    /// The token of this candidate, if it has begun to lead since the last call.
    pub fn has_begun(&mut self) -> Option<u64> {
        self.listen();
        self.led.take()
    }

    /// The token of the leader that the observer has seen last. `None` if it has seen that nobody
    /// leads.
    pub fn sees(&mut self) -> Option<u64> {
        self.listen();
        self.sees
    }

    /// Sends SIGKILL.
    pub fn kill(self) {
        self.process.kill();
    }

    fn listen(&mut self) {
        while let Some(line) = self.process.hear(Duration::ZERO) {
            match line.split_once(' ') {
                Some(("LEADS", token)) => self.led = token.parse().ok(),
                // `nobody` is not a number, so this becomes `None`.
                Some(("SEES", token)) => self.sees = token.parse().ok(),
                _ => panic!("a candidate said {line:?}"),
            }
        }
    }
}
