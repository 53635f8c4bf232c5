//! Random histories: each answer of the store is compared with [the rule](crate::backend::queue) in
//! plain code.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use fastrand::Rng;

use super::fact::{Fact, group_of, that_queues};
use super::kit::{Asker, Store, with};
use super::operators;
use super::steps::{SOON, eventually};
use crate::backend::{
    Enqueued, FULL, Id, Released, Renewed, Request, Resize, ResizeOp, ResizeOutcome, queue,
};

pub(super) fn all() -> Vec<Fact> {
    group_of!["histories", false, that_queues; every_answer_of_a_random_history_follows_the_rule]
}

/// The number of steps of one history. There are few tickets at a time, so most combinations of
/// tickets occur.
const STEPS: usize = 150;

/// The most tickets of a name at a time.
const LONGEST: usize = 8;

/// A ticket that the store should have.
struct Ticket {
    request: Arc<Request>,
    number: u64,
    /// The client that has taken it.
    client: usize,
}

/// The tickets that the store should have of one name.
struct Line {
    name: &'static str,
    capacity: u32,
    /// Oldest first.
    tickets: Vec<Ticket>,
    last: u64,
    /// The capacity that is stored.
    stored: Option<u32>,
    /// At the last change of the stored capacity, the tickets up to this number held.
    through: u64,
}

impl Line {
    fn new(name: &'static str, capacity: u32) -> Self {
        Self {
            name,
            capacity,
            tickets: Vec::new(),
            last: 0,
            stored: None,
            through: 0,
        }
    }

    fn granted(&self) -> usize {
        let permits = self.tickets.iter().map(|ticket| ticket.request.permits);
        let shares = permits.map(|permits| (permits.get(), self.capacity));
        let held = self.tickets.iter().take_while(|t| t.number <= self.through);
        queue::granted_of(shares, self.stored, held.count())
    }

    /// Checks the ticket ahead that the store has named to the one at this position. The store may
    /// always leave the name out.
    fn names_rightly(&self, at: usize, client: usize, request: &Request, answer: Enqueued) {
        let Enqueued::Waiting {
            ahead: Some(named), ..
        } = answer
        else {
            return;
        };
        let ahead = &self.tickets[at.checked_sub(1).expect("nobody is ahead")];
        assert_eq!(named, ahead.request.id, "it is not right ahead");
        assert!(request.name_ahead, "nobody has asked for it");
        assert_eq!(ahead.client, client, "it is of another client");
        for permits in [request.permits, ahead.request.permits] {
            assert_eq!(permits, FULL, "it does not ask for everything");
        }
    }
}

async fn every_answer_of_a_random_history_follows_the_rule(store: Store) {
    let seed = Seed(fastrand::u64(..));
    let mut rng = Rng::with_seed(seed.0);
    let mut clients = [
        store.connect().await,
        store.connect().await,
        store.connect().await,
    ];
    let mut lines = [Line::new("catalog", FULL.get()), Line::new("pool", 3)];
    // The number of each ticket that was granted at some time.
    let mut granted = HashMap::new();
    for _ in 0..STEPS {
        let line = &mut lines[rng.usize(..2)];
        let client = rng.usize(..clients.len());
        let one_of_them = (!line.tickets.is_empty()).then(|| rng.usize(..line.tickets.len()));
        match (rng.u8(..8), one_of_them) {
            (6, _) if store.resizes() && line.capacity < FULL.get() => {
                let capacity = (rng.u8(..4) > 0).then(|| rng.u32(..6));
                resize(&store, &clients[client], line, capacity).await;
            }
            (0, Some(at)) => repeat(&clients, line, at).await,
            (1, Some(at)) => shrink(&clients, line, at).await,
            (2 | 3, Some(at)) => leave(&clients, line, at).await,
            (7, Some(at)) if store.adopts() => adopt(&clients, line, at, client).await,
            _ if line.tickets.len() < LONGEST => {
                let permits = match line.capacity {
                    3 => rng.u32(1..=3),
                    all if rng.bool() => all,
                    _ => 1,
                };
                let request = store.permits(line.name, permits, line.capacity);
                let request = with(&request, |request| {
                    request.wait = rng.u8(..4) > 0;
                    request.name_ahead = request.wait && rng.bool();
                });
                enqueue(&clients, line, client, request).await;
            }
            _ => continue,
        }
        agree(&store, &clients, line, &mut granted).await;
        for wake in clients.iter_mut().flat_map(Asker::woken_besides) {
            assert_eq!(granted.get(&wake.id), Some(&wake.ticket), "{wake:?}");
        }
    }
    for client in clients {
        client.close().await;
    }
}

/// Prints the seed when the history fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed of the history was {}", self.0);
        }
    }
}

async fn enqueue(clients: &[Asker], line: &mut Line, client: usize, request: Arc<Request>) {
    let answer = clients[client].enqueue(&request).await;
    line.names_rightly(line.tickets.len(), client, &request, answer);
    let (number, holds) = match answer {
        Enqueued::Granted { ticket, .. } => (ticket, true),
        Enqueued::Waiting { ticket, .. } => (ticket, false),
        Enqueued::Busy { .. } if !request.wait => (0, false),
        other => panic!("{other:?}"),
    };
    line.tickets.push(Ticket {
        request,
        // The number is 0 if the request took no ticket. It then counts as the youngest ticket.
        number: if number > 0 { number } else { u64::MAX },
        client,
    });
    // A client that learns of releases from events may see only a moment later that its ticket
    // holds.
    let may_hold = line.granted() == line.tickets.len();
    assert!(holds == may_hold || may_hold && number > 0, "{answer:?}");
    if number == 0 {
        line.tickets.pop();
        return;
    }
    assert!(number > line.last, "{number} after {}", line.last);
    line.last = number;
}

/// The client sends the request a second time.
async fn repeat(clients: &[Asker], line: &Line, at: usize) {
    let ticket = &line.tickets[at];
    let answer = clients[ticket.client].enqueue(&ticket.request).await;
    let (Enqueued::Granted { ticket: number, .. } | Enqueued::Waiting { ticket: number, .. }) =
        answer
    else {
        panic!("{answer:?}");
    };
    assert_eq!(number, ticket.number);
    line.names_rightly(at, ticket.client, &ticket.request, answer);
}

/// A client changes the stored capacity.
async fn resize(store: &Store, client: &Asker, line: &mut Line, capacity: Option<u32>) {
    let holders = line.granted();
    let request = |op| {
        let (name, id) = (store.name(line.name), Id::draw().unwrap());
        Arc::new(Resize::new(name, id, op))
    };
    let read = client.resize(&request(ResizeOp::Read)).await;
    assert_eq!(read.capacity, line.stored);
    let op = ResizeOp::Set {
        capacity,
        after: read.change,
        stated: NonZeroU32::new(line.capacity).unwrap(),
    };
    let resized = client.resize(&request(op)).await;
    assert_eq!(resized.outcome, ResizeOutcome::Applied);
    assert_eq!(resized.capacity, capacity);
    line.stored = capacity;
    if let Some(last) = line.tickets[..holders].last() {
        line.through = last.number;
    }
}

async fn shrink(clients: &[Asker], line: &mut Line, at: usize) {
    let ticket = &mut line.tickets[at];
    let smaller = with(&ticket.request, |request| {
        request.permits = std::num::NonZeroU32::MIN;
    });
    let answer = clients[ticket.client].renew(&smaller).await;
    assert!(is_there(&answer), "{answer:?}");
    ticket.request = smaller;
}

/// A client takes a ticket over. Only a ticket that holds can be taken over.
async fn adopt(clients: &[Asker], line: &mut Line, at: usize, client: usize) {
    let holds = at < line.granted();
    let ticket = &mut line.tickets[at];
    let ours = with(&ticket.request, |request| {
        request.id = Id::draw().unwrap();
        request.wait = false;
    });
    let had = ticket.request.id;
    let answer = clients[client].adopt(had, ticket.number, &ours).await;
    if !holds {
        assert_eq!(answer, Enqueued::Gone);
        return;
    }
    assert!(
        matches!(answer, Enqueued::Granted { ticket: number, .. } if number == ticket.number),
        "{answer:?}"
    );
    let renewed = clients[ticket.client].renew(&ticket.request).await;
    assert_eq!(renewed, Renewed::Lost);
    (ticket.request, ticket.client) = (ours, client);
}

async fn leave(clients: &[Asker], line: &mut Line, at: usize) {
    let ticket = line.tickets.remove(at);
    let client = &clients[ticket.client];
    assert_eq!(client.release(&ticket.request).await, Released::Released);
    assert_eq!(client.release(&ticket.request).await, Released::NotFound);
    assert_eq!(client.renew(&ticket.request).await, Renewed::Lost);
}

/// Checks that each ticket holds or waits as it should. A client may learn of a release a moment
/// later.
async fn agree(store: &Store, clients: &[Asker], line: &Line, granted: &mut HashMap<Id, u64>) {
    let holds = line.granted();
    for (at, ticket) in line.tickets.iter().enumerate() {
        let client = &clients[ticket.client];
        if at < holds {
            granted.insert(ticket.request.id, ticket.number);
        }
        eventually("the store agrees with the rule", SOON, async || {
            let answer = client.renew(&ticket.request).await;
            assert!(is_there(&answer), "{answer:?}");
            let is_granted = matches!(answer, Renewed::Granted { .. });
            assert!(at < holds || !is_granted, "a waiter holds too early");
            is_granted == (at < holds)
        })
        .await;
    }
    let shown = clients[0].inspect(store.name(line.name)).await;
    let shown: Vec<_> = shown
        .iter()
        .map(|ticket| (ticket.ticket, ticket.granted))
        .collect();
    let expected = line.tickets.iter().enumerate();
    let expected: Vec<_> = expected
        .map(|(at, ticket)| (ticket.number, at < holds))
        .collect();
    assert_eq!(shown, expected);
    if store.lists() {
        operators::agrees(&clients[0], store, line.name, 1000).await;
    }
}

fn is_there(answer: &Renewed) -> bool {
    matches!(answer, Renewed::Granted { .. } | Renewed::Waiting { .. })
}
