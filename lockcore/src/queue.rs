//! The rule as plain code: the tickets of one name in order, and which of them hold. There is no
//! clock and no I/O here: the caller passes the time in as a number. The memory store uses this
//! code, and the tests compare every other store with it in random histories.

use std::collections::VecDeque;

use crate::hash::Prehashed;
use crate::request::{FULL, Id};
use crate::token::MAX_TICKET;

/// The longest line: a request that would wait behind this many tickets, holders included, is
/// refused. So a line does not grow without limit if some code sends requests without end. A line
/// of this length fits into one answer of ZooKeeper, which has at most a megabyte. A request that
/// can hold at once is always accepted.
pub const MOST_TICKETS: usize = 10_000;

/// In a line with more tickets than this, a map finds a ticket faster than a scan. Most lines have
/// one ticket, and need no map.
const SHORT: usize = 32;

/// The tickets of one name. `T` is data that the caller keeps with a ticket.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    /// Ascending ticket numbers. The first `granted` of them hold, the others wait.
    tickets: VecDeque<Ticket<T>>,
    /// The number of each ticket. The map is made when the line gets longer than [`SHORT`], and is
    /// kept until the line is empty.
    numbers: Option<Prehashed<Id, u64>>,
    granted: usize,
    /// The permits of the tickets that hold.
    permits_out: u64,
    /// The stored capacity of the name, which overrides the capacities of its tickets.
    stored: Option<u32>,
    /// The last ticket number. It is kept when the queue becomes empty, so that numbers only rise.
    last: u64,
}

/// A ticket that waits or holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Ticket<T> {
    /// The number of the ticket.
    pub number: u64,
    /// The identity of the request.
    pub id: Id,
    /// How many permits it takes.
    pub permits: u32,
    /// The capacity of its request.
    pub capacity: u32,
    /// When the ticket ends if it is not renewed.
    pub expires_at: u64,
    /// The caller's data.
    pub payload: T,
}

/// A request for a ticket: see [`Queue::enqueue`].
#[derive(Clone, Debug)]
pub struct NewTicket<T> {
    /// The identity of the request, which no ticket of the queue has.
    pub id: Id,
    /// How many permits it takes.
    pub permits: u32,
    /// The capacity that it states.
    pub capacity: u32,
    /// When the ticket ends if it is not renewed.
    pub expires_at: u64,
    /// The least number that the ticket may get.
    pub floor: u64,
    /// Whether it waits in line if its permits are not free.
    pub wait: bool,
    /// The caller's data.
    pub payload: T,
}

/// Why [`Queue::enqueue`] took no ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoTicket {
    /// The permits are not free. The request does not wait, or it would wait behind
    /// [`MOST_TICKETS`] tickets.
    Busy,
    /// The request has another capacity than the line. The value is the capacity of the line: that
    /// of the oldest ticket. If a capacity is stored and the request is for a mutex or a read/write
    /// lock, it is the stored capacity.
    CapacityMismatch(u32),
    /// Ticket numbers have run out. They are never wrapped.
    Exhausted,
}

/// The rule for a line: returns how many of the oldest tickets hold. The line has the permits and
/// the capacity of each ticket, oldest first.
///
/// Tickets with different capacities never hold together.
#[must_use]
pub fn granted(line: impl IntoIterator<Item = (u32, u32)>) -> usize {
    granted_of(line, None, 0)
}

/// The rule for a line whose capacity may be [stored](crate::backend::Resize). A stored capacity
/// counts in place of the capacities of the tickets. `held` is how many of the oldest tickets hold
/// already. They hold under any capacity, because a grant is never taken back.
#[must_use]
pub fn granted_of(
    line: impl IntoIterator<Item = (u32, u32)>,
    stored: Option<u32>,
    held: usize,
) -> usize {
    let mut line = line.into_iter().peekable();
    let Some((_, oldest)) = line.peek().copied() else {
        return 0;
    };
    let capacity = stored.unwrap_or(oldest);
    let mut out = 0u64;
    let holds = |ticket: &(usize, (u32, u32))| {
        let (at, (permits, own)) = *ticket;
        out += u64::from(permits);
        let fits = out <= u64::from(capacity);
        at < held || fits && (stored.is_some() || own == capacity)
    };
    line.enumerate().take_while(holds).count()
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            tickets: VecDeque::new(),
            numbers: None,
            granted: 0,
            permits_out: 0,
            stored: None,
            last: 0,
        }
    }
}

impl<T> Queue<T> {
    /// Adds a ticket at the end. Returns its number, and whether it holds at once. Call
    /// [`expire`](Self::expire) first.
    ///
    /// # Errors
    /// [`NoTicket`], after which the queue is unchanged.
    pub fn enqueue(&mut self, new: NewTicket<T>) -> Result<(u64, bool), NoTicket> {
        let NewTicket {
            id,
            permits,
            capacity,
            ..
        } = new;
        let limit = match (self.stored, self.tickets.front()) {
            (Some(stored), _) if capacity == FULL.get() => {
                return Err(NoTicket::CapacityMismatch(stored));
            }
            (Some(stored), _) => stored,
            (None, Some(oldest)) if oldest.capacity != capacity => {
                return Err(NoTicket::CapacityMismatch(oldest.capacity));
            }
            (None, _) => capacity,
        };
        let nobody_waits = self.granted == self.tickets.len();
        let holds = nobody_waits && self.permits_out + u64::from(permits) <= u64::from(limit);
        let may_wait = new.wait && self.tickets.len() < MOST_TICKETS;
        if !holds && !may_wait {
            return Err(NoTicket::Busy);
        }
        let number = (self.last + 1).max(new.floor);
        if number > MAX_TICKET {
            return Err(NoTicket::Exhausted);
        }
        self.last = number;
        self.tickets.push_back(Ticket {
            number,
            id,
            permits,
            capacity,
            expires_at: new.expires_at,
            payload: new.payload,
        });
        match &mut self.numbers {
            Some(numbers) => {
                numbers.insert(id, number);
            }
            None if self.tickets.len() > SHORT => {
                let numbers = self.tickets.iter().map(|ticket| (ticket.id, ticket.number));
                self.numbers = Some(numbers.collect());
            }
            None => {}
        }
        if holds {
            self.granted += 1;
            self.permits_out += u64::from(permits);
        }
        Ok((number, holds))
    }

    /// Finds a ticket, and whether it holds.
    pub fn find(&mut self, id: Id) -> Option<(&mut Ticket<T>, bool)> {
        let at = self.position(id)?;
        Some((&mut self.tickets[at], at < self.granted))
    }

    /// Gives a ticket another id, which no other ticket has. Returns whether the ticket was there.
    /// Only the id of the ticket changes.
    pub fn rename(&mut self, id: Id, to: Id) -> bool {
        let Some(at) = self.position(id) else {
            return false;
        };
        self.tickets[at].id = to;
        if let Some(numbers) = &mut self.numbers
            && let Some(number) = numbers.remove(&id)
        {
            numbers.insert(to, number);
        }
        true
    }

    /// The oldest ticket that waits.
    pub fn first_in_line(&self) -> Option<&Ticket<T>> {
        self.tickets.get(self.granted)
    }

    /// Whether a ticket is the oldest one that waits.
    pub fn is_first_in_line(&self, id: Id) -> bool {
        self.first_in_line().is_some_and(|first| first.id == id)
    }

    /// Removes a ticket. Returns whether it was there, and how many tickets are granted because of
    /// the removal. These are the last of the [`holders`](Self::holders).
    pub fn remove(&mut self, id: Id) -> (bool, usize) {
        match self.position(id) {
            Some(at) => {
                self.take(at);
                (true, self.grant())
            }
            None => (false, 0),
        }
    }

    /// Reduces a ticket to this number of permits; a greater number changes nothing. Returns how
    /// many tickets are granted because of the reduction. The ticket itself may be one of them.
    pub fn shrink(&mut self, id: Id, permits: u32) -> usize {
        let Some(at) = self.position(id) else {
            return 0;
        };
        let ticket = &mut self.tickets[at];
        let given_up = ticket.permits.saturating_sub(permits);
        ticket.permits -= given_up;
        if at < self.granted {
            self.permits_out -= u64::from(given_up);
        }
        self.grant()
    }

    /// Stores a capacity, which counts in place of the capacities of the tickets. With `None` the
    /// capacities of the tickets count again. A ticket that holds keeps its permits. Returns how
    /// many tickets are granted because of the change.
    ///
    /// Without a stored capacity, all tickets of a line have the same capacity. So before the
    /// caller removes the stored capacity, it must check that all tickets agree.
    pub fn resize(&mut self, stored: Option<u32>) -> usize {
        self.stored = stored;
        self.grant()
    }

    /// The capacity that is stored.
    pub fn stored(&self) -> Option<u32> {
        self.stored
    }

    /// Removes every ticket whose end is at or before `now`. Returns how many tickets are granted
    /// because of the removal.
    pub fn expire(&mut self, now: u64) -> usize {
        let ended = |ticket: &Ticket<T>| ticket.expires_at <= now;
        let (mut holders, mut permits) = (0, 0);
        for ticket in self.holders().filter(|ticket| ended(ticket)) {
            holders += 1;
            permits += u64::from(ticket.permits);
        }
        self.granted -= holders;
        self.permits_out -= permits;
        let numbers = &mut self.numbers;
        // All are removed in one pass. Single removals would each move the rest of the line.
        self.tickets.retain(|ticket| {
            let ended = ended(ticket);
            if ended && let Some(numbers) = numbers {
                numbers.remove(&ticket.id);
            }
            !ended
        });
        self.forget_numbers();
        self.grant()
    }

    /// The tickets that hold, oldest first.
    pub fn holders(&self) -> impl DoubleEndedIterator<Item = &Ticket<T>> + ExactSizeIterator {
        self.tickets.range(..self.granted)
    }

    /// All tickets, oldest first, and for each whether it holds.
    pub fn tickets(
        &self,
    ) -> impl DoubleEndedIterator<Item = (&Ticket<T>, bool)> + ExactSizeIterator {
        let granted = self.granted;
        self.tickets
            .iter()
            .enumerate()
            .map(move |(at, ticket)| (ticket, at < granted))
    }

    /// Whether there are no tickets.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    /// The last ticket number.
    pub fn last(&self) -> u64 {
        self.last
    }

    fn position(&self, id: Id) -> Option<usize> {
        match &self.numbers {
            Some(numbers) => {
                let number = numbers.get(&id)?;
                let found = (self.tickets).binary_search_by_key(number, |ticket| ticket.number);
                found.ok()
            }
            None => self.tickets.iter().position(|ticket| ticket.id == id),
        }
    }

    fn forget_numbers(&mut self) {
        if self.tickets.is_empty() {
            self.numbers = None;
        }
    }

    fn take(&mut self, at: usize) {
        let Some(ticket) = self.tickets.remove(at) else {
            return;
        };
        if let Some(numbers) = &mut self.numbers {
            numbers.remove(&ticket.id);
        }
        self.forget_numbers();
        if at < self.granted {
            self.granted -= 1;
            self.permits_out -= u64::from(ticket.permits);
        }
    }

    /// Grants from the front of the line while the permits suffice. No ticket is skipped.
    fn grant(&mut self) -> usize {
        let mut newly = 0;
        while let Some(next) = self.tickets.get(self.granted) {
            let out = self.permits_out + u64::from(next.permits);
            if out > u64::from(self.stored.unwrap_or(next.capacity)) {
                break;
            }
            self.permits_out = out;
            self.granted += 1;
            newly += 1;
        }
        newly
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule, computed from the whole list each time.
    fn rule(tickets: &[(u32, u32)]) -> Vec<bool> {
        let mut older = 0u64;
        tickets
            .iter()
            .map(|&(permits, capacity)| {
                older += u64::from(permits);
                older <= u64::from(capacity)
            })
            .collect()
    }

    fn granted(queue: &Queue<()>) -> Vec<bool> {
        queue.tickets().map(|(_, holds)| holds).collect()
    }

    fn id() -> Id {
        Id::draw().unwrap()
    }

    fn new(id: Id, permits: u32, capacity: u32, expires_at: u64) -> NewTicket<()> {
        NewTicket {
            id,
            permits,
            capacity,
            expires_at,
            floor: 0,
            wait: true,
            payload: (),
        }
    }

    #[test]
    fn a_small_request_does_not_pass_a_large_one_that_waits() {
        let mut queue = Queue::default();
        let first = id();
        assert!(queue.enqueue(new(first, 3, 5, 10)).unwrap().1);
        assert!(!queue.enqueue(new(id(), 4, 5, 10)).unwrap().1);

        assert!(!queue.enqueue(new(id(), 1, 5, 10)).unwrap().1);
        assert_eq!(queue.remove(first), (true, 2));
    }

    #[test]
    fn a_ticket_with_another_id_keeps_its_place_in_a_short_line_and_in_a_long_one() {
        for others in [1, 2 * SHORT] {
            let mut queue = Queue::default();
            let (first, renamed) = (id(), id());
            let (number, _) = queue.enqueue(new(first, 5, 5, 10)).unwrap();
            for _ in 0..others {
                queue.enqueue(new(id(), 5, 5, 10)).unwrap();
            }

            assert!(queue.rename(first, renamed));

            assert!(!queue.rename(first, id()) && queue.find(first).is_none());
            let (ticket, holds) = queue.find(renamed).unwrap();
            assert_eq!((ticket.number, ticket.id, holds), (number, renamed, true));
            assert_eq!(queue.remove(first), (false, 0));
            assert_eq!(queue.remove(renamed), (true, 1));
        }
    }

    #[test]
    fn readers_come_in_together_when_the_writer_before_them_gives_up() {
        const FULL: u32 = 1 << 30;
        let mut queue = Queue::default();
        let writer = id();
        queue.enqueue(new(id(), 1, FULL, 10)).unwrap();
        queue.enqueue(new(writer, FULL, FULL, 10)).unwrap();
        queue.enqueue(new(id(), 1, FULL, 10)).unwrap();
        queue.enqueue(new(id(), 1, FULL, 10)).unwrap();

        assert_eq!(queue.remove(writer), (true, 2));
        assert_eq!(granted(&queue), [true; 3]);
    }

    #[test]
    fn a_writer_that_reads_on_lets_readers_in_as_far_as_the_next_writer() {
        const FULL: u32 = 1 << 30;
        let mut queue = Queue::default();
        let holder = id();
        queue.enqueue(new(holder, FULL, FULL, 10)).unwrap();
        for permits in [1, 1, FULL, 1] {
            queue.enqueue(new(id(), permits, FULL, 10)).unwrap();
        }

        assert_eq!(queue.shrink(holder, 1), 2);
        assert_eq!(granted(&queue), [true, true, true, false, false]);
        assert_eq!(queue.shrink(holder, FULL), 0, "it does not grow again");
        assert_eq!(queue.shrink(id(), 1), 0);
    }

    #[test]
    fn a_dead_waiter_goes_away_as_a_dead_holder_does() {
        let mut queue = Queue::default();
        queue.enqueue(new(id(), 1, 1, 10)).unwrap();
        queue.enqueue(new(id(), 1, 1, 10)).unwrap();
        queue.enqueue(new(id(), 1, 1, 20)).unwrap();

        assert_eq!(queue.expire(10), 1);
        assert_eq!(granted(&queue), [true]);
    }

    #[test]
    fn numbers_rise_over_an_empty_queue_and_end_instead_of_wrapping() {
        let mut queue = Queue::default();
        let first = id();
        let (number, _) = queue
            .enqueue(NewTicket {
                floor: 100,
                ..new(first, 1, 1, 10)
            })
            .unwrap();
        queue.remove(first);
        let (next, _) = queue
            .enqueue(NewTicket {
                floor: 50,
                ..new(id(), 1, 1, 10)
            })
            .unwrap();
        assert!(next > number);

        let beyond = queue.enqueue(NewTicket {
            floor: MAX_TICKET + 1,
            ..new(id(), 1, 1, 10)
        });
        assert_eq!(beyond, Err(NoTicket::Exhausted));
    }

    #[test]
    fn a_long_line_finds_its_tickets_as_a_short_one_does() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::default();
            // All tickets that were ever there, with their ends. The end is `None` after the ticket
            // is gone.
            let mut all: Vec<(Id, Option<u64>)> = Vec::new();
            // The queue grows to some hundred tickets, shrinks to none and grows again.
            for now in 0..2_000_u64 {
                let grows = now % 1_000 < 500;
                if random.u8(0..10) < if grows { 8 } else { 1 } {
                    let (added, end) = (id(), now + random.u64(1..800));
                    queue.enqueue(new(added, 1, 3, end)).unwrap();
                    all.push((added, Some(end)));
                } else if let Some((old, end)) = random.choice(&mut all) {
                    assert_eq!(queue.remove(*old).0, end.take().is_some(), "seed {seed}");
                }
                if random.u8(0..20) == 0 {
                    queue.expire(now);
                    for (_, end) in &mut all {
                        end.take_if(|end| *end <= now);
                    }
                }
                let (some, end) = *random.choice(&all).unwrap_or(&(id(), None));
                let found = queue.find(some).map(|(ticket, _)| ticket.expires_at);
                assert_eq!(found, end, "seed {seed}, step {now}");
            }
            let left = all.iter().filter(|(_, end)| end.is_some()).count();
            assert_eq!(queue.tickets().count(), left, "seed {seed}");
            let list: Vec<_> = queue
                .tickets()
                .map(|(t, _)| (t.permits, t.capacity))
                .collect();
            assert_eq!(granted(&queue), rule(&list), "seed {seed}");
        }
    }

    #[test]
    fn a_smaller_capacity_takes_nothing_back_and_a_larger_one_lets_waiters_in() {
        let mut queue = Queue::default();
        let ids: Vec<Id> = (0..4).map(|_| id()).collect();
        for id in &ids[..2] {
            assert!(queue.enqueue(new(*id, 5, 10, 10)).unwrap().1);
        }
        assert!(!queue.enqueue(new(ids[2], 5, 10, 10)).unwrap().1);

        assert_eq!(queue.resize(Some(15)), 1);
        assert_eq!(granted(&queue), [true; 3]);
        assert_eq!(queue.resize(Some(3)), 0);
        assert_eq!(granted(&queue), [true; 3]);
        // A request with another capacity is accepted now, but a request for a mutex is refused.
        let (number, holds) = queue.enqueue(new(ids[3], 2, 7, 10)).unwrap();
        assert!(number > 0 && !holds);
        let mutex = queue.enqueue(new(id(), 1, FULL.get(), 10));
        assert_eq!(mutex, Err(NoTicket::CapacityMismatch(3)));

        assert_eq!(queue.remove(ids[0]), (true, 0));
        assert_eq!(queue.remove(ids[1]), (true, 0));
        assert_eq!(queue.remove(ids[2]), (true, 1));
        // The stored capacity stays when the line is empty, until it is removed.
        queue.remove(ids[3]);
        assert!(!queue.enqueue(new(ids[0], 4, 10, 10)).unwrap().1);
        assert_eq!(queue.resize(None), 1);
    }

    /// A store that keeps no grants derives the holders from the order of the tickets and from one
    /// number. It is the number of the youngest ticket that held when the capacity was changed. All
    /// tickets up to this number hold.
    #[test]
    fn random_resizes_agree_with_one_number_for_all_that_held() {
        for seed in 0..2_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::default();
            let mut through = 0;
            for now in 0..60 {
                match random.u8(0..6) {
                    0..=2 => {
                        let (permits, end) = (random.u32(1..4), now + random.u64(1..30));
                        let _ = queue.enqueue(NewTicket {
                            wait: random.bool(),
                            ..new(id(), permits, 4, end)
                        });
                    }
                    3 if !queue.is_empty() => {
                        let at = random.usize(..queue.tickets.len());
                        queue.remove(queue.tickets[at].id);
                    }
                    4 => {
                        through = queue.holders().last().map_or(through, |held| held.number);
                        let stored = random.bool().then(|| random.u32(0..9));
                        queue.resize(stored);
                    }
                    _ => {
                        queue.expire(now);
                    }
                }
                let list = queue.tickets.iter().map(|t| (t.permits, t.capacity));
                let held = queue.tickets.iter().filter(|t| t.number <= through).count();
                let derived = granted_of(list, queue.stored(), held);
                assert_eq!(derived, queue.granted, "seed {seed}, step {now}");
            }
        }
    }

    #[test]
    fn random_histories_keep_to_the_rule() {
        for seed in 0..2_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let capacity = random.u32(1..6);
            let mut queue = Queue::default();
            let mut held_before: Vec<Id> = Vec::new();
            for now in 0..40 {
                match random.u8(0..5) {
                    0 | 1 => {
                        let permits = random.u32(1..=capacity);
                        let expires_at = now + random.u64(1..20);
                        let wait = random.bool();
                        let _ = queue.enqueue(NewTicket {
                            wait,
                            ..new(id(), permits, capacity, expires_at)
                        });
                    }
                    2 if !queue.is_empty() => {
                        let at = random.usize(..queue.tickets.len());
                        queue.remove(queue.tickets[at].id);
                    }
                    3 if !queue.is_empty() => {
                        let at = random.usize(..queue.tickets.len());
                        let (id, before) = (queue.tickets[at].id, queue.tickets[at].permits);
                        let permits = random.u32(1..=capacity);
                        queue.shrink(id, permits);
                        assert_eq!(queue.tickets[at].permits, before.min(permits));
                    }
                    _ => {
                        queue.expire(now);
                    }
                }
                let list: Vec<_> = queue
                    .tickets
                    .iter()
                    .map(|t| (t.permits, t.capacity))
                    .collect();
                assert_eq!(granted(&queue), rule(&list), "seed {seed}, step {now}");
                let holds: Vec<Id> = queue.holders().map(|t| t.id).collect();
                let taken_back = held_before
                    .iter()
                    .find(|id| queue.tickets.iter().any(|t| t.id == **id) && !holds.contains(id));
                assert_eq!(
                    taken_back, None,
                    "seed {seed}, step {now}: a grant was taken back"
                );
                held_before = holds;
            }
        }
    }
}
