//! The workload W7: the client keeps 10,000 leases alive, on an idle machine and on a saturated
//! one.

use std::hint::spin_loop;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, available_parallelism, sleep};
use std::time::Duration;

use tests::process::Process;

use crate::Bench;
use crate::program::{Policy, SOON, end, load};
use crate::store::Store;
use crate::table::{Bar, Samples, Table};

const LEASES: usize = 10_000;

/// How long the leases are held. It is longer than a lease, so that a lease without a renewal has
/// ended by then.
const HOLD: Duration = Duration::from_secs(31);

pub(crate) fn many_leases(bench: &Bench, table: &mut Table) {
    measure(bench, table, "W7", false);
    measure(bench, table, "W7 saturated", true);
}

fn measure(bench: &Bench, table: &mut Table, what: &str, saturated: bool) {
    let mut samples = Samples::default();
    for _ in bench.each_run(what) {
        let load = load(&bench.store, Policy::Default, &format!("w7 {LEASES}"));
        match saturated {
            true => saturate(|| hold(&bench.store, LEASES, load, &mut samples)),
            false => hold(&bench.store, LEASES, load, &mut samples),
        }
    }
    if let Some(requests) = samples.median("requests") {
        table
            .row(what, "requests", requests, "/s")
            .bar(Bar::AtMost(10.0));
    }
    if let Some(cpu) = samples.median("server cpu") {
        table.row(what, "server CPU", cpu, "% of a core");
    }
    table
        .row(what, "CPU", samples.median("cpu"), "% of a core")
        .bar(Bar::AtMost(1.0));
    table
        .row(what, "memory over the base", samples.median("rss"), "MB")
        .bar(Bar::AtMost(30.0));
    table
        .row(what, "taken in", samples.median("taken in"), "s")
        .bar((!saturated).then_some(Bar::AtMost(1.0)));
    table
        .row(what, "not held at the end", samples.most("lost"), "")
        .bar(Bar::Never);
    table
        .row(what, "errors", samples.most("errors"), "")
        .bar(Bar::Never);
}

/// Takes this many leases with the mode `w7` of `load`, keeps them alive for a while, and adds what
/// that costs.
pub(crate) fn hold(store: &Store, leases: usize, mut load: Command, samples: &mut Samples) {
    let held = leases as f64;
    let empty = store.memory_used();
    let mut process = Process::start(&mut load);
    process.expect("READY", SOON);
    if let (Some(empty), Some(full)) = (empty, store.memory_used()) {
        samples.add("server memory", (full - empty) / held);
    }
    let before = store.reading();
    sleep(HOLD);
    if let Some(asked) = store.asked_since(&before) {
        samples.add("requests", asked.requests / HOLD.as_secs_f64());
        samples.add("server cpu", 100.0 * asked.cpu_s / HOLD.as_secs_f64());
    }
    let report = end(process);
    samples.add("cpu", report.figure("cpu_percent"));
    let grown_kb = report.figure("rss_kb") - report.figure("rss_base_kb");
    samples.add("rss", grown_kb / 1e3);
    samples.add("memory", grown_kb * 1024.0 / held);
    samples.add("taken in", report.figure("taken_in_s"));
    samples.add("lost", held - report.figure("held"));
    samples.add("errors", report.figure("errors"));
}

/// Runs the work while other threads keep every core busy.
fn saturate(work: impl FnOnce()) {
    /// Stops the threads when the work ends in any way, so that this function can wait for them.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&over);
        for _ in 0..available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    spin_loop();
                }
            });
        }
        work();
    });
}
