//! The observer of an election. It reads two things: the value that the newest leader has written,
//! and the ticket that holds now. It computes its answers from both.
//!
//! A new leader writes its value right after its grant. When its ticket has ended, its client writes
//! the value again. Each write makes the store push to the observers. A push carries no state, so a
//! push that is late, lost or doubled does no harm. `client/watches` reads the value after every push
//! and every gap, and the newest value is that of the last leader. A process that dies writes
//! nothing. So the observer reads the tickets again when the lease that it has seen ends.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Counted, Written};
use crate::clock::Instant;
use crate::counter::Following;
use crate::error::Error;
use crate::locks::Locks;
use crate::name::Name;
use crate::pauses::Pauses;
use crate::value::LockValue;

/// The store may show a lease for a moment after its end. So the observer reads the tickets this
/// long after the end.
const AFTER_ITS_END: Duration = Duration::from_millis(100);

/// Follows an election: see [`Election::observe`](super::Election::observe).
///
/// What it costs: each leader that begins or ends, and each value that a leader writes, costs
/// one message to this client and two or three requests. Each lease that was seen and is then
/// renewed costs one request. All observers of the client share the message and one of the
/// requests. Each other request reads all tickets of the name, so thousands of candidates with an
/// observer each are a high load for one store.
#[derive(Debug)]
#[must_use = "an observer does nothing until it is asked for the next leader"]
pub struct Leaders {
    locks: Locks,
    name: Result<Name, Error>,
    value: LockValue,
    following: Following,
    /// The newest value that was read.
    read: Option<Counted>,
    /// When to read the tickets again. A time in the past means at once.
    look_at: Instant,
    pauses: Pauses,
    /// The answer that was returned last.
    told: Option<Option<Written>>,
}

impl Leaders {
    pub(super) fn new(locks: Locks, name: String) -> Self {
        let value = locks.value(name.clone());
        Self {
            name: locks.name(name),
            following: value.follow(),
            value,
            locks,
            read: None,
            look_at: Instant::FAR_FUTURE,
            pauses: Pauses::default(),
            told: None,
        }
    }

    /// Returns the leader, if it has changed since the last call, or waits until it changes. The
    /// leader is given by its token and its [value](super::Election::value). The first call returns
    /// the present leader. A leader that writes another value is returned again.
    ///
    /// Returns `None` if nobody leads. A leader that has died counts until its lease ends;
    /// ZooKeeper notices the end up to one ttl later. The store keeps the value of a leader for as
    /// long as the leader leads. But a Redis that fails over may lose the value and keep the lock. In
    /// this case the call returns `None` until a leader writes.
    ///
    /// If several leaders follow each other quickly, only the last of them may be returned. The
    /// last is always returned in the end, even after a lost connection, and even if the observer
    /// is slow. If the store is down, the call waits until the store is back. Meanwhile the leader
    /// that was returned last may be gone.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a name that is not usable, for a store without
    /// counters, and for a user of the store without the rights; [`Lost`](crate::ErrorKind::Lost)
    /// when the client is shut down.
    ///
    /// # Cancel safety
    ///
    /// Safe: a change that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Result<Option<Written>, Error> {
        let shared = Arc::clone(&self.locks.0.shared);
        loop {
            // If the future is dropped here, `following` keeps the news for the next call.
            if let Some(news) = shared.by(self.look_at, self.following.next()).await {
                self.learn(news?);
            }
            // If the future is dropped below, the next call reads the tickets at once.
            self.look_at = Instant::from_nanos(0);
            let leads = match self.leads().await {
                Ok(leads) => leads,
                Err(error) if error.is_outage() => {
                    tracing::debug!(%error, "who leads cannot be read at the moment");
                    self.look_at = shared.clock.now().after(self.pauses.draw());
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.pauses = Pauses::default();
            if self.told.as_ref() != Some(&leads) {
                self.told = Some(leads.clone());
                return Ok(leads);
            }
        }
    }

    /// Reads which ticket holds, and computes when to read the tickets again.
    async fn leads(&mut self) -> Result<Option<Written>, Error> {
        let name = self.name.as_ref().map_err(Error::clone)?;
        let clock = &self.locks.0.shared.clock;
        let asked = clock.now();
        let places = self.locks.0.shared.inspect(name).await?;
        let Some(holder) = places.iter().find(|place| place.granted) else {
            // The tickets need not be read again, because the next leader writes its value.
            self.look_at = Instant::FAR_FUTURE;
            return Ok(None);
        };
        self.look_at = asked
            .after(holder.remaining)
            .max(clock.now())
            .after(AFTER_ITS_END);
        let of_holder = |written: &Written| written.token.ticket() == holder.ticket;
        let known = self.read.as_ref().and_then(|read| read.written.as_ref());
        if let Some(written) = known.filter(|written| of_holder(written)) {
            return Ok(Some(written.clone()));
        }
        // The holder has written its value since the last read of the value, and the push is in
        // flight. Or the holder has not written yet, and will write.
        let read = self.value.read().await?;
        self.learn(read);
        let known = self.read.as_ref().and_then(|read| read.written.as_ref());
        Ok(known.filter(|written| of_holder(written)).cloned())
    }

    /// Remembers the value, unless a newer value was read before. News may be older than an answer
    /// that came first. A store that has lost the value begins again with version 0.
    fn learn(&mut self, read: Counted) {
        let newer = |known: &Counted| read.version != 0 && read.version < known.version;
        if !self.read.as_ref().is_some_and(newer) {
            self.read = Some(read);
        }
    }
}
