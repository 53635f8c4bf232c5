//! How tickets stand, and making them smaller.

use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{CreateMode, Error as ZkError, MultiReadResult};

use super::{failed, valid_for, valid_for_in};
use crate::backend::zookeeper::layout::{self, Parent};
use crate::backend::zookeeper::session::{Mine, Session};
use crate::backend::{Renewed, StoreError};
use crate::clock::Clock;
use crate::request::{Id, Request};

/// Whether tickets stand, and how. What moves their deadlines is the proof (`session::Proof`)
/// that the session lives, which probes of its own renew; the question here is only whether somebody
/// has deleted a node. Renewals are more frequent than a third of the ttl, because the proof is
/// always some time old; nodes are looked at no more often than that.
///
/// Tickets that are to be smaller are made so first.
pub(crate) async fn renew(
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
                Some(Mine::Asked(_)) => Renewed::Failed,
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
            listing.push((&mine.parent, session.list(&mine.parent)));
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
        let line = listing.await.map_err(failed)?;
        let holders = layout::holders(&*line);
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
