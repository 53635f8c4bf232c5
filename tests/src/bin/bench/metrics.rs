//! The workload `metrics`: acquire and release with a recorder of metrics, next to the same without
//! one. The library has its feature `metrics` in both.

use crate::Bench;
use crate::program::{self, load};
use crate::table::{Bar, Samples, Table};

pub(crate) fn pairs(bench: &Bench, table: &mut Table) {
    let store = &bench.store;
    for policy in &bench.policies {
        let what = format!("metrics {}", policy.name());
        let mode = format!("w1 {}", store.terms.pairs);
        let mut samples = Samples::default();
        for _ in bench.each_run(&what) {
            for (figure, arguments) in [("without", &[][..]), ("with", &["--metrics"])] {
                let report = program::report(load(store, *policy, &mode).args(arguments));
                samples.add(figure, report.figure("p50_us"));
                samples.add("errors", report.figure("errors"));
            }
        }
        table
            .row(
                &what,
                "pair p50 with a recorder",
                samples.median("with"),
                "µs",
            )
            .floor("without one", samples.median("without"));
        table
            .row(&what, "errors", samples.most("errors"), "")
            .bar(Bar::Never);
    }
}
