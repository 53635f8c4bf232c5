//! Renewals: checks whether tickets exist and whether they hold, and makes tickets smaller.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{CreateMode, Error as ZkError, MultiReadResult};

use super::{READS, valid_for, valid_for_in};
use crate::backend::zookeeper::errors::failed;
use crate::backend::zookeeper::layout::{self, Parent};
use crate::backend::zookeeper::line::Line;
use crate::backend::zookeeper::session::Session;
use crate::backend::zookeeper::standing::{Mine, Standing};
use crate::backend::{Renewed, StoreError};
use crate::clock::Clock;
use crate::request::{Id, Request};

/// Checks whether tickets exist, and whether they hold. Their deadlines depend on the proof that
/// the session lives (`proof`), which has probes of its own. A renewal only checks whether an
/// operator or another client has deleted a node, and whether a watch has missed an event.
///
/// - A ticket that holds: its node is read. Renewals come more often than every third of the ttl,
///   because the proof is always some time old. But the node is not read more often than every
///   third of the ttl.
/// - Our first waiter in a line that is followed: one request reads its node, and the nodes in
///   front of it that matter. [`Line::ahead_of`] and [`Line::checks_terms`] say which nodes these
///   are. If the copy of the line says that a ticket holds, the copy is trusted. If the copy says
///   that nothing has happened, it is not trusted, because the watch may be lost. A lost watch
///   delays a grant by about a third of the ttl.
/// - Our other waiters in a line that is followed: their state comes from the events of the line.
///   If only the ticket ahead is watched, their own nodes are read.
/// - A waiter in a line that nobody follows, or in a line that differs from its copy: the line is
///   read.
///
/// Tickets that must become smaller are made smaller first. All other requests only read, so a drop
/// of the future at any point does no harm.
pub(crate) async fn renew(
    session: Arc<Session>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    session.usable()?;
    let shrunk = shrink(&session, &tickets).await;
    // The validity is computed before the requests are sent. This is safe, because the answers
    // describe a later time.
    let mut answers = Vec::with_capacity(tickets.len());
    let mut looks = Looks::default();
    let mut unclear = Vec::new();
    let now = Clock::BOOT.now();
    {
        let state = session.state();
        let mut first = HashMap::new();
        for (at, request) in tickets.iter().enumerate() {
            let mine = match state.tickets.get(&request.id) {
                Some(Mine::Standing(mine)) if !mine.lost => mine,
                // The enqueue of this ticket was never answered.
                Some(Mine::Asked(_)) => {
                    answers.push(Renewed::Failed);
                    continue;
                }
                // The ticket is of an earlier session, or released, or deleted.
                Some(Mine::Standing(_)) | None => {
                    answers.push(Renewed::Lost);
                    continue;
                }
            };
            if shrunk.contains(&(request.id, false)) {
                answers.push(Renewed::Failed);
                continue;
            }
            let valid_for = valid_for_in(&state.proof, request);
            answers.push(how_it_stands(mine.granted, valid_for));
            // A renewal of a single ticket always reads the node: the holder asks in this way
            // before a step that needs the lock.
            let seen_lately = tickets.len() > 1
                && mine
                    .seen
                    .is_some_and(|seen| now < seen.after(request.ttl / 3));
            if mine.granted {
                if !seen_lately {
                    looks.at(at, mine, None);
                }
                continue;
            }
            let line = state.lines.get(&mine.parent);
            let ahead = line.and_then(|line| line.ahead_of(mine.sequence));
            // If a waiter has become smaller, it may hold now, so its line is read.
            let Some(ahead) = ahead.filter(|_| !shrunk.contains(&(request.id, true))) else {
                unclear.push((at, mine.clone()));
                continue;
            };
            let first = first
                .entry(&mine.parent)
                .or_insert_with(|| state.first_waiting(&mine.parent));
            if *first == Some(mine.sequence) {
                looks.at(at, mine, None);
                for node in ahead {
                    looks.at(at, mine, Some(node));
                }
                if line.is_some_and(Line::checks_terms) {
                    looks.at(at, mine, Some(PARENT.to_owned()));
                }
            } else if !line.is_some_and(Line::is_current) && !seen_lately {
                looks.at(at, mine, None);
            }
        }
    }
    let (mut doubtful, mut outdated) = (Vec::new(), Vec::new());
    for (look, there) in looks.answered(&session).await? {
        let (at, mine) = (look.ticket, look.mine);
        match (look.ahead, there) {
            (_, None) => answers[at] = Renewed::Failed,
            (None, Some(Node::There(owner, _))) => {
                if let Renewed::Granted { valid_for } = answers[at] {
                    answers[at] = Renewed::holding(valid_for, &owner);
                }
                if let Some(mine) = session.state().standing_mut(tickets[at].id) {
                    // The node of a ticket that is asked back is read at each renewal, so that each
                    // answer reports the ask-back.
                    let is_asked_back = matches!(answers[at], Renewed::AskedBack { .. });
                    mine.seen = (!is_asked_back).then_some(now);
                }
            }
            (None, Some(Node::Gone)) => answers[at] = Renewed::Lost,
            (Some(node), Some(Node::There(_, written))) => {
                if node == PARENT && session.is_outdated(&mine.parent, written) {
                    outdated.push((mine.parent.clone(), written));
                    unclear.push((at, mine));
                }
            }
            // If the copy of the line does not contain the node any more, the watch has reported
            // the delete. Then the tickets that hold because of it have got their wake-ups.
            (Some(node), Some(Node::Gone)) => {
                if session.believes_in(&mine.parent, &node) {
                    doubtful.push((mine.parent.clone(), node));
                    unclear.push((at, mine));
                }
            }
        }
    }
    read_lines(&session, &tickets, &unclear, &mut answers).await?;
    for (path, node) in doubtful {
        session.doubt(&path, &node);
    }
    for (path, written) in outdated {
        session.doubt_terms(&path, written);
    }
    Ok(answers)
}

/// Reads the lines of the tickets whose state is not known otherwise.
async fn read_lines(
    session: &Arc<Session>,
    tickets: &[Arc<Request>],
    unclear: &[(usize, Standing)],
    answers: &mut [Renewed],
) -> Result<(), StoreError> {
    let mut lists = Vec::new(); // sent together
    for (_, mine) in unclear {
        if lists.iter().all(|(parent, _)| *parent != &mine.parent) {
            lists.push((&mine.parent, session.list(&mine.parent)));
        }
    }
    for (parent, listed) in lists {
        let line = listed.await.map_err(failed)?;
        for (at, mine) in unclear.iter().filter(|(_, mine)| mine.parent == *parent) {
            let same = |other: &layout::Ticket| {
                other.id == tickets[*at].id && other.sequence == mine.sequence
            };
            answers[*at] = match line.iter().position(same) {
                None => Renewed::Lost,
                Some(place) => {
                    let holds = line.holds(place, mine.ticket);
                    if holds {
                        session.state().granted(tickets[*at].id);
                    }
                    how_it_stands(holds, valid_for(session, &tickets[*at]))
                }
            };
        }
    }
    Ok(())
}

/// The nodes that are read for one call of `renew`.
#[derive(Default)]
struct Looks(Vec<Look>);

/// One node to read: a ticket of ours, a node in front of it, or its parent.
struct Look {
    /// The index of the ticket in the renewal.
    ticket: usize,
    mine: Standing,
    ahead: Option<String>,
}

/// Used as a node in front of a ticket, this means the parent. No node has this name.
const PARENT: &str = "";

/// A node that was read.
enum Node {
    /// The node exists: its owner, followed by the ask-back if there is one, and the id of the
    /// transaction that wrote the node last.
    There(String, i64),
    Gone,
}

impl Looks {
    fn at(&mut self, ticket: usize, mine: &Standing, ahead: Option<String>) {
        self.0.push(Look {
            ticket,
            mine: mine.clone(),
            ahead,
        });
    }

    /// Reads the nodes. Returns for each node whether it exists, or `None` if its read failed. All
    /// requests are sent together. Their size is limited as in an inspection: the nodes of a
    /// hundred tickets with all nodes in front of them are a megabyte.
    async fn answered(self, session: &Session) -> Result<Vec<(Look, Option<Node>)>, StoreError> {
        let mut reading = Vec::new();
        for page in self.0.chunks(READS) {
            let mut reads = session.client.new_multi_reader();
            for Look { mine, ahead, .. } in page {
                let added = match ahead {
                    None => reads.add_get_data(&mine.path),
                    Some(node) if node == PARENT => reads.add_get_data(&mine.parent),
                    Some(node) => reads.add_get_data(&format!("{}/{node}", mine.parent)),
                };
                added.map_err(failed)?;
            }
            reading.push(reads.commit());
        }
        let mut there = Vec::with_capacity(self.0.len());
        for page in reading {
            let read = page.await.map_err(failed)?;
            there.extend(read.into_iter().map(|read| match read {
                MultiReadResult::Data { data, stat } => {
                    let (owner, _) = layout::owner_and_number(&data, 0);
                    Some(Node::There(owner, stat.mzxid))
                }
                MultiReadResult::Error {
                    err: ZkError::NoNode,
                } => Some(Node::Gone),
                _ => None,
            }));
        }
        Ok(self.0.into_iter().zip(there).collect())
    }
}

/// Makes a ticket smaller if it has more permits than its renewal asks for. One transaction creates
/// another node with the same sequence number and deletes the old node. Returns the tickets that
/// had to become smaller. The flag of each ticket tells whether its outcome is known.
///
/// If the future is dropped half-way, or the answer is lost, the transaction may be carried out all
/// the same. This is harmless: both paths are noted before the transaction is sent, and a release
/// deletes both. A transaction that arrives after the release finds no old node, so it fails as a
/// whole.
async fn shrink(session: &Arc<Session>, tickets: &[Arc<Request>]) -> Vec<(Id, bool)> {
    let mut sent = Vec::new(); // does not allocate while it is empty
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
        // The create comes first. Clients that follow the line get the events in this order, and
        // must never see the line without one of the two nodes.
        let both = writes.add_create(&new, &data, &node);
        let both = both.and_then(|()| writes.add_delete(&old, None));
        let at = Clock::BOOT.now();
        let answer = both.map(|()| writes.commit());
        sent.push((id, permits, new, at, answer));
    }
    let mut tried = Vec::new();
    for (id, permits, new, at, answer) in sent {
        let outcome = match answer {
            Ok(answer) => answer.await.map(drop).map_err(ZkError::from),
            Err(error) => Err(error),
        };
        let done = match outcome {
            // An earlier attempt whose answer was lost may have made the ticket smaller already.
            Ok(()) | Err(ZkError::NodeExists) => {
                session.committed(at);
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
