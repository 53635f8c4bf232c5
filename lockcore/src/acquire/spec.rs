//! Which lock to acquire, and how.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::handle::Client;
use crate::meter::LockMeter;
use crate::name::Name;
use crate::options::{Fair, OnLost, OnRevoke};
use crate::request::FULL;

/// The checked parameters of a lock, from which its requests are made.
pub(crate) struct Spec<'a> {
    pub(crate) client: &'a Arc<Client>,
    pub(crate) name: &'a Name,
    pub(crate) permits: NonZeroU32,
    pub(crate) capacity: NonZeroU32,
    pub(crate) ttl: Duration,
    pub(crate) renew: bool,
    pub(crate) owner: &'a Arc<str>,
    /// See [`Lock::through_outages`](crate::Lock::through_outages).
    pub(crate) through_outages: bool,
    /// Whether the lock has a `min_hold`, a `max_hold`, or an owner text of its own.
    pub(crate) limited: bool,
    /// See [`Lock::linger`](crate::Lock::linger).
    pub(crate) linger: Duration,
    pub(crate) reentrant: bool,
    pub(crate) on_lost: OnLost,
    pub(crate) on_revoke: OnRevoke,
    /// See [`Lock::label`](crate::Lock::label).
    pub(crate) label: Option<&'static str>,
    /// The metrics of the locks with this label.
    pub(crate) meter: LockMeter,
}

impl Spec<'_> {
    /// Whether this is a mutex, or the write side of a read/write lock.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.permits == FULL
    }

    /// Whether a ticket of this lock can be handed over between the tasks of this process. This is
    /// not possible if the lease is not renewed, or if the lock has limits or an owner text of its
    /// own. It is not possible for semaphores either, because the store counts their permits.
    ///
    /// With [`Fair::Strict`] this is about the requests that [gather](super::groups) while the store
    /// is asked. A store that answers at once keeps no request waiting, and one without a line is
    /// asked by each caller. Readers hold at the same time, so they need no hand-over.
    pub(crate) fn is_shareable(&self) -> bool {
        let can = &self.client.shared.capability;
        let fits = match self.client.shared.defaults.fair {
            Fair::Local(_) => true,
            Fair::Strict => self.is_exclusive() && can.queues && !can.answers_at_once,
        };
        fits && self.capacity == FULL && self.renew && !self.limited
    }

    /// How long a ticket of this lock may linger. Only a ticket that is handed over in this process can,
    /// and only if the store tells when somebody begins to wait. With [`Fair::Strict`] a task that
    /// comes later would pass one of another process. Readers of other processes do not wait for a
    /// reader's ticket, so the store would not tell of them. A store that answers at once is as fast
    /// without.
    pub(crate) fn lingers_for(&self) -> Duration {
        let shared = &self.client.shared;
        let can = &shared.capability;
        let local = matches!(shared.defaults.fair, Fair::Local(_));
        let fits = local && can.tells_holders && !can.answers_at_once;
        match fits && self.is_shareable() && self.is_exclusive() {
            true => self.linger,
            false => Duration::ZERO,
        }
    }

    /// Whether code under this lock can take it again. Semaphores cannot be re-entered: each
    /// request takes more permits.
    pub(crate) fn can_reenter(&self) -> bool {
        self.capacity == FULL
    }
}
