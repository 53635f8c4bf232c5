//! Two workers of a job queue (apalis) settle orders. For each order, one job runs at a time.
//!
//! ```text
//! cargo run --release --example job_queue                                # locks in a file: nothing to set up
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example job_queue
//! ```
//!
//! The workers share their locks in a store, as two processes would. If another job holds the lock
//! of an order, the job does not wait in the worker, and does not fail. The queue runs it again
//! later. The locks know nothing of the queue, and the queue knows nothing of the locks.
//! [`WorkLayer`] connects them; it can stand between any two tower services.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use apalis::layers::WorkerBuilderExt;
use apalis::layers::retry::RetryPolicy;
use apalis::prelude::{BoxDynError, MemoryStorage, Task, TaskSink, WorkerBuilder};
use apalis_core::error::RetryAfterError;
use examples::{Orders, expect};
use lockcore::Locks;
use lockcore_tower::WorkLayer;
use tokio::sync::Notify;
use tower::retry::backoff::{ExponentialBackoffMaker, MakeBackoff};
use tower::util::MapErrLayer;
use tower::util::rng::HasherRng;

type Failure = Box<dyn Error + Send + Sync>;

const WORKERS: usize = 2;
const ORDERS: u64 = 3;
const JOBS_PER_ORDER: usize = 4;
const JOBS: usize = ORDERS as usize * JOBS_PER_ORDER;

/// How long a job takes. It is long enough that all jobs for one order overlap.
const WORK: Duration = Duration::from_millis(50);

/// The shortest and the longest delay of a job whose order was locked.
const LATER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

#[derive(Clone, Debug)]
struct Settle {
    order: u64,
}

#[derive(Clone, Default)]
struct Story {
    orders: Orders,
    done: Arc<AtomicUsize>,
    failed: Arc<AtomicUsize>,
    over: Arc<Notify>,
    came_later: Arc<AtomicUsize>,
}

impl Story {
    /// Counts one job as done or as failed.
    fn count(&self, ended: &AtomicUsize) {
        ended.fetch_add(1, Ordering::SeqCst);
        if self.done.load(Ordering::SeqCst) + self.failed.load(Ordering::SeqCst) == JOBS {
            self.over.notify_one();
        }
    }
}

async fn work(number: usize, locks: Locks, story: Story) -> Result<(), Failure> {
    let mut queue = MemoryStorage::new();
    for job in 0..JOBS / WORKERS {
        let order = job as u64 % ORDERS;
        queue.push(Settle { order }).await?;
    }

    let lock = move |job: &Task<Settle>| {
        let lock = locks.mutex(format!("order:{}", job.args.order));
        Ok::<_, BoxDynError>(Some(lock.wait(Duration::ZERO)))
    };
    let came_later = Arc::clone(&story.came_later);
    // The queue repeats a job after this error (see `retry_if`), so the job is not counted as
    // failed.
    let one_at_a_time = WorkLayer::with_lock(lock).on_busy(move |job: Task<Settle>, error| {
        println!("worker {number}  order {}  later", job.args.order);
        came_later.fetch_add(1, Ordering::Relaxed);
        Err(BoxDynError::from(RetryAfterError::new(error, LATER.0)))
    });
    let mut backoff = ExponentialBackoffMaker::new(LATER.0, LATER.1, 0.5, HasherRng::new())?;
    let come_again = RetryPolicy::retries(1_000)
        .with_backoff(backoff.make_backoff())
        .retry_if(|error: &BoxDynError| error.is::<RetryAfterError>());

    // This layer is outside of the layer that repeats jobs, so an error here is the last error of
    // its job.
    let failing = story.clone();
    let tell_failure = MapErrLayer::new(move |error: BoxDynError| {
        println!("worker {number}  a job failed: {error}");
        failing.count(&failing.failed);
        error
    });

    let settle = move |job: Settle| {
        let story = story.clone();
        async move {
            let visit = story.orders.visit("settle", job.order);
            tokio::time::sleep(WORK).await;
            drop(visit);
            println!("worker {number}  order {}  settled", job.order);
            story.count(&story.done);
            Ok::<_, BoxDynError>(())
        }
    };
    let worker = WorkerBuilder::new(format!("worker-{number}"))
        .backend(queue)
        .layer(tell_failure)
        .retry(come_again)
        .layer(one_at_a_time)
        .build(settle);
    Ok(worker.run().await?)
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let folder = tempfile::tempdir()?;
    let clients: Vec<_> = (0..WORKERS)
        .map(|_| examples::locks_in(folder.path()))
        .collect::<Result<_, _>>()?;
    Ok(examples::tell(&clients, tell(clients.clone())).await)
}

async fn tell(clients: Vec<Locks>) -> Result<(), Failure> {
    let story = Story::default();
    let workers = clients.into_iter().enumerate();
    let workers = workers.map(|(number, locks)| work(number + 1, locks, story.clone()));
    // Workers run until they are dropped.
    tokio::select! {
        ended = futures_util::future::try_join_all(workers) => {
            ended?;
        }
        () = story.over.notified() => {}
    }

    let done = story.done.load(Ordering::Relaxed);
    let failed = story.failed.load(Ordering::Relaxed);
    let most = (0..ORDERS).map(|order| story.orders.most(order)).max();
    let later = story.came_later.load(Ordering::Relaxed);
    println!(
        "\n{done} jobs were done and {failed} failed, at most {} at an order at once; {later} times one came later",
        most.unwrap_or_default()
    );
    expect("all jobs done", done == JOBS)?;
    expect("one at a time for each order", most == Some(1))?;
    expect("some that came later", later > 0)
}
