//! `memory:`, the store inside the process: real exclusion between its tasks, for tests, examples and services of one
//! process. Each connect makes a new store; clones of its handle share it.
//!
//! It is the [pure rule](crate::queue) under a mutex. It measures time with the lease clock. The wall clock only
//! provides ticket numbers, so that tokens also rise over restarts of the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use url::Url;

use super::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Fault, News, Released,
    Renewed, StoreError, TicketInfo, Wake,
};
use crate::clock::{Clock, Instant};
use crate::error::Error;
use crate::hash::Prehashed;
use crate::name::Name;
use crate::queue::{self, NoTicket, Queue};
use crate::request::{Id, Request};
use crate::tls::Tls;

const DAY_MICROS: u64 = 86_400_000_000;

/// How long a release that came before its enqueue is remembered. On a server a request may wait in a socket for that
/// long. Here no request is late, unless a test makes it late.
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

/// The tickets, and the receivers of wake-ups. Answers at once.
#[derive(Debug)]
pub(crate) struct Store {
    clock: Clock,
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    queues: Prehashed<Name, Queue<Holder>>,
    /// The highest number that was ever given, over all names. With it an empty queue may be dropped, and numbers still
    /// rise.
    last: u64,
    /// Ids whose release came before their enqueue, and until when each is remembered.
    marks: Prehashed<Id, Instant>,
    /// The latest connection of each receiver. Its tickets are woken there.
    receivers: HashMap<u64, Weak<EventSink>>,
}

/// The data of a ticket that the rule does not need.
#[derive(Clone, Debug)]
struct Holder {
    owner: Arc<str>,
    receiver: u64,
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
        Capability::new().cross_process(false).in_flight(u32::MAX)
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
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
        answer(self.store.enqueue(&request, self.events.receiver()))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>> {
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

    fn forget(&self, _name: Name) -> Answer<()> {
        // A name that is not in use has no data here.
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
        let mut names = self.names();
        names
            .receivers
            .retain(|_, connection| connection.strong_count() > 0);
        names
            .receivers
            .insert(events.receiver(), Arc::downgrade(events));
    }

    pub(crate) fn enqueue(&self, request: &Request, receiver: u64) -> Result<Enqueued, StoreError> {
        let now = self.clock.now();
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        if names.marks.get(&request.id).is_some_and(|end| *end > now) {
            return Ok(Enqueued::Gone);
        }
        let Names {
            queues,
            last,
            receivers,
            ..
        } = &mut *names;
        let queue = queues.entry(request.name.clone()).or_default();
        wakes.collect(queue.expire(now.as_nanos()), queue, receivers);
        if queue.find(request.id).is_some() {
            return Ok(match renew(queue, request, now) {
                Renewed::Granted { valid_for } => Enqueued::Granted {
                    ticket: number(queue, request),
                    valid_for,
                },
                Renewed::Waiting {
                    valid_for,
                    recheck_in,
                } => Enqueued::Waiting {
                    ticket: number(queue, request),
                    valid_for,
                    recheck_in,
                },
                Renewed::Lost | Renewed::Failed => Enqueued::Gone,
            });
        }
        let micros = wall_clock_micros();
        let seen = Some(request.highest_seen).filter(|seen| *seen <= micros + DAY_MICROS);
        let floor = micros.max(*last + 1).max(seen.map_or(0, |seen| seen + 1));
        let holder = Holder {
            owner: Arc::clone(&request.owner),
            receiver,
        };
        let outcome = queue.enqueue(
            request.id,
            request.permits.get(),
            request.capacity.get(),
            now.after(request.ttl).as_nanos(),
            floor,
            request.wait,
            holder,
        );
        let valid_for = request.ttl;
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
                    recheck_in: recheck_in(queue, request, now),
                })
            }
            Err(NoTicket::Busy) => Ok(Enqueued::Busy {
                retry_in: first_expiry(queue, now),
            }),
            Err(NoTicket::CapacityMismatch(in_use)) => Ok(Enqueued::CapacityMismatch { in_use }),
            Err(NoTicket::Exhausted) => Err(StoreError::new(
                Fault::Refused,
                "ticket numbers are exhausted",
            )),
        }
    }

    pub(crate) fn renew(&self, request: &Request) -> Renewed {
        let now = self.clock.now();
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        let Names {
            queues, receivers, ..
        } = &mut *names;
        let Some(queue) = queues.get_mut(&request.name) else {
            return Renewed::Lost;
        };
        if queue.find(request.id).is_none() {
            return Renewed::Lost;
        }
        wakes.collect(queue.expire(now.as_nanos()), queue, receivers);
        let newly = queue.shrink(request.id, request.permits.get());
        wakes.collect(newly, queue, receivers);
        let renewed = renew(queue, request, now);
        names.drop_if_empty(&request.name);
        renewed
    }

    pub(crate) fn release(&self, departure: &Departure) -> Released {
        let request = &departure.request;
        let now = self.clock.now();
        // Declared before the mutex guard, so that the wake-ups are sent after the mutex is unlocked.
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        let Names {
            queues,
            receivers,
            marks,
            ..
        } = &mut *names;
        if departure.enqueue_may_follow {
            marks.retain(|_, end| *end > now);
            marks.insert(request.id, now.after(MARK));
        }
        let Some(queue) = queues.get_mut(&request.name) else {
            return Released::NotFound;
        };
        let found = queue.find(request.id).is_some();
        // Expired tickets go first: they must not get what this release frees.
        wakes.collect(queue.expire(now.as_nanos()), queue, receivers);
        let was_first = queue.is_first_in_line(request.id);
        wakes.collect(queue.remove(request.id).1, queue, receivers);
        if was_first {
            wakes.tell_first(queue, receivers, now);
        }
        names.drop_if_empty(&request.name);
        if found {
            Released::Released
        } else {
            Released::NotFound
        }
    }

    pub(crate) fn inspect(&self, name: &Name) -> Vec<TicketInfo> {
        let now = self.clock.now();
        let names = self.names();
        let Some(queue) = names.queues.get(name) else {
            return Vec::new();
        };
        // Expired tickets hold nothing, even if they have not been removed yet.
        let tickets = queue.tickets().map(|(ticket, _)| ticket);
        let live: Vec<_> = tickets
            .filter(|ticket| ticket.expires_at > now.as_nanos())
            .collect();
        let shares = live.iter().map(|ticket| (ticket.permits, ticket.capacity));
        let granted = queue::granted(shares);
        let places = live.iter().enumerate().map(|(at, ticket)| {
            TicketInfo::new(
                ticket.number,
                at < granted,
                ticket.permits,
                ticket.capacity,
                now.until(Instant::from_nanos(ticket.expires_at)),
                ticket.payload.owner.to_string(),
            )
        });
        places.collect()
    }

    /// Forgets everything, like a server that restarts without its data.
    pub(crate) fn lose_data(&self) {
        let mut names = self.names();
        *names = Names {
            receivers: std::mem::take(&mut names.receivers),
            ..Names::default()
        };
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Names {
    fn drop_if_empty(&mut self, name: &Name) {
        if self.queues.get(name).is_some_and(Queue::is_empty) {
            self.queues.remove(name);
        }
    }
}

fn renew(queue: &mut Queue<Holder>, request: &Request, now: Instant) -> Renewed {
    let Some((ticket, holds)) = queue.find(request.id) else {
        return Renewed::Lost;
    };
    ticket.expires_at = now.after(request.ttl).as_nanos();
    let valid_for = request.ttl;
    if holds {
        Renewed::Granted { valid_for }
    } else {
        Renewed::Waiting {
            valid_for,
            recheck_in: recheck_in(queue, request, now),
        }
    }
}

fn number(queue: &mut Queue<Holder>, request: &Request) -> u64 {
    queue
        .find(request.id)
        .map_or(0, |(ticket, _)| ticket.number)
}

/// Only the first in line has to notice that a holder's lease is over: its request removes that ticket, and wakes the
/// others. See also [`Wakes::tell_first`].
fn recheck_in(queue: &Queue<Holder>, request: &Request, now: Instant) -> Option<Duration> {
    queue
        .is_first_in_line(request.id)
        .then(|| first_expiry(queue, now))
        .flatten()
}

fn first_expiry(queue: &Queue<Holder>, now: Instant) -> Option<Duration> {
    let first = queue.holders().map(|ticket| ticket.expires_at).min()?;
    Some(now.until(Instant::from_nanos(first)))
}

/// Messages that are sent when this is dropped. It is declared before the mutex guard, so it is dropped after the mutex
/// is unlocked.
struct Wakes {
    to: Vec<(Weak<EventSink>, News)>,
    /// This ticket needs no wake-up: the answer to its own request tells it.
    asker: Id,
}

impl Wakes {
    fn but(asker: Id) -> Self {
        Self {
            to: Vec::new(),
            asker,
        }
    }

    /// Notes wake-ups for the last `newly` holders.
    fn collect(
        &mut self,
        newly: usize,
        queue: &Queue<Holder>,
        receivers: &HashMap<u64, Weak<EventSink>>,
    ) {
        let holders = queue.holders();
        let known = holders.len() - newly;
        for ticket in holders.skip(known) {
            if let Some(events) = receivers.get(&ticket.payload.receiver)
                && ticket.id != self.asker
            {
                let wake = Wake {
                    id: ticket.id,
                    ticket: ticket.number,
                };
                self.to.push((Weak::clone(events), News::Granted(wake)));
            }
        }
    }

    /// Notes a message for the ticket that has become the first in line, because another has left. It does not know yet
    /// when a holder's lease ends.
    fn tell_first(
        &mut self,
        queue: &Queue<Holder>,
        receivers: &HashMap<u64, Weak<EventSink>>,
        now: Instant,
    ) {
        if let Some(first) = queue.first_in_line()
            && let Some(events) = receivers.get(&first.payload.receiver)
            && let Some(after) = first_expiry(queue, now)
        {
            let news = News::Recheck(first.id, after);
            self.to.push((Weak::clone(events), news));
        }
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        for (events, news) in self.to.drain(..) {
            if let Some(events) = events.upgrade() {
                events.tell(news);
            }
        }
    }
}

fn wall_clock_micros() -> u64 {
    // Before 1970 the numbers only count up.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(0))
}
