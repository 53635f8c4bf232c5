//! What all commands need to print: owners, times, tables, and JSON.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap_complete::Shell;
use lockcore::inspect::{TicketInfo, visible};
use lockcore::semaphore::Semaphore;
use serde::Serialize;
use unicode_width::UnicodeWidthStr as _;

use crate::exit::Exit;

/// The space between two columns.
const GAP: &str = "  ";

/// A time as people say it: two units at most, and no more exact than a millisecond.
pub(crate) fn span(time: Duration) -> String {
    let rounded = match time {
        short if short < Duration::from_secs(10) => Duration::from_millis(millis(short)),
        long => Duration::from_secs(long.as_secs()),
    };
    let text = humantime::format_duration(rounded).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The owner of a ticket: machine, process and client, and behind them the application's text.
pub(crate) fn owner_of(place: &TicketInfo) -> String {
    owner(&place.owner, place.owner_text.as_deref())
}

pub(crate) fn owner(owner: &str, text: Option<&str>) -> String {
    let owner = visible(owner);
    match text {
        Some(text) => format!("{owner} ({})", visible(text)),
        None => owner,
    }
}

/// A holder in one phrase.
pub(crate) fn holder(place: &TicketInfo) -> String {
    let owner = owner_of(place);
    match place.age {
        Some(age) => format!("{owner}, in line or holding for {}", span(age)),
        None => owner,
    }
}

/// Prints a line on standard output.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush() // a reader at the other end of a pipe gets each line at once
}

/// Prints a JSON object on a line.
pub(crate) fn json(value: &impl Serialize) -> io::Result<()> {
    line(&serde_json::to_string(value).map_err(io::Error::other)?)
}

/// A count in JSON.
#[derive(Serialize)]
struct Count<'a, N> {
    name: &'a str,
    count: N,
}

/// Prints the count of a latch or of a counter.
pub(crate) fn count(json: bool, name: &str, count: impl Serialize + Display) -> io::Result<()> {
    match json {
        true => self::json(&Count { name, count }),
        false => line(&count.to_string()),
    }
}

/// Prints rows in columns. On a narrow terminal each row is a block of lines, because cut columns
/// would hide what a person looks for.
pub(crate) fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let widths: [usize; N] = std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| row[column].width());
        cells.chain([heads[column].width()]).max().unwrap_or(0)
    });
    let whole = widths.iter().sum::<usize>() + GAP.len() * (N - 1);
    if terminal_width().is_some_and(|terminal| whole > terminal) {
        return blocks(heads, rows);
    }
    line(&padded(heads, &widths))?;
    for row in rows {
        line(&padded(
            std::array::from_fn(|column| row[column].as_str()),
            &widths,
        ))?;
    }
    Ok(())
}

fn padded<const N: usize>(cells: [&str; N], widths: &[usize; N]) -> String {
    let mut text = String::new();
    for (cell, width) in cells.into_iter().zip(widths) {
        text.push_str(cell);
        text.push_str(&" ".repeat(width - cell.width() + GAP.len()));
    }
    text.truncate(text.trim_end().len());
    text
}

fn blocks<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let head = heads.iter().map(|head| head.width()).max().unwrap_or(0);
    for (number, row) in rows.iter().enumerate() {
        if number > 0 {
            line("")?;
        }
        let cells = heads.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
        for (name, cell) in cells {
            let pad = " ".repeat(head - name.width());
            line(&format!("{name}{pad}{GAP}{cell}"))?;
        }
    }
    Ok(())
}

/// The columns of the terminal that standard output goes to, if it goes to one.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col.into()).filter(|columns| *columns > 0)
}

/// A ticket in JSON. Times are in seconds.
#[derive(Serialize)]
pub(crate) struct Place<'a> {
    name: &'a str,
    ticket: u64,
    /// The fencing token of the first holder of this ticket, if the ticket is exclusive. Each holder
    /// after it in the same process has one more. It is a text because it has more digits than a
    /// number has in many JSON readers.
    first_token: Option<String>,
    holds: bool,
    permits: u32,
    capacity: u32,
    owner: &'a str,
    owner_text: Option<&'a str>,
    age: Option<f64>,
    remaining: f64,
    asked_back: Option<AskedBack<'a>>,
}

#[derive(Serialize)]
struct AskedBack<'a> {
    by: &'a str,
    why: &'a str,
    grace: f64,
}

impl<'a> Place<'a> {
    pub(crate) fn of(name: &'a str, place: &'a TicketInfo) -> Self {
        Self {
            name,
            ticket: place.ticket,
            first_token: token(place),
            holds: place.granted,
            permits: place.permits,
            capacity: place.capacity,
            owner: &place.owner,
            owner_text: place.owner_text.as_deref(),
            age: place.age.map(|age| age.as_secs_f64()),
            remaining: place.remaining.as_secs_f64(),
            asked_back: place.asked_back.as_ref().map(|asked| AskedBack {
                by: &asked.by,
                why: &asked.why,
                grace: asked.grace.as_secs_f64(),
            }),
        }
    }
}

/// The fencing token of the first holder of a ticket, if the ticket is exclusive.
pub(crate) fn token(place: &TicketInfo) -> Option<String> {
    place.first_token().map(|token| token.to_string())
}

/// The permits of a ticket: a mutex and the write side of a lock have all.
pub(crate) fn permits(place: &TicketInfo) -> String {
    match (place.permits, place.capacity) {
        _ if place.is_exclusive() => "all".into(),
        // No semaphore has so many: it is the read side of a lock.
        (_, capacity) if capacity > Semaphore::MAX_PERMITS => "shared".into(),
        (permits, capacity) => format!("{permits} of {capacity}"),
    }
}

/// Prints a completion script.
pub(crate) fn completions(shell: Shell, command: &mut clap::Command) -> Result<ExitCode, Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, command, "lockcore", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the manual pages.
pub(crate) fn manual(folder: &Path, command: clap::Command) -> Result<ExitCode, Exit> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command, folder)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units_at_most() {
        let spans = [
            (12, "12ms"),
            (1_234, "1s 234ms"),
            (75_400, "1m 15s"),
            (90_061_000, "1day 1h"),
        ];
        for (millis, text) in spans {
            assert_eq!(span(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn only_a_ticket_that_excludes_all_others_has_all_permits_and_a_token() {
        let full = 1 << 30;
        let shown = |permits, capacity| {
            let lease = Duration::from_secs(9);
            let place = TicketInfo::new(7, true, permits, capacity, lease, "shop-1/4711/1".into());
            (self::permits(&place), token(&place))
        };
        let exclusive = ("all".to_owned(), Some("7168".to_owned()));
        let shared = |text: &str| (text.to_owned(), None);

        assert_eq!(shown(full, full), exclusive);
        assert_eq!(shown(full - 1, full), exclusive, "a reader that writes");
        assert_eq!(shown(1, full), shared("shared"));
        assert_eq!(shown(2, 3), shared("2 of 3"));
        assert_eq!(shown(1, 1), shared("1 of 1"), "a semaphore");
        assert_eq!(shown(1, 0), shared("1 of 0"), "a semaphore made smaller");
    }
}
