//! Counters, one row each. A change reads the row, and then writes it only if no other process has
//! written it in between. These are two transactions, so the file is not locked in between. If
//! another process was faster, the answer is [`Fault::Retry`], and the core sends the request
//! again.

use super::file::{File, column};
use super::layout;
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::counting::{Carried, Record};

/// If a counter was not used for this time, a read writes the row too, to note the use. The row has
/// a day left at that moment: see `schema/sweep.sql`.
const USED_FOR_SECONDS: i64 = 12 * 60 * 60;

/// After this time without use, a counter counts as removed, even if its row is there.
const LIFE_SECONDS: i64 = 36 * 60 * 60;

pub(super) async fn count(file: &mut File, count: &Count) -> Result<Counted, StoreError> {
    let key = layout::key(&count.name);
    let rows = file
        .transact_repeated(|| sqlx::query(layout::COUNTER).bind(key.clone()))
        .await?;
    let row = rows.first().ok_or_else(|| file.taken_over())?;
    if column::<i64>(row, "epoch")? != file.epoch {
        return Err(file.taken_over());
    }
    let micros = layout::wall_micros();
    let seconds = micros / 1_000_000;
    let was: Option<String> = column(row, "data")?;
    let unused = seconds - column::<Option<i64>>(row, "used")?.unwrap_or(0);
    let mut record = match &was {
        Some(data) if unused <= LIFE_SECONDS => Record::decode(data).ok_or_else(damaged)?,
        _ => Record::default(),
    };
    let now = layout::now_millis().unsigned_abs();
    let answer = match record.carry_out(count, now, micros.unsigned_abs()) {
        Carried::Answered(answer) if record.exists() && unused > USED_FOR_SECONDS => answer,
        Carried::Answered(answer) => return Ok(answer),
        Carried::Changed { answer, .. } => answer,
        Carried::Crowded => return Err(StoreError::crowded()),
    };
    let data = record.encode();
    let written = file
        .transact_repeated(|| {
            sqlx::query(layout::SET_COUNTER)
                .bind(key.clone())
                .bind(data.clone())
                .bind(seconds)
                .bind(was.clone())
        })
        .await?;
    match written.is_empty() {
        false => Ok(answer),
        true => Err(StoreError::new(
            Fault::Retry,
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
