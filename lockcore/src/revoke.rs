//! Ending the grant of somebody else: by asking for it, or at once. `Locks::inspect` in `locks` shows
//! the holder of a lock. The side of the holder is in `hold`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{AskedBack, Departure, Released, StoreError, TicketInfo};
use crate::client::calls::Where;
use crate::clock::Instant;
use crate::error::Error;
use crate::hold::Release;
use crate::locks::Locks;
use crate::name::Name;
use crate::owner;
use crate::pauses::Pauses;
use crate::request::{Id, Request};

/// The pauses between two looks at a ticket that was asked back. A holder that gives up at once is noticed at once, and
/// a long grace costs two requests per second, as the mean of the longest pauses is half a second.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest grace.
const LONGEST_GRACE: Duration = Duration::from_secs(86_400);

impl Locks {
    /// Asks the holder of a lock to give it up, and takes it away if the holder does not. `ticket` names the grant:
    /// [`TicketInfo::ticket`](crate::TicketInfo::ticket), or [`GrantId::ticket`](crate::GrantId::ticket). `why` is one
    /// line for people, up to 64 bytes. `grace` is up to a day.
    ///
    /// 1. The request is stored beside the ticket. The holder's [`revoked`](crate::Held::revoked) resolves, with this
    ///    client and `why`. From then on no other task of its process gets the ticket.
    /// 2. The holder has `grace` from the moment when its client learns of the request. It may finish, and release. At
    ///    the end the lock is lost for it with [`Revoked`](crate::LostReason::Revoked): work under the lock is dropped,
    ///    the ticket is released, and the store grants the lock to the next in line.
    /// 3. This call returns when the ticket is gone. A holder that does not know about such requests, because its version
    ///    of the library is older, loses the ticket to [`force_release`](Self::force_release) after `grace` and a whole
    ///    ttl.
    ///
    /// Until step 3 nobody else can get the lock while this holder believes in it. The holder's client, and no clock of
    /// the store or of this caller, ends the lease. If the holder cannot be reached, it does not renew its lease, and the
    /// store ends it.
    ///
    /// How fast the holder learns of the request: on Redis, and in the same process, within about 100 ms, by a message.
    /// Between processes on SQLite, on ZooKeeper, and when the message is lost: at its next renewal, after about a third
    /// of its ttl. A lock without [renewal](crate::Lock::renew) is not asked; it ends by itself.
    ///
    /// A second request replaces the first. A holder that has learnt of both gives up at the earlier end.
    ///
    /// Returns [`Released`](Release::Released) when this grant is over, and [`AlreadyLost`](Release::AlreadyLost) when
    /// it was over before.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) when `why` or `grace` is not usable, when the ticket waits and holds nothing,
    /// when the store denies it, or when the store has no such operation.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store does not answer for one operation timeout.
    ///
    /// # Cancel safety
    ///
    /// A request that was stored stays, and the holder still follows it. Dropping the future only leaves out the last
    /// step, which takes the lock from a holder that does not.
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
    /// let holder = tokio::spawn(async move {
    ///     let asked = guard.revoked().await;
    ///     println!("{} asks for it: {}", asked.by, asked.why);
    ///     guard.release().await
    /// });
    ///
    /// for place in locks.inspect("report").await?.iter().filter(|place| place.granted) {
    ///     locks.revoke("report", place.ticket, Duration::from_secs(5), "maintenance").await?;
    /// }
    /// assert!(locks.mutex("report").try_acquire().await.is_ok());
    /// # holder.await.unwrap()?;
    /// # Ok(()) }
    /// ```
    pub async fn revoke(
        &self,
        name: impl Into<String>,
        ticket: u64,
        grace: Duration,
        why: &str,
    ) -> Result<Release, Error> {
        let name = self.name(name)?;
        let outcome = self.revoked(&name, ticket, grace, why).await;
        outcome.map_err(|error| error.of_name(name.as_str()))
    }

    async fn revoked(
        &self,
        name: &Name,
        ticket: u64,
        grace: Duration,
        why: &str,
    ) -> Result<Release, Error> {
        owner::check_line("reason", why)?;
        if grace > LONGEST_GRACE {
            return Err(Error::config(format!(
                "a grace of {grace:?} is not usable: the longest is a day"
            )));
        }
        let Some((_, id)) = self.holder(name, ticket).await? else {
            return Ok(Release::AlreadyLost);
        };
        let ask = AskedBack::new(&self.0.owner.client, why, grace);
        let clock = &self.0.shared.clock;
        if !self.ask(name, id, &ask).await? {
            return Ok(Release::AlreadyLost);
        }
        // The request that was seen at the ticket with this id, and when its time is over. A ticket that is adopted gets
        // another id, and a lease from then on: its new holder has as much time to learn of the request.
        let mut seen: Option<(AskedBack, Id, Instant)> = None;
        let mut pauses = Pauses::between(SHORTEST_PAUSE, LONGEST_PAUSE);
        loop {
            self.0.shared.alarm(clock.now().after(pauses.draw())).await;
            let Some((place, id)) = self.holder(name, ticket).await? else {
                return Ok(Release::Released);
            };
            match (&place.asked_back, &seen) {
                // A server that was promoted may not have it, and a ticket that was made smaller may have lost it.
                (None, _) => {
                    self.ask(name, id, &ask).await?;
                    seen = None;
                }
                (Some(stands), Some((known, of, give_up))) if stands == known && *of == id => {
                    if clock.now() >= *give_up
                        && self.release_of(name, &place, id).await? == Release::Released
                    {
                        return Ok(Release::Released);
                    }
                    // It has gone by itself, or somebody has adopted it: then it has another id.
                }
                // Somebody else may have asked since, with another grace. It is stored by now, so by `give_up` a holder that
                // renews has learnt of it and used its grace, and one that does not renew has expired.
                (Some(stands), _) => {
                    let give_up = clock.now().after(place.remaining).after(stands.grace);
                    let give_up = give_up.after(self.0.shared.op_timeout);
                    seen = Some((stands.clone(), id, give_up));
                }
            }
        }
    }

    /// Ends the grant of somebody else at once. `ticket` names the grant: see [`revoke`](Self::revoke). If the ticket is
    /// gone, or somebody else holds the lock by now, nothing happens and this returns
    /// [`AlreadyLost`](Release::AlreadyLost). The store removes exactly this ticket, and wakes the next in line in the
    /// same step.
    ///
    /// **The holder may go on for a while.** It learns of the loss at its next renewal, after up to a third of its ttl,
    /// and until then it believes in its lease. Meanwhile the next holder works too. A resource that checks [fencing
    /// tokens](crate::fencing) refuses the late writes. Use [`revoke`](Self::revoke) if there is time; it never lets two
    /// in. This is for a holder that hangs, and for one whose process is gone and whose lease is long.
    ///
    /// A ticket that is handed over inside a process stays the same ticket: this ends the grant of whichever task has it.
    ///
    /// # Errors
    ///
    /// As [`revoke`](Self::revoke). [`Unknown`](crate::ErrorKind::Unknown) when the store did not acknowledge it.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the ticket may be removed or not.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockcore::{LostReason, Release};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let hangs = locks.mutex("report").acquire().await?;
    ///
    /// let ticket = hangs.grant_id().ticket();
    /// assert_eq!(locks.force_release("report", ticket).await?, Release::Released);
    /// let next = locks.mutex("report").acquire().await?;
    /// // It names one grant, and this is another.
    /// assert_eq!(locks.force_release("report", ticket).await?, Release::AlreadyLost);
    /// assert!(next.is_valid());
    /// # Ok(()) }
    /// ```
    pub async fn force_release(
        &self,
        name: impl Into<String>,
        ticket: u64,
    ) -> Result<Release, Error> {
        let name = self.name(name)?;
        let outcome = async {
            // Two requests: one reads the id of the ticket, one releases that id. If the ticket is adopted in between,
            // it has a new id, and both are sent again.
            for _ in 0..3 {
                let Some((place, id)) = self.holder(&name, ticket).await? else {
                    break;
                };
                if self.release_of(&name, &place, id).await? == Release::Released {
                    return Ok(Release::Released);
                }
            }
            Ok(Release::AlreadyLost)
        };
        outcome
            .await
            .map_err(|error: Error| error.of_name(name.as_str()))
    }

    /// The holder with this ticket, if it is still there.
    async fn holder(&self, name: &Name, ticket: u64) -> Result<Option<(TicketInfo, Id)>, Error> {
        let places = self.0.shared.inspect(name).await?;
        let Some(place) = places.into_iter().find(|place| place.ticket == ticket) else {
            return Ok(None);
        };
        if !place.granted {
            return Err(Error::config(format!(
                "ticket {ticket} waits: it holds nothing that could be ended"
            )));
        }
        let Some(id) = place.id() else {
            return Err(Error::config(
                "this store does not tell the ids of tickets (TicketInfo::with_id), so the grants of others cannot be \
                 ended",
            ));
        };
        Ok(Some((place, id)))
    }

    async fn ask(&self, name: &Name, id: Id, ask: &AskedBack) -> Result<bool, Error> {
        let (name, ask) = (name.clone(), ask.to_string().into());
        let asked = self
            .0
            .shared
            .operate(Where::Here, self.soon(), |connection, _| {
                connection.ask_back(name, id, ask)
            });
        let (_, found) = asked.await.map_err(StoreError::unavailable_unless_config)?;
        Ok(found)
    }

    /// Removes a ticket by its id, which no other ticket ever has. So only this grant can end, although another one may
    /// hold the lock when this arrives.
    async fn release_of(&self, name: &Name, place: &TicketInfo, id: Id) -> Result<Release, Error> {
        let shared = &self.0.shared;
        let request = Request {
            name: name.clone(),
            id,
            permits: NonZeroU32::new(place.permits).unwrap_or(NonZeroU32::MIN),
            capacity: NonZeroU32::new(place.capacity).unwrap_or(NonZeroU32::MIN),
            ttl: place.remaining,
            wait: false,
            highest_seen: 0,
            owner: place.owner.as_str().into(),
        };
        let departure = Departure::new(Arc::new(request), false);
        let now = shared.clock.now();
        let released = shared.release(Where::Here, now, self.soon(), vec![departure]);
        let released = released.await.map_err(Error::from)?;
        tracing::info!(lock = %name, ticket = place.ticket, owner = %place.owner, "took a lock away from its holder");
        match released.first() {
            Some(Released::Released) => Ok(Release::Released),
            Some(Released::NotFound) => Ok(Release::AlreadyLost),
            Some(Released::Failed) | None => Err(Error::unknown(
                "the store could not remove the ticket: see its log, and the rights of the user",
            )),
        }
    }

    fn soon(&self) -> Instant {
        let shared = &self.0.shared;
        shared.clock.now().after(shared.op_timeout)
    }
}
