//! Takes a ticket: finds or makes its node, and sees what it is.

use std::sync::Arc;

use zookeeper_client::{CreateMode, CreateSequence, Error as ZkError, Stat};

use super::valid_for;
use crate::backend::zookeeper::errors::failed;
use crate::backend::zookeeper::layout::{self, Parent, Ticket};
use crate::backend::zookeeper::session::{Listed, Mine, Session, Standing};
use crate::backend::{Enqueued, Fault, StoreError};
use crate::clock::Clock;
use crate::queue::MOST_TICKETS;
use crate::request::Request;
use crate::token::MAX_TICKET;

/// Of the session timeout that must be certain before a lock is asked for. After a process was
/// stopped for a while, nothing is until two more probes are answered; tickets taken meanwhile would
/// be of no use.
const LEAST_CERTAIN: u32 = 8;

pub(crate) async fn enqueue(
    session: Arc<Session>,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    session.usable()?;
    can_be_kept(&session, &request)?;
    let parent = Parent::of(&request.name);
    let (standing, line) = match begin(&session, &request, &parent) {
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
    answer(&session, &request, &parent, standing, line).await
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
        Some(Mine::Asked(_)) => {
            // From now on a node of the first try is seen, however late it comes.
            session.follow(&mut state, &parent.path);
            return Begin::AskedBefore;
        }
        None => {}
    }
    state
        .tickets
        .insert(request.id, Mine::Asked(Clock::BOOT.now()));
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
    // The create itself is to show that the leader leads.
    if session.state().proof.heard_for(Clock::BOOT.now()) < timeout / LEAST_CERTAIN {
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
    let listing = session.list(&parent.path);
    synced.await.map_err(failed)?;
    let line = listing.await.map_err(failed)?;
    let mut found = None;
    for ticket in line.iter().filter(|ticket| ticket.id == request.id) {
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
            // Of an earlier session of ours, which ends without being renewed, or a second one.
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
) -> Result<(Standing, Option<Arc<[Ticket]>>), StoreError> {
    let line = session.list(&parent.path).await.map_err(failed)?;
    Ok((standing, Some(line)))
}

/// Creates the ticket, and its parent if need be; with its line if that was asked for.
async fn create(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    flush: Flush,
) -> Result<(Standing, Option<Arc<[Ticket]>>), StoreError> {
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
    let line = replies.listed.transpose();
    // The ticket stands; asked again, it is found.
    Ok((standing, line.map_err(failed)?))
}

struct Replies {
    /// What kept a parent from being made.
    refused: Option<ZkError>,
    created: Result<(Stat, CreateSequence), ZkError>,
    listed: Option<Listed>,
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
    let listed = flush.list.then(|| session.list(&parent.path));

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
    let mut state = session.state();
    // Its create was committed, as it is there; found by a later try, it was perhaps by the first.
    if let Some(Mine::Asked(sent)) = state.tickets.get(&request.id) {
        let sent = *sent;
        state.proof.committed(sent);
    }
    state.stands(request.id, standing.clone());
    drop(state);
    Ok(standing)
}

/// How a standing ticket stands, by the line as it was read or, without that, as its events tell it.
async fn answer(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    standing: Standing,
    line: Option<Arc<[Ticket]>>,
) -> Result<Enqueued, StoreError> {
    let (ticket, valid_for) = (standing.ticket, valid_for(session, request));
    let granted = Enqueued::Granted { ticket, valid_for };
    if let Some(line) = line {
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
        let holders = layout::holders(&*line);
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
    let sent = Clock::BOOT.now();
    match session.client.delete(&standing.path, None).await {
        Ok(()) | Err(ZkError::NoNode) => {
            session.committed(sent);
            session.state().left(request.id);
            Ok(())
        }
        Err(error) => Err(StoreError::new(Fault::Unknown, failed(error).to_string())),
    }
}
