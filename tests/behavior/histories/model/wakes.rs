//! The wake-ups and rechecks that a store must send, and those that it has sent.

use super::*;

impl Model {
    pub(super) fn tell_first(&mut self, name: usize) {
        let told = self.first_told(name).zip(self.soonest(name));
        if let Some(((client, id), at)) = told {
            self.to_look.push((client, id, at));
        }
    }

    /// The waiter that the store asks to recheck, with its client: the first one in line. On Redis,
    /// it is the first one that can hear it.
    fn first_told(&self, name: usize) -> Option<(usize, Id)> {
        let mut waiting = self.queues[name]
            .tickets()
            .filter(|(_, holds)| !holds)
            .map(|(known, _)| (self.wishes[known.payload.ticket].client, known.id));
        let hears = |(client, _): &(usize, Id)| self.connected[*client];
        match self.manner.unheard {
            Some(_) => waiting.find(hears),
            None => waiting.next().filter(hears),
        }
    }

    /// In a batch, one ticket may be granted because another ticket of the batch ends. The client
    /// learns of this grant from the ticket's own answer. The store may also wake it.
    pub(in crate::histories) fn of_one_batch(
        &mut self,
        tickets: &[usize],
        wakes: &[(usize, Wake)],
    ) -> Result<(), String> {
        let ids: Vec<Id> = tickets.iter().map(|ticket| self.ids[*ticket]).collect();
        self.to_wake
            .retain(|told| !ids.contains(&told.1.id) || wakes.contains(told));
        self.expect_rechecks()
    }

    /// Call this for a request after which the store may or may not compute the grants of its name.
    /// If the store has woken a waiter, it has computed them.
    pub(super) fn settle_if_looked(&mut self, name: usize, wakes: &[(usize, Wake)]) {
        let mut looked = self.queues[name].clone();
        looked.expire(self.now);
        let told = |id| wakes.iter().any(|(_, wake)| wake.id == id);
        if looked
            .holders()
            .any(|known| !known.payload.told && told(known.id))
        {
            self.settle(name, None);
        }
    }

    /// A request that computes the grants of a name removes its expired tickets. It wakes every
    /// ticket that now holds, except the ticket of the request itself.
    pub(super) fn settle(&mut self, name: usize, asker: Option<usize>) {
        let queue = &mut self.queues[name];
        let expired = queue
            .tickets()
            .filter(|(known, _)| known.expires_at <= self.now);
        self.expired
            .extend(expired.map(|(known, _)| known.payload.ticket));
        queue.expire(self.now);
        let granted: Vec<_> = queue
            .holders()
            .map(|known| (known.id, known.payload))
            .collect();
        for (id, payload) in granted {
            if payload.told || Some(payload.ticket) == asker {
                continue;
            }
            let client = self.wishes[payload.ticket].client;
            let (known, _) = queue.find(id).unwrap();
            known.payload.told = true;
            let wake = Wake::new(id, known.number);
            if self.connected[client] {
                // On a store without wake-ups, a waiter learns of its grant at its renewal.
                if self.capability.pushes {
                    self.to_wake.push((client, wake));
                }
            } else if let Some(unheard) = self.manner.unheard {
                known.expires_at = known.expires_at.min(self.now + unheard);
            }
        }
    }

    /// Whether the client of this ticket has no connection.
    pub(in crate::histories) fn is_unheard(&self, id: Id) -> bool {
        let ticket = self.ids.iter().position(|known| *known == id);
        ticket.is_some_and(|ticket| !self.connected[self.wishes[ticket].client])
    }

    /// Whether a wake-up that the store must send has not arrived yet.
    pub(in crate::histories) fn is_still_to_wake(&self, wakes: &[(usize, Wake)]) -> bool {
        self.to_wake.iter().any(|told| !wakes.contains(told))
    }

    /// Checks that the store has sent exactly the expected wake-ups, and that `inspect` shows the
    /// state that the rule says.
    pub(in crate::histories) fn expect_wakes(
        &mut self,
        mut wakes: Vec<(usize, Wake)>,
    ) -> Result<(), String> {
        // Sorted, because messages of different connections have no order.
        let order = |(client, wake): &(usize, Wake)| (wake.ticket, *client);
        let mut to_wake = std::mem::take(&mut self.to_wake);
        to_wake.sort_by_key(order);
        if self.capability.sessions {
            // A wake-up that comes after the answer only repeats the answer.
            wakes.retain(|told| to_wake.contains(told) || !self.is_told(told.1));
        }
        wakes.sort_by_key(order);
        if wakes != to_wake {
            return Err(format!("woken were {wakes:?}, and should be {to_wake:?}"));
        }
        for (client, wake) in wakes {
            let ticket = self.ids.iter().position(|id| *id == wake.id).unwrap();
            self.highest_seen[client] = self.highest_seen[client].max(wake.ticket);
            self.note_exclusive(ticket, wake.ticket)?;
        }
        self.expect_looks()?;
        for (name, places) in std::mem::take(&mut self.seen) {
            self.shows(name, &places)?;
        }
        Ok(())
    }

    /// Checks that the store has requested exactly the expected rechecks. Further rechecks are
    /// allowed in two cases:
    ///
    /// - A client is disconnected. A grant that no client hears of ends early.
    /// - A lease of the name was made shorter, and the first waiter is told to recheck at the first
    ///   end there was then, or is now: the same batch may have prolonged another lease later.
    ///   `a_waiter_gets_a_kept_lock_on_time_though_its_client_ends` checks that it is told.
    fn expect_looks(&mut self) -> Result<(), String> {
        let mut told = std::mem::take(&mut self.told_to_look);
        // Redis adds ten milliseconds to a recheck, so that the lease has certainly ended by then.
        let late = Duration::from_millis(if self.manner.unheard.is_some() { 10 } else { 0 });
        for (client, id, at) in std::mem::take(&mut self.to_look) {
            let expected = Duration::from_millis(at - self.now);
            let same = |told: &(usize, Id, Duration)| {
                let shown = told.2.saturating_sub(late);
                (told.0, told.1) == (client, id) && self.is_about(shown, expected)
            };
            let Some(place) = told.iter().position(same) else {
                return Err(format!(
                    "told to look are {told:?}, and not {client} of {id:?} in {expected:?}"
                ));
            };
            told.remove(place);
        }
        let some_hear_nothing = self.connected.contains(&false);
        let unheard = Duration::from_millis(self.manner.unheard.unwrap_or(0)) + late;
        told.retain(|(_, _, after)| !some_hear_nothing || *after > unheard);
        let shortened = std::mem::take(&mut self.shortened);
        told.retain(|(_, id, after)| {
            let ticket = self.ids.iter().position(|known| known == id).unwrap();
            let name = self.wishes[ticket].name;
            // Within a batch, the ticket may have been told before it was granted.
            let waits = self.queues[name]
                .tickets()
                .any(|(known, holds)| known.id == *id && !holds);
            let is_first = self.first_told(name).is_some_and(|(_, first)| first == *id);
            let is_end = |at: &u64| {
                let expected = Duration::from_millis(at.saturating_sub(self.now));
                self.is_about(after.saturating_sub(late), expected)
            };
            let ends = &shortened[name];
            let is_right = is_first && ends.iter().chain(&self.soonest(name)).any(is_end);
            !(!ends.is_empty() && (is_right || !waits))
        });
        match told.is_empty() {
            true => Ok(()),
            false => Err(format!("told to look are {told:?}")),
        }
    }

    /// Whether the ticket holds under this number and its client knows of the grant.
    pub(super) fn is_told(&self, wake: Wake) -> bool {
        self.queues.iter().any(|queue| {
            queue.tickets().any(|(known, holds)| {
                (known.id, known.number) == (wake.id, wake.ticket) && holds && known.payload.told
            })
        })
    }
}
