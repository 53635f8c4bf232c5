//! The verbs, and what their failures mean. Requests go out when the library's method is called,
//! one after the other on one connection, and the server takes them in that order; what is awaited
//! is only the reply. So what was sent stays sent when a future is dropped, and the state under the
//! mutex says of every id how far it has come:
//!
//! - not there: nothing was sent, or it is known that nothing is at the store;
//! - [`Mine::Asked`]: a create was sent; dropped, or the reply lost, it may stand. The same id asked
//!   for again looks for it first; its release looks for it by id;
//! - [`Mine::Standing`]: it stands under a path that we know, until its release is acknowledged.

use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{CreateMode, CreateSequence, Error as ZkError, MultiReadResult, Stat};

use super::layout::{self, Parent};
use super::session::{Mine, Session, Standing};
use crate::backend::{Departure, Enqueued, Fault, Place, Released, Renewed, StoreError};
use crate::clock::Clock;
use crate::name::Name;
use crate::queue::MOST_TICKETS;
use crate::request::{Id, Request};
use crate::token::MAX_TICKET;

/// Of the session timeout that must be certain before a lock is asked for. After a process was
/// stopped for a while, nothing is until two more probes are answered; tickets taken meanwhile would
/// be of no use.
const LEAST_CERTAIN: u32 = 8;

/// Nodes that are read in one request; the path of each has two kilobytes at most.
const READS: usize = 250;

pub(super) async fn enqueue(
    session: Arc<Session>,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    session.usable()?;
    can_be_kept(&session, &request)?;
    let parent = Parent::of(&request.name);
    let (standing, children) = match begin(&session, &request, &parent) {
        Begin::Gone => return Ok(Enqueued::Gone),
        Begin::Stands(standing) if standing.leaving => {
            // A delete of it may still be under way, and would take the lock from under its holder.
            withdraw(&session, &request, &standing).await?;
            return Ok(Enqueued::Gone);
        }
        Begin::Stands(standing) => found(&session, &parent, standing).await?,
        // A request that was interrupted is looked for before it is made again.
        Begin::AskedBefore => match find(&session, &request, &parent).await? {
            Some(standing) => found(&session, &parent, standing).await?,
            None => create(&session, &request, &parent, Flush::WITH_PARENT).await?,
        },
        Begin::New(flush) => create(&session, &request, &parent, flush).await?,
    };
    answer(&session, &request, &parent, standing, children).await
}

/// How an enqueue begins.
enum Begin {
    Gone,
    Stands(Standing),
    AskedBefore,
    New(Flush),
}

/// What goes out together with the create of a ticket.
#[derive(Clone, Copy)]
struct Flush {
    /// The folder of the namespace, and the parent, before it.
    folder: bool,
    parent: bool,
    /// The children of the parent, behind it.
    list: bool,
}

impl Flush {
    const WITH_PARENT: Self = Self {
        folder: false,
        parent: true,
        list: true,
    };
}

fn begin(session: &Arc<Session>, request: &Request, parent: &Parent) -> Begin {
    let mut state = session.state();
    if state.gone.contains_key(&request.id) {
        return Begin::Gone;
    }
    match state.tickets.get(&request.id) {
        Some(Mine::Standing(standing)) => return Begin::Stands(standing.clone()),
        Some(Mine::Asked) => {
            // From now on a node of the first try is seen, however late it comes.
            session.follow(&mut state, &parent.path);
            return Begin::AskedBefore;
        }
        None => {}
    }
    state.tickets.insert(request.id, Mine::Asked);
    // In a line that is followed, and that agrees with us, its events say how we stand. Who does not
    // wait needs to know it now.
    let told_by_events = request.wait
        && state.lines.get(&parent.path).is_some_and(|line| {
            line.is_current()
                && line.capacity() == Some(request.capacity.get())
                && line.len() < MOST_TICKETS
        });
    if told_by_events {
        session.follow(&mut state, &parent.path); // it is of use
    }
    Begin::New(Flush {
        folder: false,
        parent: !state.knows_parent(&parent.path),
        list: !told_by_events,
    })
}

/// Refuses what the session cannot carry.
fn can_be_kept(session: &Session, request: &Request) -> Result<(), StoreError> {
    let timeout = session.timeout;
    if request.ttl > timeout {
        let (ttl, asked) = (request.ttl, session.asked);
        return Err(StoreError::new(
            Fault::Config,
            format!(
                "ZooKeeper: a ttl of {ttl:?} is longer than the session of {timeout:?} that the server gave \
                 (asked for {asked:?}): set LOCK_TTL to the longest ttl, or session_timeout in the URL; the server's \
                 limit is its maxSessionTimeout"
            ),
        ));
    }
    if lives_for(session) < timeout / LEAST_CERTAIN {
        let text = "ZooKeeper: it is not certain that the session still lives";
        return Err(StoreError::new(Fault::Retry, text));
    }
    Ok(())
}

/// Looks for the node that an earlier try left. `sync` makes what the leader has done visible here,
/// also after a change of servers.
///
/// Dropped or failed, the id stays as it was: asked for.
async fn find(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
) -> Result<Option<Standing>, StoreError> {
    let synced = session.client.sync(&parent.path);
    let listing = session.client.list_children(&parent.path);
    synced.await.map_err(failed)?;
    let children = match listing.await {
        Ok(children) => children,
        Err(ZkError::NoNode) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut found = None;
    for ticket in layout::in_line(&children) {
        if ticket.id != request.id {
            continue;
        }
        let path = parent.child(&ticket.node);
        let stat = session.client.check_stat(&path).await.map_err(failed)?;
        let Some(stat) = stat else { continue };
        let ours = stat.ephemeral_owner == session.client.session_id().0;
        if ours && found.is_none() {
            found = Some(stands(
                session,
                request,
                parent,
                ticket.sequence,
                path,
                &stat,
            )?);
        } else {
            // Of an earlier session of ours, which ends without being renewed (H16), or a second one.
            session.delete_unasked(path);
        }
    }
    Ok(found)
}

/// A ticket that stands, with the line that it stands in. Dropped here, or unanswered, the next try
/// comes here again.
async fn found(
    session: &Arc<Session>,
    parent: &Parent,
    standing: Standing,
) -> Result<(Standing, Option<Vec<String>>), StoreError> {
    let children = match session.client.list_children(&parent.path).await {
        Ok(children) => children,
        Err(ZkError::NoNode) => Vec::new(),
        Err(error) => return Err(failed(error)),
    };
    Ok((standing, Some(children)))
}

/// Creates the ticket, and its parent if need be; with the children of the parent if they were asked
/// for.
async fn create(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    flush: Flush,
) -> Result<(Standing, Option<Vec<String>>), StoreError> {
    let prefix = parent.prefix(request, session.tag());
    let mut replies = send(session, request, parent, &prefix, flush).await;
    if let Err(ZkError::NoNode) = replies.created
        && !flush.folder
    {
        // The parent went with its last ticket, or there never was one.
        session.state().forget_parent(&parent.path);
        let everything = Flush {
            folder: true,
            ..Flush::WITH_PARENT
        };
        replies = send(session, request, parent, &prefix, everything).await;
    }
    let (stat, sequence) = match replies.created {
        Ok(created) => created,
        Err(error) => {
            // Why there is no parent says more than that there is none.
            let error = match (error, replies.refused) {
                (ZkError::NoNode, Some(refused)) => refused,
                (error, _) => error,
            };
            let error = failed(error);
            if error.fault() != Fault::Unknown {
                session.state().left(request.id);
            }
            return Err(error);
        }
    };
    let path = format!("{prefix}{sequence}");
    let sequence = layout::wrapped(sequence.into_i64());
    let standing = stands(session, request, parent, sequence, path, &stat)?;
    let children = replies.listed.transpose();
    // The ticket stands; asked again, it is found.
    Ok((standing, children.map_err(failed)?))
}

struct Replies {
    /// What kept a parent from being made.
    refused: Option<ZkError>,
    created: Result<(Stat, CreateSequence), ZkError>,
    listed: Option<Result<Vec<String>, ZkError>>,
}

/// One flush: everything is sent before anything is awaited. Dropped, it was sent all the same, and
/// the id is [`Mine::Asked`].
async fn send(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    prefix: &str,
    flush: Flush,
) -> Replies {
    let client = &session.client;
    let container = CreateMode::Container.with_acls(session.acls);
    let ticket = CreateMode::EphemeralSequential.with_acls(session.acls);
    let folder = flush
        .folder
        .then(|| client.create(&parent.folder, b"", &container));
    let path = flush
        .parent
        .then(|| client.create(&parent.path, b"", &container));
    let created = client.create(prefix, request.owner.as_bytes(), &ticket);
    let listed = flush.list.then(|| client.list_children(&parent.path));

    let mut refused = None;
    for made in [folder, path].into_iter().flatten() {
        match made.await {
            Ok(_) | Err(ZkError::NodeExists | ZkError::NoNode) => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let created = created.await;
    let listed = match listed {
        Some(listed) => Some(listed.await),
        None => None,
    };
    Replies {
        refused,
        created,
        listed,
    }
}

/// Notes that a ticket stands. Its number is the transaction that created it, which no two creates
/// share and which rises over restarts and over lives of the parent.
fn stands(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    sequence: i32,
    path: String,
    stat: &Stat,
) -> Result<Standing, StoreError> {
    let number = u64::try_from(stat.czxid).ok();
    let Some(ticket) = number.filter(|number| (1..=MAX_TICKET).contains(number)) else {
        session.delete_unasked(path);
        session.state().left(request.id);
        return Err(StoreError::new(
            Fault::Refused,
            format!(
                "ZooKeeper: transaction {:#x} is no ticket number; its epoch has more than 21 bits",
                stat.czxid
            ),
        ));
    };
    let standing = Standing {
        parent: parent.path.clone(),
        path,
        permits: request.permits.get(),
        shrinks_to: None,
        sequence,
        ticket,
        granted: false,
        seen: Some(Clock::BOOT.now()),
        lost: false,
        leaving: false,
    };
    session.state().stands(request.id, standing.clone());
    Ok(standing)
}

/// How a standing ticket stands, by the children of its parent or, without them, by its line.
async fn answer(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    standing: Standing,
    children: Option<Vec<String>>,
) -> Result<Enqueued, StoreError> {
    let (ticket, valid_for) = (standing.ticket, valid_for(session, request));
    let granted = Enqueued::Granted { ticket, valid_for };
    if let Some(children) = children {
        let line = layout::in_line(&children);
        for other in line.iter().filter(|other| other.id == request.id) {
            if other.sequence != standing.sequence {
                session.delete_unasked(parent.child(&other.node)); // as in `find`
            }
        }
        let Some(at) = line
            .iter()
            .position(|other| other.sequence == standing.sequence)
        else {
            // Somebody deleted it, or a server told that is behind. The core asks anew.
            session.state().left(request.id);
            session.delete_unasked(standing.path);
            return Ok(Enqueued::Gone);
        };
        let holders = layout::holders(&line);
        if at < holders {
            session.state().granted(request.id);
            return Ok(granted);
        }
        let in_use = line[0].capacity;
        if in_use != request.capacity.get() {
            withdraw(session, request, &standing).await?;
            return Ok(Enqueued::CapacityMismatch { in_use });
        }
        if !request.wait || at >= MOST_TICKETS {
            let first_to_end = line[..holders].iter().map(|holder| holder.ttl).min();
            withdraw(session, request, &standing).await?;
            return Ok(Enqueued::Busy {
                retry_in: first_to_end,
            });
        }
    }
    let mut state = session.state();
    session.wait_in(&mut state, &parent.path, standing.sequence);
    // What its events told before we stood, they do not tell again.
    session.tell(state, &parent.path, false);
    let holds = |mine: &Standing| mine.granted;
    Ok(
        match session.state().standing(request.id).is_some_and(holds) {
            true => granted,
            false => Enqueued::Waiting {
                ticket,
                valid_for,
                // When a holder's session ends, the watch tells.
                recheck_in: None,
            },
        },
    )
}

/// Takes a ticket back that is of no use. Unanswered, it still stands, and the core, which is told
/// that the outcome is unknown, releases it.
async fn withdraw(
    session: &Arc<Session>,
    request: &Request,
    standing: &Standing,
) -> Result<(), StoreError> {
    session.state().leaves(request.id);
    match session.client.delete(&standing.path, None).await {
        Ok(()) | Err(ZkError::NoNode) => {
            session.state().left(request.id);
            Ok(())
        }
        Err(error) => Err(StoreError::new(Fault::Unknown, failed(error).to_string())),
    }
}

/// Whether tickets stand, and how. What moves their deadlines is the [proof](super::session::Proof)
/// that the session lives, which probes of its own renew; the question here is only whether somebody
/// has deleted a node. Renewals are more frequent than a third of the ttl, because the proof is
/// always some time old; nodes are looked at no more often than that.
///
/// Tickets that are to be smaller are made so first.
pub(super) async fn renew(
    session: Arc<Session>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    session.usable()?;
    let shrunk = shrink(&session, &tickets).await;
    // Before the requests: what is answered later is older.
    let mut answers = Vec::with_capacity(tickets.len());
    let mut reads = session.client.new_multi_reader();
    let (mut looked_at, mut listed) = (Vec::new(), Vec::new());
    let now = Clock::BOOT.now();
    {
        let state = session.state();
        for (at, request) in tickets.iter().enumerate() {
            let valid_for = valid_for_in(&state.proof, request);
            answers.push(match state.tickets.get(&request.id) {
                None => Renewed::Lost, // of an earlier session, or released
                Some(Mine::Asked) => Renewed::Failed,
                Some(Mine::Standing(mine)) if mine.lost => Renewed::Lost,
                _ if shrunk.contains(&(request.id, false)) => Renewed::Failed,
                Some(Mine::Standing(mine)) => {
                    let line = state.lines.get(&mine.parent);
                    let told_by_events = line.is_some_and(|line| line.is_current());
                    // One by itself is what its holder asks for, before a step that needs the lock.
                    let seen_lately = tickets.len() > 1
                        && mine
                            .seen
                            .is_some_and(|seen| now < seen.after(request.ttl / 3));
                    // One that waits may hold because it is smaller.
                    let unsure = !told_by_events || shrunk.contains(&(request.id, true));
                    if unsure && !mine.granted {
                        listed.push((at, mine.clone()));
                    } else if !told_by_events && !seen_lately {
                        reads.add_get_data(&mine.path).map_err(failed)?;
                        looked_at.push(at);
                    }
                    how_it_stands(mine.granted, valid_for)
                }
            });
        }
    }
    // Sent together; dropped, they were only looking.
    let reading = (!looked_at.is_empty()).then(|| reads.commit());
    let mut listing = Vec::new();
    for (_, mine) in &listed {
        if listing.iter().all(|(parent, _)| *parent != &mine.parent) {
            listing.push((&mine.parent, session.client.list_children(&mine.parent)));
        }
    }
    if let Some(reading) = reading {
        let read = reading.await.map_err(failed)?;
        for (at, read) in looked_at.into_iter().zip(read) {
            match read {
                MultiReadResult::Data { .. } => {
                    if let Some(mine) = session.state().standing_mut(tickets[at].id) {
                        mine.seen = Some(now);
                    }
                }
                MultiReadResult::Error {
                    err: ZkError::NoNode,
                } => answers[at] = Renewed::Lost,
                _ => answers[at] = Renewed::Failed,
            }
        }
    }
    for (parent, listing) in listing {
        let children = match listing.await {
            Ok(children) => children,
            Err(ZkError::NoNode) => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let line = layout::in_line(&children);
        let holders = layout::holders(&line);
        for (at, mine) in listed.iter().filter(|(_, mine)| mine.parent == *parent) {
            let same = |other: &layout::Ticket| other.sequence == mine.sequence;
            answers[*at] = match line.iter().position(same) {
                None => Renewed::Lost,
                Some(place) => {
                    let holds = place < holders;
                    if holds {
                        session.state().granted(tickets[*at].id);
                    }
                    how_it_stands(holds, valid_for(&session, &tickets[*at]))
                }
            };
        }
    }
    Ok(answers)
}

/// Makes tickets smaller that have more permits than they are renewed with: each gets another node, with
/// the sequence number that it has, in one transaction, and the old one goes with it. Returns which were to
/// be made so, and whether that is known to be done.
///
/// Dropped half-way or unanswered, it may be carried out all the same; both paths are known from before it
/// is sent, and a release deletes what is at either. After that there is nothing to be made smaller, and the
/// transaction fails as a whole.
async fn shrink(session: &Arc<Session>, tickets: &[Arc<Request>]) -> Vec<(Id, bool)> {
    let mut sent = Vec::new(); // allocates when something is put in
    for request in tickets {
        let (id, permits) = (request.id, request.permits.get());
        let mut state = session.state();
        let Some(mine) = state.standing(id) else {
            continue;
        };
        if permits >= mine.permits || mine.lost || mine.leaving {
            continue;
        }
        let (old, data) = (mine.path.clone(), layout::data(&request.owner, mine.ticket));
        let Some(new) = Parent::of(&request.name).smaller(&old, request) else {
            continue;
        };
        state.shrinks(id, &new);
        drop(state);
        let mut writes = session.client.new_multi_writer();
        let node = CreateMode::Ephemeral.with_acls(session.acls);
        // In this order: whoever follows the line is told so, and must not see it without either.
        let both = writes.add_create(&new, &data, &node);
        let both = both.and_then(|()| writes.add_delete(&old, None));
        let answer = both.map(|()| writes.commit());
        sent.push((id, permits, new, answer));
    }
    let mut tried = Vec::new();
    for (id, permits, new, answer) in sent {
        let outcome = match answer {
            Ok(answer) => answer.await.map(drop).map_err(ZkError::from),
            Err(error) => Err(error),
        };
        let done = match outcome {
            // Or an earlier try, which was not answered.
            Ok(()) | Err(ZkError::NodeExists) => {
                session.state().shrunk(id, new, permits);
                true
            }
            Err(ZkError::NoNode) => {
                if let Some(mine) = session.state().standing_mut(id) {
                    mine.lost = true;
                }
                true
            }
            Err(error) => {
                tracing::debug!(%error, "a ticket could not be made smaller, or perhaps it was");
                false
            }
        };
        tried.push((id, done));
    }
    tried
}

fn how_it_stands(granted: bool, valid_for: Duration) -> Renewed {
    match granted {
        true => Renewed::Granted { valid_for },
        false => Renewed::Waiting {
            valid_for,
            recheck_in: None,
        },
    }
}

/// Deletes nodes. Repeated by the core until it is acknowledged; a node that is not there, because
/// an earlier try was carried out or because its session is over, is acknowledged too.
///
/// Dropped half-way, what was sent is carried out, and the ids stay known.
pub(super) async fn release(
    session: Arc<Session>,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    if let Some(answers) = went_with_the_session(&session, &tickets) {
        return Ok(answers);
    }
    let outcome = delete(&session, &tickets).await;
    match outcome {
        // A process that was stopped hears that its connection is gone before it hears why.
        Err(error) if session.give_up_if_uncertain() => {
            went_with_the_session(&session, &tickets).ok_or(error)
        }
        outcome => outcome,
    }
}

async fn delete(
    session: &Arc<Session>,
    tickets: &[Departure],
) -> Result<Vec<Released>, StoreError> {
    session.usable()?;
    let client = &session.client;
    let parents: Vec<Parent> = tickets
        .iter()
        .map(|departure| Parent::of(&departure.request.name))
        .collect();
    let mut sent = Vec::with_capacity(tickets.len());
    for (departure, parent) in tickets.iter().zip(&parents) {
        let id = departure.request.id;
        let mut state = session.state();
        state.leaves(id);
        let path = state.standing(id).map(|standing| standing.path.clone());
        let smaller = state.standing(id).and_then(|mine| mine.shrinks_to.clone());
        if departure.enqueue_may_follow {
            // Whatever comes later is seen by the line's watch, and deleted.
            state.mark_gone(id, &parent.path);
            session.follow(&mut state, &parent.path);
        }
        drop(state);
        // Of an id that we know nothing of there may be a node all the same: of a try that was never
        // answered, or of an earlier session.
        let search = departure.enqueue_may_follow || path.is_none();
        let synced = departure
            .enqueue_may_follow
            .then(|| client.sync(&parent.path));
        sent.push((
            path.map(|path| client.delete(&path, None)),
            smaller.map(|path| client.delete(&path, None)),
            synced,
            search.then(|| client.list_children(&parent.path)),
        ));
    }
    let mut answers = Vec::with_capacity(tickets.len());
    for ((departure, parent), (deleted, smaller, synced, listed)) in
        tickets.iter().zip(&parents).zip(sent)
    {
        let id = departure.request.id;
        let mut released = Released::NotFound;
        for deleted in [deleted, smaller].into_iter().flatten() {
            match was_deleted(deleted.await)? {
                Released::NotFound => {}
                found => released = found,
            }
        }
        if let Some(synced) = synced {
            synced.await.map_err(failed)?;
        }
        if let Some(listed) = listed {
            let children = match listed.await {
                Ok(children) => children,
                Err(ZkError::NoNode) => Vec::new(),
                Err(error) => return Err(failed(error)),
            };
            for ticket in layout::in_line(&children) {
                if ticket.id == id {
                    let path = parent.child(&ticket.node);
                    match was_deleted(client.delete(&path, None).await)? {
                        Released::NotFound => {}
                        found => released = found,
                    }
                }
            }
        }
        if released != Released::Failed {
            session.state().left(id);
        }
        answers.push(released);
    }
    Ok(answers)
}

/// The answers of a session that is over, if any of the tickets was in it. Nobody continues it, so its
/// nodes go, and so does what is still under way in it. Others are asked for in the next session.
fn went_with_the_session(session: &Session, tickets: &[Departure]) -> Option<Vec<Released>> {
    if !session.is_over() {
        return None;
    }
    let mut state = session.state();
    let answers: Vec<Released> = tickets
        .iter()
        .map(
            |departure| match state.tickets.remove(&departure.request.id) {
                Some(_) => Released::NotFound,
                None => Released::Failed,
            },
        )
        .collect();
    answers.contains(&Released::NotFound).then_some(answers)
}

/// An error that is this ticket's alone does not keep the others from being acknowledged.
fn was_deleted(outcome: Result<(), ZkError>) -> Result<Released, StoreError> {
    match outcome {
        Ok(()) => Ok(Released::Released),
        // Nodes go with their session, and nothing that is still under way in it is carried out.
        Err(ZkError::NoNode | ZkError::SessionExpired) => Ok(Released::NotFound),
        Err(ZkError::NoAuth) => {
            tracing::debug!("ZooKeeper: no right to delete a ticket (see the guide of the store)");
            Ok(Released::Failed)
        }
        Err(error) => Err(failed(error)),
    }
}

pub(super) async fn inspect(session: Arc<Session>, name: Name) -> Result<Vec<Place>, StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    let children = match session.client.list_children(&parent.path).await {
        Ok(children) => children,
        Err(ZkError::NoNode) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let line = layout::in_line(&children);
    if line.is_empty() {
        return Ok(Vec::new());
    }
    // Sent together, in requests that stay far below the megabyte for which a server ends the connection.
    let mut reading = Vec::new();
    for page in line.chunks(READS) {
        let mut reads = session.client.new_multi_reader();
        for ticket in page {
            reads
                .add_get_data(&parent.child(&ticket.node))
                .map_err(failed)?;
        }
        reading.push(reads.commit());
    }
    let mut read = Vec::with_capacity(line.len());
    for page in reading {
        read.extend(page.await.map_err(failed)?);
    }
    // As the line was: of what is gone meanwhile, or has another node, nobody else is shown to hold for it.
    let holders = layout::holders(&line);
    let places = line.iter().zip(read).enumerate();
    let places = places.filter_map(|(at, (ticket, read))| {
        let MultiReadResult::Data { data, stat } = read else {
            return None;
        };
        let (owner, number) = layout::owner_and_number(&data, stat.czxid.unsigned_abs());
        Some(Place::new(
            number,
            at < holders,
            ticket.permits,
            ticket.capacity,
            // The servers do not tell how long a session has left; this is the most.
            ticket.ttl,
            owner,
        ))
    });
    Ok(places.collect())
}

/// The parent is a container, which the server removes some time after its last ticket; this does
/// it now.
pub(super) async fn forget(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    session.state().forget_parent(&parent.path);
    match session.client.delete(&parent.path, None).await {
        Ok(()) | Err(ZkError::NoNode | ZkError::NotEmpty) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// For how long a lease is valid from now on: its ttl, as long as the session certainly lives. The
/// core counts it from a moment before this one, so that the deadline is earlier, if anything.
fn valid_for(session: &Session, request: &Request) -> Duration {
    valid_for_in(&session.state().proof, request)
}

fn valid_for_in(proof: &super::session::Proof, request: &Request) -> Duration {
    proof.lives_for(Clock::BOOT.now()).min(request.ttl)
}

fn lives_for(session: &Session) -> Duration {
    session.state().proof.lives_for(Clock::BOOT.now())
}

/// What an error says about the request (H11). A broken connection is not one of the core's: the
/// session gets over it, or ends, and either is told by the driver.
pub(super) fn failed(error: ZkError) -> StoreError {
    let fault = match &error {
        // Refused by the server before anything was done; over in a moment.
        ZkError::Throttled | ZkError::NotReadOnly => Fault::Retry,
        // The same, and it needs an operator.
        ZkError::QuotaExceeded => Fault::Refused,
        ZkError::NoAuth
        | ZkError::InvalidAcl
        | ZkError::AuthFailed
        | ZkError::Unimplemented
        | ZkError::BadArguments(_)
        | ZkError::NoChildrenForEphemerals => Fault::Config,
        // Refused because of what is there, or is not.
        ZkError::NoNode
        | ZkError::NodeExists
        | ZkError::NotEmpty
        | ZkError::BadVersion
        | ZkError::NoWatcher => Fault::Retry,
        // The connection, or the session with whatever it had created, went under the request; a
        // reply that makes no sense.
        _ => Fault::Unknown,
    };
    let hint = match &error {
        ZkError::NoAuth | ZkError::InvalidAcl => {
            " (see the rights in the guide of the ZooKeeper store)"
        }
        ZkError::Unimplemented => " (3.6 or later is needed)",
        _ => "",
    };
    StoreError::new(fault, format!("ZooKeeper: {error}{hint}"))
}

/// As [`failed`], while connecting: nothing has been asked yet, so nothing can be unknown.
pub(super) fn not_connected(hosts: &str, error: ZkError) -> StoreError {
    // All that the library says of whatever went wrong with every server.
    let hint = match error {
        ZkError::NoHosts => " (if these ports speak TLS, the scheme is zookeeper+tls)",
        _ => "",
    };
    let failed = failed(error);
    let fault = match failed.fault() {
        Fault::Config => Fault::Config,
        Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
    };
    StoreError::new(fault, format!("cannot connect to {hosts}: {failed}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H11.
    #[test]
    fn each_error_says_what_became_of_the_request() {
        for error in [
            ZkError::NoNode,
            ZkError::NodeExists,
            ZkError::Throttled,
            ZkError::NotReadOnly,
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Retry, "{error}");
        }
        for error in [
            ZkError::NoAuth,
            ZkError::AuthFailed,
            ZkError::InvalidAcl,
            ZkError::Unimplemented,
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Config, "{error}");
        }
        for error in [
            ZkError::ConnectionLoss,
            ZkError::SessionExpired,
            ZkError::SessionMoved,
            ZkError::ClientClosed,
            ZkError::Timeout,
            ZkError::UnexpectedErrorCode(-1),
        ] {
            assert_eq!(failed(error.clone()).fault(), Fault::Unknown, "{error}");
        }
        assert_eq!(failed(ZkError::QuotaExceeded).fault(), Fault::Refused);
        assert_eq!(not_connected("h", ZkError::NoHosts).fault(), Fault::Retry);
        assert_eq!(
            not_connected("h", ZkError::AuthFailed).fault(),
            Fault::Config
        );
    }
}
