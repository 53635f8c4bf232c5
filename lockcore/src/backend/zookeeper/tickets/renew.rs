//! How tickets stand, and making them smaller.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{CreateMode, Error as ZkError, MultiReadResult};

use super::{READS, valid_for, valid_for_in};
use crate::backend::zookeeper::errors::failed;
use crate::backend::zookeeper::layout::{self, Parent};
use crate::backend::zookeeper::line::Line;
use crate::backend::zookeeper::session::{Mine, Session, Standing};
use crate::backend::{Renewed, StoreError};
use crate::clock::Clock;
use crate::request::{Id, Request};

/// Whether tickets stand, and how. What moves their deadlines is the proof (`session::Proof`)
/// that the session lives, which probes of its own renew; the question here is only whether somebody
/// has deleted a node, and whether a watch has told all that there was to tell.
///
/// - A ticket that holds: its node is looked at. Renewals are more frequent than a third of the ttl,
///   because the proof is always some time old; nodes are looked at no more often than that.
/// - The first of ours that waits in a line that is followed: its node, and those in front that decide
///   (see [`Line::ahead_of`]), in the same request. A line is believed when it says who holds, and not
///   when it says that nothing has happened: so a watch that was lost costs a third of a ttl.
/// - The others that wait there: by the events or, where these are only of the ticket in front, by
///   their own nodes.
/// - A line that nobody follows is read. So is one that turns out to be another than was told.
///
/// Tickets that are to be smaller are made so first. Dropped at any point, all else was only looking.
pub(crate) async fn renew(
    session: Arc<Session>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    session.usable()?;
    let shrunk = shrink(&session, &tickets).await;
    // Before the requests: what is answered later is older.
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
                // A try that was never answered.
                Some(Mine::Asked(_)) => {
                    answers.push(Renewed::Failed);
                    continue;
                }
                // Of an earlier session, or released, or deleted.
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
            // One by itself is what its holder asks for, before a step that needs the lock.
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
            // One that waits may hold because it is smaller.
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
            } else if !line.is_some_and(Line::is_current) && !seen_lately {
                looks.at(at, mine, None);
            }
        }
    }
    let mut doubtful = Vec::new();
    for (look, there) in looks.answered(&session).await? {
        let (at, mine) = (look.ticket, look.mine);
        match (look.ahead, there) {
            (_, None) => answers[at] = Renewed::Failed,
            (None, Some(true)) => {
                if let Some(mine) = session.state().standing_mut(tickets[at].id) {
                    mine.seen = Some(now);
                }
            }
            (None, Some(false)) => answers[at] = Renewed::Lost,
            (Some(_), Some(true)) => {}
            // Perhaps told of by now: then whoever holds since was told too.
            (Some(node), Some(false)) => {
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
    Ok(answers)
}

/// Reads the lines of tickets of which nothing else tells how they stand.
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
        let holders = layout::holders(&*line);
        for (at, mine) in unclear.iter().filter(|(_, mine)| mine.parent == *parent) {
            let same = |other: &layout::Ticket| other.sequence == mine.sequence;
            answers[*at] = match line.iter().position(same) {
                None => Renewed::Lost,
                Some(place) => {
                    let holds = place < holders;
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

/// Nodes that are looked at for one renewal.
#[derive(Default)]
struct Looks(Vec<Look>);

/// At a ticket of ours, or at a node in front of it.
struct Look {
    /// Its place among those that are renewed.
    ticket: usize,
    mine: Standing,
    ahead: Option<String>,
}

impl Looks {
    fn at(&mut self, ticket: usize, mine: &Standing, ahead: Option<String>) {
        self.0.push(Look {
            ticket,
            mine: mine.clone(),
            ahead,
        });
    }

    /// Whether each is there, if that is known. Sent together, in requests of a bounded size as the reads of
    /// an inspection are: a hundred tickets with all that is looked at in front of each are a megabyte.
    async fn answered(self, session: &Session) -> Result<Vec<(Look, Option<bool>)>, StoreError> {
        let mut reading = Vec::new();
        for page in self.0.chunks(READS) {
            let mut reads = session.client.new_multi_reader();
            for Look { mine, ahead, .. } in page {
                let added = match ahead {
                    None => reads.add_get_data(&mine.path),
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
                MultiReadResult::Data { .. } => Some(true),
                MultiReadResult::Error {
                    err: ZkError::NoNode,
                } => Some(false),
                _ => None,
            }));
        }
        Ok(self.0.into_iter().zip(there).collect())
    }
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
            // Or an earlier try, which was not answered.
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
