//! The copy of the line of one name, which a watch keeps up to date. This is plain data: it sends
//! no requests.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::task::AbortHandle;
use zookeeper_client::Stat;

use super::layout::{self, Stored, Ticket};
use super::row::{Row, Terms};
use crate::clock::{Clock, Instant};

/// If no ticket of this process needs a watch for this time, the watch is removed. A watch costs
/// the events that it reports as long as it exists. Setting it again costs only two requests.
const LINGER: Duration = Duration::from_secs(5);

/// How many of the oldest tickets in front of a waiter are checked when the waiter is renewed.
const HOLDERS: usize = 16;

/// The line of one name, which the watch keeps up to date.
#[derive(Debug)]
pub(super) struct Line {
    /// Oldest first.
    pub(super) tickets: VecDeque<Ticket>,
    pub(super) terms: Terms,
    /// The id of the transaction that had written the parent last when the line was read: see
    /// [`checks_terms`](Self::checks_terms).
    pub(super) written: i64,
    /// The number of the last create that was seen.
    pub(super) highest: i32,
    pub(super) current: bool,
    pub(super) following: Option<AbortHandle>,
    pub(super) by: By,
    /// The ticket of ours whose predecessor is watched, and the node of that predecessor.
    pub(super) ahead: Option<(i32, String)>,
    pub(super) used: Instant,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            tickets: VecDeque::new(),
            terms: Terms::default(),
            written: 0,
            highest: 0,
            current: false,
            following: None,
            by: By::Line,
            ahead: None,
            used: Clock::BOOT.now(),
        }
    }
}

impl Line {
    /// Whether the copy can be relied on.
    pub(super) fn is_current(&self) -> bool {
        self.current
    }

    /// The capacity of the oldest ticket.
    pub(super) fn capacity(&self) -> Option<u32> {
        self.tickets.front().map(|oldest| oldest.capacity)
    }

    /// Nodes that show whether the copy of the line is right for our first waiter. As long as all
    /// of them exist, this waiter must wait. The nodes are the holders, the ticket directly in
    /// front of the waiter, and all halts. At most `HOLDERS` holders are in the result, so that one
    /// small request can read all nodes. If all tickets want all permits, the result has only the
    /// ticket directly in front and the halts. `None` if nothing is known.
    pub(super) fn ahead_of(&self, sequence: i32) -> Option<Vec<String>> {
        if !self.current {
            // If the watched node is in front of an older ticket of ours, it is also in front of
            // this ticket. The older ticket may be withdrawn by now.
            let (of, node) = self.ahead.as_ref()?;
            return (!layout::is_older(sequence, *of)).then(|| vec![node.clone()]);
        }
        let older = |ticket: &&Ticket| layout::is_older(ticket.sequence, sequence);
        let before = self.tickets.iter().take_while(older);
        let mut nodes: Vec<String> = match self.tickets.iter().all(Ticket::wants_all) {
            true => Vec::new(),
            false => before
                .clone()
                .take(HOLDERS)
                .map(|ticket| ticket.node.clone())
                .collect(),
        };
        if let Some(last) = before.last()
            && !nodes.contains(&last.node)
        {
            nodes.push(last.node.clone());
        }
        nodes.extend(self.terms.halts.iter().map(|halt| halt.node.clone()));
        Some(nodes)
    }

    /// Whether the renewal of our first waiter also checks that the parent was not written since
    /// the line was read. Each change of the stored capacity writes the parent, and a change may
    /// grant permits to this waiter. If all tickets want all permits, the check is not necessary,
    /// because a stored capacity grants nothing to them.
    pub(super) fn checks_terms(&self) -> bool {
        self.current && !self.tickets.iter().all(Ticket::wants_all)
    }

    /// Whether the copy, which should be right, does not have the ticket of ours with this number. Then
    /// the watch has missed its create, and perhaps more. What the copy has in front of this number
    /// says nothing.
    pub(super) fn misses(&self, sequence: i32) -> bool {
        self.current
            && !self
                .tickets
                .iter()
                .any(|ticket| ticket.sequence == sequence)
    }

    /// Whether a node is in the line, as far as this client knows.
    pub(super) fn believes_in(&self, node: &str) -> bool {
        match self.current {
            true => {
                let mut nodes = self.tickets.iter().chain(&self.terms.halts);
                nodes.any(|ticket| ticket.node == node)
            }
            false => self.ahead.as_ref().is_some_and(|(_, ahead)| ahead == node),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tickets.len()
    }

    pub(super) fn stop(&mut self) {
        self.current = false;
        self.ahead = None;
        if let Some(following) = self.following.take() {
            following.abort();
        }
    }

    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.used.after(LINGER) <= now
    }

    /// Applies the line as it was read.
    pub(super) fn read(&mut self, children: &[String], parent: Option<&Stat>) {
        let row = Row::of(children);
        self.tickets = row.tickets.into();
        self.terms = row.terms;
        self.written = parent.map_or(0, |stat| stat.mzxid);
        let youngest = self.tickets.back().map(|ticket| ticket.sequence);
        self.highest = match parent {
            Some(stat) => last_number(stat, youngest),
            None => youngest.unwrap_or(-1),
        };
        self.current = true;
    }

    /// Handles the create of the node of a ticket or of a halt. Returns `false` if another create
    /// must have come before this one and was not reported. In this case the copy of the line must
    /// not be relied on.
    pub(super) fn came(&mut self, ticket: Ticket) -> bool {
        match ticket.sequence.wrapping_sub(self.highest) {
            ..=0 => {
                self.came_anew(ticket);
                true
            }
            1 => {
                self.highest = ticket.sequence;
                match ticket.is_halt() {
                    true => self.terms.halts.push(ticket),
                    false => self.tickets.push_back(ticket),
                }
                true
            }
            _ => {
                self.current = false;
                false
            }
        }
    }

    /// Handles the create of a node whose number is not new. Either the node is from before the
    /// line was read, or it is the new node of a ticket that was made smaller. The new node has the
    /// ticket's old number, but its create has used up one more number of the parent. If the old
    /// node is in the copy, the line was read before that create, so this function counts the
    /// number.
    fn came_anew(&mut self, ticket: Ticket) {
        let is_there = self.tickets.iter().any(|other| other.node == ticket.node);
        let same = |other: &&mut Ticket| other.sequence == ticket.sequence && other.id == ticket.id;
        if !is_there && let Some(old) = self.tickets.iter_mut().find(same) {
            *old = ticket;
            self.highest = self.highest.wrapping_add(1);
        }
    }

    pub(super) fn went(&mut self, node: &str) -> Option<Ticket> {
        self.terms.halts.retain(|halt| halt.node != node);
        let at = self.tickets.iter().position(|ticket| ticket.node == node)?;
        self.tickets.remove(at)
    }

    /// Handles an event of the node of a stored capacity: the node was created if `is_there` is
    /// true, else it was deleted. Returns whether the copy of the line agrees with the event. If it
    /// does not, the line must be read again. The copy can agree before the event comes: a create
    /// that was carried out before the line was read may be reported after the read.
    pub(super) fn has_stored(&mut self, stored: &Stored, is_there: bool) -> bool {
        let has = self.terms.stored.as_ref() == Some(stored);
        self.current &= has == is_there;
        has == is_there
    }
}

/// The number of the last create under the parent, even if the node was deleted since. `stat`
/// counts creates and deletes together, so the top bit of the count is lost. The youngest ticket,
/// if there is one, tells which half of the range the number is in.
fn last_number(stat: &Stat, youngest: Option<i32>) -> i32 {
    let creates = (stat.cversion.wrapping_add(stat.num_children) as u32) >> 1;
    let last = (creates as i32).wrapping_sub(1);
    match youngest {
        Some(youngest) if layout::is_older(last, youngest) => last.wrapping_add(i32::MIN),
        _ => last,
    }
}

/// How a line is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// By a watch over the whole line. Each client with such a watch gets two events per hand-over,
    /// and sends no requests. This is the best way for a few clients.
    Line,
    /// By a watch on the ticket directly in front of our first waiter. Each hand-over is one event,
    /// for one client. This client then reads the line. That costs three more requests, however
    /// many clients there are. This is enough for tickets that want all permits, because such a
    /// ticket holds when no ticket is in front of it.
    TicketAhead,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Id;

    fn stat(cversion: i32, num_children: i32) -> Stat {
        Stat {
            czxid: 0,
            mzxid: 0,
            pzxid: 0,
            ctime: 0,
            mtime: 0,
            version: 0,
            cversion,
            aversion: 0,
            ephemeral_owner: 0,
            data_length: 0,
            num_children,
        }
    }

    fn ticket(sequence: i32) -> Ticket {
        Ticket::parse(&format!(
            "{}-1-1-10000-0000c11e-{sequence:010}",
            Id::draw().unwrap()
        ))
        .unwrap()
    }

    /// The numbers are as the server computes them: twice the creates, less the present children.
    #[test]
    fn the_parent_tells_how_many_tickets_there_were() {
        let told = |creates: i32, children: i32| {
            let cversion = creates.wrapping_mul(2).wrapping_sub(children);
            stat(cversion, children)
        };
        assert_eq!(last_number(&told(5, 2), Some(4)), 4);
        assert_eq!(last_number(&told(5, 2), Some(3)), 4, "the youngest is gone");
        assert_eq!(last_number(&told(5, 0), None), 4);
        assert_eq!(last_number(&told(i32::MIN, 1), Some(i32::MAX)), i32::MAX);
        let wrapped = i32::MIN + 10;
        assert_eq!(
            last_number(&told(wrapped, 1), Some(wrapped - 1)),
            wrapped - 1
        );
    }

    #[test]
    fn a_create_that_nobody_told_of_is_noticed() {
        let mut line = Line::default();
        line.read(&[ticket(7).node], Some(&stat(15, 1)));
        assert_eq!(line.highest, 7);

        assert!(line.came(ticket(8)));
        assert!(line.came(ticket(3)), "from before the line was read");
        assert_eq!(line.tickets.len(), 2);
        assert!(!line.came(ticket(10)));
        assert!(!line.is_current());
    }

    /// If both nodes of the ticket were missing in the line, the next ticket would seem to hold.
    #[test]
    fn a_ticket_that_is_made_smaller_is_never_missing_and_takes_one_number_more() {
        let (old, behind) = (ticket(7), ticket(8));
        let anew = Ticket::parse(&old.node.replacen("-1-1-", "-1-2-", 1)).unwrap();
        // The line is read before the new node is created, or after. A read before the create does
        // not count the number that the create takes.
        for (before, counted) in [(true, 18), (false, 20)] {
            let mut line = Line::default();
            let first = if before { &old } else { &anew };
            let children = [first.node.clone(), behind.node.clone()];
            line.read(&children, Some(&stat(counted - 2, 2)));
            assert_eq!(line.highest, if before { 8 } else { 9 });

            assert!(line.came(anew.clone()));
            assert_eq!(line.tickets[0], anew);
            assert_eq!(line.went(&old.node), None);

            assert_eq!(line.tickets.len(), 2);
            assert_eq!(line.highest, 9);
            assert!(line.came(ticket(10)));
            assert!(line.is_current());
        }
    }

    /// The node that is created was a node of an earlier parent with the same path. Tickets under
    /// that parent had the same numbers.
    #[test]
    fn a_ticket_of_another_id_takes_the_place_of_none() {
        let (holds, waits, stranger) = (ticket(0), ticket(1), ticket(0));
        let mut line = Line::default();
        let children = [holds.node.clone(), waits.node.clone()];
        line.read(&children, Some(&stat(2, 2)));

        assert!(line.came(stranger.clone()));
        assert_eq!(line.went(&stranger.node), None);

        assert_eq!(line.tickets, [holds, waits]);
        assert_eq!(line.highest, 1);
    }

    /// The watch is set for the oldest waiter of ours. If that waiter is withdrawn, the node is
    /// checked for the next waiter of ours.
    #[test]
    fn a_watched_node_is_looked_at_for_every_one_of_ours_behind_it() {
        let node = ticket(7).node;
        let line = Line {
            ahead: Some((8, node.clone())),
            ..Line::default()
        };
        assert_eq!(line.ahead_of(8), Some(vec![node.clone()]));
        assert_eq!(line.ahead_of(10), Some(vec![node]));
        assert_eq!(line.ahead_of(6), None, "nothing is known in front of it");
        assert_eq!(Line::default().ahead_of(8), None);
    }
}
