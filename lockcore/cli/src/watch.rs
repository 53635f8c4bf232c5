//! `lockcore watch`: a line at each change. The tool looks at the line of each name again and again,
//! so it costs the store a request per name and look.

use std::collections::BTreeMap;
use std::time::SystemTime;

use lockcore::Locks;
use lockcore::inspect::TicketInfo;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};

use crate::args::Watch;
use crate::exit::Exit;
use crate::{ls, show};

/// The tickets that the last look has shown, by name and number.
type Seen = BTreeMap<(String, u64), TicketInfo>;

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    Waits,
    Holds,
    AskedBack,
    Gone,
}

#[derive(Serialize)]
struct Changed<'a> {
    at: String,
    change: Change,
    #[serde(flatten)]
    place: show::Place<'a>,
}

pub(crate) async fn watch(locks: &Locks, watch: Watch) -> Result<(), Exit> {
    let mut looks = interval(watch.every);
    // After a look that took long, the next one is not made up for.
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = Seen::new();
    loop {
        looks.tick().await;
        let now = look(locks, &watch).await?;
        for (key, place) in &now {
            if let Some(change) = change(seen.get(key), place) {
                tell(&watch, change, &key.0, place)?;
            }
        }
        for (key, place) in seen.iter().filter(|(key, _)| !now.contains_key(*key)) {
            tell(&watch, Change::Gone, &key.0, place)?;
        }
        seen = now;
    }
}

async fn look(locks: &Locks, watch: &Watch) -> Result<Seen, Exit> {
    let names = match watch.prefix {
        true => {
            let names = ls::names(locks, &watch.name).await?.into_iter();
            names
                .filter(|used| used.is_whole)
                .map(|used| used.name)
                .collect()
        }
        false => vec![watch.name.clone()],
    };
    let mut seen = Seen::new();
    for name in names {
        for place in locks.inspect(&name).await? {
            seen.insert((name.clone(), place.ticket), place);
        }
    }
    Ok(seen)
}

fn change(before: Option<&TicketInfo>, now: &TicketInfo) -> Option<Change> {
    let was_held = before.is_some_and(|place| place.granted);
    match before {
        Some(before) if now.asked_back != before.asked_back && now.asked_back.is_some() => {
            Some(Change::AskedBack)
        }
        _ if now.granted && !was_held => Some(Change::Holds),
        None => Some(Change::Waits),
        Some(_) => None,
    }
}

fn tell(watch: &Watch, change: Change, name: &str, place: &TicketInfo) -> Result<(), Exit> {
    let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    if watch.json {
        let place = show::Place::of(name, place);
        return Ok(show::json(&Changed { at, change, place })?);
    }
    let what = match change {
        Change::Waits => "waits",
        Change::Holds => "holds",
        Change::AskedBack => "is asked for it",
        Change::Gone => "is gone",
    };
    let (name, owner) = (show::on_one_line(name), show::owner_of(place));
    Ok(show::line(&format!(
        "{at}  {name}  {} {owner} {what}",
        place.ticket
    ))?)
}
