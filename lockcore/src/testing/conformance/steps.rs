//! The steps that many facts take, and their times. The behaviour suite of this project takes the
//! same steps.

use std::future::Future;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::stalls::{self, awake_since};
use crate::error::Error;
use crate::hold::{Guard, Release};
use crate::lock::Lock;
use crate::locks::Locks;

/// A timeout that is long enough for a slow machine and short enough to notice a hang.
pub const SOON: Duration = Duration::from_secs(10);

/// For how long a busy machine may stall without failing a fact that is not about time.
pub const STALL: Duration = Duration::from_secs(30);

/// The ttl of a fact's clients. It is longer than [`STALL`], and its renewals are 20 s apart. It is
/// also the longest wait of waiters, in facts that check the wait by [`soon`], or do not check it.
pub const LEASE: Duration = STALL.saturating_mul(2);

/// Stores count in milliseconds, and may round up or down.
pub const A_FEW_MILLIS: Duration = Duration::from_millis(20);

/// A pause between two checks of a condition. It is short compared with everything that a fact
/// measures, and long enough that the checks do not keep one of two cores busy.
pub const STEP: Duration = Duration::from_millis(2);

/// Spawns a task that acquires the lock.
pub fn begin(lock: Lock) -> JoinHandle<Result<Guard, Error>> {
    tokio::spawn(async move { lock.acquire().await })
}

/// Waits until a name has `count` holders and waiters together: tickets at the store, and waiters
/// inside this client.
pub async fn tickets(locks: &Locks, name: &str, count: usize) {
    eventually("the line has formed", SOON, async || {
        let places = locks.inspect(name).await.unwrap();
        let local: u32 = places.iter().map(|place| place.local_waiters).sum();
        places.len() + local as usize == count
    })
    .await;
}

/// The result of a future that has to end [soon](SOON). Time in which the machine stalls does not
/// count.
pub async fn soon<T>(coming: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let came = coming.await;
    let awake = awake_since(began);
    assert!(awake < SOON, "{awake:?}");
    came
}

/// Checks the condition again and again until it holds. Panics with `what` if the condition does
/// not hold within the time. Stalls of the machine do not count. One more check begins after the
/// time is over, so a slow answer alone does not fail the fact.
///
/// The bound is not `AsyncFnMut`, because it could not require futures that are `Send`. The futures
/// of a [fact](super::Fact) are `Send`.
pub async fn eventually<F: Future<Output = bool>>(
    what: &str,
    within: Duration,
    mut holds: impl FnMut() -> F,
) {
    stalls::watch();
    let began = Instant::now();
    loop {
        let over = awake_since(began) >= within;
        if holds().await {
            return;
        }
        assert!(!over, "not within {within:?}: {what}");
        tokio::time::sleep(STEP).await;
    }
}

/// Releases the lock and checks that it was held to the end.
pub async fn give_back(guard: Guard) {
    assert_eq!(guard.release().await.unwrap(), Release::Released);
}
