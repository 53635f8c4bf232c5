//! The work that is left at the nodes after the caller of a verb got its answer: tickets that are
//! being released, and enqueues and releases that slow nodes have not answered.
//!
//! Tasks in the runtime of the connection do this work. That runtime may end at any time. Then the
//! releases that are left are [owed](super::super::owed) to these nodes, and the next connection that
//! reaches a node sends them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::oneshot;

use super::super::owed::UntilDone;
use super::super::tickets as node;
use super::asked::{Asked, Step, send_rest};
use super::ballot::{Ballot, may_be_carried_out};
use super::late::{Late, Unanswered};
use super::node::Node;
use super::nodes::{Links, Nodes};
use crate::backend::{BoxFuture, Departure, Enqueued, Released, StoreError};
use crate::request::Request;

/// How long an enqueue without enough grants waits, at most, for the release of its tickets. After
/// that, a task continues the release. The caller may ask again at once, and should not find its own
/// ticket in the way. The time is many times what a node takes to answer.
const GIVING_BACK: Duration = Duration::from_millis(50);

/// Releases that some nodes have not acknowledged. When this value is dropped, the releases are owed
/// to these nodes. So nothing is lost if the task that waits for the nodes is cancelled.
struct Unacknowledged {
    nodes: Arc<Nodes>,
    departures: Vec<Departure>,
    open: Vec<usize>,
    until_done: Option<UntilDone>,
}

impl Unacknowledged {
    fn settle(&mut self, at: usize) {
        self.open.retain(|open| *open != at);
    }

    fn answered(&mut self, (at, outcome): (usize, Result<Vec<Released>, StoreError>)) {
        if is_done(&outcome) {
            self.settle(at);
        }
    }

    /// Waits for the answers to releases that were sent.
    async fn acknowledged(mut self, mut asked: Asked<Vec<Released>>) {
        while let Some(answer) = asked.next().await {
            self.answered(answer);
        }
    }
}

impl Drop for Unacknowledged {
    fn drop(&mut self) {
        for at in &self.open {
            let until_done = self.until_done.as_ref();
            self.nodes.owe(*at, &self.departures, until_done);
        }
    }
}

/// Finishes an enqueue that is granted, at the nodes that do not count for the grant. What happens
/// if a node gives no answer is explained at [`Unanswered`].
///
/// [`Unanswered`]: super::late::Unanswered
pub(super) fn finish_late(
    links: &Arc<Links>,
    late: &Late,
    request: &Arc<Request>,
    (voters, ballot): (Vec<(usize, Node)>, &Ballot),
    mut asked: FuturesUnordered<BoxFuture<Step>>,
) {
    let open: Vec<_> = ballot.unanswered().collect();
    if open.is_empty() && asked.is_empty() {
        return;
    }
    let mut unanswered = late.begin(links.nodes(), Some(links), request, open);
    if asked.is_empty() {
        return;
    }
    let nodes = Arc::clone(links.nodes());
    links.finish(async move {
        while let Some(step) = asked.next().await {
            if let Step::Enqueued(at, answer) = step
                && let Some((_, voter)) = voters.iter().find(|(voter, _)| *voter == at)
            {
                late_answer(&nodes, (at, voter), answer, &mut unanswered).await;
            }
        }
    });
}

/// Handles the answer of a node to an enqueue whose caller has its answer already. If a release may
/// have overtaken the enqueue, releases the ticket again. Returns whether the node has the ticket.
pub(super) async fn late_answer(
    nodes: &Arc<Nodes>,
    (at, node): (usize, &Node),
    answer: Result<Enqueued, StoreError>,
    unanswered: &mut Unanswered,
) -> bool {
    match answer {
        Ok(Enqueued::Granted { .. }) if unanswered.is_overtaken() => {
            let again = vec![Departure::new(Arc::clone(unanswered.request()), false)];
            let verb = node::release(node.connection.clone(), again);
            if is_done(&nodes.send(at, node, verb).await) {
                unanswered.settle(at);
            }
            false
        }
        Ok(answer) => {
            unanswered.settle(at);
            matches!(answer, Enqueued::Granted { .. })
        }
        Err(error) => {
            if !may_be_carried_out(&error) {
                unanswered.settle(at);
            }
            false
        }
    }
}

/// Releases the tickets of an enqueue without enough grants. Resolves when that is done, or after a
/// moment. In the second case a task does the rest.
///
/// A node reads the release from the same connection as the enqueue, and after it, so no mark is
/// needed. If the connection has broken, the enqueue may be in the buffer of a server that was
/// stopped. Then the release is sent on the next connection, and leaves a mark.
pub(super) async fn give_back(
    links: &Arc<Links>,
    late: &Late,
    request: &Arc<Request>,
    may_have: Vec<(usize, Node)>,
) {
    if may_have.is_empty() {
        return;
    }
    let mut left = Unacknowledged {
        nodes: Arc::clone(links.nodes()),
        departures: vec![Departure::new(Arc::clone(request), true)],
        open: may_have.iter().map(|(at, _)| *at).collect(),
        until_done: Some(late.leave(request.id)),
    };
    let departure = Departure::new(Arc::clone(request), false);
    let asked = may_have.iter().map(|(at, voter)| {
        let verb = node::release(voter.connection.clone(), vec![departure.clone()]);
        let (at, answer) = (*at, left.nodes.send(*at, voter, verb));
        Box::pin(async move { (at, answer.await) }) as BoxFuture<_>
    });
    let mut asked: Asked<_> = asked.collect();
    send_rest(&mut asked, |answer| left.answered(answer)).await;
    let (done, all_done) = oneshot::channel::<()>();
    links.finish(async move {
        let _done = done;
        left.acknowledged(asked).await;
    });
    tokio::select! {
        _ = all_done => {}
        () = links.nodes().timer(GIVING_BACK) => {}
    }
}

/// Waits in the background for the nodes that have not answered a release. If a node could not be
/// asked, or has failed, it gets the release when it can be reached again.
pub(super) async fn leave_to(
    links: &Arc<Links>,
    open: Vec<usize>,
    mut asked: Asked<Vec<Released>>,
    departures: Vec<Departure>,
) {
    if open.is_empty() {
        return;
    }
    let mut left = Unacknowledged {
        nodes: Arc::clone(links.nodes()),
        departures,
        open,
        until_done: None,
    };
    send_rest(&mut asked, |answer| left.answered(answer)).await;
    links.finish(left.acknowledged(asked));
}

fn is_done(outcome: &Result<Vec<Released>, StoreError>) -> bool {
    matches!(outcome, Ok(answers) if !answers.contains(&Released::Failed))
}
