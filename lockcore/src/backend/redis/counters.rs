//! Counters and values. Both use one script, and a channel for each counter or value that is
//! watched.

use redis::{Cmd, RedisWrite as _};

use super::changed::CountAnswer;
use super::connection::{RedisConnection, Socket};
use super::errors::failed;
use super::layout;
use super::tickets::{run, unexpected, unreadable};
use crate::backend::{Count, CountOp, Counted, Fault, OnlyIf, Outcome, StoreError, Written};
use crate::name::Name;

/// The command that publishes to the channel of a watched counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Publish {
    /// `PUBLISH`: to all connections that listen at the server.
    Plain,
    /// `SPUBLISH`: to the connections that listen in the slot of the name.
    InSlot,
}

/// Reads or changes a counter. With `keeps`, a read also writes. When that write is acknowledged,
/// all earlier writes are too, among them those whose effect the read has seen.
pub(super) async fn count(
    socket: &mut impl Socket,
    count: &Count,
    keeps: bool,
    publish: Publish,
) -> Result<CountAnswer, StoreError> {
    let (key, channel) = layout::counter(&count.name);
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(&key);
        call.write_arg_fmt(count.id);
        let (verb, number, bound) = match &count.op {
            CountOp::Read if keeps => ("keep", None, None),
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
        call.write_arg_fmt(match publish {
            Publish::Plain => "PUBLISH",
            Publish::InSlot => "SPUBLISH",
        });
        let keep = count.keep_seconds();
        call.write_arg_fmt(keep.map_or_else(String::new, |keep| keep.to_string()));
        for id in &count.answered {
            call.write_arg_fmt(id);
        }
    };
    let namespace = count.name.namespace();
    let reply = run(socket, &layout::COUNT, namespace, 1, write).await?;
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
