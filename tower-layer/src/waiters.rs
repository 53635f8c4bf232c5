//! Counts the waiting requests per key, so that requests for one busy key cannot use up the
//! capacity of the service.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The waiting requests of a layer and its clones.
pub(crate) struct Waiters {
    most: usize,
    /// The number of waiting requests of each key. A [`Waiter`] adds one, and subtracts one when it
    /// is dropped. A waiter is dropped when its request has the lock or an answer, and also when
    /// the request's future is dropped or panics. A key without waiters is removed. So there are
    /// never more entries than waiting requests, and no clean-up is needed.
    counts: Mutex<HashMap<Arc<str>, usize>>,
}

/// A waiting request. The request counts as waiting until this is dropped.
pub(crate) struct Waiter {
    waiters: Arc<Waiters>,
    key: Arc<str>,
}

impl Waiters {
    pub(crate) fn at_most(most: usize) -> Self {
        Self {
            most,
            counts: Mutex::default(),
        }
    }

    /// Adds one to each key. If one of the keys has as many waiters as allowed, returns `None` and
    /// adds nothing.
    pub(crate) fn join_all(self: &Arc<Self>, keys: &[String]) -> Option<Vec<Waiter>> {
        keys.iter().map(|key| self.join(key)).collect()
    }

    /// Adds one, or returns `None` if the key has as many waiters as allowed.
    fn join(self: &Arc<Self>, key: &str) -> Option<Waiter> {
        let mut counts = self.counts();
        let known = counts.get_key_value(key);
        let (key, count) = match known {
            Some((key, count)) => (Arc::clone(key), *count),
            None => (Arc::from(key), 0),
        };
        if count >= self.most {
            return None;
        }
        counts.insert(Arc::clone(&key), count + 1);
        drop(counts);
        Some(Waiter {
            waiters: Arc::clone(self),
            key,
        })
    }

    /// Whether the key has as many waiters as allowed. A key without waiters is never full.
    pub(crate) fn is_full(&self, key: &str) -> bool {
        let waiting = self.counts().get(key).copied();
        waiting.is_some_and(|count| count >= self.most)
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<Arc<str>, usize>> {
        // No code that runs under the mutex can panic and leave a count wrong.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut counts = self.waiters.counts();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters")
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_forgotten_with_its_last_waiter() {
        let waiters = Arc::new(Waiters::at_most(2));
        let (one, two) = (waiters.join("a"), waiters.join("a"));
        assert!(waiters.join("a").is_none());
        assert!(waiters.is_full("a"));
        assert!(waiters.join("b").is_some(), "another key");
        assert!(!waiters.is_full("b"));

        drop(one);
        let three = waiters.join("a");
        assert!(three.is_some(), "a place is free");
        assert!(waiters.join("a").is_none());

        drop((two, three));
        assert!(waiters.counts().is_empty());
    }
}
