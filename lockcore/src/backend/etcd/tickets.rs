//! The operations on tickets.
//!
//! Requests may be carried out in any order, and a request whose future was dropped may be carried
//! out much later. Three things make this harmless:
//!
//! - An enqueue compares: its key and the mark of its id must not exist. So it takes one ticket at
//!   most, and none after a release that has left a mark.
//! - A mark stays for a minute or two, but a member that was stopped may go on after hours, with all
//!   that it has received before. The lease may still live then, so nobody would delete the ticket.
//!   So an enqueue also compares the revision of the *key of the client*, which each connection
//!   writes anew before its first enqueue. Within half a minute of silence the client turns to
//!   another connection, and then no enqueue of the earlier one takes a ticket. (The other way would
//!   be to list the keys of the lease now and then, and to delete those that nobody here knows. That
//!   costs more for a client with many tickets, and until then the ticket is in the way.)
//! - The key of a ticket is made from the id of its enqueue, and the number of the ticket is the
//!   revision at which the key was created. A delete of the key is right at any time, because the
//!   core enqueues no id again that it has released.
//! - A write to an existing ticket compares the revision of what was read before.

mod adopt;
mod renew;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join_all;

pub(super) use adopt::{adopt, detach};
pub(super) use renew::renew;

use super::errors::failed;
use super::layout::{self, READABLE, Ticket};
use super::line::Copy;
use super::messages::{
    Done, KeyValue, Op, RangeRequest, all_below, behind, delete, is_absent, one, put, rewrite, txn,
    was_written,
};
use super::session::{At, Session};
use super::standing::Told;
use crate::backend::{
    Departure, Enqueued, Fault, Listing, NameInUse, Page, Released, StoreError, Summary, TicketInfo,
};
use crate::clock::Clock;
use crate::name::Name;
use crate::queue::MOST_TICKETS;
use crate::request::{Id, Request};

/// An enqueue is sent only if at least this part of the ttl of the lease (an eighth) is certain.
const LEAST_CERTAIN: u32 = 8;

/// How many tickets one transaction releases. It may have 128 operations, and a release has two.
const RELEASES: usize = 60;

/// The ttl of the lease of marks, in seconds, and when another one is asked for. In between, a mark
/// stays for a minute at least. This is far longer than a request can wait in the buffer of a
/// socket: by then the server has read it, or the connection is reset.
const MARKS: i64 = 120;
const MARKS_FOR: Duration = Duration::from_secs(60);

/// How many keys are read for one page of names.
const KEYS: i64 = 1_000;

/// Takes a ticket. If the future is dropped while a ticket that may not stay is being deleted, the
/// ticket stays until the core releases it.
pub(super) async fn enqueue(at: Arc<At>, request: Arc<Request>) -> Result<Enqueued, StoreError> {
    let session = &at.session;
    can_be_kept(session, &request)?;
    let line = session.layout.line(&request.name);
    let key = layout::ticket(&line, request.id);
    let mark = session.layout.mark(request.name.namespace(), request.id);
    let Some(followed) = begin(session, &request, &line) else {
        // An earlier delete of this ticket may be under way. If this enqueue granted the ticket, that
        // delete would end the lock of its holder.
        return withdraw(&at, &request, &key, Enqueued::Gone).await;
    };
    let ticket = Ticket::of(&request, request.ttl.min(session.ttl), millis());
    let mut success = vec![put(&key, ticket.encode(), session.lease)];
    let client = session.client_key();
    let failure = vec![
        Op::Range(one(&mark)),
        Op::Range(all_below(&line)),
        Op::Range(one(&client)),
    ];
    let mut compare = vec![
        is_absent(&key),
        is_absent(&mark),
        was_written(&client, at.epoch),
    ];
    match followed {
        None => success.push(Op::Range(all_below(&line))),
        // The copy may be behind a change of the capacity.
        Some(changed) => compare.push(was_written(&layout::capacity(&line), changed)),
    }
    let answer = at.txn(txn(compare, success, failure)).await;
    let answer = answer.inspect_err(|error| not_enqueued(session, request.id, error))?;
    let revision = answer.revision();
    let is_new = answer.succeeded;
    let mut ranges = answer.into_ranges();
    if is_new {
        let listed = ranges.next();
        return stands(&at, &request, (&line, &key), (revision, revision), listed).await;
    }
    let (marks, listed) = (ranges.next(), ranges.next().unwrap_or_default());
    let client = ranges.next().unwrap_or_default().pop();
    if marks.is_some_and(|marks| !marks.is_empty()) {
        session.state().mine.remove(&request.id);
        return Ok(Enqueued::Gone);
    }
    // An earlier attempt has taken the ticket.
    match listed.iter().find(|kv| kv.key == key.as_bytes()) {
        Some(kv) if kv.lease == session.lease => {
            let number = Ticket::decode(&kv.value).number(kv.create_revision);
            let numbers = (number, revision);
            stands(&at, &request, (&line, &key), numbers, Some(listed)).await
        }
        // The ticket is of an earlier lease of this client, which nobody keeps.
        Some(_) => withdraw(&at, &request, &key, Enqueued::Gone).await,
        None => {
            let error = match at.is_replaced(client.as_ref()) {
                false => {
                    let now = Clock::BOOT.now();
                    let granted = session.state().read(&line, (revision, &listed), false, now);
                    session.tell(Told {
                        granted,
                        ..Told::default()
                    });
                    StoreError::conflict("etcd: the capacity was changed at this moment")
                }
                true => replaced(),
            };
            not_enqueued(session, request.id, &error);
            Err(error)
        }
    }
}

/// This connection takes no tickets and stores no capacities any more.
pub(super) fn replaced() -> StoreError {
    let text = "etcd: another connection of this client has taken over, or its key was changed";
    StoreError::replace(Fault::Retry, text)
}

/// A write found that a ticket is not as it was read before.
fn changed() -> StoreError {
    let text = "etcd: the ticket is changed or released by somebody else at this moment";
    StoreError::new(Fault::Retry, text)
}

/// Notes that an enqueue is about to be sent. If the line is followed, so that its events tell whether
/// the ticket holds, returns the revision at which its stored capacity was written. A request that does
/// not wait needs its answer now. `None` if a delete of this ticket was sent.
fn begin(session: &Session, request: &Request, line: &str) -> Option<Option<i64>> {
    let mut state = session.state();
    if state.mine.get(&request.id).is_some_and(|mine| mine.leaving) {
        return None;
    }
    state.asks(request, line, request.ttl.min(session.ttl));
    let followed = state.line(line, Clock::BOOT.now()).filter(|_| request.wait);
    let copy = followed.map(|line| &line.copy);
    Some(copy.and_then(|copy| {
        let goes = copy.capacity().is_some() && copy.mismatch(request.capacity.get()).is_none();
        (goes && copy.len() < MOST_TICKETS).then(|| copy.changes()[0])
    }))
}

/// Refuses a ttl that the lease cannot guarantee. The core sends it only for a ticket that is not
/// renewed.
fn can_be_kept(session: &Session, request: &Request) -> Result<(), StoreError> {
    if request.ttl > session.ttl {
        let (ttl, given) = (request.ttl, session.ttl);
        return Err(StoreError::new(
            Fault::Config,
            format!(
                "etcd: a ttl of {ttl:?} is longer than the lease of {given:?} that this client has, and the lock is not \
                 to be renewed: set LOCK_TTL to the longest ttl, or session_ttl in the URL"
            ),
        ));
    }
    certainly_lives(session)
}

fn certainly_lives(session: &Session) -> Result<(), StoreError> {
    if session.lives_for() < session.ttl / LEAST_CERTAIN {
        let text = "etcd: it is not certain that the lease of this client still lives";
        return Err(StoreError::new(Fault::Retry, text));
    }
    Ok(())
}

/// An enqueue has failed. If it is certain that it took no ticket, this forgets the id.
fn not_enqueued(session: &Session, id: Id, error: &StoreError) {
    if error.fault() != Fault::Unknown && !error.is_halfway() {
        let mut state = session.state();
        if state
            .mine
            .get(&id)
            .is_some_and(|mine| mine.number.is_none())
        {
            state.mine.remove(&id);
        }
    }
}

/// The ticket is in its line, with this number, at this revision. `listed` is the line at that
/// revision. Without it, the line is followed.
async fn stands(
    at: &At,
    request: &Request,
    (line, key): (&str, &str),
    (number, revision): (i64, i64),
    listed: Option<Vec<KeyValue>>,
) -> Result<Enqueued, StoreError> {
    let (session, id, now) = (&at.session, request.id, Clock::BOOT.now());
    let copy = (listed.as_ref()).map(|listed| Copy::new(line, revision, listed));
    let holds = copy.as_ref().is_some_and(|copy| copy.holds(id));
    if let Some(copy) = copy {
        let refused = match copy.mismatch(request.capacity.get()) {
            Some(in_use) => Some(Enqueued::CapacityMismatch { in_use }),
            None if !holds && (!request.wait || copy.len() > MOST_TICKETS) => {
                let retry_in = copy.soonest();
                Some(Enqueued::Busy { retry_in })
            }
            None => None,
        };
        if let Some(refused) = refused {
            return withdraw(at, request, key, refused).await;
        }
    }
    let mut state = session.state();
    state.stands(id, number, holds, now);
    let mut granted = match &listed {
        Some(listed) if !holds => state.read(line, (revision, listed), true, now),
        _ => state.grant(line),
    };
    granted.retain(|wake| wake.id != id);
    let holds = state.mine.get(&id).is_some_and(|mine| mine.granted);
    drop(state);
    session.tell(Told {
        granted,
        ..Told::default()
    });
    let (ticket, valid_for) = (number.unsigned_abs(), valid_for(session, request));
    Ok(match holds {
        true => Enqueued::Granted { ticket, valid_for },
        false => Enqueued::Waiting {
            ticket,
            valid_for,
            recheck_in: None,
            ahead: None,
        },
    })
}

/// Deletes a ticket that may not stay, and answers with this. Until the delete is answered, no other
/// attempt gets the ticket.
///
/// If the delete fails, the ticket may be there. So the outcome is unknown, and the core releases
/// it.
async fn withdraw(
    at: &At,
    request: &Request,
    key: &str,
    answer: Enqueued,
) -> Result<Enqueued, StoreError> {
    if let Some(mine) = at.session.state().mine.get_mut(&request.id) {
        mine.leaving = true;
    }
    let deleted = at.txn(txn(Vec::new(), vec![delete(key)], Vec::new())).await;
    deleted.map_err(|error| match error.is_broken() {
        true => StoreError::broken(error.to_string()),
        false => StoreError::new(Fault::Unknown, error.to_string()),
    })?;
    at.session.state().mine.remove(&request.id);
    Ok(answer)
}

/// For how long a ticket is valid from now on: its ttl, but at most as long as the lease certainly
/// lives. The core counts this time from a moment before now.
fn valid_for(session: &Session, request: &Request) -> Duration {
    session.lives_for().min(request.ttl)
}

/// Removes tickets. Each transaction removes its tickets and leaves their marks, as a whole. If the
/// future is dropped, the transactions that were sent may be carried out, at any time.
pub(super) async fn release(
    at: Arc<At>,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    let session = &at.session;
    let marks = match tickets.iter().any(|ticket| ticket.enqueue_may_follow) {
        true => marks(&at).await,
        false => Ok(0),
    };
    let marks = match marks {
        // There is no room for marks either.
        Err(error) if error.fault() == Fault::Refused => None,
        marks => Some(marks?),
    };
    {
        let mut state = session.state();
        for Departure { request, .. } in &tickets {
            if let Some(mine) = state.mine.get_mut(&request.id) {
                mine.leaving = true;
            }
        }
    }
    let at = &at;
    let sent = tickets.chunks(RELEASES).map(|some| async move {
        // A single delete costs the server less than a transaction with a delete.
        let is_plain = matches!(some, [ticket] if !ticket.enqueue_may_follow);
        match marks.filter(|_| !is_plain) {
            Some(marks) => remove(at, some, marks).await,
            None => remove_alone(at, some).await,
        }
    });
    let answers = try_join_all(sent).await.inspect_err(|_| {
        // Perhaps their lease is over.
        session.state().marks = None;
    })?;
    let mut state = session.state();
    for Departure { request, .. } in &tickets {
        state.mine.remove(&request.id);
    }
    Ok(answers.concat())
}

async fn remove(at: &At, tickets: &[Departure], marks: i64) -> Result<Vec<Released>, StoreError> {
    let session = &at.session;
    // The server refuses a transaction that has one key twice.
    let mut seen = HashSet::new();
    let is_first: Vec<bool> = (tickets.iter())
        .map(|ticket| seen.insert(ticket.request.id))
        .collect();
    let mut ops = Vec::with_capacity(2 * tickets.len());
    for (Departure { request, .. }, _) in tickets.iter().zip(&is_first).filter(|(_, first)| **first)
    {
        let line = session.layout.line(&request.name);
        ops.push(delete(&layout::ticket(&line, request.id)));
    }
    let mut seen = HashSet::new();
    let marked = tickets.iter().filter(|ticket| ticket.enqueue_may_follow);
    for Departure { request, .. } in marked {
        if seen.insert(request.id) {
            let mark = session.layout.mark(request.name.namespace(), request.id);
            ops.push(put(&mark, String::new(), marks));
        }
    }
    let answer = at.link.txn(txn(Vec::new(), ops, Vec::new())).await;
    let answer = match answer.map_err(failed) {
        Err(error) if error.fault() == Fault::Refused => return remove_alone(at, tickets).await,
        answer => answer?,
    };
    let mut deleted = answer.into_done();
    let released = is_first.into_iter().map(|is_first| {
        let deleted = is_first.then(|| deleted.next()).flatten().flatten();
        match deleted {
            Some(Done::Delete(done)) if done.deleted > 0 => Released::Released,
            _ => Released::NotFound,
        }
    });
    Ok(released.collect())
}

/// Removes tickets by single deletes and without marks. Servers take these while their disk quota is used
/// up. In place of marks, this first voids all enqueues that were sent on this connection or an earlier
/// one. If the future is dropped, some are removed, and the core releases them again.
async fn remove_alone(at: &At, tickets: &[Departure]) -> Result<Vec<Released>, StoreError> {
    if tickets.iter().any(|ticket| ticket.enqueue_may_follow) {
        at.link
            .delete(&at.session.client_key())
            .await
            .map_err(failed)?;
    }
    let deletes = tickets.iter().map(|Departure { request, .. }| {
        let line = at.session.layout.line(&request.name);
        let key = layout::ticket(&line, request.id);
        async move { at.link.delete(&key).await }
    });
    let deleted = try_join_all(deletes).await.map_err(failed)?;
    let released = deleted.into_iter().map(|deleted| match deleted {
        true => Released::Released,
        false => Released::NotFound,
    });
    Ok(released.collect())
}

/// The lease for marks. All marks of a client have one lease, which is replaced after a minute.
pub(super) async fn marks(at: &At) -> Result<i64, StoreError> {
    let now = Clock::BOOT.now();
    let known = at.session.state().marks;
    match known {
        Some((lease, asked)) if asked.after(MARKS_FOR) > now => Ok(lease),
        _ => {
            let (lease, _) = at.link.grant(MARKS).await?;
            at.session.state().marks = Some((lease, now));
            Ok(lease)
        }
    }
}

pub(super) async fn inspect(at: Arc<At>, name: Name) -> Result<Vec<TicketInfo>, StoreError> {
    let line = at.session.layout.line(&name);
    let answer = at.link.range(all_below(&line)).await?;
    let revision = answer.header.map_or(0, |header| header.revision);
    Ok(shown(&line, revision, &answer.kvs))
}

/// The tickets of a line, oldest first.
fn shown(line: &str, revision: i64, listed: &[KeyValue]) -> Vec<TicketInfo> {
    let copy = Copy::new(line, revision, listed);
    let capacity = copy.capacity().unwrap_or_default();
    let holders: HashSet<i64> = copy.holders().map(|(number, _)| number).collect();
    let now = millis();
    let mut tickets: Vec<TicketInfo> = listed
        .iter()
        .filter_map(|kv| {
            let id = layout::id_of(line, &kv.key)?;
            let ticket = Ticket::decode(&kv.value);
            let number = ticket.number(kv.create_revision);
            let shown = TicketInfo::new(
                number.unsigned_abs(),
                holders.contains(&number),
                ticket.permits,
                capacity,
                // The longest possible time: the lease belongs to the client, and is kept all the
                // time.
                ticket.ttl,
                ticket.owner,
            );
            // By the wall clocks of two machines.
            let age = Duration::from_millis(now.saturating_sub(ticket.since));
            Some(shown.with_id(id).with_age(age))
        })
        .collect();
    tickets.sort_unstable_by_key(|ticket| ticket.ticket);
    tickets
}

/// Lists the names in use. The next page begins behind the last name of the page before it, so a
/// name with many tickets is on one page only.
pub(super) async fn list(at: Arc<At>, listing: Listing) -> Result<Page, StoreError> {
    let layout = &at.session.layout;
    let beginning = layout.lines_like(&listing.namespace, &listing.prefix);
    let from = listing.after.as_deref().unwrap_or(&beginning);
    let range = RangeRequest {
        key: from.into(),
        range_end: behind(&beginning),
        limit: KEYS,
        keys_only: !listing.summaries,
    };
    let answer = at.link.range(range).await?;
    let is_same = |one: &KeyValue, other: &KeyValue| line_of(one) == line_of(other);
    let mut lines: Vec<_> = answer.kvs.chunk_by(is_same).collect();
    // The answer may have ended in the middle of the last line. Then that line begins the next page,
    // unless the page has no other.
    let is_cut = answer.more && lines.len() == 1;
    if answer.more && !is_cut {
        lines.pop();
    }
    let more = answer.more || lines.len() > listing.limit as usize;
    lines.truncate(listing.limit as usize);
    let last = lines.last().and_then(|listed| line_of(&listed[0]));
    let revision = answer.header.map_or(0, |header| header.revision);
    let names = lines.iter().filter_map(|listed| {
        let line = line_of(&listed[0])?;
        let slashed = format!("{line}/");
        // A stored capacity stays while the name is not in use.
        let is_ticket = |kv: &KeyValue| layout::id_of(&slashed, &kv.key).is_some();
        if !listed.iter().any(is_ticket) {
            return None;
        }
        let mut used = NameInUse::of_key(layout.name_of(line)?, READABLE)?;
        if listing.summaries && !is_cut {
            used.summary = Some(Summary::of(&shown(&slashed, revision, listed)));
        }
        Some(used)
    });
    // Behind the slash of this line.
    let next = last.filter(|_| more).map(|line| format!("{line}0"));
    Ok(Page::new(names.collect(), next.map(Into::into)))
}

/// The line of a key, without the slash at its end.
fn line_of(kv: &KeyValue) -> Option<&str> {
    let (line, _) = std::str::from_utf8(&kv.key).ok()?.rsplit_once('/')?;
    Some(line)
}

/// Writes the ask-back behind the owner. No message is sent: the holder reads its key when it renews
/// the ticket.
///
/// If the future is dropped half-way, the ask-back may be written all the same, and the holder obeys
/// it.
pub(super) async fn ask_back(
    at: Arc<At>,
    name: Name,
    id: Id,
    ask: Arc<str>,
) -> Result<bool, StoreError> {
    let key = layout::ticket(&at.session.layout.line(&name), id);
    let found = at.link.range(one(&key)).await?;
    let Some(kv) = found.kvs.first() else {
        return Ok(false);
    };
    // Nobody can read its ttl, for which the caller waits.
    let Some(ticket) = Ticket::parse(&kv.value) else {
        let text = "etcd: somebody has written over this ticket; if its holder lives, it puts it right at its next renewal";
        return Err(StoreError::new(Fault::Retry, text));
    };
    let compare = vec![was_written(&key, kv.mod_revision)];
    let success = vec![rewrite(&key, ticket.asked_back(&ask).encode())];
    let answer = at.link.txn(txn(compare, success, Vec::new())).await;
    match answer.map_err(failed)?.succeeded {
        true => Ok(true),
        false => Err(changed()),
    }
}

/// Warnings for an operator.
pub(super) async fn check(at: Arc<At>) -> Result<Vec<String>, StoreError> {
    let session = &at.session;
    let mut warnings = Vec::new();
    let status = at.link.status().await?;
    if is_older(&status.version) {
        return Err(StoreError::new(
            Fault::Config,
            format!(
                "etcd: the version {} is too old; update it to 3.4 or later",
                status.version
            ),
        ));
    }
    warnings.extend(
        status
            .errors
            .iter()
            .map(|error| format!("etcd reports: {error}")),
    );
    let (asked, given) = (session.asked, session.ttl);
    if given > asked {
        warnings.push(format!(
            "asked for a lease of {asked:?} (LOCK_TTL), and the server gave {given:?}: that is how long a lock stays \
             taken when its holder dies. Its least ttl follows from its election timeout"
        ));
    }
    Ok(warnings)
}

fn is_older(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor) = (parts.next().flatten(), parts.next().flatten());
    matches!((major, minor), (Some(major), Some(minor)) if (major, minor) < (3, 4))
}

/// The wall clock in milliseconds.
fn millis() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since_1970.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_version_before_3_4_is_too_old() {
        assert!(is_older("3.3.25") && is_older("2.9"));
        assert!(!is_older("3.4.23") && !is_older("3.10.0") && !is_older("4.0") && !is_older("?"));
    }
}
