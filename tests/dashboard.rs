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

/// The values of each label in the guide, by what they are the label of: `outcome of a renewal`.
fn values() -> BTreeMap<String, BTreeSet<String>> {
    let page = read("lockcore/src/guide/metrics.md");
    let (_, labels) = page.split_once("| label | values |").unwrap();
    let rows = labels
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let rows = rows.map(|row| {
        let (_, row) = row.split_once('|').unwrap();
        let (label, values) = row.split_once('|').unwrap();
        // Every second part is between backticks.
        let values = values.split('`').skip(1).step_by(2).map(str::to_owned);
        (label.trim().replace('`', ""), values.collect())
    });
    rows.collect()
}

/// The labels of a metric, and the row of the guide that has the values of each.
fn labels(metric: &str) -> BTreeMap<String, String> {
    let page = read("lockcore/src/guide/metrics.md");
    let row = format!("| `{metric}` |");
    let row = page.lines().find(|line| line.starts_with(&row)).unwrap();
    let labels = row.split('|').nth(3).unwrap();
    let labels = labels.split('`').skip(1).step_by(2).map(|label| {
        let of = match (label, metric) {
            ("outcome", "lockcore_acquisitions_total") => " of an acquisition",
            ("outcome", "lockcore_renewals_total") => " of a renewal",
            ("outcome", "lockcore_store_request_seconds") => " of a request",
            _ => "",
        };
        (label.to_owned(), format!("{label}{of}"))
    });
    labels.collect()
}

/// The pairs of label and value behind each metric in a query, with the name of the metric.
fn selected(query: &str) -> Vec<(String, String, String)> {
    let mut all = Vec::new();
    for (begin, _) in query.match_indices("lockcore_") {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = query[begin..].split(|c| !is_part(c)).next().unwrap();
        let Some(rest) = query[begin + name.len()..].strip_prefix('{') else {
            continue;
        };
        let (pairs, _) = rest.split_once('}').unwrap();
        for pair in pairs.split(',') {
            let (label, value) = pair.split_once('=').unwrap();
            let value = value.trim_start_matches('~').trim_matches('"');
            for value in value.split('|') {
                all.push((name.to_owned(), label.trim().to_owned(), value.to_owned()));
            }
        }
    }
    all
}

#[test]
fn the_alerts_use_the_labels_and_values_of_the_guide() {
    let (values, metrics) = (values(), metrics());
    let of_series = |name: &str| {
        let parts = ["_bucket", "_count", "_sum"];
        let whole = parts.iter().find_map(|part| name.strip_suffix(part));
        let is_known = |name: &&str| metrics.contains_key(*name);
        whole.filter(is_known).unwrap_or(name).to_owned()
    };
    let alerts = read("examples/examples/metrics/alerts.yml");
    let mut compared = 0;
    for alert in alerts.split("- alert: ").skip(1) {
        let query = alert
            .lines()
            .find_map(|line| line.trim().strip_prefix("expr: "));
        let query = query.unwrap();
        // Prometheus adds these, and every metric has the last two.
        let mut known: BTreeSet<String> = ["le", "job", "instance", "store", "namespace"]
            .map(Into::into)
            .into();
        for name in named(query) {
            known.extend(labels(&of_series(&name)).into_keys());
        }
        for (series, label, value) in selected(query) {
            let labels = labels(&of_series(&series));
            let row = labels
                .get(&label)
                .unwrap_or_else(|| panic!("{series} has no {label}"));
            let values = &values[row];
            assert!(
                values.contains(&value),
                "{series}: {label} is never {value}"
            );
            compared += 1;
        }
        let mut kept = BTreeSet::new();
        for by in query.split(" by (").skip(1) {
            let (by, _) = by.split_once(')').unwrap();
            kept.extend(by.split(',').map(|label| label.trim().to_owned()));
        }
        assert!(kept.is_subset(&known), "{kept:?} {known:?}");
        for label in alert.split("$labels.").skip(1) {
            let label = label.split(' ').next().unwrap();
            assert!(kept.contains(label), "the alert does not keep {label}");
        }
    }
    assert!(compared >= 5, "{compared}");
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
