//! The modes `w1` and `w2`: acquire and release without contention.

use std::sync::{Arc, OnceLock};

use lockcore::Lock;
use serde_json::{Value, json};
use tests::measure::{Durations, now, seconds};
use tokio::sync::Barrier;
use tokio::task::{JoinSet, coop};

use crate::client::{Client, Failures, pause};

/// The number of keys that `w1` cycles over.
const KEYS: usize = 256;

/// For how many pairs per second the record of a task has room, so that the record need not grow.
const ROOM_PER_SECOND: f64 = 20_000.0;

pub(crate) async fn one_client(client: &Client, n: usize, cold: bool) {
    let mut record = Record::with_capacity(n);
    client.warm_up(&mut record.failures).await;
    let locks: Vec<Lock> = if cold {
        // The names are new in each run, so that no run finds the data of an earlier one.
        let run = now();
        (0..n)
            .map(|i| client.lock(format!("w1c{run}-{i}")))
            .collect()
    } else {
        (0..KEYS).map(|i| client.lock(format!("w1k{i}"))).collect()
    };
    if !cold {
        for lock in &locks {
            record.pair(lock, now()).await;
        }
        record.pairs.clear();
    }

    let began = now();
    let mut time = began;
    for lock in locks.iter().cycle().take(n) {
        time = record.pair(lock, time).await;
    }

    client.report(&record.failures, figures(&record.pairs, time - began));
}

pub(crate) async fn many_clients(client: &Client, tasks: usize, secs: f64) {
    let ready = Arc::new(Barrier::new(tasks + 1));
    let start = Arc::new(OnceLock::new());
    let mut working: JoinSet<(Record, u64)> = (0..tasks)
        .map(|task| {
            let lock = client.lock(format!("w2k{task}"));
            let (ready, start) = (Arc::clone(&ready), Arc::clone(&start));
            async move {
                let mut record = Record::with_capacity((secs * ROOM_PER_SECOND) as usize);
                record.pair(&lock, now()).await;
                record.pairs.clear();
                ready.wait().await;

                let end = start.get_or_init(now) + (secs * 1e9) as u64;
                let mut time = now();
                while time < end {
                    time = record.pair(&lock, time).await;
                    // A store in memory answers at once. Without this call, the first tasks would
                    // keep all threads.
                    coop::consume_budget().await;
                }
                (record, time)
            }
        })
        .collect();
    ready.wait().await;
    let start = *start.get_or_init(now);

    let mut all = Record::with_capacity(0);
    let mut ended = start;
    while let Some(done) = working.join_next().await {
        let (record, last) = done.unwrap();
        all.pairs.extend(record.pairs);
        all.failures.merge(record.failures);
        ended = ended.max(last);
    }
    client.report(&all.failures, figures(&all.pairs, ended - start));
}

/// The measurements of one task.
struct Record {
    pairs: Vec<Pair>,
    failures: Failures,
}

/// The times of one pair in nanoseconds.
struct Pair {
    lock: u64,
    unlock: u64,
}

impl Record {
    fn with_capacity(pairs: usize) -> Self {
        Self {
            pairs: Vec::with_capacity(pairs),
            failures: Failures::default(),
        }
    }

    /// Acquires and releases. Returns the time of its end. The next pair begins at this time.
    async fn pair(&mut self, lock: &Lock, began: u64) -> u64 {
        let Some(guard) = self.failures.note(lock.acquire().await) else {
            pause().await;
            return now();
        };
        let held = now();
        let released = guard.release().await;
        let ended = now();
        self.failures.note_release(released);
        self.pairs.push(Pair {
            lock: held - began,
            unlock: ended - held,
        });
        ended
    }
}

fn figures(pairs: &[Pair], nanos: u64) -> Value {
    let whole = Durations::new(pairs.iter().map(|pair| pair.lock + pair.unlock));
    let lock = Durations::new(pairs.iter().map(|pair| pair.lock));
    let unlock = Durations::new(pairs.iter().map(|pair| pair.unlock));
    json!({
        "pairs": pairs.len(),
        "pairs_s": (pairs.len() as f64 / seconds(nanos.max(1))).round(),
        "p50_us": whole.percentile_us(50),
        "p99_us": whole.percentile_us(99),
        "lock_p50_us": lock.percentile_us(50),
        "unlock_p50_us": unlock.percentile_us(50),
    })
}
