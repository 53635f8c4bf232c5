//! Giving a held lock to another process. `adopt` takes the lock over. The text that passes between
//! the two processes is in `detached`.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::PoisonError;

use super::lifecycle::{Guard, Origin};
use crate::client::calls::Where;
use crate::client::events::GrantEvent;
use crate::client::tracked::{Cleanup, Stage};
use crate::clock::Instant;
use crate::detached::Detached;
use crate::error::{Error, LostReason};
use crate::sync::atomic::Ordering;

impl Guard {
    /// Gives the lock to another process, or to another client of this process, without releasing
    /// it. No other client can get the lock in between. Returns a text, with which
    /// [`Locks::adopt`](crate::Locks::adopt) takes the lock over. The [fencing
    /// token](crate::Held::fencing_token) stays the same.
    ///
    /// The lease is renewed once more, and after that no client renews it until the lock is
    /// adopted. So the text is valid for one ttl from this call. If the lock is not adopted in that
    /// time, the lock is free, as after a crash. This process may end as soon as it has the text.
    /// Use this when another process continues a job: a worker that this process starts, or the
    /// next version of a service during a deployment.
    ///
    /// The text has about 100 bytes more than the name of the lock. It consists of letters, digits
    /// and `. _ - : / ~ %`. It contains no address and no password of the store. But **anyone
    /// with the text and with access to the store can adopt the lock**, until somebody adopts it.
    /// So pass on the text in the same way as the job itself, and do not log it.
    ///
    /// [Views](crate::Held) of this guard report [`Released`](LostReason::Released) from now on,
    /// and their [`lost`](crate::Held::lost) resolves with it.
    ///
    /// Finish all writes before this call. A late write of this process has the same token as the
    /// writes of the adopter, so the resource cannot tell them apart.
    ///
    /// This works on memory, SQLite, PostgreSQL, MySQL, Redis and etcd. On ZooKeeper a ticket belongs to the
    /// session of its client, and it cannot move to another session. A quorum of servers has no such operation
    /// either: see [`Capability::adopts`](crate::backend::Capability::adopts).
    ///
    /// # Errors
    ///
    /// The error contains the guard. The guard holds the lock, except when the error is
    /// [`Lost`](crate::ErrorKind::Lost):
    ///
    /// - [`Busy`](crate::ErrorKind::Busy) when another guard or hold uses the same ticket: a guard
    ///   made by [`reenter`](Self::reenter) or [`Held::scope`](crate::Held::scope), an inner hold,
    ///   or readers of this process. The error is also `Busy` when another client
    ///   [asks](crate::Locks::revoke) for the lock.
    /// - [`Config`](crate::ErrorKind::Config) for a lock with a
    ///   [`max_hold`](crate::Lock::max_hold), before a [`min_hold`](crate::Lock::min_hold) is over,
    ///   and for a store that cannot detach a lock.
    /// - [`Lost`](crate::ErrorKind::Lost).
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown)
    ///   when the store did not acknowledge the renewal within one operation timeout.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it resolves, the lock is released, as after a drop of the
    /// guard.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("video:7").acquire().await?;
    /// let token = guard.fencing_token()?;
    ///
    /// let text = guard.detach().await?;
    /// // … the text goes to another process, with the job …
    /// assert!(locks.mutex("video:7").try_acquire().await.is_err());
    ///
    /// let guard = locks.adopt(&text).await?;
    /// assert_eq!(guard.fencing_token()?, token);
    /// assert!(locks.adopt(&text).await.is_err());
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn detach(mut self) -> Result<String, DetachError> {
        match self.detached().await {
            Ok(text) => Ok(text),
            Err(error) => {
                if self.shared().capability.sessions {
                    self.shared().renew_again(&self.held.0.lease);
                }
                Err(DetachError {
                    error: self.failed(error),
                    guard: self,
                })
            }
        }
    }

    /// This function awaits only renewals, and then the end of the session for this ticket. If the
    /// future is dropped there, the guard is dropped with it, and releases the lock.
    async fn detached(&mut self) -> Result<String, Error> {
        self.shared().refuse_forked()?;
        let capability = self.shared().capability;
        if !capability.adopts {
            return Err(Error::config(match capability.sessions {
                true => {
                    "a lock of this store cannot be detached: its ticket belongs to the session of this client and ends \
                     with it; release the lock, and let the other process take it"
                }
                false => {
                    "a lock of this store cannot be detached; release it, and let the other process take it"
                }
            }));
        }
        if let Some(error) = self.loss() {
            return Err(error);
        }
        self.may_leave()?;
        // From now on no other task of this process gets the ticket, even if the lock is not
        // detached in the end.
        if !self.claim_only_use() {
            return Err(Error::still_used());
        }
        if capability.sessions {
            // The keeper must not take the ticket back into the session.
            self.shared().renew_no_more(self.lease().request.id);
        }
        // The adopter has a whole ttl from this renewal. From now on the ticket does not become a
        // waiter again.
        self.held
            .renew_until_it_holds()
            .await
            .map_err(Error::unavailable_if_config)?;
        self.may_leave()?;
        if self.lease().is_shrinking() {
            let text =
                "not detached: the store has not acknowledged yet that the ticket is smaller";
            return Err(Error::unavailable(text));
        }
        if capability.sessions {
            self.leave_session().await?;
        }
        self.leave()
    }

    /// Takes the ticket out of the session of this client, which may end before the ticket is
    /// adopted.
    async fn leave_session(&self) -> Result<(), Error> {
        let (shared, ticket) = (self.shared(), self.lease().as_it_is());
        let by = shared.clock.now().after(shared.op_timeout);
        let left = shared.operate(Where::Here, by, |connection, _| connection.detach(ticket));
        left.await
            .map_err(|error| Error::from(error).unavailable_if_config())?;
        self.may_leave()
    }

    /// Returns an error if the limits of the hold do not allow a detach. This client enforces the
    /// limits, and the adopter would not know them.
    fn may_leave(&self) -> Result<(), Error> {
        let hold = &self.held.0;
        if hold.lease.is_asked_back() {
            return Err(Error::still_asked_for("not detached"));
        }
        if hold.lease.hold_until() != Instant::FAR_FUTURE {
            return Err(Error::config(
                "a lock with a max_hold cannot be detached: nobody would end it in time; release it, and let the other \
                 process take it",
            ));
        }
        let now = self.shared().clock.now();
        let origin = hold.origin.lock().unwrap_or_else(PoisonError::into_inner);
        match &*origin {
            Some(Origin::Ticket { keep_until }) if now < *keep_until => Err(Error::config(
                "a lock cannot be detached before its min_hold is over: the other process would not keep to it",
            )),
            _ => Ok(()),
        }
    }

    /// Ends the hold, and leaves the ticket at the store.
    ///
    /// A renewal of the keeper that is in flight may arrive at the store later. If the ticket has
    /// not been adopted, the renewal finds the ticket with the same id and gives it another ttl. If
    /// the ticket was adopted, the renewal finds no ticket with this id. Both are harmless, because
    /// this client does not act on the answer. There is one exception: the lease may have run out
    /// by then, or the ticket may have been asked back with a grace of zero. In these cases the
    /// keeper releases the ticket. If the ticket was adopted, this release has no effect.
    fn leave(&mut self) -> Result<String, Error> {
        let (hold, lease) = (&self.held.0, &self.held.0.lease);
        let text = Detached {
            id: lease.request.id,
            grant: hold.grant_id,
            enqueue_may_follow: lease.is_ambiguous(),
            permits: NonZeroU32::new(lease.permits()).unwrap_or(NonZeroU32::MIN),
            capacity: lease.request.capacity,
            ttl: lease.ttl(),
            name: lease.request.name.clone(),
        }
        .to_string();
        // While the renewal was awaited, a view may have made another guard.
        if !hold.guards.end_only() {
            return Err(Error::still_used());
        }
        self.over = true;
        let was_ours = self.shared().withdraw(lease.request.id);
        // After the renewal was acknowledged, the keeper may have found a loss.
        let lost = lease.lost(self.shared().clock.now());
        if was_ours && let Some(reason) = lost {
            self.shared().lost(lease, Stage::Held, reason);
            self.shared().clean_up(Cleanup::of(lease));
        }
        let is_ours = was_ours && lost.is_none();
        match is_ours {
            true => self.shared().change_nothing_at_end(lease.request.id),
            false => hold.ended_lost.store(true, Ordering::SeqCst),
        }
        let origin = hold
            .origin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Origin::Share(share)) = origin {
            // Since `claim_only_use`, no other task can get the ticket, so this was its last use.
            drop(share.leave());
        }
        hold.tell_end(self.shared().clock.now());
        if !is_ours {
            return Err(self.lost_for(lost.unwrap_or(LostReason::Shutdown)));
        }
        let (lock, grant_id) = (self.name(), self.grant_id());
        let teller = &self.shared().teller;
        teller.tell_grant(&lease.request.name, GrantEvent::Detached(grant_id));
        tracing::debug!(lock, %grant_id, "lock detached");
        Ok(text)
    }
}

/// Why a lock was not [detached](Guard::detach), together with the guard.
///
/// The operator `?` turns this into the [`Error`]. The guard is dropped then, and the lock is
/// released.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// use lockcore::ErrorKind;
///
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("video:7").acquire().await?;
/// let second = guard.reenter()?;
///
/// let refused = guard.detach().await.expect_err("there is a second guard");
/// assert_eq!(refused.error().kind(), ErrorKind::Busy);
/// let guard = refused.into_guard();
/// drop(second);
/// let text = guard.detach().await?;
/// # drop(locks.adopt(&text).await?);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct DetachError {
    error: Error,
    guard: Guard,
}

impl DetachError {
    /// Why the lock was not detached.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The guard. It holds the lock, unless the reason is that the lock was lost.
    pub fn into_guard(self) -> Guard {
        self.guard
    }
}

impl fmt::Display for DetachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for DetachError {}

impl From<DetachError> for Error {
    fn from(refused: DetachError) -> Self {
        refused.error
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use crate::client::events::{Event, GrantEvent};
    use crate::error::{ErrorKind, LostReason};
    use crate::locks::Locks;

    /// The test is in place of the keeper, and marks the lease as lost. Then the detach takes the
    /// ticket from the table, before the keeper looks up the ticket there. So the keeper reports
    /// nothing, and the detach must report the loss.
    #[tokio::test]
    async fn a_lock_that_is_lost_in_the_moment_of_its_detach_is_told_and_given_back() {
        let told = timeout(Duration::from_secs(60), is_told_and_given_back());
        told.await.expect("somebody is not told");
    }

    async fn is_told_and_given_back() {
        let builder = || Locks::builder().namespace("detach").url("memory:");
        let (locks, other) = (builder().build().unwrap(), builder().build().unwrap());
        let lock = locks.mutex("a");
        let (mut events, mut grants) = (locks.events(), lock.grants());
        let mut guard = lock.acquire().await.unwrap();
        let (id, view) = (guard.grant_id(), guard.held());
        assert!(guard.lease().lose(LostReason::Taken));

        let refused = guard.leave().unwrap_err();

        assert_eq!(refused.kind(), ErrorKind::Lost(LostReason::Taken));
        assert_eq!(view.lost().await, LostReason::Taken);
        let expected = Event::Lost {
            name: "a".to_owned(),
            grant_id: id,
            reason: LostReason::Taken,
        };
        assert_eq!(events.recv().await, Some(expected));
        for expected in [
            GrantEvent::Granted(id),
            GrantEvent::Lost(id, LostReason::Taken),
        ] {
            assert_eq!(grants.recv().await, Some(expected));
        }
        drop(guard);
        // The keeper releases the ticket that is at the store.
        let next = other.mutex("a").wait(Duration::from_secs(5));
        next.acquire().await.unwrap().release().await.unwrap();
        locks.shutdown(Duration::from_secs(5)).await.unwrap();
        drop((lock, view, locks));
        assert_eq!(events.recv().await, None, "it was told twice");
        assert_eq!(grants.recv().await, None, "it was told twice");
    }
}
