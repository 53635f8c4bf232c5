//! Processes that campaign in an election, and observe it: the part `candidate` of the program `election` of this package.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;

/// A process with one candidate and one observer of the same election. It is killed when this is dropped.
#[derive(Debug)]
pub struct Candidate {
    process: Process,
    led: Option<u64>,
    sees: Option<u64>,
}

/// Which election, and where.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    pub url: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    /// Of the [witness](crate::witness::FileWitness) that each leader enters.
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
            .env("LOCK_TTL", format!("{}ms", self.ttl.as_millis()));
        Candidate {
            process: Process::start(&mut command),
            led: None,
            sees: None,
        }
    }
}

impl Candidate {
    /// The token with which it has begun to lead since the last call of this, if it has.
    pub fn has_begun(&mut self) -> Option<u64> {
        self.listen();
        self.led.take()
    }

    /// The leader that its observer was told of last, by its token.
    pub fn sees(&mut self) -> Option<u64> {
        self.listen();
        self.sees
    }

    /// SIGKILL.
    pub fn kill(self) {
        self.process.kill();
    }

    fn listen(&mut self) {
        while let Some(line) = self.process.hear(Duration::ZERO) {
            match line.split_once(' ') {
                Some(("LEADS", token)) => self.led = token.parse().ok(),
                // `nobody` is no number.
                Some(("SEES", token)) => self.sees = token.parse().ok(),
                _ => panic!("a candidate said {line:?}"),
            }
        }
    }
}
