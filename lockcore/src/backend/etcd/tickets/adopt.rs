//! Giving a ticket to another client.
//!
//! A ticket that is *detached* gets a lease of its own. So it ends after its ttl, whatever becomes of
//! the client that gives it away. The client that *adopts* it deletes its key, and writes one with the
//! new id and its own lease. So all requests with the earlier id find nothing. The number of the ticket
//! is in the value of the new key.

use std::sync::Arc;

use super::{certainly_lives, changed, marks, not_enqueued, replaced, valid_for, withdraw};
use crate::backend::etcd::errors::failed;
use crate::backend::etcd::layout::{self, Ticket};
use crate::backend::etcd::line::Copy;
use crate::backend::etcd::messages::{
    KeyValue, Op, all_below, delete, is_absent, one, put, txn, was_written,
};
use crate::backend::etcd::session::At;
use crate::backend::{Adoption, Enqueued, Fault, StoreError};
use crate::clock::{Clock, Instant};
use crate::request::Request;

/// Gives a held ticket a lease of its own. The next renewal takes it back.
///
/// The core begins no renewal until it knows the outcome. One that has begun earlier does not take the
/// ticket back, because it has not seen the note that this makes in front of the write. If the future
/// is dropped, the write may be carried out later, but not after a renewal has taken the ticket back
/// or after a release, because it compares the revision of the key. A lease without a key ends by
/// itself.
pub(in crate::backend::etcd) async fn detach(
    at: Arc<At>,
    request: Arc<Request>,
) -> Result<(), StoreError> {
    let session = &at.session;
    let key = layout::ticket(&session.layout.line(&request.name), request.id);
    let until = Clock::BOOT.now().after(2 * request.ttl);
    let found = at.link.range(one(&key)).await?.kvs.into_iter().next();
    let kv = found.ok_or_else(changed)?;
    let whole = request.ttl.as_secs() + u64::from(request.ttl.subsec_nanos() > 0);
    let (lease, _) = at
        .link
        .grant(i64::try_from(whole).unwrap_or(i64::MAX))
        .await?;
    // Until here nothing was written that may arrive late. A renewal that finds the note writes the
    // key, which a full server refuses.
    let note = |note: Option<Instant>| match session.state().mine.get_mut(&request.id) {
        Some(mine) if !mine.lost && !mine.leaving => {
            mine.detached = note;
            Ok(())
        }
        _ => Err(changed()),
    };
    note(Some(until))?;
    let value = String::from_utf8_lossy(&kv.value).into_owned();
    let compare = vec![was_written(&key, kv.mod_revision)];
    let written = at
        .link
        .txn(txn(compare, vec![put(&key, value, lease)], Vec::new()));
    match written.await.map_err(failed) {
        Ok(written) if written.succeeded => Ok(()),
        Ok(_) => {
            if let Err(error) = at.link.revoke(lease).await {
                tracing::debug!(%error, "a lease without a key was not revoked, and ends by itself");
            }
            Err(changed())
        }
        Err(error) if error.is_halfway() => {
            // The server is full. It has answered, so this is not carried out later.
            let found = at.link.range(one(&key)).await?.kvs.into_iter().next();
            if found.is_some_and(|kv| kv.lease == lease) {
                return Ok(());
            }
            note(None)?;
            Err(StoreError::new(Fault::Refused, error.to_string()))
        }
        Err(error) => Err(error),
    }
}

/// If the future is dropped, the ticket may be given to this client later, on this connection. The
/// core releases the new id, which leaves a mark, and a later adoption finds this mark.
pub(in crate::backend::etcd) async fn adopt(
    at: Arc<At>,
    adoption: Arc<Adoption>,
) -> Result<Enqueued, StoreError> {
    let (session, request) = (&at.session, &adoption.request);
    certainly_lives(session)?;
    let line = session.layout.line(&request.name);
    let key = layout::ticket(&line, request.id);
    let listed = at.link.range(all_below(&line)).await?;
    let revision = listed.header.map_or(0, |header| header.revision);
    let copy = Copy::new(&line, revision, &listed.kvs);
    let find = |key: &str| listed.kvs.iter().find(|kv| kv.key == key.as_bytes());
    let Ok(number) = i64::try_from(adoption.ticket) else {
        return Ok(Enqueued::Gone);
    };
    {
        let mut state = session.state();
        if state.mine.get(&request.id).is_some_and(|mine| mine.leaving) {
            return Ok(Enqueued::Gone);
        }
        state.asks(request, &line, request.ttl.min(session.ttl));
    }
    match find(&key) {
        // An earlier attempt has succeeded.
        Some(kv) if kv.lease == session.lease && copy.number(request.id) == Some(number) => {}
        // With an earlier lease of this client, which nobody keeps.
        Some(_) => return withdraw(&at, request, &key, Enqueued::Gone).await,
        None => {
            let from = copy.holder(adoption.from).filter(|(found, place)| {
                let size = (request.permits.get(), request.capacity.get());
                *found == number && (place.permits, place.capacity) == size
            });
            let from = from.and_then(|_| find(&layout::ticket(&line, adoption.from)));
            let taken = match from {
                Some(from) => take(&at, &adoption, &key, from).await,
                None => Ok(false),
            };
            if !taken.inspect_err(|error| not_enqueued(session, request.id, error))? {
                session.state().mine.remove(&request.id);
                return Ok(Enqueued::Gone);
            }
        }
    }
    let mut state = session.state();
    state.mine.remove(&adoption.from);
    state.stands(request.id, number, true, Clock::BOOT.now());
    // An ask-back may be in the key.
    if let Some(mine) = state.mine.get_mut(&request.id) {
        mine.seen = None;
    }
    drop(state);
    Ok(Enqueued::Granted {
        ticket: adoption.ticket,
        valid_for: valid_for(session, request),
    })
}

/// Writes the new key, and deletes the earlier one. Returns `false` if the release of the new id has
/// arrived before.
async fn take(
    at: &At,
    adoption: &Adoption,
    key: &str,
    from: &KeyValue,
) -> Result<bool, StoreError> {
    let (session, request) = (&at.session, &adoption.request);
    let namespace = request.name.namespace();
    let (client, mark) = (
        session.client_key(),
        session.layout.mark(namespace, request.id),
    );
    let earlier = layout::ticket(&session.layout.line(&request.name), adoption.from);
    let before = Ticket::decode(&from.value);
    let number = before.number(from.create_revision);
    let ticket = before.adopted_by(request, request.ttl.min(session.ttl), number);
    // Events have the order of the writes. So no copy of the line is ever without the ticket.
    let mut writes = vec![put(key, ticket.encode(), session.lease), delete(&earlier)];
    if adoption.enqueue_may_follow {
        let gone = session.layout.mark(namespace, adoption.from);
        writes.push(put(&gone, String::new(), marks(at).await?));
    }
    let compare = vec![
        was_written(&earlier, from.mod_revision),
        is_absent(&mark),
        was_written(&client, at.epoch),
    ];
    let reads = vec![Op::Range(one(&mark)), Op::Range(one(&client))];
    // If the lease of the client has ended, the next beat notices.
    let answer = at.link.txn(txn(compare, writes, reads)).await;
    let answer = answer.map_err(|status| at.revoked(&status).unwrap_or_else(|| failed(status)))?;
    if answer.succeeded {
        return Ok(true);
    }
    let mut read = answer.into_ranges().map(|mut kvs| kvs.pop());
    let (mark, client) = (read.next().flatten(), read.next().flatten());
    match at.is_replaced(client.as_ref()) {
        _ if mark.is_some() => Ok(false),
        true => Err(replaced()),
        false => Err(changed()),
    }
}
