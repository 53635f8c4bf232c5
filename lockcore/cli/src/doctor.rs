//! `lockcore doctor`: tries what a service needs from its store, and says what to change.

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join;
use lockcore::inspect::visible;
use lockcore::{Error, ErrorKind, Locks};
use serde::Serialize;

use crate::args::Doctor;
use crate::exit::{self, Exit};
use crate::findings::{self, Finding};
use crate::{show, url};

/// How long the store may take to answer for the first time, or to wake a waiter.
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
/// How many hand-overs in a row must take so long. A single one may be late because a machine is busy.
const LATE: usize = 3;
/// On a store without lines, no waiter is ever seen in line. This is long enough for it to have asked.
const NO_LINE: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_millis(5);

/// Tries the operations with two clients, as two processes are.
pub(crate) async fn doctor(clients: [&Locks; 2], doctor: Doctor) -> Result<ExitCode, Exit> {
    let mut report = Report::new(doctor.json);
    let [locks, other] = clients;
    let began = Instant::now();
    locks.ready(PATIENCE).await?;
    let took = began.elapsed();
    report.tried("connects, and its settings are read", Ok(took))?;
    for finding in findings::take() {
        report.found(&finding)?;
    }

    let name = &name_of_its_own("doctor");
    let lock = &locks.mutex(name).ttl(TTL);
    let took = median(async || {
        let began = Instant::now();
        lock.try_acquire().await?.release().await?;
        Ok(began.elapsed())
    });
    report.tried("takes and releases a lock", took.await)?;
    let Ok(guard) = lock.try_acquire().await else {
        // All that follows needs a lock, and the line above says why there is none.
        return report.end();
    };
    let took = median(async || timed(guard.extend(TTL)).await);
    report.tried("renews a lease", took.await)?;
    let took = median(async || timed(locks.inspect(name)).await);
    report.tried("shows who holds a name", took.await)?;
    let took = median(async || timed(locks.list(name).next()).await);
    report.tried("lists the names in use", took.await)?;
    guard.release().await?;

    let took = hand_overs(locks, other, name).await;
    let took = took.map(|took| took[took.len() / 2]);
    let is_late = match &took {
        Ok(took) => *took > WITHOUT_A_WAKE_UP,
        Err(error) => error.kind() == ErrorKind::Timeout,
    };
    report.tried("hands a lock over to a client that waits", took)?;
    if is_late {
        let text = "most wake-ups of the store have not reached a client that waited. See what the user needs to hear the \
                    store, and whether a proxy in between lets it through";
        report.found(&Finding::Warning(text.into()))?;
    }
    let took = ask_back(locks, other, name).await;
    report.tried(
        "asks a holder for its lock, within a third of its ttl",
        took,
    )?;
    let counter = locks.counter(name).keep(KEPT);
    let took = median(async || timed(counter.set(0)).await);
    report.tried("changes a counter", took.await)?;
    let took = resize(locks, name).await;
    report.tried("stores the capacity of a semaphore", took)?;
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
    let has_line = !url::begins_with(&["redlock"]);
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

async fn resize(locks: &Locks, name: &str) -> Result<Duration, Error> {
    let semaphore = locks.semaphore(format!("{name}-semaphore"), 1);
    let took = timed(semaphore.resize(2)).await?;
    semaphore.forget_capacity().await?;
    Ok(took)
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

struct Report {
    json: bool,
    warnings: usize,
    failures: usize,
}

impl Report {
    fn new(json: bool) -> Self {
        Self {
            json,
            warnings: 0,
            failures: 0,
        }
    }

    fn tried(&mut self, what: &str, took: Result<Duration, Error>) -> Result<(), Exit> {
        self.say(&match took {
            Ok(took) => Line {
                outcome: Outcome::Ok,
                what,
                seconds: Some(took.as_secs_f64()),
                why: None,
            },
            Err(error) => Line {
                outcome: match error.to_string().contains("this store cannot") {
                    true => Outcome::Skipped,
                    false => Outcome::Failed,
                },
                what,
                seconds: None,
                why: Some(error.to_string()),
            },
        })
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
            return Ok(show::json(line)?);
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
        Ok(show::line(&text)?)
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
