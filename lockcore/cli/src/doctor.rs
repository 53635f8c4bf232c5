//! `lockcore doctor`: tries what a service needs from its store, and says what to change.

use std::future::Future;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockcore::{Error, Locks};

use crate::exit::{Exit, UNAVAILABLE};
use crate::show;

/// How long the store may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often each operation is tried. The median is shown.
const TIMES: usize = 9;
/// How long the store keeps the counter that was tried: the shortest possible time.
const KEPT: Duration = Duration::from_secs(60);
/// Shorter than any session, and longer than the operations under the lock take.
const TTL: Duration = Duration::from_secs(2);

pub(crate) async fn doctor(locks: &Locks) -> Result<ExitCode, Exit> {
    let began = Instant::now();
    // Its warnings go to standard error, each with what to change.
    locks.ready(PATIENCE).await?;
    say("connects, and its settings are read", Ok(began.elapsed()))?;

    let name = name_of_its_own("doctor");
    let lock = locks.mutex(&name).ttl(TTL);
    let (name, lock) = (&name, &lock);
    let mut failed = 0;
    let mut tried = |what: &str, took: Result<Duration, Error>| {
        failed += usize::from(took.is_err());
        say(what, took)
    };
    tried(
        "takes and releases a lock",
        median(|| async { lock.try_acquire().await?.release().await.map(drop) }).await,
    )?;
    let guard = lock.try_acquire().await?;
    tried(
        "renews a lease",
        median(|| async { guard.extend(TTL).await }).await,
    )?;
    tried(
        "shows who holds a name",
        median(|| async { locks.inspect(name).await.map(drop) }).await,
    )?;
    guard.release().await?;
    tried(
        "lists the names in use",
        median(|| async { locks.list(name).next().await.map(drop) }).await,
    )?;
    tried(
        "changes a counter",
        median(|| async { locks.counter(name).keep(KEPT).set(0).await.map(drop) }).await,
    )?;
    match failed {
        0 => Ok(ExitCode::SUCCESS),
        failed => Err(Exit::new(
            UNAVAILABLE,
            format!("{failed} operations failed"),
        )),
    }
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

async fn median<F, W>(work: F) -> Result<Duration, Error>
where
    F: Fn() -> W,
    W: Future<Output = Result<(), Error>>,
{
    let mut took = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let began = Instant::now();
        work().await?;
        took.push(began.elapsed());
    }
    took.sort_unstable();
    Ok(took[TIMES / 2])
}

fn say(what: &str, took: Result<Duration, Error>) -> Result<(), Exit> {
    let text = match took {
        Ok(took) => format!("ok      {what}: {:.2} ms", took.as_secs_f64() * 1e3),
        Err(error) => format!("FAILED  {what}: {}", show::on_one_line(&error.to_string())),
    };
    Ok(show::line(&text)?)
}
