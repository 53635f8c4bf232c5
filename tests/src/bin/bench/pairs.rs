//! W1 and W2: acquire and release where nobody else is, beside the least that excludes there.

use crate::floor_redis::RawLock;
use crate::program::{self, load};
use crate::store::Kind;
use crate::table::{Bar, Samples, Table};
use crate::{Bench, floor_memory};

/// Tasks of W2.
const TASKS: usize = 64;

pub(crate) fn one_client(bench: &Bench, table: &mut Table) {
    for policy in &bench.policies {
        for cold in [false, true] {
            let what = match cold {
                false => format!("W1 {}", policy.name()),
                true => format!("W1 cold {}", policy.name()),
            };
            measure_one(bench, table, *policy, cold, &what);
        }
    }
}

fn measure_one(bench: &Bench, table: &mut Table, policy: program::Policy, cold: bool, what: &str) {
    let store = &bench.store;
    let pairs = match store.kind {
        Kind::Memory => 300_000,
        Kind::Redis => 10_000,
        _ => 2_000,
    };
    // The cycle before, and one pair on a name of its own.
    let untimed = if cold { 1 } else { 257 };
    let mut samples = Samples::default();
    for _ in bench.each_run(what) {
        let floor = match store.kind {
            Kind::Redis => {
                let floor = RawLock::pairs(&store.url, pairs, cold);
                samples.add("ping", RawLock::ping(&store.url, pairs));
                Some(floor)
            }
            Kind::Memory => Some(floor_memory::pairs(pairs, cold)),
            _ => None,
        };
        if let Some(floor) = floor {
            samples.add("floor", floor.p50_us);
        }
        let mode = format!("w1 {pairs}{}", if cold { " cold" } else { "" });
        let before = store.reading();
        let report = program::report(&mut load(store, policy, &mode));
        for figure in ["p50_us", "p99_us", "lock_p50_us", "unlock_p50_us", "errors"] {
            samples.add(figure, report.figure(figure));
        }
        if let Some(asked) = store.asked_since(&before) {
            samples.add("scripts", asked.scripts / (pairs + untimed) as f64);
        }
    }
    let (floor, bar) = match store.kind {
        Kind::Redis => ("SET NX + delete", Some(Bar::OfFloor(1.15))),
        Kind::Memory => ("sharded Mutex", Some(Bar::AtMost(1.0))),
        _ => ("", None),
    };
    table
        .row(what, "pair p50", samples.median("p50_us"), "µs")
        .floor(floor, samples.median("floor"))
        .bar(bar);
    table.row(what, "pair p99", samples.median("p99_us"), "µs");
    let ping = samples.median("ping");
    for (figure, name) in [
        ("lock_p50_us", "acquire p50"),
        ("unlock_p50_us", "release p50"),
    ] {
        table
            .row(what, name, samples.median(figure), "µs")
            .floor("PING", ping);
    }
    if let Some(scripts) = samples.median("scripts") {
        table
            .row(what, "scripts per pair", scripts, "")
            .bar(Bar::Exactly(2.0));
    }
    table
        .row(what, "errors", samples.most("errors"), "")
        .bar(Bar::Never);
}

pub(crate) fn many_clients(bench: &Bench, table: &mut Table) {
    let Bench { store, secs, .. } = bench;
    for policy in &bench.policies {
        let what = format!("W2 {}", policy.name());
        let mut samples = Samples::default();
        for _ in bench.each_run(&what) {
            let floor = match store.kind {
                Kind::Redis => Some(RawLock::many(&store.url, TASKS, *secs)),
                Kind::Memory => Some(floor_memory::many(TASKS, *secs)),
                _ => None,
            };
            if let Some(floor) = floor {
                samples.add("floor", floor);
            }
            let report = program::report(&mut load(store, *policy, &format!("w2 {TASKS} {secs}")));
            for figure in ["pairs_s", "p50_us", "p99_us", "errors"] {
                samples.add(figure, report.figure(figure));
            }
        }
        let (floor, bar) = match store.kind {
            Kind::Redis => ("SET NX + delete", Some(Bar::AtLeast(140_000.0))),
            Kind::Memory => ("sharded Mutex", None),
            _ => ("", None),
        };
        table
            .row(&what, "pairs", samples.median("pairs_s"), "/s")
            .floor(floor, samples.median("floor"))
            .bar(bar);
        table.row(&what, "pair p50", samples.median("p50_us"), "µs");
        table.row(&what, "pair p99", samples.median("p99_us"), "µs");
        table
            .row(&what, "errors", samples.most("errors"), "")
            .bar(Bar::Never);
    }
}
