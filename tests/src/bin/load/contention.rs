//! The mode `w3`: many tasks want one lock. Each task acquires it again as soon as it has released
//! it. If several processes have a common start, they contend with each other.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::time::Duration;

use lockcore::Lock;
use serde_json::json;
use tests::measure::{cpu_seconds, now};
use tests::turns::{self, Turn};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::Failed;
use crate::client::{Client, Driver, Failures, pause, say};

/// How long waiters may wait after the end. A waiter that is not granted by then is counted as
/// still waiting.
const GRACE: Duration = Duration::from_secs(1);

/// For how many turns per second the record of a task has room, so that the record need not grow.
/// Unused pages cost nothing.
const ROOM_PER_SECOND: f64 = 50_000.0;

pub(crate) async fn contend(
    client: &Client,
    tasks: usize,
    secs: f64,
    key: &str,
    start: u64,
    out: &str,
) -> Result<(), Failed> {
    // The file is created before the work, so that an error is noticed early.
    let rows = match out {
        "-" => None,
        path => {
            let file = File::create(path);
            Some(file.map_err(|error| format!("cannot write rows to {path}: {error}"))?)
        }
    };
    let mut failures = Failures::default();
    client.warm_up(&mut failures).await;
    let mut records: Vec<Record> = (0..tasks)
        .map(|task| Record::new(task as u64, secs))
        .collect();

    say("READY");
    let start = match start {
        0 => told_start().await?,
        start => start,
    };
    tokio::time::sleep(Duration::from_nanos(start.saturating_sub(now()))).await;
    let cpu = cpu_seconds();
    let end = start + (secs * 1e9) as u64;
    let mut working: JoinSet<Record> = records
        .drain(..)
        .map(|record| record.work(client.lock(key), end))
        .collect();
    while let Some(record) = working.join_next().await {
        records.push(record?);
    }
    let cpu = cpu_seconds() - cpu;

    let acquisitions: usize = records.iter().map(Record::acquisitions).sum();
    if let Some(file) = rows {
        let mut file = BufWriter::new(file);
        turns::write(records.iter().flat_map(|record| &record.turns), &mut file)?;
        file.flush()?;
    }
    for record in records {
        failures.merge(record.failures);
    }
    client.report(
        &failures,
        json!({"acquisitions": acquisitions, "cpu_s": cpu}),
    );
    Ok(())
}

async fn told_start() -> Result<u64, Failed> {
    let line = Driver::listen().hear().await;
    let line = line.ok_or_else(|| io::Error::other("standard input closed before the start"))?;
    line.parse().map_err(|error| {
        format!("the start is in nanoseconds of CLOCK_MONOTONIC, not {line:?}: {error}").into()
    })
}

/// The record of one task. No other task uses it.
struct Record {
    task: u64,
    turns: Vec<Turn>,
    /// When the current wait began.
    waits_since: Option<u64>,
    failures: Failures,
}

impl Record {
    fn new(task: u64, secs: f64) -> Self {
        Self {
            task,
            turns: Vec::with_capacity((secs * ROOM_PER_SECOND) as usize),
            waits_since: None,
            failures: Failures::default(),
        }
    }

    /// Takes turns until `end`.
    async fn work(mut self, lock: Lock, end: u64) -> Self {
        let left = Duration::from_nanos(end.saturating_sub(now()));
        // There is one timer for each task, because a timer for each turn would cost more. When the
        // timer fires, the future of the wait is dropped, which removes the waiter from the line.
        let _ = timeout(left + GRACE, self.take_turns(&lock, end)).await;
        if let Some(asked) = self.waits_since {
            self.turns.push(Turn {
                asked,
                acquired: 0,
                release_called: 0,
                task: self.task,
            });
        }
        self
    }

    async fn take_turns(&mut self, lock: &Lock, end: u64) {
        loop {
            let asked = now();
            if asked >= end {
                return;
            }
            self.waits_since = Some(asked);
            let acquired = lock.acquire().await;
            let time = now();
            self.waits_since = None;
            let Some(guard) = self.failures.note(acquired) else {
                pause().await;
                continue;
            };
            self.turns.push(Turn {
                asked,
                acquired: time,
                release_called: time,
                task: self.task,
            });
            // The time is read last, so that the check for overlap covers the whole turn.
            if let Some(turn) = self.turns.last_mut() {
                turn.release_called = now();
            }
            self.failures.note_release(guard.release().await);
        }
    }

    fn acquisitions(&self) -> usize {
        self.turns.iter().filter(|turn| turn.acquired != 0).count()
    }
}
