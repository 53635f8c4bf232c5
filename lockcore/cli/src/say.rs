//! What the tool says on standard error: its own messages, and the log of the library. A thread of
//! its own writes them. So a reader that has stalled delays no signal for the command, and nothing
//! happens if nobody can read them.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// How many texts wait for a reader that has stalled. Further ones are dropped.
const MOST_WAITING: usize = 1_000;
/// How long the end of the tool waits for a reader that has stalled.
const PATIENCE: Duration = Duration::from_secs(1);

enum Job {
    Write(Vec<u8>),
    /// Drops this when all that came before is written.
    Finish(SyncSender<()>),
}

/// `None` if the machine refuses to start a thread.
static WRITER: OnceLock<Option<SyncSender<Job>>> = OnceLock::new();

/// Says this on a line of its own.
pub(crate) fn say(text: impl Display) {
    write(format!("lockcore: {text}\n").into_bytes());
}

/// Waits until everything is written. To be called before the process ends.
pub(crate) fn finish() {
    // Without a writer, nothing waits.
    if let Some(Some(writer)) = WRITER.get() {
        let (finished, is_finished) = sync_channel(0);
        // If the queue is full, the reader has stalled.
        if writer.try_send(Job::Finish(finished)).is_ok() {
            let _ = is_finished.recv_timeout(PATIENCE);
        }
    }
}

/// Where the log of the library goes.
pub(crate) struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write(text: Vec<u8>) {
    let writer = WRITER.get_or_init(|| {
        let (jobs, to_do) = sync_channel(MOST_WAITING);
        let thread = thread::Builder::new().name("stderr".into());
        thread.spawn(move || carry_out(&to_do)).ok().map(|_| jobs)
    });
    match writer {
        Some(writer) => drop(writer.try_send(Job::Write(text))),
        None => drop(io::stderr().write_all(&text)),
    }
}

/// Writes until the process ends. If nobody can read a text, it is lost.
fn carry_out(jobs: &Receiver<Job>) {
    for job in jobs {
        match job {
            Job::Write(text) => drop(io::stderr().write_all(&text)),
            Job::Finish(finished) => drop(finished),
        }
    }
}
