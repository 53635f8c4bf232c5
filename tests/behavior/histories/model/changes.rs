//! Changes of what a line is: a ticket goes to another client, and the stored capacity changes.

use super::*;

impl Model {
    /// The adoption that gives the ticket of `from` the id of `to`. `None` if the store cannot do
    /// this, and if `to` is the id of another ticket.
    pub(in crate::histories) fn adoption(&mut self, from: usize, to: usize) -> Option<Adoption> {
        let name = self.wishes[from].name;
        // No client enqueues the id of an adoption, neither before the adoption nor after it.
        let is_free = !self.enqueued.contains(&to)
            && match self.adopted.get(&to) {
                Some(earlier) => *earlier == from,
                None => from != to,
            };
        // A mark counts for one name.
        let is_marked = self.marks.contains_key(&to) && self.wishes[to].name != name;
        if !self.capability.adopts || !is_free || is_marked {
            return None;
        }
        // Such a store removes the expired tickets of the name only at a later request, and wakes
        // its waiters only then.
        let mut tickets = self.queues[name].tickets();
        if self.manner.by_id && tickets.any(|(known, _)| known.expires_at <= self.now) {
            return None;
        }
        drop(tickets);
        let mut request = (*self.request(to)).clone();
        request.name = self.names[name].clone();
        let ids = [self.ids[to], self.ids[from]];
        let mut found = ids.iter().filter_map(|id| {
            let (known, _) = self.queues[name].find(*id)?;
            Some((known.number, known.permits, known.capacity))
        });
        let wish = self.wishes[from];
        let (number, permits, capacity) = found.next().unwrap_or((1, wish.permits, wish.capacity));
        drop(found);
        request.permits = NonZeroU32::new(permits).unwrap();
        request.capacity = NonZeroU32::new(capacity).unwrap();
        let mark = leaves_mark(from, to);
        Some(Adoption::new(ids[1], number, mark, Arc::new(request)))
    }

    /// An adoption gives a ticket that holds another id and another client, and renews it. A
    /// repetition renews it again.
    pub(in crate::histories) fn adopted(
        &mut self,
        from: usize,
        to: usize,
        answer: Enqueued,
        wakes: &[(usize, Wake)],
    ) -> Result<(), String> {
        let name = self.wishes[from].name;
        // A store may remember an expired mark for longer than the model.
        let ended = self.marks.contains_key(&to) && answer == Enqueued::Gone;
        if self.is_marked(to) || ended {
            self.settle_if_looked(name, wakes);
            return expect(answer, Enqueued::Gone);
        }
        match self.manner.by_id {
            true => self.settle_if_looked(name, wakes),
            false => self.settle(name, None),
        }
        let valid_for = Duration::from_millis(self.wishes[to].ttl);
        let is_there = self.queues[name].find(self.ids[to]).is_some();
        let holds = |(_, holds)| holds;
        if !is_there && !self.queues[name].find(self.ids[from]).is_some_and(holds) {
            return expect(answer, Enqueued::Gone);
        }
        if !is_there {
            self.queues[name].rename(self.ids[from], self.ids[to]);
            self.adopted.insert(to, from);
            if leaves_mark(from, to) {
                self.mark(from);
            }
        }
        self.prolong(name, self.ids[to], self.wishes[to].ttl);
        let (known, _) = self.queues[name].find(self.ids[to]).unwrap();
        known.payload = Known {
            ticket: to,
            told: true,
        };
        let (ticket, permits, capacity) = (known.number, known.permits, known.capacity);
        let wish = &mut self.wishes[to];
        (wish.name, wish.permits, wish.capacity) = (name, permits, capacity);
        // The client that had the ticket may be woken, if its turn has come only now.
        self.of_one_batch(&[from], wakes)?;
        expect(answer, Enqueued::Granted { ticket, valid_for })
    }

    /// A stored capacity counts in place of what tickets state. It is stored if the oldest ticket
    /// states the same capacity as the client, and forgotten if all tickets do. A change whose
    /// client does not know the last one changes nothing.
    pub(in crate::histories) fn resized(
        &mut self,
        name: usize,
        capacity: Option<u32>,
        is_late: bool,
        read: Resized,
        answer: Resized,
        wakes: &[(usize, Wake)],
    ) -> Result<(), String> {
        match self.manner.by_id {
            true => self.settle_if_looked(name, wakes),
            false => self.settle(name, None),
        }
        let queue = &mut self.queues[name];
        if (read.capacity, read.outcome) != (queue.stored(), ResizeOutcome::Applied) {
            return Err(format!("read {read:?}, and not {:?}", queue.stored()));
        }
        let live = queue.tickets().map(|(known, _)| known);
        let live = live.filter(|known| known.expires_at > self.now);
        let looked_at = match (queue.stored(), capacity) {
            (None, _) => 1,
            (Some(_), Some(_)) => 0,
            (Some(_), None) => usize::MAX,
        };
        let others = live.take(looked_at).map(|known| known.capacity);
        let others: Vec<_> = others.filter(|other| *other != STATED.get()).collect();
        let is_right = match answer.outcome {
            ResizeOutcome::Kept => is_late,
            ResizeOutcome::Mismatch { in_use } => !is_late && others.contains(&in_use),
            ResizeOutcome::Applied => !is_late && others.is_empty(),
            _ => false,
        };
        if answer.outcome == ResizeOutcome::Applied {
            queue.resize(capacity);
            (self.resized[name], self.freed[name]) = (true, true);
            self.settle(name, None);
        }
        let is_mismatch = matches!(answer.outcome, ResizeOutcome::Mismatch { .. });
        match is_right && (is_mismatch || answer.capacity == self.queues[name].stored()) {
            true => Ok(()),
            false => Err(format!("answered {answer:?}, and others are {others:?}")),
        }
    }
}

/// Whether the adoption says that the enqueue of `from` may still arrive. A repetition of the adoption
/// says the same.
fn leaves_mark(from: usize, to: usize) -> bool {
    (from + to).is_multiple_of(2)
}
