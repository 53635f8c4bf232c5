//! Upgrades: the only reader of a lock becomes its writer for a while. Downgrades are in `hold`.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::spec::Spec;
use crate::acquire::{Budget, acquire};
use crate::backend::Written;
use crate::error::{Error, LostReason};
use crate::hold::{Guard, Held, Release};
use crate::multi::MultiHeld;
use crate::request::{ALL_BUT_ONE, FULL};
use crate::token::FencingToken;

impl Guard {
    /// Makes a reader a writer for a while, if it is alone: nobody else holds the lock, and nobody
    /// waits. Nobody else gets the lock in between. When the returned [`UpgradedGuard`] is released
    /// or dropped, this guard is a reader again.
    ///
    /// It never waits for others. If two readers could wait to become writers, each would wait for ever for
    /// the end of the other's read hold. If the reader is not alone, or if somebody waits, it gets
    /// [`Busy`](crate::ErrorKind::Busy). (If this client is still releasing a lock of this name, it
    /// asks once more after that, within one operation timeout.) It can then release this guard and
    /// take the write side. After that it must read its data again, because others may have written in between. If
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
    /// while this writes. Inside of [`run`](Self::run) use [`Held::try_upgrade`].
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
    pub async fn try_upgrade(&mut self) -> Result<UpgradedGuard<'_>, Error> {
        self.may_upgrade().map_err(|error| self.failed(error))?;
        let rest = self.rest().await;
        let rest = rest.map_err(|error| self.failed(error))?;
        let held = self.held();
        Ok(UpgradedGuard::of(Reader::Borrowed(self), held, rest))
    }
}

impl Held {
    /// [`Guard::try_upgrade`] for code that has a view, such as the body of
    /// [`Lock::run`](crate::Lock::run). While the [`UpgradedGuard`] exists, the read hold stays,
    /// even if its guard ends.
    ///
    /// The write permits are a ticket of their own, which can be lost or asked back alone. `run`
    /// stops its body when the *read* hold is lost. So write inside of
    /// [`while_held`](MultiHeld::while_held) of the `UpgradedGuard`, which stops when either is
    /// lost.
    ///
    /// # Errors
    ///
    /// As [`Guard::try_upgrade`]. [`Busy`](crate::ErrorKind::Busy) also inside of another hold of the
    /// same lock.
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
    /// catalog
    ///     .read()
    ///     .run(async |held| {
    ///         let is_outdated = true;
    ///         if is_outdated {
    ///             let write = held.try_upgrade().await?;
    ///             println!("writing with token {}", write.fencing_token());
    ///             write.release().await?;
    ///         }
    ///         Ok::<_, lockcore::Error>(())
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub async fn try_upgrade(&self) -> Result<UpgradedGuard<'static>, Error> {
        self.may_upgrade().map_err(|error| self.failed(error))?;
        let over = || self.lost_for(LostReason::Released);
        // It is made before the request, so that the read hold cannot end during the request.
        let reader = self.guard(false).ok_or_else(over)?;
        let rest = self.rest().await;
        let rest = rest.map_err(|error| self.failed(error))?;
        Ok(UpgradedGuard::of(Reader::Own(reader), self.clone(), rest))
    }

    /// Checks what needs no request. After this call no other task of this process gets the reader's
    /// ticket, even if the upgrade fails.
    fn may_upgrade(&self) -> Result<(), Error> {
        self.client().shared.refuse_forked()?;
        if self.lease().request.capacity != FULL || self.is_exclusive() {
            return Err(Error::config(
                "only a guard of the read side of a read/write lock can be upgraded",
            ));
        }
        if let Some(error) = self.loss() {
            return Err(error);
        }
        match self.claim_only_use() {
            true => Ok(()),
            false => Err(Error::still_read()),
        }
    }

    /// Takes all permits but one.
    async fn rest(&self) -> Result<Guard, Error> {
        let request = Arc::clone(&self.lease().request);
        let spec = Spec {
            client: self.client(),
            name: &request.name,
            permits: ALL_BUT_ONE,
            capacity: FULL,
            ttl: self.lease().ttl(),
            renew: self.lease().renew,
            owner: &request.owner,
            through_outages: false,
            // The ticket is not shared: other tasks must not join it as readers.
            limited: true,
            linger: Duration::ZERO,
            reentrant: false,
            on_lost: self.on_lost(),
            on_revoke: self.on_revoke(),
            label: self.label(),
            meter: self.client().shared.meter.lock(self.label()),
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
pub struct UpgradedGuard<'a> {
    held: MultiHeld,
    rest: Guard,
    token: FencingToken,
    /// This is the last field, so that the write hold ends before the read hold.
    _reader: Reader<'a>,
}

/// What keeps the read hold while it is upgraded.
#[derive(Debug)]
enum Reader<'a> {
    /// This borrow prevents the end of the read hold, and a second guard of it.
    Borrowed(#[expect(dead_code, reason = "only kept")] &'a mut Guard),
    Own(#[expect(dead_code, reason = "only kept")] Guard),
}

impl<'a> UpgradedGuard<'a> {
    fn of(reader: Reader<'a>, read: Held, rest: Guard) -> Self {
        Self {
            held: MultiHeld::of([read, rest.held()]),
            token: FencingToken::of_exclusive(rest.grant_id()),
            rest,
            _reader: reader,
        }
    }

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

    /// Writes the value of the lock with the writer's token: see [`Held::set_value`].
    ///
    /// # Errors
    ///
    /// As [`Held::set_value`].
    ///
    /// # Cancel safety
    ///
    /// As [`Held::set_value`].
    pub async fn set_value(&self, text: impl Into<Arc<str>>) -> Result<(), Error> {
        if let Some(error) = self.held.iter().find_map(Held::loss) {
            return Err(error);
        }
        let wait = self.held.remaining();
        let outcome = self.rest.write_value(self.token, text.into(), wait).await;
        outcome.map_err(|error| self.rest.failed(error))
    }

    /// The value of the lock: see [`Held::value`].
    ///
    /// # Errors
    ///
    /// As [`Held::value`].
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn value(&self) -> Result<Option<Written>, Error> {
        self.rest.value().await
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

impl Deref for UpgradedGuard<'_> {
    type Target = MultiHeld;

    fn deref(&self) -> &MultiHeld {
        &self.held
    }
}
