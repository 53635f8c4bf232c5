//! What this process knows about a session: its tickets there, and the lines and counters that it
//! follows.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use zookeeper_client::Error as ZkError;

use super::line::Line;
use super::proof::Proof;
use super::row::Row;
use crate::backend::EventSink;
use crate::clock::{Clock, Instant};
use crate::request::Id;

/// For how long the id of a released ticket stays marked. This is far longer than a request can
/// wait in the buffer of a socket: by then the server has read it, or the connection is reset.
const MARK: Duration = Duration::from_secs(60);

/// How many names are remembered as having a parent node. If this process forgets a parent that
/// exists, the next enqueue sends one request that fails.
const KNOWN_PARENTS: usize = 10_000;

/// What this process knows about the session.
#[derive(Debug)]
pub(super) struct State {
    /// Reports events to the core. `None` while the session is disconnected.
    pub(super) events: Option<Arc<EventSink>>,
    pub(super) tickets: HashMap<Id, Mine>,
    /// Released ids whose enqueue may arrive later. A node with such an id is deleted as soon as it
    /// is seen.
    pub(super) gone: HashMap<Id, Gone>,
    pub(super) lines: HashMap<String, Line>,
    /// The counters that are watched, by their paths, each with the task that waits for the events.
    pub(super) watched: HashMap<String, AbortHandle>,
    /// For each name with a list in flight: the callers that wait for the next list.
    pub(super) lists: HashMap<String, Asking>,
    /// Parents that exist, as far as is known.
    pub(super) parents: HashSet<String>,
    pub(super) proof: Proof,
}

/// The line of a parent. Empty if there is no parent.
pub(super) type Listed = Result<Arc<Row>, ZkError>;

/// The callers that share a list.
pub(super) type Asking = Vec<oneshot::Sender<Listed>>;

/// A ticket of this process.
#[derive(Clone, Debug)]
pub(super) enum Mine {
    /// A create was sent, the first one at this time, and no reply has come.
    Asked(Instant),
    Standing(Standing),
}

/// A ticket that exists at the store.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    /// The path of the ticket's parent node, and the path of its own node.
    pub(super) parent: String,
    pub(super) path: String,
    pub(super) permits: u32,
    /// The ttl that the node shows, in its name or in its data. The node may show a longer one, if
    /// the answer to a write was lost.
    pub(super) ttl: Duration,
    /// If a request to make the ticket smaller was sent: the path that the ticket has after that
    /// request. There is at most one such request, because the core makes one change at a time and
    /// repeats it until it is acknowledged.
    pub(super) shrinks_to: Option<String>,
    pub(super) sequence: i32,
    /// The parent was created in the same transaction as the ticket. If there is no other ticket,
    /// the release deletes both together.
    pub(super) alone: bool,
    pub(super) ticket: u64,
    /// The ticket holds. Once set, this stays set.
    pub(super) granted: bool,
    /// When the ticket's node was last seen. `None` if the node must be read again.
    pub(super) seen: Option<Instant>,
    /// The ticket's node is gone, although this process has not deleted it.
    pub(super) lost: bool,
    /// The release of the ticket was sent.
    pub(super) leaving: bool,
}

impl Standing {
    /// Whether the ticket is in line, as far as this process knows.
    pub(super) fn is_waiting(&self) -> bool {
        !self.granted && !self.lost && !self.leaving
    }
}

#[derive(Clone, Debug)]
pub(super) struct Gone {
    pub(super) parent: String,
    pub(super) until: Instant,
}

impl State {
    pub(super) fn watches(&self, path: &str) -> bool {
        let watched = self.watched.get(path);
        watched.is_some_and(|task| !task.is_finished())
    }

    pub(super) fn watch(&mut self, path: String, task: AbortHandle) {
        if let Some(before) = self.watched.insert(path, task) {
            before.abort();
        }
    }

    pub(super) fn unwatch(&mut self, path: &str) {
        if let Some(task) = self.watched.remove(path) {
            task.abort();
        }
    }

    pub(super) fn unwatch_all(&mut self) {
        for (_, task) in self.watched.drain() {
            task.abort();
        }
    }

    pub(super) fn knows_parent(&self, path: &str) -> bool {
        self.parents.contains(path)
    }

    pub(super) fn remember_parent(&mut self, path: &str) {
        if self.parents.len() >= KNOWN_PARENTS {
            self.parents.clear();
        }
        if !self.parents.contains(path) {
            self.parents.insert(path.to_owned());
        }
    }

    pub(super) fn forget_parent(&mut self, path: &str) {
        self.parents.remove(path);
    }

    pub(super) fn standing(&self, id: Id) -> Option<&Standing> {
        match self.tickets.get(&id)? {
            Mine::Standing(standing) => Some(standing),
            Mine::Asked(_) => None,
        }
    }

    pub(super) fn standing_mut(&mut self, id: Id) -> Option<&mut Standing> {
        match self.tickets.get_mut(&id)? {
            Mine::Standing(standing) => Some(standing),
            Mine::Asked(_) => None,
        }
    }

    /// The store has answered with a ticket.
    pub(super) fn stands(&mut self, id: Id, standing: Standing) {
        if !standing.alone {
            self.remember_parent(&standing.parent);
        }
        self.tickets.insert(id, Mine::Standing(standing));
    }

    /// The release of the ticket is about to be sent, so the end of its node is expected.
    pub(super) fn leaves(&mut self, id: Id) {
        if let Some(standing) = self.standing_mut(id) {
            standing.leaving = true;
        }
    }

    /// The ticket holds now.
    pub(super) fn granted(&mut self, id: Id) {
        if let Some(standing) = self.standing_mut(id) {
            standing.granted = true;
        }
    }

    /// Other tickets use the same name.
    pub(super) fn is_not_alone(&mut self, id: Id) {
        if let Some(standing) = self.standing_mut(id) {
            standing.alone = false;
            let parent = standing.parent.clone();
            self.remember_parent(&parent);
        }
    }

    /// A request to make the ticket smaller is about to be sent.
    pub(super) fn shrinks(&mut self, id: Id, path: &str) {
        if let Some(standing) = self.standing_mut(id) {
            standing.shrinks_to = Some(path.to_owned());
        }
    }

    /// The ticket was made smaller.
    pub(super) fn shrunk(&mut self, id: Id, path: String, permits: u32) {
        if let Some(standing) = self.standing_mut(id) {
            standing.path = path;
            standing.permits = permits;
            standing.shrinks_to = None;
        }
    }

    /// The ticket does not exist at the store any more, or never did.
    pub(super) fn left(&mut self, id: Id) {
        self.tickets.remove(&id);
    }

    /// From now on a node with this id is deleted as soon as it is seen.
    pub(super) fn mark_gone(&mut self, id: Id, parent: &str) {
        let gone = Gone {
            parent: parent.to_owned(),
            until: Clock::BOOT.now().after(MARK),
        };
        self.gone.insert(id, gone);
    }
}
