//! What facts about failing stores share, whatever the store: clients and helper processes, checks that a store is
//! unavailable or works again, and work that has to be stopped. Facts about one store are in the files with its name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lockcore::{Builder, Error, ErrorKind, Held, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions};
use tests::stalls::awake_since;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::store::{LEASE, SOON, STALL, kind};

/// Each fact has its own store, so one namespace is enough.
const NAMESPACE: &str = "test";

/// All defaults: an operation may take a second, and a lease lasts ten.
pub(crate) fn builder(url: impl Into<String>) -> Builder {
    Locks::builder().url(url).namespace(NAMESPACE)
}

/// Allows more time, for operations that have to succeed: a stalled machine must not look like a failing store.
pub(crate) fn patient(url: impl Into<String>) -> Builder {
    builder(url).op_timeout(STALL).ttl(LEASE)
}

/// A helper process with a mutex.
pub(crate) fn holder(url: &str, name: &str, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: NAMESPACE.into(),
        ttl,
        // The default, because in these facts the store is what fails.
        variables: vec![("LOCK_OP_TIMEOUT".into(), "1s".into())],
        ..HolderOptions::mutex(url, name)
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// Checks a store that does not answer: a caller that waits and a caller that does not both get an error with all parts
/// of `why`.
pub(crate) async fn is_unavailable_within_one_operation(locks: &Locks, why: &[&str]) {
    for waits in [true, false] {
        let lock = locks.mutex("a").wait(3 * SOON);
        let started = Instant::now();
        let outcome = if waits {
            lock.acquire().await
        } else {
            lock.try_acquire().await
        };
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(!error.may_hold());
        let text = error.to_string();
        assert!(why.iter().all(|word| text.contains(word)), "{text}");
        assert!(awake_since(started) < Duration::from_secs(2));
    }
}

pub(crate) async fn works_again(locks: &Locks, name: &str, within: Duration) {
    eventually("works again", within, async || {
        match locks.mutex(name).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}

/// Work that makes one step after another. Its lock has failed if it makes a step after the next holder got in.
pub(crate) struct Work {
    pub(crate) held: Held,
    next_is_in: Arc<AtomicBool>,
    task: JoinHandle<Result<(), Error>>,
}

impl Work {
    pub(crate) async fn begin(lock: Lock) -> Self {
        let (begun, has_begun) = oneshot::channel();
        let next_is_in = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&next_is_in);
        let task = tokio::spawn(async move {
            lock.run(async |held| {
                begun.send(held).unwrap();
                while !seen.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await; // a step
                }
                Ok::<_, Error>(())
            })
            .await
        });
        Self {
            held: has_begun.await.unwrap(),
            next_is_in,
            task,
        }
    }

    /// Call this when the next holder is in.
    pub(crate) async fn assert_stopped(self) {
        self.next_is_in.store(true, Ordering::SeqCst);
        assert_eq!(
            kind(self.task.await.unwrap()),
            ErrorKind::Lost(LostReason::Expired)
        );
    }
}
