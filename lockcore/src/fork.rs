//! Detects whether the running code is in a forked child of the process that has made the client.

use forkguard::Guard;

use crate::error::Error;

/// The identity of a process. A forked child is another process.
#[derive(Clone)]
pub(crate) struct Process(Guard);

impl Process {
    /// The process that calls this.
    ///
    /// # Errors
    ///
    /// `Unavailable` when the C library has no memory for a fork handler. The handler is installed
    /// once per process.
    pub(crate) fn this() -> Result<Self, Error> {
        Guard::try_new().map(Self).map_err(|error| {
            Error::unavailable(format!(
                "this process would not notice that it is forked: {error}; it is out of memory: give it more and start \
                 it again"
            ))
        })
    }

    /// Whether the caller runs in this process, and not in a forked child of it.
    ///
    /// This reads a counter that a fork handler of the C library raises in the child. A comparison
    /// of process ids would need a system call. That costs more than all mutexes that an acquire
    /// and its release take. A child that is made by a bare `clone`, without fork handlers, is not
    /// detected. In such a child not even `malloc` may be called.
    pub(crate) fn is_this(&self) -> bool {
        // A detector reports a fork only once. So only a clone is asked: our own detector can
        // report the same fork again.
        !self.0.clone().detected_fork()
    }
}
