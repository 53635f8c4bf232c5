//! `lockcore bench`: how fast this store is, as seen from this machine.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::{try_join, try_join_all};
use lockcore::{Error, Locks, Wait};
use serde::Serialize;

use crate::args::Bench;
use crate::doctor::name_of_its_own;
use crate::exit::Exit;
use crate::show;

/// How long the store may take to answer for the first time.
const PATIENCE: Duration = Duration::from_secs(5);
/// A holder keeps the lock for as long as this many pairs take, so that the other client is in line
/// by then.
const PAIRS_HELD: u32 = 4;
const SHORTEST_HOLD: Duration = Duration::from_millis(2);
const PARTS: u32 = 4;

const HEADS: [&str; 5] = ["", "a second", "p50 ms", "p99 ms", "longest ms"];

/// Measures with two clients, which take locks in strict order.
pub(crate) async fn bench(clients: &[Locks; 2], bench: Bench) -> Result<(), Exit> {
    let time = bench.time / PARTS;
    let name = &name_of_its_own("bench");
    let [one, other] = clients;
    for locks in clients {
        locks.ready(PATIENCE).await?;
        pair(locks, name).await?; // makes the connections
    }
    if !bench.json {
        show::line(&row(HEADS.map(Into::into)))?;
    }

    let until = Instant::now() + time;
    let pairs = pairs(one, name, until).await?;
    let pairs = Outcome::of("take and release, again and again", Some(time), pairs);
    let hold = SHORTEST_HOLD.max(pairs.p50 * PAIRS_HELD);
    report(&bench, &pairs)?;

    let until = Instant::now() + time;
    let names: Vec<_> = (0..bench.tasks)
        .map(|task| format!("{name}-{task}"))
        .collect();
    let all = try_join_all(names.iter().map(|name| self::pairs(one, name, until))).await?;
    let what = format!("the same, {} names at once", bench.tasks);
    report(&bench, &Outcome::of(&what, Some(time), all.concat()))?;

    let until = Instant::now() + time;
    let took = hand_overs(one, other, name, hold, until).await?;
    report(
        &bench,
        &Outcome::of("from a release to the next client", None, took),
    )?;

    let until = Instant::now() + time;
    let crowd = (0..bench.tasks).map(|task| waits(&clients[task as usize % 2], name, until));
    let all = try_join_all(crowd).await?;
    let what = format!("one name, {} wait in line", bench.tasks);
    report(&bench, &Outcome::of(&what, Some(time), all.concat()))
}

async fn pair(locks: &Locks, name: &str) -> Result<(), Error> {
    let guard = locks.mutex(name).wait(Wait::Forever).acquire().await?;
    guard.release().await.map(drop)
}

/// How long it takes to take and release a lock.
async fn pairs(locks: &Locks, name: &str, until: Instant) -> Result<Vec<Duration>, Error> {
    let mut took = Vec::new();
    loop {
        let began = Instant::now();
        if began >= until {
            return Ok(took);
        }
        pair(locks, name).await?;
        took.push(began.elapsed());
    }
}

/// How long it takes to get a lock that others want too. Each holds it for no time.
async fn waits(locks: &Locks, name: &str, until: Instant) -> Result<Vec<Duration>, Error> {
    let mut took = Vec::new();
    loop {
        let began = Instant::now();
        if began >= until {
            return Ok(took);
        }
        let guard = locks.mutex(name).wait(Wait::Forever).acquire().await?;
        took.push(began.elapsed());
        guard.release().await?;
    }
}

/// The times from a release by one client to the grant of the other one.
async fn hand_overs(
    one: &Locks,
    other: &Locks,
    name: &str,
    hold: Duration,
    until: Instant,
) -> Result<Vec<Duration>, Error> {
    let took = RefCell::new(Vec::new());
    let left = Cell::new(None);
    let take_turns = async |locks: &Locks, number: u8| -> Result<(), Error> {
        while Instant::now() < until {
            let guard = locks.mutex(name).wait(Wait::Forever).acquire().await?;
            if let Some((by, at)) = left.take()
                && by != number
            {
                took.borrow_mut().push(Instant::elapsed(&at));
            }
            tokio::time::sleep(hold).await;
            left.set(Some((number, Instant::now())));
            guard.release().await?;
        }
        Ok(())
    };
    try_join(take_turns(one, 1), take_turns(other, 2)).await?;
    Ok(took.into_inner())
}

#[derive(Serialize)]
struct Outcome<'a> {
    what: &'a str,
    times: usize,
    #[serde(serialize_with = "seconds")]
    p50: Duration,
    #[serde(serialize_with = "seconds")]
    p99: Duration,
    #[serde(serialize_with = "seconds")]
    longest: Duration,
    /// `None` where the holders have waited on purpose.
    per_second: Option<f64>,
}

impl<'a> Outcome<'a> {
    fn of(what: &'a str, time: Option<Duration>, mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        let at = |share: usize| took.get(took.len() * share / 100).copied();
        Self {
            what,
            times: took.len(),
            p50: at(50).unwrap_or_default(),
            p99: at(99).unwrap_or_default(),
            longest: took.last().copied().unwrap_or_default(),
            per_second: time.map(|time| took.len() as f64 / time.as_secs_f64()),
        }
    }
}

fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

fn report(bench: &Bench, outcome: &Outcome<'_>) -> Result<(), Exit> {
    if bench.json {
        return Ok(show::json(outcome)?);
    }
    let millis = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    let per_second = outcome.per_second;
    let per_second = per_second.map_or_else(String::new, |number| format!("{number:.0}"));
    let [p50, p99, longest] = [outcome.p50, outcome.p99, outcome.longest].map(millis);
    let cells = [outcome.what.into(), per_second, p50, p99, longest];
    Ok(show::line(&row(cells))?)
}

/// A row is printed as soon as it is known, so the widths are fixed.
fn row([what, per_second, p50, p99, longest]: [String; 5]) -> String {
    format!("{what:<36} {per_second:>9} {p50:>9} {p99:>9} {longest:>11}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_is_that_of_the_times() {
        let took = (1..=200).rev().map(Duration::from_millis).collect();

        let outcome = Outcome::of("", Some(Duration::from_secs(4)), took);

        let millis = [outcome.p50, outcome.p99, outcome.longest].map(|time| time.as_millis());
        assert_eq!(millis, [101, 199, 200]);
        assert_eq!((outcome.times, outcome.per_second), (200, Some(50.0)));
        assert_eq!(Outcome::of("", None, Vec::new()).times, 0);
    }
}
