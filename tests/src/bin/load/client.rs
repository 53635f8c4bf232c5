//! The code that all modes use: locks with the agreed lease, failures, the report, and the driver.
//! The *driver* is the program that starts this one, for example `bench`. They exchange lines over
//! standard input and output.

use std::fmt::Display;
use std::io::{self, BufRead as _, Write as _};
use std::time::Duration;

use lockcore::{Error, Lock, Locks, Release, Wait};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// A client of the store, and the first fields of the report.
pub(crate) struct Client {
    pub(crate) locks: Locks,
    mode: &'static str,
    store: String,
}

impl Client {
    pub(crate) fn new(locks: &Locks, mode: &'static str, store: String) -> Self {
        Self {
            locks: locks.clone(),
            mode,
            store,
        }
    }

    pub(crate) fn lock(&self, key: impl Into<String>) -> Lock {
        self.locks.mutex(key).wait(Wait::Forever)
    }

    /// Makes one untimed pair on a name of this process. So no figure includes the costs of the
    /// first contact: scripts that are loaded and code that is paged in.
    pub(crate) async fn warm_up(&self, failures: &mut Failures) {
        let lock = self.lock(format!("warm-up-{}", std::process::id()));
        if let Some(guard) = failures.note(lock.acquire().await) {
            failures.note_release(guard.release().await);
        }
    }

    /// Prints the report as the last line. `figures` is an object.
    pub(crate) fn report(&self, failures: &Failures, figures: Value) {
        let mut report = json!({"mode": self.mode, "store": self.store, "errors": failures.0});
        if let (Value::Object(report), Value::Object(figures)) = (&mut report, figures) {
            report.extend(figures);
        }
        say(&report.to_string());
    }
}

/// Counts failures, and prints the first to standard error.
#[derive(Default)]
pub(crate) struct Failures(u64);

impl Failures {
    pub(crate) fn note<T>(&mut self, outcome: Result<T, Error>) -> Option<T> {
        outcome.map_err(|error| self.add(&error)).ok()
    }

    /// Counts a failed release. A lock that was lost before its release is a failure too.
    pub(crate) fn note_release(&mut self, outcome: Result<Release, Error>) {
        match outcome {
            Ok(Release::Released) => {}
            Ok(_) => self.add(&"the lock was lost before its release"),
            Err(error) => self.add(&error),
        }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.0 += other.0;
    }

    fn add(&mut self, failure: &dyn Display) {
        if self.0 == 0 {
            eprintln!("load: {failure}");
        }
        self.0 += 1;
    }
}

/// Pauses after a failure, so that a store that is down gets no tight loop of requests.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// Sends a line to the driver at once.
pub(crate) fn say(line: &str) {
    let mut out = io::stdout().lock();
    // If the driver has ended, the line is lost, which does not matter.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The lines of standard input. A separate thread reads them. Nothing waits for this thread when
/// the program ends.
pub(crate) struct Driver(mpsc::UnboundedReceiver<String>);

impl Driver {
    pub(crate) fn listen() -> Self {
        let (line, lines) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for text in io::stdin().lock().lines().map_while(Result::ok) {
                if line.send(text.trim().to_owned()).is_err() {
                    return;
                }
            }
        });
        Self(lines)
    }

    /// The next line, or `None` when standard input is closed.
    pub(crate) async fn hear(&mut self) -> Option<String> {
        self.0.recv().await
    }

    pub(crate) async fn until_closed(&mut self) {
        while self.hear().await.is_some() {}
    }
}
