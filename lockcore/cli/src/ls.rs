//! `lockcore ls`: the names in use.

use lockcore::Locks;
use lockcore::inspect::{NameInUse, NamesInUse, Summary, visible};
use serde::Serialize;

use crate::args::Ls;
use crate::exit::Exit;
use crate::show;

/// How many names the store is asked for at once.
const PAGE: u32 = 1_000;

/// A name in JSON. Times are in seconds.
#[derive(Serialize)]
struct Json<'a> {
    name: &'a str,
    /// False if the store keeps only the beginning of this name.
    is_whole: bool,
    #[serde(flatten)]
    summary: Option<JsonSummary<'a>>,
}

#[derive(Serialize)]
struct JsonSummary<'a> {
    holders: u64,
    waiters: u64,
    owner: &'a str,
    owner_text: Option<&'a str>,
    since: Option<f64>,
    longest_wait: Option<f64>,
}

pub(crate) async fn ls(locks: &Locks, ls: Ls) -> Result<(), Exit> {
    let used = match ls.names {
        true => names(locks, &ls.prefix).await?,
        false => look(locks, &ls.prefix).await?,
    };
    if ls.json || ls.names {
        for used in &used {
            match ls.json {
                true => show::json(&json(used))?,
                false => show::line(&shown(used))?,
            }
        }
        return Ok(());
    }
    let rows: Vec<_> = used.iter().map(row).collect();
    match rows.is_empty() {
        true => Ok(()),
        false => Ok(show::table(
            ["NAME", "HOLDERS", "WAITERS", "HELD BY", "LONGEST WAIT"],
            &rows,
        )?),
    }
}

/// The names in use, sorted, each once, with their summaries.
pub(crate) async fn look(locks: &Locks, prefix: &str) -> Result<Vec<NameInUse>, Exit> {
    all(locks.list(prefix).with_summaries()).await
}

/// The names in use, sorted, each once.
pub(crate) async fn names(locks: &Locks, prefix: &str) -> Result<Vec<NameInUse>, Exit> {
    all(locks.list(prefix)).await
}

async fn all(pages: NamesInUse) -> Result<Vec<NameInUse>, Exit> {
    let mut pages = pages.page_size(PAGE);
    let mut names = Vec::new();
    while let Some(page) = pages.next().await? {
        names.extend(page);
    }
    names.sort();
    names.dedup_by(|one, other| one.name == other.name && one.is_whole == other.is_whole);
    Ok(names)
}

fn json(used: &NameInUse) -> Json<'_> {
    let summary = used.summary.as_ref().map(|summary| JsonSummary {
        holders: summary.holders,
        waiters: summary.waiters,
        owner: &summary.owner,
        owner_text: summary.owner_text.as_deref(),
        since: summary.since.map(|age| age.as_secs_f64()),
        longest_wait: summary.longest_wait.map(|age| age.as_secs_f64()),
    });
    Json {
        name: &used.name,
        is_whole: used.is_whole,
        summary,
    }
}

pub(crate) fn shown(used: &NameInUse) -> String {
    let name = visible(&used.name);
    match used.is_whole {
        true => name,
        false => format!("{name}…"),
    }
}

fn row(used: &NameInUse) -> [String; 5] {
    let Some(summary) = &used.summary else {
        return [
            shown(used),
            "?".into(),
            "?".into(),
            TOO_LONG.into(),
            String::new(),
        ];
    };
    [
        shown(used),
        summary.holders.to_string(),
        summary.waiters.to_string(),
        held_by(summary),
        summary.longest_wait.map_or_else(String::new, show::span),
    ]
}

/// Shown in place of the holder of a name that the store can neither sum up nor inspect.
pub(crate) const TOO_LONG: &str = "(the name is too long to inspect)";

/// The first of the holders, and how many more there are.
pub(crate) fn held_by(summary: &Summary) -> String {
    let first = show::owner(&summary.owner, summary.owner_text.as_deref());
    match summary.holders {
        0 | 1 => first,
        holders => format!("{first} and {} more", holders - 1),
    }
}
