//! `memory:`, the store inside the process. It excludes the tasks of that process from each other,
//! for tests, examples and services of one process. Each connect makes a new store. Clones of the
//! client share it.
//!
//! The store is the [pure rule](crate::queue) under a mutex. It measures time with the lease clock.
//! The wall clock only provides ticket numbers, so that tokens also rise over restarts of the
//! process.

mod adopt;
mod capacities;
mod counters;
mod line;
#[cfg(test)]
mod tests;
mod wakes;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use url::Url;

use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Fault, Listing, NameInUse, News, Page, Released, Renewed, Resize, Resized,
    StoreError, Summary, TicketInfo,
};
use crate::clock::{Clock, Instant};
use crate::error::Error;
use crate::hash::Prehashed;
use crate::name::Name;
use crate::queue::{self, NewTicket, NoTicket};
use crate::request::{Id, Request};
use crate::tls::Tls;
use counters::Counters;
use line::{Holder, Line, first_expiry, recheck_in};
use wakes::Wakes;

const DAY_MICROS: u64 = 86_400_000_000;

/// How long the mark stays when a release comes before its enqueue. If there is a server, a request
/// may wait in a socket for as long as this before the server reads it. Here a request is late only
/// if a test makes it late.
const MARK: Duration = Duration::from_secs(60);

/// Opens `memory:`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    if !url.path().is_empty() || url.has_host() {
        return Err(Error::config(
            "the memory store takes no address: write \"memory:\"; each connect is a store of its own",
        ));
    }
    Ok(Arc::new(Memory::new(Clock::BOOT)))
}

#[derive(Debug)]
pub(crate) struct Memory {
    store: Arc<Store>,
}

/// The tickets, and the connections that receive wake-ups. Answers at once.
#[derive(Debug)]
pub(crate) struct Store {
    clock: Clock,
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    lines: Prehashed<Name, Line>,
    /// An empty line with allocated memory, from a name that is not in use any more. The next name
    /// uses it. So a lock that is taken and released again and again allocates nothing here.
    spare: Line,
    /// The highest number that was given to any ticket, over all names. Because of this number, an
    /// empty queue can be dropped, and numbers rise all the same.
    last: u64,
    /// The marks: ids whose release came before their enqueue, and when each mark ends.
    marks: Prehashed<Id, Instant>,
    /// The last changes of capacities of lines that were dropped, and until when each is
    /// remembered. So a repetition of such a change does nothing.
    changes: Prehashed<Name, (Id, Instant)>,
    /// The latest connection of each receiver. Wake-ups for the receiver's tickets go to it.
    receivers: HashMap<u64, Weak<EventSink>>,
    counters: Counters,
}

#[derive(Debug)]
struct MemoryConnection {
    store: Arc<Store>,
    events: Arc<EventSink>,
}

impl Memory {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            store: Arc::new(Store::new(clock)),
        }
    }
}

impl Backend for Memory {
    fn capability(&self) -> Capability {
        Capability::new()
            .cross_process(false)
            .in_flight(u32::MAX)
            .answers_at_once(true)
            .tells_holders(true)
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            .counters(true)
            .watches(true)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let events = Arc::new(events);
        self.store.listen(&events);
        answer(Ok(Arc::new(MemoryConnection {
            store: Arc::clone(&self.store),
            events,
        })))
    }
}

impl Connection for MemoryConnection {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        answer(self.store.enqueue(request, self.events.receiver()))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        answer(Ok(tickets
            .iter()
            .map(|request| self.store.renew(request))
            .collect()))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        answer(Ok(tickets
            .iter()
            .map(|departure| self.store.release(departure))
            .collect()))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        answer(Ok(self.store.inspect(&name)))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        answer(Ok(self.store.list(&listing)))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        answer(Ok(self.store.ask_back(&name, id, ask)))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        answer(Ok(self.store.adopt(&adoption, self.events.receiver())))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        answer(Ok(self.store.resize(&resize)))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        self.store.forget(&name);
        answer(Ok(()))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        answer(self.store.count(&count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        self.store.watch(name, self.events.receiver());
        answer(Ok(()))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        self.store.unwatch(&name, self.events.receiver());
        answer(Ok(()))
    }

    fn check(&self) -> Answer<Vec<String>> {
        answer(Ok(Vec::new()))
    }
}

fn answer<T: Send + 'static>(outcome: Result<T, StoreError>) -> Answer<T> {
    Box::pin(std::future::ready(outcome))
}

impl Store {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            clock,
            names: Mutex::default(),
        }
    }

    /// From now on, wake-ups for this receiver go to `events`.
    pub(crate) fn listen(&self, events: &Arc<EventSink>) {
        let receiver = events.receiver();
        let mut names = self.names();
        let Names {
            receivers,
            counters,
            ..
        } = &mut *names;
        receivers.retain(|_, connection| connection.strong_count() > 0);
        // If this receiver had a connection before, the watches of that connection ended with it.
        counters.keep_watches(|other| other != receiver && receivers.contains_key(&other));
        receivers.insert(receiver, Arc::downgrade(events));
    }

    pub(crate) fn enqueue(
        &self,
        request: Arc<Request>,
        receiver: u64,
    ) -> Result<Enqueued, StoreError> {
        let now = self.clock.now();
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        if names.marks.get(&request.id).is_some_and(|end| *end > now) {
            return Ok(Enqueued::Gone);
        }
        let Names {
            lines,
            spare,
            last,
            receivers,
            ..
        } = &mut *names;
        let line = lines
            .entry(request.name.clone())
            .or_insert_with(|| std::mem::take(spare));
        wakes.collect(line.expire(now), &line.queue, receivers);
        if line.queue.find(request.id).is_some() {
            return Ok(line.ask_again(&request, now));
        }
        let floor = least_number(*last, request.highest_seen);
        let (id, valid_for) = (request.id, request.ttl);
        let end = now.after(valid_for).as_nanos();
        line.note_end(end);
        let ahead = line.ahead_of(&request, receiver);
        let queue = &mut line.queue;
        let outcome = queue.enqueue(NewTicket {
            id,
            permits: request.permits.get(),
            capacity: request.capacity.get(),
            expires_at: end,
            floor,
            wait: request.wait,
            payload: Holder {
                request,
                receiver,
                ask: None,
            },
        });
        wakes.tell_lingering(&outcome, queue, receivers);
        match outcome {
            Ok((ticket, true)) => {
                *last = ticket;
                Ok(Enqueued::Granted { ticket, valid_for })
            }
            Ok((ticket, false)) => {
                *last = ticket;
                Ok(Enqueued::Waiting {
                    ticket,
                    valid_for,
                    recheck_in: recheck_in(queue, id, now),
                    ahead,
                })
            }
            Err(NoTicket::Busy) => Ok(Enqueued::Busy {
                retry_in: first_expiry(queue, now),
            }),
            Err(NoTicket::CapacityMismatch(in_use)) => Ok(Enqueued::CapacityMismatch { in_use }),
            Err(NoTicket::Exhausted) => Err(StoreError::new(
                Fault::Refused,
                "ticket numbers are exhausted; choose another name or LOCK_NAMESPACE",
            )),
        }
    }

    pub(crate) fn renew(&self, request: &Request) -> Renewed {
        let now = self.clock.now();
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        let Names {
            lines, receivers, ..
        } = &mut *names;
        let Some(line) = lines.get_mut(&request.name) else {
            return Renewed::Lost;
        };
        if line.queue.find(request.id).is_none() {
            return Renewed::Lost;
        }
        wakes.collect(line.expire(now), &line.queue, receivers);
        let newly = line.queue.shrink(request.id, request.permits.get());
        wakes.collect(newly, &line.queue, receivers);
        let ends_sooner = line.ends_sooner(request, now);
        let renewed = line.renew(request, now);
        if ends_sooner {
            wakes.tell_first(&line.queue, receivers, now);
        }
        if line.is_over() {
            names.end_line(&request.name, now);
        }
        renewed
    }

    pub(crate) fn release(&self, departure: &Departure) -> Released {
        let request = &departure.request;
        let now = self.clock.now();
        // Declared before the mutex guard, so it is dropped after the guard. So the wake-ups are
        // sent after the mutex is unlocked.
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        let Names {
            lines,
            receivers,
            marks,
            ..
        } = &mut *names;
        if departure.enqueue_may_follow {
            marks.retain(|_, end| *end > now);
            marks.insert(request.id, now.after(MARK));
        }
        let Some(line) = lines.get_mut(&request.name) else {
            return Released::NotFound;
        };
        // A ticket that has expired and has not been removed counts as found.
        let ended = line.is_due(now) && line.queue.find(request.id).is_some();
        // Expired tickets are removed first, so that they do not get the permits that this release
        // frees.
        wakes.collect(line.expire(now), &line.queue, receivers);
        let was_first = line.queue.is_first_in_line(request.id);
        let (found, newly) = line.queue.remove(request.id);
        wakes.collect(newly, &line.queue, receivers);
        if was_first {
            wakes.tell_first(&line.queue, receivers, now);
        }
        if line.is_over() {
            names.end_line(&request.name, now);
        }
        if found || ended {
            Released::Released
        } else {
            Released::NotFound
        }
    }

    pub(crate) fn inspect(&self, name: &Name) -> Vec<TicketInfo> {
        let now = self.clock.now();
        let names = self.names();
        let line = names.lines.get(name);
        line.map_or_else(Vec::new, |line| Self::shown(line, now))
    }

    fn shown(line: &Line, now: Instant) -> Vec<TicketInfo> {
        // Expired tickets hold nothing, even if they have not been removed yet.
        let tickets = line.queue.tickets().map(|(ticket, _)| ticket);
        // The number of a ticket is usually the time of its enqueue by this clock, in microseconds.
        // It is a little more if many tickets are taken in one microsecond.
        let micros = wall_clock_micros();
        let live: Vec<_> = tickets
            .filter(|ticket| ticket.expires_at > now.as_nanos())
            .collect();
        let shares = live.iter().map(|ticket| (ticket.permits, ticket.capacity));
        // A ticket that holds keeps its permits, whatever the capacity is now.
        let holders = line.queue.holders();
        let held = holders.filter(|ticket| ticket.expires_at > now.as_nanos());
        let stored = line.queue.stored();
        let granted = queue::granted_of(shares, stored, held.count());
        let places = live.iter().enumerate().map(|(at, ticket)| {
            TicketInfo::new(
                ticket.number,
                at < granted,
                ticket.permits,
                stored.unwrap_or(ticket.capacity),
                now.until(Instant::from_nanos(ticket.expires_at)),
                ticket.payload.owner(),
            )
            .with_id(ticket.payload.request.id)
            .with_age(Duration::from_micros(micros.saturating_sub(ticket.number)))
        });
        places.collect()
    }

    /// Reads all names, and lists them in alphabetical order. A page begins behind the last name of
    /// the page before it.
    pub(crate) fn list(&self, listing: &Listing) -> Page {
        let now = self.clock.now();
        let names = self.names();
        let is_wanted = |name: &Name| {
            let text = name.as_str();
            let is_behind = |after: &Arc<str>| text > &**after;
            *name.namespace() == listing.namespace
                && text.starts_with(&listing.prefix)
                && listing.after.as_ref().is_none_or(is_behind)
        };
        let lines = names.lines.iter().filter(|(name, line)| {
            let mut ends = line.queue.tickets().map(|(ticket, _)| ticket.expires_at);
            is_wanted(name) && ends.any(|end| end > now.as_nanos())
        });
        let mut found: Vec<_> = lines.map(|(name, line)| (name.as_str(), line)).collect();
        found.sort_unstable_by_key(|(name, _)| *name);
        let more = found.len() > listing.limit as usize;
        found.truncate(listing.limit as usize);
        let next = found.last().filter(|_| more);
        let next = next.map(|(last, _)| Arc::from(*last));
        let found = found.into_iter().map(|(name, line)| {
            let used = NameInUse::new(name.to_owned());
            match listing.summaries {
                true => used.with_summary(Summary::of(&Self::shown(line, now))),
                false => used,
            }
        });
        Page::new(found.collect(), next)
    }

    pub(crate) fn ask_back(&self, name: &Name, id: Id, ask: Arc<str>) -> bool {
        let now = self.clock.now();
        let mut wakes = Wakes::but(id);
        let mut names = self.names();
        let Names {
            lines, receivers, ..
        } = &mut *names;
        let Some((ticket, _)) = lines.get_mut(name).and_then(|line| line.queue.find(id)) else {
            return false;
        };
        if ticket.expires_at <= now.as_nanos() {
            return false;
        }
        ticket.payload.ask = Some(ask);
        if let Some(events) = receivers.get(&ticket.payload.receiver) {
            let news = News::Recheck(id, Duration::ZERO);
            wakes.to.push((Weak::clone(events), news));
        }
        true
    }

    pub(crate) fn count(&self, count: &Count) -> Result<Counted, StoreError> {
        let now = self.clock.now();
        let mut names = self.names();
        let Names {
            counters,
            receivers,
            ..
        } = &mut *names;
        let (answer, watchers) = counters.carry_out(count, now, wall_clock_micros())?;
        let told: Vec<_> = watchers
            .filter_map(|receiver| receivers.get(receiver)?.upgrade())
            .collect();
        drop(names);
        for events in told {
            events.changed(count.name.clone());
        }
        Ok(answer)
    }

    pub(crate) fn watch(&self, name: Name, receiver: u64) {
        self.names().counters.watch(name, receiver);
    }

    pub(crate) fn unwatch(&self, name: &Name, receiver: u64) {
        self.names().counters.unwatch(name, receiver);
    }

    /// Forgets everything, like a server that restarts without its data.
    pub(crate) fn lose_data(&self) {
        let mut names = self.names();
        *names = Names {
            receivers: std::mem::take(&mut names.receivers),
            counters: names.counters.without_data(),
            ..Names::default()
        };
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Names {
    /// Removes the line of this name, which has no tickets, and keeps its memory for the next line.
    fn end_line(&mut self, name: &Name, now: Instant) {
        if let Some(mut line) = self.lines.remove(name) {
            line.queue.resize(None);
            if let Some(change) = line.change.take() {
                self.changes.retain(|_, (_, end)| *end > now);
                self.changes.insert(name.clone(), (change, now.after(MARK)));
            }
            self.spare = line;
        }
    }
}

/// The least number that a new ticket may get: later than the last one, and than the one that its
/// client has seen. A client that has seen a number of a later day has a clock that is wrong.
fn least_number(last: u64, highest_seen: u64) -> u64 {
    let micros = wall_clock_micros();
    let seen = Some(highest_seen).filter(|seen| *seen <= micros + DAY_MICROS);
    micros.max(last + 1).max(seen.map_or(0, |seen| seen + 1))
}

fn wall_clock_micros() -> u64 {
    // If the clock shows a time before 1970, this is 0. Ticket numbers are then counted up from the
    // last one.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(0))
}
