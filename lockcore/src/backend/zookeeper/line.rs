//! The line of one name, as a watch on it tells: plain data.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::task::AbortHandle;
use zookeeper_client::Stat;

use super::layout::{self, Ticket};
use crate::clock::{Clock, Instant};

/// A watch that nobody here has needed for so long is given up. Its events cost as long as it
/// stands; setting it again costs two requests.
const LINGER: Duration = Duration::from_secs(5);

/// Those in front of a ticket that are looked at when it is renewed.
const HOLDERS: usize = 16;

/// The line of one name, as the watch tells it.
#[derive(Debug)]
pub(super) struct Line {
    /// Oldest first.
    pub(super) tickets: VecDeque<Ticket>,
    /// The number of the last create that was seen.
    pub(super) highest: i32,
    pub(super) current: bool,
    pub(super) following: Option<AbortHandle>,
    pub(super) by: By,
    /// The ticket of ours in front of which a watch stands, and the node that is watched.
    pub(super) ahead: Option<(i32, String)>,
    pub(super) used: Instant,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            tickets: VecDeque::new(),
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
    /// Whether it may be believed.
    pub(super) fn is_current(&self) -> bool {
        self.current
    }

    /// What the oldest asked with.
    pub(super) fn capacity(&self) -> Option<u32> {
        self.tickets.front().map(|oldest| oldest.capacity)
    }

    /// The nodes that say whether what is known of the line still holds for the first of ours that waits in
    /// it: while they are there it waits on. `None` when nothing is known. Those that hold count, as many as
    /// one small request can ask for; and the one right in front, which alone counts where all want all.
    pub(super) fn ahead_of(&self, sequence: i32) -> Option<Vec<String>> {
        if !self.current {
            // In front of an older one of ours, which may have been withdrawn, it is in front of this too.
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
        Some(nodes)
    }

    /// Whether a node is in it, as far as is known.
    pub(super) fn believes_in(&self, node: &str) -> bool {
        match self.current {
            true => self.tickets.iter().any(|ticket| ticket.node == node),
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

    /// Takes the line as it was read.
    pub(super) fn read(&mut self, children: &[String], parent: Option<&Stat>) {
        self.tickets = layout::in_line(children).into();
        let youngest = self.tickets.back().map(|ticket| ticket.sequence);
        self.highest = match parent {
            Some(stat) => last_number(stat, youngest),
            None => youngest.unwrap_or(-1),
        };
        self.current = true;
    }

    /// Somebody came. `false` when somebody else must have come before, and nobody told.
    pub(super) fn came(&mut self, ticket: Ticket) -> bool {
        match ticket.sequence.wrapping_sub(self.highest) {
            ..=0 => {
                self.came_anew(ticket);
                true
            }
            1 => {
                self.highest = ticket.sequence;
                self.tickets.push_back(ticket);
                true
            }
            _ => {
                self.current = false;
                false
            }
        }
    }

    /// From before the line was read; or a ticket that was made smaller, and has a node anew with the number
    /// that it had. Every create takes a number, that one too, although nothing bears it: if the line was
    /// read before it, which the old node shows that is still in it, nobody has counted it yet.
    pub(super) fn came_anew(&mut self, ticket: Ticket) {
        let is_there = self.tickets.iter().any(|other| other.node == ticket.node);
        let same = |other: &&mut Ticket| other.sequence == ticket.sequence;
        if !is_there && let Some(old) = self.tickets.iter_mut().find(same) {
            *old = ticket;
            self.highest = self.highest.wrapping_add(1);
        }
    }

    pub(super) fn went(&mut self, node: &str) -> Option<Ticket> {
        let at = self.tickets.iter().position(|ticket| ticket.node == node)?;
        self.tickets.remove(at)
    }
}

/// The number of the last ticket, living or not. `stat` counts creates and deletes together, which
/// overflows its top bit; the youngest ticket there is, if any, says which half it is in.
fn last_number(stat: &Stat, youngest: Option<i32>) -> i32 {
    let creates = (stat.cversion.wrapping_add(stat.num_children) as u32) >> 1;
    let last = (creates as i32).wrapping_sub(1);
    match youngest {
        Some(youngest) if layout::is_older(last, youngest) => last.wrapping_add(i32::MIN),
        _ => last,
    }
}

/// What a line is followed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A watch over the whole line: two events a hand-over for each client that has one, and nothing
    /// else. The best there is for a few.
    Line,
    /// A watch on the ticket right in front of the first of ours that waits: one event a hand-over
    /// for one client, who then reads the line. It costs three requests more, however many clients
    /// there are; enough for those who want all permits, because they hold when nobody is in front.
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

    /// As the server computes it: twice the creates, less the children there are.
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

    /// With neither of its nodes in the line, the next would hold.
    #[test]
    fn a_ticket_that_is_made_smaller_is_never_missing_and_takes_one_number_more() {
        let (old, behind) = (ticket(7), ticket(8));
        let anew = Ticket::parse(&old.node.replacen("-1-1-", "-1-2-", 1)).unwrap();
        // Read before it, when nobody has counted it; and after.
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

    /// It stands for the oldest of ours, and the next learns from it that the oldest was withdrawn.
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
