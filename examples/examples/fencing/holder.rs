//! The two processes that set the price. Each prints what happens to it, and waits for commands
//! before some of its steps.

use std::path::Path;
use std::time::{Duration, Instant};

use lockcore::{Error, ErrorKind, FencingToken, Held};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::prices::Prices;
use crate::{Failure, LEASE, PATIENCE};

const LOCK: &str = "price:7";

/// Process A: it takes the lock, is stopped from outside, and continues too late.
pub async fn a(folder: &Path) -> Result<(), Failure> {
    let (locks, prices) = (examples::locks_in(folder)?, Prices::open(folder).await?);
    locks.ready(PATIENCE).await?;
    let mut careless = None;

    let outcome: Result<(), Error> = locks
        .mutex(LOCK)
        .ttl(LEASE)
        .run(async |held| {
            let token = held.fencing_token()?;
            assert!(held.is_valid()); // true at this point; after that the process is stopped
            // Nothing stops this spawned task. With `held.scope(…)` around its work, the loss of
            // the lock would stop it. The example does not use `scope`, to show what happens
            // without it.
            careless = Some(tokio::spawn(write_when_told(prices.clone(), token)));
            println!("has the lock: {token}");
            work(&held).await
        })
        .await;

    match outcome {
        Err(error) if matches!(error.kind(), ErrorKind::Lost(_)) => {
            println!("was stopped: {:?}", error.kind());
        }
        other => return Err(format!("A's work ended with {other:?}").into()),
    }
    if let Some(careless) = careless {
        println!("wrote: {}", careless.await??);
    }
    Ok(locks.shutdown(PATIENCE).await?)
}

/// Process B: it gets the lock when A's lease has ended, and writes while it holds the lock.
pub async fn b(folder: &Path) -> Result<(), Failure> {
    let (locks, prices) = (examples::locks_in(folder)?, Prices::open(folder).await?);
    locks.ready(PATIENCE).await?;

    let guard = locks.mutex(LOCK).wait(PATIENCE).acquire().await?;
    let token = guard.fencing_token()?;
    println!("has the lock: {token}");
    println!("wrote: {}", prices.set("B", token).await?);
    told().await?;

    guard.release().await?;
    Ok(locks.shutdown(PATIENCE).await?)
}

/// Works until the loss of the lock stops it. A step takes 10 ms. A longer step contains the time
/// in which the process was frozen, so it has ended after the lock was lost. The process may have
/// been frozen in the middle of a poll. This poll ends after the freeze, but no further step may
/// follow.
async fn work(held: &Held) -> Result<(), Error> {
    let mut lost = false;
    loop {
        let step = Instant::now();
        tokio::time::sleep(Duration::from_millis(10)).await;
        if lost {
            println!("went on without the lock, grant {}", held.grant_id());
        }
        lost |= step.elapsed() >= LEASE;
    }
}

async fn write_when_told(prices: Prices, token: FencingToken) -> Result<&'static str, Failure> {
    told().await?;
    Ok(prices.set("A", token).await?)
}

async fn told() -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new(tokio::io::stdin())
        .read_line(&mut line)
        .await?;
    Ok(())
}
