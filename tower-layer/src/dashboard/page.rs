//! The HTML of the page. `maud` escapes every text from outside.

use std::time::Duration;

use lockcore::events::Event;
use lockcore::inspect::{NameInUse, TicketInfo, visible};
use lockcore::semaphore::Semaphore;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::form::Action;
use super::happened::Happened;
use super::look::{Look, MOST_NAMES, Wanted};

const STYLE: &str = include_str!("style.css");

const SCRIPT: &str = include_str!("live.js");

/// How many places of a line are shown.
const MOST_PLACES: usize = 500;

/// What a page shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    pub(super) prefix: &'a str,
    pub(super) actions: bool,
    pub(super) wanted: &'a Wanted,
    pub(super) look: &'a Look,
    /// What has happened to the client of this process, the newest first.
    pub(super) happened: &'a [Happened],
}

/// The whole page. With a token it asks for a confirmation.
pub(super) fn whole(page: Page<'_>, nonce: &str, token: Option<&str>) -> Markup {
    let Page {
        prefix,
        wanted,
        look,
        ..
    } = page;
    let title = visible(wanted.name.as_deref().unwrap_or("Locks"));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style nonce=(nonce) { (PreEscaped(STYLE)) }
                @if token.is_none() {
                    noscript { meta http-equiv="refresh" content="5"; }
                }
            }
            body {
                @match &wanted.name {
                    Some(name) => {
                        nav { a href="?" { "All names" } }
                        h1 { (visible(name)) }
                    }
                    None => {
                        h1 { "Locks" }
                        form {
                            label {
                                "Names that begin with " (visible(prefix)) " "
                                input name="begin" value=(wanted.begin) autocomplete="off";
                            }
                            " "
                            label {
                                "and contain "
                                input name="part" value=(wanted.part) autocomplete="off";
                            }
                            " "
                            button { "Show" }
                        }
                    }
                }
                @match (token, wanted.ask, &wanted.name) {
                    (Some(token), Some((action, ticket)), Some(name)) => {
                        (question(action, ticket, name, token, look))
                    }
                    _ => {
                        p.wrong id="stale" role="status" hidden {}
                        main id="live" { (table(page)) }
                        script nonce=(nonce) { (PreEscaped(SCRIPT)) }
                    }
                }
            }
        }
    }
}

/// What the page shows of the store, and of this process.
pub(super) fn table(page: Page<'_>) -> Markup {
    let is_shown = |happened: &&Happened| match &happened.event {
        Event::Lost { name, .. } => match &page.wanted.name {
            Some(wanted) => name == wanted,
            None => name.starts_with(page.prefix),
        },
        _ => true,
    };
    let happened: Vec<_> = page.happened.iter().filter(is_shown).collect();
    html! {
        (of_the_store(page))
        @if !happened.is_empty() {
            h2 { "This process" }
            ul { @for happened in happened {
                li.text { (time(Some(happened.at.elapsed()))) " ago: " (what(&happened.event)) }
            } }
        }
    }
}

fn what(event: &Event) -> String {
    match event {
        Event::Suspended => "the store is out of reach".into(),
        Event::Restored => "the store answers again".into(),
        Event::Lost { name, reason, .. } => format!("lost {} ({reason:?})", visible(name)),
        Event::Moved(address) => {
            format!("{} leads to another server", visible(address))
        }
        Event::NodeDown(address) => format!("the node {} is out of reach", visible(address)),
        Event::NodeUp(address) => format!("the node {} is in reach again", visible(address)),
        Event::Missed(number) => format!("{number} events that were not seen"),
        other => format!("{other:?}"),
    }
}

fn of_the_store(page: Page<'_>) -> Markup {
    match page.look {
        Look::Names { names, more } => names_table(names, *more),
        Look::Line(line) => {
            let name = page.wanted.name.as_deref().unwrap_or_default();
            line_table(line, name, page.actions)
        }
        Look::Failed(error) => html! { p.wrong role="alert" { (error) } },
    }
}

fn names_table(names: &[NameInUse], more: bool) -> Markup {
    html! {
        @if names.is_empty() {
            p { "No name is in use." }
        } @else {
            table {
                thead { tr {
                    th { "Name" }
                    th.wide.number { "Holders" }
                    th.number { "Waiters" }
                    th.wide { "Since" }
                    th { "Longest wait" }
                    th.wide { "Held by" }
                } }
                tbody { @for used in names { (name_row(used)) } }
            }
        }
        @if more {
            p {
                "Only the " (MOST_NAMES) " names with the most waiters are shown. Type how the names begin, \
                 or a part of them, to see others."
            }
        }
    }
}

fn name_row(used: &NameInUse) -> Markup {
    let name = &used.name;
    html! {
        tr {
            td.text {
                @if used.is_whole {
                    a href=(link(&[("name", name)])) { (visible(name)) }
                } @else {
                    (visible(name)) "… (too long to inspect)"
                }
            }
            @match &used.summary {
                None => { td.wide.number { "?" } td.number { "?" } td.wide {} td {} td.wide {} }
                Some(summary) => {
                    td.wide.number { (summary.holders) }
                    td.number { (summary.waiters) }
                    td.wide { (time(summary.since)) }
                    td { (time(summary.longest_wait)) }
                    td.wide.text {
                        (owner(&summary.owner, summary.owner_text.as_deref()))
                        @if summary.holders > 1 { " and " (summary.holders - 1) " more" }
                    }
                }
            }
        }
    }
}

fn line_table(line: &[TicketInfo], name: &str, actions: bool) -> Markup {
    html! {
        @if line.is_empty() {
            p { "Free." }
        } @else {
            table {
                thead { tr {
                    th { "" }
                    th.wide.number { "Ticket" }
                    th.wide.number { "First token" }
                    th.wide { "Permits" }
                    th { "Since" }
                    th.wide { "Lease ends in" }
                    th { "Owner" }
                    th.wide { "Asked for by" }
                    @if actions { th { "" } }
                } }
                tbody { @for place in line.iter().take(MOST_PLACES) {
                    (place_row(place, name, actions))
                } }
            }
            @if line.len() > MOST_PLACES {
                p { "Only the first " (MOST_PLACES) " of " (line.len()) " places are shown." }
            }
        }
    }
}

fn place_row(place: &TicketInfo, name: &str, actions: bool) -> Markup {
    let ticket = place.ticket.to_string();
    let ask = |action: Action| {
        link(&[
            ("name", name),
            ("ticket", &ticket),
            ("action", action.text()),
        ])
    };
    html! {
        tr.holds[place.granted] {
            td { @if place.granted { "holds" } @else { "waits" } }
            td.wide.number { (place.ticket) }
            td.wide.number { @if let Some(token) = place.first_token() { (token) } }
            td.wide { (permits(place)) }
            td { (time(place.age)) }
            td.wide { (time(Some(place.remaining))) }
            td.text { (owner_of(place)) }
            td.wide.text {
                @if let Some(asked) = &place.asked_back {
                    (visible(&asked.by)) @if !asked.why.is_empty() { ": " (visible(&asked.why)) }
                }
            }
            @if actions {
                td.does.text {
                    @if place.granted {
                        a href=(ask(Action::Revoke)) { "ask for it" }
                        a href=(ask(Action::Release)) { "take away" }
                    }
                }
            }
        }
    }
}

fn question(action: Action, ticket: u64, name: &str, token: &str, look: &Look) -> Markup {
    let place = match look {
        Look::Line(line) => line
            .iter()
            .find(|place| place.ticket == ticket && place.granted),
        _ => None,
    };
    html! {
        main {
            @if let Look::Failed(error) = look { p.wrong role="alert" { (error) } }
            @match place {
                None => p { "This ticket does not hold the lock any more." },
                Some(place) => form method="post" action="?" {
                    @match action {
                        Action::Revoke => p {
                            "Ask " strong { (owner_of(place)) } " for this lock? It has 30 seconds to \
                             finish. Then its work is stopped, and the next in line gets the lock."
                        },
                        Action::Release => p {
                            "Take this lock away from " strong { (owner_of(place)) } "? The next one \
                             in line gets it at once. The owner may go on until its client learns of \
                             the loss, at its next renewal. If it is alive, ask for the lock instead."
                        },
                    }
                    input type="hidden" name="token" value=(token);
                    input type="hidden" name="name" value=(name);
                    input type="hidden" name="ticket" value=(ticket);
                    input type="hidden" name="action" value=(action.text());
                    @if action == Action::Revoke {
                        p { label { "Why " input name="why" maxlength="64"; } }
                    }
                    button { @match action {
                        Action::Revoke => "Ask for the lock",
                        Action::Release => "Take the lock away",
                    } }
                }
            }
            p { a href=(link(&[("name", name)])) { "Back" } }
        }
    }
}

/// A query with these fields. It works at every path.
pub(super) fn link(fields: &[(&str, &str)]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    format!("?{}", query.extend_pairs(fields).finish())
}

fn owner_of(place: &TicketInfo) -> String {
    owner(&place.owner, place.owner_text.as_deref())
}

fn owner(owner: &str, text: Option<&str>) -> String {
    let owner = visible(owner);
    match text {
        Some(text) => format!("{owner} ({})", visible(text)),
        None => owner,
    }
}

fn permits(place: &TicketInfo) -> String {
    match (place.permits, place.capacity) {
        _ if place.is_exclusive() => "all".into(),
        // No semaphore has so many: it is the read side of a lock.
        (_, capacity) if capacity > Semaphore::MAX_PERMITS => "shared".into(),
        (permits, capacity) => format!("{permits} of {capacity}"),
    }
}

/// Whole seconds, because a table that changes all the time cannot be read.
fn time(time: Option<Duration>) -> String {
    let Some(seconds) = time.map(|time| time.as_secs()) else {
        return String::new();
    };
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
