//! Tickets that go from one client to another.

use super::file::{File, NEVER, column};
use super::layout;
use super::tickets::{millis, unsigned};
use crate::backend::{Adoption, Enqueued, StoreError};

pub(super) async fn adopt(
    file: &mut File,
    adoption: &Adoption,
    receiver: u64,
) -> Result<Enqueued, StoreError> {
    let request = &adoption.request;
    let key = layout::key(&request.name);
    let (process, epoch, ttl) = (file.process, file.epoch, millis(request.ttl));
    // The clock is read before the file is locked, as for an enqueue.
    let now = layout::now_millis();
    let query = || {
        sqlx::query(layout::ADOPT)
            .bind(key.clone())
            .bind(adoption.from.to_string())
            .bind(i64::try_from(adoption.ticket).unwrap_or(0))
            .bind(i64::from(request.permits.get()))
            .bind(i64::from(request.capacity.get()))
            .bind(request.id.to_string())
            .bind(ttl)
            .bind(receiver.cast_signed())
            .bind(process)
            .bind(request.owner.to_string())
            .bind(i64::from(adoption.enqueue_may_follow))
            .bind(now)
            .bind(epoch)
    };
    let rows = file.transact_repeated(query).await?;
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
