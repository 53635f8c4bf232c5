//! Renewals. The beats of the lease keep all tickets: see `proof`. So a renewal only finds out
//! whether a ticket is still there and whether it holds, and makes it smaller or its ttl longer.
//!
//! - A ticket that holds: its key is read, once in a third of its ttl. In between, the answer comes
//!   from the proof. Somebody may have deleted the key, or asked it back.
//! - A ticket that waits: its line is read, once in a third of its ttl, and if it is not followed. In
//!   between, the events of the line tell.
//! - A single ticket is always looked at: the holder asks in this way before a step that needs the
//!   lock.
//! - A ticket that must become smaller, or that gets a longer ttl, or that is taken back after a
//!   detach: its key is read, and written over what was read.
//! - A ticket that holds, and whose key somebody has written over: it is still in its place, because
//!   the key was not created anew. So the ticket is written again, with the lease of the client. But if
//!   the new value is a ticket that leaves room for others, they may hold by now, and it is lost.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::{join_all, try_join_all};

use super::{millis, valid_for};
use crate::backend::etcd::layout::{self, Ticket};
use crate::backend::etcd::line::Copy;
use crate::backend::etcd::messages::{
    KeyValue, Op, all_below, one, put, rewrite, txn, was_written,
};
use crate::backend::etcd::session::At;
use crate::backend::etcd::standing::{Mine, Told};
use crate::backend::{Renewed, StoreError};
use crate::clock::{Clock, Instant};
use crate::request::Request;

/// How many keys one transaction reads. It may have 128 operations.
const READS: usize = 100;

/// How often a ticket is looked at in one ttl.
const LOOKS: u32 = 3;

/// A drop of the future at any point does no harm: what is written is written over what was read, and
/// shows a longer ttl or fewer permits than the next renewal asks for again.
pub(in crate::backend::etcd) async fn renew(
    at: Arc<At>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    let mut round = Round::begin(&at, &tickets);
    let unwritten = round.read_keys().await?;
    round.write(unwritten).await;
    round.read_lines().await?;
    Ok(round.end())
}

/// One call of [`renew`].
struct Round<'a> {
    at: &'a At,
    tickets: &'a [Arc<Request>],
    found: Vec<Found>,
    /// When the keys are read, at the earliest.
    now: Instant,
}

/// What is known of a ticket.
enum Found {
    Lost,
    Failed,
    There {
        mine: Mine,
        /// Whether the key is to be read.
        look: bool,
        /// The owner, and behind it an ask-back, if the key was read.
        owner: Option<String>,
        /// Somebody has written over the key, which has no lease since then.
        is_bare: bool,
    },
}

impl<'a> Round<'a> {
    fn begin(at: &'a At, tickets: &'a [Arc<Request>]) -> Self {
        let now = Clock::BOOT.now();
        let is_single = tickets.len() == 1;
        let state = at.session.state();
        let found = tickets
            .iter()
            .map(|request| match state.mine.get(&request.id) {
                // The ticket is of an earlier lease, or released, or deleted.
                None => Found::Lost,
                Some(mine) if mine.lost => Found::Lost,
                // Its enqueue was never answered, or its delete.
                Some(mine) if mine.number.is_none() || mine.leaving => Found::Failed,
                Some(mine) => {
                    let third = request.ttl / LOOKS;
                    let is_due = is_single || mine.seen.is_none_or(|seen| seen.after(third) <= now);
                    Found::There {
                        look: mine.granted && is_due || at.changes(request, mine),
                        mine: mine.clone(),
                        owner: None,
                        is_bare: false,
                    }
                }
            });
        Self {
            at,
            tickets,
            found: found.collect(),
            now,
        }
    }

    /// Reads the keys of tickets. Returns those that are to be written, with their indices.
    async fn read_keys(&mut self) -> Result<Vec<(usize, KeyValue)>, StoreError> {
        let looks = self.found.iter().enumerate();
        let looks = looks.filter(|(_, found)| matches!(found, Found::There { look: true, .. }));
        let looks: Vec<usize> = looks.map(|(index, _)| index).collect();
        let reads = looks.chunks(READS).map(|some| {
            let keys = some.iter().map(|index| Op::Range(one(&self.key(*index))));
            self.at.txn(txn(Vec::new(), keys.collect(), Vec::new()))
        });
        let read = try_join_all(reads).await?;
        let read = read.into_iter().flat_map(|answer| answer.into_ranges());
        let mut unwritten = Vec::new();
        for (index, kvs) in looks.into_iter().zip(read) {
            let kv = kvs.into_iter().next();
            unwritten.extend(self.learn(index, kv).map(|kv| (index, kv)));
        }
        Ok(unwritten)
    }

    /// The key of a ticket was read. Returns it if it is to be written.
    fn learn(&mut self, index: usize, kv: Option<KeyValue>) -> Option<KeyValue> {
        let (request, lease) = (&self.tickets[index], self.at.session.lease);
        let Found::There {
            mine,
            owner,
            is_bare,
            ..
        } = &mut self.found[index]
        else {
            return None;
        };
        let mut state = self.at.session.state();
        let known = state.mine.get_mut(&request.id);
        let is_detached = known.as_ref().is_some_and(|known| known.detached.is_some());
        let same = |kv: &KeyValue| {
            let number = Ticket::decode(&kv.value).number(kv.create_revision);
            let is_ours = match kv.lease {
                0 => keeps_others_out(&kv.value, request, mine),
                of => of == lease || is_detached,
            };
            Some(number) == mine.number && is_ours
        };
        let Some(kv) = kv.filter(same) else {
            if let Some(known) = known {
                known.lost = true;
            }
            self.found[index] = Found::Lost;
            return None;
        };
        let ticket = Ticket::decode(&kv.value);
        (mine.permits, mine.ttl) = (ticket.permits, ticket.ttl);
        *owner = Some(ticket.owner);
        *is_bare = kv.lease == 0;
        let is_bare = *is_bare;
        if let Some(known) = known {
            // Another renewal has taken the ticket back, or it is to be detached again.
            mine.detached = mine.detached.filter(|at| known.detached == Some(*at));
            (known.permits, known.ttl) = (mine.permits, mine.ttl);
            known.seen = Some(self.now);
        }
        (is_bare || self.at.changes(request, mine)).then_some(kv)
    }

    /// Makes tickets smaller, and their ttls longer, takes back those that were not detached in the
    /// end, and puts right those that somebody has written over.
    ///
    /// A caller of `revoke` reads the ttl together with its ask-back. If the holder is silent, the
    /// caller waits for one ttl, and then deletes the key. So no holder may rely on a ttl that this
    /// caller cannot see. If the ticket was asked back since it was read, the write fails, and the
    /// core renews again. The write also fails if another renewal was faster. Then that one may have
    /// done what this one wants.
    async fn write(&mut self, unwritten: Vec<(usize, KeyValue)>) {
        let writes = unwritten.iter().map(|(index, kv)| {
            let (request, key) = (&self.tickets[*index], self.key(*index));
            let ttl = request.ttl.min(self.at.session.ttl);
            let mut ticket = match Ticket::parse(&kv.value) {
                Some(ticket) if kv.lease == 0 => ticket.wanted_by(request, ttl),
                Some(ticket) => ticket,
                None => Ticket::of(request, ttl, millis()),
            };
            ticket.permits = ticket.permits.min(request.permits.get());
            ticket.ttl = ticket.ttl.max(ttl);
            let compare = vec![was_written(&key, kv.mod_revision)];
            let writes = vec![match self.has_no_lease_of_ours(*index) {
                true => put(&key, ticket.encode(), self.at.session.lease),
                false => rewrite(&key, ticket.encode()),
            }];
            let reads = vec![Op::Range(one(&key))];
            let written = self.at.txn(txn(compare, writes, reads));
            async move { (*index, ticket, written.await) }
        });
        for (index, ticket, written) in join_all(writes).await {
            match written {
                Ok(answer) if answer.succeeded => self.note_change(index, &ticket),
                Ok(answer) => {
                    let kv = answer.into_ranges().next().unwrap_or_default().pop();
                    if self.learn(index, kv).is_some() {
                        self.found[index] = Found::Failed;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "a ticket was not changed, or perhaps it was");
                    self.found[index] = Found::Failed;
                }
            }
        }
    }

    /// The key of a ticket was written.
    fn note_change(&mut self, index: usize, ticket: &Ticket) {
        let Found::There { mine, .. } = &mut self.found[index] else {
            return;
        };
        // A waiter that is smaller now may hold.
        let is_smaller = ticket.permits < mine.permits;
        mine.seen = mine.seen.filter(|_| !is_smaller);
        (mine.permits, mine.ttl) = (ticket.permits, ticket.ttl);
        let mut state = self.at.session.state();
        if let Some(known) = state.mine.get_mut(&self.tickets[index].id) {
            (known.permits, known.ttl) = (ticket.permits, ticket.ttl);
            if mine.detached.is_some() && known.detached == mine.detached {
                known.detached = None;
            }
        }
    }

    /// Whether the ticket was to be detached when this round began, or somebody has written over it.
    fn has_no_lease_of_ours(&self, index: usize) -> bool {
        matches!(&self.found[index], Found::There { mine, is_bare, .. } if mine.detached.is_some() || *is_bare)
    }

    /// Reads the lines of tickets that wait.
    async fn read_lines(&mut self) -> Result<(), StoreError> {
        let mut unclear: HashMap<&str, bool> = HashMap::new();
        {
            let mut state = self.at.session.state();
            for (found, request) in self.found.iter().zip(self.tickets) {
                let Found::There { mine, .. } = found else {
                    continue;
                };
                if mine.granted {
                    continue;
                }
                let third = request.ttl / LOOKS;
                let line = state.line(&mine.line, self.now);
                let is_due = line.is_none_or(|line| line.read.after(third) <= self.now);
                let is_single = self.tickets.len() == 1;
                *unclear.entry(&mine.line).or_default() |=
                    is_due || is_single || mine.seen.is_none();
            }
        }
        unclear.retain(|_, is_unclear| *is_unclear);
        let lines: Vec<String> = unclear.into_keys().map(ToOwned::to_owned).collect();
        let reads = lines.iter().map(|line| self.at.link.range(all_below(line)));
        let read = try_join_all(reads).await?;
        for (line, answer) in lines.iter().zip(read) {
            let revision = answer.header.map_or(0, |header| header.revision);
            self.line_was_read(line, revision, &answer.kvs);
        }
        Ok(())
    }

    fn line_was_read(&mut self, line: &str, revision: i64, listed: &[KeyValue]) {
        let session = &self.at.session;
        let copy = Copy::new(line, revision, listed);
        let mut state = session.state();
        let mut waits = false;
        for (found, request) in self.found.iter_mut().zip(self.tickets) {
            let Found::There { mine, .. } = found else {
                continue;
            };
            if mine.line != line || mine.granted {
                continue;
            }
            let is_there = copy
                .number(request.id)
                .is_some_and(|number| Some(number) == mine.number);
            let holds = is_there && copy.holds(request.id);
            waits |= is_there && !holds;
            if let Some(known) = state.mine.get_mut(&request.id) {
                known.lost |= !is_there;
                known.granted |= holds;
                known.seen = Some(self.now).filter(|_| !holds);
            }
            if !is_there {
                *found = Found::Lost;
            }
        }
        let granted = state.read(line, (revision, listed), waits, self.now);
        drop(state);
        session.tell(Told {
            granted,
            ..Told::default()
        });
    }

    fn end(self) -> Vec<Renewed> {
        let state = self.at.session.state();
        let granted =
            |request: &Request| state.mine.get(&request.id).is_some_and(|mine| mine.granted);
        let held: Vec<bool> = self
            .tickets
            .iter()
            .map(|request| granted(request))
            .collect();
        drop(state);
        let answers = self.found.into_iter().zip(self.tickets).zip(held);
        let answers = answers.map(|((found, request), holds)| match found {
            Found::Lost => Renewed::Lost,
            Found::Failed => Renewed::Failed,
            Found::There { mine, owner, .. } => {
                let valid_for = valid_for(&self.at.session, request).min(mine.ttl);
                let answer = match (holds, owner) {
                    (true, Some(owner)) => Renewed::holding(valid_for, &owner),
                    (true, None) => Renewed::Granted { valid_for },
                    (false, _) => Renewed::Waiting {
                        valid_for,
                        recheck_in: None,
                        grace: None,
                    },
                };
                if matches!(answer, Renewed::AskedBack { .. }) {
                    // The next renewal reads the key again, so that it tells this again.
                    if let Some(mine) = self.at.session.state().mine.get_mut(&request.id) {
                        mine.seen = None;
                    }
                }
                answer
            }
        });
        answers.collect()
    }

    fn key(&self, index: usize) -> String {
        let request = &self.tickets[index];
        layout::ticket(&self.at.session.layout.line(&request.name), request.id)
    }
}

impl At {
    /// Whether a renewal asks for fewer permits or for a longer ttl than the ticket has, or takes it
    /// back.
    fn changes(&self, request: &Request, mine: &Mine) -> bool {
        mine.detached.is_some()
            || request.permits.get() < mine.permits
            || request.ttl.min(self.session.ttl) > mine.ttl
    }
}

/// Whether the others take what somebody has written over a ticket for the same ticket, or for one that
/// takes everything.
fn keeps_others_out(value: &[u8], request: &Request, mine: &Mine) -> bool {
    Ticket::parse(value).is_none_or(|ticket| {
        ticket.permits >= mine.permits && ticket.capacity == request.capacity.get()
    })
}
