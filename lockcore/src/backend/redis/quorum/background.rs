//! The work that goes on at the nodes when a verb has its answer: tickets that are given back, and enqueues and
//! releases that slow nodes have not answered.
//!
//! It goes on in tasks of the runtime that drives the connection, and that runtime may end at any time. Then what is left
//! is in the [outboxes](super::outbox), and the next connection that reaches the node sends it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::oneshot;

use super::super::tickets as node;
use super::asked::{Asked, Step, send_rest};
use super::ballot::{Ballot, may_be_carried_out};
use super::late::Late;
use super::leaving::{Leaving, OnItsWay};
use super::node::Node;
use super::nodes::{Links, Nodes};
use crate::backend::{BoxFuture, Departure, Enqueued, Released, StoreError};
use crate::request::Request;

/// How long the answer to an enqueue without a majority waits until its tickets are given back. The caller may ask again
/// at once, and should not meet its own ticket. It is many times what a node takes to answer.
const GIVING_BACK: Duration = Duration::from_millis(50);

/// Releases that some nodes still have to acknowledge. When this is dropped, the outboxes of these nodes get them.
struct Owed {
    nodes: Arc<Nodes>,
    departures: Vec<Departure>,
    open: Vec<usize>,
    on_its_way: Option<Arc<OnItsWay>>,
}

impl Owed {
    fn is_done_at(&mut self, at: usize) {
        self.open.retain(|open| *open != at);
    }

    fn answered(&mut self, (at, outcome): (usize, Result<Vec<Released>, StoreError>)) {
        if is_done(&outcome) {
            self.is_done_at(at);
        }
    }

    /// Waits for the answers to releases that were sent.
    async fn acknowledged(mut self, mut asked: Asked<Vec<Released>>) {
        while let Some(answer) = asked.next().await {
            self.answered(answer);
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        for at in &self.open {
            let outbox = self.nodes.outbox(*at);
            outbox.put(&self.departures, self.on_its_way.as_ref());
        }
    }
}

/// Lets the rest of an enqueue that is granted be carried out, at the nodes that are not among those that count.
///
/// A node that gives no answer gives the ticket back, even while it is held: the others are enough. Otherwise the enqueue
/// could arrive there when nobody thinks of it any more, for example if the server was stopped, and come behind the
/// release. Because of the mark it then takes nothing.
pub(super) fn finish_late(
    links: &Arc<Links>,
    late: &Late,
    request: &Arc<Request>,
    (voters, ballot): (Vec<(usize, Node)>, &Ballot),
    mut asked: FuturesUnordered<BoxFuture<Step>>,
) {
    let mut owed = Owed {
        nodes: Arc::clone(links.nodes()),
        departures: vec![Departure::new(Arc::clone(request), true)],
        open: ballot.unanswered().collect(),
        on_its_way: None,
    };
    if asked.is_empty() {
        return;
    }
    let pending = late.begin(request.id, links);
    let again = Departure::new(Arc::clone(request), false);
    links.finish(async move {
        while let Some(step) = asked.next().await {
            let Step::Enqueued(at, answer) = step else {
                continue;
            };
            let voter = voters.iter().find(|(voter, _)| *voter == at);
            let is_done = match (answer, voter) {
                (Ok(Enqueued::Granted { .. }), Some((_, voter))) if pending.is_overtaken() => {
                    let verb = node::release(voter.connection.clone(), vec![again.clone()]);
                    is_done(&owed.nodes.send(at, voter, verb).await)
                }
                (Ok(_), _) => true,
                (Err(error), _) => !may_be_carried_out(&error),
            };
            if is_done {
                owed.is_done_at(at);
            }
        }
    });
}

/// Gives back the tickets of an enqueue without a majority. Resolves when that is done, or after a moment; then a task
/// does the rest.
///
/// A node reads the release from the same connection as the enqueue, so behind it: no mark is needed. If the connection
/// has broken, the enqueue may still be in the buffer of a server that was stopped. Then the release goes out on the
/// next connection, with a mark.
pub(super) async fn give_back(
    links: &Arc<Links>,
    leaving: &Leaving,
    request: &Arc<Request>,
    may_have: Vec<(usize, Node)>,
) {
    if may_have.is_empty() {
        return;
    }
    let mut owed = Owed {
        nodes: Arc::clone(links.nodes()),
        departures: vec![Departure::new(Arc::clone(request), true)],
        open: may_have.iter().map(|(at, _)| *at).collect(),
        on_its_way: Some(leaving.begin(request.id)),
    };
    let departure = Departure::new(Arc::clone(request), false);
    let asked = may_have.iter().map(|(at, voter)| {
        let verb = node::release(voter.connection.clone(), vec![departure.clone()]);
        let (at, answer) = (*at, owed.nodes.send(*at, voter, verb));
        Box::pin(async move { (at, answer.await) }) as BoxFuture<_>
    });
    let mut asked: Asked<_> = asked.collect();
    send_rest(&mut asked, |answer| owed.answered(answer)).await;
    let (done, all_done) = oneshot::channel::<()>();
    links.finish(async move {
        let _done = done;
        owed.acknowledged(asked).await;
    });
    tokio::select! {
        _ = all_done => {}
        () = links.nodes().timer(GIVING_BACK) => {}
    }
}

/// Waits in the background for the nodes that have not answered a release. A node that could not be asked, or fails, gets
/// it when it can be reached again.
pub(super) async fn leave_to(
    links: &Arc<Links>,
    open: Vec<usize>,
    mut asked: Asked<Vec<Released>>,
    departures: Vec<Departure>,
) {
    if open.is_empty() {
        return;
    }
    let mut owed = Owed {
        nodes: Arc::clone(links.nodes()),
        departures,
        open,
        on_its_way: None,
    };
    send_rest(&mut asked, |answer| owed.answered(answer)).await;
    links.finish(owed.acknowledged(asked));
}

fn is_done(outcome: &Result<Vec<Released>, StoreError>) -> bool {
    matches!(outcome, Ok(answers) if !answers.contains(&Released::Failed))
}
