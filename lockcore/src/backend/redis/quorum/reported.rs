//! Which nodes a client has reported as down. All connections of the client share this. A node is
//! reported when the first of them misses it, and its return when none misses it any more.
//!
//! A connection that breaks is not reported, because the next try to connect may succeed at once. A
//! try that fails is reported.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The report about one node.
#[derive(Debug, Default)]
pub(super) struct Reported(Mutex<Report>);

#[derive(Debug, Default)]
struct Report {
    down: Option<Down>,
    /// The connections of the client that miss the node.
    missing: HashSet<u64>,
}

/// How a node was reported. A mistake that is found later is news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Down {
    OutOfReach,
    /// A person must correct something.
    Mistake,
}

/// A number for a connection of a client.
pub(super) fn connection() -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

impl Reported {
    /// A try of this connection to reach the node has failed. Returns whether this is news.
    pub(super) fn down(&self, connection: u64, how: Down) -> bool {
        let mut state = self.state();
        state.missing.insert(connection);
        let is_news = Some(how) > state.down;
        if is_news {
            state.down = Some(how);
        }
        is_news
    }

    /// This connection has reached the node. Returns whether this is news.
    pub(super) fn up(&self, connection: u64) -> bool {
        let mut state = self.state();
        state.missing.remove(&connection);
        state.missing.is_empty() && state.down.take().is_some()
    }

    /// This connection has ended, so it misses nothing any more. The node counts as down until
    /// another one reaches it: in an outage of the whole quorum, each try is a connection of its own.
    pub(super) fn ended(&self, connection: u64) {
        self.state().missing.remove(&connection);
    }

    fn state(&self) -> MutexGuard<'_, Report> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_reported_once_however_many_connections_miss_it() {
        let (one, other) = (connection(), connection());
        let node = Reported::default();
        assert!(!node.up(one));
        assert!(node.down(one, Down::OutOfReach));
        assert!(!node.down(one, Down::OutOfReach));
        assert!(!node.down(other, Down::OutOfReach));
        assert!(node.down(other, Down::Mistake));
        assert!(!node.down(other, Down::OutOfReach));
        assert!(!node.up(one));
        assert!(node.up(other));
        assert!(!node.up(other));
    }

    #[test]
    fn a_node_is_down_once_through_an_outage_of_many_connections_and_then_back() {
        let node = Reported::default();
        assert!(node.down(0, Down::OutOfReach));
        node.ended(0);
        for next in 1..5 {
            assert!(!node.down(next, Down::OutOfReach));
            node.ended(next);
        }
        assert!(node.up(5));
        assert!(node.down(5, Down::OutOfReach));
    }
}
