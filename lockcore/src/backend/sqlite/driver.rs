//! The thread that has the SQLite file open for the whole process. It has one handle, and does one
//! job at a time. A job that has begun is finished, even if nobody waits for its answer any more.
//! This module decides which job is next. The handle is in `file`, the work of the jobs in
//! `tickets`, and the wake-ups in `events`.
//!
//! There is one handle, because otherwise the clients of a process would compete for the file's
//! lock, which has no queue. The handle has a thread of its own, because a lock on the file must
//! not depend on a runtime. A user may block a runtime, or end it in the middle of a transaction.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{mpsc, oneshot};

use super::events::Wakes;
use super::file::{File, Handle};
use super::{adopt, counters, tickets};
use crate::backend::{
    Adoption, Count, Counted, Departure, Enqueued, EventSink, Fault, Listing, Page, Released,
    Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::name::Name;
use crate::request::{Id, Request};

/// The receiver of a job's outcome.
pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Job {
    Join(EventSink, Reply<u64>),
    Leave(u64, u64),
    Enqueue(Arc<Request>, u64, Reply<Enqueued>),
    Renew(Vec<Arc<Request>>, Reply<Vec<Renewed>>),
    Release(Vec<Departure>, Reply<Vec<Released>>),
    Inspect(Name, Reply<Vec<TicketInfo>>),
    List(Listing, Reply<Page>),
    AskBack(Name, Id, Arc<str>, Reply<bool>),
    Adopt(Arc<Adoption>, u64, Reply<Enqueued>),
    Resize(Arc<Resize>, Reply<Resized>),
    Forget(Name, Reply<()>),
    Count(Arc<Count>, Reply<Counted>),
    Check(Reply<Vec<String>>),
}

/// A handle of the thread of one file. The thread ends when the last handle is dropped.
#[derive(Debug)]
pub(super) struct Driver {
    jobs: mpsc::UnboundedSender<Job>,
}

/// A thread that has a file open, is about to open it, or has not closed it yet.
struct Listed {
    /// The canonical path.
    file: PathBuf,
    number: u64,
    /// The process that started the thread. A forked child has a copy of this list, but not the
    /// threads.
    process: u32,
    driver: Weak<Driver>,
}

static DRIVERS: Mutex<Vec<Listed>> = Mutex::new(Vec::new());

impl Driver {
    /// The thread of a file. Starts one if there is none.
    pub(super) fn of(file: &Path) -> Result<Arc<Self>, StoreError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let process = std::process::id();
        let mut drivers = drivers();
        for listed in drivers.iter().filter(|listed| listed.file == file) {
            if listed.process != process {
                return Err(open_at_the_fork(file));
            }
            // A thread that has ended, even by a panic, is replaced.
            if let Some(driver) = listed.driver.upgrade()
                && !driver.jobs.is_closed()
            {
                return Ok(driver);
            }
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (jobs, to_do) = mpsc::unbounded_channel();
        let path = file.to_owned();
        std::thread::Builder::new()
            .name("lockcore-sqlite".into())
            .spawn(move || run(&path, OnTheList(number), to_do))
            .map_err(|error| {
                StoreError::new(
                    Fault::Retry,
                    format!("cannot start SQLite's thread: {error}"),
                )
            })?;
        let driver = Arc::new(Self { jobs });
        // The thread cannot have removed itself from the list yet, because it needs the mutex for
        // that.
        drivers.push(Listed {
            file: file.to_owned(),
            number,
            process,
            driver: Arc::downgrade(&driver),
        });
        Ok(driver)
    }

    /// Sends a job and waits for its outcome.
    ///
    /// The only await is for the reply. If the future is dropped there, the thread finishes the job
    /// if it has begun it, and otherwise does not do it. For a release this is safe, because the
    /// core sends it again. When the future of a release is dropped, the keeper takes the ticket
    /// over, and sends releases until one is answered. This is also true if the future is dropped
    /// together with its runtime. Only after the end of a client there is no keeper to do that. A
    /// ticket that is not released within the time for that end is freed when its lease ends.
    pub(super) async fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T, StoreError> {
        let (reply, outcome) = oneshot::channel();
        if !self.send(job(reply)) {
            return Err(StoreError::new(Fault::Retry, "SQLite: the file was closed"));
        }
        outcome.await.unwrap_or_else(|_| {
            // Only a panic of the thread drops a job without an answer.
            Err(StoreError::broken(
                "SQLite: the thread of the file has ended",
            ))
        })
    }

    pub(super) fn send(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }
}

fn drivers() -> MutexGuard<'static, Vec<Listed>> {
    DRIVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forked child cannot use a file that its parent had open. SQLite in the child has a copy of the
/// parent's record of locks on the file, and believes that the child has these locks. But the
/// system gives a child none of them. So a new handle in the child would work without any lock. The
/// next process that closes the file would then remove the log, and from then on the child would
/// exclude nobody.
fn open_at_the_fork(file: &Path) -> StoreError {
    let text = format!(
        "cannot use {}: the parent of this process had it open when it forked, and SQLite cannot open a file in both; fork \
         before the first lock is taken, or start the child as a program (exec)",
        file.display()
    );
    StoreError::new(Fault::Config, text)
}

/// Removes the thread from the list when it is dropped, even by a panic.
struct OnTheList(u64);

impl Drop for OnTheList {
    fn drop(&mut self) {
        drivers().retain(|listed| listed.number != self.0);
    }
}

/// The code of the thread.
fn run(path: &Path, listed: OnTheList, jobs: mpsc::UnboundedReceiver<Job>) {
    // No subscriber of the user runs on this thread, because a subscriber that blocks would
    // keep all clients from the file.
    let _quiet = tracing::dispatcher::set_default(&tracing::Dispatch::none());
    let mut jobs = Jobs::new(jobs);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            drop(listed);
            let text = format!("cannot start the runtime of SQLite's thread: {error}");
            return refuse_all(&mut jobs, &StoreError::new(Fault::Retry, text));
        }
    };
    runtime.block_on(async {
        let mut wakes = Wakes::default();
        let Err(error) = open_and_serve(path, &mut wakes, &mut jobs).await else {
            return;
        };
        // The thread leaves the list before it answers anybody. So a client that gets the error and
        // connects again starts another thread.
        drop(listed);
        refuse_all(&mut jobs, &error);
        // This drop tells all clients that their connection cannot be used any more.
        drop(wakes);
    });
}

/// Does jobs until all handles are gone. If the file cannot be opened, or cannot be used any more,
/// returns the reason. In all cases, the file is closed then.
async fn open_and_serve(path: &Path, wakes: &mut Wakes, jobs: &mut Jobs) -> Result<(), StoreError> {
    let handle = Handle::open(path)?;
    let mut file = File::of(&handle)?;
    serve(&mut file, wakes, jobs).await;
    file.over.map_or(Ok(()), Err)
}

/// Refuses the jobs that have not begun. None of them was carried out, even if the outcome of the
/// job before them is unknown.
fn refuse_all(jobs: &mut Jobs, error: &StoreError) {
    let fault = match error.fault() {
        Fault::Unknown => Fault::Retry,
        fault => fault,
    };
    let error = StoreError::new(fault, error.to_string());
    jobs.arriving.close();
    while let Some(job) = jobs.take() {
        job.refuse(&error);
    }
}

/// The jobs to do, in order.
struct Jobs {
    arriving: mpsc::UnboundedReceiver<Job>,
    /// One queue per rank. A queue is served only when all queues before it are empty.
    waiting: [VecDeque<Job>; 3],
}

impl Jobs {
    fn new(arriving: mpsc::UnboundedReceiver<Job>) -> Self {
        Self {
            arriving,
            waiting: Default::default(),
        }
    }

    /// The next job. `None` when all senders are gone. If the future is dropped while it waits, no
    /// job is lost.
    async fn next(&mut self) -> Option<Job> {
        match self.take() {
            None => self.arriving.recv().await,
            job => job,
        }
    }

    /// The next job of those that have arrived.
    fn take(&mut self) -> Option<Job> {
        while let Ok(job) = self.arriving.try_recv() {
            if let Some(queue) = self.waiting.get_mut(job.rank()) {
                queue.push_back(job);
            }
        }
        self.waiting.iter_mut().find_map(VecDeque::pop_front)
    }
}

impl Job {
    /// The rank of a job: jobs of a lower rank are done first. Renewals come first, because a burst
    /// of requests must not cost a lease that is held. Releases come next, because waiters need
    /// them. So a release is done before an enqueue that came earlier. This is safe even for the
    /// enqueue of the same ticket: the core sends the release only after the enqueue was answered,
    /// or after its caller gave up. In the second case, an enqueue that has not begun is not
    /// carried out.
    fn rank(&self) -> usize {
        match self {
            // The first three run no SQL.
            Self::Join(..) | Self::Leave(..) | Self::Check(..) | Self::Renew(..) => 0,
            Self::Release(..) => 1,
            Self::Enqueue(..)
            | Self::Adopt(..)
            | Self::Inspect(..)
            | Self::List(..)
            | Self::AskBack(..)
            | Self::Resize(..)
            | Self::Forget(..)
            | Self::Count(..) => 2,
        }
    }

    /// Whether nobody waits for the outcome of the job any more.
    fn is_given_up(&self) -> bool {
        match self {
            // A join that nobody waits for is carried out and then undone. A leave has no answer.
            Self::Join(..) | Self::Leave(..) => false,
            Self::Enqueue(.., reply) => reply.is_closed(),
            Self::Renew(_, reply) => reply.is_closed(),
            Self::Release(_, reply) => reply.is_closed(),
            Self::Inspect(_, reply) => reply.is_closed(),
            Self::List(_, reply) => reply.is_closed(),
            Self::AskBack(.., reply) => reply.is_closed(),
            Self::Adopt(.., reply) => reply.is_closed(),
            Self::Resize(_, reply) => reply.is_closed(),
            Self::Forget(_, reply) => reply.is_closed(),
            Self::Count(_, reply) => reply.is_closed(),
            Self::Check(reply) => reply.is_closed(),
        }
    }

    fn refuse(self, error: &StoreError) {
        let error = error.clone();
        let _ = match self {
            Self::Leave(..) => false,
            Self::Join(_, reply) => tell(reply, Err(error)),
            Self::Enqueue(.., reply) => tell(reply, Err(error)),
            Self::Renew(_, reply) => tell(reply, Err(error)),
            Self::Release(_, reply) => tell(reply, Err(error)),
            Self::Inspect(_, reply) => tell(reply, Err(error)),
            Self::List(_, reply) => tell(reply, Err(error)),
            Self::AskBack(.., reply) => tell(reply, Err(error)),
            Self::Adopt(.., reply) => tell(reply, Err(error)),
            Self::Resize(_, reply) => tell(reply, Err(error)),
            Self::Forget(_, reply) => tell(reply, Err(error)),
            Self::Count(_, reply) => tell(reply, Err(error)),
            Self::Check(reply) => tell(reply, Err(error)),
        };
    }
}

/// Sends an outcome. Returns whether somebody waited for it. Sending runs the waker of the caller's
/// task, which may panic. The panic is caught, because it must not end this thread.
fn tell<T>(reply: Reply<T>, outcome: Result<T, StoreError>) -> bool {
    // The waker runs after the outcome was sent, so a panic means that somebody waited.
    catch_unwind(AssertUnwindSafe(|| reply.send(outcome).is_ok())).unwrap_or(true)
}

/// Does one job after another. While a ticket of this process waits, it also checks the file
/// between jobs. Returns when all handles are gone, or the file cannot be used any more.
async fn serve(file: &mut File<'_>, wakes: &mut Wakes, jobs: &mut Jobs) {
    let mut looked = tokio::time::Instant::now();
    while file.over.is_none() {
        let look_at = wakes.looks.look_at(looked);
        // The clock is compared here, because the timers of this thread stand still while jobs keep
        // coming: no job waits for anything, and the runtime looks at its timers only when it waits.
        if look_at.is_some_and(|at| at <= tokio::time::Instant::now()) {
            // If this check misses a change, a later check or the renewals find it: see
            // `tickets::look`.
            let _ = tickets::look(file, wakes);
            looked = tokio::time::Instant::now();
            continue;
        }
        let job = match look_at {
            None => jobs.next().await,
            Some(at) => match tokio::time::timeout_at(at, jobs.next()).await {
                Ok(job) => job,
                Err(_elapsed) => continue,
            },
        };
        let Some(job) = job else { return };
        if !job.is_given_up() {
            carry_out(job, file, wakes);
        }
    }
}

fn carry_out(job: Job, file: &mut File, wakes: &mut Wakes) {
    match job {
        Job::Join(events, reply) => {
            let receiver = events.receiver();
            let joined = wakes.join(events);
            if !tell(reply, Ok(joined)) {
                wakes.leave(receiver, joined);
            }
        }
        Job::Leave(receiver, joined) => wakes.leave(receiver, joined),
        Job::Enqueue(request, receiver, reply) => {
            let outcome = tickets::enqueue(file, wakes, &request, receiver);
            tell(reply, outcome);
            file.sweep_now_and_then();
        }
        Job::Renew(tickets, reply) => {
            tell(reply, tickets::renew(file, wakes, &tickets));
        }
        Job::Release(tickets, reply) => {
            tell(reply, tickets::release(file, wakes, &tickets));
        }
        Job::Inspect(name, reply) => {
            tell(reply, tickets::inspect(file, &name));
        }
        Job::List(listing, reply) => {
            tell(reply, tickets::list(file, &listing));
        }
        Job::AskBack(name, id, ask, reply) => {
            let asked = tickets::ask_back(file, wakes, &name, id, &ask);
            tell(reply, asked);
        }
        Job::Adopt(adoption, receiver, reply) => {
            tell(reply, adopt::adopt(file, &adoption, receiver));
        }
        Job::Resize(resize, reply) => {
            tell(reply, tickets::resize(file, wakes, &resize));
        }
        Job::Forget(name, reply) => {
            tell(reply, tickets::forget(file, &name));
        }
        Job::Count(count, reply) => {
            tell(reply, counters::count(file, &count));
            file.sweep_now_and_then();
        }
        Job::Check(reply) => {
            tell(reply, Ok(file.warnings()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::backend::{FULL, News};

    fn asked() -> (Jobs, mpsc::UnboundedSender<Job>) {
        let (jobs, to_do) = mpsc::unbounded_channel();
        (Jobs::new(to_do), jobs)
    }

    #[tokio::test]
    async fn renewals_go_first_and_then_releases_whatever_came_before_them() {
        let (mut to_do, jobs) = asked();
        let name = Name::new(crate::name::Namespace::new("test").unwrap(), "a").unwrap();
        let mut replies = Vec::new();
        for _ in 0..2 {
            let (forget, one) = oneshot::channel();
            let (release, two) = oneshot::channel();
            let (renew, three) = oneshot::channel();
            jobs.send(Job::Forget(name.clone(), forget)).unwrap();
            jobs.send(Job::Release(Vec::new(), release)).unwrap();
            jobs.send(Job::Renew(Vec::new(), renew)).unwrap();
            replies.push((one, two, three));
        }
        drop(jobs);

        let mut order = Vec::new();
        while let Some(job) = to_do.next().await {
            order.push(job.rank());
        }

        assert_eq!(order, [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn a_job_that_nobody_waits_for_is_given_up() {
        let (reply, outcome) = oneshot::channel();
        let release = Job::Release(Vec::new(), reply);
        assert!(!release.is_given_up());

        drop(outcome);

        assert!(release.is_given_up());
    }

    /// The other process has given the lock to the ticket for two seconds only.
    #[tokio::test]
    async fn a_grant_of_another_process_is_found_while_jobs_keep_coming() {
        const QUEUED: usize = 1_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks.db");
        let namespace = || crate::name::Namespace::new("test").unwrap();
        let name = Name::new(namespace(), "a").unwrap();
        let request = || {
            let id = Id::draw().unwrap();
            let ttl = Duration::from_secs(60);
            Arc::new(Request {
                wait: true,
                ..Request::new(name.clone(), id, FULL, FULL, ttl)
            })
        };
        let handle = Handle::open(&path).unwrap();
        let mut other = File::of(&handle).unwrap();
        other.process = 1;
        let (mut wakes, held, waits) = (Wakes::default(), request(), request());
        let answer = tickets::enqueue(&mut other, &mut wakes, &held, 1);
        assert!(matches!(answer, Ok(Enqueued::Granted { .. })));

        let driver = Driver::of(&path).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let sink = EventSink::new(2, namespace(), move |news| {
            if let News::Granted(wake) = news {
                let _ = tell.send(wake.id);
            }
        });
        driver.ask(|reply| Job::Join(sink, reply)).await.unwrap();
        let enqueue = |reply| Job::Enqueue(Arc::clone(&waits), 2, reply);
        let answer = driver.ask(enqueue).await;
        assert!(matches!(answer, Ok(Enqueued::Waiting { .. })));
        let jobs = driver.jobs.clone();
        let inspect = move || {
            let (reply, outcome) = oneshot::channel();
            assert!(jobs.send(Job::Inspect(name.clone(), reply)).is_ok());
            outcome
        };
        let mut queued: VecDeque<_> = (0..QUEUED).map(|_| inspect()).collect();
        let is_told = Arc::new(AtomicBool::new(false));
        let enough = Arc::clone(&is_told);
        let keeps_coming = std::thread::spawn(move || {
            while !enough.load(Ordering::SeqCst) {
                queued.push_back(inspect());
                let first = queued.pop_front().unwrap();
                first.blocking_recv().unwrap().unwrap();
            }
        });

        let leaving = [Departure::new(held, false)];
        tickets::release(&mut other, &mut wakes, &leaving).unwrap();
        let news = told.recv_timeout(Duration::from_secs(30));
        is_told.store(true, Ordering::SeqCst);
        keeps_coming.join().unwrap();

        assert_eq!(news, Ok(waits.id));
    }

    #[tokio::test]
    async fn a_waker_that_panics_does_not_end_the_thread() {
        struct Panics;
        impl std::task::Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("on purpose");
            }
        }
        let waker = std::task::Waker::from(Arc::new(Panics));
        let folder = tempfile::tempdir().unwrap();
        let driver = Driver::of(&folder.path().join("locks.db")).unwrap();

        let mut asks = Box::pin(driver.ask(Job::Check));
        let mut context = std::task::Context::from_waker(&waker);
        assert!(asks.as_mut().poll(&mut context).is_pending());

        // The thread answers this job after the first one, so the waker of the first one has run by
        // then.
        assert!(driver.ask(Job::Check).await.is_ok());
        assert_eq!(asks.await.unwrap(), Vec::<String>::new());
    }
}
