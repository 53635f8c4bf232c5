//! A line as it was read, and the rule which of its tickets hold. Why the rule is safe while the
//! capacity changes is explained in `capacities`.

use std::ops::Deref;

use super::layout::{self, Stored, Ticket};
use crate::queue;
use crate::request::FULL;

/// The nodes beside the tickets of a line: the stored capacity and the halts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) stored: Option<Stored>,
    /// Oldest first.
    pub(super) halts: Vec<Ticket>,
}

impl Terms {
    /// The capacity that is stored.
    pub(super) fn capacity(&self) -> Option<u32> {
        self.stored.as_ref()?.capacity
    }

    /// Tickets with numbers up to this one hold.
    pub(super) fn through(&self) -> u64 {
        self.stored.as_ref().map_or(0, |stored| stored.through)
    }

    /// How many of the oldest tickets the rule grants now: none while there is a halt. More tickets
    /// may hold, because tickets with numbers up to [`through`](Self::through) hold too.
    pub(super) fn grants<'a>(&self, line: impl IntoIterator<Item = &'a Ticket>) -> usize {
        match self.halts.is_empty() {
            true => self.fit(line),
            false => 0,
        }
    }

    /// How many of the oldest tickets hold by the capacity alone. A ticket with another capacity is
    /// being deleted by its own client. So is a ticket of a mutex while a capacity is stored. Until
    /// such a ticket is deleted, no ticket behind it holds.
    pub(super) fn fit<'a>(&self, line: impl IntoIterator<Item = &'a Ticket>) -> usize {
        let stored = self.capacity();
        let share = |ticket: &Ticket| match stored {
            Some(_) if ticket.capacity == FULL.get() => (u32::MAX, ticket.capacity),
            _ => (ticket.permits, ticket.capacity),
        };
        queue::granted_of(line.into_iter().map(share), stored, 0)
    }

    /// Whether the line has tickets and nothing else.
    pub(super) fn is_plain(&self) -> bool {
        self.stored.is_none() && self.halts.is_empty()
    }

    /// Whether a ticket that states this capacity can never hold, because it is of a mutex, and a
    /// capacity is stored.
    pub(super) fn misfit(&self, capacity: u32) -> bool {
        capacity == FULL.get() && self.capacity().is_some()
    }

    /// Whether the line has the halt of a change that may make the store refuse requests that state
    /// this capacity.
    pub(super) fn bar(&self, capacity: u32) -> bool {
        let bars = |halt: &Ticket| match halt.capacity {
            0 => capacity == FULL.get(),
            only => capacity != only,
        };
        self.halts.iter().any(bars)
    }
}

/// A line as it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    /// Oldest first.
    pub(super) tickets: Vec<Ticket>,
    pub(super) terms: Terms,
}

impl Row {
    pub(super) fn of(children: &[String]) -> Self {
        let (halts, tickets) = layout::in_line(children)
            .into_iter()
            .partition(Ticket::is_halt);
        let stored = children.iter().find_map(|child| Stored::parse(child));
        let terms = Terms { stored, halts };
        Self { tickets, terms }
    }

    /// Whether a ticket holds. `at` is its position in line, and `number` is its ticket number.
    pub(super) fn holds(&self, at: usize, number: u64) -> bool {
        number <= self.terms.through() || at < self.terms.grants(&self.tickets)
    }

    /// If a request that states this capacity is refused: the capacity that is in use.
    pub(super) fn refuses(&self, capacity: u32) -> Option<u32> {
        match self.terms.capacity() {
            Some(stored) => (capacity == FULL.get()).then_some(stored),
            None => {
                let in_use = self.tickets.first()?.capacity;
                (in_use != capacity).then_some(in_use)
            }
        }
    }

    /// The node of a forgotten capacity, if the node is of no use any more: no ticket waits, and
    /// there is no halt.
    pub(super) fn spent(&self) -> Option<&str> {
        let stored = self.terms.stored.as_ref()?;
        let all_hold = self.terms.grants(&self.tickets) == self.tickets.len();
        (stored.capacity.is_none() && self.terms.halts.is_empty() && all_hold)
            .then_some(&stored.node)
    }
}

impl Deref for Row {
    type Target = [Ticket];

    fn deref(&self) -> &[Ticket] {
        &self.tickets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Id;

    /// The nodes of a line, one for each pair of permits and capacity. A pair without permits is a
    /// halt.
    fn children(shares: &[(u32, u32)]) -> Vec<String> {
        let node = |(at, (permits, capacity)): (usize, &(u32, u32))| {
            let id = Id::draw().unwrap();
            format!("{id}-{permits}-{capacity}-10000-0000c11e-{at:010}")
        };
        shares.iter().enumerate().map(node).collect()
    }

    fn row(shares: &[(u32, u32)], stored: Option<(Option<u32>, u64)>) -> Row {
        let mut children = children(shares);
        if let Some((capacity, through)) = stored {
            children.insert(0, Stored::new(capacity, through, Id::draw().unwrap()).node);
        }
        Row::of(&children)
    }

    #[test]
    fn the_oldest_hold_as_far_as_the_permits_go() {
        let line = |shares: &[(u32, u32)]| {
            let row = row(shares, None);
            row.terms.grants(row.iter())
        };
        assert_eq!(line(&[]), 0);
        assert_eq!(line(&[(1, 1), (1, 1)]), 1);
        assert_eq!(line(&[(3, 5), (2, 5), (1, 5)]), 2);
        assert_eq!(line(&[(3, 5), (4, 5), (1, 5)]), 1, "nobody passes a waiter");
        assert_eq!(line(&[(1, 5), (1, 6), (1, 5)]), 1, "capacities never mix");
    }

    #[test]
    fn a_stored_capacity_counts_in_place_of_what_tickets_state() {
        let row = row(&[(2, 5), (1, 2), (3, 5)], Some((Some(3), 7)));

        assert_eq!(row.terms.capacity(), Some(3));
        assert!(row.holds(1, 9) && !row.holds(2, 10));
        assert!(row.holds(2, 7), "it held at the last change");
        assert_eq!((row.refuses(4), row.refuses(FULL.get())), (None, Some(3)));
        // A mutex in such a line is being removed.
        let mixed = self::row(&[(1, FULL.get()), (1, 5)], Some((Some(3), 7)));
        assert_eq!(mixed.terms.grants(mixed.iter()), 0);
    }

    #[test]
    fn a_line_with_a_halt_grants_nothing() {
        for halt in 0..3 {
            let mut shares = vec![(1, 5), (1, 5)];
            shares.insert(halt, (0, 0));
            let row = row(&shares, Some((Some(5), 4)));

            assert_eq!((row.len(), row.terms.halts.len()), (2, 1));
            assert!(!row.holds(0, 5) && row.holds(0, 4));
            assert_eq!(row.terms.fit(row.iter()), 2);
        }
    }

    #[test]
    fn a_halt_bars_those_who_may_have_to_go() {
        let of = |only: u32| row(&[(0, only)], None).terms;
        assert!(of(0).bar(FULL.get()) && !of(0).bar(5));
        assert!(of(5).bar(FULL.get()) && of(5).bar(4) && !of(5).bar(5));
        assert!(!Terms::default().bar(FULL.get()));
    }

    #[test]
    fn a_capacity_that_was_forgotten_is_of_use_while_somebody_waits() {
        let spent = |shares: &[(u32, u32)], capacity| {
            let row = row(shares, Some((capacity, 7)));
            row.spent().is_some()
        };
        assert!(spent(&[], None) && spent(&[(5, 5)], None));
        assert!(!spent(&[(5, 5), (1, 5)], None));
        assert!(!spent(&[], Some(5)));
        assert!(!spent(&[(0, 5)], None), "it is being changed");
    }
}
