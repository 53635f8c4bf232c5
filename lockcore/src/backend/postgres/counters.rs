//! Counters and values, one row each. A change reads the row, and then writes it only if nobody has
//! written it in between. No name is locked. If another client was faster, the answer is a
//! conflict, and the core sends the request again.
//!
//! Others see a change before the disk has it. So a read waits for the disk too: it shows nothing
//! that a crash could take back.

use std::sync::Arc;
use std::time::Duration;

use super::calls::{self, VERSION, only};
use super::errors::failed;
use super::events::channel_of_counter;
use super::link::{Asked, Link};
use crate::backend::table::{self, Row as _, Step};
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::name::Name;

pub(super) async fn count(link: Arc<Link>, count: Arc<Count>) -> Result<Counted, StoreError> {
    let key = table::key(&count.name, VERSION);
    let Asked {
        rows, mut lasts, ..
    } = link.ask(&calls::COUNTER, &[&key]).await?;
    let row = only(rows)?;
    let micros = row.int("clock")?.unwrap_or(0);
    let clock = Duration::from_micros(micros.unsigned_abs());
    let answer = match table::step(&row, &count, clock, clock, damaged)? {
        Step::Answer(answer) => answer,
        Step::Write {
            was,
            data,
            life,
            answer,
            news,
        } => {
            // The clients that watch read the counter. They may do so before the disk has it.
            let channel = news.then(|| channel_of_counter(&count.name));
            let parameters: [calls::Parameter<'_>; 5] = [
                &key,
                &data.as_bytes(),
                &was.as_deref().map(str::as_bytes),
                &life,
                &channel,
            ];
            let set = link.ask(&calls::SET_COUNTER, &parameters).await?;
            lasts = set.lasts;
            link.upkeep.count();
            if !only(set.rows)?.is("written")? {
                return Err(StoreError::conflict(
                    "PostgreSQL: another client has changed the counter at the same moment",
                ));
            }
            answer
        }
    };
    let counts = link.counts(lasts).await;
    counts.map_err(|error| error.carried_out(Fault::Unknown))?;
    Ok(answer)
}

pub(super) async fn watch(link: Arc<Link>, name: Name) -> Result<(), StoreError> {
    let channel = channel_of_counter(&name);
    // This comes before the request, because a message may come together with the answer.
    link.ears.watched().insert(channel.clone(), name);
    let text = format!("LISTEN \"{channel}\"");
    let listens = link.calls().client().batch_execute(&text).await;
    if listens.is_err() {
        link.ears.watched().remove(&channel);
    }
    listens.map_err(failed)
}

pub(super) async fn unwatch(link: Arc<Link>, name: Name) -> Result<(), StoreError> {
    let channel = channel_of_counter(&name);
    link.ears.watched().remove(&channel);
    let text = format!("UNLISTEN \"{channel}\"");
    let ended = link.calls().client().batch_execute(&text).await;
    ended.map_err(failed)
}

fn damaged() -> StoreError {
    StoreError::new(
        Fault::Config,
        "PostgreSQL: a row of the table lockcore1.counters is not one of lockcore; delete it",
    )
}
