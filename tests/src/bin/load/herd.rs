//! The modes `w6` and `give-up`: one holder and a line of waiters. They measure the cost of a
//! hand-over with many waiters, the cost of waiting, and the cost of a waiter that gives up.

use std::sync::Arc;
use std::time::Duration;

use lockcore::{Error, Guard, Lock, Release};
use serde_json::json;
use tests::measure::{now, seconds};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::Failed;
use crate::client::{Client, Driver, Failures, pause, say};

/// The line is treated as complete when no ticket has joined it for this long.
const SETTLED: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(100);

/// A pause after the report. In this pause a driver counts the requests at the store. After it, the
/// rest of the line leaves, which causes more requests.
const LINGER: Duration = Duration::from_secs(1);

pub(crate) async fn run(
    client: &Client,
    n: usize,
    hold: Duration,
    k: usize,
    key: &str,
) -> Result<(), Failed> {
    if k == 0 {
        return Err("K counts releases: at least 1".into());
    }
    let mut failures = Failures::default();
    // Without a warm-up, the first release on a new server would count twice. It is sent with the
    // script's hash, and then again with the script's text.
    client.warm_up(&mut failures).await;
    let lock = client.lock(key);
    let first = lock.acquire().await?;
    let (told, mut outcomes) = mpsc::unbounded_channel();
    let herd = Arc::new(Herd {
        turns: Semaphore::new(k - 1),
        again: Semaphore::new(k.saturating_sub(n + 1)),
        told,
    });
    // These tasks are dropped at the end of this function. The keeper releases their tickets.
    let mut line = JoinSet::new();
    for _ in 0..n {
        line.spawn(Arc::clone(&herd).wait_in_line(lock.clone(), hold));
    }
    line_stands(client, key, n + 1).await?;

    say("READY");
    let mut driver = Driver::listen();
    while driver
        .hear()
        .await
        .ok_or("standard input closed before `go`")?
        != "go"
    {}
    let began = now();
    failures.note_release(first.release().await);
    let mut releases = 1;
    while releases < k {
        match outcomes.recv().await.ok_or("nobody is left in the line")? {
            Ok(release) => {
                failures.note_release(Ok(release));
                releases += 1;
            }
            Err(error) => failures.note_release(Err(error)),
        }
    }
    let took = now() - began;
    say("DONE");
    let figures = json!({"waiters": n, "releases": releases, "seconds": seconds(took)});
    client.report(&failures, figures);
    let _ = timeout(LINGER, driver.until_closed()).await;
    Ok(())
}

/// Makes a line of waiters. At the line `go`, `k` of them give up, at equal distances in the line.
pub(crate) async fn give_up(client: &Client, n: usize, k: usize, key: &str) -> Result<(), Failed> {
    if k == 0 || k > n {
        return Err("K of the N waiters give up: 1 to N".into());
    }
    let mut failures = Failures::default();
    client.warm_up(&mut failures).await;
    let lock = client.lock(key);
    let first = lock.acquire().await?;
    let mut line: Vec<_> = (0..n)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.acquire().await })
        })
        .collect();
    line_stands(client, key, n + 1).await?;

    let mut driver = Driver::listen();
    say("READY");
    while driver
        .hear()
        .await
        .ok_or("standard input closed before `go`")?
        != "go"
    {}
    let began = now();
    for waiter in line.iter().skip(n / k - 1).step_by(n / k).take(k) {
        waiter.abort();
    }
    say("DONE");
    let took = now() - began;
    driver.until_closed().await;
    for waiter in line.drain(..) {
        waiter.abort();
    }
    failures.note_release(first.release().await);
    let figures = json!({"waiters": n, "gave_up": k, "seconds": seconds(took)});
    client.report(&failures, figures);
    Ok(())
}

/// Waits until `all` tickets are there, or no more tickets come: the store does not show tasks that
/// wait in a lane.
async fn line_stands(client: &Client, key: &str, all: usize) -> Result<(), Error> {
    let (mut length, mut since) = (0, now());
    while length < all && now() - since < SETTLED.as_nanos() as u64 {
        sleep(LOOK).await;
        let places = client.locks.inspect(key).await?.len();
        if places != length {
            (length, since) = (places, now());
        }
    }
    Ok(())
}

struct Herd {
    /// A winner takes one of these before it releases. If there is none, it keeps the lock, so that
    /// nothing happens at the store after DONE.
    turns: Semaphore,
    /// A waiter takes one of these to wait a second time. There are some only if there are more
    /// than N + 1 releases.
    again: Semaphore,
    told: mpsc::UnboundedSender<Result<Release, Error>>,
}

impl Herd {
    async fn wait_in_line(self: Arc<Self>, lock: Lock, hold: Duration) {
        loop {
            match lock.acquire().await {
                Ok(guard) => {
                    self.take_turn(guard, hold).await;
                    match self.again.try_acquire() {
                        Ok(again) => again.forget(),
                        Err(_) => return,
                    }
                }
                Err(error) => {
                    let _ = self.told.send(Err(error));
                    pause().await;
                }
            }
        }
    }

    async fn take_turn(&self, guard: Guard, hold: Duration) {
        let Ok(turn) = self.turns.try_acquire() else {
            return std::future::pending().await;
        };
        turn.forget();
        if !hold.is_zero() {
            sleep(hold).await;
        }
        let released = guard.release().await;
        // If the receiver is gone, the last release has been reported, or Ctrl-C has come.
        let _ = self.told.send(released);
    }
}
