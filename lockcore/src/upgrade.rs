//! Upgrades: the only reader of a lock becomes its writer for a while. Downgrades are in `hold`.

use std::ops::Deref;
use std::sync::Arc;

use crate::acquire::spec::Spec;
use crate::acquire::{Budget, acquire};
use crate::error::Error;
use crate::hold::{Guard, Release};
use crate::multi::MultiHeld;
use crate::request::{ALL_BUT_ONE, FULL};
use crate::token::FencingToken;

impl Guard {
    /// Makes a reader a writer for a while, if it is alone: nobody else holds the lock, and nobody
    /// waits. Nobody else gets the lock in between. When the returned [`Upgraded`] is released or
    /// dropped, this guard is a reader again.
    ///
    /// It never waits. If two readers could wait to become writers, each would wait for ever for
    /// the end of the other's read hold. If the reader is not alone, or if somebody waits, it gets
    /// [`Busy`](crate::ErrorKind::Busy) at once. It can then release this guard and take the write
    /// side. After that it must read its data again, because others may have written in between. If
    /// a reader often becomes a writer, take the write side from the beginning and
    /// [downgrade](Self::downgrade).
    ///
    /// At the store this is a second ticket, with all permits except the reader's permit. So it
    /// costs one request, and [`inspect`](crate::Locks::inspect) shows two tickets. If one of the
    /// two tickets is lost, the writer is lost. After this call no other task of this process
    /// shares this reader's ticket.
    ///
    /// Code under the guard that asks for the read side again re-enters it. If it asks for the
    /// write side, it gets [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock). A view of this guard
    /// can run tasks under the read side ([`Held::scope`](crate::Held::scope)). These tasks read
    /// while this writes.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when the reader is not alone, when somebody waits, and when
    /// this hold has another guard; [`Config`](crate::ErrorKind::Config) for a guard that is not a
    /// reader's; [`Lost`](crate::ErrorKind::Lost) when the read lock was lost. In these cases
    /// nothing was changed. The other errors are those of
    /// [`Lock::try_acquire`](crate::Lock::try_acquire).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not change the read hold.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let catalog = locks.rwlock("catalog:7");
    /// let mut guard = catalog.read().acquire().await?;
    ///
    /// let write = guard.try_upgrade().await?;
    /// assert!(catalog.read().try_acquire().await.is_err());
    /// println!("writing with token {}", write.fencing_token());
    /// write.release().await?;
    ///
    /// let other = catalog.read().try_acquire().await?;
    /// assert!(guard.try_upgrade().await.is_err());
    /// # drop(other);
    /// # Ok(()) }
    /// ```
    pub async fn try_upgrade(&mut self) -> Result<Upgraded<'_>, Error> {
        let rest = self.rest().await;
        let rest = rest.map_err(|error| self.failed(error))?;
        let token = FencingToken::of_exclusive(rest.grant_id());
        let held = MultiHeld::of([self.held(), rest.held()]);
        Ok(Upgraded {
            _reader: self,
            held,
            rest,
            token,
        })
    }

    /// Takes all permits but one.
    async fn rest(&self) -> Result<Guard, Error> {
        let client = self.client();
        client.shared.refuse_forked()?;
        if self.lease().request.capacity != FULL || self.is_exclusive() {
            return Err(Error::config(
                "only a guard of the read side of a read/write lock can be upgraded",
            ));
        }
        if let Some(error) = self.loss() {
            return Err(error);
        }
        // After this call no other task of this process gets the reader's ticket, even if the
        // upgrade fails.
        if !self.is_only_use() {
            return Err(Error::still_read());
        }
        let request = Arc::clone(&self.lease().request);
        let spec = Spec {
            client,
            name: &request.name,
            permits: ALL_BUT_ONE,
            capacity: FULL,
            ttl: self.lease().ttl(),
            renew: self.lease().renew,
            owner: &request.owner,
            through_outages: false,
            // The ticket is not shared: other tasks must not join it as readers.
            limited: true,
            reentrant: false,
            on_lost: self.on_lost(),
            on_revoke: self.on_revoke(),
            #[cfg(debug_assertions)]
            label: self.label(),
        };
        let budget = Budget::new(&spec, None);
        let grant = acquire(&spec, &budget).await?;
        let rest = Guard::of(grant, &spec);
        // The read lock may have been lost during the request. In that case the drop of `rest`
        // releases its ticket.
        match self.loss() {
            Some(error) => Err(error),
            None => Ok(rest),
        }
    }
}

/// A reader that writes for a while: see [`Guard::try_upgrade`].
///
/// It dereferences to a view of its two tickets: the reader's ticket, and the ticket with the rest
/// of the permits. The view counts as lost when one of the two is lost.
#[derive(Debug)]
#[must_use = "the lock is only read again as soon as this is dropped; bind it to a variable"]
pub struct Upgraded<'a> {
    /// This borrow prevents the end of the read hold, and a second guard of it.
    _reader: &'a mut Guard,
    held: MultiHeld,
    rest: Guard,
    token: FencingToken,
}

impl Upgraded<'_> {
    /// The fencing token of the writer. It is greater than the token of every earlier writer, and
    /// less than the token of every later writer.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.token
    }

    /// A view of both tickets, which can be cloned and given to other code.
    #[must_use]
    pub fn held(&self) -> MultiHeld {
        self.held.clone()
    }

    /// Ends the write hold, and waits for the store's answer: see [`Guard::release`]. After that
    /// other readers can get the lock.
    ///
    /// # Errors
    /// The errors of [`Guard::release`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the keeper releases, as after the drop of this value.
    pub async fn release(self) -> Result<Release, Error> {
        let was_lost = !self.held.is_valid();
        let released = self.rest.release().await?;
        Ok(match was_lost {
            true => Release::AlreadyLost,
            false => released,
        })
    }
}

impl Deref for Upgraded<'_> {
    type Target = MultiHeld;

    fn deref(&self) -> &MultiHeld {
        &self.held
    }
}
