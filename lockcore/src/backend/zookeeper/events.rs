//! Lines that are followed. For a name that a ticket of this session waits for, there is one
//! persistent watch and a copy of the line. The watch's events keep the copy up to date. From the
//! copy the client learns, without a request, that a waiter is granted. (If many clients wait, a
//! watch on the ticket ahead is used instead: see [`By`].) A ticket *of ours* is a ticket of this
//! session.
//!
//! A name for which no ticket of ours waits has no watch. It is safe to grant a ticket by the copy,
//! for these reasons:
//!
//! - A line is *current* from the moment when it was listed, after its watch was set, until the
//!   connection is disturbed or the parent changes. Events come in the order of the changes, and
//!   none is left out. (If one were left out, the next create would show it, because each create
//!   takes exactly one number. The line would then be read again.)
//! - If a ticket of ours is in a current line, all older tickets are in front of it there, because
//!   each new ticket gets a greater number. Events that have not arrived yet can only be about
//!   younger tickets, and about deletions. If the copy has a ticket that is already deleted, a
//!   waiter behind this ticket only waits a little longer.
//! - A ticket that is made smaller gets a new node. The transaction creates the new node before it
//!   deletes the old one, and the events come in the same order. So the line always contains one of
//!   the two.
//! - So a ticket of ours holds if it is *in* a current line and the rule says that it holds. A
//!   ticket that is not in the line yet is not granted from the line, whatever the line looks like.
//!   A line that is not current is not used. In that case the renewals ask the store.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::{Arc, MutexGuard};

use futures_util::FutureExt as _;
use tokio::task::AbortHandle;
use zookeeper_client::{
    AddWatchMode, Error as ZkError, EventType, PersistentWatcher, Stat, WatchedEvent,
};

use super::layout::{self, Stored, Ticket};
use super::line::{By, Line};
use super::row::{Row, Terms};
use super::session::Session;
use super::standing::{Standing, State};
use crate::backend::{EventSink, Wake};
use crate::clock::Clock;
use crate::request::Id;

impl Session {
    /// Follows a line from now on, if it is not followed yet. While the session is disconnected,
    /// this only notes the line, and the next connect begins to follow it.
    pub(super) fn follow(self: &Arc<Self>, state: &mut State, path: &str) {
        let line = state.lines.entry(path.to_owned()).or_default();
        line.used = Clock::BOOT.now();
        if self.is_up() && line.following.as_ref().is_none_or(AbortHandle::is_finished) {
            let following = follow(Arc::clone(self), path.to_owned(), line.by);
            let task = self.runtime.spawn(following);
            line.following = Some(task.abort_handle());
        }
    }

    /// Notes that a ticket of ours waits in a line from now on, and follows the line.
    pub(super) fn wait_in(self: &Arc<Self>, state: &mut State, path: &str, sequence: i32) {
        if let Some(line) = state.lines.get_mut(path)
            && let Some((other, _)) = line.ahead
            && layout::is_older(sequence, other)
        {
            // The reply for this ticket arrived after the reply for a younger ticket of ours. The
            // watch is on the ticket ahead of the younger one, so the line must be followed anew.
            line.stop();
        }
        self.follow(state, path);
    }

    /// Follows again every line in which a ticket of ours waits, if the task that followed the line
    /// has ended because a request failed.
    pub(super) fn follow_again(self: &Arc<Self>, state: &mut State) {
        let mut paths: Vec<String> = state.lines.keys().cloned().collect();
        paths.retain(|path| state.waiting(path).next().is_some());
        for path in paths {
            self.follow(state, &path);
        }
    }

    /// Whether our copy of a line contains a node that is known to be deleted.
    pub(super) fn believes_in(&self, path: &str, node: &str) -> bool {
        let state = self.state();
        let line = state.lines.get(path);
        line.is_some_and(|line| line.believes_in(node))
    }

    /// A node of a line has been deleted. If our copy contains the node at this moment, the watch
    /// has missed the event, and the line is followed anew.
    pub(super) fn doubt(self: &Arc<Self>, path: &str, node: &str) {
        self.follow_anew_if(path, |line| line.believes_in(node));
    }

    fn follow_anew_if(self: &Arc<Self>, path: &str, is_wrong: impl FnOnce(&Line) -> bool) {
        let mut state = self.state();
        if let Some(line) = state.lines.get_mut(path)
            && is_wrong(line)
        {
            tracing::debug!("a line is not as its watch told");
            line.stop();
            self.follow(&mut state, path);
        }
    }

    /// Whether our copy of a line is from before its parent was written by this transaction.
    pub(super) fn is_outdated(&self, path: &str, written: i64) -> bool {
        let state = self.state();
        let line = state.lines.get(path);
        line.is_some_and(|line| line.checks_terms() && line.written != written)
    }

    /// If our copy of a line [is outdated](Self::is_outdated), the line is followed anew, as in
    /// [`doubt`](Self::doubt).
    pub(super) fn doubt_terms(self: &Arc<Self>, path: &str, written: i64) {
        self.follow_anew_if(path, |line| line.checks_terms() && line.written != written);
    }

    /// If our copy of a line still [misses](Line::misses) a ticket of ours, the line is followed anew,
    /// as in [`doubt`](Self::doubt).
    pub(super) fn doubt_without(self: &Arc<Self>, path: &str, sequence: i32) {
        self.follow_anew_if(path, |line| line.misses(sequence));
    }

    fn line_was_read(self: &Arc<Self>, path: &str, children: &[String], parent: Option<&Stat>) {
        let mut state = self.state();
        let Some(line) = state.lines.get_mut(path) else {
            return;
        };
        line.read(children, parent);
        let (tickets, highest) = (line.tickets.clone(), line.highest);
        let terms = line.terms.clone();
        for ticket in tickets.iter().chain(&terms.halts) {
            self.disown(&state, path, &terms, ticket);
        }
        // Finds the tickets of ours that are not in the line any more. There may be as many of them
        // as the line has tickets, so this uses a set.
        let there: HashSet<(Id, i32)> = tickets
            .iter()
            .map(|ticket| (ticket.id, ticket.sequence))
            .collect();
        let is_lost = |(id, standing): &(Id, &Standing)| {
            !standing.leaving
                && !layout::is_older(highest, standing.sequence)
                && !there.contains(&(*id, standing.sequence))
        };
        let lost = state.tickets.in_line(path).filter(is_lost);
        let lost: Vec<Id> = lost.map(|(id, _)| id).collect();
        for id in &lost {
            if let Some(standing) = state.standing_mut(*id) {
                standing.lost = true;
            }
        }
        self.tell(state, path, !lost.is_empty());
    }

    /// Notes that the parent of a line was deleted or created, so that the copy is of an earlier
    /// parent. Returns `false` when the line need not be followed any more: no ticket of ours waits
    /// in it, and no late node is expected. (If others use a name alone, its parent changes with
    /// each use.) The next waiter begins to follow the line again.
    fn parent_changed(&self, path: &str) -> bool {
        let mut state = self.state();
        let needed = state.needs(path);
        match state.lines.get_mut(path) {
            Some(line) if needed => line.current = false,
            // The line is removed under the mutex. So the next waiter of ours finds that no task
            // follows the line, and begins to follow it.
            _ => drop(state.lines.remove(path)),
        }
        needed
    }

    /// A node was created in a line. Returns `false` when the line must be read again.
    fn came(self: &Arc<Self>, path: &str, node: &str) -> bool {
        let mut state = self.state();
        let Some(ticket) = Ticket::parse(node) else {
            // The node may be a stored capacity. Any other node has taken a number too, so the next
            // create shows the gap.
            return state.has_stored(path, node, true);
        };
        let terms = state.lines.get(path).map(|line| line.terms.clone());
        self.disown(&state, path, &terms.unwrap_or_default(), &ticket);
        let Some(line) = state.lines.get_mut(path) else {
            return true;
        };
        let complete = line.came(ticket);
        if complete {
            self.tell(state, path, false);
        }
        complete
    }

    /// A node of a line was deleted. Returns `false` when the line must be read again.
    fn went(&self, path: &str, node: &str) -> bool {
        let mut state = self.state();
        let Some(ticket) = state.lines.get_mut(path).and_then(|line| line.went(node)) else {
            let complete = state.has_stored(path, node, false);
            self.tell(state, path, false); // the node may have been a halt
            return complete;
        };
        let mut lost = false;
        if let Some(standing) = state.standing_mut(ticket.id)
            && standing.sequence == ticket.sequence
            && !standing.leaving
        {
            standing.lost = true;
            lost = true;
        }
        self.tell(state, path, lost);
        true
    }

    /// Deletes a node with an id of ours that is not wanted in this line. There are three cases:
    /// the release of the id came first, the id has another node, or a mutex waits in a line with a
    /// stored capacity. If the delete fails, the node is seen again when the line is read next.
    fn disown(self: &Arc<Self>, state: &State, path: &str, terms: &Terms, ticket: &Ticket) {
        let misfits = |mine: &Standing| mine.is_waiting() && terms.misfit(ticket.capacity);
        let unwanted = state.is_gone(ticket.id, path)
            || state
                .standing(ticket.id)
                .is_some_and(|mine| mine.sequence != ticket.sequence || misfits(mine));
        if unwanted {
            self.delete_unasked(format!("{path}/{}", ticket.node));
        }
    }

    /// Deletes a node, and ignores the outcome.
    pub(super) fn delete_unasked(self: &Arc<Self>, path: String) {
        let session = Arc::clone(self);
        self.runtime.spawn(async move {
            tracing::debug!("deleting a ticket that nobody here wants");
            session.client.delete(&path, None).await
        });
    }

    /// Wakes our tickets that hold now, if the line is current.
    pub(super) fn tell(&self, mut state: MutexGuard<'_, State>, path: &str, lost: bool) {
        let line = state.lines.get(path).filter(|line| line.current);
        let holding = line.map_or_else(Vec::new, |line| state.holding(&line.tickets, &line.terms));
        let wakes = state.grant(holding);
        self.send(state, wakes, lost);
    }

    /// Sends wake-ups after the mutex is unlocked. If a ticket of ours was lost, also reports a
    /// gap, so that the core checks its tickets.
    fn send(&self, state: MutexGuard<'_, State>, wakes: Vec<Wake>, lost: bool) {
        let events: Option<Arc<EventSink>> = state.events.clone();
        drop(state);
        let Some(events) = events else {
            return; // the core renews every ticket on the next connection
        };
        for wake in wakes {
            events.granted(wake);
        }
        if lost {
            events.gap();
        }
    }
}

impl State {
    /// The tickets of ours in a line that hold now, but are not known to hold. This reads only the
    /// front of the line, which is short in most cases. It is long for shared locks, and after a
    /// smaller capacity was stored.
    fn holding<'a>(
        &self,
        line: impl IntoIterator<Item = &'a Ticket> + Copy,
        terms: &Terms,
    ) -> Vec<Id> {
        let (grants, through) = (terms.grants(line), terms.through());
        let mut holding = Vec::new();
        for (at, ticket) in line.into_iter().enumerate() {
            let mine = self.standing(ticket.id);
            let mine = mine.filter(|mine| mine.sequence == ticket.sequence);
            let may_hold = at < grants || mine.map_or(through > 0, |mine| mine.ticket <= through);
            if !may_hold {
                break; // the tickets behind this one have greater numbers
            }
            if mine.is_some_and(Standing::is_waiting) {
                holding.push(ticket.id);
            }
        }
        holding
    }

    /// Marks tickets of ours that hold now. Returns their wake-ups.
    fn grant(&mut self, holding: Vec<Id>) -> Vec<Wake> {
        let mut wakes = Vec::new();
        for id in holding {
            if let Some(standing) = self.standing_mut(id) {
                standing.granted = true;
                wakes.push(Wake {
                    id,
                    ticket: standing.ticket,
                });
            }
        }
        wakes
    }

    /// Handles an event of a node that is not a ticket: the node was created if `is_there` is true,
    /// else it was deleted. Returns `false` when the line must be read again.
    fn has_stored(&mut self, path: &str, node: &str, is_there: bool) -> bool {
        match (Stored::parse(node), self.lines.get_mut(path)) {
            (Some(stored), Some(line)) => line.has_stored(&stored, is_there),
            _ => true,
        }
    }

    /// The oldest ticket of ours that waits in a line.
    pub(super) fn first_waiting(&self, path: &str) -> Option<i32> {
        let sequence = |id| self.standing(id).map(|mine| mine.sequence);
        let waiting = self.waiting(path).filter_map(sequence);
        waiting.reduce(|one, other| match layout::is_older(one, other) {
            true => one,
            false => other,
        })
    }

    /// Whether a line must be followed: a ticket of ours waits in it, or a late node of a released
    /// id may appear in it.
    pub(super) fn needs(&self, path: &str) -> bool {
        self.waiting(path).next().is_some() || self.expects_late_nodes(path)
    }

    /// The tickets of ours that wait in a line.
    fn waiting(&self, path: &str) -> impl Iterator<Item = Id> {
        let ours = self.tickets.in_line(path);
        ours.filter(|(_, mine)| mine.is_waiting()).map(|(id, _)| id)
    }
}

/// With more clients than this in a line, the client watches only the ticket ahead. With fewer
/// clients than `NO_CROWD`, it watches the whole line again.
const CROWD: usize = 8;
const NO_CROWD: usize = 6;

/// Follows a line. Runs on the keeper's runtime, as a part of the connection's driver, until the
/// connection is disturbed or nobody needs the line. If the future is dropped, the watch is
/// removed.
async fn follow(session: Arc<Session>, path: String, mut by: By) {
    loop {
        let next = match by {
            By::Line => follow_line(&session, &path).await,
            By::TicketAhead => follow_ticket_ahead(&session, &path).await,
        };
        let Some(next) = next else { return };
        by = next;
        // The next follower of this line begins in the same way.
        if let Some(line) = session.state().lines.get_mut(&path) {
            line.by = by;
        }
    }
}

async fn follow_line(session: &Arc<Session>, path: &str) -> Option<By> {
    // The watch is sent before the list. So the watch reports every change that the list does not
    // show.
    let watching = session
        .client
        .watch(path, AddWatchMode::PersistentRecursive);
    let listing = session.client.get_children(path);
    let mut watcher = match watching.await {
        Ok(watcher) => watcher,
        Err(error) => {
            // Without the watch, the waiters learn of their grants from their renewals.
            tracing::debug!(%error, "cannot watch a line");
            return None;
        }
    };
    let mut listed = listing.await;
    loop {
        // The server sends events and answers in one order. So the events of all changes that the
        // list shows have arrived by now, and perhaps later events too. If the parent was deleted
        // or created meanwhile, some events are about an earlier parent, whose nodes had the same
        // numbers. In this case all events are dropped, and the line is read again.
        let mut reported = VecDeque::new();
        while let Some(event) = watcher.changed().now_or_never() {
            if event.event_type == EventType::Session {
                return None; // the same case as below
            }
            reported.push_back(event);
        }
        if reported.iter().any(|event| is_of_parent(event, path)) {
            if !session.parent_changed(path) {
                return None;
            }
            listed = session.client.get_children(path).await;
            continue;
        }
        match &listed {
            Ok((children, parent)) => session.line_was_read(path, children, Some(parent)),
            Err(ZkError::NoNode) => session.line_was_read(path, &[], None),
            Err(error) => {
                tracing::debug!(%error, "cannot read a line");
                return None;
            }
        }
        if session.is_crowded(path) {
            return Some(By::TicketAhead);
        }
        if let Break(next) = follow_events(session, path, reported, &mut watcher).await {
            return next;
        }
        listed = session.client.get_children(path).await;
    }
}

/// Follows a line that was read, by the events that were reported, and by those that come. Continues
/// when the line must be read again. Breaks when the watch has ended, nobody needs the line, or it
/// is to be followed in another way.
async fn follow_events(
    session: &Arc<Session>,
    path: &str,
    mut reported: VecDeque<WatchedEvent>,
    watcher: &mut PersistentWatcher,
) -> ControlFlow<Option<By>> {
    let mut came = 0;
    loop {
        let event = match reported.pop_front() {
            Some(event) => event,
            None => watcher.changed().await,
        };
        let node = event.path.strip_prefix(path);
        let node = node.and_then(|rest| rest.strip_prefix('/'));
        let complete = match (event.event_type, node) {
            // The server has removed the watch with the connection. The watcher must not be used
            // after the end of the session: another call would panic.
            (EventType::Session, _) => return Break(None),
            (EventType::NodeCreated, Some(node)) => {
                came += 1;
                session.came(path, node)
            }
            (EventType::NodeDeleted, Some(node)) => session.went(path, node),
            (EventType::NodeCreated | EventType::NodeDeleted, None) => {
                if !session.parent_changed(path) {
                    return Break(None);
                }
                false
            }
            (EventType::NodeDataChanged | EventType::NodeChildrenChanged, _) => true,
        };
        if !complete {
            return Continue(());
        }
        // The time of this check grows with the length of the line, so the check is not made for
        // every event.
        if came >= 32 {
            came = 0;
            if session.is_crowded(path) {
                return Break(Some(By::TicketAhead));
            }
        }
    }
}

/// Whether an event reports that the parent of a line was deleted or created. Under a new parent,
/// the numbers of nodes begin again.
fn is_of_parent(event: &WatchedEvent, path: &str) -> bool {
    event.path == path
        && matches!(
            event.event_type,
            EventType::NodeCreated | EventType::NodeDeleted
        )
}

async fn follow_ticket_ahead(session: &Arc<Session>, path: &str) -> Option<By> {
    loop {
        let waiting: Vec<Id> = session.state().waiting(path).collect();
        let line = match session.list(path).await {
            Ok(line) => line,
            Err(error) => {
                tracing::debug!(%error, "cannot read a line");
                return None;
            }
        };
        let node = match session.ahead(path, &line, &waiting) {
            Ahead::Nobody => return None,
            Ahead::NoCrowd => return Some(By::Line),
            Ahead::LookAgain => continue,
            Ahead::Ticket(node) => node,
        };
        match session.client.check_and_watch_stat(&node).await {
            Ok((Some(_), watcher)) => {
                // The watcher also reports the end of the session. A reconnect aborts this task.
                watcher.changed().await;
            }
            Ok((None, _)) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot watch a ticket");
                return None;
            }
        }
    }
}

/// What the client waits for next, when it watches the ticket ahead.
enum Ahead {
    /// No ticket of ours waits. The next waiter begins to follow the line again.
    Nobody,
    NoCrowd,
    /// A ticket of ours waits, but it is not in the line that was read. So the line must be read
    /// again.
    LookAgain,
    Ticket(String),
}

impl Session {
    /// Whether it is better to watch only the ticket ahead. If so, this also notes that the copy of
    /// the line is not current.
    fn is_crowded(&self, path: &str) -> bool {
        let mut state = self.state();
        // A late node of a released id is seen only by the watch over the whole line.
        let watched = state.expects_late_nodes(path);
        let Some(line) = state.lines.get_mut(path) else {
            return false;
        };
        let want_all = line.tickets.iter().all(Ticket::wants_all);
        let settled = want_all && !watched && line.terms.is_plain();
        let crowded = settled && layout::clients(&line.tickets) > CROWD;
        line.current &= !crowded;
        crowded
    }

    /// Applies the line as it was read, and finds the ticket to wait for. `waiting` are the tickets
    /// of ours that waited before the list was requested.
    fn ahead(self: &Arc<Self>, path: &str, line: &Row, waiting: &[Id]) -> Ahead {
        let mut state = self.state();
        for ticket in line.iter() {
            self.disown(&state, path, &line.terms, ticket);
        }
        let mut lost = false;
        for id in waiting {
            if let Some(standing) = state.standing_mut(*id)
                && !standing.leaving
                && line
                    .iter()
                    .all(|ticket| ticket.sequence != standing.sequence)
            {
                standing.lost = true;
                lost = true;
            }
        }
        let holding = state.holding(&line.tickets, &line.terms);
        let wakes = state.grant(holding);
        let first = line.iter().position(|ticket| {
            let ours = state.standing(ticket.id);
            ours.is_some_and(|ours| ours.sequence == ticket.sequence && ours.is_waiting())
        });
        let watched = state.expects_late_nodes(path);
        // Only the watch over the whole line reports that a halt or a stored capacity has gone.
        let settled = line.iter().all(Ticket::wants_all) && line.terms.is_plain();
        let ahead = first.and_then(|first| {
            let ahead = first.checked_sub(1)?;
            Some((line[first].sequence, line[ahead].node.clone()))
        });
        if let Some(line) = state.lines.get_mut(path) {
            line.ahead = ahead.clone();
        }
        let ahead = match ahead {
            _ if watched || !settled || layout::clients(&line.tickets) < NO_CROWD => Ahead::NoCrowd,
            Some((_, node)) => Ahead::Ticket(format!("{path}/{node}")),
            _ if state.waiting(path).next().is_some() => Ahead::LookAgain,
            _ => {
                // This is done under the mutex. So the next waiter of ours finds that no task
                // follows the line, and begins to follow it.
                if let Some(line) = state.lines.get_mut(path) {
                    line.following = None;
                }
                Ahead::Nobody
            }
        };
        self.send(state, wakes, lost);
        ahead
    }
}
