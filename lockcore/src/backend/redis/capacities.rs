//! The stored capacity of a name: one script.

use std::sync::Arc;

use redis::{Cmd, RedisWrite as _};

use super::connection::RedisConnection;
use super::layout;
use super::tickets::{run, unexpected, unreadable};
use crate::backend::{Resize, ResizeOp, ResizeOutcome, Resized, StoreError};
use crate::request::Id;

/// Reads or changes a stored capacity. If the URL asks for durability, a read also writes, as that of
/// a [counter](super::counters::count).
pub(super) async fn resize(
    mut connection: RedisConnection,
    resize: Arc<Resize>,
) -> Result<Resized, StoreError> {
    let is_durable = connection.member.is_some();
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(layout::key(&resize.name));
        call.write_arg_fmt(resize.id);
        let ResizeOp::Set {
            capacity,
            after,
            stated,
        } = resize.op
        else {
            call.write_arg_fmt(if is_durable { "keep" } else { "read" });
            for _ in 0..3 {
                call.write_arg(b"");
            }
            return;
        };
        call.write_arg_fmt(if capacity.is_some() { "set" } else { "forget" });
        call.write_arg_fmt(capacity.map_or_else(String::new, |capacity| capacity.to_string()));
        call.write_arg_fmt(after.map_or_else(String::new, |id| id.to_string()));
        call.write_arg_fmt(stated);
    };
    let namespace = resize.name.namespace();
    let reply = run(&mut connection, &layout::RESIZE, namespace, 1, write).await?;
    let reply: (u8, i64, String) = redis::from_redis_value(reply).map_err(unreadable)?;
    let (outcome, capacity, change) = &reply;
    let (capacity, change) = (u32::try_from(*capacity).ok(), Id::parse(change));
    let resized = match (outcome, capacity) {
        (0, _) => Resized::new(capacity, change, ResizeOutcome::Applied),
        (1, _) => Resized::new(capacity, change, ResizeOutcome::Kept),
        (2, Some(in_use)) => Resized::new(None, None, ResizeOutcome::Mismatch { in_use }),
        _ => return Err(unexpected(&reply)),
    };
    connection.counts_or_is_unknown().await?;
    Ok(resized)
}
