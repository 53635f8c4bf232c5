//! The workload W6: the cost of a release with many waiters, and the cost of waiting.

use std::thread::sleep;
use std::time::Duration;

use tests::measure::now;
use tests::process::Process;

use crate::Bench;
use crate::program::{SOON, end, load};
use crate::table::{Bar, Samples, Table};

const LINES: [usize; 3] = [10, 100, 1_000];

/// The number of releases of each run. The shortest line does not allow more.
const RELEASES: usize = 10;
const HOLD_MS: u64 = 1;
const IDLE: Duration = Duration::from_secs(3);

pub(crate) fn many_waiters(bench: &Bench, table: &mut Table) {
    let store = &bench.store;
    for policy in &bench.policies {
        for waiters in LINES {
            let what = format!("W6 {waiters} {}", policy.name());
            let mut samples = Samples::default();
            for _ in bench.each_run(&what) {
                let mode = format!("w6 {waiters} {HOLD_MS} {RELEASES} w6-{}", now());
                let mut process = Process::start(&mut load(store, *policy, &mode));
                process.expect("READY", SOON);
                let before = store.reading();
                sleep(IDLE);
                let idle = store.asked_since(&before);
                let before = store.reading();
                process.say("go");
                process.expect("DONE", SOON);
                let asked = store.asked_since(&before);
                let report = end(process);
                samples.add("errors", report.figure("errors"));
                samples.add("seconds", report.figure("seconds"));
                if let (Some(idle), Some(asked)) = (idle, asked) {
                    samples.add("idle", idle.requests / IDLE.as_secs_f64());
                    match asked.redis {
                        Some(redis) => {
                            samples.add("scripts", redis.scripts / RELEASES as f64);
                            samples.add("calls", redis.inside_scripts / RELEASES as f64);
                        }
                        None => samples.add("packets", asked.requests / RELEASES as f64),
                    }
                }
            }
            if let Some(scripts) = samples.median("scripts") {
                table
                    .row(&what, "scripts per release", scripts, "")
                    .bar(Bar::AtMost(1.0));
                table.row(
                    &what,
                    "calls in scripts per release",
                    samples.median("calls"),
                    "",
                );
            }
            if let Some(packets) = samples.median("packets") {
                table.row(&what, "requests per release", packets, "");
            }
            if let Some(idle) = samples.median("idle") {
                table.row(&what, "idle", idle, "requests/s");
            }
            let per_release = samples.median("seconds").map(|s| s * 1e3 / RELEASES as f64);
            table.row(
                &what,
                format!("per release, held {HOLD_MS} ms"),
                per_release,
                "ms",
            );
            table
                .row(&what, "errors", samples.most("errors"), "")
                .bar(Bar::Never);
        }
    }
}
