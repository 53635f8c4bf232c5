//! What the user holds: the guard that releases, and the view that looks.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Departure, Released};
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::lease::Lease;
use crate::lock::{OnLost, Order};
use crate::locks::Client;
use crate::shared::{Shared, Where};
use crate::table::{Cleanup, Stage};
use crate::token::FencingToken;

/// A view of a held lock: its token, whether it is still held, and a signal when it is lost.
///
/// Clones are views of the same lock. A view never releases; it may outlive the lock, and says so.
#[derive(Clone)]
pub struct Held(Arc<Inner>);

struct Inner {
    lease: Arc<Lease>,
    client: Arc<Client>,
    on_lost: OnLost,
}

impl Held {
    /// The name of the lock, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.lease.request.name.as_str()
    }

    /// The fencing token: pass it on with every write, and let the resource refuse lower ones.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        FencingToken::of_ticket(self.0.lease.ticket())
    }

    /// Whether the lock is held at this moment, by the local deadline.
    ///
    /// A `true` may be outdated when the next line runs: a process can be stopped between any two
    /// instructions. Only a check of the [token](Self::token) at the resource closes that gap.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.lost_reason().is_none()
    }

    /// How long the lock is held if no further renewal succeeds; zero when it is lost.
    ///
    /// With renewal on this rises again at every renewal.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let now = self.shared().clock.now();
        now.until(self.0.lease.deadline())
    }

    /// Resolves when the lock is lost. It stays pending after a release.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn lost(&self) -> LostReason {
        self.0.lease.until_lost(&self.shared().clock).await
    }

    /// Makes sure that the lock is held for `duration` from now on, renewing it if less remains:
    /// call it before a step that must not be cut short.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost); [`Unknown`](crate::ErrorKind::Unknown) or
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the renewal was not acknowledged, in which case
    /// the lock is held for [`remaining`](Self::remaining) all the same;
    /// [`Config`](crate::ErrorKind::Config) when `duration` is longer than the lock's ttl allows.
    ///
    /// # Cancel safety
    ///
    /// Safe: a renewal that was sent may take effect, which does no harm.
    pub async fn ensure(&self, duration: Duration) -> Result<(), Error> {
        if self.is_valid() && self.remaining() >= duration {
            return Ok(());
        }
        self.renew()
            .await
            .map_err(|error| error.of_name(self.name()))?;
        if self.remaining() < duration {
            return Err(Error::config(format!(
                "cannot be ensured for {duration:?}: a renewal gives {:?}; ask with a longer ttl",
                self.0.lease.request.ttl
            ))
            .of_name(self.name()));
        }
        Ok(())
    }

    async fn renew(&self) -> Result<(), Error> {
        let shared = self.shared();
        if self.is_valid() {
            let by = shared.clock.now().after(shared.op_timeout);
            shared.renew_now(&self.0.lease, by).await?;
        }
        match self.lost_reason() {
            Some(reason) => Err(Error::lost(reason)),
            None => Ok(()),
        }
    }

    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        self.0.lease.lost(self.shared().clock.now())
    }

    pub(crate) fn on_lost(&self) -> OnLost {
        self.0.on_lost
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.0.lease
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.client.shared
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("name", &self.name())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A held lock. Dropping it hands the release to the client's keeper thread, which also works
/// outside a runtime, during a panic and while a runtime shuts down; [`release`](Self::release)
/// waits for the store's answer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").acquire().await?;
/// println!("{} is ours, token {}", guard.name(), guard.token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released as soon as the guard is dropped; bind it to a variable"]
pub struct Guard {
    held: Held,
    /// The store has confirmed that the ticket is gone.
    gone: bool,
}

/// What [`Guard::release`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lock was held to the end.
    Released,
    /// It had been lost before: somebody else may have held it meanwhile.
    AlreadyLost,
}

impl Guard {
    pub(crate) fn new(lease: Arc<Lease>, order: &Order<'_>) -> Self {
        let shared = &order.client.shared;
        if let Some(limit) = order.max_hold {
            lease.end_at(shared.clock.now().after(limit));
        }
        let due = if lease.wants_renewal() {
            Shared::renewal_time(&lease, lease.request.ttl)
        } else {
            Instant::FAR_FUTURE // the keeper only watches the deadline
        };
        shared.entrust(lease.request.id, Stage::Held, due);
        let held = Held(Arc::new(Inner {
            lease,
            client: Arc::clone(order.client),
            on_lost: order.on_lost,
        }));
        Self { held, gone: false }
    }

    /// A view that can be cloned and passed on.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.clone()
    }

    /// Releases the lock and waits for the store's answer, at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when the store
    /// did not answer. The keeper goes on trying until it is acknowledged or the lease has run out.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future hands the release to the keeper, as dropping the guard does.
    pub async fn release(mut self) -> Result<Release, Error> {
        let shared = Arc::clone(self.held.shared());
        let lease = Arc::clone(&self.held.0.lease);
        let lost_before = self.held.lost_reason().is_some();
        // No later batch renews it. Until the answer is here, `self` is what is responsible: if
        // this future is dropped, its drop releases once more, which finds nothing.
        shared.entrust(lease.request.id, Stage::Leaving, Instant::FAR_FUTURE);
        let departure = Departure {
            request: Arc::clone(&lease.request),
            enqueue_may_follow: lease.is_ambiguous(),
        };
        let by = shared.clock.now().after(shared.op_timeout);
        let answer = shared
            .operate(Where::Here, by, |connection| {
                connection.release(vec![departure])
            })
            .await;
        let found = match answer.map(|(_, answers)| answers.first().copied()) {
            Ok(Some(Released::Released)) => true,
            Ok(Some(Released::NotFound)) => false,
            Ok(Some(Released::Failed) | None) => {
                let error = Error::unknown("the store could not say whether the lock is released");
                return Err(error.of_name(self.held.name()));
            }
            Err(error) => return Err(Error::from(error).of_name(self.held.name())),
        };
        self.gone = true;
        shared.disarm(lease.request.id);
        tracing::debug!(lock = %lease.request.name, token = %self.token(), found, "lock released");
        Ok(if found && !lost_before {
            Release::Released
        } else {
            Release::AlreadyLost
        })
    }
}

impl Deref for Guard {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.held
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let lease = &self.held.0.lease;
        tracing::debug!(lock = %lease.request.name, token = %self.token(), "lock released in the background");
        self.held.shared().clean_up(Cleanup {
            request: Arc::clone(&lease.request),
            ambiguous: lease.is_ambiguous(),
            after: None,
        });
    }
}
