//! Tests with many tasks that want the same locks in every mode and give up at random moments. The
//! resource itself checks that holders do not overlap. Facts about one kind of giving up are in
//! `giving_up`, and facts about each verb of the store in `histories`.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{ErrorKind, Fair, Lock, Locks, Wait};
use tests::eventually::eventually;
use tests::witness::{FencedResource, Visit, Witness};
use tokio::task::{JoinSet, LocalSet};

use crate::giving_up::polled;
use crate::store::{Kind, LEASE, SOON, Store, assert_nothing_left};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store; a_crowd_never_overlaps_and_leaves_nothing]
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_crowd_at_a_store_that_fails_at_random_never_overlaps_and_leaves_nothing
        a_crowd_whose_leases_run_out_writes_nothing_late_and_leaves_nothing
    ]
}

const CATALOG: &str = "catalog";
const POOL: &str = "pool";
const POOL_SIZE: u32 = 5;

/// The resource that the locks protect, and counts of the outcomes.
#[derive(Debug)]
struct Resource {
    catalog: Witness,
    pool: Witness,
    /// The holders of the exclusive lock of the catalog write here.
    fence: FencedResource,
    served: AtomicU64,
    gave_up: AtomicU64,
    refused: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Mutex,
    Write,
    Read,
    Permits(u32),
}

impl Resource {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            catalog: Witness::readers_and_writers(),
            pool: Witness::of(POOL_SIZE),
            fence: FencedResource::default(),
            served: AtomicU64::new(0),
            gave_up: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    fn enter(&self, mode: Mode, token: u64) -> Visit<'_> {
        match mode {
            Mode::Mutex | Mode::Write => {
                let visit = self.catalog.write();
                self.fence.write(token).unwrap();
                visit
            }
            Mode::Read => self.catalog.read(),
            Mode::Permits(permits) => self.pool.enter(permits),
        }
    }

    /// Panics if two holders overlapped, or if there was nothing to check.
    fn judge(&self, what: &str, began: Instant) {
        let catalog = self.catalog.assert_no_overlap();
        let pool = self.pool.assert_no_overlap();
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        println!(
            "{what}: {} served, {} refused, {} gave up in {:?}",
            count(&self.served),
            count(&self.refused),
            count(&self.gave_up),
            began.elapsed()
        );
        assert!(catalog.most_at_once > 1 && pool.most_at_once > 1);
        assert!(count(&self.gave_up) > 0 && count(&self.refused) > 0);
    }
}

impl Mode {
    fn random(random: &mut fastrand::Rng) -> Self {
        match random.u8(..6) {
            0 => Self::Mutex,
            1 => Self::Write,
            2 | 3 => Self::Read,
            _ => Self::Permits(random.u32(1..=POOL_SIZE)),
        }
    }

    fn lock(self, locks: &Locks) -> Lock {
        match self {
            Self::Mutex => locks.mutex(CATALOG),
            Self::Write => locks.rwlock(CATALOG).write(),
            Self::Read => locks.rwlock(CATALOG).read(),
            Self::Permits(permits) => locks.semaphore(POOL, POOL_SIZE).permits(permits),
        }
    }
}

/// Acquires a random lock with a random wait. The future may be dropped at any poll. A caller with
/// the whole `patience` must not time out.
async fn visit(locks: &Locks, resource: &Resource, random: &mut fastrand::Rng, patience: Duration) {
    let mode = Mode::random(random);
    let wait = match random.u8(..4) {
        0 => Wait::For(Duration::ZERO),
        1 => Wait::For(patience.mul_f64(random.f64() / 100.0)),
        _ => Wait::For(patience),
    };
    let lock = mode.lock(locks).wait(wait);
    let (stays, waits_for_release) = (random.usize(..5), random.bool());
    let polls = match random.bool() {
        true => random.usize(1..12),
        false => usize::MAX,
    };
    let attempt = async {
        let guard = lock.acquire().await?;
        let visit = resource.enter(mode, guard.grant_id().as_u64());
        for _ in 0..stays {
            tokio::task::yield_now().await;
        }
        assert!(guard.is_valid());
        drop(visit);
        if waits_for_release {
            guard.release().await?;
        }
        Ok::<_, lockcore::Error>(())
    };
    let outcome = polled(attempt, polls).await;
    let count = match outcome.map(|outcome| outcome.map_err(|error| error.kind())) {
        None => &resource.gave_up,
        Some(Ok(())) => &resource.served,
        Some(Err(ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::Unknown)) => {
            &resource.refused
        }
        Some(Err(ErrorKind::Timeout)) if wait != Wait::For(patience) => &resource.refused,
        Some(Err(kind)) => panic!("{mode:?}, {wait:?}: {kind:?}"),
    };
    count.fetch_add(1, Ordering::Relaxed);
}

/// Starts several tasks for each client. All of them run at the same time.
fn crowd(clients: &[Locks; 3], resource: &Arc<Resource>, patience: Duration) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for locks in clients {
        for _ in 0..6 {
            let (locks, resource) = (locks.clone(), Arc::clone(resource));
            let mut random = fastrand::Rng::new();
            tasks.spawn(async move {
                for _ in 0..50 {
                    visit(&locks, &resource, &mut random, patience).await;
                }
            });
        }
    }
    tasks
}

fn rounds() -> usize {
    if tests::fact::long() { 50 } else { 4 }
}

async fn a_crowd_never_overlaps_and_leaves_nothing(store: Store) {
    let resource = Resource::new();
    let began = Instant::now();
    let clients = [store.client(), store.client(), store.client()];
    let observer = store.client();
    // In a line, this is shorter than the time until a waiter's renewal, which would hide a lost
    // wake-up. Without a line, a caller that wants many permits may have to wait until most of the
    // crowd has gone.
    let patience = match store.capability().queues {
        true => LEASE / 4,
        false => LEASE,
    };
    for _ in 0..rounds() {
        let tasks = crowd(&clients, &resource, patience);
        tasks.join_all().await;

        for name in [CATALOG, POOL] {
            assert_nothing_left(&store, &observer, name).await;
        }
    }
    resource.judge("a crowd", began);
}

/// Every request may fail. The store loses no data.
async fn a_crowd_at_a_store_that_fails_at_random_never_overlaps_and_leaves_nothing(_: Store) {
    let resource = Resource::new();
    let began = Instant::now();
    let kit = Kit::new();
    // The clock runs fast (see `Trouble`). The ttl is so long that no lease ends by itself. So a
    // ticket that is not released stays.
    let client = || {
        let builder = Locks::builder()
            .ttl(Duration::from_secs(7200))
            .op_timeout(Duration::from_secs(20));
        kit.client_with(builder).unwrap()
    };
    let clients = [client(), client(), client()];
    let observer = kit.another_process().client().unwrap();
    for _ in 0..rounds() {
        let mut tasks = crowd(&clients, &resource, Duration::from_secs(1800));
        let mut trouble = Trouble::at(&kit);
        while !tasks.is_empty() {
            trouble.makes_itself();
            trouble.goes_on().await;
            while let Some(done) = tasks.try_join_next() {
                done.unwrap();
            }
        }

        for _ in 0..100 {
            trouble.goes_on().await;
        }
        for name in [CATALOG, POOL] {
            let left = observer.inspect(name).await.unwrap();
            assert!(left.is_empty(), "{name}: {left:#?}");
        }
    }
    resource.judge("a crowd in trouble", began);
}

/// Processes are cut off for longer than their leases, at random moments. Each step of the work
/// under a lock is a write with its token. No write may be late. All tasks run on one thread, and
/// this thread also moves the clock.
async fn a_crowd_whose_leases_run_out_writes_nothing_late_and_leaves_nothing(store: Store) {
    let fair = store.fair;
    let crowd = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(crowd_whose_leases_run_out(fair));
    };
    tokio::task::spawn_blocking(crowd).await.unwrap();
}

async fn crowd_whose_leases_run_out(fair: Fair) {
    let kit = Kit::new();
    kit.clock().stop();
    let processes = [(); 4].map(|()| kit.another_process());
    let fence = Rc::new(FencedResource::default());
    let lost = Rc::new(Cell::new(0));
    let began = Instant::now();
    let mut random = fastrand::Rng::new();
    let mut round = 0;
    // Random processes are cut off.
    while round < rounds() || round < 100 && lost.get() < 5 {
        round += 1;
        let tasks = LocalSet::new();
        let mut left = Vec::new();
        for process in &processes {
            let builder = Locks::builder().fair(fair).ttl(Duration::from_secs(10));
            let locks = process.client_with(builder).unwrap();
            for task in 0..4 {
                let lock = match task {
                    0 => locks.rwlock(CATALOG).write(),
                    _ => locks.mutex(CATALOG),
                };
                let (lock, fence) = (lock.wait(Wait::Forever), Rc::clone(&fence));
                let lost = Rc::clone(&lost);
                let steps = random.usize(1..60);
                left.push(tasks.spawn_local(async move {
                    for _ in 0..4 {
                        let work = lock.run(async |held| {
                            for _ in 0..steps {
                                fence.write(held.grant_id().as_u64()).unwrap();
                                tokio::time::sleep(Duration::from_micros(100)).await; // work
                            }
                            Ok::<_, lockcore::Error>(())
                        });
                        match work.await.map_err(|error| error.kind()) {
                            Ok(()) | Err(ErrorKind::Unavailable | ErrorKind::Unknown) => {}
                            Err(ErrorKind::Lost(_)) => lost.set(lost.get() + 1),
                            Err(kind) => panic!("{kind:?}"),
                        }
                    }
                }));
            }
        }
        let trouble = async {
            while left.iter().any(|task| !task.is_finished()) {
                let cut_off = random.choice(&processes).unwrap();
                cut_off.freeze();
                for _ in 0..random.usize(20..60) {
                    kit.clock().advance(Duration::from_millis(500));
                    tokio::time::sleep(Duration::from_millis(1)).await; // how long the faults last
                }
                cut_off.thaw();
            }
        };
        tasks.run_until(trouble).await;
        for task in left {
            task.await.unwrap();
        }
    }

    let log = fence.log();
    println!(
        "{} writes, {} losses in {round} rounds, {:?}",
        log.accepted,
        lost.get(),
        began.elapsed()
    );
    assert_eq!(log.refused, 0);
    assert!(lost.get() >= 5 && log.accepted > 100);
    // If a clean-up gets no answer, the keeper repeats it after a pause on this clock. The clock
    // moves by two seconds at most here. In this time few leases end by themselves.
    let looks = kit.client().unwrap();
    eventually("nothing is left", SOON, async || {
        kit.clock().advance(Duration::from_micros(500));
        looks.inspect(CATALOG).await.unwrap().is_empty()
    })
    .await;
}

/// Makes requests, replies and connections fail at random. A second on the store's clock is two
/// milliseconds of real time.
struct Trouble<'a> {
    kit: &'a Kit,
    random: fastrand::Rng,
    /// Requests that are held back, and the time for which they have been.
    held: VecDeque<(Hold, Duration)>,
}

const STEP: Duration = Duration::from_secs(1);
/// How long a request is held back. After two operation timeouts without an answer, a client
/// releases its ticket, so this is longer. It is shorter than the minute for which the store
/// remembers the release.
const LATE: Duration = Duration::from_secs(50);

impl<'a> Trouble<'a> {
    fn at(kit: &'a Kit) -> Self {
        Self {
            kit,
            random: fastrand::Rng::new(),
            held: VecDeque::new(),
        }
    }

    fn makes_itself(&mut self) {
        let (kit, random) = (self.kit, &mut self.random);
        let verbs = [Verb::Connect, Verb::Enqueue, Verb::Renew, Verb::Release];
        let verb = random.choice(verbs).unwrap();
        let faults = [Fault::Retry, Fault::Refused, Fault::Unknown];
        match random.u8(..12) {
            0 | 1 => kit.lose_next_request(verb),
            2 | 3 => kit.lose_next_reply(verb),
            4 => kit.fail_next(verb, random.choice(faults).unwrap()),
            5 | 8 => self.held.push_back((kit.hold_next(verb), Duration::ZERO)),
            6 => kit.freeze(),
            7 => kit.break_connections(),
            _ => {}
        }
    }

    async fn goes_on(&mut self) {
        self.kit.clock().advance(STEP);
        tokio::time::sleep(Duration::from_millis(2)).await; // how long the faults last
        self.kit.thaw();
        for (_, age) in &mut self.held {
            *age += STEP;
        }
        while self.held.front().is_some_and(|(_, age)| *age >= LATE) {
            self.held.pop_front();
        }
    }
}
