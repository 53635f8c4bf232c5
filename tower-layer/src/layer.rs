//! The layer: what to lock and how to ask for it. What happens per request is in `service`.

use std::sync::Arc;
use std::time::Duration;

use lockcore::{Lock, Locks, Wait};
use tower_layer::Layer;

use crate::key::Key;
use crate::service::LockService;

/// Puts a lock around every request of a service: see the [crate's page](crate).
///
/// ```
/// use std::time::Duration;
///
/// use lockcore_tower::{Key, LockLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let layer = LockLayer::new(locks, Key::header("idempotency-key").prefix("payment:"))
///     .wait(Duration::from_secs(2))
///     .ttl(Duration::from_secs(5));
/// # drop(layer);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct LockLayer(Settings);

/// What the layer was told, shared by the services that it makes.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    locks: Locks,
    pub(crate) key: Key,
    wait: Option<Wait>,
    ttl: Option<Duration>,
}

impl LockLayer {
    /// Locks, for each request, the name that `key` finds in it.
    pub fn new(locks: Locks, key: Key) -> Self {
        Self(Settings {
            locks,
            key,
            wait: None,
            ttl: None,
        })
    }

    /// How long a request waits in line before it is answered with 409. Default: the client's
    /// (`LOCK_WAIT`, 15 s). A client that goes away leaves the line at once.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.0.wait = Some(wait.into());
        self
    }

    /// Answers 409 at once when the lock is not free: a wait of zero.
    pub fn try_only(self) -> Self {
        self.wait(Duration::ZERO)
    }

    /// The length of the lease: how long the key stays locked if this process dies. Default: the
    /// client's (`LOCK_TTL`, 10 s). It does not limit the request: the lease is renewed as long as
    /// the response lasts.
    ///
    /// One that the store does not take is answered with 500.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.ttl = Some(ttl);
        self
    }
}

impl Settings {
    pub(crate) fn lock(&self, name: String) -> Lock {
        let mut lock = self.locks.mutex(name);
        if let Some(wait) = self.wait {
            lock = lock.wait(wait);
        }
        if let Some(ttl) = self.ttl {
            lock = lock.ttl(ttl);
        }
        lock
    }
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, Arc::new(self.0.clone()))
    }
}
