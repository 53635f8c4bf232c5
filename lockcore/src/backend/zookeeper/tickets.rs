//! The operations, and the meaning of their failures. A request is sent when the method of the
//! client library is called, and only its reply is awaited. All requests use one connection, and
//! the server carries them out in the order in which they were sent. So if a future is dropped, the
//! requests that it has sent are carried out. The state under the mutex records what is known of
//! each id:
//! - no entry: no request was sent, or it is known that no node is at the store;
//! - `Mine::Asked`: a create was sent. If its future was dropped, or the reply was lost, the ticket
//!   may exist. So another enqueue of the same id, or its release, first looks for the node;
//! - `Mine::Standing`: the ticket exists under a known path, until its release is acknowledged.

mod alone;
mod enqueue;
mod release;
mod renew;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zookeeper_client::{CreateMode, Error as ZkError, MultiReadResult, MultiReader, MultiWriter};

pub(super) use enqueue::enqueue;
pub(super) use release::release;
pub(super) use renew::renew;

use super::errors::failed;
use super::layout::{self, Data, Parent, Stored};
use super::proof::Proof;
use super::row::Row;
use super::session::Session;
use super::standing::{Mine, Standing};
use crate::backend::shown::ASK;
use crate::backend::{Fault, Listing, Page, StoreError, Summary, TicketInfo};
use crate::clock::Clock;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::token::MAX_TICKET;

/// How many nodes are read in one request. The path of each node has at most two kilobytes.
const READS: usize = 250;

/// A line is summed up in the list if it has at most this many nodes, and a page reads so many nodes
/// of tickets.
const SHORT: usize = 32;
const MOST_SUMMED_UP: usize = 4_000;

/// Adds a node to a request that reads.
type AddRead<'a> = fn(&mut MultiReader<'a>, &str) -> Result<(), ZkError>;

pub(super) async fn inspect(
    session: Arc<Session>,
    name: Name,
) -> Result<Vec<TicketInfo>, StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    let children = match session.client.list_children(&parent.path).await {
        Ok(children) => children,
        Err(ZkError::NoNode) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let line = Row::of(&children);
    let paths = line.iter().map(|ticket| parent.child(&ticket.node));
    let paths: Vec<String> = paths.collect();
    let read = read_all(&session, &paths, MultiReader::add_get_data).await?;
    Ok(shown(&line, read))
}

/// Reads nodes, in requests that are sent together, and stay far below one megabyte. A server ends
/// the connection for a request of that size.
async fn read_all<'a>(
    session: &'a Session,
    paths: &[impl AsRef<str>],
    add: AddRead<'a>,
) -> Result<Vec<MultiReadResult>, StoreError> {
    let mut reading = Vec::new();
    for page in paths.chunks(READS) {
        let mut reads = session.client.new_multi_reader();
        for path in page {
            add(&mut reads, path.as_ref()).map_err(failed)?;
        }
        reading.push(reads.commit());
    }
    let mut read = Vec::with_capacity(paths.len());
    for page in reading {
        read.extend(page.await.map_err(failed)?);
    }
    Ok(read)
}

/// The tickets of a line, with the data of their nodes.
fn shown(line: &Row, read: Vec<MultiReadResult>) -> Vec<TicketInfo> {
    // The holders are computed from the line as it was listed. If a ticket is gone by now, or has
    // another node, the result does not show another ticket as a holder in its place.
    let holders = line.terms.fit(line.iter());
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let millis = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
    let places = line.iter().zip(read).enumerate();
    let places = places.filter_map(|(at, (ticket, read))| {
        let MultiReadResult::Data { data, stat } = read else {
            return None;
        };
        let data = Data::read(&data, stat.czxid.unsigned_abs(), ticket.ttl);
        let age = millis.saturating_sub(stat.ctime.unsigned_abs());
        let place = TicketInfo::new(
            data.number,
            at < holders || data.number <= line.terms.through(),
            ticket.permits,
            line.terms.capacity().unwrap_or(ticket.capacity),
            // The server does not report when the ticket was renewed. This is the longest possible
            // time, because no renewal gives more than the ttl that the node shows.
            data.ttl,
            data.owner,
        );
        let place = place.with_id(ticket.id);
        // The server does not report its time, so this age is by the clock of this machine. The
        // node of a ticket that was made smaller is younger than the ticket.
        Some(place.with_age(Duration::from_millis(age)))
    });
    places.collect()
}

/// Lists the names in use. A page begins behind the last node of the page before it. The whole
/// folder is listed for each page, because ZooKeeper has no request for a part of a folder.
pub(super) async fn list(session: Arc<Session>, listing: Listing) -> Result<Page, StoreError> {
    session.usable()?;
    let folder = layout::folder(&listing.namespace);
    let beginning = layout::nodes_like(&listing.namespace, &listing.prefix);
    let mut nodes = match session.client.list_children(&folder).await {
        Ok(nodes) => nodes,
        Err(ZkError::NoNode) => return Ok(Page::default()),
        Err(error) => return Err(failed(error)),
    };
    let is_behind = |after: &Arc<str>, node: &str| node > &**after;
    nodes.retain(|node| {
        let after = listing.after.as_ref();
        node.starts_with(&beginning) && after.is_none_or(|after| is_behind(after, node))
    });
    nodes.sort_unstable();
    let more = nodes.len() > listing.limit as usize;
    nodes.truncate(listing.limit as usize);
    let next = nodes
        .last()
        .filter(|_| more)
        .map(|last| last.as_str().into());
    let paths = nodes.iter().map(|node| format!("{folder}/{node}"));
    let paths: Vec<String> = paths.collect();
    let read = read_all(&session, &paths, MultiReader::add_get_data).await?;
    let rows = rows(&session, &paths, &read, listing.summaries).await?;
    let mut summaries = match listing.summaries {
        true => summaries(&session, &rows).await?,
        false => HashMap::new(),
    };
    // The node of a name stays for a while after the last ticket.
    let has_children = |read: &MultiReadResult| matches!(read, MultiReadResult::Data { stat, .. } if stat.num_children > 0);
    let used = nodes.iter().zip(&paths).zip(&read);
    let names = used.filter_map(|((node, path), read)| {
        let is_used = rows
            .get(path)
            .map_or(has_children(read), |row| !row.is_empty());
        let mut used = layout::name_of(node).filter(|_| is_used)?;
        used.summary = summaries.remove(path);
        Some(used)
    });
    Ok(Page::new(names.collect(), next))
}

/// The lines of some of these names. If summaries are wanted, these are the short lines. Otherwise
/// they are those that may have a stored capacity and no ticket. Only the nodes of names that have
/// had a stored capacity have data. A node with more than two children has a ticket, except for
/// moments.
async fn rows<'a>(
    session: &Session,
    paths: &'a [String],
    read: &[MultiReadResult],
    summaries: bool,
) -> Result<HashMap<&'a String, Row>, StoreError> {
    let mut left = if summaries { MOST_SUMMED_UP } else { 0 };
    let is_asked = |read: &MultiReadResult| {
        let MultiReadResult::Data { data, stat } = read else {
            return false;
        };
        let children = usize::try_from(stat.num_children).unwrap_or(0);
        let is_short = (1..=SHORT.min(left)).contains(&children);
        if is_short {
            left -= children;
        }
        is_short || !data.is_empty() && (1..=2).contains(&children)
    };
    let is_asked: Vec<bool> = read.iter().map(is_asked).collect();
    let asked = paths.iter().zip(is_asked).filter(|(_, is_asked)| *is_asked);
    let asked: Vec<&String> = asked.map(|(path, _)| path).collect();
    let children = read_all(session, &asked, MultiReader::add_get_children).await?;
    let rows = children.into_iter().map(|read| match read {
        MultiReadResult::Children { children } => Row::of(&children),
        _ => Row::default(), // the name has gone
    });
    Ok(asked.into_iter().zip(rows).collect())
}

/// The summaries of lines.
async fn summaries<'a>(
    session: &Session,
    rows: &HashMap<&'a String, Row>,
) -> Result<HashMap<&'a String, Summary>, StoreError> {
    let tickets = rows.iter().flat_map(|(path, row)| {
        let paths = row
            .iter()
            .map(move |ticket| format!("{path}/{}", ticket.node));
        paths.collect::<Vec<_>>()
    });
    let tickets: Vec<String> = tickets.collect();
    let mut read = read_all(session, &tickets, MultiReader::add_get_data)
        .await?
        .into_iter();
    let lines = rows.iter().map(|(path, row)| {
        let line = shown(row, read.by_ref().take(row.len()).collect());
        (*path, line)
    });
    let lines = lines.filter(|(_, line)| !line.is_empty());
    Ok(lines
        .map(|(path, line)| (path, Summary::of(&line)))
        .collect())
}

/// Writes the ask-back behind the owner, in the data of the ticket's node. No message is sent to
/// the holder. The holder reads the node when it renews the ticket.
///
/// If the future is dropped half-way, the ask-back may be written all the same. In this case the
/// holder obeys it.
pub(super) async fn ask_back(
    session: Arc<Session>,
    name: Name,
    id: Id,
    ask: Arc<str>,
) -> Result<bool, StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    let line = session.list(&parent.path).await.map_err(failed)?;
    let Some(ticket) = line.iter().find(|ticket| ticket.id == id) else {
        return Ok(false);
    };
    let path = parent.child(&ticket.node);
    let (data, stat) = match session.client.get_data(&path).await {
        Ok(read) => read,
        Err(ZkError::NoNode) => return is_gone(&session, &parent, id).await,
        Err(error) => return Err(failed(error)),
    };
    let mut data = Data::read(&data, stat.czxid.unsigned_abs(), ticket.ttl);
    let owner = data.owner.split(ASK).next().unwrap_or_default();
    data.owner = format!("{owner}{ASK}{ask}");
    let (client, version) = (&session.client, Some(stat.version));
    match client.set_data(&path, &data.to_bytes(), version).await {
        Ok(_) => Ok(true),
        Err(ZkError::NoNode) => is_gone(&session, &parent, id).await,
        Err(ZkError::BadVersion) => {
            let text =
                "ZooKeeper: the ticket is asked back by somebody else, or extended, at this moment";
            Err(StoreError::new(Fault::Retry, text))
        }
        Err(error) => Err(failed(error)),
    }
}

/// The answer to an ask-back if the node of the ticket is gone. The ticket may have another node by
/// now, because it was made smaller.
async fn is_gone(session: &Arc<Session>, parent: &Parent, id: Id) -> Result<bool, StoreError> {
    let line = session.list(&parent.path).await.map_err(failed)?;
    match line.iter().any(|ticket| ticket.id == id) {
        true => {
            let text = "ZooKeeper: the ticket was made smaller at this moment; ask again";
            Err(StoreError::new(Fault::Retry, text))
        }
        false => Ok(false),
    }
}

/// Removes the parent node of a name now. Without this call, the server removes the parent, which
/// is a container, some time after its last ticket, unless a capacity is stored.
///
/// If a capacity was changed, the server removes the parent later all the same: the data of the
/// parent is the id of the last change, which a repetition of this change must find.
pub(super) async fn forget(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    session.state().forget_parent(&parent.path);
    // Only a change of a stored capacity writes the parent.
    let never_written = Some(0);
    match session.client.delete(&parent.path, never_written).await {
        Ok(()) | Err(ZkError::NoNode) => return Ok(()),
        Err(ZkError::NotEmpty | ZkError::BadVersion) => {}
        Err(error) => return Err(failed(error)),
    }
    let line = session.list(&parent.path).await.map_err(failed)?;
    let Some(stored) = line.terms.stored.as_ref().filter(|_| line.is_empty()) else {
        return Ok(());
    };
    let mut writes = session.client.new_multi_writer();
    renew_parent(&mut writes, &session, &parent, stored).map_err(failed)?;
    match writes.commit().await {
        Ok(_) => Ok(()),
        Err(error) => match ZkError::from(error) {
            // Another client uses the name, or changes its capacity.
            ZkError::NoNode | ZkError::NotEmpty => Ok(()),
            error => Err(failed(error)),
        },
    }
}

/// Adds the steps that replace a parent by one without a stored capacity. The delete of the parent
/// fails if a ticket has come meanwhile. The server removes a container only after it has had a
/// child, so the new one gets a child for a moment.
fn renew_parent(
    writes: &mut MultiWriter<'_>,
    session: &Session,
    parent: &Parent,
    stored: &Stored,
) -> Result<(), ZkError> {
    let container = CreateMode::Container.with_acls(session.acls);
    let node = CreateMode::Persistent.with_acls(session.acls);
    let child = parent.child(&stored.node);
    writes.add_delete(&child, None)?;
    writes.add_delete(&parent.path, None)?;
    writes.add_create(&parent.path, b"", &container)?;
    writes.add_set_data(&parent.path, stored.change.to_string().as_bytes(), None)?;
    writes.add_create(&child, b"", &node)?;
    writes.add_delete(&child, None)
}

/// Checks the server by a request that old servers cannot answer: several reads in one request.
/// Servers know this request since version 3.6, like the watches that wake waiters. Returns
/// warnings about the session timeout.
pub(super) async fn check(session: Arc<Session>) -> Result<Vec<String>, StoreError> {
    let mut reads = session.client.new_multi_reader();
    reads.add_get_children("/").map_err(failed)?;
    match reads.commit().await {
        Ok(_) => {}
        Err(ZkError::Unimplemented) => {
            return Err(StoreError::new(
                Fault::Config,
                "ZooKeeper: the server is too old; update it to 3.6 or later",
            ));
        }
        Err(error) => return Err(failed(error)),
    }
    let (asked, given) = (session.asked, session.timeout);
    let mut warnings = Vec::new();
    if given < asked {
        warnings.push(format!(
            "asked for a session of {asked:?} (LOCK_TTL), and the server gave {given:?}; leases that are \
             renewed get that, and a longer ttl without renewal is refused. Raise the server's maxSessionTimeout"
        ));
    }
    if given > asked {
        warnings.push(format!(
            "asked for a session of {asked:?} (LOCK_TTL), and the server gave {given:?}: that is how long a lock \
             stays taken when its holder dies. Lower the server's minSessionTimeout"
        ));
    }
    Ok(warnings)
}

/// How long a lease is valid from now on: its ttl, but at most the ttl that its node shows, and at
/// most as long as the session certainly lives. The core counts this time from a moment before now.
/// So its deadline may be earlier than necessary, but never later.
fn valid_for(session: &Session, request: &Request, shown: Duration) -> Duration {
    valid_for_in(&session.state().proof, request, shown)
}

fn valid_for_in(proof: &Proof, request: &Request, shown: Duration) -> Duration {
    let lives_for = proof.lives_for(Clock::BOOT.now());
    lives_for.min(request.ttl).min(shown)
}

/// Notes that a ticket exists. The number of the ticket is the id of the transaction that created
/// its node. No transaction creates two tickets. The ids rise, even when servers restart, and even
/// when the parent node is deleted and created again. If the id cannot be a ticket number, this
/// deletes the node and returns an error.
fn stands(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    sequence: i32,
    path: String,
    czxid: i64,
    is_alone: bool,
) -> Result<Standing, StoreError> {
    let number = u64::try_from(czxid).ok();
    let Some(ticket) = number.filter(|number| (1..=MAX_TICKET).contains(number)) else {
        session.delete_unasked(path);
        session.state().left(request.id);
        return Err(StoreError::new(
            Fault::Refused,
            format!(
                "ZooKeeper: transaction {czxid:#x} is no ticket number; its epoch has more than 21 bits"
            ),
        ));
    };
    let standing = Standing {
        parent: parent.path.clone(),
        path,
        permits: request.permits.get(),
        ttl: request.ttl,
        shrinks_to: None,
        sequence,
        alone: is_alone,
        ticket,
        granted: false,
        seen: Some(Clock::BOOT.now()),
        lost: false,
        leaving: false,
    };
    let mut state = session.state();
    // The node exists, so its create was committed. This may be the create of the first attempt,
    // even if a later attempt found the node. So the time of the first send counts.
    if let Some(Mine::Asked(sent)) = state.tickets.get(request.id) {
        let sent = *sent;
        state.proof.committed(sent);
    }
    state.stands(request.id, standing.clone());
    drop(state);
    Ok(standing)
}
