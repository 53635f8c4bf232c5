//! The workload W5: the time from the release in one process to the grant of the waiter in another
//! process. The floors are other ways to hand over at the same store.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use tests::measure::{Durations, now};
use tests::process::Process;

use crate::floor::Turns;
use crate::program::{SOON, end, load};
use crate::table::{Bar, Samples, Table};
use crate::{Bench, floor};

const HAND_OVERS: usize = 200;

/// The percentiles that are measured, and their names for our lock and for the floor.
const DISTRIBUTION: [(usize, &str, &str); 9] = [
    (1, "p1", "floor p1"),
    (5, "p5", "floor p5"),
    (10, "p10", "floor p10"),
    (25, "p25", "floor p25"),
    (50, "p50", "floor p50"),
    (75, "p75", "floor p75"),
    (90, "p90", "floor p90"),
    (95, "p95", "floor p95"),
    (99, "p99", "floor p99"),
];

/// How long after the command to the waiter the holder releases. It is long enough for the waiter
/// to be in line.
const STANDS: Duration = Duration::from_millis(4);

pub(crate) fn between_processes(bench: &Bench, table: &mut Table) {
    let store = &bench.store;
    let between_processes =
        |floor: &&floor::Floor| matches!(floor.turns, Turns::OfProcesses { .. });
    let floor = store.terms.floor.filter(between_processes);
    for policy in &bench.policies {
        let what = format!("W5 {}", policy.name());
        let floor_name = floor.map_or("", |floor| floor.turn);
        let mut samples = Samples::default();
        for _ in bench.each_run(&what) {
            let key = format!("w5-{}", now());
            let beside = floor.map(|_| {
                store.put_token(&key);
                let (floor, _) = hand_to_and_fro(|| floor::obey(&store.url, &key));
                store.forget(&key);
                floor
            });
            let (ours, errors) = hand_to_and_fro(|| load(store, *policy, &format!("w5 {key}")));
            samples.add("errors", errors);
            for (percent, figure, floor_figure) in DISTRIBUTION {
                samples.add(figure, ours.percentile_us(percent));
                if let Some(floor) = &beside {
                    samples.add(floor_figure, floor.percentile_us(percent));
                }
            }
        }
        table
            .row(&what, "release → waiter p50", samples.median("p50"), "µs")
            .floor(floor_name, samples.median("floor p50"))
            .bar(store.terms.hand_over);
        for (_, figure, floor_figure) in DISTRIBUTION {
            table
                .row(
                    &what,
                    format!("release → waiter, {figure}"),
                    samples.median(figure),
                    "µs",
                )
                .floor(floor_name, samples.median(floor_figure))
                .only_in_the_file();
        }
        table.row(&what, "release → waiter p99", samples.median("p99"), "µs");
        table
            .row(&what, "errors", samples.most("errors"), "")
            .bar(Bar::Never);
    }
}

/// Hands the lock from process to process. Returns the times from just before a release until the
/// other process holds, and the number of errors.
fn hand_to_and_fro(command: impl Fn() -> Command) -> (Durations, f64) {
    let mut holder = Process::start(&mut command());
    let mut waiter = Process::start(&mut command());
    for process in [&mut holder, &mut waiter] {
        process.expect("READY", SOON);
    }
    holder.say("a");
    holder.expect("A", SOON);
    let mut took = Vec::new();
    for _ in 0..HAND_OVERS {
        waiter.say("a");
        sleep(STANDS);
        holder.say("r");
        let released = holder.expect("R", SOON);
        let released: u64 = released.split(' ').next().unwrap().parse().unwrap();
        let acquired: u64 = waiter.expect("A", SOON).parse().unwrap();
        took.push(acquired.saturating_sub(released));
        std::mem::swap(&mut holder, &mut waiter);
    }
    holder.say("r");
    holder.expect("R", SOON);
    let errors = end(holder).figure("errors") + end(waiter).figure("errors");
    (Durations::new(took), errors)
}
