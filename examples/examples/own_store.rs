//! A store that is implemented outside of lockcore: `cargo run --release --example own_store`.
//!
//! It keeps tickets in the memory of this process. It uses the queue rule that lockcore provides as
//! plain code, and wakes every waiter that gets a lock by a release. Loops, deadlines, renewals,
//! re-entry and clean-up are part of lockcore. The example checks every fact that a store has to
//! keep, and then uses the store like any other.

use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockcore::Locks;
use lockcore::backend::queue::{NewTicket, NoTicket, Queue};
use lockcore::backend::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Fault, Id, Name, News,
    Released, Renewed, Request, StoreError, TicketInfo, Wake,
};
use lockcore::testing::conformance;

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let board = Arc::new(Board::default());
    let locks = Locks::with_backend(board.clone())?;
    Ok(examples::tell([&locks], story(board, locks.clone())).await)
}

async fn story(board: Arc<dyn Backend>, locks: Locks) -> Result<(), Box<dyn Error + Send + Sync>> {
    let capability = board.capability();
    conformance::check_all(move || Arc::clone(&board)).await;
    let mut facts = conformance::facts();
    facts.retain(|fact| fact.applies_to(&capability).is_ok());
    let facts = facts.len();
    let guard = locks.mutex("order:42").acquire().await?;
    let token = guard.fencing_token()?;
    println!("{facts} facts are true of it, and order 42 is ours under token {token}");
    guard.release().await?;
    Ok(())
}

/// How long the store remembers a release that came before its enqueue.
const REMEMBERED: Duration = Duration::from_secs(60);

const A_DAY_OF_MICROS: u64 = 86_400_000_000;

/// The store. Clones of the `Arc` are the same store.
#[derive(Debug, Default)]
struct Board(Arc<Mutex<Tickets>>);

#[derive(Debug, Default)]
struct Tickets {
    names: HashMap<Name, Queue<Owner>>,
    /// The last ticket number, for all names together, so that numbers rise even after an empty
    /// queue is removed.
    last: u64,
    /// Ids whose release came before their enqueue, and until when each is remembered.
    released: HashMap<Id, u64>,
    /// The latest connection of each client. Its tickets are woken there.
    clients: HashMap<u64, Weak<EventSink>>,
    /// Messages to send after the mutex is unlocked.
    news: Vec<(Arc<EventSink>, News)>,
}

/// The owner of a ticket.
#[derive(Clone, Debug)]
struct Owner {
    text: Arc<str>,
    /// The client: the value of [`EventSink::receiver`].
    client: u64,
}

impl Backend for Board {
    fn capability(&self) -> Capability {
        Capability::new().cross_process(false)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let client = Client {
            tickets: Arc::clone(&self.0),
            events: Arc::new(events),
        };
        client.at_the_store(|tickets| tickets.listen(&client.events));
        answer(Ok(Arc::new(client)))
    }
}

/// The connection of a client.
#[derive(Debug)]
struct Client {
    tickets: Arc<Mutex<Tickets>>,
    events: Arc<EventSink>,
}

impl Connection for Client {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        let owner = Owner {
            text: Arc::clone(&request.owner),
            client: self.events.receiver(),
        };
        answer(self.at_the_store(|tickets| tickets.enqueue(&request, owner)))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        answer(Ok(self.at_the_store(|all| {
            tickets.iter().map(|ticket| all.renew(ticket)).collect()
        })))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        answer(Ok(self.at_the_store(|all| {
            tickets.iter().map(|ticket| all.release(ticket)).collect()
        })))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        answer(Ok(self.at_the_store(|tickets| tickets.inspect(&name))))
    }

    fn forget(&self, _: Name) -> Answer<()> {
        answer(Ok(())) // the store keeps nothing for a name without tickets
    }

    fn check(&self) -> Answer<Vec<String>> {
        answer(Ok(Vec::new()))
    }
}

impl Client {
    /// Sends messages after the mutex is unlocked, because a client that gets one may call the
    /// store at once.
    fn at_the_store<T>(&self, act: impl FnOnce(&mut Tickets) -> T) -> T {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = act(&mut tickets);
        let news = std::mem::take(&mut tickets.news);
        drop(tickets);
        for (events, news) in news {
            match news {
                News::Granted(wake) => events.granted(wake),
                News::Recheck(id, after) => events.recheck(id, after),
                _ => {}
            }
        }
        outcome
    }
}

impl Tickets {
    fn listen(&mut self, events: &Arc<EventSink>) {
        self.clients.retain(|_, events| events.strong_count() > 0);
        self.clients
            .insert(events.receiver(), Arc::downgrade(events));
    }

    /// Notes wake-ups for the last `newly` tickets of a line that hold.
    fn wake(&mut self, name: &Name, newly: usize) {
        let Some(queue) = self.names.get(name) else {
            return;
        };
        for ticket in queue.holders().rev().take(newly) {
            if let Some(events) = self
                .clients
                .get(&ticket.payload.client)
                .and_then(Weak::upgrade)
            {
                let wake = Wake::new(ticket.id, ticket.number);
                self.news.push((events, News::Granted(wake)));
            }
        }
    }

    /// Removes the expired tickets of a name, and the line if it is empty then.
    fn expire(&mut self, name: &Name, now: u64) {
        if let Some(queue) = self.names.get_mut(name) {
            let newly = queue.expire(now);
            self.wake(name, newly);
        }
        self.end_if_empty(name);
    }

    fn end_if_empty(&mut self, name: &Name) {
        if self.names.get(name).is_some_and(Queue::is_empty) {
            self.names.remove(name);
        }
    }

    /// The least number of the next ticket. It follows the wall clock, so that tokens rise after a
    /// restart. It is also above the highest number that the client has seen, unless that is more
    /// than a day ahead.
    fn floor(&self, request: &Request) -> u64 {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH);
        let micros = clock.map_or(0, |clock| u64::try_from(clock.as_micros()).unwrap_or(0));
        let seen = Some(request.highest_seen).filter(|seen| *seen <= micros + A_DAY_OF_MICROS);
        micros.max(self.last + 1).max(seen.unwrap_or(0) + 1)
    }

    fn enqueue(&mut self, request: &Request, owner: Owner) -> Result<Enqueued, StoreError> {
        let now = now();
        if self.released.get(&request.id).is_some_and(|end| *end > now) {
            return Ok(Enqueued::Gone);
        }
        self.expire(&request.name, now);
        let floor = self.floor(request);
        let queue = self.names.entry(request.name.clone()).or_default();
        if queue.find(request.id).is_none() {
            let taken = queue.enqueue(NewTicket {
                id: request.id,
                permits: request.permits.get(),
                capacity: request.capacity.get(),
                expires_at: now + nanos(request.ttl),
                floor,
                wait: request.wait,
                payload: owner,
            });
            match taken {
                Ok((number, _)) => self.last = number,
                Err(NoTicket::Busy) => {
                    let retry_in = first_end(queue);
                    return Ok(Enqueued::Busy { retry_in });
                }
                Err(NoTicket::CapacityMismatch(in_use)) => {
                    return Ok(Enqueued::CapacityMismatch { in_use });
                }
                Err(error) => return Err(StoreError::new(Fault::Refused, format!("{error:?}"))),
            }
        }
        let valid_for = request.ttl;
        let recheck_in = first_end(queue).filter(|_| queue.is_first_in_line(request.id));
        Ok(match queue.find(request.id) {
            Some((ticket, holds)) => {
                ticket.expires_at = now + nanos(valid_for);
                let ticket = ticket.number;
                match holds {
                    true => Enqueued::Granted { ticket, valid_for },
                    false => Enqueued::Waiting {
                        ticket,
                        valid_for,
                        recheck_in,
                        ahead: None,
                    },
                }
            }
            None => Enqueued::Gone,
        })
    }

    fn renew(&mut self, request: &Request) -> Renewed {
        let now = now();
        self.expire(&request.name, now);
        let Some(queue) = self.names.get_mut(&request.name) else {
            return Renewed::Lost;
        };
        let newly = queue.shrink(request.id, request.permits.get());
        self.wake(&request.name, newly);
        let Some(queue) = self.names.get_mut(&request.name) else {
            return Renewed::Lost;
        };
        let valid_for = request.ttl;
        let recheck_in = first_end(queue).filter(|_| queue.is_first_in_line(request.id));
        match queue.find(request.id) {
            Some((ticket, holds)) => {
                ticket.expires_at = now + nanos(valid_for);
                match holds {
                    true => Renewed::Granted { valid_for },
                    false => Renewed::Waiting {
                        valid_for,
                        recheck_in,
                        grace: None,
                    },
                }
            }
            None => Renewed::Lost,
        }
    }

    fn release(&mut self, departure: &Departure) -> Released {
        let (now, request) = (now(), &departure.request);
        if departure.enqueue_may_follow {
            self.released.retain(|_, end| *end > now);
            self.released.insert(request.id, now + nanos(REMEMBERED));
        }
        // Remove expired tickets first: they must not get the permits that this release frees.
        self.expire(&request.name, now);
        let Some(queue) = self.names.get_mut(&request.name) else {
            return Released::NotFound;
        };
        let was_first = queue.is_first_in_line(request.id);
        let (found, newly) = queue.remove(request.id);
        // The ticket that is now the first in line does not know when to recheck.
        if was_first
            && let (Some(first), Some(after)) = (queue.first_in_line(), first_end(queue))
            && let Some(events) = self
                .clients
                .get(&first.payload.client)
                .and_then(Weak::upgrade)
        {
            self.news.push((events, News::Recheck(first.id, after)));
        }
        self.wake(&request.name, newly);
        self.end_if_empty(&request.name);
        match found {
            true => Released::Released,
            false => Released::NotFound,
        }
    }

    fn inspect(&mut self, name: &Name) -> Vec<TicketInfo> {
        let now = now();
        self.expire(name, now);
        let Some(queue) = self.names.get(name) else {
            return Vec::new();
        };
        let line = queue.tickets().map(|(ticket, holds)| {
            let remaining = Duration::from_nanos(ticket.expires_at - now);
            let owner = ticket.payload.text.to_string();
            let (permits, capacity) = (ticket.permits, ticket.capacity);
            TicketInfo::new(ticket.number, holds, permits, capacity, remaining, owner)
        });
        line.collect()
    }
}

/// The time until the first lease of a holder ends. The first waiter rechecks its ticket at this
/// time, because the end of a lease sends no wake-up.
fn first_end(queue: &Queue<Owner>) -> Option<Duration> {
    let first = queue.holders().map(|ticket| ticket.expires_at).min()?;
    Some(Duration::from_nanos(first.saturating_sub(now())))
}

/// Nanoseconds since the first call, by a monotonic clock.
fn now() -> u64 {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    nanos(BEGAN.elapsed())
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 2)
}

fn answer<T: Send + 'static>(answer: Result<T, StoreError>) -> Answer<T> {
    Box::pin(std::future::ready(answer))
}
