//! The workloads W1 and W2: acquire and release without contention, next to the floor.

use crate::Bench;
use crate::program::{self, load};
use crate::table::{Bar, Samples, Table};

/// The numbers of tasks of W2. The first has a bar, and the others show the trend.
const TASKS: [usize; 5] = [64, 1, 4, 16, 256];

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
    let (pairs, floor) = (store.terms.pairs, store.terms.floor);
    // The pairs that are not timed: one cycle over the keys before the run (unless cold), and one
    // pair on a name of its own.
    let untimed = if cold { 1 } else { 257 };
    let mut samples = Samples::default();
    for _ in bench.each_run(what) {
        if let Some(floor) = floor {
            let url = || store.url.clone();
            if let Some(ping) = floor.ping {
                samples.add("ping", ping(url(), pairs));
            }
            let before = store.reading();
            samples.add("floor", (floor.pairs)(url(), pairs, cold));
            let asked = store.asked_since(&before);
            if let Some(asked) = &asked {
                samples.add("floor cpu", asked.cpu_s * 1e6 / (pairs + untimed) as f64);
            }
            if let Some(redis) = asked.and_then(|asked| asked.redis) {
                let micros = redis.micros_in(&["set", "evalsha"]);
                samples.add("raw micros", micros / (pairs + untimed) as f64);
            }
        }
        let mode = format!("w1 {pairs}{}", if cold { " cold" } else { "" });
        if let Some((_, mut peer)) = program::peer(store, &mode) {
            samples.add("peer", program::report(&mut peer).figure("p50_us"));
        }
        let before = store.reading();
        let report = program::report(&mut load(store, policy, &mode));
        for figure in ["p50_us", "p99_us", "lock_p50_us", "unlock_p50_us", "errors"] {
            samples.add(figure, report.figure(figure));
        }
        if let Some(asked) = store.asked_since(&before) {
            let all = (pairs + untimed) as f64;
            samples.add("server cpu", asked.cpu_s * 1e6 / all);
            match asked.redis {
                Some(redis) => {
                    samples.add("scripts", redis.scripts / all);
                    samples.add("micros", redis.script_micros() / all);
                }
                None => samples.add("packets", asked.requests / all),
            }
        }
    }
    let floor_name = floor.map_or("", |floor| floor.pair);
    table
        .row(what, "pair p50", samples.median("p50_us"), "µs")
        .floor(floor_name, samples.median("floor"))
        .bar(store.terms.pair);
    if let Some((name, peer)) = store.terms.peer.zip(samples.median("peer")) {
        table
            .row(
                what,
                "pair p50, a peer's beside it",
                samples.median("p50_us"),
                "µs",
            )
            .floor(name, Some(peer));
    }
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
        // With several servers, each request goes to all of them, so the count is not 2.
        let exact = (store.servers_asked() == 1).then_some(Bar::Exactly(2.0));
        table.row(what, "scripts per pair", scripts, "").bar(exact);
        table
            .row(
                what,
                "time in scripts per pair",
                samples.median("micros"),
                "µs",
            )
            .floor(floor_name, samples.median("raw micros"))
            .bar(floor.map(|_| Bar::OfFloor(2.1)));
    }
    if let Some(cpu) = samples.median("server cpu") {
        table
            .row(what, "server CPU per pair", cpu, "µs")
            .floor(floor_name, samples.median("floor cpu"))
            .bar(store.terms.cpu);
    }
    if let Some(packets) = samples.median("packets") {
        table.row(what, "requests per pair", packets, "");
    }
    table
        .row(what, "errors", samples.most("errors"), "")
        .bar(Bar::Never);
}

pub(crate) fn many_clients(bench: &Bench, table: &mut Table) {
    for policy in &bench.policies {
        for tasks in TASKS {
            measure_many(bench, table, *policy, tasks);
        }
    }
}

fn measure_many(bench: &Bench, table: &mut Table, policy: program::Policy, tasks: usize) {
    let Bench { store, secs, .. } = bench;
    let judged = tasks == TASKS[0];
    let what = format!("W2 {tasks} {}", policy.name());
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        if let Some(floor) = store.terms.floor {
            samples.add("floor", (floor.many)(store.url.clone(), tasks, *secs));
        }
        let mode = format!("w2 {tasks} {secs}");
        if let Some((_, mut peer)) = program::peer(store, &mode) {
            samples.add("peer", program::report(&mut peer).figure("pairs_s"));
        }
        let before = store.reading();
        let report = program::report(&mut load(store, policy, &mode));
        for figure in ["pairs_s", "p50_us", "p99_us", "errors"] {
            samples.add(figure, report.figure(figure));
        }
        if let Some(asked) = store.asked_since(&before) {
            samples.add("server cpu", asked.cpu_s * 1e6 / report.figure("pairs"));
        }
    }
    table
        .row(&what, "pairs", samples.median("pairs_s"), "/s")
        .floor(
            store.terms.floor.map_or("", |floor| floor.pair),
            samples.median("floor"),
        )
        .bar(store.terms.many.filter(|_| judged));
    if let Some((name, peer)) = store.terms.peer.zip(samples.median("peer")) {
        table
            .row(
                &what,
                "pairs, a peer's beside them",
                samples.median("pairs_s"),
                "/s",
            )
            .floor(name, Some(peer))
            .bar(judged.then_some(Bar::TimesFloor(1.0)));
    }
    if let Some(cpu) = samples.median("server cpu") {
        table.row(&what, "server CPU per pair", cpu, "µs");
    }
    table.row(&what, "pair p50", samples.median("p50_us"), "µs");
    table.row(&what, "pair p99", samples.median("p99_us"), "µs");
    table
        .row(&what, "errors", samples.most("errors"), "")
        .bar(Bar::Never);
}
