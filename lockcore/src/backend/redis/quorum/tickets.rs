//! The verbs. Each verb asks all nodes at once, and answers as soon as the outcome is certain. If
//! requests are in flight by then, they are carried out all the same: a task in the runtime of the
//! connection waits for their answers.
//!
//! If the core drops one of these futures, some nodes may have carried out the request. The core
//! then releases the ticket with [`enqueue_may_follow`](Departure::enqueue_may_follow), at all
//! nodes:
//! - A node that has the ticket removes it.
//! - A node that gets the enqueue later finds the mark of the release, and takes no ticket.
//! - A node that cannot be reached keeps the ticket for its ttl at most.
//!
//! So a dropped future needs nothing beyond what the core does for every store.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::super::tickets as node;
use super::asked::{Step, everywhere, send_rest};
use super::background::{finish_late, give_back, leave_to};
use super::ballot::{Ballot, Verdict};
use super::late::Late;
use super::node::{LONGEST_TTL, Node};
use super::nodes::{Links, Nodes};
use super::proposal::proposal;
use super::repair::{Repair, lacking};
use super::tally::{Removal, RenewalTally, majority, needed};
use crate::backend::{
    BoxFuture, Departure, Enqueued, Fault, Released, Renewed, StoreError, TicketInfo,
};
use crate::clock::{Clock, Instant};
use crate::name::Name;
use crate::request::{Id, Request};

/// How long [`inspect`] waits for the other nodes after a majority has answered.
const STRAGGLERS: Duration = Duration::from_millis(50);

/// How long a release waits for the other nodes after a majority has acknowledged it, if a node did
/// not find the ticket. The answers of the others show whether enough nodes had the ticket.
const MISSED: Duration = Duration::from_millis(500);

pub(super) async fn enqueue(
    links: Arc<Links>,
    late: Late,
    request: Arc<Request>,
    patience: Duration,
) -> Result<Enqueued, StoreError> {
    if late.is_leaving(request.id) {
        return Ok(Enqueued::Gone);
    }
    let nodes = links.nodes();
    let needed = needed(nodes.count(), request.permits, request.capacity);
    let voters = nodes.voters(needed)?;
    let now = Clock::BOOT.now();
    let (proposed, request) = propose(nodes, &voters, now, &request);
    let asked_at = voters.iter().map(|(at, _)| *at);
    let mut ballot = Ballot::new(nodes.count(), needed, proposed, asked_at);
    let mut asked: FuturesUnordered<BoxFuture<Step>> = FuturesUnordered::new();
    for (at, voter) in &voters {
        let verb = node::enqueue(voter.connection.clone(), Arc::clone(&request));
        let (at, answer) = (*at, nodes.send(*at, voter, verb));
        asked.push(Box::pin(async move { Step::Enqueued(at, answer.await) }));
    }
    let mut stragglers: Option<BoxFuture<()>> = None;
    loop {
        let Some(step) = next_within(&mut asked, &mut stragglers).await else {
            ballot.give_up(|at| nodes.named(at, StoreError::new(Fault::Unknown, LATE)));
            break;
        };
        match step {
            Step::Enqueued(at, answer) => {
                note_refusal(nodes, &voters, at, (&answer, proposed));
                for (at, number) in ballot.answered(at, answer) {
                    let Some((_, voter)) = voters.iter().find(|(voter, _)| *voter == at) else {
                        continue;
                    };
                    let verb = node::raise(voter.connection.clone(), Arc::clone(&request), number);
                    let answer = nodes.send(at, voter, verb);
                    asked.push(Box::pin(async move { Step::Raised(at, answer.await) }));
                }
            }
            Step::Raised(at, answer) => ballot.raised(at, answer),
        }
        match ballot.verdict() {
            // Several clients may have a part each of the nodes that have answered. Then only the
            // others could decide, and they may be silent. Half of the caller's time is left for
            // giving the tickets back, and for the answer to the caller.
            Verdict::Open if ballot.is_split() => {
                let left = || (patience / 2).saturating_sub(now.until(Clock::BOOT.now()));
                stragglers.get_or_insert_with(|| nodes.timer(left()));
            }
            Verdict::Open => stragglers = None,
            Verdict::Granted { ticket, valid_for } => {
                // This enqueue has sent no release yet. So a late answer only has to be counted.
                let look_at = |step| {
                    if let Step::Enqueued(at, answer) = step {
                        ballot.answered(at, answer);
                    }
                };
                send_rest(&mut asked, look_at).await;
                finish_late(&links, &late, &request, (voters, &ballot), asked);
                return Ok(Enqueued::Granted { ticket, valid_for });
            }
            Verdict::Refused => break,
        }
    }
    // This drop comes before the releases. So no request of this enqueue is sent after its release.
    drop(asked);
    let may_have = ballot.may_have();
    let may_have = may_have.filter_map(|at| voters.iter().find(|(voter, _)| *voter == at).cloned());
    give_back(&links, &late, &request, may_have.collect()).await;
    ballot
        .refusal()
        .map_err(|errors| nodes.too_few(needed, &errors))
}

/// The number that the voters are to give the ticket, and the request that tells them so.
fn propose(
    nodes: &Nodes,
    voters: &[(usize, Node)],
    now: Instant,
    request: &Request,
) -> (u64, Arc<Request>) {
    let clocks = voters.iter().map(|(_, voter)| {
        nodes.read_clock(voter, false);
        voter.wall_clock.on_arrival(now)
    });
    let proposed = proposal(clocks.collect(), request.highest_seen);
    let request = Request {
        wait: false,
        ttl: request.ttl.min(LONGEST_TTL),
        // A node assigns the next number after this one.
        highest_seen: proposed.saturating_sub(1),
        ..Request::clone(request)
    };
    (proposed, Arc::new(request))
}

/// The next answer. `None` when all nodes have answered, or the time is over, if there is one.
async fn next_within<F: Future>(
    asked: &mut FuturesUnordered<F>,
    time: &mut Option<BoxFuture<()>>,
) -> Option<F::Output> {
    let Some(time) = time else {
        return asked.next().await;
    };
    tokio::select! {
        biased;
        answer = asked.next() => answer,
        () = time => None,
    }
}

/// The error of a node whose answer an enqueue does not wait for any longer.
const LATE: &str = "it has not answered in time";

/// Reads the clock of a node again, if the node has assigned another number than the proposal: the
/// clock may have been set.
fn note_refusal(
    nodes: &Nodes,
    voters: &[(usize, Node)],
    at: usize,
    (answer, proposed): (&Result<Enqueued, StoreError>, u64),
) {
    let voter = voters.iter().find(|(voter, _)| *voter == at);
    if let (Ok(Enqueued::Granted { ticket, .. }), Some((_, voter))) = (answer, voter)
        && *ticket != proposed
    {
        nodes.read_clock(voter, true);
    }
}

/// Lets requests that are in flight be carried out, without waiting for them.
fn finish<T: Send + 'static>(links: &Arc<Links>, mut asked: FuturesUnordered<BoxFuture<T>>) {
    if !asked.is_empty() {
        links.finish(async move { while asked.next().await.is_some() {} });
    }
}

/// Renews at all nodes that are up. A node that has restarted counts here, although it does not
/// vote: if it has the ticket, it keeps others out. A node that lacks a ticket gets it again, in the
/// background.
pub(super) async fn renew(
    links: Arc<Links>,
    late: Late,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    let nodes = links.nodes();
    let sent = Clock::BOOT.now();
    let renewing = late.renew(tickets.iter().map(|request| request.id));
    let tickets: Vec<_> = tickets.into_iter().map(within_limits).collect();
    let verb = |node: &Node| node::renew_told(node.connection.clone(), tickets.clone());
    let mut asked = everywhere(nodes, verb);
    let all = nodes.count();
    let mut renewals = vec![RenewalTally::default(); tickets.len()];
    let (mut answered, mut found, mut errors) = (0, Vec::new(), Vec::new());
    loop {
        let left = asked.len();
        let answers = renewals.iter().zip(&tickets).map(|(renewal, request)| {
            let needed = needed(all, request.permits, request.capacity);
            renewal.answer(all, needed, left)
        });
        let answers: Option<Vec<_>> = answers.collect();
        // Less than a majority of answers says nothing certain about a ticket.
        if let Some(answers) = answers.filter(|_| answered >= majority(all)) {
            if found.is_empty() && asked.is_empty() {
                return Ok(answers);
            }
            let number = |(at, request): (usize, Arc<Request>)| {
                let is_lost = answers[at] == Renewed::Lost;
                (request, renewals[at].number().filter(|_| !is_lost))
            };
            let repair = Repair {
                links: Arc::clone(&links),
                late,
                tickets: tickets.into_iter().enumerate().map(number).collect(),
                renewing,
                sent,
            };
            repair.finish(found, asked);
            return Ok(answers);
        }
        match asked.next().await {
            Some((at, Ok(answers))) => {
                answered += 1;
                found.extend(lacking(at, &answers));
                let renewals = renewals.iter_mut().zip(answers);
                renewals.for_each(|(renewal, answer)| renewal.answered(answer));
            }
            Some((_, Err(error))) => errors.push(error),
            None => return Err(unknown(nodes, &errors)),
        }
    }
}

fn within_limits(request: Arc<Request>) -> Arc<Request> {
    match request.ttl <= LONGEST_TTL {
        true => request,
        false => Arc::new(Request {
            ttl: LONGEST_TTL,
            ..Request::clone(&request)
        }),
    }
}

/// The error if too few nodes have answered. If a node may have carried out the request without an
/// answer, the outcome is unknown.
fn unknown(nodes: &Nodes, errors: &[StoreError]) -> StoreError {
    let too_few = nodes.too_few(majority(nodes.count()), errors);
    match errors.iter().any(|error| error.fault() == Fault::Unknown) {
        true => StoreError::new(Fault::Unknown, too_few.to_string()),
        false => too_few,
    }
}

/// Releases at all nodes that are up. After a majority has acknowledged the release, a background
/// task waits for the other nodes.
pub(super) async fn release(
    links: Arc<Links>,
    late: Late,
    mut tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    let nodes = links.nodes();
    for departure in &mut tickets {
        departure.enqueue_may_follow |= late.release(departure.request.id, &links);
    }
    let verb = |node: &Node| node::release(node.connection.clone(), tickets.clone());
    let mut asked = everywhere(nodes, verb);
    let all = nodes.count();
    let mut removals = vec![Removal::default(); tickets.len()];
    let needed = |departure: &Departure| {
        let Request {
            permits, capacity, ..
        } = *departure.request;
        needed(all, permits, capacity)
    };
    let needed: Vec<_> = tickets.iter().map(needed).collect();
    let mut open: Vec<usize> = (0..all).collect();
    let (mut answered, mut errors) = (0, Vec::new());
    let mut stragglers: Option<BoxFuture<()>> = None;
    let answers = loop {
        let left = asked.len();
        let each = || removals.iter().zip(&needed);
        let answers = each().map(|(removal, needed)| removal.answer(all, *needed, left));
        let answers: Option<Vec<_>> = answers.collect();
        let answers = answers.filter(|_| answered >= majority(all));
        let answer = match answers {
            None => asked.next().await,
            Some(answers) => {
                if each().all(|(removal, needed)| removal.is_settled(all, *needed, left)) {
                    break answers;
                }
                let time = stragglers.get_or_insert_with(|| nodes.timer(MISSED));
                tokio::select! {
                    biased;
                    Some(answer) = asked.next() => Some(answer),
                    () = time => break answers,
                }
            }
        };
        match answer {
            Some((at, Ok(answers))) => {
                answered += 1;
                if !answers.contains(&Released::Failed) {
                    open.retain(|open| *open != at);
                }
                let removals = removals.iter_mut().zip(answers);
                removals.for_each(|(removal, answer)| removal.answered(answer));
            }
            Some((_, Err(error))) => errors.push(error),
            None => return Err(unknown(nodes, &errors)),
        }
    };
    leave_to(&links, open, asked, tickets).await;
    Ok(answers)
}

/// Lists the tickets that any node has. A ticket is shown as held if enough nodes have it. A node
/// that has not answered may have it too, so it counts as if it had. The remaining time of a ticket
/// is the time for which enough of the nodes that have answered have it.
pub(super) async fn inspect(links: Arc<Links>, name: Name) -> Result<Vec<TicketInfo>, StoreError> {
    let nodes = links.nodes();
    let needed = majority(nodes.count());
    let mut asked = everywhere(nodes, |node| {
        node::listed(node.connection.clone(), name.clone())
    });
    let mut found: HashMap<Id, Vec<node::Listed>> = HashMap::new();
    let (mut answered, mut errors) = (0, Vec::new());
    let mut stragglers: Option<BoxFuture<()>> = None;
    loop {
        if answered >= needed && stragglers.is_none() {
            stragglers = Some(nodes.timer(STRAGGLERS));
        }
        match next_within(&mut asked, &mut stragglers).await {
            Some((_, Ok(tickets))) => {
                answered += 1;
                for listed in tickets {
                    if let Some(id) = listed.ticket.id() {
                        found.entry(id).or_default().push(listed);
                    }
                }
            }
            Some((_, Err(error))) => errors.push(error),
            None if answered < needed => return Err(nodes.too_few(needed, &errors)),
            None => break,
        }
    }
    let mut tickets: Vec<_> = found
        .into_values()
        .filter_map(|it| united(it, answered, nodes.count()))
        .collect();
    tickets.sort_unstable_by_key(|ticket| ticket.ticket);
    Ok(tickets)
}

/// Makes one ticket of what several nodes know about it. Of `all` nodes, `answered` have answered.
fn united(at_nodes: Vec<node::Listed>, answered: usize, all: usize) -> Option<TicketInfo> {
    // Before a ticket is granted, a majority of the nodes has its number: each of them has assigned
    // the proposed number, or was told the number. So at least one node of any majority has it. The
    // other nodes may have a number that they have assigned themselves.
    let is_any_told = at_nodes.iter().any(|listed| listed.is_told);
    let knows = at_nodes
        .iter()
        .filter(|listed| listed.is_told == is_any_told);
    let ticket = knows.map(|listed| listed.ticket.ticket).max()?;
    let mut tickets: Vec<_> = at_nodes.into_iter().map(|listed| listed.ticket).collect();
    let (permits, capacity) = (tickets[0].permits, tickets[0].capacity);
    let needed = needed(all, NonZeroU32::new(permits)?, NonZeroU32::new(capacity)?);
    tickets.sort_unstable_by_key(|ticket| std::cmp::Reverse(ticket.remaining));
    let holds = tickets.iter().filter(|ticket| ticket.granted).count();
    let last = tickets.len().min(needed) - 1;
    let mut united = tickets.swap_remove(last);
    united.ticket = ticket;
    united.granted = holds + (all - answered) >= needed;
    Some(united)
}

pub(super) async fn forget(links: Arc<Links>, name: Name) -> Result<(), StoreError> {
    let nodes = links.nodes();
    let mut asked = everywhere(nodes, |node| {
        node::forget(node.connection.clone(), name.clone())
    });
    let (mut answered, mut errors) = (0, Vec::new());
    while let Some((_, outcome)) = asked.next().await {
        match outcome {
            Ok(()) => answered += 1,
            Err(error) => errors.push(error),
        }
        if answered >= majority(nodes.count()) {
            finish(&links, asked);
            return Ok(());
        }
    }
    Err(nodes.too_few(majority(nodes.count()), &errors))
}
