//! What this process knows about a session: its tickets there, and the lines and counters that it
//! follows.

use std::collections::{BTreeSet, HashMap, HashSet};
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
use crate::request::{FULL, Id};

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
    pub(super) tickets: Ours,
    /// Released ids whose enqueue may arrive later, by the paths of their parents, each with the
    /// time until which it is marked. A node with such an id is deleted as soon as it is seen. No
    /// inner map is empty.
    pub(super) gone: HashMap<String, HashMap<Id, Instant>>,
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
        self.tickets.standing(id)
    }

    /// Whether the node with this number is the ticket of this id.
    pub(super) fn has(&self, id: Id, sequence: i32) -> bool {
        let standing = self.standing(id);
        standing.is_some_and(|standing| standing.sequence == sequence)
    }

    pub(super) fn standing_mut(&mut self, id: Id) -> Option<&mut Standing> {
        self.tickets.standing_mut(id)
    }

    /// The store has answered with a ticket.
    pub(super) fn stands(&mut self, id: Id, standing: Standing) {
        if !standing.alone {
            self.remember_parent(&standing.parent);
        }
        self.tickets.stands(id, standing);
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
        self.tickets.remove(id);
    }

    /// From now on a node with this id is deleted as soon as it is seen: for a minute, or for
    /// `at_least` if that is longer.
    pub(super) fn mark_gone(&mut self, id: Id, parent: &str, at_least: Duration) {
        let until = Clock::BOOT.now().after(MARK.max(at_least));
        let of_line = self.gone.entry(parent.to_owned()).or_default();
        of_line.insert(id, until);
    }

    /// Whether a node with this id is to be deleted as soon as it is seen.
    pub(super) fn is_gone(&self, id: Id, parent: &str) -> bool {
        let of_line = self.gone.get(parent);
        of_line.is_some_and(|of_line| of_line.contains_key(&id))
    }

    /// Whether a late node of a released id may appear in a line.
    pub(super) fn expects_late_nodes(&self, parent: &str) -> bool {
        self.gone.contains_key(parent)
    }

    /// Forgets the marks whose time is over.
    pub(super) fn forget_gone(&mut self, now: Instant) {
        self.gone.retain(|_, of_line| {
            of_line.retain(|_, until| *until > now);
            !of_line.is_empty()
        });
    }
}

/// The tickets of this session, by their ids and by their lines. A client may follow as many lines
/// as it has tickets, so a question about one line must not look at the tickets of the others.
#[derive(Debug, Default)]
pub(super) struct Ours {
    by_id: HashMap<Id, Mine>,
    /// The tickets that exist at the store, by the paths of their parents, with their sequence
    /// numbers. No set is empty.
    by_line: HashMap<String, BTreeSet<(i32, Id)>>,
}

impl Ours {
    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Whether any ticket exists at the store.
    pub(super) fn any_stands(&self) -> bool {
        !self.by_line.is_empty()
    }

    pub(super) fn get(&self, id: Id) -> Option<&Mine> {
        self.by_id.get(&id)
    }

    pub(super) fn standing(&self, id: Id) -> Option<&Standing> {
        match self.by_id.get(&id)? {
            Mine::Standing(standing) => Some(standing),
            Mine::Asked(_) => None,
        }
    }

    /// The path of the ticket's parent and the sequence number must not be changed.
    pub(super) fn standing_mut(&mut self, id: Id) -> Option<&mut Standing> {
        match self.by_id.get_mut(&id)? {
            Mine::Standing(standing) => Some(standing),
            Mine::Asked(_) => None,
        }
    }

    /// The tickets that exist at the store.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Standing> {
        self.by_id.values_mut().filter_map(|mine| match mine {
            Mine::Standing(standing) => Some(standing),
            Mine::Asked(_) => None,
        })
    }

    /// The tickets with this parent that exist at the store.
    pub(super) fn in_line(&self, path: &str) -> impl Iterator<Item = (Id, &Standing)> {
        let ids = self.by_line.get(path).into_iter().flatten();
        ids.filter_map(|(_, id)| Some((*id, self.standing(*id)?)))
    }

    /// The path and the ticket number of the ticket with this parent that was created last, unless
    /// its release was sent.
    pub(super) fn youngest_in(&self, path: &str) -> Option<(String, u64)> {
        let (_, id) = self.by_line.get(path)?.last()?;
        let youngest = self.standing(*id).filter(|youngest| !youngest.leaving)?;
        Some((youngest.path.clone(), youngest.ticket))
    }

    /// The ticket of ours [right ahead](crate::backend::Enqueued::Waiting::ahead) of the ticket
    /// `id`: it has the sequence number before that of `mine`, and it wants all permits.
    ///
    /// Each create takes one number, so no other node was created between the two. This is true
    /// under one parent only, because the numbers begin anew under another. So the caller has looked
    /// at an older ticket of ours after the create of `mine`, and has found it. Its number is
    /// `since`. The server deletes no parent that has a child, so every ticket of ours since then
    /// has the same parent.
    ///
    /// There is no stored capacity, and nobody stores one: this is refused as long as a mutex is the
    /// first in line.
    pub(super) fn right_before(&self, id: Id, mine: &Standing, since: u64) -> Option<Id> {
        let line = self.by_line.get(&mine.parent)?;
        let (number, ahead) = *line.range(..(mine.sequence, id)).next_back()?;
        let standing = self.standing(ahead)?;
        let is_it = number == mine.sequence.wrapping_sub(1)
            && (since..mine.ticket).contains(&standing.ticket)
            && standing.permits == FULL.get();
        is_it.then_some(ahead)
    }

    /// A create was sent at this time.
    pub(super) fn asked(&mut self, id: Id, sent: Instant) {
        self.insert(id, Mine::Asked(sent));
    }

    /// The ticket exists at the store.
    pub(super) fn stands(&mut self, id: Id, standing: Standing) {
        self.insert(id, Mine::Standing(standing));
    }

    fn insert(&mut self, id: Id, mine: Mine) {
        self.remove(id);
        if let Mine::Standing(standing) = &mine {
            let line = self.by_line.entry(standing.parent.clone()).or_default();
            line.insert((standing.sequence, id));
        }
        self.by_id.insert(id, mine);
    }

    pub(super) fn remove(&mut self, id: Id) -> Option<Mine> {
        let mine = self.by_id.remove(&id)?;
        if let Mine::Standing(standing) = &mine
            && let Some(line) = self.by_line.get_mut(&standing.parent)
        {
            line.remove(&(standing.sequence, id));
            if line.is_empty() {
                self.by_line.remove(&standing.parent);
            }
        }
        Some(mine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(parent: &str) -> Standing {
        Standing {
            parent: parent.to_owned(),
            path: format!("{parent}/x"),
            permits: 1,
            ttl: Duration::from_secs(10),
            shrinks_to: None,
            sequence: 1,
            alone: false,
            ticket: 7,
            granted: false,
            seen: None,
            lost: false,
            leaving: false,
        }
    }

    /// What [`Ours::in_line`] must return, found by a look at all tickets.
    fn searched(ours: &Ours, path: &str) -> HashSet<Id> {
        let in_line = |(id, mine): (&Id, &Mine)| match mine {
            Mine::Standing(standing) if standing.parent == path => Some(*id),
            _ => None,
        };
        ours.by_id.iter().filter_map(in_line).collect()
    }

    #[test]
    fn the_tickets_by_line_are_those_by_id() {
        let mut random = fastrand::Rng::with_seed(5);
        let ids: Vec<Id> = (0..12).map(|_| Id::draw().unwrap()).collect();
        let parents = ["/lock:1/{a}", "/lock:1/{b}", "/lock:1/{c}"];
        let mut ours = Ours::default();
        let mut stood = 0;
        for _ in 0..5_000 {
            let id = *random.choice(&ids).unwrap();
            match random.u8(0..3) {
                0 => ours.asked(id, Clock::BOOT.now()),
                1 => ours.stands(id, standing(random.choice(parents).unwrap())),
                _ => drop(ours.remove(id)),
            }

            for parent in parents {
                let in_line: Vec<Id> = ours.in_line(parent).map(|(id, _)| id).collect();
                let searched = searched(&ours, parent);
                assert_eq!(in_line.len(), searched.len());
                assert!(in_line.iter().all(|id| searched.contains(id)));
                stood += in_line.len();
            }
            assert!(ours.by_line.values().all(|line| !line.is_empty()));
            assert_eq!(ours.any_stands(), ours.all_mut().next().is_some());
        }
        assert!(stood > 5_000, "{stood}");
    }

    fn stands(ours: &mut Ours, sequence: i32, ticket: u64, permits: u32) -> (Id, Standing) {
        let id = Id::draw().unwrap();
        let standing = Standing {
            permits,
            sequence,
            ticket,
            ..standing("/lock:1/{a}")
        };
        ours.stands(id, standing.clone());
        (id, standing)
    }

    #[test]
    fn the_ticket_right_before_ours_has_the_number_before_and_is_of_the_same_parent() {
        let (mut ours, all) = (Ours::default(), FULL.get());
        let (oldest, _) = stands(&mut ours, 3, 100, all);
        let (second, of_second) = stands(&mut ours, 4, 110, all);
        let (third, of_third) = stands(&mut ours, 6, 130, all);
        let (fourth, of_fourth) = stands(&mut ours, 7, 140, 1);
        let (last, of_last) = stands(&mut ours, 8, 150, all);

        assert_eq!(ours.right_before(second, &of_second, 100), Some(oldest));
        assert_eq!(
            ours.right_before(third, &of_third, 100),
            None,
            "of a stranger"
        );
        assert_eq!(ours.right_before(fourth, &of_fourth, 100), Some(third));
        assert_eq!(ours.right_before(last, &of_last, 100), None, "of a reader");
        // The older ticket that was found is younger than the one with the number before.
        assert_eq!(ours.right_before(fourth, &of_fourth, 135), None);
        // The numbers have begun anew, and the ticket with the number before is of an earlier line.
        let (anew, of_anew) = stands(&mut ours, 5, 120, all);
        assert_eq!(ours.right_before(anew, &of_anew, 115), None);
        assert_eq!(ours.youngest_in("/lock:1/{a}").unwrap().1, 150);
    }
}
