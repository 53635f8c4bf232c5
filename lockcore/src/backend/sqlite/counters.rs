//! Counters, one row each. A change reads the row, and then writes it only if no other process has
//! written it in between. These are two transactions, so the file is not locked in between. If
//! another process was faster, the answer is a conflict, and the core sends the request again.

use std::time::Duration;

use rusqlite::params;

use super::file::File;
use super::layout;
use super::statements::column;
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::counting::{Carried, Record};

pub(super) fn count(file: &mut File, count: &Count) -> Result<Counted, StoreError> {
    let key = layout::key(&count.name);
    let now = layout::now_millis() / 1000;
    let rows = file.transact_repeated(layout::COUNTER, params![key, now])?;
    let row = rows.first().ok_or_else(|| file.taken_over())?;
    if column::<i64>(row, "epoch")? != file.epoch {
        return Err(file.taken_over());
    }
    let was: Option<String> = column(row, "data")?;
    let now: i64 = column(row, "now")?;
    let [used, life] = ["used", "life"].map(|time| column::<Option<i64>>(row, time));
    let unused = now - used?.unwrap_or(now);
    let mut record = match &was {
        // If the row is there after its lifetime, it counts as removed.
        Some(data) if unused <= life?.unwrap_or(0) => Record::decode(data).ok_or_else(damaged)?,
        _ => Record::default(),
    };
    let (millis, micros) = (layout::now_millis(), layout::wall_micros());
    let answer = match record.carry_out(count, millis.unsigned_abs(), micros.unsigned_abs()) {
        // This read notes the use of the counter.
        Carried::Answered(answer) if record.exists() && unused > seconds(record.slack()) => answer,
        Carried::Answered(answer) => return Ok(answer),
        Carried::Changed { answer, .. } => answer,
        Carried::Crowded => return Err(StoreError::crowded()),
    };
    let data = record.encode();
    let arguments = params![key, data, now, seconds(record.life()), was];
    let written = file.transact_repeated(layout::SET_COUNTER, arguments)?;
    match written.is_empty() {
        false => Ok(answer),
        true => Err(StoreError::conflict(
            "SQLite: another process has changed the counter at the same moment",
        )),
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn damaged() -> StoreError {
    StoreError::new(
        Fault::Config,
        "SQLite: a row of the table counters is not one of lockcore; delete it",
    )
}
