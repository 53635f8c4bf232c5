//! Stored capacities: how they stand beside the tickets of a line, and how they are changed.
//!
//! A stored capacity is a node beside the tickets, and everything about it is in the node's name. So one list of the line
//! has the tickets and the capacity of the same moment, and no other request is necessary. The data of the parent is the
//! id of the last change.
//!
//! # Which tickets hold
//!
//! Without a change, a ticket that holds by the rule holds for ever: older tickets only go, or become smaller. So it does
//! not matter when its client looks at the line, or how old the line is that it gets to see. A smaller capacity would
//! break that. A client may not have seen yet that its ticket holds, and by the new capacity the ticket looks like a
//! waiter. So a change must know who holds, and must write it down. It cannot find out in one transaction: servers check
//! the version of a node there, but not whether children have come or gone.
//!
//! So a change first puts a *halt* into the line: a node with a number, like a ticket, but for no permits. While the line
//! has a halt, no ticket is granted from it, wherever it stands. Then the change reads the line, and the last step is one
//! transaction: it writes the capacity, and deletes its halt.
//!
//! - No line without the halt shows a ticket from behind it, so none of them has been granted. The tickets in front of the
//!   halt may have been granted, if the old capacity lets them hold in some line before the halt. Then it still does so
//!   in the line that the change reads, because older tickets only go. No ticket is granted between that line and the
//!   transaction. So the tickets that hold by the line that was read are all that hold.
//! - These are the oldest of the line, so one number tells them from the others. It is the number of a ticket, which is a
//!   transaction of the ensemble: it never wraps, unlike the sequence numbers in the names of nodes. A client knows the
//!   numbers of its own tickets. It does not need those of others: whoever stands in front of a ticket counts, whether
//!   it holds or waits. So the permits of all that hold, with those of a ticket that is granted, are never more than
//!   the capacity of that moment.
//! - The transaction fails if the halt is gone, and with it the right to change: because the session has ended, or because an
//!   operator has deleted it. Of several halts only the oldest has that right. A client whose halt is younger takes it
//!   away, and the core asks again.
//! - The halt goes last in the transaction. Whoever sees only a part of it sees the halt.
//! - A transaction that comes late, after its answer was given up, needs its halt too. The core sends the same change again
//!   with another halt, which has no right to change as long as the first is there. It then finds its own id, or that
//!   nothing was changed.
//!
//! A halt ends with the session of its client. If that client is stopped in the middle of a change, nobody is granted
//! permits until then, as if it held them. A caller that gives up leaves no halt behind: a task on the keeper's runtime
//! makes the change, and takes the halt away if nothing was changed. If an answer is lost, the halt is deleted when it is
//! seen, like a ticket whose release came first.
//!
//! A ticket that comes during a change may be of no use after it: a mutex, when a capacity is stored, or a ticket that
//! states another capacity, when it is forgotten. The halt tells which change it is, and such a ticket does not stay. So
//! nobody waits in a line who would have been refused.
//!
//! # When a capacity is forgotten
//!
//! Then its node goes. If tickets hold that the capacity of the tickets does not allow, or others wait, another node takes
//! its place, which has only the number up to which tickets hold. The next client that finds nobody waiting deletes it.

use std::sync::Arc;

use zookeeper_client::{CreateMode, Error as ZkError, MultiWriteError, MultiWriter, Stat};

use super::counters::not_changed;
use super::errors::failed;
use super::layout::{self, Parent, Stored, Ticket};
use super::row::{Row, Terms};
use super::session::Session;
use crate::backend::{Fault, Resize, ResizeOp, ResizeOutcome, Resized, StoreError};
use crate::clock::Clock;
use crate::pauses::Pauses;
use crate::request::Id;

/// Reads or changes the stored capacity of a name.
///
/// If this is dropped, a change that was begun goes on in a task on the keeper's runtime, so its halt does not stay.
pub(super) async fn resize(
    session: Arc<Session>,
    resize: Arc<Resize>,
) -> Result<Resized, StoreError> {
    session.usable()?;
    let parent = Parent::of(&resize.name);
    // The server may be behind. What it tells must be at least as new as this call.
    let synced = session.client.sync(&parent.path);
    let reading = read(&session, &parent);
    synced.await.map_err(not_changed)?;
    let found = reading.await?;
    if let Some(answer) = found.answer(&resize) {
        return Ok(answer); // without a halt, which would make others wait
    }
    let exists = found.exists;
    let changing = change(Arc::clone(&session), parent, resize, exists);
    let changed = session.runtime.spawn(changing).await;
    changed.unwrap_or_else(|_| Err(failed(ZkError::ClientClosed))) // the runtime ends with the session
}

/// A line, and the last change of its capacity, both of one moment.
struct Found {
    exists: bool,
    row: Row,
    change: Option<Id>,
}

impl Found {
    /// The answer if nothing is to be changed.
    fn answer(&self, resize: &Resize) -> Option<Resized> {
        let answer = |outcome| {
            Some(Resized::new(
                self.row.terms.capacity(),
                self.change,
                outcome,
            ))
        };
        let ResizeOp::Set {
            capacity,
            after,
            stated,
        } = resize.op
        else {
            return answer(ResizeOutcome::Applied);
        };
        if self.change == Some(resize.id) {
            return answer(ResizeOutcome::Applied);
        }
        if self.change != after {
            return answer(ResizeOutcome::Kept);
        }
        let looked_at = match (self.row.terms.capacity(), capacity) {
            (None, _) => 1,
            (Some(_), Some(_)) => 0,
            (Some(_), None) => usize::MAX,
        };
        let mut looked_at = self.row.iter().take(looked_at);
        let other = looked_at.find(|ticket| ticket.capacity != stated.get())?;
        let in_use = other.capacity;
        answer(ResizeOutcome::Mismatch { in_use })
    }
}

/// Reads a line. Sent by the call.
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
        let change = data.and_then(|(data, _)| Id::parse(std::str::from_utf8(&data).ok()?));
        Ok(Found {
            exists: children.is_some(),
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
    /// The transaction that created it: greater than the number of each ticket in front of it.
    number: u64,
}

/// Nothing in here is taken back by dropping it: it runs in a task of its own.
async fn change(
    session: Arc<Session>,
    parent: Parent,
    resize: Arc<Resize>,
    exists: bool,
) -> Result<Resized, StoreError> {
    let (halt, found) = stop(&session, &parent, &resize, exists).await?;
    let changed = match found {
        Ok(found) => behind(&session, &parent, &resize, &halt, found).await,
        Err(error) => Err(error),
    };
    let is_changed = changed
        .as_ref()
        .is_ok_and(|changed| changed.change == Some(resize.id));
    let is_unknown = changed
        .as_ref()
        .is_err_and(|error| error.fault() == Fault::Unknown);
    if is_unknown {
        // The transaction may still come, but not after the halt is gone.
        leave_behind(&session, &parent, halt.id);
    } else if !is_changed {
        // Sent by the call. While the session is disconnected this may take long, and the caller need not wait for it.
        let deleted = session.client.delete(&halt.path, None);
        session.runtime.clone().spawn(async move {
            match deleted.await {
                Ok(()) | Err(ZkError::NoNode) => {}
                Err(_) => leave_behind(&session, &parent, halt.id),
            }
        });
    }
    changed
}

/// Puts a halt into the line, and reads the line after that. If the answer to the create is lost, the halt is deleted when
/// it is seen.
async fn stop(
    session: &Arc<Session>,
    parent: &Parent,
    resize: &Resize,
    exists: bool,
) -> Result<(Halt, Result<Found, StoreError>), StoreError> {
    session.usable()?;
    // Each attempt has another id, so that deleting the halt of one does not touch that of another.
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
    // Everything is sent by now.
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

/// The change itself, behind the halt.
async fn behind(
    session: &Arc<Session>,
    parent: &Parent,
    resize: &Resize,
    halt: &Halt,
    found: Found,
) -> Result<Resized, StoreError> {
    let terms = &found.row.terms;
    if terms.halts.first().is_none_or(|first| first.id != halt.id) {
        return Err(in_the_way("somebody else is changing the capacity"));
    }
    let capacity = match (found.answer(resize), resize.op) {
        (None, ResizeOp::Set { capacity, .. }) => capacity,
        (Some(answer), _) => return Ok(answer),
        (None, ResizeOp::Read) => return Err(in_the_way("nothing is to be changed")),
    };
    let in_front = |ticket: &&Ticket| layout::is_older(ticket.sequence, halt.sequence);
    let in_front = found.row.iter().take_while(in_front);
    let holds = terms.fit(in_front.clone());
    let through = match in_front.clone().nth(holds) {
        None => halt.number,
        Some(waits) => {
            // It may hold nevertheless, because an earlier change found it so.
            let read = session.client.get_data(&parent.child(&waits.node)).await;
            let (data, stat) = read.map_err(not_changed)?;
            let (_, number) = layout::owner_and_number(&data, stat.czxid.unsigned_abs());
            terms.through().max(number.saturating_sub(1))
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
    match writes.commit().await {
        Ok(_) => {}
        // Nothing was changed: the halt is gone, or an operator has touched the nodes.
        Err(MultiWriteError::OperationFailed { source, .. })
            if !matches!(source, ZkError::SessionExpired | ZkError::SessionMoved) =>
        {
            return Err(not_changed(source));
        }
        Err(error) => return Err(failed(error.into())),
    }
    session.committed(sent);
    if capacity.is_some() {
        session.state().remember_parent(&parent.path);
    }
    Ok(Resized::new(
        capacity,
        Some(resize.id),
        ResizeOutcome::Applied,
    ))
}

/// The halt goes last.
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

/// Deletes a halt as soon as it is seen, as long as it may appear: the session may be disconnected. It may not be there
/// yet.
fn leave_behind(session: &Arc<Session>, parent: &Parent, halt: Id) {
    let mut state = session.state();
    state.mark_gone(halt, &parent.path);
    if let Some(gone) = state.gone.get_mut(&halt) {
        gone.until = gone.until.max(Clock::BOOT.now().after(session.timeout));
    }
    session.follow(&mut state, &parent.path);
    drop(state);
    // If nobody uses the session for a while, nobody follows a line in it. So this task does not rely
    // on that. The library keeps the list until the session is connected. A delete that fails is
    // repeated for as long as the session lives: a halt that stays would keep all others out.
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

/// Nothing was changed.
fn in_the_way(what: &str) -> StoreError {
    StoreError::new(Fault::Retry, format!("ZooKeeper: {what}"))
}
