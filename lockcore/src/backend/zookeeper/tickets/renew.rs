//! Renewals: checks whether tickets exist and whether they hold, and makes tickets smaller.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{CreateMode, Error as ZkError, MultiReadResult};

use super::{READS, valid_for_in};
use crate::backend::zookeeper::errors::failed;
use crate::backend::zookeeper::layout::{self, Data, Parent};
use crate::backend::zookeeper::line::Line;
use crate::backend::zookeeper::session::Session;
use crate::backend::zookeeper::standing::{Mine, Standing, State};
use crate::backend::{AskedBack, Renewed, StoreError};
use crate::clock::{Clock, Instant};
use crate::request::{Id, Request};

/// Checks whether tickets exist, and whether they hold. Their deadlines depend on the proof that
/// the session lives (`proof`), which has probes of its own. A renewal only checks whether an
/// operator or another client has deleted a node, and whether a watch has missed an event.
///
/// - A ticket that holds: its node is read. Renewals come more often than every third of the ttl,
///   because the proof is always some time old. But the node is not read more often than every
///   third of the ttl.
/// - Our first waiter in a line that is followed: one request reads its node, and the nodes in
///   front of it that matter. [`Line::ahead_of`] and [`Line::checks_terms`] say which nodes these
///   are. If the copy of the line says that a ticket holds, the copy is trusted. If the copy says
///   that nothing has happened, it is not trusted, because the watch may be lost. A lost watch
///   delays a grant by about a third of the ttl.
/// - A waiter that is not in the copy of its line: the line is read, and followed anew.
/// - Our other waiters in a line that is followed: their state comes from the events of the line.
///   If only the ticket ahead is watched, their own nodes are read.
/// - A waiter in a line that nobody follows, or in a line that differs from its copy: the line is
///   read.
///
/// Tickets that must become smaller are made smaller first, and longer ttls are written last
/// ([`lengthen`](RenewCall::lengthen)). A drop of the future at any point does no harm.
pub(crate) async fn renew(
    session: Arc<Session>,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    session.usable()?;
    let shrunk = shrink(&session, &tickets).await;
    let mut call = RenewCall::begin(&session, &tickets, &shrunk);
    for (look, node) in call.looks.take().answered(&session).await? {
        call.learn(look, node);
    }
    call.lengthen().await;
    call.read_lines().await?;
    Ok(call.end())
}

/// One call of [`renew`].
struct RenewCall<'a> {
    session: &'a Arc<Session>,
    tickets: &'a [Arc<Request>],
    /// The answer for each ticket, as far as is known.
    answers: Vec<Renewed>,
    /// The nodes to read.
    looks: Looks,
    /// The tickets whose nodes show a shorter ttl than they are to have, with their indices. The
    /// data of each is to be written over this version.
    shorter: Vec<(usize, String, Data, i32)>,
    /// The tickets whose line must be read, with their indices.
    unclear: Vec<(usize, Standing)>,
    /// The nodes that a copy of a line contains and that do not exist, with the paths of the lines.
    gone: Vec<(String, String)>,
    /// The lines whose parent was written since they were read, and the id of that transaction.
    outdated: Vec<(String, i64)>,
    /// The lines whose copies miss a waiter of ours, and the number of that waiter.
    incomplete: Vec<(String, i32)>,
    /// When the nodes are read, at the earliest.
    now: Instant,
}

impl<'a> RenewCall<'a> {
    /// Answers from what is known of the tickets, and chooses the nodes to read.
    ///
    /// The validity is computed before the requests are sent. This is safe, because their answers
    /// describe a later time.
    fn begin(
        session: &'a Arc<Session>,
        tickets: &'a [Arc<Request>],
        shrunk: &[(Id, bool)],
    ) -> Self {
        let mut call = Self {
            session,
            tickets,
            answers: Vec::with_capacity(tickets.len()),
            looks: Looks::default(),
            shorter: Vec::new(),
            unclear: Vec::new(),
            gone: Vec::new(),
            outdated: Vec::new(),
            incomplete: Vec::new(),
            now: Clock::BOOT.now(),
        };
        let state = session.state();
        let mut first = HashMap::new();
        for (at, request) in tickets.iter().enumerate() {
            let mine = match state.tickets.get(request.id) {
                // The ticket is of an earlier session, or released, or deleted.
                None => Err(Renewed::Lost),
                Some(Mine::Standing(mine)) if mine.lost => Err(Renewed::Lost),
                // The enqueue of this ticket was never answered.
                Some(Mine::Asked(_)) => Err(Renewed::Failed),
                Some(Mine::Standing(_)) if shrunk.contains(&(request.id, false)) => {
                    Err(Renewed::Failed)
                }
                Some(Mine::Standing(mine)) => Ok(mine),
            };
            match mine {
                Err(answer) => call.answers.push(answer),
                Ok(mine) => {
                    let valid_for = valid_for_in(&state.proof, request, mine.ttl);
                    call.answers.push(how_it_stands(mine.granted, valid_for));
                    let is_smaller = shrunk.contains(&(request.id, true));
                    let first = || {
                        let first = first.entry(&mine.parent);
                        *first.or_insert_with(|| state.first_waiting(&mine.parent))
                    };
                    call.choose(&state, (at, mine), is_smaller, first);
                }
            }
        }
        drop(state);
        call
    }

    /// Chooses the nodes to read for one ticket. `first` returns the sequence number of our first
    /// waiter in the line.
    fn choose(
        &mut self,
        state: &State,
        (at, mine): (usize, &Standing),
        is_smaller: bool,
        first: impl FnOnce() -> Option<i32>,
    ) {
        let ttl = self.ttl(at);
        // A renewal of a single ticket always reads the node: the holder asks in this way before a
        // step that needs the lock. So does a renewal that extends the lease.
        let reads = self.tickets.len() == 1 || ttl > mine.ttl;
        let lately = |seen: Instant| self.now < seen.after(ttl / 3);
        let seen_lately = !reads && mine.seen.is_some_and(lately);
        if mine.granted {
            if !seen_lately {
                self.looks.at(at, mine, Relation::Ticket);
            }
            return;
        }
        // Its client may believe that it holds.
        if reads {
            self.looks.at(at, mine, Relation::Ticket);
        }
        let line = state.lines.get(&mine.parent);
        if line.is_some_and(|line| line.misses(mine.sequence)) {
            self.incomplete.push((mine.parent.clone(), mine.sequence));
            self.unclear.push((at, mine.clone()));
            return;
        }
        let ahead = line.and_then(|line| line.ahead_of(mine.sequence));
        // If a waiter has become smaller, it may hold now, so its line is read.
        let Some(ahead) = ahead.filter(|_| !is_smaller) else {
            self.unclear.push((at, mine.clone()));
            return;
        };
        if first() == Some(mine.sequence) {
            if !reads {
                self.looks.at(at, mine, Relation::Ticket);
            }
            for node in ahead {
                self.looks.at(at, mine, Relation::Ahead(node));
            }
            if line.is_some_and(Line::checks_terms) {
                self.looks.at(at, mine, Relation::Parent);
            }
        } else if !line.is_some_and(Line::is_current) && !seen_lately && !reads {
            self.looks.at(at, mine, Relation::Ticket);
        }
    }

    /// The ttl of a ticket. No renewal makes a lease valid for longer than a session lasts, however
    /// far the lease was extended.
    fn ttl(&self, at: usize) -> Duration {
        self.tickets[at].ttl.min(self.session.timeout)
    }

    /// Applies the answer to the read of one node. `None` if the read failed.
    fn learn(&mut self, look: Look, node: Option<NodeRead>) {
        let Look { at, mine, what } = look;
        match (what, node) {
            (_, None) => self.answers[at] = Renewed::Failed,
            (Relation::Ticket, Some(NodeRead::Gone)) => {
                // Another renewal may have put a smaller node in its place, or may be about to learn
                // that it has.
                let state = self.session.state();
                let standing = state.standing(self.tickets[at].id);
                let is_replaced =
                    standing.is_some_and(|now| now.path != mine.path || now.shrinks_to.is_some());
                self.answers[at] = match is_replaced {
                    true => Renewed::Failed,
                    false => Renewed::Lost,
                };
            }
            (
                Relation::Ticket,
                Some(NodeRead::There {
                    mut data, version, ..
                }),
            ) => {
                self.answers[at] = with_ask(self.answers[at], &data.owner);
                if self.ttl(at) > mine.ttl {
                    data.ttl = data.ttl.max(self.ttl(at));
                    self.shorter.push((at, mine.path, data, version));
                }
                if let Some(mine) = self.session.state().standing_mut(self.tickets[at].id) {
                    // The node of a ticket that is asked back is read at each renewal, so that each
                    // answer reports the ask-back.
                    mine.seen = (!is_asked_back(self.answers[at])).then_some(self.now);
                }
            }
            (Relation::Ahead(_), Some(NodeRead::There { .. })) => {}
            (Relation::Ahead(node), Some(NodeRead::Gone)) => {
                if self.session.believes_in(&mine.parent, &node) {
                    self.gone.push((mine.parent.clone(), node));
                    self.unclear.push((at, mine));
                } else {
                    // The watch has reported the delete since this renewal began, and the tickets
                    // that hold because of it have got their wake-ups. This ticket may be one of
                    // them. Or the line is being read anew, and grants its tickets after that.
                    self.holds_by_now(at);
                }
            }
            (Relation::Parent, Some(NodeRead::There { written, .. })) => {
                if self.session.is_outdated(&mine.parent, written) {
                    self.outdated.push((mine.parent.clone(), written));
                    self.unclear.push((at, mine));
                }
            }
            // The parent is deleted only when the line is empty, so the ticket is gone too.
            (Relation::Parent, Some(NodeRead::Gone)) => {}
        }
    }

    /// Corrects the answer for a ticket that was waiting when this renewal began, and holds now.
    fn holds_by_now(&mut self, at: usize) {
        let state = self.session.state();
        if let Renewed::Waiting {
            valid_for, grace, ..
        } = self.answers[at]
            && let Some(mine) = state.standing(self.tickets[at].id)
            && mine.granted
            && !mine.lost
        {
            self.answers[at] = match grace {
                Some(grace) => Renewed::AskedBack { valid_for, grace },
                None => Renewed::Granted { valid_for },
            };
        }
    }

    /// Writes the ttls of extended leases into the data of their nodes. Until this is done, their
    /// renewals fail and are repeated.
    ///
    /// A caller of `revoke` reads the ttl together with its ask-back. If the holder is silent, the
    /// caller waits for one ttl, and then deletes the node. So no holder may rely on a ttl that
    /// this caller cannot see. The length of the session is a limit too, but the caller does not
    /// know the sessions of others, and a session may be much longer than the ttl.
    ///
    /// The write fails if somebody has asked the ticket back since the node was read. So a holder
    /// that has not seen the ask-back has a ttl that the caller of `revoke` has seen. The node is
    /// read again behind the write, and only what this read finds counts. If an answer is lost, the
    /// node shows a ttl that is too long, or the next renewal writes it.
    async fn lengthen(&mut self) {
        let mut sent = Vec::new();
        for (at, path, data, version) in std::mem::take(&mut self.shorter) {
            let client = &self.session.client;
            let (when, data) = (Clock::BOOT.now(), data.to_bytes());
            let written = client.set_data(&path, &data, Some(version));
            sent.push((at, when, written, client.get_data(&path)));
        }
        for (at, when, written, read) in sent {
            match written.await {
                Ok(_) => self.session.committed(when),
                Err(error) => tracing::debug!(%error, "a longer ttl was not written"),
            }
            let (request, wanted) = (&self.tickets[at], self.ttl(at));
            let read = read.await.ok();
            let data = read.map(|(data, _)| Data::read(&data, 0, Duration::ZERO));
            self.answers[at] = match data.filter(|data| data.ttl >= wanted) {
                None => Renewed::Failed,
                Some(data) => {
                    let mut state = self.session.state();
                    let valid_for = valid_for_in(&state.proof, request, data.ttl);
                    let answer = how_it_stands(self.answers[at].holds(), valid_for);
                    let answer = with_ask(answer, &data.owner);
                    if let Some(mine) = state.standing_mut(request.id) {
                        mine.ttl = data.ttl;
                        mine.seen = mine.seen.filter(|_| !is_asked_back(answer));
                    }
                    answer
                }
            };
        }
    }

    /// Reads the lines of the tickets whose state is not known otherwise.
    async fn read_lines(&mut self) -> Result<(), StoreError> {
        let Self {
            session, tickets, ..
        } = *self;
        let mut lists = Vec::new(); // sent together
        for (_, mine) in &self.unclear {
            if lists.iter().all(|(parent, _)| *parent != &mine.parent) {
                lists.push((&mine.parent, session.list(&mine.parent)));
            }
        }
        for (parent, listed) in lists {
            let line = listed.await.map_err(failed)?;
            let of_line = self
                .unclear
                .iter()
                .filter(|(_, mine)| mine.parent == *parent);
            for (at, mine) in of_line {
                let same = |other: &layout::Ticket| {
                    other.id == tickets[*at].id && other.sequence == mine.sequence
                };
                self.answers[*at] = match line.iter().position(same) {
                    None => Renewed::Lost,
                    Some(place) => {
                        let holds = line.holds(place, mine.ticket);
                        let mut state = session.state();
                        if holds {
                            state.granted(tickets[*at].id);
                        }
                        // The ttl may have been written since this renewal began.
                        let mine = state.standing(tickets[*at].id).unwrap_or(mine);
                        how_it_stands(holds, valid_for_in(&state.proof, &tickets[*at], mine.ttl))
                    }
                };
            }
        }
        Ok(())
    }

    /// Reports the copies of lines that turned out to be wrong, and returns the answers.
    fn end(self) -> Vec<Renewed> {
        for (path, node) in self.gone {
            self.session.doubt(&path, &node);
        }
        for (path, sequence) in self.incomplete {
            self.session.doubt_without(&path, sequence);
        }
        for (path, written) in self.outdated {
            self.session.doubt_terms(&path, written);
        }
        self.answers
    }
}

/// The nodes that are read for one call of [`renew`].
#[derive(Default)]
struct Looks(Vec<Look>);

/// One node to read.
struct Look {
    /// The index of the ticket in the renewal.
    at: usize,
    mine: Standing,
    what: Relation,
}

/// How a node relates to a ticket of ours.
enum Relation {
    Ticket,
    /// The node of a ticket or a halt in front of it, with its name.
    Ahead(String),
    Parent,
}

/// A node that was read.
enum NodeRead {
    There {
        /// The data, if this is the node of a ticket.
        data: Data,
        version: i32,
        /// The id of the transaction that has written the node last.
        written: i64,
    },
    Gone,
}

impl Looks {
    fn at(&mut self, at: usize, mine: &Standing, what: Relation) {
        let mine = mine.clone();
        self.0.push(Look { at, mine, what });
    }

    fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Reads the nodes. Returns for each node whether it exists, or `None` if its read failed. All
    /// requests are sent together. Their size is limited as in an inspection: the nodes of a
    /// hundred tickets with all nodes in front of them are a megabyte.
    async fn answered(
        self,
        session: &Session,
    ) -> Result<Vec<(Look, Option<NodeRead>)>, StoreError> {
        let mut reading = Vec::new();
        for page in self.0.chunks(READS) {
            let mut reads = session.client.new_multi_reader();
            for Look { mine, what, .. } in page {
                let added = match what {
                    Relation::Ticket => reads.add_get_data(&mine.path),
                    Relation::Ahead(node) => reads.add_get_data(&format!("{}/{node}", mine.parent)),
                    Relation::Parent => reads.add_get_data(&mine.parent),
                };
                added.map_err(failed)?;
            }
            reading.push(reads.commit());
        }
        let mut nodes = Vec::with_capacity(self.0.len());
        for page in reading {
            let read = page.await.map_err(failed)?;
            let looks = self.0[nodes.len()..].iter();
            nodes.extend(looks.zip(read).map(|(look, read)| match read {
                MultiReadResult::Data { data, stat } => Some(NodeRead::There {
                    data: Data::read(&data, look.mine.ticket, look.mine.ttl),
                    version: stat.version,
                    written: stat.mzxid,
                }),
                MultiReadResult::Error {
                    err: ZkError::NoNode,
                } => Some(NodeRead::Gone),
                _ => None,
            }));
        }
        Ok(self.0.into_iter().zip(nodes).collect())
    }
}

/// Makes a ticket smaller if it has more permits than its renewal asks for. One transaction creates
/// another node with the same sequence number and deletes the old node. Returns the tickets that
/// had to become smaller. The flag of each ticket tells whether its outcome is known.
///
/// If the future is dropped half-way, or the answer is lost, the transaction may be carried out all
/// the same. This is harmless: both paths are noted before the transaction is sent, and a release
/// deletes both. A transaction that arrives after the release finds no old node, so it fails as a
/// whole.
async fn shrink(session: &Arc<Session>, tickets: &[Arc<Request>]) -> Vec<(Id, bool)> {
    let mut sent = Vec::new(); // does not allocate while it is empty
    for request in tickets {
        let (id, permits) = (request.id, request.permits.get());
        let mut state = session.state();
        let Some(mine) = state.standing(id) else {
            continue;
        };
        if permits >= mine.permits || mine.lost || mine.leaving {
            continue;
        }
        let data = Data {
            owner: request.owner.to_string(),
            number: mine.ticket,
            // Another renewal may be extending the lease, in the old node.
            ttl: mine.ttl.max(request.ttl.min(session.timeout)),
        };
        let (old, data) = (mine.path.clone(), data.to_bytes());
        let Some(new) = Parent::of(&request.name).smaller(&old, request) else {
            continue;
        };
        state.shrinks(id, &new);
        drop(state);
        let mut writes = session.client.new_multi_writer();
        let node = CreateMode::Ephemeral.with_acls(session.acls);
        // The create comes first. Clients that follow the line get the events in this order, and
        // must never see the line without one of the two nodes.
        let both = writes.add_create(&new, &data, &node);
        let both = both.and_then(|()| writes.add_delete(&old, None));
        let at = Clock::BOOT.now();
        let answer = both.map(|()| writes.commit());
        sent.push((id, permits, new, at, answer));
    }
    let mut tried = Vec::new();
    for (id, permits, new, at, answer) in sent {
        let outcome = match answer {
            Ok(answer) => answer.await.map(drop).map_err(ZkError::from),
            Err(error) => Err(error),
        };
        let done = match outcome {
            // An earlier attempt whose answer was lost may have made the ticket smaller already.
            Ok(()) | Err(ZkError::NodeExists) => {
                session.committed(at);
                session.state().shrunk(id, new, permits);
                true
            }
            Err(ZkError::NoNode) => {
                if let Some(mine) = session.state().standing_mut(id) {
                    mine.lost = true;
                }
                true
            }
            Err(error) => {
                tracing::debug!(%error, "a ticket could not be made smaller, or perhaps it was");
                false
            }
        };
        tried.push((id, done));
    }
    tried
}

fn is_asked_back(answer: Renewed) -> bool {
    matches!(
        answer,
        Renewed::AskedBack { .. } | Renewed::Waiting { grace: Some(_), .. }
    )
}

/// The same answer, with the ask-back that is stored behind the owner.
fn with_ask(answer: Renewed, owner: &str) -> Renewed {
    match answer {
        Renewed::Granted { valid_for } => Renewed::holding(valid_for, owner),
        Renewed::Waiting {
            valid_for,
            recheck_in,
            ..
        } => Renewed::Waiting {
            valid_for,
            recheck_in,
            grace: AskedBack::grace_behind(owner),
        },
        answer => answer,
    }
}

fn how_it_stands(granted: bool, valid_for: Duration) -> Renewed {
    match granted {
        true => Renewed::Granted { valid_for },
        false => Renewed::Waiting {
            valid_for,
            recheck_in: None,
            grace: None,
        },
    }
}
