//! What the user holds: the guard that releases, and the view that looks.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backend::{Departure, Released};
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::lease::Lease;
use crate::local::Share;
use crate::lock::{OnLost, Order};
use crate::locks::Client;
use crate::name::Name;
use crate::shared::{Shared, Where};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::table::{Cleanup, Stage};
use crate::token::{FencingToken, WriteToken};

/// A view of a held lock: its token, whether it is still held, and a signal when it is lost.
///
/// Clones are views of the same lock. A view never releases; it may outlive the lock, and says so.
#[derive(Clone)]
pub struct Held(Arc<Hold>);

/// One hold of a lock: the guards that share it, and what is given back when the last is gone.
struct Hold {
    lease: Arc<Lease>,
    token: FencingToken,
    exclusive: bool,
    client: Arc<Client>,
    on_lost: OnLost,
    #[cfg(debug_assertions)]
    label: Option<&'static str>,
    /// Zero is final.
    guards: AtomicU32,
    /// A guard has ended that had lost the lock.
    ended_lost: AtomicBool,
    /// `None` once it has been given back.
    source: Mutex<Option<Source>>,
    /// Made by the first inner hold; as many permits as the lock has.
    turns: OnceLock<Arc<Semaphore>>,
}

/// Where a hold comes from, and so what its end means.
enum Source {
    /// A ticket of its own, which is not given back before a time (`min_hold`).
    Ticket { keep_until: Instant },
    /// A ticket that others in this process may use after it, or with it.
    Share(Share),
    /// Another hold of the same lock, whose scope this was taken in.
    Outer(Guard, Option<Turn>),
}

/// What an exclusive inner hold takes, a shared one taking 1: fewer than tokio allows anywhere.
pub(crate) const TURNS: u32 = 1 << 28;

/// Inner holds that exclude each other have one at a time.
pub(crate) type Turn = OwnedSemaphorePermit;

impl Held {
    /// The name of the lock, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.lease.request.name.as_str()
    }

    /// The fencing token, as an identity of this grant: for logs. To write with, take the
    /// [`write_token`](Self::write_token).
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.0.token
    }

    /// The fencing token of an exclusive lock: pass it on with every write, and let the resource
    /// refuse lower ones, as [`fencing`](crate::fencing) shows.
    ///
    /// A lock that is lost still has it: whether a late write may pass is for the resource to say.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for the read side of a read/write lock, and for a
    /// semaphore: several hold those at once, so that their tokens order nothing.
    pub fn write_token(&self) -> Result<WriteToken, Error> {
        if !self.is_exclusive() {
            return Err(Error::config(
                "a shared lock or a semaphore has no token to write with, as others hold it too; take the mutex or the write side",
            )
            .of_name(self.name()));
        }
        Ok(WriteToken::of_exclusive(self.token()))
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
        if self.is_over() {
            return Duration::ZERO;
        }
        let now = self.shared().clock.now();
        now.until(self.0.lease.deadline())
    }

    /// Resolves when the lock is lost. It stays pending after a release.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn lost(&self) -> LostReason {
        let reason = self.0.lease.until_lost(&self.shared().clock).await;
        if self.is_over() {
            // Lost by somebody else, whom the ticket was passed on to.
            return std::future::pending().await;
        }
        reason
    }

    /// Resolves when the lock is likely to be lost soon: a third of its ttl is left, which with
    /// renewal on means that two renewals have failed. Returns what is [left](Self::remaining) then.
    /// It may still be renewed after that; ask again to be warned again. It stays pending after a
    /// release.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn in_danger(&self) -> Duration {
        let (shared, lease) = (self.shared(), &self.0.lease);
        loop {
            let changed = lease.changed.notified();
            let deadline = lease.deadline();
            let remaining = shared.clock.now().until(deadline);
            if self.is_over() {
                return std::future::pending().await;
            }
            if remaining <= lease.request.ttl / 3 {
                return remaining;
            }
            // Renewals move the deadline without a word; the alarm then looks again. A loss is told.
            let danger = deadline.before(lease.request.ttl / 3);
            let _ = shared.by(danger, changed).await;
        }
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
        self.lost_at(self.shared().clock.now())
    }

    fn lost_at(&self, now: Instant) -> Option<LostReason> {
        if self.is_over() {
            return Some(LostReason::Released);
        }
        self.0.lease.lost(now)
    }

    /// Whether the last guard is gone, and had the lock until then. What becomes of the ticket after
    /// that is another's business.
    fn is_over(&self) -> bool {
        let hold = &self.0;
        hold.guards.load(Ordering::SeqCst) == 0 && !hold.ended_lost.load(Ordering::SeqCst)
    }

    /// Another guard of the same hold, while there is one.
    pub(crate) fn guard(&self) -> Option<Guard> {
        let one_more = |guards: u32| (guards > 0).then(|| guards.checked_add(1))?;
        self.0
            .guards
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more)
            .ok()?;
        Some(Guard {
            held: self.clone(),
            over: false,
        })
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.0.exclusive
    }

    pub(crate) fn is_of(&self, client: &Arc<Client>, name: &Name) -> bool {
        self.is_of_client(client) && self.0.lease.request.name == *name
    }

    pub(crate) fn is_of_client(&self, client: &Arc<Client>) -> bool {
        Arc::ptr_eq(&self.0.client, client)
    }

    /// [`Lock::label`](crate::Lock::label).
    #[cfg(debug_assertions)]
    pub(crate) fn label(&self) -> Option<&'static str> {
        self.0.label
    }

    /// What inner holds wait for before they begin.
    pub(crate) fn turns(&self) -> Arc<Semaphore> {
        let all = || Arc::new(Semaphore::new(TURNS as usize));
        Arc::clone(self.0.turns.get_or_init(all))
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
    /// It does not count any more.
    over: bool,
}

/// What [`Guard::release`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lock was held to the end, and its user is done with it.
    Released,
    /// It had been lost before: somebody else may have held it meanwhile.
    AlreadyLost,
}

impl Guard {
    /// Of a ticket that the store has just granted, and that nobody else uses.
    pub(crate) fn of_ticket(lease: Arc<Lease>, order: &Order<'_>) -> Self {
        order.client.shared.entrust_held(&lease);
        let token = FencingToken::of_ticket(lease.ticket(), 0);
        // What is given back before it was used is given back at once.
        let keep_until = Instant::from_nanos(0);
        Self::new(lease, token, Source::Ticket { keep_until }, order)
    }

    /// The hold begins: its limits count from now. They mean nothing where the ticket is another's too.
    pub(crate) fn begin(&self, min_hold: Duration, max_hold: Option<Duration>) {
        if min_hold.is_zero() && max_hold.is_none() {
            return;
        }
        let (hold, shared) = (&self.held.0, self.shared());
        let now = shared.clock.now();
        let mut source = hold.source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Source::Ticket { keep_until }) = &mut *source {
            *keep_until = now.after(min_hold);
            if let Some(limit) = max_hold {
                hold.lease.end_at(now.after(limit));
                shared.entrust_held(&hold.lease);
            }
        }
    }

    /// Of a ticket that others of this process may have used before.
    pub(crate) fn of_share(share: Share, order: &Order<'_>) -> Self {
        let lease = Arc::clone(share.lease());
        let token = FencingToken::of_ticket(lease.ticket(), share.hand_overs());
        Self::new(lease, token, Source::Share(share), order)
    }

    /// Of a lock that `outer` holds already.
    pub(crate) fn inside(outer: Guard, turn: Option<Turn>, order: &Order<'_>) -> Self {
        let (lease, token) = (Arc::clone(&outer.0.lease), outer.token());
        Self::new(lease, token, Source::Outer(outer, turn), order)
    }

    fn new(lease: Arc<Lease>, token: FencingToken, source: Source, order: &Order<'_>) -> Self {
        let hold = Hold {
            lease,
            token,
            exclusive: order.is_exclusive(),
            client: Arc::clone(order.client),
            on_lost: order.on_lost,
            #[cfg(debug_assertions)]
            label: order.label,
            guards: AtomicU32::new(1),
            ended_lost: AtomicBool::new(false),
            source: Mutex::new(Some(source)),
            turns: OnceLock::new(),
        };
        Self {
            held: Held(Arc::new(hold)),
            over: false,
        }
    }

    /// A view that can be cloned and passed on.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.clone()
    }

    /// A second guard of the same hold, without asking anybody: the lock is given back when the
    /// last of them is gone. For work that is split up; it does not keep the parts apart.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost).
    pub fn reenter(&self) -> Result<Guard, Error> {
        if let Some(reason) = self.lost_reason() {
            return Err(Error::lost(reason).of_name(self.name()));
        }
        let released = || Error::lost(LostReason::Released).of_name(self.name());
        self.held.guard().ok_or_else(released)
    }

    /// Releases the lock and waits for the store's answer, at most one operation timeout. There is
    /// nothing to wait for where the lock is passed on inside this process, where another guard of the
    /// same hold is left, and where the keeper gives it back later
    /// ([`Lock::min_hold`](crate::Lock::min_hold)).
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
        let now = self.shared().clock.now();
        let lost_before = self.lost_at(now).is_some();
        let at_the_store = match self.end(now) {
            None => false,
            Some(Source::Ticket { .. }) => true,
            Some(Source::Share(share)) => share.leave(),
            Some(Source::Outer(outer, turn)) => {
                drop(turn);
                // Boxed, or this future would contain itself.
                return Box::pin(outer.release()).await;
            }
        };
        let (lock, token) = (self.name(), self.token());
        let mut found = true;
        if at_the_store {
            found = Departing::of(&self.held).release(now).await?;
        }
        tracing::debug!(lock, %token, found, at_the_store, "lock released");
        Ok(if found && !lost_before {
            Release::Released
        } else {
            Release::AlreadyLost
        })
    }

    /// Ends this guard. Returns what is to be given back now if it was the last of its hold.
    fn end(&mut self, now: Instant) -> Option<Source> {
        if std::mem::replace(&mut self.over, true) {
            return None;
        }
        let hold = &self.held.0;
        let shared = self.shared();
        let lost = hold.lease.lost(now);
        if let Some(reason) = lost {
            hold.ended_lost.store(true, Ordering::SeqCst);
            shared.lost(&hold.lease, Stage::Held, reason);
        }
        if hold.guards.fetch_sub(1, Ordering::SeqCst) > 1 {
            return None;
        }
        let mut source = hold.source.lock().unwrap_or_else(PoisonError::into_inner);
        let source = source.take();
        if let Some(Source::Ticket { keep_until }) = source
            && lost.is_none()
            && now < keep_until
        {
            shared.keep(&hold.lease, keep_until);
            return None;
        }
        source
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
        if self.over {
            return;
        }
        let Some(source) = self.end(self.shared().clock.now()) else {
            return;
        };
        tracing::debug!(lock = self.name(), token = %self.token(), "lock released in the background");
        match source {
            Source::Ticket { .. } => self.shared().clean_up(Cleanup::of(self.lease())),
            // Their drops give back.
            Source::Share(share) => drop(share),
            Source::Outer(outer, turn) => drop((turn, outer)),
        }
    }
}

/// A ticket that its last user is releasing at the store. If that is not acknowledged, for whatever
/// reason, its drop hands the ticket to the keeper.
struct Departing<'a> {
    held: &'a Held,
    acknowledged: bool,
}

impl<'a> Departing<'a> {
    fn of(held: &'a Held) -> Self {
        // No later batch renews it.
        held.shared().table().leave(held.0.lease.request.id);
        Self {
            held,
            acknowledged: false,
        }
    }

    /// Returns whether the ticket was there.
    async fn release(mut self, now: Instant) -> Result<bool, Error> {
        let (shared, lease) = (self.held.shared(), &self.held.0.lease);
        let departure = Departure {
            request: Arc::clone(&lease.request),
            enqueue_may_follow: lease.is_ambiguous(),
        };
        let by = now.after(shared.op_timeout);
        let answer = shared
            .operate(Where::Here, by, |connection| {
                connection.release(vec![departure])
            })
            .await;
        let error = match answer.map(|(_, answers)| answers.first().copied()) {
            Ok(Some(released @ (Released::Released | Released::NotFound))) => {
                self.acknowledged = true;
                shared.disarm(lease.request.id);
                return Ok(released == Released::Released);
            }
            Ok(Some(Released::Failed) | None) => {
                Error::unknown("the store could not say whether the lock is released")
            }
            Err(error) => Error::from(error),
        };
        Err(error.of_name(self.held.name()))
    }
}

impl Drop for Departing<'_> {
    fn drop(&mut self) {
        if !self.acknowledged {
            // Releases once more if the first request has arrived, which finds nothing.
            let lease = &self.held.0.lease;
            self.held.shared().clean_up(Cleanup::of(lease));
        }
    }
}
