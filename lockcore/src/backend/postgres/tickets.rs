//! The verbs about tickets. Each is one call of a function of the schema, and so one transaction.
//! `durable` says which of them then wait for the disk, and why.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::calls::{self, Uuid, VERSION, only};
use super::link::{Asked, Lasts, Link};
use crate::backend::table::{self, Row as _};
use crate::backend::{
    Adoption, Departure, Enqueued, Fault, Listing, Page, Released, Renewed, Resize, ResizeOp,
    Resized, StoreError, TicketInfo,
};
use crate::name::Name;
use crate::request::{Id, Request};

/// If the future is dropped, the server may still take the ticket. The core asks again with the
/// same id, or releases it.
pub(super) async fn enqueue(
    link: Arc<Link>,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    let (id, receiver) = (request.id, link.receiver);
    let mut attempt = 0;
    // No ticket of such a request waits, so no wake-up comes for it. Nor for one that looks.
    let hears = !request.wait
        || link.looks()
        || (link.ears).listens_after(|| attempt = link.waits.ask(&request, receiver));
    let answer = ask(&link, &request, hears).await;
    if let Err(error) = &answer
        && error.fault() != Fault::Unknown
    {
        link.waits.failed(id, attempt);
    }
    let (answer, lasts) = answer?;
    if matches!(answer, Enqueued::Waiting { .. }) && !hears {
        link.ears.begun();
        link.upkeep.begin();
    }
    if matches!(answer, Enqueued::Granted { .. } | Enqueued::Waiting { .. }) {
        link.counts(lasts).await.map_err(halfway)?;
    }
    Ok(link.waits.asked(id, attempt, answer))
}

async fn ask(
    link: &Arc<Link>,
    request: &Request,
    hears: bool,
) -> Result<(Enqueued, Lasts), StoreError> {
    let parameters: [calls::Parameter<'_>; 10] = [
        &Uuid(request.id),
        &table::key(&request.name, VERSION),
        &number(request.permits.get()),
        &number(request.capacity.get()),
        &table::micros(request.ttl),
        &request.wait,
        &i64::try_from(request.highest_seen).unwrap_or(i64::MAX),
        &link.receiver.cast_signed(),
        &&*request.owner,
        &hears,
    ];
    let Asked { rows, lasts, took } = link.ask(&calls::ENQUEUE, &parameters).await?;
    link.upkeep.count();
    let mut answer = table::enqueued(&only(rows)?, request.ttl)?;
    if let Enqueued::Waiting { recheck_in, .. } = &mut answer {
        link.look_again(recheck_in, took);
    }
    Ok((answer, lasts))
}

pub(super) async fn renew(
    link: Arc<Link>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    // Each name is locked once, however many of its tickets are renewed.
    let names: BTreeSet<_> = (tickets.iter())
        .map(|ticket| table::key(&ticket.name, VERSION))
        .collect();
    let names: Vec<_> = names.into_iter().collect();
    let ids: Vec<_> = tickets.iter().map(|ticket| Uuid(ticket.id)).collect();
    let keeps = tickets.iter().map(|ticket| number(ticket.permits.get()));
    let keeps: Vec<_> = keeps.collect();
    let ttls = tickets.iter().map(|ticket| table::micros(ticket.ttl));
    let ttls: Vec<_> = ttls.collect();
    let parameters: [calls::Parameter<'_>; 4] = [&names, &ids, &keeps, &ttls];
    let Asked { rows, lasts, took } = link.ask(&calls::RENEW, &parameters).await?;
    let mut answers: Vec<_> = rows.iter().map(table::renewed).collect::<Result<_, _>>()?;
    for answer in &mut answers {
        if let Renewed::Waiting { recheck_in, .. } = answer {
            link.look_again(recheck_in, took);
        }
    }
    let of = || tickets.iter().map(|ticket| ticket.id).zip(&answers);
    let is_there = |answer: &Renewed| answer.holds() || matches!(answer, Renewed::Waiting { .. });
    if answers.iter().any(is_there)
        && let Err(error) = link.counts(lasts).await
    {
        // The loss of a ticket need not be on the disk, and the holder must learn of it now.
        let lost = of().filter(|(_, answer)| **answer == Renewed::Lost);
        let lost: Vec<Id> = lost.map(|(id, _)| id).collect();
        return Err(error.carried_out(Fault::Unknown).with_lost(lost));
    }
    of().for_each(|(id, answer)| link.waits.renewed(id, *answer));
    Ok(answers)
}

pub(super) async fn release(
    link: Arc<Link>,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    let names: Vec<_> = (tickets.iter())
        .map(|ticket| table::key(&ticket.request.name, VERSION))
        .collect();
    let ids = || tickets.iter().map(|ticket| ticket.request.id);
    let marks: Vec<_> = tickets
        .iter()
        .map(|ticket| ticket.enqueue_may_follow)
        .collect();
    let uuids: Vec<_> = ids().map(Uuid).collect();
    let parameters: [calls::Parameter<'_>; 3] = [&names, &uuids, &marks];
    let rows = link.calls().ask(&calls::RELEASE, &parameters).await?;
    ids().for_each(|id| link.waits.left(id));
    let answer = |row: &tokio_postgres::Row| {
        Ok(match row.is("was_there")? {
            true => Released::Released,
            false => Released::NotFound,
        })
    };
    rows.iter().map(answer).collect()
}

pub(super) async fn adopt(
    link: Arc<Link>,
    adoption: Arc<Adoption>,
) -> Result<Enqueued, StoreError> {
    let request = &adoption.request;
    let parameters: [calls::Parameter<'_>; 10] = [
        &table::key(&request.name, VERSION),
        &Uuid(adoption.from),
        &i64::try_from(adoption.ticket).unwrap_or(0),
        &number(request.permits.get()),
        &number(request.capacity.get()),
        &Uuid(request.id),
        &table::micros(request.ttl),
        &link.receiver.cast_signed(),
        &&*request.owner,
        &adoption.enqueue_may_follow,
    ];
    let Asked { rows, lasts, .. } = link.ask(&calls::ADOPT, &parameters).await?;
    let row = only(rows)?;
    let Some(ticket) = row.int("ticket")? else {
        return Ok(Enqueued::Gone);
    };
    link.counts(lasts).await.map_err(halfway)?;
    Ok(Enqueued::Granted {
        ticket: ticket.unsigned_abs(),
        valid_for: request.ttl,
    })
}

/// Reads or changes a stored capacity. What a read shows must not be taken back by a crash after
/// its caller has acted on it, so a read waits for the disk too.
pub(super) async fn resize(link: Arc<Link>, resize: Arc<Resize>) -> Result<Resized, StoreError> {
    let key = table::key(&resize.name, VERSION);
    let Asked { rows, lasts, .. } = match resize.op {
        ResizeOp::Read => link.ask(&calls::STORED, &[&key]).await?,
        ResizeOp::Set {
            capacity,
            after,
            stated,
        } => {
            let parameters: [calls::Parameter<'_>; 5] = [
                &Uuid(resize.id),
                &key,
                &capacity.map(number),
                &after.map(Uuid),
                &number(stated.get()),
            ];
            link.ask(&calls::RESIZE, &parameters).await?
        }
    };
    let answer = table::resized(&only(rows)?, &resize)?;
    let counts = link.counts(lasts).await;
    counts.map_err(|error| error.carried_out(Fault::Unknown))?;
    Ok(answer)
}

pub(super) async fn ask_back(
    link: Arc<Link>,
    name: Name,
    id: Id,
    ask: Arc<str>,
) -> Result<bool, StoreError> {
    let key = table::key(&name, VERSION);
    let parameters: [calls::Parameter<'_>; 3] = [&key, &Uuid(id), &&*ask];
    only(link.calls().ask(&calls::ASK_BACK, &parameters).await?)?.is("was_there")
}

pub(super) async fn inspect(link: Arc<Link>, name: Name) -> Result<Vec<TicketInfo>, StoreError> {
    let key = table::key(&name, VERSION);
    let rows = link.calls().ask(&calls::INSPECT, &[&key]).await?;
    rows.iter().map(table::inspected).collect()
}

pub(super) async fn list(link: Arc<Link>, listing: Listing) -> Result<Page, StoreError> {
    let begins = table::keys_like(&listing.namespace, VERSION, &listing.prefix);
    let after = listing.after.as_deref().unwrap_or_default();
    let limit = number(listing.limit);
    let parameters: [calls::Parameter<'_>; 4] = [&begins, &after, &table::behind(&begins), &limit];
    let call = match listing.summaries {
        true => &calls::OVERVIEW,
        false => &calls::LIST,
    };
    table::page(&link.calls().ask(call, &parameters).await?, &listing)
}

pub(super) async fn forget(link: Arc<Link>, name: Name) -> Result<(), StoreError> {
    let key = table::key(&name, VERSION);
    link.calls().ask(&calls::FORGET, &[&key]).await.map(drop)
}

/// The ticket is taken, but does not count: the core gives it back.
fn halfway(error: StoreError) -> StoreError {
    let fault = error.fault();
    error.carried_out(fault)
}

/// Permits are at most 2³⁰.
fn number(permits: u32) -> i32 {
    i32::try_from(permits).unwrap_or(i32::MAX)
}
