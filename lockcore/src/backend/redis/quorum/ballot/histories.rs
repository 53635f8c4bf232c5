//! Random histories of clients and nodes: requests and answers are delayed, and nodes lose tickets early. The numbers of
//! the grants must rise all the same.

use std::collections::VecDeque;

use super::*;

const NODES: usize = 3;
const CLIENTS: usize = 3;

/// What a node has of one name, as `scripts/enqueue.lua` and `scripts/raise.lua` keep it.
#[derive(Debug, Default)]
struct Node {
    last: u64,
    /// The request that has the ticket.
    ticket: Option<usize>,
    /// All requests that have had the ticket, in order.
    had: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Enqueue { asks: usize, proposed: u64 },
    Raise { asks: usize, number: u64 },
    Release { asks: usize },
}

#[derive(Debug)]
enum Reply {
    Enqueued(usize, Result<Enqueued, StoreError>),
    Raised(usize, bool),
}

#[derive(Debug, Default)]
struct Client {
    asks: Option<(usize, Ballot)>,
    holds: Option<usize>,
    /// The connection to each node.
    sent: [VecDeque<Message>; NODES],
    replies: [VecDeque<Reply>; NODES],
}

/// A grant, and the nodes that counted for it.
#[derive(Debug)]
struct Grant {
    number: u64,
    counts: Vec<usize>,
}

#[derive(Debug)]
struct History {
    random: fastrand::Rng,
    clock: u64,
    nodes: [Node; NODES],
    clients: [Client; CLIENTS],
    /// By request. `None` for a request that was not granted.
    grants: Vec<Option<Grant>>,
    /// How many nodes have granted with a greater number, after the number was chosen.
    late_and_greater: usize,
    /// How many tickets were lost.
    lost: usize,
}

impl Node {
    fn answer(&mut self, message: Message, clock: u64) -> Option<Reply> {
        match message {
            Message::Enqueue { asks, proposed } => {
                let answer = match self.ticket {
                    Some(_) => Enqueued::Busy { retry_in: None },
                    None => {
                        self.last = proposed.max(self.last + 1).max(clock);
                        self.ticket = Some(asks);
                        self.had.push(asks);
                        Enqueued::Granted {
                            ticket: self.last,
                            valid_for: Duration::from_secs(10),
                        }
                    }
                };
                Some(Reply::Enqueued(asks, Ok(answer)))
            }
            Message::Raise { asks, number } => {
                let has = self.ticket == Some(asks);
                if has {
                    self.last = self.last.max(number);
                }
                Some(Reply::Raised(asks, has))
            }
            Message::Release { asks } => {
                self.ticket = self.ticket.filter(|has| *has != asks);
                None
            }
        }
    }
}

impl History {
    fn new(seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            clock: 10,
            nodes: Default::default(),
            clients: Default::default(),
            grants: Vec::new(),
            late_and_greater: 0,
            lost: 0,
        }
    }

    fn step(&mut self) {
        let (at, of) = (self.random.usize(..NODES), self.random.usize(..CLIENTS));
        match self.random.u8(..100) {
            0..2 => self.clock += self.random.u64(..3),
            // Its clock has jumped, or somebody has removed the key. It remembers the last number.
            2..5 => self.lost += usize::from(self.nodes[at].ticket.take().is_some()),
            5..15 => self.begin_or_end(of),
            15..60 => {
                if let Some(message) = self.clients[of].sent[at].pop_front() {
                    // Clocks of nodes are a little apart.
                    let clock = self.clock + at as u64;
                    let reply = self.nodes[at].answer(message, clock);
                    self.clients[of].replies[at].extend(reply);
                }
            }
            _ => {
                if let Some(reply) = self.clients[of].replies[at].pop_front() {
                    self.hear(of, at, reply);
                }
            }
        }
    }

    fn begin_or_end(&mut self, of: usize) {
        let asks = self.grants.len();
        let proposed = self.clock + self.random.u64(..4);
        let client = &mut self.clients[of];
        if let Some(asks) = client.holds.take() {
            client.tell_all(Message::Release { asks });
        } else if client.asks.is_none() {
            self.grants.push(None);
            client.tell_all(Message::Enqueue { asks, proposed });
            let ballot = Ballot::new(NODES, NODES / 2 + 1, proposed, 0..NODES);
            client.asks = Some((asks, ballot));
        }
    }

    fn hear(&mut self, of: usize, at: usize, reply: Reply) {
        let client = &mut self.clients[of];
        let Some((asks, ballot)) = &mut client.asks else {
            return;
        };
        let asks = *asks;
        match reply {
            Reply::Enqueued(to, answer) if to == asks => {
                if let (Ok(Enqueued::Granted { ticket, .. }), Some(number)) =
                    (&answer, ballot.number)
                    && *ticket > number
                {
                    self.late_and_greater += 1;
                }
                for (at, number) in ballot.answered(at, answer) {
                    client.sent[at].push_back(Message::Raise { asks, number });
                }
            }
            Reply::Raised(to, has) if to == asks => ballot.raised(at, Ok(has)),
            Reply::Enqueued(..) | Reply::Raised(..) => return,
        }
        match ballot.verdict() {
            Verdict::Open => return,
            Verdict::Granted { ticket: number, .. } => {
                let votes = ballot.votes.iter().enumerate();
                let counts = votes.filter(|(_, vote)| matches!(vote, Vote::Counts { .. }));
                let counts = counts.map(|(at, _)| at).collect();
                self.grants[asks] = Some(Grant { number, counts });
                client.holds = Some(asks);
            }
            Verdict::Refused => client.tell_all(Message::Release { asks }),
        }
        client.asks = None;
    }
}

impl Client {
    fn tell_all(&mut self, message: Message) {
        self.sent.iter_mut().for_each(|to| to.push_back(message));
    }
}

#[test]
fn of_two_grants_the_one_that_comes_later_at_a_common_node_has_the_greater_number() {
    let (mut grants, mut late_and_greater, mut lost) = (0, 0, 0);
    for seed in 0..4_000 {
        let mut history = History::new(seed);
        for _ in 0..400 {
            history.step();
        }
        for (at, node) in history.nodes.iter().enumerate() {
            let granted = node.had.iter().filter_map(|asks| {
                let grant = history.grants[*asks].as_ref()?;
                grant.counts.contains(&at).then_some(grant.number)
            });
            let numbers: Vec<_> = granted.collect();
            assert!(
                numbers.is_sorted_by(|earlier, later| earlier < later),
                "seed {seed}, node {at}: {numbers:?}"
            );
        }
        grants += history.grants.iter().flatten().count();
        late_and_greater += history.late_and_greater;
        lost += history.lost;
    }
    println!("{grants} grants, {late_and_greater} late and greater, {lost} tickets lost");
    assert!(grants > 4_000 && late_and_greater > 300 && lost > 1_000);
}
