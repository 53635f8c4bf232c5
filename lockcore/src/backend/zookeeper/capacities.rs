//! Stored capacities: how they are kept beside the tickets of a line, and how they are changed.
//!
//! A stored capacity is a node beside the tickets, and the name of the node contains everything
//! about it. So one list of the children shows the tickets and the capacity of the same moment, and
//! no other request is necessary. The data of the parent node is the id of the last change.
//!
//! # Which tickets hold
//!
//! While the capacity does not change, a ticket that holds by the rule holds until it is released
//! or expires, because older tickets only disappear or become smaller. So the client of the ticket
//! may read the line late, or may read an old state of the line. The ticket holds in each later
//! state too.
//!
//! A smaller capacity would break this. A client may not have seen yet that its ticket holds. By
//! the new capacity, the same ticket is a waiter. So a change must find out which tickets hold, and
//! must write the result down. One transaction cannot do this: a ZooKeeper transaction can check
//! the version of a node, but it cannot check that no child was created or deleted.
//!
//! So a change first puts a *halt* into the line. A halt is a node with a sequence number, like a
//! ticket, but without permits. While a halt is in the line, no client grants a ticket from this
//! line, wherever in the line the halt is. After the halt is created, the change reads the line.
//! The last step is one transaction: it writes the capacity and deletes the halt.
//!
//! - A ticket behind the halt has not been granted: every list that shows this ticket shows the
//!   halt too. A ticket in front of the halt may have been granted, because the old capacity let it
//!   hold in a line from before the halt. Such a ticket also holds in the line that the change
//!   reads, because older tickets only disappear or become smaller. No ticket is granted between
//!   this read and the transaction. So the tickets that hold by the line that was read are all the
//!   tickets that hold.
//! - These tickets are the oldest of the line, so one number separates them from the others. It is
//!   a ticket number: the id of a transaction of the ensemble. It never wraps, unlike the sequence
//!   numbers in the names of nodes. A client knows the numbers of its own tickets, and does not
//!   need the numbers of others. For a grant, all tickets in front count, whether they hold or
//!   wait. So when a ticket is granted, its permits and those of all holders together are never
//!   more than the capacity of that moment.
//! - The transaction deletes the halt, so it fails if the halt is gone. The halt is gone if the
//!   session has ended, or if an operator has deleted it. If there are several halts, only the
//!   client of the oldest halt may make its change. Every other client deletes its own halt, and
//!   the core sends the change again.
//! - The transaction deletes the halt in its last step. Watch events come in the order of the
//!   steps. So if a client has seen only some of the steps, its copy of the line contains the halt,
//!   and it grants nothing from this copy.
//! - A transaction whose answer was lost may be carried out late, but only while its halt exists.
//!   The core sends the same change again with another halt. This younger halt gives no right to
//!   change while the first halt is there. When the first halt is gone, the repetition finds its
//!   own id (the change was made), or finds that nothing was changed. In both cases it deletes its
//!   own halt.
//!
//! A halt is an ephemeral node, so it ends with the session of its client. If the process of this
//! client is stopped in the middle of a change, no client is granted permits until the session
//! ends. This is as if the stopped process held the lock. A caller that drops its future leaves no
//! halt behind: a task on the keeper's runtime makes the change, and deletes the halt if nothing
//! was changed. If the answer to a request is lost, the client deletes the halt as soon as it sees
//! it. It treats a ticket in the same way if the release of the ticket came before its create.
//!
//! A repetition finds no id if the capacity was forgotten meanwhile and the server has removed the
//! parent node. It then finds another parent node than its first attempt, or none, and changes
//! nothing: see `sent`.
//!
//! A ticket that is created during a change may be useless after the change. If a capacity is
//! stored, this is a ticket of a mutex. If the capacity is forgotten, it is a ticket that states
//! another capacity than the change. The name of the halt tells which case it is, and the enqueue
//! deletes such a ticket again. So no ticket waits in a line if its request would be refused after
//! the change.
//!
//! # When a capacity is forgotten
//!
//! The transaction deletes the node of the capacity. It creates another node in its place if
//! tickets wait, or if more tickets hold than their own capacity allows. This node has no capacity,
//! only the number up to which tickets hold. The next client that lists the line and finds no
//! waiter deletes this node.

use std::sync::Arc;

use zookeeper_client::{CreateMode, Error as ZkError, MultiWriteError, MultiWriter, Stat};

use super::counters::not_changed;
use super::errors::failed;
use super::layout::{self, Data, Parent, Stored, Ticket};
use super::row::{Row, Terms};
use super::sent::SentChanges;
use super::session::Session;
use crate::backend::{Fault, Resize, ResizeOp, ResizeOutcome, Resized, StoreError};
use crate::clock::Clock;
use crate::pauses::Pauses;
use crate::request::Id;

/// Reads or changes the stored capacity of a name.
///
/// If the future is dropped, a task on the keeper's runtime completes a change that has begun, so
/// the halt of the change does not stay.
pub(super) async fn resize(
    session: Arc<Session>,
    sent_changes: Arc<SentChanges>,
    resize: Arc<Resize>,
) -> Result<Resized, StoreError> {
    session.usable()?;
    let parent = Parent::of(&resize.name);
    // The server may be behind the leader, but the answer must be at least as new as this call. So
    // the server catches up first.
    let synced = session.client.sync(&parent.path);
    let reading = read(&session, &parent);
    synced.await.map_err(not_changed)?;
    let found = reading.await?;
    if let Some(answer) = found.answer(&resize, &sent_changes) {
        // No halt is necessary for this, and a halt would make other clients wait.
        return Ok(answer);
    }
    let exists = found.node.is_some();
    let (sent, id) = (Arc::clone(&sent_changes), resize.id);
    let changing = change(Arc::clone(&session), sent, parent, resize, exists);
    let changed = session.runtime.spawn(changing).await;
    if let Ok(Ok(_)) = changed {
        // Not in the task: its caller may have gone, and then the core repeats the change.
        sent_changes.answered(id);
    }
    // The task is cancelled only if its runtime ends, and the session ends with the runtime.
    changed.unwrap_or_else(|_| Err(failed(ZkError::ClientClosed)))
}

/// A line, and the last change of its capacity, both read at one moment.
struct Found {
    /// The id of the transaction that created the parent node, if there is one.
    node: Option<i64>,
    row: Row,
    change: Option<Id>,
}

impl Found {
    /// The answer if nothing is to be changed. `None` if the change is still to be made.
    fn answer(&self, resize: &Resize, sent_changes: &SentChanges) -> Option<Resized> {
        let stored = self.row.terms.capacity();
        let tickets = self.row.iter().map(|ticket| ticket.capacity);
        let outcome = resize.outcome(stored, self.change, tickets);
        // The change was made perhaps at a node that is gone by now.
        let sent_to = sent_changes.node_of(resize.id);
        let is_elsewhere = sent_to.is_some_and(|node| self.node != Some(node));
        let outcome = match outcome {
            None | Some(ResizeOutcome::Mismatch { .. }) if is_elsewhere => ResizeOutcome::Kept,
            outcome => outcome?,
        };
        Some(Resized::new(stored, self.change, outcome))
    }
}

/// Reads a line. The call itself sends the requests, and the future waits for the replies.
fn read(
    session: &Session,
    parent: &Parent,
) -> impl Future<Output = Result<Found, StoreError>> + use<> {
    let data = session.client.get_data(&parent.path);
    let children = session.client.get_children(&parent.path);
    async move {
        let data = found(data.await)?;
        let children = found(children.await)?;
        let written = |stat: &Stat| stat.mzxid;
        let (before, after) = (
            data.as_ref().map(|(_, stat)| written(stat)),
            children.as_ref().map(|(_, stat)| written(stat)),
        );
        if before != after {
            return Err(in_the_way("the capacity was changed while it was read"));
        }
        let node = data.as_ref().map(|(_, stat)| stat.czxid);
        let change = data.and_then(|(data, _)| Id::parse(std::str::from_utf8(&data).ok()?));
        Ok(Found {
            node,
            row: Row::of(&children.map_or_else(Vec::new, |(children, _)| children)),
            change,
        })
    }
}

fn found<T>(read: Result<T, ZkError>) -> Result<Option<T>, StoreError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(ZkError::NoNode) => Ok(None),
        Err(error) => Err(not_changed(error)),
    }
}

/// The halt of a change.
struct Halt {
    id: Id,
    path: String,
    sequence: i32,
    /// The id of the transaction that created the halt. It is greater than the number of each
    /// ticket in front of the halt.
    number: u64,
}

/// Makes a change: creates the halt, reads the line, and commits. Runs in a task of its own,
/// because a drop of this future would leave the halt in the line.
async fn change(
    session: Arc<Session>,
    sent_changes: Arc<SentChanges>,
    parent: Parent,
    resize: Arc<Resize>,
    exists: bool,
) -> Result<Resized, StoreError> {
    let (halt, found) = stop(&session, &parent, &resize, exists).await?;
    let changed = match found {
        Ok(found) => behind(&session, &sent_changes, &parent, &resize, &halt, found).await,
        Err(error) => Err(error),
    };
    match &changed {
        // The transaction has deleted the halt.
        Ok(Behind::Committed(_)) => {}
        Err(error) if error.fault() == Fault::Unknown => {
            // The transaction may be carried out late, but not after the halt is deleted.
            leave_behind(&session, &parent, halt.id);
        }
        Ok(Behind::Found(_)) | Err(_) => {
            // The call itself sends the delete. While the session is disconnected, the reply may
            // take long, so a task waits for it in place of the caller.
            let deleted = session.client.delete(&halt.path, None);
            session.runtime.clone().spawn(async move {
                match deleted.await {
                    Ok(()) | Err(ZkError::NoNode) => {}
                    Err(_) => leave_behind(&session, &parent, halt.id),
                }
            });
        }
    }
    changed.map(|(Behind::Committed(answer) | Behind::Found(answer))| answer)
}

/// The answer of a change that has put its halt into the line.
enum Behind {
    /// This change was committed, and its transaction has deleted the halt.
    Committed(Resized),
    /// Nothing was to be changed. If the answer has the id of this change, an earlier attempt was
    /// committed. It has deleted the halt of that attempt only.
    Found(Resized),
}

/// Puts a halt into the line, and then reads the line. If the answer to the create is lost, the
/// halt is deleted as soon as this client sees it.
async fn stop(
    session: &Arc<Session>,
    parent: &Parent,
    resize: &Resize,
    exists: bool,
) -> Result<(Halt, Result<Found, StoreError>), StoreError> {
    session.usable()?;
    // Each attempt has an id of its own. So a delete of the halt of one attempt does not delete the
    // halt of another.
    let id = Id::draw().map_err(|error| StoreError::new(Fault::Retry, error.to_string()))?;
    let (client, prefix) = (&session.client, parent.halt(id, resize, session.tag()));
    let container = CreateMode::Container.with_acls(session.acls);
    let halt = CreateMode::EphemeralSequential.with_acls(session.acls);
    let folders = match exists {
        true => Vec::new(),
        false => [&parent.folder, &parent.path]
            .map(|path| client.create(path, b"", &container))
            .into(),
    };
    let created = client.create(&prefix, b"", &halt);
    let reading = read(session, parent);
    // All requests are sent by now.
    let mut refused = None;
    for made in folders {
        match made.await {
            Ok(_) | Err(ZkError::NodeExists | ZkError::NoNode) => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let (stat, sequence) = match (created.await, refused) {
        (Ok(created), _) => created,
        (Err(ZkError::NoNode), Some(refused)) => return Err(not_changed(refused)),
        (Err(error), _) => {
            if failed(error.clone()).fault() == Fault::Unknown {
                leave_behind(session, parent, id);
            }
            return Err(not_changed(error));
        }
    };
    let halt = Halt {
        id,
        path: format!("{prefix}{sequence}"),
        sequence: layout::wrapped(sequence.into_i64()),
        number: stat.czxid.unsigned_abs(),
    };
    Ok((halt, reading.await))
}

/// Makes the change, after the halt was created. `found` is the line that was read after that.
async fn behind(
    session: &Arc<Session>,
    sent_changes: &SentChanges,
    parent: &Parent,
    resize: &Resize,
    halt: &Halt,
    found: Found,
) -> Result<Behind, StoreError> {
    let terms = &found.row.terms;
    if terms.halts.first().is_none_or(|first| first.id != halt.id) {
        return Err(in_the_way("somebody else is changing the capacity"));
    }
    let capacity = match (found.answer(resize, sent_changes), resize.op) {
        (None, ResizeOp::Set { capacity, .. }) => capacity,
        (Some(answer), _) => return Ok(Behind::Found(answer)),
        (None, ResizeOp::Read) => return Err(in_the_way("nothing is to be changed")),
    };
    let in_front = |ticket: &&Ticket| layout::is_older(ticket.sequence, halt.sequence);
    let in_front = found.row.iter().take_while(in_front);
    let holds = terms.fit(in_front.clone());
    let through = match in_front.clone().nth(holds) {
        None => halt.number,
        Some(waits) => {
            // This ticket may hold nevertheless, because it held at an earlier change.
            let read = session.client.get_data(&parent.child(&waits.node)).await;
            let (data, stat) = read.map_err(not_changed)?;
            let data = Data::read(&data, stat.czxid.unsigned_abs(), waits.ttl);
            terms.through().max(data.number.saturating_sub(1))
        }
    };
    let without = Terms::default();
    let is_needed = capacity.is_some() || without.fit(in_front.clone()) < in_front.count();
    let stored = is_needed.then(|| Stored::new(capacity, through, resize.id));
    session.usable()?;
    let sent = Clock::BOOT.now();
    let mut writes = session.client.new_multi_writer();
    let added = add(&mut writes, session, parent, resize.id, terms, stored, halt);
    added.map_err(not_changed)?;
    if let Some(node) = found.node {
        sent_changes.sent(resize.id, node);
    }
    match writes.commit().await {
        Ok(_) => {}
        // Nothing was changed: the halt is gone, or an operator has changed the nodes.
        Err(MultiWriteError::OperationFailed { source, .. })
            if !matches!(source, ZkError::SessionExpired | ZkError::SessionMoved) =>
        {
            sent_changes.answered(resize.id);
            return Err(not_changed(source));
        }
        Err(error) => return Err(failed(error.into())),
    }
    session.committed(sent);
    if capacity.is_some() {
        session.state().remember_parent(&parent.path);
    }
    Ok(Behind::Committed(Resized::new(
        capacity,
        Some(resize.id),
        ResizeOutcome::Applied,
    )))
}

/// Adds the steps of the change to a transaction. The delete of the halt must be the last step.
fn add(
    writes: &mut MultiWriter<'_>,
    session: &Session,
    parent: &Parent,
    change: Id,
    before: &Terms,
    after: Option<Stored>,
    halt: &Halt,
) -> Result<(), ZkError> {
    if let Some(after) = after {
        let node = CreateMode::Persistent.with_acls(session.acls);
        writes.add_create(&parent.child(&after.node), b"", &node)?;
    }
    writes.add_set_data(&parent.path, change.to_string().as_bytes(), None)?;
    if let Some(before) = &before.stored {
        writes.add_delete(&parent.child(&before.node), None)?;
    }
    writes.add_delete(&halt.path, None)
}

/// Deletes a halt whose create or transaction was not answered. The halt may not exist yet, and the
/// session may be disconnected. So this marks the id for as long as a node of the id may appear.
/// The client deletes each node of a marked id when it sees the node.
fn leave_behind(session: &Arc<Session>, parent: &Parent, halt: Id) {
    let mut state = session.state();
    state.mark_gone(halt, &parent.path, session.timeout);
    session.follow(&mut state, &parent.path);
    drop(state);
    // The mark works only while this client follows the line, and while no caller uses the session,
    // nothing is followed. So this task also lists the line itself. The library keeps the request
    // for the list until the session is connected. If a delete fails, the task repeats it until the
    // session ends, because a halt that stays would keep all clients from being granted.
    let (session, parent) = (Arc::clone(session), parent.clone());
    session.runtime.clone().spawn(async move {
        let mut pauses = Pauses::default();
        loop {
            let mut is_gone = true;
            match session.list(&parent.path).await {
                Ok(line) => {
                    for left in line.terms.halts.iter().filter(|left| left.id == halt) {
                        let path = parent.child(&left.node);
                        let deleted = session.client.delete(&path, None).await;
                        is_gone &= matches!(deleted, Ok(()) | Err(ZkError::NoNode));
                    }
                }
                Err(_) => is_gone = false,
            }
            if is_gone || session.is_over() {
                return;
            }
            tokio::time::sleep(pauses.draw()).await;
        }
    });
}

/// An error of a change that was not made.
fn in_the_way(what: &str) -> StoreError {
    StoreError::conflict(format!("ZooKeeper: {what}"))
}
