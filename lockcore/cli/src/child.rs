//! The process of a command: how it starts, gets signals and ends.
//!
//! The tool may have to wait for all processes of a group. A process that has ended stays in its
//! group until its parent reads how, and the first process of a container may never do so for the
//! orphans that it gets. So on Linux the tool makes itself the parent of the orphans below it, and
//! reads how each of its children has ended.
//!
//! On Linux the command must not outlive this process, because it would run without the lock. So
//! the tool starts itself, and the new process asks the kernel to be killed together with its
//! parent, checks that the parent is still there, and becomes the command.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, kill_process_group, test_kill_process_group, wait,
};
#[cfg(target_os = "linux")]
use rustix::process::{getpid, getppid, set_child_subreaper, set_parent_process_death_signal};
use tokio::signal::unix::{self, SignalKind};

use crate::exit::{self, Exit};
use crate::say::say;
use crate::tree::{self, Process};

/// The first argument of this tool when it starts itself. It is no command of clap, so that neither
/// the help nor the completions know it.
#[cfg(target_os = "linux")]
const START: &str = "__start";

/// The variable with the fencing token.
pub(crate) const TOKEN: &str = "LOCKCORE_TOKEN";

/// The first pause between two looks whether all processes have ended. No event tells this of
/// processes that are not our children.
const LOOK: Duration = Duration::from_millis(20);
/// Each pause is twice as long as the one before, up to this. A look at all processes of a large
/// machine takes a while.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A command that was started.
pub(crate) struct Child {
    pid: Pid,
    /// How the command has ended, if it has.
    status: Option<ExitStatus>,
    /// Tells when a child has ended. (If this process was started to ignore SIGCHLD, the kernel would
    /// forget how children end.)
    ends: unix::Signal,
    /// Whether the command has a process group of its own. If not, what it has started is found by
    /// its place below this process, where the system shows that.
    has_group: bool,
    /// Processes below this one that the command has not started. A shell that becomes this tool
    /// leaves its own to it: with `exec`, or for `2> >(tee log)`.
    before: Vec<Process>,
    /// Whether a signal that ends programs was sent.
    is_told_to_end: bool,
    is_killed: bool,
}

impl Child {
    /// Starts a command with these variables in addition to those of this process.
    ///
    /// With a terminal, the command stays in the process group of this tool: Ctrl-C, Ctrl-Z and `fg`
    /// are about both. (With a group of its own, the command would need the terminal, and this tool
    /// would take it back from the background. A process is stopped for that, unless it blocks SIGTTOU,
    /// and only unsafe code can do so.) Without one, it gets a group of its own, so that a signal
    /// reaches all that it has started at the same moment.
    pub(crate) fn start(command: &[OsString], variables: &[(&str, String)]) -> Result<Self, Exit> {
        let has_group = File::open("/dev/tty").is_err();
        let mut start = to_start(command);
        // That of a tool which this one runs under is not the token of this lock.
        start.env_remove(TOKEN);
        start.envs(variables.iter().map(|(name, value)| (*name, value)));
        if has_group {
            start.process_group(0);
        }
        let ends = unix::signal(SignalKind::child())?;
        #[cfg(target_os = "linux")]
        set_child_subreaper(Some(getpid())).map_err(io::Error::from)?;
        let before = match has_group {
            true => Vec::new(),
            false => tree::below(&[]),
        };
        let process = start.spawn().map_err(|error| not_started(command, error))?;
        let pid = Pid::from_raw(process.id().cast_signed());
        Ok(Self {
            pid: pid.ok_or_else(|| Exit::internal("the command has no number"))?,
            status: None,
            ends,
            has_group,
            before,
            is_told_to_end: false,
            is_killed: false,
        })
    }

    /// Whether a signal that this tool has received is to be passed on. A terminal sends its signals
    /// to the command as well.
    pub(crate) fn is_passed(&self, signal: Signal) -> bool {
        let of_terminal = [Signal::INT, Signal::QUIT].contains(&signal);
        self.has_group || !of_terminal
    }

    /// Sends a signal to the command and to what it has started. If all of them have ended, nothing
    /// happens.
    pub(crate) fn signal(&mut self, signal: Signal) {
        self.is_told_to_end |= ![Signal::USR1, Signal::USR2, Signal::CONT].contains(&signal);
        self.is_killed |= signal == Signal::KILL;
        // The look comes first: what the command starts after the signal, to clean up, does not get
        // it. What the command starts during the look, which takes milliseconds, is missed too.
        let others = self.others();
        // The parents first: a script must not go on because one of its programs was ended.
        let sent = match (self.has_group, self.status) {
            // The number of a group is not given to a new process while the group has members, and
            // `ended` has not resolved yet.
            (true, _) => kill_process_group(self.pid, signal),
            // Only `ended` frees the number of the process, so it names no other.
            (false, None) => kill_process(self.pid, signal),
            (false, Some(_)) => Ok(()),
        };
        if let Err(error) = sent
            && error != Errno::SRCH
        {
            say(format_args!(
                "the command gets no signal and goes on: {error}"
            ));
        }
        if let Err(error) = signal_each(others, signal) {
            say(format_args!(
                "a process that the command has started gets no signal: {error}"
            ));
        }
    }

    /// Resolves when the command has ended. If it was told to end, all others that it has started
    /// must have ended too: they may still work. Cancel safety: safe.
    pub(crate) async fn ended(&mut self) -> io::Result<ExitStatus> {
        let mut pause = LOOK;
        loop {
            self.reap()?;
            match self.status {
                None => drop(self.ends.recv().await),
                Some(status) if !self.is_told_to_end && !self.is_interrupted(status) => {
                    return Ok(status);
                }
                Some(status) => {
                    if !self.has_others() {
                        return Ok(status);
                    }
                    if self.is_killed {
                        // One of them may have started another one before it got the signal.
                        let _ = signal_each(self.others(), Signal::KILL);
                    }
                    // On Linux, the last of them becomes a child of this process, whose end is an event.
                    let _ = tokio::time::timeout(pause, self.ends.recv()).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Whether a key of the terminal has ended the command. What it has started has got that signal
    /// too, and may clean up. (A command that catches the signal ends by itself.)
    fn is_interrupted(&self, status: ExitStatus) -> bool {
        let of_terminal = [Signal::INT, Signal::QUIT].map(|signal| Some(signal.as_raw()));
        !self.has_group && of_terminal.contains(&status.signal())
    }

    /// Reads how children have ended: the command, and orphans that it has left. No other part of
    /// this process starts one.
    fn reap(&mut self) -> io::Result<()> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    self.status = Some(ExitStatus::from_raw(status.as_raw()));
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(Errno::CHILD) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn has_others(&self) -> bool {
        match self.has_group {
            // A process that this one may not signal is one of the group too.
            true => test_kill_process_group(self.pid) != Err(Errno::SRCH),
            false => !self.others().is_empty(),
        }
    }

    /// What the command has started. Empty if it has a group, which stands for them.
    fn others(&self) -> Vec<Process> {
        if self.has_group {
            return Vec::new();
        }
        let mut others = tree::below(&self.before);
        others.retain(|other| self.status.is_some() || other.pid != self.pid);
        others
    }
}

/// Fails if one of them does not get the signal.
fn signal_each(processes: Vec<Process>, signal: Signal) -> Result<(), Errno> {
    let mut sent = Ok(());
    for process in processes {
        sent = sent.and(process.signal(signal));
    }
    sent
}

/// The exit code that stands for the end of a command, as in a shell.
pub(crate) fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| {
        let signal = status.signal()?;
        Some(signal.saturating_add(exit::SIGNAL.into()))
    });
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX)
        .into()
}

#[cfg(target_os = "linux")]
fn to_start(command: &[OsString]) -> Command {
    // This names the running program even if its file was replaced meanwhile.
    let mut start = Command::new("/proc/self/exe");
    start.arg(START).arg(getpid().as_raw_pid().to_string());
    start.args(command);
    start
}

/// The process that was started says what is wrong with the command.
#[cfg(target_os = "linux")]
fn not_started(_: &[OsString], error: io::Error) -> Exit {
    error.into()
}

#[cfg(not(target_os = "linux"))]
fn to_start(command: &[OsString]) -> Command {
    let mut start = Command::new(&command[0]);
    start.args(&command[1..]);
    start
}

#[cfg(not(target_os = "linux"))]
fn not_started(command: &[OsString], error: io::Error) -> Exit {
    refused(command, &error)
}

/// The exit code for a command that the system does not execute, as in a shell.
fn refused(command: &[OsString], error: &io::Error) -> Exit {
    let code = match error.kind() {
        io::ErrorKind::NotFound => exit::NOT_FOUND,
        _ => exit::NOT_EXECUTABLE,
    };
    Exit::new(code, format!("{}: {error}", command[0].display()))
}

/// A command that this process is to become.
#[cfg(target_os = "linux")]
pub(crate) struct Start {
    /// The process that the command must not outlive.
    parent: i32,
    command: Vec<OsString>,
}

/// Reads the arguments that [`to_start`] has written.
#[cfg(target_os = "linux")]
pub(crate) fn asked_to_start(arguments: impl Iterator<Item = OsString>) -> Option<Start> {
    let mut arguments = arguments.skip(1);
    arguments.next().filter(|first| first == START)?;
    let parent = arguments.next()?.to_str()?.parse().ok()?;
    let command: Vec<_> = arguments.collect();
    (!command.is_empty()).then_some(Start { parent, command })
}

/// Becomes the command. Returns only if that fails.
#[cfg(target_os = "linux")]
pub(crate) fn become_command(start: &Start) -> Exit {
    // SIGKILL, because a command that ignored another signal would go on without the lock.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Exit::internal(format!("cannot tie the command to this process: {error}"));
    }
    // The parent may have ended before the line above.
    if getppid().map(Pid::as_raw_pid) != Some(start.parent) {
        return Exit::internal("lockcore has ended, so its command does not start");
    }
    let command = &start.command;
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    refused(command, &error)
}
