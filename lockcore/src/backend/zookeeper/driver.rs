//! The client library's driver: one thread for the whole process. The library starts this thread at
//! the first connect, and never again. Before the library connects, this module checks that the
//! driver can work. Without this check, a connect could only panic, or wait for ever.

use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::{Fault, StoreError};

/// How many file descriptors a first connection needs. The driver needs three (to wait, to be
/// woken, for timers), and each connection needs one.
const DESCRIPTORS: usize = 4;

/// A process id that no process has.
const NOBODY: u32 = 0;

/// The process in which the driver was started. It is one atomic word, because a fork could copy a
/// mutex while the mutex is locked.
static STARTED_IN: AtomicU32 = AtomicU32::new(NOBODY);

/// Returns an error if the library cannot connect.
///
/// If the driver does not get its descriptors, its thread ends, and this process can never connect
/// again. So this function first opens as many descriptors as a test, and closes them. Another
/// thread may take the descriptors before the driver does. But the time in between is short, and
/// only the first connection of a process depends on them.
pub(super) fn ready() -> Result<(), StoreError> {
    let here = std::process::id();
    is_here(STARTED_IN.load(Ordering::Relaxed), here)?;
    has_descriptors()?;
    // The process is noted before the driver starts. So a child that is forked in between gets an
    // error, and does not wait for ever.
    let noted = STARTED_IN.compare_exchange(NOBODY, here, Ordering::Relaxed, Ordering::Relaxed);
    is_here(noted.unwrap_or_else(|started_in| started_in), here)
}

fn is_here(started_in: u32, here: u32) -> Result<(), StoreError> {
    if [NOBODY, here].contains(&started_in) {
        return Ok(());
    }
    Err(StoreError::new(
        Fault::Config,
        format!(
            "ZooKeeper: this process was forked from process {started_in}, which had used ZooKeeper before; the \
             thread that drives connections stayed there. Start another program (exec), or fork before the first \
             use"
        ),
    ))
}

fn has_descriptors() -> Result<(), StoreError> {
    let tried: Result<Vec<File>, _> = (0..DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    match tried {
        Ok(_) => Ok(()),
        // No descriptor is free, in this process (EMFILE) or on the whole machine (ENFILE).
        Err(error) if matches!(error.raw_os_error(), Some(24 | 23)) => Err(StoreError::new(
            Fault::Retry,
            format!(
                "ZooKeeper: a connection needs {DESCRIPTORS} free file descriptors: {error}. Raise the limit \
                 (ulimit -n), or look for what is not closed"
            ),
        )),
        // This system has no such file, so nothing is known about the limit.
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_of_a_process_that_has_a_driver_is_told_so() {
        assert!(is_here(NOBODY, 7).is_ok());
        assert!(is_here(7, 7).is_ok());
        let error = is_here(7, 8).unwrap_err();
        assert_eq!(error.fault(), Fault::Config);
        assert!(
            error.to_string().contains("forked from process 7"),
            "{error}"
        );
    }
}
