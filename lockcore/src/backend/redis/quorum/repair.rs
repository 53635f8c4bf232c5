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
//! - *A node that has restarted and does not vote* is not repaired. Another client may have got its
//!   vote before the restart, and may still wait for the votes of other nodes. By the time that the
//!   node votes again, this is over: a lease lasts for less than that from its first request.
//! - *Loss.* If so many nodes lack the ticket that the others are too few, the renewal is answered
//!   with "lost", and nothing is repaired.
//! - *Numbers.* The ticket keeps its number. Why numbers rise is explained in `ballot`, and needs
//!   only the nodes that counted for the grant. At the repaired node, the last number of the name
//!   only rises.
//! - *A release.* The enqueue of a repair may arrive after the release of the same ticket: the core
//!   does not know of the repair. So a repair begins only if the ticket was not released since the
//!   renewal began. If it is released later, and before the answer to the enqueue, the client
//!   releases it once more at this node. A release after the answer removes the ticket.
//! - *An enqueue without an answer* may be carried out later: see [`Unanswered`].
//! - *A late repair* must not undo what a later renewal has done. A ticket that was renewed again is
//!   left to that renewal. If a node answers later than a ttl after the renewal, its ticket is not
//!   repaired. An enqueue that finds the ticket renews it, and does not change its permits. So an
//!   enqueue that is delayed on its way can do what a renewal that is delayed can do: it can shorten
//!   a lease at this node, if a later renewal has asked for a longer ttl.
//!
//! One case is left to the ttl. The core may release a ticket just before it sends a renewal of the
//! same ticket on another connection. If a node has carried out the release, and the renewal is not
//! answered with "lost" because another node is slower with the release, the repair puts the ticket
//! back at the first node. The ticket then stays at this node until its ttl ends.
//!
//! [`Unanswered`]: super::late::Unanswered

use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::super::tickets as node;
use super::asked::Asked;
use super::background::late_answer;
use super::late::{Late, Renewing};
use super::nodes::Links;
use super::tally::Told;
use crate::backend::Renewed;
use crate::clock::{Clock, Instant};
use crate::request::Request;

/// How many repairs of one renewal are in flight at the same time. A node that has restarted empty
/// lacks all tickets, and has other requests to answer.
const AT_ONCE: usize = 16;

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
    pub(super) late: Late,
    pub(super) tickets: Vec<(Arc<Request>, Option<u64>)>,
    pub(super) renewing: Arc<Renewing>,
    /// When the renewal was sent.
    pub(super) sent: Instant,
}

impl Repair {
    /// Waits in the background for the nodes that have not answered the renewal. Repairs the tickets
    /// that these nodes lack, and those in `found`.
    pub(super) fn finish(self, mut found: Vec<Lacking>, mut asked: Asked<Vec<Told>>) {
        let links = Arc::clone(&self.links);
        links.finish(async move {
            let mut repairs = FuturesUnordered::new();
            loop {
                while repairs.len() < AT_ONCE
                    && let Some((at, of)) = found.pop()
                {
                    repairs.push(self.repair(at, of));
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

    /// Enqueues one ticket at a node again.
    async fn repair(&self, at: usize, of: usize) {
        let (request, number) = &self.tickets[of];
        let nodes = self.links.nodes();
        let (Some(number), Some(node)) = (*number, nodes.voter(at)) else {
            return;
        };
        // This comes before the check, so that a release is seen by one of the two.
        let mut unanswered = self.late.begin(nodes, None, request, vec![at]);
        let is_late = self.sent.until(Clock::BOOT.now()) >= request.ttl;
        if is_late || !self.renewing.is_current(request.id) {
            unanswered.settle(at);
            return;
        }
        let again = Arc::new(Request {
            wait: false,
            highest_seen: number.saturating_sub(1),
            ..Request::clone(request)
        });
        let verb = node::enqueue(node.connection.clone(), Arc::clone(&again));
        let answer = nodes.send(at, &node, verb).await;
        if late_answer(nodes, (at, &node), answer, &mut unanswered).await {
            // The node has assigned another number, because its clock has passed the ticket's
            // number. `inspect` shows the number that the client has told. If this request is lost,
            // the ticket counts all the same, and another node has its number.
            let verb = node::raise(node.connection.clone(), again, number);
            let _ = nodes.send(at, &node, verb).await;
        }
    }
}
