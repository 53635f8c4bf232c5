//! The thread that has the file open for the whole process: one handle, one job at a time, each run to its end whoever
//! stops listening. The handle is in `file`; what the jobs do, in `tickets`; whom they wake, in `events`.
//!
//! One handle, because the clients of a process would otherwise stand in each other's way at the file's lock, which has
//! no queue; and a thread of its own, because a lock on the file must not depend on a runtime that its user may block or
//! end in the middle of a transaction.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{mpsc, oneshot};

use super::events::Wakes;
use super::file::File;
use super::tickets;
use crate::backend::{Departure, Enqueued, Events, Fault, Place, Released, Renewed, StoreError};
use crate::name::Name;
use crate::request::Request;

/// What a job says its outcome to.
pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// What the thread is asked for.
#[derive(Debug)]
pub(super) enum Job {
    Join(Events, Reply<u64>),
    Leave(u64, u64),
    Enqueue(Arc<Request>, u64, Reply<Enqueued>),
    Renew(Vec<Arc<Request>>, Reply<Vec<Renewed>>),
    Release(Vec<Departure>, Reply<Vec<Released>>),
    Inspect(Name, Reply<Vec<Place>>),
    Forget(Name, Reply<()>),
    Check(Reply<Vec<String>>),
}

/// A way to the thread of one file. The thread ends when the last of them is gone.
#[derive(Debug)]
pub(super) struct Driver {
    jobs: mpsc::UnboundedSender<Job>,
}

/// The threads of this process, by the canonical path of their files.
static DRIVERS: Mutex<BTreeMap<PathBuf, (u64, Weak<Driver>)>> = Mutex::new(BTreeMap::new());

impl Driver {
    /// The thread of a file; started if there is none.
    pub(super) fn of(file: &Path) -> Result<Arc<Self>, StoreError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let mut drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
        let driver = drivers.get(file).and_then(|(_, driver)| driver.upgrade());
        // One that has ended, even by a panic, is replaced.
        if let Some(driver) = driver.filter(|driver| !driver.jobs.is_closed()) {
            return Ok(driver);
        }
        drivers.retain(|_, (_, driver)| driver.strong_count() > 0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (jobs, to_do) = mpsc::unbounded_channel();
        let path = file.to_owned();
        std::thread::Builder::new()
            .name("lockcore-sqlite".into())
            .spawn(move || run(&path, number, to_do))
            .map_err(|error| {
                StoreError::new(
                    Fault::Retry,
                    format!("cannot start SQLite's thread: {error}"),
                )
            })?;
        let driver = Arc::new(Self { jobs });
        drivers.insert(file.to_owned(), (number, Arc::downgrade(&driver)));
        Ok(driver)
    }

    /// Sends a job and waits for its outcome.
    ///
    /// The only await is that for the reply. Dropped there, what has begun is finished, and what has not is not begun
    /// (a release is).
    pub(super) async fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T, StoreError> {
        let (reply, outcome) = oneshot::channel();
        if !self.send(job(reply)) {
            return Err(StoreError::new(Fault::Retry, "SQLite: the file was closed"));
        }
        outcome.await.unwrap_or_else(|_| {
            // Only a panic of the thread takes a job away without a word.
            Err(StoreError::broken(
                "SQLite: the thread of the file has ended",
            ))
        })
    }

    pub(super) fn send(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }

    fn remove(path: &Path, number: u64) {
        let mut drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
        if drivers.get(path).is_some_and(|(other, _)| *other == number) {
            drivers.remove(path);
        }
    }
}

/// The thread.
fn run(path: &Path, number: u64, mut jobs: mpsc::UnboundedReceiver<Job>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            Driver::remove(path, number);
            let text = format!("cannot start the runtime of SQLite's thread: {error}");
            return refuse_all(&mut jobs, &StoreError::new(Fault::Retry, text));
        }
    };
    // Nothing drops the futures in here: every await comes to its end.
    runtime.block_on(async {
        let mut wakes = Wakes::default();
        let error = match File::open(path).await {
            Ok(mut file) => {
                serve(&mut file, &mut wakes, &mut jobs).await;
                let over = file.over.take();
                file.close().await;
                match over {
                    Some(error) => error,
                    // Nobody is left.
                    None => return,
                }
            }
            Err(error) => error,
        };
        // Off the list before anybody is told, so that who is told finds another.
        Driver::remove(path, number);
        refuse_all(&mut jobs, &error);
        // Tells all clients that the connection is of no use any more.
        drop(wakes);
    });
}

/// What has not begun was not carried out, whatever became of the job before.
fn refuse_all(jobs: &mut mpsc::UnboundedReceiver<Job>, error: &StoreError) {
    let fault = match error.fault() {
        Fault::Unknown => Fault::Retry,
        fault => fault,
    };
    let error = StoreError::new(fault, error.to_string());
    jobs.close();
    while let Ok(job) = jobs.try_recv() {
        job.refuse(&error);
    }
}

impl Job {
    fn refuse(self, error: &StoreError) {
        let error = error.clone();
        // Who does not listen any more need not be told.
        match self {
            Self::Join(_, reply) => drop(reply.send(Err(error))),
            Self::Leave(..) => {}
            Self::Enqueue(.., reply) => drop(reply.send(Err(error))),
            Self::Renew(_, reply) => drop(reply.send(Err(error))),
            Self::Release(_, reply) => drop(reply.send(Err(error))),
            Self::Inspect(_, reply) => drop(reply.send(Err(error))),
            Self::Forget(_, reply) => drop(reply.send(Err(error))),
            Self::Check(reply) => drop(reply.send(Err(error))),
        }
    }
}

/// One job after another, and a look at the file in between while somebody waits for another process. Returns when
/// nobody is left, or the file is over.
async fn serve(file: &mut File, wakes: &mut Wakes, jobs: &mut mpsc::UnboundedReceiver<Job>) {
    let mut looked = tokio::time::Instant::now();
    while file.over.is_none() {
        let job = match wakes.look_at(looked) {
            None => jobs.recv().await,
            Some(at) => tokio::select! {
                biased;
                () = tokio::time::sleep_until(at) => {
                    let _ = tickets::look(file, wakes).await;
                    looked = tokio::time::Instant::now();
                    continue;
                }
                job = jobs.recv() => job,
            },
        };
        let Some(job) = job else { return };
        carry_out(job, file, wakes).await;
    }
}

async fn carry_out(job: Job, file: &mut File, wakes: &mut Wakes) {
    match job {
        Job::Join(events, reply) => {
            let receiver = events.receiver();
            let joined = wakes.join(events);
            if reply.send(Ok(joined)).is_err() {
                wakes.leave(receiver, joined);
            }
        }
        Job::Leave(receiver, joined) => wakes.leave(receiver, joined),
        Job::Enqueue(request, receiver, reply) => {
            if reply.is_closed() {
                return;
            }
            let outcome = tickets::enqueue(file, wakes, &request, receiver).await;
            drop(reply.send(outcome));
            file.sweep_now_and_then().await;
        }
        Job::Renew(tickets, reply) => {
            if !reply.is_closed() {
                drop(reply.send(tickets::renew(file, wakes, &tickets).await));
            }
        }
        // Also when nobody listens: it is what should happen either way.
        Job::Release(tickets, reply) => {
            drop(reply.send(tickets::release(file, wakes, &tickets).await));
        }
        Job::Inspect(name, reply) => {
            if !reply.is_closed() {
                drop(reply.send(tickets::inspect(file, &name).await));
            }
        }
        Job::Forget(name, reply) => {
            if !reply.is_closed() {
                drop(reply.send(tickets::forget(file, &name).await));
            }
        }
        Job::Check(reply) => drop(reply.send(Ok(file.warnings()))),
    }
}
