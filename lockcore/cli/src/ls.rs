//! `lockcore ls`: the names in use.

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lockcore::Locks;
use lockcore::inspect::{NameInUse, TicketInfo};
use serde::Serialize;

use crate::args::Ls;
use crate::exit::Exit;
use crate::show;

/// How many names are inspected at the same time.
const AT_A_TIME: usize = 16;

/// A name in JSON.
#[derive(Serialize)]
struct Json<'a> {
    name: &'a str,
    /// False if the store keeps only the beginning of this name.
    is_whole: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<Vec<show::Place<'a>>>,
}

/// A name in use, with its line.
pub(crate) type Used = (NameInUse, Vec<TicketInfo>);

pub(crate) async fn ls(locks: &Locks, ls: Ls) -> Result<(), Exit> {
    if ls.names {
        for used in &names(locks, &ls.prefix).await? {
            match ls.json {
                true => show::json(&json(used, None))?,
                false => show::line(&shown(used))?,
            }
        }
        return Ok(());
    }
    let used = look(locks, &ls.prefix).await?;
    if ls.json {
        for (used, line) in &used {
            show::json(&json(used, Some(line)))?;
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

/// The names in use, sorted, each with its line.
pub(crate) async fn look(locks: &Locks, prefix: &str) -> Result<Vec<Used>, Exit> {
    let names = names(locks, prefix).await?;
    let lines = stream::iter(&names).map(|used| line_of(locks, used));
    let lines: Vec<_> = lines.buffered(AT_A_TIME).try_collect().await?;
    let used = names.into_iter().zip(lines);
    // A name that went out of use since the list was made is left out.
    Ok(used
        .filter(|(used, line)| !used.is_whole || !line.is_empty())
        .collect())
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

fn json<'a>(used: &'a NameInUse, line: Option<&'a Vec<TicketInfo>>) -> Json<'a> {
    let places = |line: &'a Vec<TicketInfo>| {
        let places = line.iter().map(|place| show::Place::of(&used.name, place));
        places.collect()
    };
    Json {
        name: &used.name,
        is_whole: used.is_whole,
        line: line.map(places),
    }
}

pub(crate) fn shown(used: &NameInUse) -> String {
    let name = show::on_one_line(&used.name);
    match used.is_whole {
        true => name,
        false => format!("{name}…"),
    }
}

fn row((used, line): &Used) -> [String; 5] {
    let waiters = line.iter().filter(|place| !place.granted);
    let longest = waiters.clone().filter_map(|place| place.age).max();
    let waiters = waiters.count();
    [
        shown(used),
        (line.len() - waiters).to_string(),
        waiters.to_string(),
        held_by(used, line),
        longest.map_or_else(String::new, show::span),
    ]
}

/// The first of the holders, and how many more there are.
pub(crate) fn held_by(used: &NameInUse, line: &[TicketInfo]) -> String {
    let holders: Vec<_> = line.iter().filter(|place| place.granted).collect();
    match holders.as_slice() {
        [] if !used.is_whole => "(the name is too long to inspect)".into(),
        [] => String::new(),
        [first] => show::owner(first),
        [first, rest @ ..] => format!("{} and {} more", show::owner(first), rest.len()),
    }
}
