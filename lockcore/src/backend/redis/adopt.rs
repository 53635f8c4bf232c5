//! Adopts tickets: a ticket passes from one client to another.

use std::sync::Arc;

use redis::{Cmd, RedisWrite as _, Value};

use super::connection::RedisConnection;
use super::layout;
use super::tickets::{MARK, run, unexpected};
use crate::backend::{Adoption, Enqueued, StoreError};

/// Adopts a ticket. If the URL asks for durability, and the adoption does not count in time, the error
/// is [half-way](StoreError::halfway), and the core releases the ticket: a promoted server may have
/// the ticket under its earlier id.
pub(super) async fn adopt(
    mut connection: RedisConnection,
    adoption: Arc<Adoption>,
) -> Result<Enqueued, StoreError> {
    let Adoption {
        from,
        ticket,
        enqueue_may_follow,
        request,
    } = &*adoption;
    let channel = Arc::clone(&connection.channel);
    let mark = match enqueue_may_follow {
        true => MARK.as_millis(),
        false => 0,
    };
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(layout::key(&request.name));
        call.write_arg_fmt(from);
        call.write_arg_fmt(format_args!("{ticket:016}"));
        call.write_arg_fmt(format_args!("{:010}", request.permits));
        call.write_arg_fmt(format_args!("{:010}", request.capacity));
        call.write_arg_fmt(request.id);
        call.write_arg_fmt(request.ttl.as_millis());
        call.write_arg_fmt(format_args!("{channel}:{}", request.owner));
        call.write_arg_fmt(mark);
    };
    let namespace = request.name.namespace();
    match run(&mut connection, &layout::ADOPT, namespace, 1, write).await? {
        Value::Int(1) => {
            connection.counts().await?;
            Ok(Enqueued::Granted {
                ticket: *ticket,
                valid_for: request.ttl,
            })
        }
        Value::Int(0) => Ok(Enqueued::Gone),
        reply => Err(unexpected(&reply)),
    }
}
