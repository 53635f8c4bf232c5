//! What facts about stores that fail have in common, whatever the store: who asks from where, what it is to be
//! unavailable and to work again, and work that is to be stopped. The stores' own facts are in files of their names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lockcore::{Builder, Error, ErrorKind, Held, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions};
use tests::proxy::Proxy;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::store::{SOON, begin, give_back, kind, tickets};

/// Each fact has a store to itself, so that one is enough.
const NAMESPACE: &str = "test";

pub(crate) fn builder(url: impl Into<String>) -> Builder {
    Locks::builder().url(url).namespace(NAMESPACE)
}

/// A process with a mutex.
pub(crate) fn holder(url: &str, name: &str, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: NAMESPACE.into(),
        ttl,
        ..HolderOptions::mutex(url, name)
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// Of a store that nobody is at home in: whoever waits and whoever does not is told `why`.
pub(crate) async fn is_unavailable_within_one_operation(locks: &Locks, why: &str) {
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
        assert!(error.to_string().contains(why), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
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

/// The client does not know, and the store has made the ticket smaller. `downgrade` is what only such a request
/// says.
pub(crate) async fn a_downgrade_whose_reply_is_lost(
    server: u16,
    through: fn(&Proxy) -> Builder,
    other: &Locks,
    downgrade: &[u8],
    nothing_left: impl AsyncFn(),
) {
    for acknowledged in [true, false, true, false] {
        // Anew each time: after a reset its keeper asks for the smaller ticket too, and may be late with that.
        let proxy = Proxy::to(server);
        let locks = through(&proxy).op_timeout(SOON).build().unwrap();
        let mut guard = locks.mutex("a").acquire().await.unwrap();
        let token = guard.token();
        let reader = begin(other.rwlock("a").read().wait(SOON));
        tickets(other, "a", 2).await;
        proxy.lose_replies(downgrade, 1);

        assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);

        assert_eq!(proxy.traffic().replies_lost, 1);
        let reader = reader.await.unwrap().unwrap();
        assert!(guard.is_valid());
        assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
        let places = other.inspect("a").await.unwrap();
        assert_eq!(places[0].ticket, token.as_u64() >> 10, "{places:?}");
        if acknowledged {
            eventually("it is acknowledged", SOON, async || {
                guard.downgrade().await.is_ok()
            })
            .await;
            give_back(guard).await;
        } else {
            drop(guard);
        }
        give_back(reader).await;
        nothing_left().await;
    }
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
