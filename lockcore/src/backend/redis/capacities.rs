//! The stored capacity of a name: one script.

use redis::{Cmd, RedisWrite as _};

use super::connection::Socket;
use super::layout;
use super::tickets::{run, unexpected, unreadable};
use crate::backend::{Resize, ResizeOp, ResizeOutcome, Resized, StoreError};
use crate::request::Id;

/// Reads or changes a stored capacity. With `keeps`, a read also writes. When that write is
/// acknowledged, all earlier writes are too, among them those whose effect the read has seen.
pub(super) async fn resize(
    socket: &mut impl Socket,
    resize: &Resize,
    keeps: bool,
) -> Result<Resized, StoreError> {
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(layout::key(&resize.name));
        call.write_arg_fmt(resize.id);
        let ResizeOp::Set {
            capacity,
            after,
            stated,
        } = resize.op
        else {
            call.write_arg_fmt(if keeps { "keep" } else { "read" });
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
    let reply = run(socket, &layout::RESIZE, namespace, 1, write).await?;
    let reply: (u8, i64, String) = redis::from_redis_value(reply).map_err(unreadable)?;
    let (outcome, capacity, change) = &reply;
    let (capacity, change) = (u32::try_from(*capacity).ok(), Id::parse(change));
    match (outcome, capacity) {
        (0, _) => Ok(Resized::new(capacity, change, ResizeOutcome::Applied)),
        (1, _) => Ok(Resized::new(capacity, change, ResizeOutcome::Kept)),
        (2, Some(in_use)) => Ok(Resized::new(None, None, ResizeOutcome::Mismatch { in_use })),
        _ => Err(unexpected(&reply)),
    }
}
