//! The mode `w7`: many leases that the library keeps alive.

use lockcore::Guard;
use serde_json::json;
use tests::measure::{cpu_seconds, now, resident_kb, seconds};
use tokio::task::JoinSet;

use crate::client::{Client, Driver, Failures, pause, say};

/// How many leases are acquired at the same time.
const AT_A_TIME: usize = 64;

pub(crate) async fn hold(client: &Client, n: usize) {
    let mut failures = Failures::default();
    client.warm_up(&mut failures).await;
    let base_kb = resident_kb();

    let began = now();
    let mut taking: JoinSet<(Vec<Guard>, Failures)> = (0..AT_A_TIME)
        .map(|task| {
            let locks: Vec<_> = (task..n)
                .step_by(AT_A_TIME)
                .map(|i| client.lock(format!("w7k{i}")))
                .collect();
            async move {
                let mut failures = Failures::default();
                let mut guards = Vec::with_capacity(locks.len());
                for lock in locks {
                    match failures.note(lock.acquire().await) {
                        Some(guard) => guards.push(guard),
                        None => pause().await,
                    }
                }
                (guards, failures)
            }
        })
        .collect();
    let mut guards = Vec::with_capacity(n);
    while let Some(taken) = taking.join_next().await {
        let (taken, failed) = taken.unwrap();
        guards.extend(taken);
        failures.merge(failed);
    }
    let taken_in = seconds(now() - began);

    say(&format!("READY {} {taken_in:.3}", guards.len()));
    let (began, cpu) = (now(), cpu_seconds());
    Driver::listen().until_closed().await;
    let (held_for, cpu) = (seconds(now() - began), cpu_seconds() - cpu);
    let rss_kb = resident_kb();
    let held = guards.iter().filter(|guard| guard.is_valid()).count();
    client.report(
        &failures,
        json!({
            "taken": guards.len(),
            "taken_in_s": taken_in,
            "held": held,
            "held_for_s": held_for,
            "cpu_s": cpu,
            "cpu_percent": 100.0 * cpu / held_for.max(f64::MIN_POSITIVE),
            "rss_base_kb": base_kb,
            "rss_kb": rss_kb,
        }),
    );
}
