//! What the stores with tables share: from the rows of a database to the answers of the contract.
//! Here is no driver and no statement.
//!
//! Each verb gets its answer as rows, and each function here names the columns that it reads. Times
//! are in microseconds.

mod counter;
mod keys;
#[cfg(any(feature = "mysql", feature = "sqlite"))]
mod looks;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod upkeep;

use std::time::Duration;

use super::{
    Enqueued, Fault, Listing, NameInUse, Page, Renewed, Resize, ResizeOutcome, Resized, StoreError,
    Summary, TicketInfo,
};
use crate::request::Id;

pub(crate) use counter::{Step, step};
pub(crate) use keys::{behind, key, keys_like};
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(crate) use looks::Looks;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) use upkeep::Upkeep;

/// A row of an answer. A column that is missing, or that has another type, is an error.
pub(crate) trait Row {
    fn int(&self, column: &'static str) -> Result<Option<i64>, StoreError>;

    fn text(&self, column: &'static str) -> Result<Option<String>, StoreError>;

    fn id(&self, column: &'static str) -> Result<Option<Id>, StoreError>;

    /// A null is false.
    fn is(&self, column: &'static str) -> Result<bool, StoreError>;
}

/// The number in a column that is never null.
fn number(row: &impl Row, column: &'static str) -> Result<i64, StoreError> {
    row.int(column)?.ok_or_else(|| damaged(column))
}

/// The answer to an enqueue that asked for this ttl.
///
/// - `outcome`: 0 granted, 1 waiting, 2 busy, 3 another capacity is in use, 4 gone, 5 the numbers
///   of tickets are exhausted.
/// - `ticket`: its number, if it is granted or waits.
/// - `soonest_in`: when the first of the holders expires, if it is busy, or if it is the first that
///   waits.
/// - `in_use`: the other capacity.
pub(crate) fn enqueued(row: &impl Row, ttl: Duration) -> Result<Enqueued, StoreError> {
    let soonest_in = row.int("soonest_in")?.map(duration);
    let ticket = || Ok(unsigned(number(row, "ticket")?));
    Ok(match number(row, "outcome")? {
        0 => Enqueued::Granted {
            ticket: ticket()?,
            valid_for: ttl,
        },
        1 => Enqueued::Waiting {
            ticket: ticket()?,
            valid_for: ttl,
            recheck_in: soonest_in,
            ahead: None,
        },
        2 => Enqueued::Busy {
            retry_in: soonest_in,
        },
        3 => Enqueued::CapacityMismatch {
            in_use: permits(number(row, "in_use")?),
        },
        4 => Enqueued::Gone,
        5 => {
            return Err(StoreError::new(
                Fault::Refused,
                "ticket numbers are exhausted for this name; choose another name or LOCK_NAMESPACE",
            ));
        }
        _ => return Err(damaged("outcome")),
    })
}

/// The answer of a renewal for one ticket.
///
/// - `ticket`: its number; null if the ticket is lost.
/// - `ttl`: the time that it lives from now on.
/// - `holds`: whether it holds.
/// - `soonest_in`: when the first of the holders expires, if it is the first that waits.
/// - `owner`: its owner with the ask-back behind it, if it was asked back.
pub(crate) fn renewed(row: &impl Row) -> Result<Renewed, StoreError> {
    if row.int("ticket")?.is_none() {
        return Ok(Renewed::Lost);
    }
    let valid_for = duration(number(row, "ttl")?);
    Ok(match (row.is("holds")?, row.text("owner")?) {
        (true, Some(owner)) => Renewed::holding(valid_for, &owner),
        (true, None) => Renewed::Granted { valid_for },
        (false, _) => Renewed::Waiting {
            valid_for,
            recheck_in: row.int("soonest_in")?.map(duration),
            grace: None,
        },
    })
}

/// The answer to a read or a change of a stored capacity.
///
/// - `capacity`, `change`: the stored capacity and the id of its last change, after the request.
/// - `in_use`: the capacity of a ticket that forbids the change. A read does not have this column.
pub(crate) fn resized(row: &impl Row, resize: &Resize) -> Result<Resized, StoreError> {
    let (capacity, change) = (row.int("capacity")?.map(permits), row.id("change")?);
    let outcome = match resize.op {
        super::ResizeOp::Read => ResizeOutcome::Applied,
        super::ResizeOp::Set { after, .. } => match row.int("in_use")?.map(permits) {
            _ if change == Some(resize.id) => ResizeOutcome::Applied,
            Some(in_use) if change == after => ResizeOutcome::Mismatch { in_use },
            _ => ResizeOutcome::Kept,
        },
    };
    Ok(Resized::new(capacity, change, outcome))
}

/// A ticket as `inspect` shows it: `ticket`, `granted`, `permits`, `capacity` (the one that
/// counts), `remaining`, `age`, `owner` and `id`.
pub(crate) fn inspected(row: &impl Row) -> Result<TicketInfo, StoreError> {
    let ticket = TicketInfo::new(
        unsigned(number(row, "ticket")?),
        row.is("granted")?,
        permits(number(row, "permits")?),
        permits(number(row, "capacity")?),
        duration(number(row, "remaining")?),
        row.text("owner")?.unwrap_or_default(),
    )
    .with_age(duration(number(row, "age")?));
    Ok(match row.id("id")? {
        Some(id) => ticket.with_id(id),
        None => ticket,
    })
}

/// The page that has these rows. It is the last one if it is not full. The next one begins behind
/// the last key.
///
/// - `name`: the key.
/// - If summaries are wanted: `holders`, `waiters`, `owner` and `since` of the oldest holder, and
///   `longest_wait`. `holders` and `waiters` are null or 0 if the line was not summed up. Then it is
///   too long, or the page has too many tickets, or the last ticket has just gone.
pub(crate) fn page<R: Row>(rows: &[R], listing: &Listing) -> Result<Page, StoreError> {
    let mut names = Vec::with_capacity(rows.len());
    let mut last = None;
    for row in rows {
        let key = row.text("name")?.unwrap_or_default();
        if let Some(mut used) = NameInUse::of_key(&key, keys::READABLE) {
            if listing.summaries {
                used.summary = summary(row)?;
            }
            names.push(used);
        }
        last = Some(key);
    }
    let is_full = rows.len() >= listing.limit as usize;
    let next = last.filter(|_| is_full).map(Into::into);
    Ok(Page::new(names, next))
}

fn summary(row: &impl Row) -> Result<Option<Summary>, StoreError> {
    let count = |column| Ok::<_, StoreError>(unsigned(row.int(column)?.unwrap_or(0)));
    let time = |column| Ok::<_, StoreError>(row.int(column)?.map(duration));
    let summary = Summary {
        holders: count("holders")?,
        waiters: count("waiters")?,
        since: time("since")?,
        longest_wait: time("longest_wait")?,
        ..Summary::default()
    };
    let summary = summary.with_owner(&row.text("owner")?.unwrap_or_default());
    Ok(Some(summary).filter(|summary| summary.holders + summary.waiters > 0))
}

/// A time for a statement.
#[cfg(any(feature = "mysql", feature = "postgres"))] // SQLite takes milliseconds
pub(crate) fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(unsigned(micros))
}

/// The number is never negative, unless somebody has changed the tables.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn permits(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn damaged(column: &str) -> StoreError {
    StoreError::new(
        Fault::Unknown,
        format!("the answer of the database has no usable {column}"),
    )
}

#[cfg(test)]
mod tests;
