//! Counters and values. Both use one script, and a channel for each counter or value that is
//! watched.

use std::sync::Arc;

use redis::{Cmd, RedisWrite as _};

use super::changed::CountAnswer;
use super::connection::RedisConnection;
use super::errors::failed;
use super::layout;
use super::tickets::{run, unexpected, unreadable};
use crate::backend::{Count, CountOp, Counted, Fault, OnlyIf, Outcome, StoreError, Written};
use crate::name::Name;

/// Reads or changes a counter.
///
/// If the URL asks for durability, a read writes too: what it has read may not count yet, and must
/// not be lost after a caller has acted on it. When that write is acknowledged, all earlier writes
/// are too. A repetition writes for the same reason. If a change does not count in time, its outcome
/// is unknown, and the core sends the same id again.
pub(super) async fn count(
    mut connection: RedisConnection,
    count: Arc<Count>,
) -> Result<CountAnswer, StoreError> {
    let is_durable = connection.member.is_some();
    // In a cluster, only the connections that listen in the slot of the name get the message.
    let publish = match connection.hop {
        Some(_) => "SPUBLISH",
        None => "PUBLISH",
    };
    let (key, channel) = layout::counter(&count.name);
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(&key);
        call.write_arg_fmt(count.id);
        let (verb, number, bound) = match &count.op {
            CountOp::Read if is_durable => ("keep", None, None),
            CountOp::Read => ("read", None, None),
            CountOp::Add { delta, floor } => ("add", Some(*delta), floor.map(|at| at.to_string())),
            CountOp::Set { count, only_if } => match only_if {
                None => ("set", Some(*count), None),
                Some(OnlyIf::Count(at)) => ("if", Some(*count), Some(at.to_string())),
                Some(OnlyIf::Version(at)) => ("at", Some(*count), Some(at.to_string())),
            },
            CountOp::Write(Written { token, text }) => {
                ("write", Some(token.as_i64()), Some(text.to_string()))
            }
        };
        call.write_arg_fmt(verb);
        call.write_arg_fmt(number.map_or_else(String::new, |number| number.to_string()));
        call.write_arg(bound.unwrap_or_default().as_bytes());
        call.write_arg_fmt(&channel);
        call.write_arg_fmt(publish);
        let keep = count.keep_seconds();
        call.write_arg_fmt(keep.map_or_else(String::new, |keep| keep.to_string()));
        for id in &count.answered {
            call.write_arg_fmt(id);
        }
    };
    let namespace = count.name.namespace();
    let reply = run(&mut connection, &layout::COUNT, namespace, 1, write).await?;
    let reply: (u8, i64, u64, u64, Vec<u8>, usize) =
        redis::from_redis_value(reply).map_err(unreadable)?;
    let (outcome, count, generation, version, written, remembered) = &reply;
    let counted = |outcome| Counted::new(*count, *generation, *version, outcome);
    let outcome = match *outcome {
        0 => Outcome::Applied,
        1 => Outcome::Kept,
        2 => Outcome::Overflow,
        3 => return Err(StoreError::crowded()),
        _ => return Err(unexpected(&reply)),
    };
    let counted = match written.is_empty() {
        true => counted(outcome),
        false => parse(written)
            .map(|written| counted(outcome).with(written))
            .ok_or_else(|| damaged(&key))?,
    };
    connection.counts_or_is_unknown().await?;
    let remembered = *remembered;
    Ok(CountAnswer {
        counted,
        remembered,
    })
}

/// Reads a token and the text that was written with it.
fn parse(written: &[u8]) -> Option<Written> {
    let (token, text) = std::str::from_utf8(written).ok()?.split_once(' ')?;
    Some(Written::new(token.parse().ok()?, text))
}

fn damaged(key: &str) -> StoreError {
    let text = format!("Redis: {key} holds something else than a value of lockcore; delete it");
    StoreError::new(Fault::Config, text)
}

/// Listens to the channel of a counter.
pub(super) async fn watch(mut connection: RedisConnection, name: Name) -> Result<(), StoreError> {
    let (_, channel) = layout::counter(&name);
    // This comes before the request, because a message may come together with the answer.
    connection.watched.names().insert(channel.clone(), name);
    let subscribed = connection.connection.subscribe(&channel).await;
    if subscribed.is_err() {
        connection.watched.names().remove(&channel);
    }
    subscribed.map_err(failed)
}

pub(super) async fn unwatch(mut connection: RedisConnection, name: Name) -> Result<(), StoreError> {
    let (_, channel) = layout::counter(&name);
    connection.watched.names().remove(&channel);
    let ended = connection.connection.unsubscribe(channel).await;
    ended.map_err(failed)
}
