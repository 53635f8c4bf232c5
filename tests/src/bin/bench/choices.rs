//! The workloads `metrics` and `linger`: acquire and release with a choice of the user, next to the
//! same without it.

use crate::Bench;
use crate::program::{self, Policy, load};
use crate::table::{Bar, Samples, Table};

/// A recorder of metrics. The library has its feature `metrics` with and without it.
pub(crate) fn metrics(bench: &Bench, table: &mut Table) {
    for policy in &bench.policies {
        pairs(bench, table, *policy, "metrics", "--metrics", None);
    }
}

/// Locks that stay with their process for 20 ms. It has no effect in strict order.
pub(crate) fn linger(bench: &Bench, table: &mut Table) {
    if bench.policies.contains(&Policy::Default) {
        let bar = Bar::AtMost(3.0);
        pairs(
            bench,
            table,
            Policy::Default,
            "linger",
            "--linger=20ms",
            Some(bar),
        );
    }
}

fn pairs(
    bench: &Bench,
    table: &mut Table,
    policy: Policy,
    workload: &str,
    choice: &str,
    bar: Option<Bar>,
) {
    let store = &bench.store;
    let what = format!("{workload} {}", policy.name());
    let mode = format!("w1 {}", store.terms.pairs);
    let mut samples = Samples::default();
    for _ in bench.each_run(&what) {
        for (figure, arguments) in [("without", &[][..]), ("with", &[choice])] {
            let report = program::report(load(store, policy, &mode).args(arguments));
            samples.add(figure, report.figure("p50_us"));
            samples.add("errors", report.figure("errors"));
        }
    }
    table
        .row(
            &what,
            format!("pair p50 with {choice}"),
            samples.median("with"),
            "µs",
        )
        .floor("without", samples.median("without"))
        .bar(bar);
    table
        .row(&what, "errors", samples.most("errors"), "")
        .bar(Bar::Never);
}
