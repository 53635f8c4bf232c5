//! Tickets that go from one client to another.

use rusqlite::params;

use super::file::{File, NEVER};
use super::layout;
use super::statements::column;
use super::tickets::{millis, unsigned};
use crate::backend::{Adoption, Enqueued, StoreError};

pub(super) fn adopt(
    file: &mut File,
    adoption: &Adoption,
    receiver: u64,
) -> Result<Enqueued, StoreError> {
    let request = &adoption.request;
    let key = layout::key(&request.name);
    let (process, epoch, ttl) = (file.process, file.epoch, millis(request.ttl));
    // The clock is read before the file is locked, as for an enqueue.
    let now = layout::now_millis();
    let rows = file.transact_repeated(
        layout::ADOPT,
        params![
            key,
            adoption.from.to_string(),
            i64::try_from(adoption.ticket).unwrap_or(0),
            request.permits.get(),
            request.capacity.get(),
            request.id.to_string(),
            ttl,
            receiver.cast_signed(),
            process,
            &*request.owner,
            adoption.enqueue_may_follow,
            now,
            epoch,
        ],
    )?;
    let Some(row) = rows.first() else {
        return Ok(Enqueued::Gone);
    };
    // The lease may end earlier than before. The next check tells the first waiter, if it is of
    // this process.
    file.looked_at = NEVER;
    Ok(Enqueued::Granted {
        ticket: unsigned(column(row, "ticket")?),
        valid_for: request.ttl,
    })
}
