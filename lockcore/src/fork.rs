//! Tells a process from the children that it forks.

use forkguard::Guard;

use crate::error::Error;

/// A process. A forked child is another one.
pub(crate) struct Process(Guard);

impl Process {
    /// The process that calls this.
    ///
    /// # Errors
    ///
    /// `Unavailable` when the C library has no memory for a fork handler. It is asked once per process.
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
    /// This reads a counter that a fork handler of the C library raises in the child. To ask for the process id would be
    /// a system call, which costs more than all mutexes that an acquire and its release take. A child that is made
    /// without fork handlers, by a bare `clone`, is not detected; there not even `malloc` may be called.
    pub(crate) fn is_this(&self) -> bool {
        // The detector forgets a fork that it has told of, so ours is never asked itself.
        !self.0.clone().detected_fork()
    }
}
