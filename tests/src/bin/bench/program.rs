//! Starts the program `load`, and reads its report.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::Value;
use tests::process::Process;

use crate::store::Store;

/// The time for answers that a saturated machine may delay.
pub(crate) const SOON: Duration = Duration::from_secs(100);

/// Which waiter is served first: see `lockcore::Fair`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    Strict,
    /// The default of the library.
    Default,
}

impl Policy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Default => "default",
        }
    }
}

/// The path of a program. Cargo puts all programs into one folder, so it is beside this program.
fn path(program: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(program)
}

pub(crate) fn available() -> Result<(), String> {
    match path("load").exists() {
        true => Ok(()),
        false => Err(format!(
            "there is no {}: cargo build --release -p tests --bin load --bin bench",
            path("load").display()
        )),
    }
}

pub(crate) fn peers_available() -> Result<(), String> {
    match path("peers").exists() {
        true => Ok(()),
        false => Err(format!(
            "there is no {}: cargo build --release --manifest-path tests/peers/Cargo.toml --target-dir target",
            path("peers").display()
        )),
    }
}

/// The peer of a store in a mode of the program `load`: its name and its command. `None` if there
/// is no peer or it is not built.
pub(crate) fn peer(store: &Store, mode: &str) -> Option<(&'static str, Command)> {
    let name = store.terms.peer?;
    peers_available().ok()?;
    let mut command = Command::new(path("peers"));
    command.arg(&store.url).args(mode.split(' '));
    Some((name, command))
}

/// `load` with the arguments of a mode, separated by spaces.
pub(crate) fn load(store: &Store, policy: Policy, mode: &str) -> Command {
    let mut command = Command::new(path("load"));
    command.arg(&store.url).args(mode.split(' '));
    match policy {
        Policy::Strict => command.env("LOCK_FAIR", "strict"),
        Policy::Default => command.env_remove("LOCK_FAIR"),
    };
    command
}

/// `load` with the library's default ttl, and not with the ttl that all programs share that are
/// compared.
pub(crate) fn load_as_by_default(store: &Store, policy: Policy, mode: &str) -> Command {
    let mut command = load(store, policy, mode);
    command.args(["--ttl", "10s"]);
    command
}

/// Runs a mode that needs no input, and reads its report.
pub(crate) fn report(command: &mut Command) -> Report {
    end(Process::start(command))
}

/// Closes the program's input, reads its report, and waits until it has released its locks. If it
/// were killed, its leases would disturb the next run.
pub(crate) fn end(mut process: Process) -> Report {
    process.close_input();
    let report = last_line(&mut process);
    process.finish(SOON);
    report
}

/// Reads the report of a process. The process may still have something to release.
pub(crate) fn last_line(process: &mut Process) -> Report {
    loop {
        let line = process.hear(SOON).expect("no report in time");
        if line.starts_with('{') {
            return Report(serde_json::from_str(&line).unwrap());
        }
    }
}

pub(crate) struct Report(Value);

impl Report {
    pub(crate) fn figure(&self, name: &str) -> f64 {
        let figure = self.0[name].as_f64();
        figure.unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }
}
