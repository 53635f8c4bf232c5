//! Which nodes a client has reported as down. All connections of the client share this, so a node is
//! reported once.
//!
//! A connection that breaks is not reported, because the next try to connect may succeed at once. A
//! try that fails is reported.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The report about one node.
#[derive(Debug, Default)]
pub(super) struct Reported(Mutex<Option<Down>>);

/// How a node was reported. A mistake that is found later is news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Down {
    OutOfReach,
    /// A person must correct something.
    Mistake,
}

impl Reported {
    /// A try to connect to the node has failed. Returns whether this is news.
    pub(super) fn down(&self, how: Down) -> bool {
        let mut down = self.state();
        let is_news = Some(how) > *down;
        if is_news {
            *down = Some(how);
        }
        is_news
    }

    /// A connection to the node was opened. Returns whether this is news.
    pub(super) fn up(&self) -> bool {
        self.state().take().is_some()
    }

    fn state(&self) -> MutexGuard<'_, Option<Down>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_reported_once_however_many_connections_miss_it() {
        let node = Reported::default();
        assert!(!node.up());
        assert!(node.down(Down::OutOfReach));
        assert!(!node.down(Down::OutOfReach));
        assert!(node.down(Down::Mistake));
        assert!(!node.down(Down::OutOfReach));
        assert!(node.up());
        assert!(!node.up());
    }
}
