//! W1 and W2: acquire and release where nobody else is, beside the least that excludes there.

use std::future::ready;

use crate::floor_memory::Map;
use crate::floor_redis::RawLock;
use crate::floor_zookeeper::RawTicket;
use crate::program::{self, load};
use crate::store::Kind;
use crate::table::{Bar, Samples, Table};
use crate::{Bench, floor, floor_redis};

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
        let url = || store.url.clone();
        let floor = match store.kind {
            Kind::Redis => {
                let floor = floor::pairs(RawLock::connect(url()), pairs, cold);
                samples.add("ping", floor_redis::ping(url(), pairs));
                Some(floor)
            }
            Kind::Memory => Some(floor::pairs(ready(Map::default()), pairs, cold)),
            Kind::ZooKeeper => Some(floor::pairs(RawTicket::connect(url()), pairs, cold)),
            _ => None,
        };
        if let Some(floor) = floor {
            samples.add("floor", floor);
        }
        let mode = format!("w1 {pairs}{}", if cold { " cold" } else { "" });
        let before = store.reading();
        let report = program::report(&mut load(store, policy, &mode));
        for figure in ["p50_us", "p99_us", "lock_p50_us", "unlock_p50_us", "errors"] {
            samples.add(figure, report.figure(figure));
        }
        if let Some(asked) = store.asked_since(&before) {
            let all = (pairs + untimed) as f64;
            match asked.redis {
                Some(redis) => samples.add("scripts", redis.scripts / all),
                None => samples.add("packets", asked.requests / all),
            }
        }
    }
    let (floor, bar) = match store.kind {
        Kind::Redis => ("SET NX + delete", Some(Bar::OfFloor(1.15))),
        Kind::Memory => ("sharded Mutex", Some(Bar::AtMost(1.0))),
        Kind::ZooKeeper => ("create + list + delete", Some(Bar::OfFloor(0.85))),
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
    if let Some(packets) = samples.median("packets") {
        table.row(what, "packets per pair", packets, "");
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
            let url = || store.url.clone();
            let floor = match store.kind {
                Kind::Redis => Some(floor::many(RawLock::connect(url()), TASKS, *secs)),
                Kind::Memory => Some(floor::many(ready(Map::default()), TASKS, *secs)),
                Kind::ZooKeeper => Some(floor::many(RawTicket::connect(url()), TASKS, *secs)),
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
            Kind::ZooKeeper => ("create + list + delete", None),
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
