//! The view of a held lock.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::lifecycle::Held;
use super::warned::Warned;
use crate::backend::{AskedBack, Renewed};
use crate::error::{Error, LostReason};
use crate::pauses::Pauses;
use crate::token::{FencingToken, GrantId};

impl Held {
    /// The name of the lock, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.lease.request.name.as_str()
    }

    /// The name as the store knows it.
    #[cfg(feature = "postgres")]
    pub(crate) fn locked(&self) -> &crate::name::Name {
        &self.0.lease.request.name
    }

    /// Identifies this grant in logs and events. For writes, use the
    /// [`fencing_token`](Self::fencing_token).
    #[must_use]
    pub fn grant_id(&self) -> GrantId {
        self.0.grant_id
    }

    /// The fencing token of an exclusive lock. Send it with every write, and let the resource
    /// refuse lower tokens, as [`fencing`](crate::fencing) shows.
    ///
    /// A lock that is lost keeps its token, because the resource decides whether to refuse a late
    /// write.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for the read side of a read/write lock, also after a
    /// [downgrade](crate::Guard::downgrade), and for a semaphore: several holders may hold these at
    /// once, so their tokens define no order.
    pub fn fencing_token(&self) -> Result<FencingToken, Error> {
        if !self.is_exclusive() {
            let text = "a shared lock or a semaphore has no fencing token, because others may hold it too; take the mutex or the write side";
            return Err(self.failed(Error::config(text)));
        }
        Ok(FencingToken::of_exclusive(self.grant_id()))
    }

    /// Whether the lock is held at this moment, by the local deadline.
    ///
    /// A `true` may be out of date when the next line runs, because a process can be stopped
    /// between any two instructions. Only a check of the [token](Self::fencing_token) at the
    /// resource excludes that.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.lost_reason().is_none()
    }

    /// How long the lock is held if no further renewal succeeds. Zero when it is lost.
    ///
    /// With renewal on, this time becomes longer again with every renewal.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.is_over() || self.shared().is_forked() {
            return Duration::ZERO;
        }
        let now = self.shared().clock.now();
        now.until(self.0.lease.deadline())
    }

    /// How long ago this holder got the lock. A hold inside another hold of the same lock counts
    /// from the start of the outer hold. After a [downgrade](crate::Guard::downgrade), or after
    /// permits were given back, the time continues. In a view it continues after the end of the
    /// lock too.
    ///
    /// The time is measured on the clock of the lease, which also counts the time during which the
    /// machine is suspended.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.since.until(self.shared().clock.now())
    }

    /// Resolves when the lock is not held any more, and returns why. After a release, or after a
    /// [detach](crate::Guard::detach), this is [`Released`](LostReason::Released), as soon as the
    /// last guard of the hold has ended. All other reasons mean that the lock was lost. So a task
    /// that waits for the loss ends with the lock.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn lost(&self) -> LostReason {
        loop {
            let changed = self.0.lease.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if let Some(reason) = self.lost_reason() {
                return reason;
            }
            // The keeper notifies this task at the deadline, even while a renewal hangs.
            changed.await;
        }
    }

    /// Resolves when somebody asks for the lock with [`Locks::revoke`](crate::Locks::revoke).
    /// Finish the work, and release the lock. [`remaining`](Self::remaining) tells how much time is
    /// left at most. At the end of that time the lock is lost with
    /// [`Revoked`](LostReason::Revoked).
    ///
    /// Returns who asks for the lock, and why. This call reads both from the store. If the store
    /// does not answer, both are empty. The future stays pending after a release, for a lock
    /// without [renewal](crate::Lock::renew), and if the lock is lost for another reason.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits and reads.
    pub async fn revoked(&self) -> AskedBack {
        let (shared, lease) = (self.shared(), &self.0.lease);
        loop {
            let changed = lease.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if self.is_over() || shared.is_forked() {
                return std::future::pending().await;
            }
            if lease.is_asked_back() {
                break;
            }
            changed.await;
        }
        let places = shared.inspect(&lease.request.name).await;
        let places = places.unwrap_or_default();
        let place = places
            .into_iter()
            .find(|place| place.ticket == lease.ticket());
        let asked = place.and_then(|place| place.asked_back);
        asked.unwrap_or_else(|| AskedBack::new("", "", self.remaining()))
    }

    /// Resolves when only a third of the ttl is left, so that the lock is likely to be lost soon.
    /// With renewal on, this means that one renewal has failed, and a second one has failed or has
    /// no answer yet. Returns the time that is [left](Self::remaining).
    ///
    /// A renewal may succeed after that. Call this again to be warned again: the next call waits
    /// until a renewal has succeeded and only a third of the ttl is left again, or until the lock
    /// is lost. After a loss a call resolves once, with zero. All later calls stay pending, and so
    /// do calls after a release. [`lost`](Self::lost) tells of the loss.
    ///
    /// Each view gives its own warnings: a guard, the view from
    /// [`Guard::held`](crate::Guard::held), and each clone of a view. So make one view, and use it
    /// for all calls of a loop. For tasks that must all be warned, make a view each.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits. If the future is dropped, the next call gives the warning.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("report").acquire().await?;
    /// let held = guard.held();
    /// let watch = tokio::spawn(async move {
    ///     loop {
    ///         let left = held.in_danger().await;
    ///         eprintln!("the report may be lost in {left:?}");
    ///     }
    /// });
    ///
    /// guard.release().await?;
    /// watch.abort();
    /// # Ok(()) }
    /// ```
    pub async fn in_danger(&self) -> Duration {
        // If somebody makes a new view for each call, no call has to wait. Without this line, a
        // loop of such calls would never yield its thread.
        tokio::task::coop::consume_budget().await;
        let (shared, lease, Warned(warned)) = (self.shared(), &self.0.lease, &self.1);
        let order = Ordering::Relaxed;
        if shared.is_forked() {
            // Nothing rings the alarms of a forked child.
            return match warned.swap(Warned::OF_THE_LOSS, order) {
                Warned::OF_THE_LOSS => std::future::pending().await,
                _ => Duration::ZERO,
            };
        }
        loop {
            let changed = lease.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before the check, so that a loss in between is not missed.
            changed.as_mut().enable();
            let now = shared.clock.now();
            let is_lost = lease.lost(now).is_some();
            let deadline = lease.deadline();
            if self.is_over() {
                return std::future::pending().await;
            }
            let has_warned = warned.load(order) == deadline.as_nanos();
            let danger = deadline.before(lease.ttl() / 3);
            let next = match has_warned {
                false if danger <= now => {
                    warned.store(deadline.as_nanos(), order);
                    return now.until(deadline);
                }
                false => danger,
                true if is_lost => return std::future::pending().await,
                true => deadline,
            };
            // Renewals move the deadline without a notification, so the deadline is read again when
            // the alarm rings. A loss sends a notification.
            let _ = shared.by(next, changed).await;
        }
    }

    /// Makes sure that the lock is held for `duration` from now on: renews the lease if less time
    /// remains. Call it before a step that must not be interrupted.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost).
    ///
    /// [`Unknown`](crate::ErrorKind::Unknown) or [`Unavailable`](crate::ErrorKind::Unavailable)
    /// when the renewal was not acknowledged, or was acknowledged so late that less time is left.
    /// In both cases the lock is held for [`remaining`](Self::remaining).
    ///
    /// [`Config`](crate::ErrorKind::Config) when `duration` is longer than the lock's
    /// [ttl](crate::Lock::ttl), less a hundredth of it and 5 ms, or longer than
    /// [`max_hold`](crate::Lock::max_hold) leaves. [`Guard::extend`](crate::Guard::extend) makes
    /// the ttl longer. At a store with sessions, also when it is longer than the session certainly
    /// lasts.
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when somebody [asks for the lock](crate::Locks::revoke), and
    /// its holder has to give it up before `duration` is over.
    ///
    /// # Cancel safety
    ///
    /// Safe: if a renewal was sent, the store may carry it out, which does no harm.
    pub async fn ensure(&self, duration: Duration) -> Result<(), Error> {
        if self.is_valid() && self.remaining() >= duration {
            return Ok(());
        }
        let ensured = self.renewed().await;
        let ensured = ensured.and_then(|renewed| self.lasts(duration, renewed.valid_for()));
        ensured.map_err(|error| self.failed(error))
    }

    /// Checks, after a renewal that gave so much time, that the lease lasts for `duration`. The error
    /// tells whether the options or the store are the reason.
    fn lasts(&self, duration: Duration, given: Duration) -> Result<(), Error> {
        let remaining = self.remaining();
        if remaining >= duration {
            return Ok(());
        }
        let cannot = format!("cannot be ensured for {duration:?}");
        let lease = &self.0.lease;
        if duration > lease.longest(given) {
            let ttl = lease.ttl();
            return Err(Error::config(match given < ttl {
                true => format!("{cannot}: the store gives only {given:.1?} of the ttl of {ttl:?}"),
                false => format!(
                    "{cannot}: a renewal gives {ttl:?}; ask with a longer ttl, or extend it"
                ),
            }));
        }
        if let Some(error) = self.cut_by_an_ask(&cannot) {
            return Err(error);
        }
        if lease.deadline() == lease.hold_until() {
            return Err(Error::config(format!(
                "{cannot}: it ends by itself in {remaining:?} (max_hold)"
            )));
        }
        Err(Error::unavailable(format!(
            "{cannot}: the store was so slow to renew it that {remaining:?} were left; trying again may help"
        )))
    }

    /// The error that a renewal could not make the lease longer, because somebody asks for the lock
    /// and the time to give it up ends first.
    pub(super) fn cut_by_an_ask(&self, not_done: &str) -> Option<Error> {
        let lease = &self.0.lease;
        let is_cut = lease.is_asked_back() && lease.deadline() == lease.hold_until();
        let left = self.remaining();
        is_cut.then(|| Error::still_asked_for(format_args!("{not_done}, only for {left:?}")))
    }

    /// Renews the lease now. Fails if the lease is lost, or if the store does not answer.
    pub(crate) async fn renew(&self) -> Result<(), Error> {
        self.renewed().await.map(drop)
    }

    /// As [`renew`](Self::renew). Returns the answer of the store.
    async fn renewed(&self) -> Result<Renewed, Error> {
        let shared = self.shared();
        let mut renewed = Renewed::Lost;
        if self.is_valid() {
            let by = shared.clock.now().after(shared.op_timeout);
            // The lease has applied the answer, and the last line tells whether it is lost.
            renewed = shared.renew_now(&self.0.lease, by).await?;
        }
        self.loss().map_or(Ok(renewed), Err)
    }

    /// Renews the lease until the store itself says that the ticket holds. A ticket that has its
    /// [turn](crate::client::turns) waits at the store until the release of the ticket right ahead
    /// has arrived there, and an adopter cannot take over a ticket that waits.
    pub(super) async fn renew_until_it_holds(&self) -> Result<(), Error> {
        let shared = self.shared();
        let by = shared.clock.now().after(shared.op_timeout);
        let mut pauses = Pauses::between(Duration::from_millis(2), Duration::from_millis(50));
        loop {
            if self.renewed().await?.holds() {
                return Ok(());
            }
            let again = shared.clock.now().after(pauses.draw());
            if again >= by {
                return Err(Error::unavailable(
                    "the store has not seen the end of the holder before this one yet; trying again may help",
                ));
            }
            shared.alarm(again).await;
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("name", &self.name())
            .field("grant_id", &self.grant_id())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
