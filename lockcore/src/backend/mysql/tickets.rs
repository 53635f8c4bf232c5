//! The verbs about tickets. Each is one call of a procedure, and so one transaction. Only for several
//! names, more calls may follow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::calls::{Call, VERSION, only, row, unhex, unreadable};
use super::link::{Inner, Leave, MOST_WAIT, Spot};
use super::looks::put_name;
use crate::backend::table::{self, Row as _};
use crate::backend::{
    Adoption, Departure, Enqueued, Fault, Listing, Page, Released, Renewed, Resize, ResizeOp,
    Resized, StoreError, TicketInfo, Wake,
};
use crate::name::Name;
use crate::request::{Id, Request};

/// If the future is dropped, the server may still take the ticket. The core asks again with the
/// same id, or releases it.
pub(super) async fn enqueue(
    link: Arc<Inner>,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    let name = table::key(&request.name, VERSION);
    let call = Call::of("enqueue")
        .id(request.id)
        .bytes(&name)
        .number(request.permits.get())
        .number(request.capacity.get())
        .number(table::micros(request.ttl))
        .number(request.wait)
        .number(i64::try_from(request.highest_seen).unwrap_or(i64::MAX))
        .number(link.receiver.cast_signed())
        .bytes(&*request.owner);
    link.upkeep.count();
    let _asking = link.store().asking(vec![request.id]);
    let row = only(link.ask(call, vec![request.id]).await?)?;
    let answer = table::enqueued(&row, request.ttl)?;
    match answer {
        Enqueued::Waiting { ticket, .. } => {
            let name = name.into();
            link.waits(request.id, Spot { name, ticket }, request.ttl);
        }
        // An earlier answer to this request may have said that it waits.
        _ => link.store().settled(request.id),
    }
    Ok(answer)
}

/// Puts tickets in the order of their names, as the procedures take them, and remembers where each
/// one came from.
fn by_name<'t>(
    names: impl Iterator<Item = &'t Name>,
    put: impl Fn(usize, &mut Vec<u8>),
) -> (Vec<u8>, Vec<usize>) {
    let mut lines: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, name) in names.enumerate() {
        lines.entry(table::key(name, VERSION)).or_default().push(at);
    }
    let mut asked = Vec::new();
    for (name, tickets) in &lines {
        put_name(&mut asked, name);
        // A request has some hundred tickets.
        asked.extend(
            u16::try_from(tickets.len())
                .unwrap_or_default()
                .to_be_bytes(),
        );
        tickets.iter().for_each(|at| put(*at, &mut asked));
    }
    (asked, lines.into_values().flatten().collect())
}

/// The answers, in the order of the request.
fn in_order<T>(
    answers: impl Iterator<Item = T>,
    came_from: Vec<usize>,
) -> Result<Vec<T>, StoreError> {
    let many = came_from.len();
    let answers: BTreeMap<usize, T> = came_from.into_iter().zip(answers).collect();
    let answers: Vec<T> = answers.into_values().collect();
    if answers.len() == many {
        Ok(answers)
    } else {
        Err(unreadable())
    }
}

/// Sends one call for tickets of several names. It may have locked some of them when it meets one that
/// somebody else has locked, or one with a locked ticket. So it does not wait for this name, and skips
/// it: the answer for its tickets is `None`.
///
/// For a few of these names at a time follows a call of its own, which waits. Only for a few, because
/// others need a connection too. When one has ended, one call follows for all others: whoever had
/// locked that name has often locked these too, and is done. It may be an earlier attempt of this
/// client, which was given up while the server was slow. A call for each name would load it more then.
///
/// If a call for one name fails, or has no answer when `enough` resolves, the answer for its tickets is
/// `failed`. So a name that somebody else has locked holds up no other.
///
/// If the future is dropped, the calls that a connection has taken are carried out.
async fn in_parts<T: Clone, A: Copy, F>(
    link: &Inner,
    tickets: Vec<T>,
    name: impl Fn(&T) -> &Name,
    failed: A,
    enough: impl Future<Output = ()>,
    ask: impl Fn(Vec<T>, Option<Leave>) -> F,
) -> Result<Vec<A>, StoreError>
where
    F: Future<Output = Result<Vec<Option<A>>, StoreError>>,
{
    let mut answers = ask(tickets.clone(), None).await?;
    let mut skipped: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, ticket) in tickets.iter().enumerate() {
        if answers[at].is_none() {
            let name = table::key(name(ticket), VERSION);
            skipped.entry(name).or_default().push(at);
        }
    }
    let ask_for = async |places: Vec<usize>, leave| {
        let part = places.iter().map(|at| tickets[*at].clone()).collect();
        (places, ask(part, leave).await)
    };
    let mut error = None;
    let others = async {
        let mut waits = FuturesUnordered::new();
        loop {
            while waits.len() < MOST_WAIT
                && let Some((_, places)) = skipped.pop_first()
            {
                waits.push(async { ask_for(places, link.leave().await).await });
            }
            let Some(part) = waits.next().await else {
                return;
            };
            put(&mut answers, part, &mut error);
            if skipped.len() > 1 {
                let places = skipped.values().flatten().copied().collect();
                put(&mut answers, ask_for(places, None).await, &mut error);
                skipped.retain(|_, places| answers[places[0]].is_none());
            }
        }
    };
    let all_have_ended = tokio::select! {
        biased;
        () = others => true,
        () = enough => false,
    };
    match error {
        // The outcome of a part that is under way is unknown.
        Some(error) if all_have_ended && answers.iter().all(Option::is_none) => Err(error),
        _ => Ok(answers.into_iter().map(|it| it.unwrap_or(failed)).collect()),
    }
}

/// Puts the answers to a part of a batch where its tickets are.
fn put<A>(
    answers: &mut [Option<A>],
    (places, part): (Vec<usize>, Result<Vec<Option<A>>, StoreError>),
    error: &mut Option<StoreError>,
) {
    match part {
        Ok(part) => {
            for (at, answer) in places.into_iter().zip(part) {
                answers[at] = answer;
            }
        }
        Err(failed) => {
            tracing::debug!(error = %failed, "a part of a batch has failed");
            // If one outcome is unknown, that of the batch is.
            if error
                .as_ref()
                .is_none_or(|error| error.fault() != Fault::Unknown)
            {
                *error = Some(failed);
            }
        }
    }
}

pub(super) async fn renew(
    link: Arc<Inner>,
    tickets: Vec<Arc<Request>>,
    patience: Duration,
) -> Result<Vec<Renewed>, StoreError> {
    let shortest = tickets.iter().map(|ticket| ticket.ttl).min();
    // The other answers come in time for the core, and for their leases.
    let enough = (link.timer)((patience / 10 * 9).min(shortest.unwrap_or_default() / 4));
    let whole = tickets.len();
    let ask = |tickets, leave| renew_some(Arc::clone(&link), tickets, whole, leave);
    in_parts(&link, tickets, |it| &it.name, Renewed::Failed, enough, ask).await
}

/// Renews these tickets of a batch, which has so many as a whole.
async fn renew_some(
    link: Arc<Inner>,
    tickets: Vec<Arc<Request>>,
    whole: usize,
    leave: Option<Leave>,
) -> Result<Vec<Option<Renewed>>, StoreError> {
    let names = tickets.iter().map(|ticket| &ticket.name);
    let (mut asked, came_from) = by_name(names, |at, asked| {
        let ticket = &tickets[at];
        asked.extend(ticket.id.to_bytes());
        asked.extend(ticket.permits.get().to_be_bytes());
        asked.extend(table::micros(ticket.ttl).to_be_bytes());
    });
    if leave.is_none() {
        // A call for one name waits for it, unless a byte follows.
        asked.push(0);
    }
    let ids: Vec<_> = tickets.iter().map(|ticket| ticket.id).collect();
    let _asking = link.store().asking(ids.clone());
    let call = Call::of("renew").bytes(asked);
    let answer = only(link.ask_with(call, ids, leave).await?)?;
    let text = answer.text("answers")?.unwrap_or_default();
    let rows = text.split_terminator(';').map(|fields| {
        if fields == "-" {
            return Ok(None);
        }
        let mut row = row(&["ticket", "holds", "ttl", "soonest_in", "owner"], fields);
        if let Some(Some(owner)) = row.values.last_mut() {
            *owner = unhex(owner).ok_or_else(unreadable)?;
        }
        Ok(Some((row.int("ticket")?, table::renewed(&row)?)))
    });
    let rows: Vec<_> = rows.collect::<Result<_, StoreError>>()?;
    let answers = in_order(rows.into_iter(), came_from)?;
    // The answers wait for those of other names, which are locked.
    let is_late = tickets.len() < whole || answers.iter().any(Option::is_none);
    for (request, answer) in tickets.iter().zip(&answers) {
        if let Some((number, answer)) = answer {
            note(&link, request, *number, *answer, is_late);
        }
    }
    let answers = answers.into_iter();
    Ok(answers.map(|it| it.map(|(_, answer)| answer)).collect())
}

/// Notes whether the ticket still waits. If its client gets the answer late, it is told of a grant at
/// once, and learns of it twice.
fn note(link: &Arc<Inner>, request: &Request, number: Option<i64>, answer: Renewed, is_late: bool) {
    match (answer, number.map(i64::unsigned_abs)) {
        (Renewed::Waiting { valid_for, .. }, Some(ticket)) => {
            let name = table::key(&request.name, VERSION).into();
            let spot = Spot { name, ticket };
            link.store().waits(link, request.id, spot, valid_for);
        }
        (_, Some(ticket)) if is_late => link.store().granted(Wake::new(request.id, ticket)),
        _ => link.store().settled(request.id),
    }
}

pub(super) async fn release(
    link: Arc<Inner>,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    // The other answers come in time for the core.
    let enough = (link.timer)(link.op_timeout / 10 * 9);
    let ask = |tickets, leave| release_some(Arc::clone(&link), tickets, leave);
    in_parts(
        &link,
        tickets,
        |it| &it.request.name,
        Released::Failed,
        enough,
        ask,
    )
    .await
}

async fn release_some(
    link: Arc<Inner>,
    tickets: Vec<Departure>,
    leave: Option<Leave>,
) -> Result<Vec<Option<Released>>, StoreError> {
    let names = tickets.iter().map(|ticket| &ticket.request.name);
    let (asked, came_from) = by_name(names, |at, asked| {
        asked.extend(tickets[at].request.id.to_bytes());
        asked.push(tickets[at].enqueue_may_follow.into());
    });
    let call = Call::of("release").bytes(asked);
    let answer = only(link.ask_with(call, Vec::new(), leave).await?)?;
    let text = answer.text("answers")?.unwrap_or_default();
    let answers = text.chars().map(|was_there| match was_there {
        '1' => Some(Released::Released),
        '0' => Some(Released::NotFound),
        _ => None,
    });
    let answers = in_order(answers, came_from)?;
    for (ticket, answer) in tickets.iter().zip(&answers) {
        if answer.is_some() {
            link.store().settled(ticket.request.id);
        }
    }
    Ok(answers)
}

pub(super) async fn adopt(
    link: Arc<Inner>,
    adoption: Arc<Adoption>,
) -> Result<Enqueued, StoreError> {
    let request = &adoption.request;
    let call = Call::of("adopt")
        .bytes(table::key(&request.name, VERSION))
        .id(adoption.from)
        .number(i64::try_from(adoption.ticket).unwrap_or(0))
        .number(request.permits.get())
        .number(request.capacity.get())
        .id(request.id)
        .number(table::micros(request.ttl))
        .number(link.receiver.cast_signed())
        .bytes(&*request.owner)
        .number(adoption.enqueue_may_follow);
    let row = only(link.ask(call, vec![request.id]).await?)?;
    Ok(match row.int("ticket")? {
        None => Enqueued::Gone,
        Some(ticket) => Enqueued::Granted {
            ticket: ticket.unsigned_abs(),
            valid_for: request.ttl,
        },
    })
}

/// Reads or changes a stored capacity.
pub(super) async fn resize(link: Arc<Inner>, resize: Arc<Resize>) -> Result<Resized, StoreError> {
    let key = table::key(&resize.name, VERSION);
    let call = match resize.op {
        ResizeOp::Read => Call::of("stored").bytes(key),
        ResizeOp::Set {
            capacity,
            after,
            stated,
        } => Call::of("resize")
            .id(resize.id)
            .bytes(key)
            .or_null(capacity, Call::number)
            .or_null(after, Call::id)
            .number(stated.get()),
    };
    table::resized(&only(link.ask(call, Vec::new()).await?)?, &resize)
}

/// A client of another process learns of the ask-back at its next renewal.
pub(super) async fn ask_back(
    link: Arc<Inner>,
    name: Name,
    id: Id,
    ask: Arc<str>,
) -> Result<bool, StoreError> {
    let call = Call::of("ask_back")
        .bytes(table::key(&name, VERSION))
        .id(id)
        .bytes(&*ask);
    let receiver = only(link.ask(call, Vec::new()).await?)?.int("receiver")?;
    let of_this_client = receiver.and_then(|receiver| link.store().link(receiver.cast_unsigned()));
    if let Some(of_this_client) = of_this_client {
        of_this_client.recheck(id);
    }
    Ok(receiver.is_some())
}

pub(super) async fn inspect(link: Arc<Inner>, name: Name) -> Result<Vec<TicketInfo>, StoreError> {
    let call = Call::of("inspect").bytes(table::key(&name, VERSION));
    let rows = link.ask(call, Vec::new()).await?;
    rows.iter().map(table::inspected).collect()
}

pub(super) async fn list(link: Arc<Inner>, listing: Listing) -> Result<Page, StoreError> {
    let begins = table::keys_like(&listing.namespace, VERSION, &listing.prefix);
    let procedure = match listing.summaries {
        true => "overview",
        false => "list",
    };
    let call = Call::of(procedure)
        .bytes(&begins)
        .bytes(listing.after.as_deref().unwrap_or_default())
        .bytes(table::behind(&begins))
        .number(listing.limit);
    let rows = link.ask(call, Vec::new()).await?;
    table::page(&rows, &listing)
}

pub(super) async fn forget(link: Arc<Inner>, name: Name) -> Result<(), StoreError> {
    let call = Call::of("forget").bytes(table::key(&name, VERSION));
    link.ask(call, Vec::new()).await.map(drop)
}
