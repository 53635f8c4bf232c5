//! Counters in a table, one row each. A request reads the row, and writes it only if nobody has
//! written it in between. The rule is in `counting`.

use std::time::Duration;

use super::{Row, damaged};
use crate::backend::{Count, Counted, StoreError};
use crate::counting::{Carried, Record};

/// What to do after the read.
#[derive(Debug)]
pub(crate) enum Step {
    /// Nothing: this is the answer.
    Answer(Counted),
    /// To write the row, if its data is still `was`. Then this is the answer.
    Write {
        was: Option<String>,
        data: String,
        /// For how many seconds the row stays after its last use.
        life: i64,
        answer: Counted,
        /// Whether to tell the clients that watch the counter.
        #[cfg_attr(
            not(feature = "postgres"),
            allow(dead_code, reason = "SQLite tells nobody of changes")
        )]
        news: bool,
    },
}

/// Carries out a request on the row that was read: `data` (null if there is no row), `used` (when
/// it was used last, in s), `life` (for how many s it stays after that), and `now` (in s, by the
/// clock of `used`). If the data is not that of a counter, the error is `damaged`.
///
/// The changes that the record remembers have times of `clock`, in milliseconds. New versions
/// follow `wall`, the wall clock, in microseconds.
pub(crate) fn step(
    row: &impl Row,
    count: &Count,
    clock: Duration,
    wall: Duration,
    not_a_counter: impl FnOnce() -> StoreError,
) -> Result<Step, StoreError> {
    let was = row.text("data")?;
    let now = row.int("now")?.ok_or_else(|| damaged("now"))?;
    let unused = now - row.int("used")?.unwrap_or(now);
    let life = row.int("life")?.unwrap_or(0);
    let mut record = match &was {
        // If the row is there after its lifetime, it counts as removed.
        Some(data) if unused <= life => Record::decode(data).ok_or_else(not_a_counter)?,
        _ => Record::default(),
    };
    let millis = u64::try_from(clock.as_millis()).unwrap_or(u64::MAX);
    let micros = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
    let (answer, news) = match record.carry_out(count, millis, micros) {
        // This read notes the use of the counter.
        Carried::Answered(answer) if record.exists() && unused > seconds(record.slack()) => {
            (answer, false)
        }
        Carried::Answered(answer) => return Ok(Step::Answer(answer)),
        Carried::Changed { answer, news } => (answer, news),
        Carried::Crowded => return Err(StoreError::crowded()),
    };
    Ok(Step::Write {
        was,
        data: record.encode(),
        life: seconds(record.life()),
        answer,
        news,
    })
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
