//! `lockcore inspect`: the line of one name.

use lockcore::Locks;
use lockcore::inspect::{TicketInfo, visible};

use crate::args::Inspect;
use crate::exit::Exit;
use crate::show;

const HEADS: [&str; 9] = [
    "",
    "TICKET",
    "TOKEN",
    "PERMITS",
    "SINCE",
    "LEASE ENDS IN",
    "OWNER",
    "TEXT",
    "ASKED FOR BY",
];

pub(crate) async fn inspect(locks: &Locks, inspect: Inspect) -> Result<(), Exit> {
    let line = locks.inspect(&inspect.name).await?;
    if inspect.json {
        for place in &line {
            show::json(&show::Place::of(&inspect.name, place))?;
        }
        return Ok(());
    }
    if line.is_empty() {
        let name = visible(&inspect.name);
        return Ok(show::line(&format!("{name}: free"))?);
    }
    let rows: Vec<_> = line.iter().map(row).collect();
    Ok(show::table(HEADS, &rows)?)
}

fn row(place: &TicketInfo) -> [String; 9] {
    let asked = place
        .asked_back
        .as_ref()
        .map(|asked| match asked.why.as_str() {
            "" => visible(&asked.by),
            why => format!("{}: {}", visible(&asked.by), visible(why)),
        });
    [
        if place.granted { "holds" } else { "waits" }.into(),
        place.ticket.to_string(),
        show::token(place).unwrap_or_default(),
        show::permits(place),
        place.age.map_or_else(String::new, show::span),
        show::span(place.remaining),
        visible(&place.owner),
        visible(place.owner_text.as_deref().unwrap_or_default()),
        asked.unwrap_or_default(),
    ]
}
