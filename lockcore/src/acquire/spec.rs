//! What is to be acquired, and how.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::handle::Client;
use crate::name::Name;
use crate::options::{Fair, OnLost};
use crate::request::FULL;

/// A lock that has been checked: everything that a request is made of.
pub(crate) struct Spec<'a> {
    pub(crate) client: &'a Arc<Client>,
    pub(crate) name: &'a Name,
    pub(crate) permits: NonZeroU32,
    pub(crate) capacity: NonZeroU32,
    pub(crate) ttl: Duration,
    pub(crate) renew: bool,
    pub(crate) owner: &'a Arc<str>,
    /// It has a shortest or longest time to be held, or an owner's text of its own.
    pub(crate) limited: bool,
    pub(crate) reentrant: bool,
    pub(crate) on_lost: OnLost,
    #[cfg(debug_assertions)]
    pub(crate) label: Option<&'static str>,
}

impl Spec<'_> {
    /// A mutex, or the write side of a read/write lock.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.permits == FULL
    }

    /// Whether it can be passed on between the tasks of this process. A lease of its own length, or
    /// with an end or an owner of its own, cannot; and permits of a semaphore are counted at the store.
    pub(crate) fn is_shareable(&self) -> bool {
        let local = matches!(self.client.shared.defaults.fair, Fair::Local(_));
        local && self.capacity == FULL && self.renew && !self.limited
    }

    /// Whether the lock has a scope to be found in: semaphores count, they are not re-entered.
    pub(crate) fn can_reenter(&self) -> bool {
        self.capacity == FULL
    }
}
