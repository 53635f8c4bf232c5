//! The operations. Each is one text of statements and one transaction. This module also reads the
//! resulting rows, and determines which tickets to wake.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::params;

use super::events::Wakes;
use super::file::{self, File};
use super::layout;
use super::statements::{Row, column};
use crate::backend::{
    Departure, Enqueued, Fault, Listing, Page, Released, Renewed, Resize, ResizeOp, Resized,
    StoreError, TicketInfo, Wake, table,
};
use crate::name::Name;
use crate::request::{Id, Request};

pub(super) fn enqueue(
    file: &mut File,
    wakes: &mut Wakes,
    request: &Request,
    receiver: u64,
) -> Result<Enqueued, StoreError> {
    let key = layout::key(&request.name);
    let (process, epoch, ttl) = (file.process, file.epoch, millis(request.ttl));
    let now = layout::now_millis();
    // The clock is read before the file is locked. So other tickets live a moment too long rather
    // than a moment too short. The ticket of this request lives for its whole ttl all the same,
    // because the client counts the ttl from before it sent the request.
    let rows = file.transact_repeated(
        layout::ENQUEUE,
        params![
            request.id.to_string(),
            key,
            request.permits.get(),
            request.capacity.get(),
            ttl,
            request.wait,
            i64::try_from(request.highest_seen).unwrap_or(i64::MAX),
            receiver.cast_signed(),
            &*request.owner,
            now,
            layout::wall_micros(),
            process,
            epoch,
            // A SQLite that may damage its log could lose a waiter and keep the ticket ahead.
            request.name_ahead && file::is_sound(),
        ],
    )?;
    let row = the_answer(file, wakes, &rows, now)?;
    let mut answer = table::enqueued(row, duration(ttl))?;
    match &mut answer {
        Enqueued::Granted { .. } => wakes.looks.settled(request.id),
        Enqueued::Waiting { ahead, .. } => {
            *ahead = table::Row::id(row, "ahead")?;
            in_line(wakes, request.id, row, now + ttl)?;
        }
        Enqueued::Busy { .. } | Enqueued::CapacityMismatch { .. } | Enqueued::Gone => {}
    }
    Ok(answer)
}

pub(super) fn renew(
    file: &mut File,
    wakes: &mut Wakes,
    tickets: &[Arc<Request>],
) -> Result<Vec<Renewed>, StoreError> {
    let asked = tickets
        .iter()
        .map(|r| (r.id, r.permits.get(), Some(millis(r.ttl))));
    let now = layout::now_millis();
    let rows = ask_many(file, Verb::Renew, asked, now)?;
    let mut answers = HashMap::with_capacity(tickets.len());
    for row in &rows {
        if tell_unless_answer(wakes, row, now)? {
            let id = id(row)?;
            answers.insert(id, renewed(wakes, id, row, now)?);
        }
    }
    in_order(file, &answers, tickets.iter().map(|r| r.id))
}

fn renewed(wakes: &mut Wakes, id: Id, row: &Row, now: i64) -> Result<Renewed, StoreError> {
    let answer = table::renewed(row)?;
    match answer {
        Renewed::Waiting { valid_for, .. } => in_line(wakes, id, row, now + millis(valid_for))?,
        _ => wakes.looks.settled(id),
    }
    Ok(answer)
}

pub(super) fn release(
    file: &mut File,
    wakes: &mut Wakes,
    tickets: &[Departure],
) -> Result<Vec<Released>, StoreError> {
    let marks = tickets
        .iter()
        .map(|t| (t.request.id, u32::from(t.enqueue_may_follow), None));
    let now = layout::now_millis();
    let rows = ask_many(file, Verb::Release, marks, now)?;
    let mut answers = HashMap::with_capacity(tickets.len());
    for row in &rows {
        if tell_unless_answer(wakes, row, now)? {
            let id = id(row)?;
            wakes.looks.settled(id);
            let answer = match column::<i64>(row, "ticket")? {
                0 => Released::NotFound,
                _ => Released::Released,
            };
            answers.insert(id, answer);
        }
    }
    in_order(file, &answers, tickets.iter().map(|t| t.request.id))
}

/// Reads or changes the stored capacity of a name.
pub(super) fn resize(
    file: &mut File,
    wakes: &mut Wakes,
    resize: &Resize,
) -> Result<Resized, StoreError> {
    let key = layout::key(&resize.name);
    let ResizeOp::Set {
        capacity,
        after,
        stated,
    } = resize.op
    else {
        let rows = file.transact_repeated(layout::CAPACITY, params![key])?;
        let row = rows.first().ok_or_else(|| file.taken_over())?;
        if column::<i64>(row, "epoch")? != file.epoch {
            return Err(file.taken_over());
        }
        return table::resized(row, resize);
    };
    let (process, epoch, now) = (file.process, file.epoch, layout::now_millis());
    let rows = file.transact_repeated(
        layout::RESIZE,
        params![
            resize.id.to_string(),
            key,
            capacity,
            after.map(|id| id.to_string()),
            stated.get(),
            now,
            layout::wall_micros(),
            process,
            epoch,
        ],
    )?;
    let row = the_answer(file, wakes, &rows, now)?;
    table::resized(row, resize)
}

/// The operations on several tickets at once.
#[derive(Clone, Copy, PartialEq)]
enum Verb {
    Renew,
    Release,
}

/// The values for each id are described in `schema/ask_many.sql`.
fn ask_many(
    file: &mut File,
    verb: Verb,
    asked: impl Iterator<Item = (Id, u32, Option<i64>)>,
    now: i64,
) -> Result<Vec<Row>, StoreError> {
    let asked = layout::object(asked);
    let statements = match verb {
        Verb::Renew => layout::RENEW,
        Verb::Release => layout::RELEASE,
    };
    let (process, epoch) = (file.process, file.epoch);
    let arguments = params![asked, verb == Verb::Release, now, process, epoch];
    file.transact(statements, arguments)
}

/// One answer per ticket, in the order of the request. If the epoch is over, there are no answers,
/// and this is an error.
fn in_order<T: Copy>(
    file: &File,
    answers: &HashMap<Id, T>,
    asked: impl Iterator<Item = Id>,
) -> Result<Vec<T>, StoreError> {
    asked
        .map(|id| answers.get(&id).copied())
        .collect::<Option<_>>()
        .ok_or_else(|| file.taken_over())
}

/// Checks whether another process has granted a ticket of this process, or has made it the first in
/// line. Tells the clients of these tickets. If a check fails, the next one repeats it.
pub(super) fn look(file: &mut File, wakes: &mut Wakes) -> Result<(), StoreError> {
    wakes.looks.forget_ended(layout::now_millis());
    let version = file.data_version()?;
    if version == file.looked_at {
        return Ok(());
    }
    find_grants(file, wakes)?;
    // Both are noted only after a success. Otherwise the next check would not see the change, or
    // checks of a file that stays locked would follow each other without a pause.
    file.looked_at = version;
    wakes.looks.changed();
    Ok(())
}

fn find_grants(file: &mut File, wakes: &mut Wakes) -> Result<(), StoreError> {
    let (lines, process) = (wakes.lines(), file.process);
    let now = layout::now_millis();
    let rows = file.read(layout::GRANTED, params![lines, process])?;
    let mut granted = Vec::new();
    for row in &rows {
        let id = id(row)?;
        if !wakes.looks.is_waiting(id) {
            continue;
        }
        match column::<i64>(row, "holds")? {
            0 => tell_first(wakes, row, now)?,
            _ => granted.push(id),
        }
    }
    if granted.is_empty() {
        return Ok(());
    }
    // The process that granted these tickets has shortened their leases, because it could not know
    // whether this process would notice. But a waiter that gets a wake-up takes its lease to be as
    // long as its last request asked for. So this renews the tickets before it sends the wake-ups.
    let now = layout::now_millis();
    // With this number the tickets keep all their permits, because no ticket has more.
    let keep_all = granted.into_iter().map(|id| (id, u32::MAX, None));
    let rows = ask_many(file, Verb::Renew, keep_all, now)?;
    for row in &rows {
        if tell_unless_answer(wakes, row, now)? && renewed(wakes, id(row)?, row, now)?.holds() {
            wake(wakes, row)?;
        }
    }
    Ok(())
}

pub(super) fn inspect(file: &mut File, name: &Name) -> Result<Vec<TicketInfo>, StoreError> {
    let (key, now) = (layout::key(name), layout::now_millis());
    let rows = file.read(layout::INSPECT, params![key, now, layout::wall_micros()])?;
    rows.iter().map(table::inspected).collect()
}

/// A page begins behind the last key of the page before it.
pub(super) fn list(file: &mut File, listing: &Listing) -> Result<Page, StoreError> {
    let prefix = table::keys_like(&listing.namespace, layout::VERSION, &listing.prefix);
    let after = listing.after.as_deref().unwrap_or_default();
    let (now, behind) = (layout::now_millis(), table::behind(&prefix));
    let rows = match listing.summaries {
        false => file.read(
            layout::LIST,
            params![prefix, after, listing.limit, now, behind],
        ),
        true => file.read(
            layout::OVERVIEW,
            params![
                prefix,
                after,
                listing.limit,
                now,
                behind,
                layout::wall_micros()
            ],
        ),
    };
    table::page(&rows?, listing)
}

pub(super) fn ask_back(
    file: &mut File,
    wakes: &Wakes,
    name: &Name,
    id: Id,
    ask: &str,
) -> Result<bool, StoreError> {
    let (key, now) = (layout::key(name), layout::now_millis());
    let (process, epoch) = (file.process, file.epoch);
    let rows = file.transact(
        layout::ASK_BACK,
        params![key, id.to_string(), ask, now, process, epoch],
    )?;
    let Some(row) = rows.first() else {
        return Ok(false);
    };
    // A client of another process learns of the ask-back at its next renewal.
    if column::<i64>(row, "ours")? != 0 {
        let receiver: i64 = column(row, "receiver")?;
        wakes.recheck(receiver.cast_unsigned(), id, Duration::ZERO);
    }
    Ok(true)
}

pub(super) fn forget(file: &mut File, name: &Name) -> Result<(), StoreError> {
    let (key, now) = (layout::key(name), layout::now_millis());
    file.transact(layout::FORGET, params![key, now]).map(drop)
}

/// Handles all rows of a request, and returns the row with the answer. This row is missing if the
/// file was taken over.
fn the_answer<'r>(
    file: &File,
    wakes: &mut Wakes,
    rows: &'r [Row],
    now: i64,
) -> Result<&'r Row, StoreError> {
    let mut answer = None;
    for row in rows {
        if tell_unless_answer(wakes, row, now)? {
            answer = Some(row);
        }
    }
    answer.ok_or_else(|| file.taken_over())
}

/// Whether a row of enqueue, renew or release answers the request. Any other row is about another
/// ticket: then this function tells the client of that ticket.
fn tell_unless_answer(wakes: &mut Wakes, row: &Row, now: i64) -> Result<bool, StoreError> {
    match column::<i64>(row, "kind")? {
        0 => return Ok(true),
        1 => wake(wakes, row)?,
        _ => tell_first(wakes, row, now)?,
    }
    Ok(false)
}

/// Notes that the ticket waits for its grant. If it is not renewed, it ends at `ends`.
fn in_line(wakes: &mut Wakes, id: Id, row: &Row, ends: i64) -> Result<(), StoreError> {
    let foreign_ahead = column::<i64>(row, "foreign_ahead")? != 0;
    wakes
        .looks
        .waits(id, column(row, "name")?, ends, foreign_ahead);
    Ok(())
}

/// Tells the client of the first ticket that waits to recheck it, because no wake-up comes when a
/// holder's lease ends.
fn tell_first(wakes: &Wakes, row: &Row, now: i64) -> Result<(), StoreError> {
    let receiver: i64 = column(row, "receiver")?;
    if let Some(at) = column::<Option<i64>>(row, "soonest")? {
        wakes.recheck(receiver.cast_unsigned(), id(row)?, duration(at - now));
    }
    Ok(())
}

fn wake(wakes: &mut Wakes, row: &Row) -> Result<(), StoreError> {
    let wake = Wake {
        id: id(row)?,
        ticket: unsigned(column(row, "ticket")?),
    };
    let receiver: i64 = column(row, "receiver")?;
    wakes.granted(receiver.cast_unsigned(), wake);
    Ok(())
}

fn id(row: &Row) -> Result<Id, StoreError> {
    let id = table::Row::id(row, "id")?;
    id.ok_or_else(|| StoreError::new(Fault::Unknown, "SQLite: an id is missing"))
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn duration(millis: i64) -> Duration {
    Duration::from_millis(unsigned(millis))
}

/// The number is never negative, unless somebody has tampered with the file.
pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests;
