//! Measures how costs grow: with the number of held leases, of names that were used once, of
//! waiters of one name, or of waiters that give up. The tables in the guides of the stores have
//! these numbers. The ttl is the default of the library, because renewals are a part of the costs.

use std::thread::sleep;
use std::time::Duration;

use tests::measure::now;
use tests::process::Process;

use crate::program::{Policy, SOON, end, load_as_by_default, report};
use crate::store::Asked;
use crate::table::{Bar, Samples, Table};
use crate::{Bench, leases};

const LEASES: [usize; 4] = [100, 1_000, 10_000, 100_000];
/// The numbers of names. The third number is used only at a store that counts its commands.
const NAMES: [usize; 3] = [100, 10_000, 1_000_000];
/// The numbers of waiters. They are at most 9,000, because a line has room for 10,000 tickets.
const WAITERS: [usize; 5] = [1, 10, 100, 1_000, 9_000];

const RELEASES: usize = 10;
/// If a server has got no request for this long, it has got everything that a process had to send.
const QUIET: Duration = Duration::from_millis(300);

pub(crate) fn measure(bench: &Bench, table: &mut Table) {
    let most = bench.store.terms.leases;
    for leases in LEASES.into_iter().filter(|leases| *leases <= most) {
        hold(bench, leases, table);
    }
    let is_counted = bench.store.memory_used().is_some();
    for names in NAMES
        .into_iter()
        .filter(|names| is_counted || *names < 1_000_000)
    {
        use_once(bench, names, table);
    }
    for waiters in WAITERS {
        hand_over(bench, waiters, table);
    }
    for waiters in WAITERS.into_iter().filter(|waiters| *waiters >= RELEASES) {
        give_up(bench, waiters, table);
    }
}

fn hold(bench: &Bench, leases: usize, table: &mut Table) {
    let what = format!("leases {leases}");
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        let mode = format!("w7 {leases}");
        let load = load_as_by_default(&bench.store, Policy::Default, &mode);
        leases::hold(&bench.store, leases, load, &mut samples);
    }
    let figures = [
        ("requests", "requests", "/s"),
        ("server CPU", "server cpu", "% of a core"),
        ("CPU", "cpu", "% of a core"),
        ("server memory per lease", "server memory", "bytes"),
        ("memory per lease", "memory", "bytes"),
    ];
    rows(table, &what, &samples, &figures);
    table
        .row(&what, "not held at the end", samples.most("lost"), "")
        .bar(Bar::Never);
}

fn use_once(bench: &Bench, names: usize, table: &mut Table) {
    let store = &bench.store;
    let what = format!("names {names}");
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        let empty = store.memory_used();
        let mode = format!("w1 {names} cold");
        let report = report(&mut load_as_by_default(store, Policy::Strict, &mode));
        samples.add("pair", report.figure("p50_us"));
        if let (Some(empty), Some(full)) = (empty, store.memory_used()) {
            samples.add("left", (full - empty) / names as f64);
        }
    }
    let figures = [
        ("pair p50", "pair", "µs"),
        ("left per name", "left", "bytes"),
    ];
    rows(table, &what, &samples, &figures);
}

fn hand_over(bench: &Bench, waiters: usize, table: &mut Table) {
    let what = format!("waiters {waiters}");
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        let mode = format!("w6 {waiters} 0 {RELEASES} slope-{}", now());
        let report = in_line(bench, &mode, &mut samples);
        samples.add("release", report * 1e6 / RELEASES as f64);
    }
    let figures = [
        ("per release", "release", "µs"),
        ("in scripts per release", "scripts", "µs"),
        ("requests per release", "packets", ""),
    ];
    rows(table, &what, &samples, &figures);
}

fn give_up(bench: &Bench, waiters: usize, table: &mut Table) {
    let what = format!("waiters that give up, of {waiters}");
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        let mode = format!("give-up {waiters} {RELEASES} slope-{}", now());
        in_line(bench, &mode, &mut samples);
    }
    let figures = [
        ("in scripts per waiter", "scripts", "µs"),
        ("requests per waiter", "packets", ""),
    ];
    rows(table, &what, &samples, &figures);
}

/// Runs a mode with a line, and adds what each of its [`RELEASES`] steps costs at the server.
/// Returns how many seconds the steps took.
fn in_line(bench: &Bench, mode: &str, samples: &mut Samples) -> f64 {
    let store = &bench.store;
    let mut process = Process::start(&mut load_as_by_default(store, Policy::Strict, mode));
    process.expect("READY", SOON);
    let before = store.reading();
    process.say("go");
    process.expect("DONE", SOON);
    let mut asked = store.asked_since(&before);
    while let Some(Asked { requests, .. }) = asked {
        sleep(QUIET);
        asked = store.asked_since(&before);
        if asked
            .as_ref()
            .is_some_and(|asked| asked.requests == requests)
        {
            break;
        }
    }
    match asked {
        Some(Asked {
            redis: Some(redis), ..
        }) => samples.add("scripts", redis.script_micros() / RELEASES as f64),
        Some(asked) => samples.add("packets", asked.requests / RELEASES as f64),
        None => {}
    }
    end(process).figure("seconds")
}

fn rows(
    table: &mut Table,
    what: &str,
    samples: &Samples,
    figures: &[(&str, &'static str, &'static str)],
) {
    for (figure, sample, unit) in figures {
        if let Some(value) = samples.median(sample) {
            table.row(what, *figure, value, unit);
        }
    }
}
