//! The workload W5: the time from the release in one process to the grant of the waiter in another, next to other ways
//! to hand over at that store.

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

/// The time from the command to the waiter until the release. By then the waiter stands in line.
const STANDS: Duration = Duration::from_millis(4);

pub(crate) fn between_processes(bench: &Bench, table: &mut Table) {
    let store = &bench.store;
    let between_processes =
        |floor: &&floor::Floor| matches!(floor.turns, Turns::OfProcesses { .. });
    let floor = store.terms.floor.filter(between_processes);
    for policy in &bench.policies {
        let what = format!("W5 {}", policy.name());
        let mut samples = Samples::default();
        for _ in bench.each_run(&what) {
            let key = format!("w5-{}", now());
            if floor.is_some() {
                store.put_token(&key);
                let (floor, _) = hand_to_and_fro(|| floor::obey(&store.url, &key));
                samples.add("floor", floor.percentile_us(50));
                store.forget(&key);
            }
            let (ours, errors) = hand_to_and_fro(|| load(store, *policy, &format!("w5 {key}")));
            samples.add("p50", ours.percentile_us(50));
            samples.add("p99", ours.percentile_us(99));
            samples.add("errors", errors);
        }
        table
            .row(&what, "release → waiter p50", samples.median("p50"), "µs")
            .floor(
                floor.map_or("", |floor| floor.turn),
                samples.median("floor"),
            )
            .bar(store.terms.hand_over);
        table.row(&what, "release → waiter p99", samples.median("p99"), "µs");
        table
            .row(&what, "errors", samples.most("errors"), "")
            .bar(Bar::Never);
    }
}

/// The time from just before the release until the other process has the lock, and the number of errors.
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
