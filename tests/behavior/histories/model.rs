//! Provides the answers and wake-ups that a history expects from a store. The model is the pure
//! rule, a clock that is a number, and what the contract adds to the rule: marks, wake-ups,
//! numbers.

mod changes;
mod wakes;

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use lockcore::backend::queue::{NewTicket, NoTicket, Queue, Ticket, granted_of};
use lockcore::backend::{
    Adoption, Capability, Enqueued, Id, Name, Namespace, Released, Renewed, Request, ResizeOutcome,
    Resized, TicketInfo, Wake,
};
use tests::stores::Manner;

use super::{CLIENTS, DAY_MICROS, History, Key, MARK, NAMES, NAMESPACE, STATED, Seen, Wish, With};

/// The state that one history must lead to.
pub(super) struct Model {
    manner: Manner,
    capability: Capability,
    pub(super) wishes: Vec<Wish>,
    ids: Vec<Id>,
    pub(super) names: Vec<Name>,
    queues: Vec<Queue<Known>>,
    /// The time in milliseconds since the history began.
    pub(super) now: u64,
    pub(super) connected: [bool; CLIENTS],
    /// Tickets that were released before they were enqueued, and the time until which the store
    /// keeps the mark.
    marks: HashMap<usize, u64>,
    /// Until when the state of each name says that there may be marks. The store does not look for
    /// a mark after that.
    marks_until: [u64; NAMES],
    /// Tickets that expired. A store may or may not know them after that.
    pub(super) expired: HashSet<usize>,
    /// Tickets that other clients were to adopt.
    pub(super) given: HashSet<usize>,
    /// The highest number that each client has seen, and the highest exclusive grant of each name.
    highest_seen: [u64; CLIENTS],
    exclusive: [u64; NAMES],
    /// The requests that were enqueued, and those that got the ticket of another request.
    enqueued: HashSet<usize>,
    adopted: HashMap<usize, usize>,
    /// The names for which a capacity was stored at some time.
    resized: [bool; NAMES],
    /// The names in whose line permits became free at some time.
    freed: [bool; NAMES],
    /// The wake-ups that the store must have sent since the last check, and the clients that get
    /// them.
    to_wake: Vec<(usize, Wake)>,
    /// The rechecks that the store must have requested since the last check, with their times. The
    /// next field has those that it did request.
    to_look: Vec<(usize, Id, u64)>,
    pub(super) told_to_look: Vec<(usize, Id, Duration)>,
    /// For each name, the first end of a holder's lease after each lease that was made shorter since
    /// the last check.
    shortened: [Vec<u64>; NAMES],
    pub(super) looks: usize,
    /// For each answer that a ticket waits: the name, the number of the ticket, and the time of the
    /// recheck that the answer requests, if any. The model checks these times at the end of the
    /// step, when it knows the state after the whole step.
    rechecks: Vec<(usize, u64, Option<Duration>)>,
    /// The present answer of `inspect` for each name.
    pub(super) seen: Vec<(usize, Vec<TicketInfo>)>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    ticket: usize,
    /// The client knows that this ticket holds, from an answer or a wake-up.
    told: bool,
}

impl Model {
    /// `run` is a number that keeps the names and ids of this run apart from those of other runs on
    /// the same store.
    pub(super) fn new(history: &History, run: u64, manner: Manner, capability: Capability) -> Self {
        let namespace = Namespace::new(NAMESPACE).unwrap();
        let name = |number| format!("{run}-{number}");
        let id = |number| format!("{run:016x}{number:016x}");
        Self {
            manner,
            capability,
            names: (0..NAMES)
                .map(|number| Name::new(namespace.clone(), name(number)).unwrap())
                .collect(),
            ids: (0..history.requests.len())
                .map(|number| Id::parse(&id(number)).unwrap())
                .collect(),
            wishes: history.requests.clone(),
            queues: (0..NAMES).map(|_| Queue::default()).collect(),
            now: 0,
            connected: [true; CLIENTS],
            marks: HashMap::new(),
            marks_until: [0; NAMES],
            expired: HashSet::new(),
            given: HashSet::new(),
            highest_seen: [0; CLIENTS],
            exclusive: [0; NAMES],
            enqueued: HashSet::new(),
            adopted: HashMap::new(),
            resized: [false; NAMES],
            freed: [false; NAMES],
            to_wake: Vec::new(),
            to_look: Vec::new(),
            told_to_look: Vec::new(),
            shortened: Default::default(),
            looks: 0,
            rechecks: Vec::new(),
            seen: Vec::new(),
        }
    }

    pub(super) fn request(&self, ticket: usize) -> Arc<Request> {
        let wish = self.wishes[ticket];
        let highest_seen = self.highest_seen[wish.client];
        let mut request = Request::new(
            self.names[wish.name].clone(),
            self.ids[ticket],
            NonZeroU32::new(wish.permits).unwrap(),
            NonZeroU32::new(wish.capacity).unwrap(),
            Duration::from_millis(wish.ttl),
        );
        request.wait = wish.wait;
        request.highest_seen = match wish.seen {
            Seen::What => highest_seen,
            Seen::AnHourAhead => highest_seen + DAY_MICROS / 24,
            Seen::AYearAhead => highest_seen + 365 * DAY_MICROS,
        };
        request.owner = ticket.to_string().into();
        Arc::new(request)
    }

    pub(super) fn renewal(&self, ticket: usize, with: With) -> Arc<Request> {
        let mut request = (*self.request(ticket)).clone();
        if let Some(most) = with.most.and_then(NonZeroU32::new) {
            request.permits = most.min(request.permits);
        }
        request.ttl = Duration::from_millis(self.ttl(ticket, with));
        Arc::new(request)
    }

    fn ttl(&self, ticket: usize, with: With) -> u64 {
        with.ttl.unwrap_or(self.wishes[ticket].ttl)
    }

    pub(super) fn enqueued(
        &mut self,
        ticket: usize,
        request: &Request,
        answer: Enqueued,
        micros: u64,
        wakes: &[(usize, Wake)],
    ) -> Result<(), String> {
        let wish = self.wishes[ticket];
        self.enqueued.insert(ticket);
        if self.is_marked(ticket) {
            self.settle_if_looked(wish.name, wakes);
            return expect(answer, Enqueued::Gone);
        }
        self.settle(wish.name, Some(ticket));
        let valid_for = request.ttl;
        if let Some((known, _)) = self.queues[wish.name].find(request.id) {
            // The same request was carried out before.
            let number = known.number;
            self.prolong(wish.name, request.id, wish.ttl);
            self.stands(ticket, number, valid_for, answer)?;
            return self.expect_rechecks();
        }
        // A store may remember an expired mark or ticket for longer than the model.
        let ended = self.expired.contains(&ticket) || self.marks.contains_key(&ticket);
        if answer == Enqueued::Gone && ended {
            return Ok(());
        }
        self.expired.remove(&ticket);
        let (Enqueued::Granted { ticket: number, .. } | Enqueued::Waiting { ticket: number, .. }) =
            answer
        else {
            return self.refused(wish, answer);
        };
        let queue = &mut self.queues[wish.name];
        let last = queue.last();
        let seen = Some(request.highest_seen).filter(|seen| *seen <= micros + DAY_MICROS);
        let seen = seen.filter(|_| !self.capability.sessions);
        let floor = (last + 1).max(seen.map_or(0, |seen| seen + 1));
        // The memory store has one sequence of numbers for all names.
        let highest = self.highest_seen.into_iter().max().unwrap_or(0);
        let ceiling = floor.max(highest + 1).max(micros + 1_000_000);
        if !(floor..=ceiling).contains(&number) {
            return Err(format!("number {number} is not {floor} to {ceiling}"));
        }
        let known = Known {
            ticket,
            told: false,
        };
        let outcome = queue.enqueue(NewTicket {
            id: request.id,
            permits: wish.permits,
            capacity: wish.capacity,
            expires_at: self.now + wish.ttl,
            floor: number,
            wait: wish.wait,
            payload: known,
        });
        self.highest_seen[wish.client] = self.highest_seen[wish.client].max(number);
        match outcome {
            Ok((by_the_rule, _)) => {
                assert_eq!(by_the_rule, number);
                self.stands(ticket, number, valid_for, answer)?;
                self.expect_rechecks()
            }
            Err(refused) => Err(format!("answered {answer:?}, and not {refused:?}")),
        }
    }

    /// Checks that the rule refuses the request in the same way.
    fn refused(&mut self, wish: Wish, answer: Enqueued) -> Result<(), String> {
        let queue = &mut self.queues[wish.name];
        let nobody = Known {
            ticket: usize::MAX,
            told: true,
        };
        let id = Id::parse(&"f".repeat(32)).unwrap();
        let outcome = queue.clone().enqueue(NewTicket {
            id,
            permits: wish.permits,
            capacity: wish.capacity,
            expires_at: u64::MAX,
            floor: 0,
            wait: wish.wait,
            payload: nobody,
        });
        match (outcome, answer) {
            // ZooKeeper does not see which tickets hold only because they held at the last change of
            // the capacity.
            (Err(NoTicket::Busy), Enqueued::Busy { .. })
                if self.capability.sessions && self.resized[wish.name] =>
            {
                Ok(())
            }
            (Err(NoTicket::Busy), Enqueued::Busy { retry_in }) => {
                let soonest = self.soonest(wish.name);
                self.about(retry_in, soonest, "retry_in")
            }
            (Err(NoTicket::CapacityMismatch(capacity)), Enqueued::CapacityMismatch { in_use })
                if capacity == in_use =>
            {
                Ok(())
            }
            (outcome, answer) => Err(format!("answered {answer:?}, and the rule {outcome:?}")),
        }
    }

    /// Checks that an answer describes the ticket as the rule says.
    fn stands(
        &mut self,
        ticket: usize,
        number: u64,
        ttl: Duration,
        answer: Enqueued,
    ) -> Result<(), String> {
        let wish = self.wishes[ticket];
        let (known, holds) = self.queues[wish.name].find(self.ids[ticket]).unwrap();
        if holds {
            let was_told = std::mem::replace(&mut known.payload.told, true);
            self.note_exclusive(ticket, number)?;
            let (id, valid_for) = (self.ids[ticket], ttl);
            let not_yet = Enqueued::Waiting {
                ticket: number,
                valid_for,
                recheck_in: None,
                ahead: None,
            };
            // A store that follows the line by its events may answer before the event that tells of
            // free permits. Then the wake-up has to come.
            let may_follow = self.capability.sessions && self.freed[wish.name] && wish.wait;
            if may_follow && !was_told && answer == not_yet {
                self.to_wake.push((wish.client, Wake::new(id, number)));
                return Ok(());
            }
            let ticket = number;
            return expect(answer, Enqueued::Granted { ticket, valid_for });
        }
        match answer {
            Enqueued::Waiting {
                ticket,
                valid_for,
                recheck_in,
                ..
            } if (ticket, valid_for) == (number, ttl) => {
                self.rechecks.push((wish.name, number, recheck_in));
                Ok(())
            }
            answer => Err(format!("answered {answer:?}, but it waits as {number}")),
        }
    }

    fn expect_rechecks(&mut self) -> Result<(), String> {
        for (name, number, recheck_in) in std::mem::take(&mut self.rechecks) {
            let soonest = self.recheck(name, number);
            if soonest.is_none() && self.is_told_to_look_again(name, number, recheck_in) {
                continue;
            }
            self.about(recheck_in, soonest, "recheck_in")?;
        }
        Ok(())
    }

    /// Makes the changes of a batch for a store that carries out the whole batch before it answers
    /// for any of its tickets. Call it before the answers of the batch are checked.
    pub(super) fn renew_together(&mut self, tickets: &[usize], with: With) {
        if !self.manner.by_id {
            return;
        }
        for ticket in tickets {
            let (wish, ttl) = (self.wishes[*ticket], self.ttl(*ticket, with));
            let id = self.ids[*ticket];
            if let Some((known, _)) = self.queues[wish.name].find(id)
                && known.expires_at > self.now
            {
                self.prolong(wish.name, id, ttl);
                self.shrink(*ticket, with.most);
            }
        }
    }

    /// Gives a ticket a new lease, which may end earlier than the one before.
    fn prolong(&mut self, name: usize, id: Id, ttl: u64) {
        let (known, _) = self.queues[name].find(id).unwrap();
        let end = self.now + ttl;
        let is_shorter = end < known.expires_at;
        known.expires_at = end;
        if is_shorter {
            // The same renewal may ask for fewer permits, so that the ticket holds only then.
            let soonest = self.soonest(name).unwrap_or(end);
            self.shortened[name].push(soonest);
        }
    }

    fn shrink(&mut self, ticket: usize, most: Option<u32>) {
        if let Some(most) = most {
            self.freed[self.wishes[ticket].name] = true;
            self.queues[self.wishes[ticket].name].shrink(self.ids[ticket], most);
        }
    }

    pub(super) fn renewed(
        &mut self,
        ticket: usize,
        with: With,
        answer: Renewed,
        wakes: &[(usize, Wake)],
    ) -> Result<(), String> {
        let (wish, ttl) = (self.wishes[ticket], self.ttl(ticket, with));
        let id = self.ids[ticket];
        if self.queues[wish.name].find(id).is_none() {
            if self.expired.contains(&ticket) {
                self.settle_if_looked(wish.name, wakes);
            }
            return expect(answer, Renewed::Lost);
        }
        self.settle(wish.name, Some(ticket));
        let Some((known, _)) = self.queues[wish.name].find(id) else {
            return expect(answer, Renewed::Lost);
        };
        let number = known.number;
        self.prolong(wish.name, id, ttl);
        self.shrink(ticket, with.most);
        self.settle(wish.name, Some(ticket));
        let (ticket_number, ttl) = (number, Duration::from_millis(ttl));
        let answer = match answer {
            Renewed::Granted { valid_for } => Enqueued::Granted {
                ticket: ticket_number,
                valid_for,
            },
            Renewed::Waiting {
                valid_for,
                recheck_in,
                ..
            } => Enqueued::Waiting {
                ahead: None,
                ticket: ticket_number,
                valid_for,
                recheck_in,
            },
            answer => return Err(format!("answered {answer:?}, but it is there")),
        };
        self.stands(ticket, number, ttl, answer)?;
        match self.manner.looks_after_batch {
            true => Ok(()),
            false => self.expect_rechecks(),
        }
    }

    pub(super) fn released(
        &mut self,
        ticket: usize,
        enqueue_may_follow: bool,
        answer: Released,
    ) -> Result<(), String> {
        let wish = self.wishes[ticket];
        if enqueue_may_follow {
            self.mark(ticket);
        }
        let is_there = self.queues[wish.name].find(self.ids[ticket]).is_some();
        let looks = is_there || !self.manner.by_id;
        if looks {
            self.settle(wish.name, Some(ticket));
        }
        let was_first = self.queues[wish.name].is_first_in_line(self.ids[ticket]);
        let (found, _) = self.queues[wish.name].remove(self.ids[ticket]);
        self.freed[wish.name] |= found;
        if looks {
            self.settle(wish.name, Some(ticket));
        }
        let is_checked_here = !self.manner.tells_in_its_own_way;
        if was_first && self.manner.tells_first && is_checked_here {
            self.tell_first(wish.name);
        }
        match answer {
            Released::Released | Released::NotFound if self.expired.contains(&ticket) => Ok(()),
            answer => expect(
                answer,
                match found {
                    true => Released::Released,
                    false => Released::NotFound,
                },
            ),
        }
    }

    fn mark(&mut self, ticket: usize) {
        let until = self.now + MARK;
        self.marks.insert(ticket, until);
        self.marks_until[self.wishes[ticket].name] = until;
    }

    fn is_marked(&self, ticket: usize) -> bool {
        let is_kept = self.marks.get(&ticket).is_some_and(|end| *end > self.now);
        is_kept && self.marks_until[self.wishes[ticket].name] > self.now
    }

    /// With sessions, the tickets of a client end when its session ends.
    pub(super) fn disconnect(&mut self, client: usize) {
        self.connected[client] = false;
        if !self.capability.sessions {
            return;
        }
        let of_client = |ticket: usize| self.wishes[ticket].client == client;
        if !self.manner.marks_outlive_sessions {
            self.marks.retain(|ticket, _| !of_client(*ticket));
        }
        for ticket in (0..self.wishes.len()).filter(|ticket| of_client(*ticket)) {
            let name = self.wishes[ticket].name;
            let (found, _) = self.queues[name].remove(self.ids[ticket]);
            self.freed[name] |= found;
        }
        for name in 0..NAMES {
            self.settle(name, None);
        }
    }

    fn shows(&self, name: usize, places: &[TicketInfo]) -> Result<(), String> {
        let all = self.queues[name].tickets().map(|(known, _)| known);
        let (live, expired): (Vec<_>, Vec<_>) = all.partition(|known| known.expires_at > self.now);
        let stored = self.queues[name].stored();
        let mut holders = self.queues[name].holders();
        let held = live
            .iter()
            .take_while(|known| holders.any(|holder| holder.id == known.id));
        let sizes = live.iter().map(|known| (known.permits, known.capacity));
        let granted = granted_of(sizes, stored, held.count());
        let shown = places
            .iter()
            .zip(&live)
            .enumerate()
            .all(|(at, (place, known))| {
                let remaining = Duration::from_millis(known.expires_at - self.now);
                let holds = at < granted;
                let told = known.payload.told;
                // A ticket that its client knows to be granted must hold. The client of each holder
                // must know of the grant.
                (holds || !told)
                    && (told || !holds || !expired.is_empty())
                    && place.ticket == known.number
                    && place.granted == holds
                    && place.permits == known.permits
                    && place.capacity == stored.unwrap_or(known.capacity)
                    && place.owner == known.payload.ticket.to_string()
                    && self.is_about(place.remaining, remaining)
            });
        if shown && places.len() == live.len() {
            return Ok(());
        }
        Err(format!(
            "shows {places:#?}, and there are {live:#?} at {}",
            self.now
        ))
    }

    fn note_exclusive(&mut self, ticket: usize, number: u64) -> Result<(), String> {
        let wish = self.wishes[ticket];
        // The ticket has fewer permits than requested if a renewal has made it smaller.
        let known = self.queues[wish.name].find(self.ids[ticket]);
        let permits = known.map_or(wish.permits, |(known, _)| known.permits);
        let last = &mut self.exclusive[wish.name];
        // Under a stored capacity, a ticket with these permits is not alone.
        if permits < wish.capacity || self.resized[wish.name] {
            return Ok(());
        }
        if number < *last {
            return Err(format!("exclusively granted: {number}, after {last}"));
        }
        *last = number;
        Ok(())
    }

    pub(super) fn lose_data(&mut self) {
        for name in 0..NAMES {
            self.queues[name] = Queue::default();
            self.exclusive[name] = 0;
        }
        self.marks.clear();
        self.marks_until = [0; NAMES];
        self.expired.clear();
    }

    /// If the key with the holders' ends is evicted, the store computes the ends again. If the key
    /// with the state of the name is evicted, its tickets are gone.
    pub(super) fn evict(&mut self, name: usize, key: Key) {
        if key == Key::Ends {
            return;
        }
        self.queues[name] = Queue::default();
        self.exclusive[name] = 0;
        // The marks are keys of their own. A later mark makes the store see them again.
        self.marks_until[name] = 0;
    }

    /// Whether the store may have to wake a ticket of this client.
    pub(super) fn waits(&self, client: usize) -> bool {
        let tickets = self.queues.iter().flat_map(Queue::tickets);
        let waiting = tickets.filter(|(known, _)| !known.payload.told);
        waiting
            .map(|(known, _)| self.wishes[known.payload.ticket].client)
            .any(|of| of == client)
    }

    fn soonest(&self, name: usize) -> Option<u64> {
        self.queues[name]
            .holders()
            .map(|known| known.expires_at)
            .min()
    }

    /// Only the first waiter in line rechecks at the end of a holder's lease.
    fn recheck(&self, name: usize, number: u64) -> Option<u64> {
        if self.capability.sessions {
            return None;
        }
        let (first, _) = self.queues[name].tickets().find(|(_, holds)| !holds)?;
        (first.number == number).then(|| self.soonest(name))?
    }

    /// Whether the store may have asked a waiter for a recheck that is not the first in line. Redis
    /// does so in two cases: a grant that no client hears of, because no earlier waiter would learn
    /// when this grant ends; and a lease that was made shorter, if all earlier waiters hear nothing.
    /// The recheck is ten milliseconds later than the end, so that it has certainly come.
    fn is_told_to_look_again(
        &self,
        name: usize,
        number: u64,
        recheck_in: Option<Duration>,
    ) -> bool {
        let Some((unheard, shown)) = self.manner.unheard.zip(recheck_in) else {
            return false;
        };
        let hears =
            |known: &Ticket<Known>| self.connected[self.wishes[known.payload.ticket].client];
        let is_cut_short =
            |known: &Ticket<Known>| !hears(known) && known.expires_at <= self.now + unheard;
        let shown_in_time = shown <= Duration::from_millis(unheard + 10);
        if shown_in_time && self.queues[name].holders().any(is_cut_short) {
            return true;
        }
        let mut earlier = self.queues[name]
            .tickets()
            .filter(|(known, holds)| !holds && known.number < number);
        let shown = shown.saturating_sub(Duration::from_millis(10));
        let is_end = |at: &u64| self.is_about(shown, Duration::from_millis(at - self.now));
        !self.shortened[name].is_empty()
            && !earlier.any(|(known, _)| hears(known))
            && self.soonest(name).iter().any(is_end)
    }

    fn about(&self, shown: Option<Duration>, at: Option<u64>, what: &str) -> Result<(), String> {
        let expected = at.map(|at| Duration::from_millis(at - self.now));
        let same = match (shown, expected) {
            (Some(shown), Some(expected)) => self.is_about(shown, expected),
            (shown, expected) => shown == expected,
        };
        match same {
            true => Ok(()),
            false => Err(format!("{what} is {shown:?} and should be {expected:?}")),
        }
    }

    /// Compares two times. The server's clock runs by itself, so a difference of `slack` is
    /// allowed.
    fn is_about(&self, shown: Duration, expected: Duration) -> bool {
        shown <= expected && expected <= shown + Duration::from_millis(self.manner.slack)
    }
}

fn expect<T: PartialEq + std::fmt::Debug>(answer: T, expected: T) -> Result<(), String> {
    if answer == expected {
        return Ok(());
    }
    Err(format!("answered {answer:?}, and should {expected:?}"))
}
