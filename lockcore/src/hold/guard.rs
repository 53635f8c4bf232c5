//! What the holder of a lock can do with it beyond a look.

use std::num::NonZeroU32;
use std::time::Duration;

use humantime::format_duration;

use super::departing::{Departing, Shrinking};
use super::lifecycle::{End, Guard, Held, Origin};
use crate::error::{Error, ErrorKind, LostReason};
use crate::request::FULL;

/// What [`Guard::release`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lock was held to the end, and its user is done with it.
    Released,
    /// It had been lost before: somebody else may have held it meanwhile.
    AlreadyLost,
}

impl Guard {
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
        if let Some(error) = self.loss_here() {
            return Err(error);
        }
        let released = || self.lost_for(LostReason::Released);
        self.held.guard(true).ok_or_else(released)
    }

    /// Makes a write hold a read hold, and waits for the store's answer, at most one operation timeout:
    /// other readers come in, those that wait in line are woken, and no writer has been in between. The
    /// place in line stays what it is: a writer that waits lets no later reader pass.
    ///
    /// A read hold has no [`write_token`](Held::write_token). To write means to release it and to take the
    /// lock again: inside, asking for the write side is [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock).
    /// [`token`](Held::token) stays. The lease is renewed by the change, as by [`ensure`](Held::ensure), also
    /// without [renewal](crate::Lock::renew). [`min_hold`](crate::Lock::min_hold) keeps the read side then.
    ///
    /// Called again, or for a lock that was taken to read, this does nothing, unless the store has not
    /// acknowledged the change yet: then it is asked again.
    ///
    /// A hold that was taken inside of another hold of the lock ([`Lock::reentrant`](crate::Lock::reentrant))
    /// is a part of that one: readers elsewhere come in when nobody writes under the outer one either, and
    /// the store is not asked before.
    ///
    /// # Errors
    ///
    /// Nothing has changed:
    /// [`Busy`](crate::ErrorKind::Busy) while another guard of the same hold is left, or an inner one that
    /// writes; [`Config`](crate::ErrorKind::Config) for a semaphore; [`Lost`](crate::ErrorKind::Lost) if the
    /// lock was lost before.
    ///
    /// This is a read hold all the same: [`Unavailable`](crate::ErrorKind::Unavailable) or
    /// [`Unknown`](crate::ErrorKind::Unknown) when the store has not acknowledged it. It is held for
    /// [`remaining`](Held::remaining), but readers elsewhere may still be kept out; the keeper goes on asking
    /// until they are not. [`Lost`](crate::ErrorKind::Lost) when that is what the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that this is a read hold, and the keeper
    /// goes on asking.
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
        outcome.map_err(|error| error.of_name(self.name()))
    }

    pub(super) async fn downgraded(&mut self) -> Result<(), Error> {
        if self.lease().request.capacity != FULL {
            return Err(Error::config(
                "a semaphore has no read side; give permits back by release_permits instead",
            ));
        }
        if let Some(error) = self.loss_here() {
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

    /// Gives back some of a semaphore's permits and keeps the rest, and waits for the store's answer, at
    /// most one operation timeout: those that wait in line for as many are woken. `permits` is 1 to one
    /// less than the permits that are held; for all of them, [`release`](Self::release) the guard.
    ///
    /// They are gone for every guard of the hold: those of [`reenter`](Self::reenter) share the permits,
    /// and the last of them gives back what is left. [`token`](Held::token) and the place in line stay.
    /// The lease is renewed by the change, as by [`ensure`](Held::ensure), also without
    /// [renewal](crate::Lock::renew).
    ///
    /// # Errors
    ///
    /// Nothing has changed: [`Config`](crate::ErrorKind::Config) for another number of permits, and for a
    /// mutex or a read/write lock, which [`downgrade`](Self::downgrade) is for;
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when permits
    /// that were given back before are still not acknowledged as such.
    ///
    /// The permits are not the caller's any more all the same: `Unavailable` or `Unknown` when the store
    /// has not acknowledged it. Others may be kept out of them until the keeper, which goes on asking, has
    /// an answer. [`remaining`](Held::remaining) tells how long the rest is held. `Lost` when that is what
    /// the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that the permits are given back as above,
    /// unless earlier ones were not acknowledged yet, and the keeper goes on asking.
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
        outcome.map_err(|error| error.of_name(self.name()))
    }

    pub(super) async fn permits_released(&self, permits: u32) -> Result<(), Error> {
        let lease = self.lease();
        if lease.request.capacity == FULL {
            return Err(Error::config(
                "only the permits of a semaphore can be given back in part; downgrade a write hold to read on",
            ));
        }
        loop {
            if let Some(error) = self.loss_here() {
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
            // By another guard of this hold, or by a call that was not acknowledged: one after the other.
            Shrinking(&self.held).ask().await?;
        }
    }

    /// Makes the ttl of the lease longer, beyond what the lock was asked with, and renews the lease with
    /// it: from now on it is held for `ttl` without a further renewal, less a hundredth of that and 5 ms.
    /// Renewals go on with it, at its pace, for as long as the lock is held. For work that turns out to take
    /// long, before a step in which the store may be away, and for a lease without
    /// [renewal](crate::Lock::renew). If this process dies, the lock stays taken for as long.
    ///
    /// `ttl` is at least the present one, and at most what the store allows
    /// ([`Capability::longest_ttl`](crate::backend::Capability::longest_ttl); where a session carries the
    /// lease, that is its length, and a renewal gives what is left of it). A `ttl` as long as the present one
    /// only renews. [`max_hold`](crate::Lock::max_hold) stays the end. A ticket with a longer ttl is not
    /// passed on inside this process: whoever is next asks for one with its own.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for another ttl; [`Lost`](crate::ErrorKind::Lost). Nothing has
    /// changed then.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when that was
    /// not acknowledged within an operation timeout, or when an earlier renewal with the shorter ttl never
    /// was, which may still arrive and would cut the lease: for a minute after that it is believed in only
    /// as far as that ttl goes. The lock is held for [`remaining`](Held::remaining) all the same, and later
    /// renewals ask for the longer ttl.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that later renewals ask for the longer
    /// ttl.
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
        outcome.map_err(|error| error.of_name(self.name()))
    }

    pub(super) async fn extended(&self, ttl: Duration) -> Result<(), Error> {
        let (shared, lease) = (self.shared(), &self.held.0.lease);
        let longest = shared.backend.capability().longest_ttl;
        let present = lease.ttl();
        if ttl < present || ttl > longest {
            return Err(Error::config(format!(
                "a ttl of {} does not extend this lease: it has {}, and this store takes up to {}",
                format_duration(ttl),
                format_duration(present),
                format_duration(longest)
            )));
        }
        if let Some(error) = self.loss_here() {
            return Err(error);
        }
        if ttl > present {
            lease.lengthen(ttl);
            // The next holder has asked for the shorter one.
            self.held.0.client.lanes.retire(lease);
        }
        let by = shared.clock.now().after(shared.op_timeout);
        loop {
            // The answer may be to what was asked by another, with a longer one.
            let trusted = lease.is_trusted(shared.clock.now());
            self.renew().await.map_err(Error::unavailable_if_config)?;
            if trusted {
                return Ok(());
            }
            // A renewal of before is under way, which the next answer may find answered.
            let again = shared.clock.now().after(Duration::from_millis(5));
            if again >= by {
                return Err(Error::unavailable(format!(
                    "an earlier renewal was not answered and may still arrive, which would cut the lease to its ttl of \
                     {present:?}; it is believed in for that long until a minute after it"
                )));
            }
            shared.alarm(again).await;
        }
    }

    /// Releases the lock and waits for the store's answer, at most one operation timeout from when it
    /// is asked. In a burst of releases it may have to wait for its turn before that, for as long as the
    /// lease lasts. There is nothing to wait for where the lock is passed on inside this process, where another guard of the
    /// same hold is left, and where the keeper gives it back later
    /// ([`Lock::min_hold`](crate::Lock::min_hold)). Where this was the last to write and what was taken inside
    /// is still read under, the lock becomes the read side: see [`downgrade`](Self::downgrade).
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when the store
    /// did not answer; [`Config`](crate::ErrorKind::Config) when it denies the release. The keeper goes on trying
    /// until it is acknowledged or the lease has run out.
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
        let at_the_store = match self.end(now) {
            End::Nothing => false,
            End::Shrink => {
                let asked = Shrinking(&self.held).ask().await;
                match asked.map_err(|error| error.of_name(self.name())) {
                    // Who read on has ended meanwhile, and with that the hold.
                    _ if self.held.is_over() => {}
                    // The same as if it had been found before.
                    Err(error) if matches!(error.kind(), ErrorKind::Lost(_)) => {
                        return Ok(Release::AlreadyLost);
                    }
                    asked => asked?,
                }
                false
            }
            End::GiveBack(Origin::Ticket { .. }) => true,
            End::GiveBack(Origin::Share(share)) => share.leave(),
            End::GiveBack(Origin::Outer(outer, inner)) => {
                drop(inner);
                // Boxed, or this future would contain itself.
                return Box::pin(outer.release()).await;
            }
        };
        let mut found = true;
        if at_the_store {
            found = Departing::of(&self.held).release(now).await?;
        }
        if !found && !lost_before {
            self.shared().missing(&self.held.0.lease);
        }
        let (lock, token) = (self.name(), self.token());
        let held_for = self.held.held_for(now);
        tracing::debug!(lock, %token, held_for, found, at_the_store, "lock released");
        Ok(if found && !lost_before {
            Release::Released
        } else {
            Release::AlreadyLost
        })
    }
}
