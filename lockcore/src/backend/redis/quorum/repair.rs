//! Read repair: if a renewal finds a node without the ticket, the client enqueues the ticket at this
//! node again. A node may have been away for longer than the ttl, or may have restarted without its
//! data. Without repair, each such node has one ticket less for good. A lock that is held for long
//! would be lost after a majority of the nodes was away, even if only one node was away at a time.
//!
//! Why this is safe:
//!
//! - *Exclusion.* A node takes the ticket only if it has room for the ticket, as in an acquire. A
//!   renewal counts only if enough nodes have the ticket, and the client holds only until its lease
//!   ends. So while the client holds, no other client can have enough nodes, whether they had the
//!   ticket from the start or have got it again.
//! - *Loss.* If so many nodes lack the ticket that the others are too few, the renewal is answered
//!   with "lost", and nothing is repaired.
//! - *Numbers.* The ticket keeps its number. Why numbers rise is explained in `ballot`, and needs
//!   only the nodes that counted for the grant. At the repaired node, the last number of the name
//!   only rises.
//! - *A node that has restarted and does not vote* may get the ticket: then it keeps others out,
//!   and it helps nobody else to get a majority.
//! - *A release.* The enqueue of a repair may arrive after the release of the same ticket, because
//!   it is sent without the knowledge of the core, or because the release took another connection.
//!   So a log records each release since the renewal began. If the ticket is in this log after the
//!   enqueue was answered, the client releases it once more at this node. A release that is not in
//!   the log by then is sent after the answer, so it removes the ticket.
//! - *An enqueue without an answer* may be carried out at any time. The release of such a ticket is
//!   repeated at this node until the node answers, as after an acquire: see
//!   [`finish_late`](super::background::finish_late). Then this node lacks the ticket, and a later
//!   renewal repairs it.
//!
//! One case is left to the ttl. The core may release a ticket just before it sends a renewal of the
//! same ticket on another connection. If the release is slow at most nodes, the renewal still
//! counts there, and the repair puts the ticket back at a node that had carried out the release.
//! The ticket then stays at this node until its ttl ends.

use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::super::tickets as node;
use super::asked::Asked;
use super::background::{Owed, is_done};
use super::ballot::may_be_carried_out;
use super::late::ReleaseLog;
use super::nodes::{Links, Nodes};
use super::tally::Told;
use crate::backend::{Departure, Enqueued, Renewed};
use crate::request::Request;

/// A ticket of a batch that a node lacks: the node, and the index of the ticket.
pub(super) type Lacking = (usize, usize);

/// The tickets that a node lacks, by its answers.
pub(super) fn lacking(at: usize, answers: &[Told]) -> impl Iterator<Item = Lacking> + '_ {
    let answers = answers.iter().enumerate();
    answers.filter_map(move |(of, (answer, _))| (*answer == Renewed::Lost).then_some((at, of)))
}

/// The tickets of a renewal, with their numbers. A ticket without a number is not repaired: it is
/// lost, or no node has told its number.
pub(super) struct Repair {
    pub(super) links: Arc<Links>,
    pub(super) tickets: Vec<(Arc<Request>, Option<u64>)>,
    pub(super) released: Arc<ReleaseLog>,
}

impl Repair {
    /// Waits in the background for the nodes that have not answered the renewal. Repairs the tickets
    /// that these nodes lack, and those in `found`.
    ///
    /// The work runs in the runtime of the connection. If the runtime ends, a ticket that is being
    /// enqueued is released: see [`Owed`].
    pub(super) fn finish(self, mut found: Vec<Lacking>, mut asked: Asked<Vec<Told>>) {
        let links = Arc::clone(&self.links);
        links.finish(async move {
            let nodes = self.links.nodes();
            let mut repairs = FuturesUnordered::new();
            loop {
                for (at, of) in found.drain(..) {
                    if let (request, Some(number)) = &self.tickets[of] {
                        repairs.push(repair(nodes, at, request, *number, &self.released));
                    }
                }
                tokio::select! {
                    Some((at, answer)) = asked.next() => {
                        found.extend(lacking(at, &answer.unwrap_or_default()));
                    }
                    Some(()) = repairs.next() => {}
                    else => return,
                }
            }
        });
    }
}

/// Enqueues one ticket at a node again.
async fn repair(
    nodes: &Arc<Nodes>,
    at: usize,
    request: &Arc<Request>,
    number: u64,
    released: &ReleaseLog,
) {
    let Some(node) = nodes.get(at) else {
        return;
    };
    let mut owed = Owed {
        nodes: Arc::clone(nodes),
        departures: vec![Departure::new(Arc::clone(request), true)],
        open: vec![at],
        on_its_way: None,
    };
    let again = Arc::new(Request {
        wait: false,
        highest_seen: number.saturating_sub(1),
        ..Request::clone(request)
    });
    let mut connection = node.connection.clone();
    let verb = {
        let request = Arc::clone(&again);
        async move { node::enqueue(&mut connection, request).await }
    };
    match nodes.send(at, &node, verb).await {
        Ok(Enqueued::Granted { .. }) if released.has(request.id) => {
            let departure = Departure::new(Arc::clone(request), false);
            let verb = node::release(node.connection.clone(), vec![departure]);
            if is_done(&nodes.send(at, &node, verb).await) {
                owed.is_done_at(at);
            }
        }
        Ok(Enqueued::Granted { .. }) => {
            owed.is_done_at(at);
            // The node has assigned another number, because its clock has passed the ticket's
            // number. `inspect` shows the number that the client has told. If this request is lost,
            // the ticket counts all the same, and another node has its number.
            let verb = node::raise(node.connection.clone(), again, number);
            let _ = nodes.send(at, &node, verb).await;
        }
        Err(error) if may_be_carried_out(&error) => {}
        // The node has no room, or a mark of a release, or it could not be reached. The next renewal
        // finds this node again.
        Ok(_) | Err(_) => owed.is_done_at(at),
    }
}
