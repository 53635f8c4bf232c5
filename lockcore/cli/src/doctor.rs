//! `lockcore doctor`: tries what a service needs from its store, and says what to change.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join;
use lockcore::inspect::visible;
use lockcore::{Error, ErrorKind, Locks};
use serde::Serialize;
use tokio::time::timeout;

use crate::args::Doctor;
use crate::exit::{self, Exit};
use crate::findings::{self, Finding};
use crate::show;

/// How long the store may take to answer for the first time, to wake a waiter, to push a change of a
/// counter, or to list a name.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often each operation is tried. The median is shown.
const TIMES: usize = 9;
/// How long the store keeps the counter that was tried: the shortest possible time.
const KEPT: Duration = Duration::from_secs(60);
/// Shorter than any session, and longer than the operations under the lock take.
const TTL: Duration = Duration::from_secs(2);
/// A waiter that no wake-up reaches gets its lock when its ticket is renewed: after a third of this,
/// or of its session if that is shorter.
const TTL_OF_A_WAITER: Duration = Duration::from_secs(6);
/// Longer than a hand-over with a wake-up, and shorter than one without, if the session of a waiter is
/// not shorter than three seconds.
const WITHOUT_A_WAKE_UP: Duration = Duration::from_secs(1);
/// How many hand-overs, or pushes, in a row must take so long. A single one may be late because a
/// machine is busy.
const LATE: usize = 3;
/// On a store without lines, no waiter is ever seen in line. This is long enough for it to have asked.
const NO_LINE: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_millis(5);

/// Tries the operations with two clients, as two processes are.
pub(crate) async fn doctor(clients: [&Locks; 2], doctor: Doctor) -> Result<ExitCode, Exit> {
    tries(clients, Report::new(doctor.json, show::line)).await
}

async fn tries<P>([locks, other]: [&Locks; 2], mut report: Report<P>) -> Result<ExitCode, Exit>
where
    P: FnMut(&str) -> io::Result<()>,
{
    let began = Instant::now();
    locks.ready(PATIENCE).await?;
    let took = began.elapsed();
    report.tried("connects, and its settings are read", Ok(took))?;
    for finding in findings::take() {
        report.found(&finding)?;
    }

    let name = &name_of_its_own("doctor");
    let can = locks.capability();
    let lock = &locks.mutex(name).ttl(TTL);
    let taken = async {
        let took = median(async || {
            let began = Instant::now();
            lock.try_acquire().await?.release().await?;
            Ok(began.elapsed())
        });
        Ok::<_, Error>((took.await?, lock.try_acquire().await?))
    };
    let (took, taken) = match taken.await {
        Ok((took, guard)) => (Ok(took), Some(guard)),
        Err(error) => (Err(error), None),
    };
    report.tried("takes and releases a lock", took)?;
    let Some(guard) = taken else {
        return report.end(); // all that follows needs a lock
    };
    let took = median(async || timed(guard.extend(TTL)).await);
    report.tried("renews a lease", took.await)?;
    let took = median(async || timed(locks.inspect(name)).await);
    report.tried("shows who holds a name", took.await)?;
    let what = "lists the names in use";
    let mut names = locks.list(name);
    match can.lists {
        false => report.skipped(what, CANNOT)?,
        true => match timeout(PATIENCE, timed(names.next())).await {
            Ok(took) => report.tried(what, took)?,
            Err(_) => report.skipped(what, "it takes more than five seconds here")?,
        },
    }
    guard.release().await?;

    let took = hand_overs(locks, other, name).await;
    let took = took.map(|took| took[took.len() / 2]);
    let is_late = match &took {
        Ok(took) => *took > WITHOUT_A_WAKE_UP,
        Err(error) => error.kind() == ErrorKind::Timeout,
    };
    report.tried("hands a lock over to a client that waits", took)?;
    if is_late {
        report.unheard("wake-ups of the store have not reached a client that waited")?;
    }
    let what = "asks a holder for its lock, within a third of its ttl";
    report
        .tries(can.asks_back, what, ask_back(locks, other, name))
        .await?;
    let what = "gives a held lock to another client";
    report
        .tries(can.adopts, what, give(locks, other, name))
        .await?;
    let counter = locks.counter(name).keep(KEPT);
    let took = median(async || timed(counter.set(0)).await);
    report
        .tries(can.counters, "changes a counter", took)
        .await?;
    let what = "tells another client of a change of a counter";
    match can.counters {
        false => report.skipped(what, CANNOT)?,
        true => match changes(locks, other, name).await.transpose() {
            Some(took) => report.tried(what, took)?,
            None => {
                report.unheard("changes of a counter have not reached a client that follows it")?;
            }
        },
    }
    let what = "stores the capacity of a semaphore";
    report.tries(can.resizes, what, resize(locks, name)).await?;
    report.end()
}

/// A name that nobody else uses, so nobody waits for it.
pub(crate) fn name_of_its_own(command: &str) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    format!(
        "lockcore-{command}-{}-{}",
        std::process::id(),
        now.as_nanos()
    )
}

/// The times from a release by one client to the grant of another, sorted.
async fn hand_overs(one: &Locks, other: &Locks, name: &str) -> Result<Vec<Duration>, Error> {
    // A hand-over does not begin with a connection.
    other.ready(PATIENCE).await?;
    let has_line = one.capability().queues;
    let mut took = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let guard = one.mutex(name).ttl(TTL).try_acquire().await?;
        let next = async {
            let lock = other.mutex(name).ttl(TTL_OF_A_WAITER).wait(PATIENCE);
            let guard = lock.acquire().await?;
            let got = Instant::now();
            guard.release().await?;
            Ok::<_, Error>(got)
        };
        let left = async {
            let began = Instant::now();
            // If the waiter gives up, this ends too.
            while one.inspect(name).await?.len() < 2 && (has_line || began.elapsed() < NO_LINE) {
                tokio::time::sleep(LOOK).await;
            }
            let left = Instant::now();
            guard.release().await?;
            Ok(left)
        };
        let (got, left) = try_join(next, left).await?;
        took.push(got.duration_since(left));
        if took.len() == LATE && took.iter().all(|took| *took > WITHOUT_A_WAKE_UP) {
            break; // the others would take as long
        }
    }
    took.sort_unstable();
    Ok(took)
}

/// How long it takes until a holder knows that another client asks for its lock.
async fn ask_back(one: &Locks, other: &Locks, name: &str) -> Result<Duration, Error> {
    let guard = one.mutex(name).ttl(TTL).try_acquire().await?;
    let ticket = guard.grant_id().ticket();
    let began = Instant::now();
    let gives = async {
        guard.revoked().await;
        let took = began.elapsed();
        guard.release().await?;
        Ok(took)
    };
    let asks = other.revoke(name, ticket, PATIENCE, "lockcore doctor");
    try_join(asks, gives).await.map(|(_, took)| took)
}

/// How long it takes to give a held lock to another client, which then has it.
async fn give(one: &Locks, other: &Locks, name: &str) -> Result<Duration, Error> {
    let guard = one.mutex(name).try_acquire().await?;
    let began = Instant::now();
    let text = guard.detach().await?;
    let guard = other.adopt(&text).await?;
    let took = began.elapsed();
    guard.release().await.map(|_| took)
}

/// How long it takes until a client that follows a counter knows of a change by another client.
/// `None` if the changes do not reach it.
async fn changes(one: &Locks, other: &Locks, name: &str) -> Result<Option<Duration>, Error> {
    let counter = one.counter(name).keep(KEPT);
    let mut changes = other.counter(name).changes();
    changes.next().await?;
    // The first call has only read the counter. The second one follows it, and then reads it: so it
    // finds this change without a message of the store.
    counter.add(1).await?;
    changes.next().await?;
    let (mut took, mut unheard) = (Vec::with_capacity(TIMES), 0);
    while took.len() < TIMES {
        let began = Instant::now();
        counter.add(1).await?;
        match timeout(PATIENCE, changes.next()).await {
            Ok(changed) => {
                changed?;
                took.push(began.elapsed());
                unheard = 0;
            }
            Err(_) => unheard += 1,
        }
        if unheard == LATE {
            return Ok(None);
        }
    }
    took.sort_unstable();
    Ok(Some(took[TIMES / 2]))
}

async fn resize(locks: &Locks, name: &str) -> Result<Duration, Error> {
    let semaphore = locks.semaphore(format!("{name}-semaphore"), 1);
    let took = timed(semaphore.resize(2)).await;
    // Also after an error, because the capacity may be stored all the same, and it would stay.
    let forgotten = semaphore.forget_capacity().await;
    took.and_then(|took| forgotten.map(|()| took))
}

async fn timed<T>(work: impl Future<Output = Result<T, Error>>) -> Result<Duration, Error> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}

async fn median(work: impl AsyncFn() -> Result<Duration, Error>) -> Result<Duration, Error> {
    let mut took = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        took.push(work().await?);
    }
    took.sort_unstable();
    Ok(took[TIMES / 2])
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Ok,
    /// An operator should change something.
    Warn,
    /// The store cannot do this, or it was not looked at.
    Skipped,
    Failed,
}

/// A line of the report. The time is in seconds.
#[derive(Serialize)]
struct Line<'a> {
    outcome: Outcome,
    what: &'a str,
    seconds: Option<f64>,
    why: Option<String>,
}

/// Why a line is skipped.
const CANNOT: &str = "this store cannot";

/// Prints each line as soon as it is known.
struct Report<P> {
    json: bool,
    print: P,
    warnings: usize,
    failures: usize,
}

impl<P: FnMut(&str) -> io::Result<()>> Report<P> {
    fn new(json: bool, print: P) -> Self {
        Self {
            json,
            print,
            warnings: 0,
            failures: 0,
        }
    }

    /// Tries this, if the store can do it.
    async fn tries(
        &mut self,
        can: bool,
        what: &str,
        work: impl Future<Output = Result<Duration, Error>>,
    ) -> Result<(), Exit> {
        match can {
            true => self.tried(what, work.await),
            false => self.skipped(what, CANNOT),
        }
    }

    fn tried(&mut self, what: &str, took: Result<Duration, Error>) -> Result<(), Exit> {
        let (outcome, seconds, why) = match took {
            Ok(took) => (Outcome::Ok, Some(took.as_secs_f64()), None),
            Err(error) => (Outcome::Failed, None, Some(error.to_string())),
        };
        self.say(&Line {
            outcome,
            what,
            seconds,
            why,
        })
    }

    fn skipped(&mut self, what: &str, why: &str) -> Result<(), Exit> {
        self.say(&Line {
            outcome: Outcome::Skipped,
            what,
            seconds: None,
            why: Some(why.into()),
        })
    }

    /// Warns that messages of the store do not arrive.
    fn unheard(&mut self, messages: &str) -> Result<(), Exit> {
        let text = format!(
            "most {messages}. See what the user needs to hear the store, and whether a proxy in between lets it through"
        );
        self.found(&Finding::Warning(text))
    }

    fn found(&mut self, finding: &Finding) -> Result<(), Exit> {
        let (outcome, what) = match finding {
            Finding::Warning(what) => (Outcome::Warn, what),
            Finding::NotLookedAt(what) => (Outcome::Skipped, what),
        };
        self.say(&Line {
            outcome,
            what,
            seconds: None,
            why: None,
        })
    }

    fn say(&mut self, line: &Line<'_>) -> Result<(), Exit> {
        self.warnings += usize::from(line.outcome == Outcome::Warn);
        self.failures += usize::from(line.outcome == Outcome::Failed);
        if self.json {
            let json = serde_json::to_string(line).map_err(io::Error::other)?;
            return Ok((self.print)(&json)?);
        }
        let outcome = match line.outcome {
            Outcome::Ok => "ok",
            Outcome::Warn => "warn",
            Outcome::Skipped => "skipped",
            Outcome::Failed => "FAILED",
        };
        let mut text = format!("{outcome:<7} {}", visible(line.what));
        if let Some(seconds) = line.seconds {
            text.push_str(&format!(": {:.2} ms", seconds * 1e3));
        }
        if let Some(why) = &line.why {
            text.push_str(&format!(": {}", visible(why)));
        }
        Ok((self.print)(&text)?)
    }

    fn end(&self) -> Result<ExitCode, Exit> {
        match (self.failures, self.warnings) {
            (0, 0) => Ok(ExitCode::SUCCESS),
            (0, _) => Ok(exit::FINDINGS.into()),
            (failed, _) => {
                let text = format!("{failed} operations failed");
                Err(Exit::new(exit::UNAVAILABLE, text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use lockcore::backend::{
        self, Answer, Connection, Enqueued, Fault, Request, Resize, ResizeOp, Resized, StoreError,
    };
    use lockcore::testing::around;

    use super::*;

    /// A connection to a store that goes wrong.
    #[derive(Debug)]
    struct Failing {
        inner: Arc<dyn Connection>,
        enqueued: Arc<AtomicUsize>,
    }

    fn failure() -> StoreError {
        StoreError::new(Fault::Config, "on purpose")
    }

    impl Connection for Failing {
        fn inner(&self) -> Option<&Arc<dyn Connection>> {
            Some(&self.inner)
        }

        /// After the pairs of `TIMES`, the store gives no lock any more.
        fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
            match self.enqueued.fetch_add(1, Ordering::SeqCst) < TIMES {
                true => self.inner.enqueue(request, patience),
                false => Box::pin(async { Err(failure()) }),
            }
        }

        /// The store carries out a larger capacity, and the client does not learn of it.
        fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
            let is_lost = matches!(
                resize.op,
                ResizeOp::Set {
                    capacity: Some(2),
                    ..
                }
            );
            let answer = self.inner.resize(resize);
            Box::pin(async move {
                match answer.await {
                    Ok(_) if is_lost => Err(failure()),
                    answer => answer,
                }
            })
        }
    }

    fn client_of_a_failing_store() -> Locks {
        let enqueued = Arc::new(AtomicUsize::new(0));
        let store = around(backend::open("memory:").unwrap(), move |inner| Failing {
            inner,
            enqueued: Arc::clone(&enqueued),
        });
        Locks::with_backend(store).unwrap()
    }

    #[tokio::test]
    async fn a_store_that_fails_between_two_checks_is_no_success() {
        let locks = client_of_a_failing_store();
        let mut lines = Vec::new();
        let report = Report::new(false, |line: &str| {
            lines.push(line.to_owned());
            Ok(())
        });

        let end = tries([&locks, &locks], report).await;

        assert_eq!(end.unwrap_err().code, exit::UNAVAILABLE, "{lines:?}");
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].starts_with("FAILED  takes"), "{lines:?}");
    }

    #[tokio::test]
    async fn a_capacity_does_not_stay_if_its_answer_is_lost() {
        let locks = client_of_a_failing_store();

        let took = resize(&locks, "job").await;

        assert!(took.is_err());
        let semaphore = locks.semaphore("job-semaphore", 1);
        assert_eq!(semaphore.capacity().await.unwrap(), 1);
    }
}
