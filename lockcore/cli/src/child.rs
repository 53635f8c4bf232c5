//! The process of a command: how it starts, gets signals and ends.
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
    Pid, Signal, getpid, getppid, kill_process, kill_process_group,
    set_parent_process_death_signal, test_kill_process_group,
};

use crate::exit::{self, Exit};

/// The first argument of this tool when it starts itself. It is no command of clap, so that neither
/// the help nor the completions know it.
const START: &str = "__start";

/// How often the tool looks whether a process group is empty. No event tells this of processes that
/// are not our children.
const LOOK: Duration = Duration::from_millis(20);

/// A command that was started.
pub(crate) struct Child {
    process: tokio::process::Child,
    pid: Option<Pid>,
    /// Whether the command has a process group of its own.
    has_group: bool,
    /// Whether a signal that ends programs was sent.
    is_told_to_end: bool,
}

impl Child {
    /// Starts a command with these variables in addition to those of this process.
    ///
    /// With a terminal, the command stays in the process group of this tool: Ctrl-C, Ctrl-Z and `fg`
    /// are about both. Without one, it gets a group of its own, so that signals reach all that it
    /// has started.
    pub(crate) fn start(command: &[OsString], variables: &[(&str, String)]) -> io::Result<Self> {
        let has_group = File::open("/dev/tty").is_err();
        let mut start = match cfg!(target_os = "linux") {
            true => {
                // This names the running program even if its file was replaced meanwhile.
                let mut start = Command::new("/proc/self/exe");
                start.arg(START).arg(getpid().as_raw_pid().to_string());
                start.args(command);
                start
            }
            false => {
                let mut start = Command::new(&command[0]);
                start.args(&command[1..]);
                start
            }
        };
        start.envs(variables.iter().map(|(name, value)| (*name, value)));
        if has_group {
            start.process_group(0);
        }
        let process = tokio::process::Command::from(start).spawn()?;
        let pid = process
            .id()
            .and_then(|pid| Pid::from_raw(pid.cast_signed()));
        Ok(Self {
            process,
            pid,
            has_group,
            is_told_to_end: false,
        })
    }

    /// Whether a signal that this tool has received is to be passed on. A terminal sends its signals
    /// to the command as well.
    pub(crate) fn is_passed(&self, signal: Signal) -> bool {
        let of_terminal = [Signal::INT, Signal::QUIT].contains(&signal);
        self.has_group || !of_terminal
    }

    /// Sends a signal. If the command has ended, nothing happens.
    pub(crate) fn signal(&mut self, signal: Signal) {
        self.is_told_to_end |= ![Signal::USR1, Signal::USR2, Signal::CONT].contains(&signal);
        let sent = match self.pid {
            // The number of a group is not given to a new process while the group has members.
            Some(pid) if self.has_group => kill_process_group(pid, signal),
            // The process is not reaped before `ended` has resolved, so its number names no other.
            Some(pid) if self.process.id().is_some() => kill_process(pid, signal),
            _ => return,
        };
        if let Err(error) = sent
            && error != Errno::SRCH
        {
            eprintln!("lockcore: the command gets no signal and goes on: {error}");
        }
    }

    /// Resolves when the command has ended. If it was told to end and has a group, all others of
    /// the group must have ended too: they may still work. Cancel safety: safe.
    pub(crate) async fn ended(&mut self) -> io::Result<ExitStatus> {
        let status = self.process.wait().await?;
        while self.is_told_to_end && self.has_others() {
            tokio::time::sleep(LOOK).await;
        }
        Ok(status)
    }

    fn has_others(&self) -> bool {
        let group = self.pid.filter(|_| self.has_group);
        group.is_some_and(|group| test_kill_process_group(group).is_ok())
    }
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

/// A command that this process is to become.
pub(crate) struct Start {
    /// The process that the command must not outlive.
    parent: i32,
    command: Vec<OsString>,
}

/// Reads the arguments that [`Child::start`] has written.
pub(crate) fn asked_to_start(arguments: impl Iterator<Item = OsString>) -> Option<Start> {
    let mut arguments = arguments.skip(1);
    arguments.next().filter(|first| first == START)?;
    let parent = arguments.next()?.to_str()?.parse().ok()?;
    let command: Vec<_> = arguments.collect();
    (!command.is_empty()).then_some(Start { parent, command })
}

/// Becomes the command. Returns only if that fails.
pub(crate) fn become_command(start: &Start) -> Exit {
    if cfg!(target_os = "linux") {
        // SIGKILL, because a command that ignored another signal would go on without the lock.
        if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
            return Exit::internal(format!("cannot tie the command to this process: {error}"));
        }
    }
    // The parent may have ended before the line above.
    if getppid().map(Pid::as_raw_pid) != Some(start.parent) {
        return Exit::internal("lockcore has ended, so its command does not start");
    }
    let command = &start.command;
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    let code = match error.kind() {
        io::ErrorKind::NotFound => exit::NOT_FOUND,
        _ => exit::NOT_EXECUTABLE,
    };
    Exit::new(code, format!("{}: {error}", command[0].display()))
}
