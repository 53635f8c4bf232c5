//! Tests with random histories of a store. After each step, the test compares the state of the
//! store with the pure rule, [`Queue`]. The state is the holders and the waiters, their order and
//! numbers, and the wake-ups that the store has sent.
//!
//! The histories call the verbs of the store directly, without the core. So calls come late, twice,
//! in batches, and for tickets that are gone, over connections that open and close. Facts about the
//! core are in the other files.

mod model;
mod world;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::Locks;
use lockcore::backend::{Enqueued, FULL};
use tests::stores::Histories;

use crate::hostile::{random_id, request, stranger, with};
use crate::store::{DEFAULT, Kind, PATIENCE, SOON, Store, begin, give_back, tickets};
use world::World;

const CLIENTS: usize = 3;
const NAMES: usize = 2;
/// How many of the last requests of a history may get the ticket of another request.
const ADOPTERS: usize = 3;
const NAMESPACE: &str = "test";

/// The capacity that the clients state that change the stored capacity.
const STATED: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// Time passes in multiples of seven seconds, and every lease lasts three seconds more than such a
/// multiple. A real server's clock also runs by itself. With these numbers no step comes close to
/// the end of a lease.
const STRIDE: u64 = 7_000;
const TTLS: [u64; 4] = [10_000, 17_000, 24_000, 59_000];
/// How long a store promises to keep a mark.
const MARK: u64 = 60_000;
const DAY_MICROS: u64 = 86_400_000_000;

pub(crate) fn facts(kind: Kind) -> Vec<Trial> {
    let Some(played) = kind.histories() else {
        return Vec::new();
    };
    let needs = || kind.available().and_then(|()| (played.available)());
    let fact = |name: &str, histories, steps| {
        let name = format!("{}::histories::{name}", kind.name());
        tests::fact::fact(name, needs(), move || run(kind, played, histories, steps))
    };
    let Histories {
        short,
        long,
        manner,
        ..
    } = played;
    let mut facts = vec![fact("short_histories_keep_to_the_rule", short, 25)];
    if tests::fact::long() {
        facts.push(fact(
            "more_short_histories_keep_to_the_rule",
            10 * short,
            25,
        ));
        facts.push(fact("long_histories_keep_to_the_rule", long, 150));
    }
    if manner.tells_first {
        facts.extend(crate::store_facts![kind, DEFAULT;
            the_next_in_line_rechecks_a_dead_holder_when_the_first_has_left
        ]);
    }
    facts
}

/// The renewals of this waiter are twenty seconds apart, so it learns of the holder's end by a
/// recheck.
async fn the_next_in_line_rechecks_a_dead_holder_when_the_first_has_left(store: Store) {
    let dead = request(&store, "a", &random_id());
    let connection = stranger(&store).await;
    let holds = connection
        .enqueue(Arc::clone(&dead), PATIENCE)
        .await
        .unwrap();
    assert!(matches!(holds, Enqueued::Granted { .. }), "{holds:?}");
    let client = || store.client_with(Locks::builder().op_timeout(SOON));
    let (first, next) = (client(), client());
    let lock = |locks: &Locks| locks.mutex("a").ttl(Duration::from_secs(60)).wait(SOON);
    let leaves = begin(lock(&first));
    tickets(&first, "a", 2).await;
    let waits = begin(lock(&next));
    tickets(&next, "a", 3).await;
    let ends_soon = with(&dead, |request| request.ttl = Duration::from_secs(1));
    connection.renew(vec![ends_soon], PATIENCE).await.unwrap();

    leaves.abort();

    give_back(waits.await.unwrap().unwrap()).await;
    connection.close().await;
}

fn run(kind: Kind, played: Histories, histories: u64, steps: usize) {
    // The runtime has one thread, so that no wake-up or answer has to change the thread.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut world = World::new(played, kind.capability()).await;
        let began = Instant::now();
        for seed in 0..histories {
            let history = History::random(seed, steps);
            if let Err(complaint) = world.play(&history).await {
                let (history, complaint) = world.shrink(history, complaint).await;
                panic!("seed {seed} of {steps} steps: {complaint}\n{history}");
            }
        }
        println!(
            "{}: {histories} histories of {steps} steps in {:?}",
            kind.name(),
            began.elapsed()
        );
    });
}

/// The steps of one history, in order. A step names a request by its index in `requests`, so that
/// any step can be left out.
#[derive(Clone, Debug)]
struct History {
    requests: Vec<Wish>,
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug)]
struct Wish {
    client: usize,
    name: usize,
    permits: u32,
    capacity: u32,
    ttl: u64,
    wait: bool,
    seen: Seen,
}

/// Which tokens the client says it has seen.
#[derive(Clone, Copy, Debug)]
enum Seen {
    What,
    AnHourAhead,
    AYearAhead,
}

#[derive(Clone, Debug)]
enum Step {
    /// Sends the request of a ticket. The store may have this ticket already, may have had it, or
    /// may have released it.
    Enqueue(usize),
    Renew(Vec<usize>, With),
    Release(Vec<usize>, EnqueueMayFollow),
    /// Gives a ticket the id of another request, whose client has it from then on.
    Adopt {
        from: usize,
        to: usize,
    },
    /// Stores a capacity, or forgets it.
    Resize {
        client: usize,
        name: usize,
        capacity: Option<u32>,
        order: Order,
    },
    Pass(u64),
    Disconnect(usize),
    Connect(usize),
    LoseData,
    /// On Redis only: the server evicts one of the keys of a name.
    Evict(usize, Key),
}

type EnqueueMayFollow = bool;

/// When a change of the stored capacity arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    InTime,
    Twice,
    /// After another change, of which its client does not know.
    Late,
}

/// How a renewal differs from the enqueue.
#[derive(Clone, Copy, Debug, Default)]
struct With {
    /// The upper limit for the permits of the tickets.
    most: Option<u32>,
    ttl: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    State,
    Ends,
}

impl History {
    fn random(seed: u64, steps: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let requests = (0..6 + steps / 6 + ADOPTERS)
            .map(|_| Wish::random(&mut random))
            .collect::<Vec<_>>();
        let steps = (0..steps)
            .map(|_| Step::random(&mut random, requests.len()))
            .collect();
        Self { requests, steps }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{step:?}")?;
            if let Step::Enqueue(ticket) | Step::Adopt { to: ticket, .. } = step {
                writeln!(f, "    {:?}", self.requests[*ticket])?;
            }
        }
        Ok(())
    }
}

impl Wish {
    fn random(random: &mut fastrand::Rng) -> Self {
        let name = random.usize(..NAMES);
        // The first name is a read/write lock and the second a semaphore. Some requests state a
        // wrong capacity on purpose.
        let mut capacity = [FULL, STATED][name].get();
        if random.u8(..20) == 0 {
            capacity = 5;
        }
        let permits = match capacity == FULL.get() {
            true => random.choice([1, capacity]).unwrap(),
            false => random.u32(1..=capacity),
        };
        Self {
            client: random.usize(..CLIENTS),
            name,
            permits,
            capacity,
            ttl: random.choice(TTLS).unwrap(),
            wait: random.u8(..5) > 0,
            seen: match random.u8(..40) {
                0 => Seen::AnHourAhead,
                1 => Seen::AYearAhead,
                _ => Seen::What,
            },
        }
    }
}

impl With {
    fn random(random: &mut fastrand::Rng) -> Self {
        let most = random.choice([1, 1, 2, 3]).filter(|_| random.u8(..4) == 0);
        let ttl = random.choice(TTLS).filter(|_| random.u8(..4) == 0);
        Self { most, ttl }
    }
}

impl Step {
    fn random(random: &mut fastrand::Rng, requests: usize) -> Self {
        let some = |random: &mut fastrand::Rng| {
            let count = random.choice([1, 1, 1, 2, 4]).unwrap();
            (0..count).map(|_| random.usize(..requests)).collect()
        };
        match random.u8(..100) {
            0..40 => Self::Enqueue(random.usize(..requests)),
            40..57 => Self::Renew(some(random), With::random(random)),
            57..71 => Self::Release(some(random), random.u8(..4) == 0),
            71..79 => Self::Adopt {
                from: random.usize(..requests),
                to: requests - 1 - random.usize(..ADOPTERS),
            },
            79..84 => Self::Resize {
                client: random.usize(..CLIENTS),
                name: usize::from(random.u8(..8) > 0),
                capacity: Some(random.u32(..7)).filter(|_| random.u8(..3) > 0),
                order: random
                    .choice([Order::InTime, Order::InTime, Order::Twice, Order::Late])
                    .unwrap(),
            },
            84..96 => Self::Pass(random.choice([1, 1, 1, 2, 9]).unwrap()),
            96 => Self::Disconnect(random.usize(..CLIENTS)),
            97 => Self::Connect(random.usize(..CLIENTS)),
            98 => Self::LoseData,
            _ => Self::Evict(
                random.usize(..NAMES),
                random.choice([Key::State, Key::Ends]).unwrap(),
            ),
        }
    }
}
