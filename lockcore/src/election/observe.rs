//! The observer of an election. It reads two things: the value that the newest leader has written, and the ticket that
//! holds now. Its answers are computed from both.
//!
//! A new leader writes its value right after its grant, and a leader that resigns writes it again. Each write is a push
//! to the observers. A push carries no state, so one that is late, lost or doubled does no harm: `client/watches` reads
//! the value after every push and every gap, and the last leader has written last. A leader that dies writes nothing. So
//! the observer looks again when the lease that it has seen ends.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Counted, Written};
use crate::clock::Instant;
use crate::counter::Following;
use crate::error::{Error, ErrorKind};
use crate::locks::Locks;
use crate::name::Name;
use crate::pauses::Pauses;
use crate::value::LockValue;

/// A lease that is over at the store may be shown for a moment longer.
const AFTER_ITS_END: Duration = Duration::from_millis(100);

/// Follows an election: see [`Election::observe`](super::Election::observe).
///
/// Each leader that begins or resigns, and each value that a leader tells, costs one message to this client and two or
/// three requests, and each lease that is seen and renewed one request. The message and one of the requests are shared by
/// all observers of the client. Each other request reads all tickets of the name, so thousands of candidates with an
/// observer each are many for one store.
#[derive(Debug)]
#[must_use = "an observer does nothing until it is asked for the next leader"]
pub struct Leaders {
    locks: Locks,
    name: Result<Name, Error>,
    value: LockValue,
    following: Following,
    /// The newest value that was read.
    read: Option<Counted>,
    /// When to look who holds. In the past: at once.
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

    /// Returns the leader, if it has changed since the last call, or else as soon as it changes: its token, and its
    /// [value](super::Election::value). The first call returns the present leader. A leader that tells another value is
    /// returned again.
    ///
    /// `None` if nobody leads. A leader that has died still counts until its lease ends; at ZooKeeper this is noticed up to
    /// one ttl later. A store may lose the value of a leader and keep its lock: a Redis that fails over, and any store
    /// if nobody has read or written the value for a day. Then nobody is shown until a leader writes.
    /// [`run_as_leader`](super::Election::run_as_leader) reads the value four times a day, so that it stays.
    ///
    /// Of several leaders in a row only the last may be seen. It is always seen in the end, also after the connection
    /// was lost, and by an observer that is slow. If the store is down, this waits until it is back: the leader that was
    /// returned last may be gone meanwhile.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a name that is not usable, and for a store without counters or a user
    /// without the rights; [`Lost`](crate::ErrorKind::Lost) when the client is shut down.
    ///
    /// # Cancel safety
    ///
    /// Safe: a change that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Result<Option<Written>, Error> {
        let shared = Arc::clone(&self.locks.0.shared);
        loop {
            // If it ends here, `following` has the news for the next call.
            if let Some(news) = shared.by(self.look_at, self.following.next()).await {
                self.learn(news?);
            }
            // If it ends below, the next call looks at once.
            self.look_at = Instant::from_nanos(0);
            let leads = match self.leads().await {
                Ok(leads) => leads,
                Err(error) if is_passing(&error) => {
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

    /// Looks who holds, and computes when to look again.
    async fn leads(&mut self) -> Result<Option<Written>, Error> {
        let name = self.name.as_ref().map_err(Error::clone)?;
        let clock = &self.locks.0.shared.clock;
        let asked = clock.now();
        let places = self.locks.0.shared.inspect(name).await?;
        let Some(holder) = places.iter().find(|place| place.granted) else {
            // The next leader writes.
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
        // It has written since, and the news is on its way. Or it has not written yet, and will.
        let read = self.value.read().await?;
        self.learn(read);
        let known = self.read.as_ref().and_then(|read| read.written.as_ref());
        Ok(known.filter(|written| of_holder(written)).cloned())
    }

    /// Remembers the value, unless a newer one was read before: news may be older than an answer that came first. A store
    /// that has lost the value begins again, with the version 0.
    fn learn(&mut self, read: Counted) {
        let newer = |known: &Counted| read.version != 0 && read.version < known.version;
        if !self.read.as_ref().is_some_and(newer) {
            self.read = Some(read);
        }
    }
}

/// Whether the next look may succeed.
fn is_passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
}
