//! Counters, one row each. A change reads the row, and then writes it only if no other process has
//! written it in between. These are two transactions, so the file is not locked in between. If
//! another process was faster, the answer is a conflict, and the core sends the request again.

use std::time::Duration;

use rusqlite::params;

use super::file::File;
use super::layout;
use super::statements::column;
use super::tickets::unsigned;
use crate::backend::table::{self, Step};
use crate::backend::{Count, Counted, Fault, StoreError};

pub(super) fn count(file: &mut File, count: &Count) -> Result<Counted, StoreError> {
    let key = layout::key(&count.name);
    let now = layout::now_millis() / 1000;
    let rows = file.transact_repeated(layout::COUNTER, params![key, now])?;
    let row = rows.first().ok_or_else(|| file.taken_over())?;
    if column::<i64>(row, "epoch")? != file.epoch {
        return Err(file.taken_over());
    }
    let clock = Duration::from_millis(unsigned(layout::now_millis()));
    let wall = Duration::from_micros(unsigned(layout::wall_micros()));
    let (was, data, life, answer) = match table::step(row, count, clock, wall, damaged)? {
        Step::Answer(answer) => return Ok(answer),
        // Changes are not pushed.
        Step::Write {
            was,
            data,
            life,
            answer,
            news: _,
        } => (was, data, life, answer),
    };
    let now: i64 = column(row, "now")?;
    let written =
        file.transact_repeated(layout::SET_COUNTER, params![key, data, now, life, was])?;
    match written.is_empty() {
        false => Ok(answer),
        true => Err(StoreError::conflict(
            "SQLite: another process has changed the counter at the same moment",
        )),
    }
}

fn damaged() -> StoreError {
    StoreError::new(
        Fault::Config,
        "SQLite: a row of the table counters is not one of lockcore; delete it",
    )
}
