//! `lockcore watch`: a line at each change. The tool looks again and again: at the line of a name, or
//! at the summaries of many names and at the lines that may have changed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use lockcore::Locks;
use lockcore::inspect::{Summary, TicketInfo, visible};
use serde::Serialize;

use crate::args::Watch;
use crate::exit::{self, Exit};
use crate::say::say;
use crate::{PAUSES, ls, show};

/// Even if its summary shows no change, each line is looked at after this many looks: a summary does
/// not show who is asked for a lock.
const LOOKS: u32 = 10;
/// By how much the age of a ticket may be wrong. It is measured on two machines.
const INEXACT: Duration = Duration::from_millis(200);

/// What the last look at a name has shown.
struct Seen {
    line: BTreeMap<u64, TicketInfo>,
    summary: Option<Summary>,
    at: Instant,
    /// How many looks have passed since the line was read.
    looks: u32,
}

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
    let mut seen = BTreeMap::new();
    let mut failed = false;
    let mut is_first = true;
    loop {
        let began = Instant::now();
        match look(locks, &watch, &seen).await {
            Ok(now) => {
                if std::mem::take(&mut failed) {
                    say("the store answers again");
                }
                tell_changes(&watch, &seen, &now)?;
                seen = now;
                is_first = false;
            }
            // It is said once, and the next looks are at what has changed meanwhile.
            Err(error) if error.code == exit::UNAVAILABLE && !is_first => {
                if !std::mem::replace(&mut failed, true) {
                    let why = error.message.unwrap_or_default();
                    say(format_args!("{}: looking again", visible(&why)));
                }
            }
            Err(error) => return Err(error),
        }
        let took = began.elapsed();
        let pause = watch.every.saturating_sub(took);
        // A store that is down needs no rest.
        let rest = if failed {
            Duration::ZERO
        } else {
            took * PAUSES
        };
        tokio::time::sleep(pause.max(rest)).await;
    }
}

async fn look(
    locks: &Locks,
    watch: &Watch,
    seen: &BTreeMap<String, Seen>,
) -> Result<BTreeMap<String, Seen>, Exit> {
    let at = Instant::now();
    let names = match watch.prefix {
        true => {
            let names = ls::look(locks, &watch.name).await?.into_iter();
            names
                .filter(|used| used.is_whole)
                .map(|used| (used.name, used.summary))
                .collect()
        }
        false => vec![(watch.name.clone(), None)],
    };
    let mut now = BTreeMap::new();
    for (name, summary) in names {
        let before = seen.get(&name);
        let unchanged = before.filter(|seen| seen.stays(summary.as_ref(), at));
        let (line, looks) = match unchanged {
            Some(seen) => (seen.line.clone(), seen.looks + 1),
            None => {
                let line = locks.inspect(&name).await?.into_iter();
                (line.map(|place| (place.ticket, place)).collect(), 0)
            }
        };
        let seen = Seen {
            line,
            summary,
            at,
            looks,
        };
        now.insert(name, seen);
    }
    Ok(now)
}

impl Seen {
    /// Whether a summary shows that the line of a single holder has not changed.
    fn stays(&self, now: Option<&Summary>, at: Instant) -> bool {
        let (Some(before), Some(now)) = (&self.summary, now) else {
            return false;
        };
        let is_alone = |summary: &Summary| summary.holders == 1 && summary.waiters == 0;
        let same_owner = before.owner == now.owner && before.owner_text == now.owner_text;
        // Another ticket of the same owner is younger.
        let same_ticket = before.since.zip(now.since).is_some_and(|(before, now)| {
            let expected = before + at.duration_since(self.at);
            before > INEXACT * 2 && now + INEXACT >= expected
        });
        self.looks < LOOKS && is_alone(before) && is_alone(now) && same_owner && same_ticket
    }
}

fn tell_changes(
    watch: &Watch,
    seen: &BTreeMap<String, Seen>,
    now: &BTreeMap<String, Seen>,
) -> Result<(), Exit> {
    let before = |name: &str, ticket| seen.get(name)?.line.get(ticket);
    for (name, now) in now {
        for (ticket, place) in &now.line {
            if let Some(change) = change(before(name, ticket), place) {
                tell(watch, change, name, place)?;
            }
        }
    }
    for (name, seen) in seen {
        let line = now.get(name).map(|now| &now.line);
        let is_gone = |ticket| line.is_none_or(|line| !line.contains_key(ticket));
        for (_, place) in seen.line.iter().filter(|(ticket, _)| is_gone(ticket)) {
            tell(watch, Change::Gone, name, place)?;
        }
    }
    Ok(())
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
    let (name, owner) = (visible(name), show::owner_of(place));
    let (ticket, what) = (place.ticket, what(change, place));
    Ok(show::line(&format!(
        "{at}  {name}  {ticket} {owner} {what}"
    ))?)
}

fn what(change: Change, place: &TicketInfo) -> String {
    match (change, show::token(place)) {
        (Change::Waits, _) => "waits".into(),
        (Change::Holds, Some(token)) => format!("holds, token {token}"),
        (Change::Holds, None) => "holds".into(),
        (Change::AskedBack, _) => "is asked for it".into(),
        (Change::Gone, _) => "is gone".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_shown_with_its_token_if_it_has_one() {
        let holder = |permits, capacity| {
            let lease = Duration::from_secs(9);
            TicketInfo::new(7, true, permits, capacity, lease, "shop-1/4711/1".into())
        };

        let writer = holder(1 << 30, 1 << 30);
        assert_eq!(what(Change::Holds, &writer), "holds, token 7168");
        assert_eq!(what(Change::Gone, &writer), "is gone");
        assert_eq!(what(Change::Holds, &holder(1, 1)), "holds");
    }

    #[test]
    fn a_line_stays_if_its_holder_is_alone_and_grows_older() {
        let all = 1 << 30;
        let secs = Duration::from_secs;
        let holder = |ticket, age| {
            let owner = "shop-1/4711/1".into();
            TicketInfo::new(ticket, true, all, all, secs(9), owner).with_age(age)
        };
        let at = Instant::now();
        let seen = |age, looks| Seen {
            line: BTreeMap::from([(7, holder(7, age))]),
            summary: Some(Summary::of(&[holder(7, age)])),
            at,
            looks,
        };
        let stays =
            |seen: Seen, line: &[TicketInfo]| seen.stays(Some(&Summary::of(line)), at + secs(1));

        assert!(stays(seen(secs(5), 0), &[holder(7, secs(6))]));
        assert!(
            !stays(seen(secs(5), LOOKS), &[holder(7, secs(6))]),
            "long ago"
        );
        assert!(
            !stays(seen(secs(5), 0), &[holder(8, secs(1))]),
            "another ticket"
        );
        assert!(
            !stays(seen(Duration::ZERO, 0), &[holder(8, secs(1))]),
            "perhaps another"
        );
        let two = [holder(7, secs(6)), holder(8, secs(6))];
        assert!(!stays(seen(secs(5), 0), &two));
        assert!(!seen(secs(5), 0).stays(None, at));
    }
}
