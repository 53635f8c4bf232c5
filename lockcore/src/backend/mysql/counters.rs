//! Counters and values, one row each. A change reads the row, and then writes it only if nobody has
//! written it in between. No name is locked. If another client was faster, the answer is a
//! conflict, and the core sends the request again.

use std::sync::Arc;
use std::time::Duration;

use super::calls::{Call, VERSION, only};
use super::link::Inner;
use crate::backend::table::{self, Row as _, Step};
use crate::backend::{Count, Counted, Fault, StoreError};

pub(super) async fn count(link: Arc<Inner>, count: Arc<Count>) -> Result<Counted, StoreError> {
    let key = table::key(&count.name, VERSION);
    let row = only(
        link.ask(Call::of("counter").bytes(&key), Vec::new())
            .await?,
    )?;
    let micros = row.int("clock")?.unwrap_or(0);
    let clock = Duration::from_micros(micros.unsigned_abs());
    let (was, data, life, answer) = match table::step(&row, &count, clock, clock, damaged)? {
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
    let call = Call::of("set_counter")
        .bytes(&key)
        .bytes(data)
        .or_null(was, Call::bytes)
        .number(life);
    link.upkeep.count();
    match only(link.ask(call, Vec::new()).await?)?.is("written")? {
        true => Ok(answer),
        false => Err(StoreError::conflict(
            "MySQL: another client has changed the counter at the same moment",
        )),
    }
}

fn damaged() -> StoreError {
    StoreError::new(
        Fault::Config,
        "MySQL: a row of the table lockcore1_counters is not one of lockcore; delete it",
    )
}
