//! Counters and values, one row each. A change reads the row, and then writes it only if nobody has
//! written it in between. No name is locked. If another client was faster, the answer is a
//! conflict, and the core sends the request again.
//!
//! The write waits for the disk in its own transaction, and nobody sees it before that. So a read
//! shows nothing that a crash could take back.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;

use super::calls::{self, VERSION, only};
use super::errors::failed;
use super::events::channel_of_counter;
use super::link::Link;
use crate::backend::table::{self, Row as _, Step};
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::name::Name;

pub(super) async fn count(link: Arc<Link>, count: Arc<Count>) -> Result<Counted, StoreError> {
    let key = table::key(&count.name, VERSION);
    let row = only(link.calls().ask(&calls::COUNTER, &[&key]).await?)?;
    let micros = row.int("clock")?.unwrap_or(0);
    let clock = Duration::from_micros(micros.unsigned_abs());
    let (was, data, life, answer, news) = match table::step(&row, &count, clock, damaged)? {
        Step::Answer(answer) => return Ok(answer),
        Step::Write {
            was,
            data,
            life,
            answer,
            news,
        } => (was, data, life, answer, news),
    };
    let setting = link.durability.setting();
    link.calls().prepared(&calls::SET_COUNTER).await?;
    if news {
        link.calls().prepared(&calls::CHANGED).await?;
    }
    let set: [calls::Parameter<'_>; 5] = [
        &key,
        &data.as_bytes(),
        &was.as_deref().map(str::as_bytes),
        &life,
        &setting,
    ];
    let set = link.calls().ask(&calls::SET_COUNTER, &set);
    // Both requests are sent by the first poll, in this order. So if the future is dropped after
    // that, the clients that watch are told all the same. They may be told of a conflict, too. If
    // they cannot be told, they read the counter by themselves within a minute.
    let tell = async {
        if news {
            let channel = channel_of_counter(&count.name);
            let _ = link.calls().ask(&calls::CHANGED, &[&channel]).await;
        }
    };
    let warnings = link.ears.warnings();
    let (written, ()) = join(set, tell).await;
    link.upkeep.count();
    match only(written?)?.is("written")? {
        // Of the requests on this connection, only those of counters wait for a standby.
        true if link.ears.warnings() != warnings => Err(StoreError::halfway(
            Fault::Unknown,
            "PostgreSQL: somebody has ended the wait for a standby, which may not have the change",
        )),
        true => Ok(answer),
        false => Err(StoreError::conflict(
            "PostgreSQL: another client has changed the counter at the same moment",
        )),
    }
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
