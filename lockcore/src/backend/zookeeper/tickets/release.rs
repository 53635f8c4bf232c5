//! Releases: deletes the nodes of tickets.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::Error as ZkError;

use super::alone;
use crate::backend::zookeeper::errors::failed;
use crate::backend::zookeeper::layout::Parent;
use crate::backend::zookeeper::session::Session;
use crate::backend::zookeeper::standing::Standing;
use crate::backend::{Departure, Released, StoreError};
use crate::clock::Clock;

/// Deletes nodes. The core repeats a release until it is acknowledged. A node that does not exist
/// is acknowledged too: an earlier attempt has deleted it, or its session is over.
///
/// If the future is dropped half-way, the requests that were sent are carried out. The state keeps
/// the ids of the tickets, so a repetition finds their nodes.
pub(crate) async fn release(
    session: Arc<Session>,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    if let Some(answers) = went_with_the_session(&session, &tickets) {
        return Ok(answers);
    }
    let outcome = delete(&session, &tickets).await;
    match outcome {
        // If a process was stopped for a while, it first learns that its connection is gone, and
        // only later that its session has ended.
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
    let began = Clock::BOOT.now();
    let mut sent = Vec::with_capacity(tickets.len());
    for (departure, parent) in tickets.iter().zip(&parents) {
        let id = departure.request.id;
        let mine = leave(session, departure, parent);
        // Even if this process does not know the id, a node of it may exist. The node may be from
        // an attempt that was never answered, or from an earlier session.
        let search = departure.enqueue_may_follow || mine.is_none();
        let smaller = mine.as_ref().and_then(|mine| mine.shrinks_to.as_ref());
        let smaller = smaller.map(|path| client.delete(path, None));
        let deleted = mine.map(|mine| alone::delete(session, id, mine));
        sent.push((deleted, smaller, search));
    }
    // After this `sync`, the lists show the effect of requests that were sent on an earlier
    // connection. This includes a request that makes a ticket smaller. So the lists show the ticket
    // under either of its two paths.
    let may_follow = |departure: &Departure| departure.enqueue_may_follow;
    let synced = tickets.iter().any(may_follow).then(|| client.sync("/"));
    let mut lists = HashMap::new();
    for (parent, (_, _, search)) in parents.iter().zip(&sent) {
        if *search && !lists.contains_key(&parent.path) {
            lists.insert(&parent.path, session.list(&parent.path));
        }
    }
    if let Some(synced) = synced {
        synced.await.map_err(failed)?;
    }
    let mut lines = HashMap::new();
    for (path, listed) in lists {
        lines.insert(path, listed.await.map_err(failed)?);
    }
    let mut answers = Vec::with_capacity(tickets.len());
    for ((departure, parent), (deleted, smaller, search)) in tickets.iter().zip(&parents).zip(sent)
    {
        let id = departure.request.id;
        let mut released = Released::NotFound;
        let mut found = Vec::new();
        if search {
            let line = lines[&parent.path].iter();
            let nodes = line.filter(|ticket| ticket.id == id);
            found.extend(nodes.map(|ticket| client.delete(&parent.child(&ticket.node), None)));
        }
        let mut outcomes = Vec::new();
        if let Some(deleted) = deleted {
            outcomes.push(deleted.await);
        }
        for deleted in smaller.into_iter().chain(found) {
            outcomes.push(deleted.await);
        }
        for outcome in outcomes {
            match was_deleted(outcome)? {
                Released::NotFound => {}
                outcome => released = outcome,
            }
        }
        if released == Released::Released {
            session.committed(began);
        }
        if released != Released::Failed {
            session.state().left(id);
        }
        answers.push(released);
    }
    Ok(answers)
}

/// Notes that a ticket is being released. Returns the ticket, if this process knows it.
fn leave(session: &Arc<Session>, departure: &Departure, parent: &Parent) -> Option<Standing> {
    let id = departure.request.id;
    let mut state = session.state();
    state.leaves(id);
    let mut mine = state.standing(id).cloned();
    if departure.enqueue_may_follow {
        // If a node of this id appears later, this client sees it through the line's watch and
        // deletes it. But the known ticket must be deleted by this release, and not by the watch.
        // Otherwise the release would report that it has found no ticket. So the delete of the
        // ticket is sent at once, without its parent.
        if let Some(mine) = &mut mine {
            mine.alone = false;
        }
        state.mark_gone(id, &parent.path, Duration::ZERO);
        session.follow(&mut state, &parent.path);
    }
    mine
}

/// The answers if the session is over and any of the tickets was in it. A session that is over is
/// never continued. So its nodes disappear, and its requests in flight have no effect. A ticket
/// that was not in this session must be released in the next session.
fn went_with_the_session(session: &Session, tickets: &[Departure]) -> Option<Vec<Released>> {
    if !session.is_over() {
        return None;
    }
    let mut state = session.state();
    let answers: Vec<Released> = tickets
        .iter()
        .map(
            |departure| match state.tickets.remove(departure.request.id) {
                Some(_) => Released::NotFound,
                None => Released::Failed,
            },
        )
        .collect();
    answers.contains(&Released::NotFound).then_some(answers)
}

/// The answer for one ticket. An error that concerns only this ticket does not stop the
/// acknowledgement of the others.
fn was_deleted(outcome: Result<(), ZkError>) -> Result<Released, StoreError> {
    match outcome {
        Ok(()) => Ok(Released::Released),
        // The nodes of a session end with the session, and its requests in flight are not carried
        // out.
        Err(ZkError::NoNode | ZkError::SessionExpired) => Ok(Released::NotFound),
        Err(ZkError::NoAuth) => {
            tracing::debug!("ZooKeeper: no right to delete a ticket (see the guide of the store)");
            Ok(Released::Failed)
        }
        Err(error) => Err(failed(error)),
    }
}
