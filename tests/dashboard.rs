//! Checks the dashboard and the alerts beside the example `metrics`: each metric in them is one that
//! the guide lists, and the dashboard has all of them.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// The metrics of the guide, with their kinds. A test of lockcore compares the guide with the code.
fn metrics() -> BTreeMap<String, String> {
    let page = read("lockcore/src/guide/metrics.md");
    let rows = page.lines().filter(|line| line.starts_with("| `lockcore_"));
    let rows = rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        (cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
    });
    rows.collect()
}

/// The names of metrics in a text.
fn named(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_part(c));
    let ours = words.filter(|word| word.starts_with("lockcore_"));
    ours.map(str::to_owned).collect()
}

/// The metrics that a file uses. All of them must be in the guide.
fn known(file: &str) -> BTreeSet<String> {
    let metrics = metrics();
    let mut used = BTreeSet::new();
    for name in named(&read(file)) {
        // Prometheus stores a histogram as several series.
        let parts = ["_bucket", "_count", "_sum"];
        let whole = parts.iter().find_map(|part| name.strip_suffix(part));
        let (metric, is_part) = (whole.unwrap_or(&name), whole.is_some());
        let kind = metrics.get(metric);
        let kind = kind.unwrap_or_else(|| panic!("{file}: the guide does not know {name}"));
        assert_eq!(is_part, kind == "histogram", "{file}: {name} of a {kind}");
        used.insert(metric.to_owned());
    }
    used
}

#[test]
fn the_dashboard_and_the_alerts_use_the_metrics_of_the_guide() {
    let alerts = known("examples/examples/metrics/alerts.yml");
    assert!(alerts.len() >= 5, "{alerts:?}");

    let shown = known("examples/examples/metrics/grafana.json");
    assert_eq!(shown, metrics().into_keys().collect());
}

#[test]
fn the_dashboard_is_json_and_each_panel_has_a_query() {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("examples/examples/metrics/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 10);
    for panel in panels {
        let targets = panel["targets"].as_array().unwrap();
        let is_query = |target: &serde_json::Value| target["expr"].is_string();
        assert!(
            !targets.is_empty() && targets.iter().all(is_query),
            "{panel}"
        );
    }
}
