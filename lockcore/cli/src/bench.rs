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

const HEADS: [&str; 6] = ["", "times", "a second", "p50 ms", "p99 ms", "longest ms"];

/// Measures with two clients, which take locks in strict order.
pub(crate) async fn bench(clients: [&Locks; 2], bench: Bench) -> Result<(), Exit> {
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

    let began = Instant::now();
    let pairs = pairs(one, name, began + time).await?;
    let pairs = Outcome::of("take and release, again and again", began.elapsed(), pairs);
    let hold = SHORTEST_HOLD.max(pairs.p50.unwrap_or_default() * PAIRS_HELD);
    report(&bench, &pairs)?;

    let began = Instant::now();
    let names: Vec<_> = (0..bench.tasks)
        .map(|task| format!("{name}-{task}"))
        .collect();
    let each = names
        .iter()
        .map(|name| self::pairs(one, name, began + time));
    let all = try_join_all(each).await?.concat();
    let what = format!("the same, {} names at once", bench.tasks);
    report(&bench, &Outcome::of(&what, began.elapsed(), all))?;

    let took = hand_overs(one, other, name, hold, Instant::now() + time).await?;
    // The holders have waited on purpose, so the number in a second says nothing.
    let mut outcome = Outcome::of("from a release to the next client", time, took);
    outcome.per_second = None;
    report(&bench, &outcome)?;

    let began = Instant::now();
    let crowd = (0..bench.tasks).map(|task| waits(clients[task as usize % 2], name, began + time));
    let all = try_join_all(crowd).await?.concat();
    let what = format!("one name, {} wait in line", bench.tasks);
    report(&bench, &Outcome::of(&what, began.elapsed(), all))
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

/// The times are `None` if there was no sample.
#[derive(Serialize)]
struct Outcome<'a> {
    what: &'a str,
    times: usize,
    #[serde(serialize_with = "seconds")]
    p50: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    p99: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    longest: Option<Duration>,
    per_second: Option<f64>,
}

impl<'a> Outcome<'a> {
    fn of(what: &'a str, time: Duration, mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        let at = |share: usize| took.get(took.len() * share / 100).copied();
        Self {
            what,
            times: took.len(),
            p50: at(50),
            p99: at(99),
            longest: took.last().copied(),
            per_second: Some(took.len() as f64 / time.as_secs_f64()),
        }
    }
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn seconds<S: serde::Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(to)
}

fn report(bench: &Bench, outcome: &Outcome<'_>) -> Result<(), Exit> {
    if bench.json {
        return Ok(show::json(outcome)?);
    }
    let or_dash = |number: Option<String>| number.unwrap_or_else(|| "-".into());
    let millis = |time: Option<Duration>| {
        or_dash(time.map(|time| format!("{:.2}", time.as_secs_f64() * 1e3)))
    };
    let per_second = outcome.per_second.map(|number| format!("{number:.0}"));
    let cells = [
        outcome.what.into(),
        outcome.times.to_string(),
        or_dash(per_second),
        millis(outcome.p50),
        millis(outcome.p99),
        millis(outcome.longest),
    ];
    Ok(show::line(&row(cells))?)
}

/// A row is printed as soon as it is known, so the widths are fixed.
fn row([what, times, per_second, p50, p99, longest]: [String; 6]) -> String {
    format!("{what:<36} {times:>7} {per_second:>9} {p50:>9} {p99:>9} {longest:>11}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_is_that_of_the_times() {
        let took = (1..=200).rev().map(Duration::from_millis).collect();

        let time = Duration::from_secs(4);
        let outcome = Outcome::of("", time, took);

        let millis = [outcome.p50, outcome.p99, outcome.longest];
        let millis = millis.map(|time| time.unwrap().as_millis());
        assert_eq!(millis, [101, 199, 200]);
        assert_eq!((outcome.times, outcome.per_second), (200, Some(50.0)));
        let none = Outcome::of("", time, Vec::new());
        assert_eq!((none.times, none.p50, none.longest), (0, None, None));
    }
}
