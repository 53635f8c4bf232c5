//! Ending the grant of another caller: by a request to the holder ([`Locks::revoke`]), or at once
//! ([`Locks::force_release`]). [`Locks::inspect`] shows the holder of a lock.

// What the holder does is in `hold`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Departure, Released, StoreError, TicketInfo};
use crate::client::calls::Where;
use crate::clock::Instant;
use crate::error::Error;
use crate::hold::Release;
use crate::locks::Locks;
use crate::name::Name;
use crate::owner;
use crate::pauses::Pauses;
use crate::request::{FULL, Id, Request};

pub use crate::backend::AskedBack;

/// The pauses between two reads of a ticket that was asked back. They begin short, so this caller
/// soon sees that a holder has given up at once. They grow, so a long grace costs about two
/// requests per second: the mean of the longest pauses is half a second.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest grace.
const LONGEST_GRACE: Duration = Duration::from_secs(86_400);

impl Locks {
    /// Asks the holder of a lock to give it up. If the holder does not, takes the lock away.
    /// `ticket` names the grant: [`TicketInfo::ticket`](crate::inspect::TicketInfo::ticket), or
    /// [`GrantId::ticket`](crate::GrantId::ticket). `why` is one line for people, up to 64 bytes.
    /// `grace` is up to a day.
    ///
    /// 1. The store keeps this request, the ask-back, beside the ticket. When the holder's client
    ///    learns of the ask-back, [`revoked`](crate::Held::revoked) resolves there, with this
    ///    client and `why`. From then on no other task of the holder's process gets the ticket.
    /// 2. The holder has `grace` from the moment when its client learns of the ask-back. It may
    ///    finish and release in this time. At the end of `grace` it loses the lock with
    ///    [`Revoked`](crate::LostReason::Revoked). Its client drops the work under the lock and
    ///    releases the ticket. Then the store grants the lock to the next waiter.
    /// 3. This call returns when the ticket is gone. If the holder's version of the library does
    ///    not know ask-backs, the holder does not release. In this case this call removes the
    ///    ticket after `grace` and a whole ttl, as [`force_release`](Self::force_release) does.
    ///
    /// If the holder's client knows ask-backs, nobody else gets the lock while the holder believes
    /// in it. The reason is that the holder's own client ends the lease. No clock of the store or
    /// of this caller does. If the ask-back cannot reach the holder, the holder cannot renew its
    /// lease either, so the lease ends at the store.
    ///
    /// On Redis the holder learns of the ask-back by a message, within about 100 ms, and in memory at
    /// once. On SQLite it learns of it as soon if the caller is in the same process, and on MySQL if
    /// the caller is the same client. On PostgreSQL it gets a notification, if its client listens at
    /// that time. In all other cases, also on ZooKeeper and etcd and when a message is lost, it learns
    /// of the ask-back at its next renewal, after about a third of its ttl. On a Redis Cluster, a
    /// client that has got a lock at once subscribes with the first renewal of the lock. So in the
    /// first third of the ttl, this holder learns of the ask-back at that renewal. (A
    /// subscription for each lock would double the requests of an acquire.) The holder of a lock
    /// without [renewal](crate::Lock::renew) is not asked, because its lease ends by itself.
    ///
    /// A second ask-back replaces the first. If the holder has learned of both, it gives up at the
    /// earlier of the two ends.
    ///
    /// If the store shows the ticket as a waiter behind tickets of the same client, the ticket [may
    /// hold already](TicketInfo::granted). It is asked too. If it waits, its client gives it
    /// up when it holds, and this call waits until then.
    ///
    /// Returns [`Released`](Release::Released) when this call has seen the end of the grant, and
    /// [`AlreadyLost`](Release::AlreadyLost) when the grant was over before.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) when `why` or `grace` is not usable, the ticket is a
    /// waiter that cannot hold yet, the store denies the request, or the store has no ask-backs.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store does not answer for one
    /// operation timeout.
    ///
    /// # Cancel safety
    ///
    /// If the store has the ask-back when the future is dropped, the ask-back stays, and the holder
    /// obeys it. Only the last step is left out: nobody removes the ticket of a holder that does
    /// not obey.
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
    /// for holder in locks.inspect("report").await?.iter().filter(|ticket| ticket.granted) {
    ///     locks.revoke("report", holder.ticket, Duration::from_secs(5), "maintenance").await?;
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
        // What the last list of the tickets has shown: the ask-back at the ticket, the id of the
        // ticket, and the time until which the holder may hold. An adoption gives the ticket
        // another id and a new lease. Then this time is computed anew, so that the new holder also
        // has time to learn of the ask-back.
        let mut seen: Option<(AskedBack, Id, Instant)> = None;
        let mut pauses = Pauses::between(SHORTEST_PAUSE, LONGEST_PAUSE);
        loop {
            self.0.shared.alarm(clock.now().after(pauses.draw())).await;
            let Some((place, id)) = self.holder(name, ticket).await? else {
                return Ok(Release::Released);
            };
            match (&place.asked_back, &seen) {
                // The ask-back is not there. Either a server was promoted that has not received it,
                // or a reduction of the ticket's permits has removed it. So this call asks again.
                (None, _) => {
                    self.ask(name, id, &ask).await?;
                    seen = None;
                }
                // It may hold already, and it may not have begun yet: see `may_hold`. Its client
                // learns of the ask-back for certain only when the store calls it a holder.
                (Some(_), _) if !place.granted => seen = None,
                (Some(stands), Some((known, of, give_up))) if stands == known && *of == id => {
                    if clock.now() >= *give_up
                        && self.release_of(name, &place, id).await? == Release::Released
                    {
                        return Ok(Release::Released);
                    }
                    // If the release has found no ticket with this id, the ticket has ended, or
                    // somebody has adopted it, which gives it another id. The next list shows which
                    // of the two has happened.
                }
                // The list shows this ask-back for the first time. Or somebody else has asked
                // since, with another grace. The ask-back is at the store now. If the holder
                // renews, it learns of the ask-back before the end of the present lease, and its
                // grace is over by `give_up`. If it does not renew, its lease has ended by then.
                (Some(stands), _) => {
                    let shared = &self.0.shared;
                    // At a store with sessions, a renewal may prolong a lease although it does not
                    // see the ask-back: see `Connection::ask_back`. A third of the ttl later at the
                    // latest, a renewal sees it. The remaining time that these stores show is the
                    // whole ttl.
                    let unseen = match shared.capability.sessions {
                        true => place.remaining / 3,
                        false => Duration::ZERO,
                    };
                    let give_up = clock.now().after(place.remaining).after(stands.grace);
                    let give_up = give_up.after(unseen).after(shared.op_timeout);
                    seen = Some((stands.clone(), id, give_up));
                }
            }
        }
    }

    /// Ends the grant of another caller at once. `ticket` names the grant: see
    /// [`revoke`](Self::revoke). If the ticket is gone, or if somebody else holds the lock by now,
    /// nothing happens, and this returns [`AlreadyLost`](Release::AlreadyLost). The store removes
    /// exactly this ticket, and wakes the next waiter in the same step.
    ///
    /// **The holder may continue for a while.** It learns of the loss when its next renewal is
    /// answered, usually after at most a third of its ttl, and believes in its lease until then. If
    /// it cannot reach the store, or took the lock without [renewal](crate::Lock::renew), it
    /// believes in its lease until the end, which [`extend`](crate::Guard::extend) may have moved
    /// far away. Meanwhile the next holder works too. A resource that checks
    /// [fencing tokens](crate::fencing) refuses the late writes.
    ///
    /// If there is time, use [`revoke`](Self::revoke), which lets nobody else in before a live
    /// holder has given up. `force_release` is for a holder that hangs, and for a long lease of a
    /// process that is gone.
    ///
    /// A hand-over inside a process keeps the ticket. So this ends the grant of the task that has
    /// the ticket at that time.
    ///
    /// If the store shows the ticket as a waiter behind tickets of the same client, the ticket [may
    /// hold already](TicketInfo::granted). It is removed too. If it waited, its client asks
    /// for another ticket, behind all others. But until the client learns of the removal, the ticket
    /// may still get its turn. Then its caller works beside the next holder, as after the removal of
    /// a holder.
    ///
    /// # Errors
    ///
    /// As [`revoke`](Self::revoke). [`Unknown`](crate::ErrorKind::Unknown) when the store did not
    /// acknowledge the removal.
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
            // There are two requests: one reads the id of the ticket, and one releases that id. If
            // the ticket is adopted in between, it has a new id, and both requests are sent again.
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

    /// The ticket with this number, which [holds or may hold](may_hold), or `None` if it is gone.
    async fn holder(&self, name: &Name, ticket: u64) -> Result<Option<(TicketInfo, Id)>, Error> {
        let mut line = self.0.shared.inspect(name).await?;
        let Some(at) = line.iter().position(|place| place.ticket == ticket) else {
            return Ok(None);
        };
        let place = line.remove(at);
        let names_ahead = self.0.shared.capability.names_ahead;
        let holds = place.granted || names_ahead && may_hold(&place, &line[..at]);
        if !holds {
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

    /// Removes a ticket by its id, which no other ticket ever has. If another grant holds the lock
    /// when the request arrives, nothing happens to it.
    async fn release_of(&self, name: &Name, place: &TicketInfo, id: Id) -> Result<Release, Error> {
        let shared = &self.0.shared;
        let request = Request {
            name: name.clone(),
            id,
            permits: NonZeroU32::new(place.permits).unwrap_or(NonZeroU32::MIN),
            capacity: NonZeroU32::new(place.capacity).unwrap_or(NonZeroU32::MIN),
            ttl: place.remaining,
            wait: false,
            name_ahead: false,
            lingers: false,
            highest_seen: 0,
            owner: place.owner.as_str().into(),
        };
        let departure = Departure::new(Arc::new(request), false);
        let now = shared.clock.now();
        let released = shared.release(Where::Here, now, self.soon(), vec![departure]);
        let released = released.await.map_err(Error::from)?;
        match released.first() {
            Some(Released::Released) => {
                tracing::info!(lock = %name, ticket = place.ticket, owner = %place.owner, "took a lock away from its holder");
                Ok(Release::Released)
            }
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

/// Whether a ticket may hold although the store calls it a waiter. Where the store names the ticket
/// ahead, a ticket may hold by its [turn](crate::client::turns) until the store has the releases of
/// the tickets `ahead` of it. All of these are of the same client then.
///
/// A writer that holds by its turn and has become a reader is not recognized. The store learns soon
/// that it holds.
///
/// Perhaps the ticket waits. If it is asked back, its client gives it up when it holds. What its
/// removal means is at [`Locks::force_release`].
fn may_hold(place: &TicketInfo, ahead: &[TicketInfo]) -> bool {
    place.permits == FULL.get() && ahead.iter().all(|older| older.owner == place.owner)
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn place(ticket: u64, permits: NonZeroU32, client: &str) -> TicketInfo {
        let ttl = Duration::from_secs(10);
        TicketInfo::new(
            ticket,
            false,
            permits.get(),
            FULL.get(),
            ttl,
            client.to_owned(),
        )
    }

    #[test]
    fn a_waiter_may_hold_if_it_wants_all_and_is_behind_its_own_client_only() {
        let (ours, theirs) = (place(1, FULL, "host/1/1"), place(2, FULL, "host/1/2"));
        let one = NonZeroU32::MIN;

        assert!(may_hold(
            &place(3, FULL, "host/1/1 text"),
            slice::from_ref(&ours)
        ));
        // A writer that became a reader lets in the next one too.
        assert!(may_hold(
            &place(3, FULL, "host/1/1"),
            &[place(1, one, "host/1/1")]
        ));
        assert!(!may_hold(
            &place(3, one, "host/1/1"),
            slice::from_ref(&ours)
        ));
        assert!(!may_hold(&place(3, FULL, "host/1/1"), &[ours, theirs]));
    }
}
