//! `lockcore ls`: the names in use.

use std::time::Duration;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lockcore::{Locks, NameInUse, TicketInfo};
use serde::Serialize;

use crate::args::Ls;
use crate::exit::Exit;
use crate::show;

/// How many names are inspected at the same time.
const AT_A_TIME: usize = 16;

/// A name in JSON.
#[derive(Serialize)]
struct Used<'a> {
    name: &'a str,
    /// False if the store keeps only the beginning of this name.
    is_whole: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<Vec<show::Place<'a>>>,
}

pub(crate) async fn ls(locks: &Locks, ls: Ls) -> Result<(), Exit> {
    let names = names(locks, &ls.prefix).await?;
    if ls.names {
        for used in &names {
            match ls.json {
                true => show::json(&json(used, None))?,
                false => show::line(&shown(used))?,
            }
        }
        return Ok(());
    }
    // In the order of the list, so the output is sorted.
    let lines = stream::iter(&names).map(|used| line_of(locks, used));
    let lines: Vec<_> = lines.buffered(AT_A_TIME).try_collect().await?;
    let used = names.iter().zip(&lines);
    // A name that went out of use since the list was made is left out.
    let used = used.filter(|(used, line)| !used.is_whole || !line.is_empty());
    if ls.json {
        for (used, line) in used {
            show::json(&json(used, Some(line)))?;
        }
        return Ok(());
    }
    let rows: Vec<_> = used.map(|(used, line)| row(used, line)).collect();
    match rows.is_empty() {
        true => Ok(()),
        false => Ok(show::table(
            ["NAME", "HOLDERS", "WAITERS", "HELD BY", "LONGEST WAIT"],
            &rows,
        )?),
    }
}

/// The names in use, sorted, each once.
pub(crate) async fn names(locks: &Locks, prefix: &str) -> Result<Vec<NameInUse>, Exit> {
    let mut pages = locks.list(prefix);
    let mut names = Vec::new();
    while let Some(page) = pages.next().await? {
        names.extend(page);
    }
    names.sort();
    names.dedup();
    Ok(names)
}

async fn line_of(locks: &Locks, used: &NameInUse) -> Result<Vec<TicketInfo>, lockcore::Error> {
    match used.is_whole {
        true => locks.inspect(&used.name).await,
        false => Ok(Vec::new()),
    }
}

fn json<'a>(used: &'a NameInUse, line: Option<&'a Vec<TicketInfo>>) -> Used<'a> {
    let places = |line: &'a Vec<TicketInfo>| {
        let places = line.iter().map(|place| show::Place::of(&used.name, place));
        places.collect()
    };
    Used {
        name: &used.name,
        is_whole: used.is_whole,
        line: line.map(places),
    }
}

fn shown(used: &NameInUse) -> String {
    let name = show::on_one_line(&used.name);
    match used.is_whole {
        true => name,
        false => format!("{name}…"),
    }
}

fn row(used: &NameInUse, line: &[TicketInfo]) -> [String; 5] {
    let (holders, waiters): (Vec<_>, Vec<_>) = line.iter().partition(|place| place.granted);
    let held_by = match holders.as_slice() {
        [] if !used.is_whole => "(the name is too long to inspect)".into(),
        [] => String::new(),
        [first] => show::owner(first),
        [first, rest @ ..] => format!("{} and {} more", show::owner(first), rest.len()),
    };
    let longest = waiters.iter().filter_map(|place| place.age).max();
    [
        shown(used),
        holders.len().to_string(),
        waiters.len().to_string(),
        held_by,
        longest.map_or_else(String::new, |wait: Duration| show::span(wait)),
    ]
}
