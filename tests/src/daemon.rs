//! A server process of the harness: its folder, its log, and the signals that stop it. The process
//! ends when the value is dropped, which a panic of the test does too. The owner of the value knows
//! the ports and the settings, and how to check whether the server serves.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::statvfs;
use rustix::process::Signal;
use tempfile::TempDir;
use url::Url;

use crate::child::LeashedChild;
use crate::eventually::poll;
use crate::ports::free_port;

/// How long a server may take to end, which is longer than any server needs. It is short, so that a
/// test that waits for a server that it has frozen itself fails soon.
const END: Duration = Duration::from_secs(5);

/// How much must be free on a RAM disk. Some tens of servers run at the same time, each with up to
/// 30 MB.
const ROOM: u64 = 1 << 30;

/// How many ports a new server tries. Another process may take a port between the check here and
/// the server's bind. This does not happen five times in a row.
const PORTS: usize = 5;

/// What servers log if their port is taken, or what they share with an earlier start of themselves.
const TAKEN: [&str; 2] = ["Address already in use", "shared memory block"];

/// A server that can be started again and again in one folder.
#[derive(Debug)]
pub(crate) struct Daemon {
    /// The name in messages.
    name: &'static str,
    /// Declared before the folder, so that the server is killed before its folder is removed.
    child: Mutex<Option<LeashedChild>>,
    ends_by: Option<Signal>,
    folder: TempDir,
}

impl Daemon {
    /// A server that has not been started. The name of its folder begins with this prefix. The
    /// prefix must be short: the path of a Unix socket may have 107 bytes.
    pub(crate) fn new(name: &'static str, prefix: &str) -> Self {
        Self::in_folder(name, prefix, &std::env::temp_dir())
    }

    /// The same, with its folder on a RAM disk if there is one with room. (A container has one with
    /// 64 MB by default.)
    pub(crate) fn on_ram_disk(name: &'static str, prefix: &str) -> Self {
        let ram_disk = Path::new("/dev/shm");
        let free = statvfs(ram_disk).map_or(0, |disk| disk.f_bavail * disk.f_frsize);
        match free >= ROOM {
            true => Self::in_folder(name, prefix, ram_disk),
            false => Self::new(name, prefix),
        }
    }

    fn in_folder(name: &'static str, prefix: &str, parent: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(parent);
        Self {
            name,
            child: Mutex::new(None),
            ends_by: None,
            folder: folder.unwrap(),
        }
    }

    /// Lets the server end by itself at this signal when the test process ends. By default it is
    /// killed then.
    pub(crate) fn ends_by(mut self, signal: Signal) -> Self {
        self.ends_by = Some(signal);
        self
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts the command. Its output goes to the log.
    pub(crate) fn spawn(&self, command: &mut Command) {
        let log = self.log();
        let log = File::options().create(true).append(true).open(log).unwrap();
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = LeashedChild::spawn_to_end_by(self.ends_by, command, Some(self.folder()));
        let child = child.unwrap_or_else(|error| {
            let program = command.get_program();
            panic!("cannot run {}: {error}", program.display())
        });
        *self.running() = Some(child);
    }

    /// Starts the command, and waits until the server serves. If it does not, it is down again.
    pub(crate) fn serve(
        &self,
        command: &mut Command,
        within: Duration,
        mut serves: impl FnMut() -> bool,
    ) -> Result<(), NotStarted> {
        let logged_before = self.log_length();
        self.spawn(command);
        let ready = poll(within, || match self.ended() {
            Some(status) => Some(Err(status)),
            None => serves().then_some(Ok(())),
        });
        let failure = match ready {
            Some(Ok(())) => return Ok(()),
            Some(Err(status)) => format!("{} ended at once: {status}", self.name),
            None => format!("{} did not answer within {within:?}", self.name),
        };
        self.kill();
        let log = self.log_from(logged_before);
        if TAKEN.iter().any(|text| log.contains(text)) {
            return Err(NotStarted::PortTaken);
        }
        let arguments: Vec<_> = command.get_args().collect();
        Err(NotStarted::Failed(format!(
            "{failure}\narguments: {arguments:?}\n{log}"
        )))
    }

    /// The process id. A restart changes it.
    pub(crate) fn pid(&self) -> u32 {
        self.with_child(|child| child.pid())
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running().is_some()
    }

    /// The exit status, if the server has ended by itself.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.running().as_mut().and_then(LeashedChild::ended)
    }

    /// Sends SIGKILL. Does nothing if the server is down.
    pub(crate) fn kill(&self) {
        if let Some(child) = self.running().take() {
            child.kill();
        }
    }

    /// Sends SIGTERM and waits for the end. Does nothing if the server is down.
    pub(crate) fn stop(&self) {
        self.stop_by(Signal::TERM);
    }

    /// [`stop`](Self::stop), for a server that ends at another signal.
    pub(crate) fn stop_by(&self, signal: Signal) {
        if let Some(child) = self.running().take() {
            child.stop_by(signal, END);
        }
    }

    /// Sends SIGSTOP: connections stay open, and no answers come.
    pub(crate) fn freeze(&self) {
        self.with_child(LeashedChild::freeze);
    }

    /// Sends SIGCONT.
    pub(crate) fn thaw(&self) {
        self.with_child(LeashedChild::thaw);
    }

    /// The number of bytes in the log.
    pub(crate) fn log_length(&self) -> usize {
        fs::metadata(self.log()).map_or(0, |log| log.len() as usize)
    }

    /// The log from this byte on. It covers all starts of the server.
    pub(crate) fn log_from(&self, byte: usize) -> String {
        let log = fs::read(self.log()).unwrap_or_default();
        String::from_utf8_lossy(&log[byte..]).into_owned()
    }

    /// The end of the log.
    pub(crate) fn log_tail(&self) -> String {
        let log = self.log_from(0);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn log(&self) -> PathBuf {
        self.folder().join("log")
    }

    fn with_child<T>(&self, act: impl FnOnce(&mut LeashedChild) -> T) -> T {
        match self.running().as_mut() {
            Some(child) => act(child),
            None => panic!("{} is not running: `restart` it first", self.name),
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<LeashedChild>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a start failed.
pub(crate) enum NotStarted {
    /// Or the processes of an earlier start have not ended yet.
    PortTaken,
    Failed(String),
}

/// Starts a server at a free port. Panics if it does not serve.
pub(crate) fn start(name: &str, mut serve: impl FnMut(u16) -> Result<(), NotStarted>) {
    let started = started(|| match serve(free_port()) {
        Ok(()) => Some(()),
        Err(NotStarted::PortTaken) => None,
        Err(NotStarted::Failed(why)) => panic!("{why}"),
    });
    started
        .unwrap_or_else(|| panic!("{PORTS} free ports were taken before {name} could bind them"));
}

/// Starts a server again at its port. Another process may have the port for a moment, but not for
/// long: see `ports`. Panics if the server does not serve.
pub(crate) fn start_again(within: Duration, serve: impl Fn() -> Result<(), NotStarted>) {
    let started = poll(within, || match serve() {
        Err(NotStarted::PortTaken) => None,
        outcome => Some(outcome),
    });
    match started {
        Some(Ok(())) => {}
        Some(Err(NotStarted::Failed(why))) => panic!("{why}"),
        Some(Err(NotStarted::PortTaken)) | None => panic!("the port stayed taken"),
    }
}

/// Starts a server. If its port was taken, `start` returns `None` and is called again.
pub(crate) fn started<T>(mut start: impl FnMut() -> Option<T>) -> Option<T> {
    (0..PORTS).find_map(|_| start())
}

/// Whether a program can be run. `version` is the argument that prints its version. The error says
/// how to install the program.
pub(crate) fn can_run(program: &str, version: &str, install: &str) -> Result<(), String> {
    let mut command = Command::new(program);
    let command = command.arg(version).stdout(Stdio::null());
    match command.stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{program} {version}` failed: {status}")),
        Err(error) => Err(format!("cannot run {program} ({error}): {install}")),
    }
}

/// A URL with credentials, percent-encoded where necessary.
pub(crate) fn with_user(url: &str, user: &str, password: &str) -> String {
    let mut url = Url::parse(url).unwrap();
    url.set_username(user).unwrap();
    url.set_password(Some(password)).unwrap();
    url.into()
}
