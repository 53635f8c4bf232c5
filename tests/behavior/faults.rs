//! What facts about stores that fail have in common, whatever the store: who asks from where, what it is to be
//! unavailable and to work again, and work that is to be stopped. The stores' own facts are in files of their names.

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

/// Each fact has a store to itself, so that one is enough.
const NAMESPACE: &str = "test";

/// With all defaults: a second for an operation, and ten for a lease.
pub(crate) fn builder(url: impl Into<String>) -> Builder {
    Locks::builder().url(url).namespace(NAMESPACE)
}

/// With more time than that, for what is to work: a machine that stalls is not a store that fails.
pub(crate) fn patient(url: impl Into<String>) -> Builder {
    builder(url).op_timeout(STALL).ttl(LEASE)
}

/// A process with a mutex.
pub(crate) fn holder(url: &str, name: &str, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: NAMESPACE.into(),
        ttl,
        // The default again: here it is the store that fails.
        variables: vec![("LOCK_OP_TIMEOUT".into(), "1s".into())],
        ..HolderOptions::mutex(url, name)
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// Of a store that nobody is at home in: whoever waits and whoever does not is told all of `why`.
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

/// Work that steps on and on, and ends well if it makes one more step when the next holder is in.
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

    /// To be asked when the next holder is in.
    pub(crate) async fn assert_stopped(self) {
        self.next_is_in.store(true, Ordering::SeqCst);
        assert_eq!(
            kind(self.task.await.unwrap()),
            ErrorKind::Lost(LostReason::Expired)
        );
    }
}
