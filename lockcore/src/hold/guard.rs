//! The operations of the holder of a lock: re-enter, downgrade, give permits back, extend, release.

use std::num::NonZeroU32;
use std::time::Duration;

use humantime::format_duration;

use super::departing::{Departing, Shrinking};
use super::lifecycle::{End, Guard, Held, Origin};
use crate::client::lease::Trust;
use crate::error::{Error, ErrorKind, LostReason};
use crate::request::FULL;

/// The result of [`Guard::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Release {
    /// The lock was held to the end, and has been released.
    Released,
    /// The lock had been lost before: somebody else may have held it meanwhile.
    AlreadyLost,
}

impl Guard {
    /// A view of the lock, which can be cloned and passed to other code.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.clone()
    }

    /// Returns a second guard of the same hold, without a request to the store. The lock is
    /// released when the last guard is gone. Use this for work that is split into parts. It does
    /// not make the parts exclude each other.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost).
    pub fn reenter(&self) -> Result<Guard, Error> {
        if let Some(error) = self.loss() {
            return Err(error);
        }
        let released = || self.lost_for(LostReason::Released);
        self.held.guard(true).ok_or_else(released)
    }

    /// Turns a write hold into a read hold, and waits for the store's answer, at most one operation
    /// timeout. From then on other readers can take the lock, and the store wakes readers that wait
    /// in line. No writer gets the lock in between. The order of the line does not change: a reader
    /// does not overtake a writer that came before it.
    ///
    /// A read hold has no [`fencing_token`](Held::fencing_token). To write again, release this hold
    /// and take the lock again. A request for the write side from inside the read hold fails with
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock). [`grant_id`](Held::grant_id) does not
    /// change. This call renews the lease, as [`ensure`](Held::ensure) does, even without
    /// [renewal](crate::Lock::renew). A [`min_hold`](crate::Lock::min_hold) applies to the read
    /// side after this call.
    ///
    /// A second call does nothing, and so does a call on a lock that was taken to read. The
    /// exception: if the store has not acknowledged an earlier downgrade yet, the call asks the
    /// store again.
    ///
    /// A hold that was taken inside of another hold of the lock
    /// ([`Lock::reentrant`](crate::Lock::reentrant)) is a part of that outer hold. While the outer
    /// hold has a writer, the call sends no request to the store, and no other reader can take the
    /// lock.
    ///
    /// # Errors
    ///
    /// In these cases nothing has changed: [`Busy`](crate::ErrorKind::Busy) while the hold has
    /// another guard that writes, or an inner hold that writes;
    /// [`Config`](crate::ErrorKind::Config) for a semaphore; [`Lost`](crate::ErrorKind::Lost) if
    /// the lock was lost before.
    ///
    /// In these cases this is a read hold although the call fails:
    ///
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown)
    ///   when the store has not acknowledged the change. The lock is held for
    ///   [`remaining`](Held::remaining), but the store may not let readers of other processes in
    ///   yet. The keeper asks the store again until it has acknowledged the change.
    /// - [`Lost`](crate::ErrorKind::Lost) when the store answers that the lock is lost.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before its first poll, nothing has happened. If it is dropped
    /// later, this guard is a read hold, and the keeper asks the store again until it has
    /// acknowledged the change.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let catalog = locks.rwlock("catalog:7");
    /// let mut guard = catalog.write().acquire().await?;
    /// println!("rebuilt, nobody has seen it half done");
    ///
    /// guard.downgrade().await?;
    /// let reader = catalog.read().try_acquire().await?;
    /// assert!(catalog.write().try_acquire().await.is_err());
    /// # drop((guard, reader));
    /// # Ok(()) }
    /// ```
    pub async fn downgrade(&mut self) -> Result<(), Error> {
        let outcome = self.downgraded().await;
        outcome.map_err(|error| self.failed(error))
    }

    async fn downgraded(&mut self) -> Result<(), Error> {
        if self.lease().request.capacity != FULL {
            return Err(Error::config(
                "a semaphore has no read side; give permits back by release_permits instead",
            ));
        }
        if let Some(error) = self.loss() {
            return Err(error);
        }
        if self.writes {
            if !self.held.0.guards.only_writer_less() {
                return Err(Error::still_written());
            }
            self.writes = false;
            self.held.read_on();
        }
        match self.lease().is_shrinking() {
            true => Shrinking(&self.held).ask().await,
            false => Ok(()),
        }
    }

    /// Gives back some permits of a semaphore, keeps the others, and waits for the store's answer,
    /// at most one operation timeout. The store wakes waiters in line that can use the permits.
    /// `permits` is at least 1 and less than the number of permits that are held. To give back all
    /// of them, [`release`](Self::release) the guard.
    ///
    /// Guards made by [`reenter`](Self::reenter) share the permits, so the permits are gone for all
    /// guards of the hold. The last of the guards gives back the rest. [`grant_id`](Held::grant_id)
    /// and the position in line do not change. This call renews the lease, as
    /// [`ensure`](Held::ensure) does, even without [renewal](crate::Lock::renew).
    ///
    /// # Errors
    ///
    /// In these cases nothing has changed:
    ///
    /// - [`Config`](crate::ErrorKind::Config) for another number of permits, and for a mutex or a
    ///   read/write lock (use [`downgrade`](Self::downgrade) there).
    /// - [`Lost`](crate::ErrorKind::Lost) if the lock was lost before.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown)
    ///   when the store has not acknowledged permits that were given back by an earlier call.
    ///
    /// In these cases the caller has given up the permits although the call fails:
    ///
    /// - `Unavailable` or `Unknown` when the store has not acknowledged this change. The keeper
    ///   asks again until the store answers, and until then nobody else may get these permits.
    ///   [`remaining`](Held::remaining) tells how long the other permits are held.
    /// - `Lost` when the store answers that the lock is lost.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before its first poll, nothing has happened. If it is dropped
    /// later, the permits are given up, and the keeper asks the store until it answers. The
    /// exception is a call that had to wait for the answer about permits of an earlier call: then
    /// the permits of this call may be kept.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// let guard = uploads.permits(5).acquire().await?;
    /// println!("four of five parts are up");
    ///
    /// guard.release_permits(4).await?;
    /// let others = uploads.permits(4).try_acquire().await?;
    /// # drop(others);
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn release_permits(&self, permits: u32) -> Result<(), Error> {
        let outcome = self.permits_released(permits).await;
        outcome.map_err(|error| self.failed(error))
    }

    /// Gives back all permits but `left`, as [`release_permits`](Self::release_permits) does. If an
    /// earlier call has given them back, this call asks the store only if the store has not
    /// acknowledged that yet.
    pub(crate) async fn keep_permits(&self, left: u32) -> Result<(), Error> {
        let lease = self.lease();
        match lease.permits().checked_sub(left) {
            Some(rest @ 1..) => self.release_permits(rest).await,
            _ if lease.is_shrinking() => Shrinking(&self.held).ask().await,
            _ => Ok(()),
        }
    }

    async fn permits_released(&self, permits: u32) -> Result<(), Error> {
        let lease = self.lease();
        if lease.request.capacity == FULL {
            return Err(Error::config(
                "only the permits of a semaphore can be given back in part; downgrade a write hold to read on",
            ));
        }
        loop {
            if let Some(error) = self.loss() {
                return Err(error);
            }
            let held = lease.permits();
            let Some(left) = held.checked_sub(permits).and_then(NonZeroU32::new) else {
                return Err(Error::config(format!(
                    "{permits} of the {held} permits that are held cannot be given back in part; for all of \
                     them, release the guard instead"
                )));
            };
            if permits == 0 {
                return Err(Error::config("no permits to give back: it takes 1 or more"));
            }
            if lease.shrink_from(held, left.get()) {
                return Shrinking(&self.held).ask().await;
            }
            // Another guard of this hold is giving permits back, or an earlier call was not
            // acknowledged. There is only one change at a time, so the store is asked about that
            // one first.
            Shrinking(&self.held).ask().await?;
        }
    }

    /// Makes the ttl of the lease longer than the one that the lock was taken with, and renews the
    /// lease with it. From now on the lock is held for `ttl` without a further renewal, less a
    /// hundredth of it and 5 ms. Later renewals ask for the new ttl and begin after a third of it,
    /// for as long as the lock is held.
    ///
    /// Use this for work that turns out to take long, and for a step during which the store may be
    /// out of reach. Use it also for a lease without [renewal](crate::Lock::renew). If this process
    /// dies, the lock stays taken for up to `ttl`.
    ///
    /// `ttl` is at least the present ttl, and at most the longest that the store allows
    /// ([`Capability::longest_ttl`](crate::backend::Capability::longest_ttl)). At a store with
    /// sessions, the longest ttl is the length of the session that the server gave, and a renewal
    /// gives the time that the session certainly lasts, which is a part of it. With the present ttl, the call only renews.
    /// [`max_hold`](crate::Lock::max_hold) ends the lease even if its ttl is longer. A ticket with
    /// a longer ttl is not handed over inside this process: the next waiter asks for a ticket with
    /// its own ttl.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for another ttl, and [`Lost`](crate::ErrorKind::Lost).
    /// In both cases nothing has changed.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) in
    /// two cases: the store did not acknowledge within an operation timeout, or an earlier request
    /// with the shorter ttl was never answered, a renewal or an attempt to take the lock. That
    /// request may arrive late and cut the lease short. So for a minute after it was sent, this
    /// process relies on the shorter ttl only. In both cases the lock is held for
    /// [`remaining`](Held::remaining), and later renewals ask for the longer ttl.
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when somebody [asks for the lock](crate::Locks::revoke), and
    /// its holder has to give it up before `ttl` is over. The lock is held for
    /// [`remaining`](Held::remaining).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before its first poll, nothing has happened. If it is dropped
    /// later, all later renewals ask for the longer ttl.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("report").acquire().await?;
    /// assert!(guard.remaining() < Duration::from_secs(11));
    ///
    /// // It has more pages than usual.
    /// guard.extend(Duration::from_secs(60)).await?;
    /// assert!(guard.remaining() > Duration::from_secs(55));
    /// # Ok(()) }
    /// ```
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let outcome = self.extended(ttl).await;
        outcome.map_err(|error| self.failed(error))
    }

    async fn extended(&self, ttl: Duration) -> Result<(), Error> {
        let (shared, lease) = (self.shared(), &self.held.0.lease);
        if let Some(error) = self.loss() {
            return Err(error);
        }
        let by = shared.clock.now().after(shared.op_timeout);
        let longest = shared.longest_ttl(by).await;
        let longest = longest.map_err(Error::from)?;
        let present = lease.ttl();
        if ttl < present || ttl > longest {
            return Err(Error::config(format!(
                "a ttl of {} does not extend this lease: it has {}, and this store takes up to {}",
                format_duration(ttl),
                format_duration(present),
                format_duration(longest)
            )));
        }
        if ttl > present {
            lease.lengthen(ttl);
            // The next waiter has asked for the shorter ttl, so it must not get this ticket.
            self.held.0.client.lanes.retire(lease);
        }
        loop {
            // Read before the renewal, because another guard may make the ttl longer again while
            // this waits.
            let trust = lease.trust(shared.clock.now());
            self.renew().await.map_err(Error::unavailable_if_config)?;
            // The answers to the renewals in flight may come soon, so this tries again.
            let again = shared.clock.now().after(Duration::from_millis(5));
            match trust {
                Trust::Whole => {
                    let cut = self.cut_by_an_ask("not held for the longer ttl");
                    return cut.map_or(Ok(()), Err);
                }
                Trust::InFlight if again < by => shared.alarm(again).await,
                Trust::InFlight => {
                    return Err(Error::unavailable(
                        "an earlier renewal with a shorter ttl is not answered yet; trying again may help",
                    ));
                }
                Trust::Late { ttl, rest } => {
                    return Err(Error::unavailable(format!(
                        "an earlier request was not answered and may still arrive and cut the lease short to its ttl \
                         of {ttl:?}; for another {rest:.0?}, the lease counts for that long only"
                    )));
                }
            }
        }
    }

    /// Releases the lock and waits for the store's answer, at most one operation timeout from when
    /// the request is sent. If this process sends many releases at once, the request may first wait
    /// until the store has answered earlier ones. It waits at most until the lease ends.
    ///
    /// In these cases the call returns at once, without a request to the store:
    ///
    /// - The lock is handed over to another task of this process.
    /// - The lock [lingers](crate::Lock::linger). It is not free for other clients yet, and if the store
    ///   has lost the lock, this call does not find that out.
    /// - The hold has another guard. The lock stays held until the last guard ends.
    /// - The keeper releases the lock later, because of [`Lock::min_hold`](crate::Lock::min_hold).
    /// - This process is a forked child. The lock belongs to its parent, and the result is
    ///   [`AlreadyLost`](Release::AlreadyLost).
    ///
    /// A hold may have several guards, and other holds of the same lock inside it. If this guard
    /// was the last one that writes, and the others only read, the lock becomes a read lock, as
    /// after [`downgrade`](Self::downgrade).
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown)
    /// when the store did not answer; [`Config`](crate::ErrorKind::Config) when the store denies
    /// the release. In all these cases the keeper tries again until the store acknowledges or the
    /// lease has run out. A lock that was lost before the call is
    /// [`AlreadyLost`](Release::AlreadyLost), and no error, whatever the store answers.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future hands the release to the keeper, as dropping the guard does.
    pub async fn release(mut self) -> Result<Release, Error> {
        if self.shared().is_forked() {
            self.disown();
            return Ok(Release::AlreadyLost);
        }
        let now = self.shared().clock.now();
        let lost_before = self.lost_at(now).is_some();
        let mut leaving = None;
        let at_the_store = match self.end(now) {
            End::Nothing => false,
            End::Shrink => {
                let asked = Shrinking(&self.held).ask().await;
                match asked.map_err(|error| self.failed(error)) {
                    // If the last reader has ended meanwhile, the hold is over, and this answer has
                    // no effect.
                    _ if self.held.is_over() => {}
                    // If the store answers only now that the lock is lost, the result is the same.
                    Err(error) if matches!(error.kind(), ErrorKind::Lost(_)) => {
                        return Ok(Release::AlreadyLost);
                    }
                    asked => asked?,
                }
                false
            }
            End::GiveBack(Origin::Ticket { .. }) => true,
            End::GiveBack(Origin::Share(share)) => {
                leaving = share.leave();
                leaving.is_some()
            }
            End::GiveBack(Origin::Outer(outer, inner)) => {
                drop(inner);
                // Boxed, because otherwise this future would contain itself.
                return Box::pin(outer.release()).await;
            }
        };
        let mut found = true;
        if at_the_store {
            found = match Departing::of(&self.held).release(now).await {
                // The caller need not know whether the store still has the ticket, because the lock
                // is not held in any case. The keeper repeats the release.
                Err(_) if lost_before => false,
                outcome => outcome?,
            };
        }
        // Those that gather ask now, whatever follows here.
        drop(leaving);
        if !found && !lost_before {
            self.shared().missing(&self.held.0.lease);
        }
        let (lock, grant_id) = (self.name(), self.grant_id());
        let held_for = self.held.held_for(now);
        tracing::debug!(lock, %grant_id, held_for, found, at_the_store, "lock released");
        Ok(if found && !lost_before {
            Release::Released
        } else {
            Release::AlreadyLost
        })
    }
}
