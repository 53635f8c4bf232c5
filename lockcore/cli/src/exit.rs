//! The exit codes, and how an error becomes one. The codes are those of `sysexits.h`, except for
//! the code of a command that the tool has started: that is the command's own.

use std::io;
use std::process::ExitCode;

use lockcore::{Error, ErrorKind};

use crate::say::say;
use crate::signals::Signal;

/// The store works, and `doctor` has found what an operator should change.
pub(crate) const FINDINGS: u8 = 1;
/// The arguments are wrong.
pub(crate) const USAGE: u8 = 64;
/// There is no such ticket.
pub(crate) const NO_TICKET: u8 = 66;
/// The store does not answer, or refuses.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The lock was lost, and the command under it was ended.
pub(crate) const LOST: u8 = 70;
/// The machine refused something that is not about the store.
const OS_ERROR: u8 = 71;
/// Held by another, or the wait was over.
pub(crate) const BUSY: u8 = 75;
/// A mistake in the configuration.
pub(crate) const CONFIG: u8 = 78;
/// As shells do: the command cannot be executed, or there is no such command.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
/// As shells do: a process that a signal has ended has this and the number of the signal.
pub(crate) const SIGNAL: u8 = 128;

/// An end without success: what to say on standard error, and the exit code.
#[derive(Debug)]
pub(crate) struct Exit {
    pub(crate) code: u8,
    /// `None` if nobody wants to hear it.
    pub(crate) message: Option<String>,
}

impl Exit {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        let message = Some(message.into());
        Self { code, message }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(OS_ERROR, message)
    }

    pub(crate) fn silent(code: u8) -> Self {
        let message = None;
        Self { code, message }
    }

    pub(crate) fn interrupted(signal: Signal) -> Self {
        Self::silent(SIGNAL.saturating_add(signal.number()))
    }

    /// Adds to the message.
    pub(crate) fn with(mut self, more: &str) -> Self {
        if let Some(message) = &mut self.message {
            message.push_str(more);
        }
        self
    }

    /// Says it, and returns the code.
    pub(crate) fn report(self) -> ExitCode {
        if let Some(message) = self.message {
            say(message);
        }
        self.code.into()
    }
}

impl From<Error> for Exit {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Busy | ErrorKind::Timeout => BUSY,
            ErrorKind::Lost(_) => LOST,
            ErrorKind::Unavailable | ErrorKind::Unknown => UNAVAILABLE,
            _ => CONFIG,
        };
        Self::new(code, error.to_string())
    }
}

impl From<io::Error> for Exit {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // The reader of a pipe has seen enough, as in `lockcore ls | head`.
            io::ErrorKind::BrokenPipe => Self::silent(0),
            _ => Self::internal(error.to_string()),
        }
    }
}
