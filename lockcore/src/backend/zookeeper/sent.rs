//! The changes of capacities that were sent, and whose answers have not come. Plain data.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::{Clock, Instant};
use crate::counting::REMEMBERED_MILLIS;
use crate::request::Id;

/// The changes of all sessions of a client whose answers have not come.
///
/// The node of a name has the id of the last change. So a repetition finds out whether its change was
/// made. But when the capacity was forgotten and nobody uses the name, the server removes the node.
/// After that, a repetition finds no change. The first change of a name has found no change either,
/// and would be made twice. So the client remembers which node it has sent the change to. The
/// repetition is made only at that node.
///
/// A repetition comes from the same client as the first request. So nobody else has to know this.
#[derive(Debug, Default)]
pub(super) struct SentChanges(Mutex<Nodes>);

/// By the id of the change: when the change was sent, and the id of the transaction that created the
/// node.
type Nodes = HashMap<Id, (Instant, i64)>;

impl SentChanges {
    /// Notes that a change is sent to the node that this transaction has created.
    pub(super) fn sent(&self, change: Id, node: i64) {
        let now = Clock::BOOT.now();
        let remembered = Duration::from_millis(REMEMBERED_MILLIS);
        let mut nodes = self.nodes();
        nodes.retain(|_, (at, _)| at.until(now) <= remembered);
        nodes.insert(change, (now, node));
    }

    /// Notes that it is known whether the change was made.
    pub(super) fn answered(&self, change: Id) {
        self.nodes().remove(&change);
    }

    /// The node that the change was sent to, if no answer has come.
    pub(super) fn node_of(&self, change: Id) -> Option<i64> {
        self.nodes().get(&change).map(|(_, node)| *node)
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
