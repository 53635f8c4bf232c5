//! Upgrades: a reader that is alone writes for a while. Downgrades are in `hold`.

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
    /// Makes a reader a writer for a while, if it is alone: nobody else reads, and nobody waits. Nobody can come in
    /// between. When the [`Upgraded`] that this returns is released or dropped, this guard reads on.
    ///
    /// It never waits. Two readers that both wait to become writers would wait for each other for ever, each for the end
    /// of the other's read hold. A reader that is not alone, or behind which a writer waits, gets
    /// [`Busy`](crate::ErrorKind::Busy) at once. It can release this guard and take the write side, and then must read
    /// again what it has read: others may have written in between. If a reader often writes in the end, take the write
    /// side from the beginning and [downgrade](Self::downgrade).
    ///
    /// For the store this is a second ticket, with all permits but the one that the reader has. So it costs one request,
    /// [`inspect`](crate::Locks::inspect) shows two tickets, and the writer is lost when either is. After this call no
    /// other task of this process shares this reader's ticket.
    ///
    /// Code under the guard that asks for the lock again still re-enters the read side, and a request for the write side
    /// is [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock). Views of this guard ([`Held::scope`](crate::Held::scope))
    /// can carry the read side into tasks, which then read while this writes.
    ///
    /// # Errors
    ///
    /// In these cases nothing has changed: [`Busy`](crate::ErrorKind::Busy), see above, and while this hold has another
    /// guard; [`Config`](crate::ErrorKind::Config) for a guard that is not a reader's;
    /// [`Lost`](crate::ErrorKind::Lost) when the read lock was lost. The other errors of
    /// [`Lock::try_acquire`](crate::Lock::try_acquire).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the read hold as it was.
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
        let rest = rest.map_err(|error| error.of_name(self.name()))?;
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
        // From here on no other task of this process gets the reader's ticket, even if the upgrade fails.
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
            // A ticket of its own: it is no reader that others could join.
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
        // The read lock may have been lost while the store was asked. Then this guard is dropped, and given back.
        match self.loss() {
            Some(error) => Err(error),
            None => Ok(rest),
        }
    }
}

/// A reader that writes for a while: see [`Guard::try_upgrade`].
///
/// It dereferences to a view of its two tickets, the reader's and the one with the rest of the permits. The view tells of
/// both together: it is lost when either is.
#[derive(Debug)]
#[must_use = "the lock is only read again as soon as this is dropped; bind it to a variable"]
pub struct Upgraded<'a> {
    /// The read hold cannot end, and no second guard of it can be made, as long as this exists.
    _reader: &'a mut Guard,
    held: MultiHeld,
    rest: Guard,
    token: FencingToken,
}

impl Upgraded<'_> {
    /// The fencing token of the writer: greater than that of every earlier writer, and less than that of every later one.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.token
    }

    /// A view of both tickets, which can be cloned and passed on.
    #[must_use]
    pub fn held(&self) -> MultiHeld {
        self.held.clone()
    }

    /// Ends the writing, and waits for the store's answer: see [`Guard::release`]. Other readers come in.
    ///
    /// # Errors
    ///
    /// Those of [`Guard::release`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future hands the release to the keeper, as dropping this does.
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
