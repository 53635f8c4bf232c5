//! Takes a ticket: finds or creates its node, and finds out whether the ticket holds.

use std::sync::Arc;

use zookeeper_client::{CreateMode, CreateSequence, Error as ZkError, Stat};

use super::{alone, stands, valid_for};
use crate::backend::zookeeper::errors::{failed, failed_after_create};
use crate::backend::zookeeper::layout::{self, Parent, Ticket};
use crate::backend::zookeeper::row::{Row, Terms};
use crate::backend::zookeeper::session::Session;
use crate::backend::zookeeper::standing::{Listed, Mine, Standing};
use crate::backend::{Enqueued, Fault, StoreError};
use crate::clock::Clock;
use crate::queue::MOST_TICKETS;
use crate::request::{Id, Request};

/// An enqueue is sent only if at least this part of the session timeout (an eighth) is certain.
/// After the process was stopped for a while, no time is certain until two more probes are
/// answered. A ticket that is taken before that would be useless.
const LEAST_CERTAIN: u32 = 8;

pub(crate) async fn enqueue(
    session: Arc<Session>,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    session.usable()?;
    can_be_kept(&session, &request)?;
    let parent = Parent::of(&request.name);
    let (standing, place) = match begin(&session, &request, &parent) {
        Begin::Gone => return Ok(Enqueued::Gone),
        Begin::Stands(standing) if standing.leaving => {
            // An earlier delete of the ticket may be in flight. If this enqueue granted the ticket,
            // that delete would end the lock of its holder.
            withdraw(&session, &request, &standing).await?;
            return Ok(Enqueued::Gone);
        }
        Begin::Stands(standing) => found(&session, &parent, standing).await?,
        // If an earlier enqueue of this id was interrupted, this looks for its node before it
        // creates another.
        Begin::AskedBefore => match find(&session, &request, &parent).await? {
            Some(standing) => found(&session, &parent, standing).await?,
            None => create(&session, &request, &parent, Flush::WITH_PARENT).await?,
        },
        Begin::New(Some(flush)) => create(&session, &request, &parent, flush).await?,
        Begin::New(None) => match alone::create(&session, &request, &parent).await? {
            Some(standing) => (standing, Position::First),
            None => create(&session, &request, &parent, Flush::WITH_PARENT).await?,
        },
    };
    answer(&session, &request, &parent, standing, place).await
}

/// How an enqueue begins.
enum Begin {
    Gone,
    Stands(Standing),
    AskedBefore,
    /// `None`: the ticket is created together with its parent, in one transaction.
    New(Option<Flush>),
}

/// Requests that are sent together with the create of a ticket.
#[derive(Clone, Copy)]
struct Flush {
    /// The folder of the namespace, and the parent, are created before the ticket.
    folder: bool,
    parent: bool,
    /// The children of the parent are listed after the create.
    list: bool,
}

impl Flush {
    const WITH_PARENT: Self = Self {
        folder: false,
        parent: true,
        list: true,
    };
}

/// The position of a ticket in its line, as far as it is known.
enum Position {
    /// There is no older ticket.
    First,
    Listed(Arc<Row>),
    /// The events of the line show the position. The id is that of the ticket right ahead, if it is
    /// known already.
    Followed(Option<Id>),
}

fn begin(session: &Arc<Session>, request: &Request, parent: &Parent) -> Begin {
    let mut state = session.state();
    if state.is_gone(request.id, &parent.path) {
        return Begin::Gone;
    }
    match state.tickets.get(request.id) {
        Some(Mine::Standing(standing)) => return Begin::Stands(standing.clone()),
        Some(Mine::Asked(_)) => {
            // From now on this client sees a node of the first attempt, however late the node
            // appears.
            session.follow(&mut state, &parent.path);
            return Begin::AskedBefore;
        }
        None => {}
    }
    state.tickets.asked(request.id, Clock::BOOT.now());
    // If the line is followed and has the same capacity, its events tell whether this ticket holds,
    // so no list is necessary. A request that does not wait needs its answer now, so it lists the
    // line.
    let told_by_events = request.wait
        && state.lines.get(&parent.path).is_some_and(|line| {
            line.is_current()
                && line.capacity() == Some(request.capacity.get())
                && line.terms.halts.is_empty()
                && line.len() < MOST_TICKETS
        });
    if told_by_events {
        session.follow(&mut state, &parent.path); // notes that the line is in use
    }
    let knows_parent = state.knows_parent(&parent.path);
    Begin::New((told_by_events || knows_parent).then_some(Flush {
        folder: false,
        parent: !knows_parent,
        list: !told_by_events,
    }))
}

/// Refuses a ttl that the session cannot guarantee. The core sends it only for a lease that is not
/// renewed.
fn can_be_kept(session: &Session, request: &Request) -> Result<(), StoreError> {
    let timeout = session.timeout;
    if request.ttl > timeout {
        let (ttl, asked) = (request.ttl, session.asked);
        return Err(StoreError::new(
            Fault::Config,
            format!(
                "ZooKeeper: a ttl of {ttl:?} is longer than the session of {timeout:?} that the server gave \
                 (asked for {asked:?}), and the lease is not to be renewed: set LOCK_TTL to the longest ttl, or session_timeout in the URL; the server's \
                 limit is its maxSessionTimeout"
            ),
        ));
    }
    // It is enough that the leader has heard of the session lately. This need not prove that this
    // leader leads, because the create itself will prove it.
    if session.state().proof.heard_for(Clock::BOOT.now()) < timeout / LEAST_CERTAIN {
        let text = "ZooKeeper: it is not certain that the session still lives";
        return Err(StoreError::new(Fault::Retry, text));
    }
    Ok(())
}

/// Looks for a node that an earlier attempt may have left. After the `sync`, the list shows
/// everything that the leader had done, even after a change of servers.
///
/// If this fails, or the future is dropped, the id stays `Mine::Asked`.
async fn find(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
) -> Result<Option<Standing>, StoreError> {
    let synced = session.client.sync(&parent.path);
    let listing = session.list(&parent.path);
    synced.await.map_err(failed)?;
    let line = listing.await.map_err(failed)?;
    let mut found = None;
    for ticket in line.iter().filter(|ticket| ticket.id == request.id) {
        let path = parent.child(&ticket.node);
        let stat = session.client.check_stat(&path).await.map_err(failed)?;
        let Some(stat) = stat else { continue };
        let ours = stat.ephemeral_owner == session.client.session_id().0;
        if ours && found.is_none() {
            found = Some(stands(
                session,
                request,
                parent,
                ticket.sequence,
                path,
                stat.czxid,
                false,
            )?);
        } else {
            // The node is of an earlier session of this client, which nobody renews. Or it is a
            // second node of this id.
            session.delete_unasked(path);
        }
    }
    Ok(found)
}

/// Lists the line of a ticket that exists. If the future is dropped, or the list is not answered,
/// the next attempt finds the ticket again.
async fn found(
    session: &Arc<Session>,
    parent: &Parent,
    standing: Standing,
) -> Result<(Standing, Position), StoreError> {
    let line = session.list(&parent.path).await;
    let line = line.map_err(failed_after_create)?;
    Ok((standing, Position::Listed(line)))
}

/// Creates the ticket, and its parent if necessary. Also lists the line if `flush` asks for it.
async fn create(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    flush: Flush,
) -> Result<(Standing, Position), StoreError> {
    let prefix = parent.prefix(request, session.tag());
    // A list shows the ticket ahead. In its place, a look at one older ticket of ours is enough.
    let older = match request.name_ahead && !flush.list {
        true => session.state().tickets.youngest_in(&parent.path),
        false => None,
    };
    let look = older.as_ref().map(|(path, _)| path.as_str());
    let mut replies = send(session, request, parent, &prefix, flush, look).await;
    if let Err(ZkError::NoNode) = replies.created
        && !flush.folder
    {
        // The server has removed the parent after its last ticket, or there never was a parent.
        session.state().forget_parent(&parent.path);
        let everything = Flush {
            folder: true,
            ..Flush::WITH_PARENT
        };
        replies = send(session, request, parent, &prefix, everything, None).await;
    }
    let (stat, sequence) = match replies.created {
        Ok(created) => created,
        Err(error) => {
            // The reason why the parent could not be created is the better error.
            let error = match (error, replies.refused) {
                (ZkError::NoNode, Some(refused)) => refused,
                (error, _) => error,
            };
            return Err(session.not_created(request.id, error));
        }
    };
    let path = format!("{prefix}{sequence}");
    let sequence = layout::wrapped(sequence.into_i64());
    let standing = stands(session, request, parent, sequence, path, stat.czxid, false)?;
    let place = match replies.listed {
        // If the list has failed, the next attempt finds the ticket.
        Some(line) => Position::Listed(line.map_err(failed_after_create)?),
        None => {
            let older = older.filter(|_| replies.older_stands && request.wants_all());
            let state = session.state();
            let id = request.id;
            Position::Followed(
                older.and_then(|(_, since)| state.tickets.right_before(id, &standing, since)),
            )
        }
    };
    Ok((standing, place))
}

struct Replies {
    /// The error that kept a parent from being created.
    refused: Option<ZkError>,
    created: Result<(Stat, CreateSequence), ZkError>,
    /// Whether the older ticket exists.
    older_stands: bool,
    listed: Option<Listed>,
}

/// Sends all requests before it awaits a reply. `older` is the path of an older ticket to look at
/// after the create. If the future is dropped, the requests were sent all the same, and the id stays
/// [`Mine::Asked`].
async fn send(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    prefix: &str,
    flush: Flush,
    older: Option<&str>,
) -> Replies {
    let client = &session.client;
    let container = CreateMode::Container.with_acls(session.acls);
    let ticket = CreateMode::EphemeralSequential.with_acls(session.acls);
    let folder = flush
        .folder
        .then(|| client.create(&parent.folder, b"", &container));
    let path = flush
        .parent
        .then(|| client.create(&parent.path, b"", &container));
    let created = client.create(prefix, request.owner.as_bytes(), &ticket);
    let older = older.map(|path| client.check_stat(path));
    let listed = flush.list.then(|| session.list(&parent.path));

    let mut refused = None;
    for made in [folder, path].into_iter().flatten() {
        match made.await {
            Ok(_) | Err(ZkError::NodeExists | ZkError::NoNode) => {}
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let created = created.await;
    let older_stands = match older {
        Some(older) => matches!(older.await, Ok(Some(_))),
        None => false,
    };
    let listed = match listed {
        Some(listed) => Some(listed.await),
        None => None,
    };
    Replies {
        refused,
        created,
        older_stands,
        listed,
    }
}

/// The answer of an enqueue: whether the ticket holds, by its position in line.
async fn answer(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    standing: Standing,
    place: Position,
) -> Result<Enqueued, StoreError> {
    let ticket = standing.ticket;
    let valid_for = valid_for(session, request, standing.ttl);
    let granted = Enqueued::Granted { ticket, valid_for };
    let mut ahead = match place {
        Position::First => {
            session.state().granted(request.id);
            return Ok(granted);
        }
        Position::Followed(ahead) => ahead,
        Position::Listed(line) => {
            match by_list(session, request, parent, &standing, &line).await? {
                InList::Holds => return Ok(granted),
                InList::NotTaken(answer) => return Ok(answer),
                InList::InLine(ahead) => ahead,
            }
        }
    };
    // A capacity may have been stored since this request was sent. If the client read the new line
    // before it noted this ticket, `disown` has not deleted the ticket, so the copy of the line is
    // checked here. If the client reads the new line later, `disown` deletes the ticket.
    let stored = {
        let mut state = session.state();
        session.wait_in(&mut state, &parent.path, standing.sequence);
        let line = state.lines.get(&parent.path);
        let terms = line
            .filter(|line| line.is_current())
            .map(|line| &line.terms);
        let terms = terms.filter(|terms| terms.misfit(request.capacity.get()));
        terms.and_then(Terms::capacity)
    };
    if let Some(in_use) = stored {
        withdraw(session, request, &standing).await?;
        return Ok(Enqueued::CapacityMismatch { in_use });
    }
    let state = session.state();
    // Events that came before this ticket was noted do not come again, so the copy of the line is
    // checked now.
    session.tell(state, &parent.path, false);
    let state = session.state();
    let line = state.lines.get(&parent.path);
    if let Some(line) = line.filter(|line| line.is_current()) {
        let of_copy = right_ahead(request, standing.sequence, &line.tickets, &line.terms);
        let is_ours = |(id, sequence)| state.has(id, sequence).then_some(id);
        ahead = ahead.or(of_copy.and_then(is_ours));
    }
    // The ticket ahead may be let go of in memory only if it is of this session.
    let ahead = ahead.filter(|ahead| state.standing(*ahead).is_some());
    let holds = |mine: &Standing| mine.granted;
    Ok(match state.standing(request.id).is_some_and(holds) {
        true => granted,
        false => Enqueued::Waiting {
            ticket,
            valid_for,
            // When a holder's session ends, the watch reports it.
            recheck_in: None,
            ahead,
        },
    })
}

/// A ticket as a list of its line shows it.
enum InList {
    Holds,
    /// It waits. The id is that of the ticket right ahead, if it is of this session.
    InLine(Option<Id>),
    /// It is gone, or was taken back.
    NotTaken(Enqueued),
}

/// Looks for a ticket in a list of its line, and takes it back if it is not to wait there.
async fn by_list(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
    standing: &Standing,
    line: &Row,
) -> Result<InList, StoreError> {
    for other in line.iter().filter(|other| other.id == request.id) {
        if other.sequence != standing.sequence {
            session.delete_unasked(parent.child(&other.node)); // as in `find`
        }
    }
    let is_it = |other: &Ticket| other.id == request.id && other.sequence == standing.sequence;
    let Some(at) = line.iter().position(is_it) else {
        // Somebody deleted the node, or the server that answered is behind. The core takes a new
        // ticket.
        session.state().left(request.id);
        session.delete_unasked(standing.path.clone());
        return Ok(InList::NotTaken(Enqueued::Gone));
    };
    // A grant is never taken back, even if the capacity was made smaller since.
    let is_granted = |mine: &Standing| mine.granted;
    if line.holds(at, standing.ticket)
        || session.state().standing(request.id).is_some_and(is_granted)
    {
        session.state().granted(request.id);
        return Ok(InList::Holds);
    }
    if let Some(in_use) = line.refuses(request.capacity.get()) {
        withdraw(session, request, standing).await?;
        return Ok(InList::NotTaken(Enqueued::CapacityMismatch { in_use }));
    }
    let fit = line.terms.fit(line.iter());
    // Without the change that is under way, this ticket might hold, or its request might be refused.
    // So the core sends the enqueue again.
    if line.terms.bar(request.capacity.get()) || !request.wait && at < fit {
        withdraw(session, request, standing).await?;
        let text = "ZooKeeper: the capacity is being changed at this moment";
        return Err(StoreError::new(Fault::Retry, text));
    }
    if !request.wait || at >= MOST_TICKETS {
        let retry_in = line[..fit].iter().map(|holder| holder.ttl).min();
        withdraw(session, request, standing).await?;
        return Ok(InList::NotTaken(Enqueued::Busy { retry_in }));
    }
    let of_list = right_ahead(request, standing.sequence, &line.tickets, &line.terms);
    let is_ours = |(id, sequence)| session.state().has(id, sequence).then_some(id);
    Ok(InList::InLine(of_list.and_then(is_ours)))
}

/// The ticket right ahead of the ticket of this request, if it may be
/// [named](Enqueued::Waiting::ahead). `line` was listed behind the create of the ticket, or is a
/// current copy. If it has the ticket, then whatever stands in front of the ticket there was in line
/// when the ticket was created. The server deletes the parent of a line, and begins its numbers
/// anew, only when the line is empty. So both tickets are of one parent.
///
/// If the copy does not have the ticket yet, nothing is known, and no ticket is named.
///
/// A create of an earlier session may have arrived late, so an id may have two nodes in the line.
/// Therefore the number of the node is returned too. Only the node that [stands](State::has) may be
/// named: others may be between the two.
fn right_ahead<'a>(
    request: &Request,
    sequence: i32,
    line: impl IntoIterator<Item = &'a Ticket, IntoIter: DoubleEndedIterator>,
    terms: &Terms,
) -> Option<(Id, i32)> {
    if !request.name_ahead || !terms.is_plain() {
        return None;
    }
    let is_it = |ticket: &&Ticket| ticket.id == request.id && ticket.sequence == sequence;
    let mut from_the_end = line.into_iter().rev();
    let mine = from_the_end.find(is_it)?;
    let ahead = from_the_end.next()?;
    (mine.wants_all() && ahead.wants_all()).then_some((ahead.id, ahead.sequence))
}

/// Takes back a ticket that is useless. If the delete is not answered, the ticket may exist. In
/// this case the core gets an error with an unknown outcome, and releases the ticket.
async fn withdraw(
    session: &Arc<Session>,
    request: &Request,
    standing: &Standing,
) -> Result<(), StoreError> {
    session.state().leaves(request.id);
    let sent = Clock::BOOT.now();
    match session.client.delete(&standing.path, None).await {
        Ok(()) | Err(ZkError::NoNode) => {
            session.committed(sent);
            session.state().left(request.id);
            Ok(())
        }
        Err(error) => Err(StoreError::new(Fault::Unknown, failed(error).to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use super::*;
    use crate::name::{Name, Namespace};
    use crate::request::FULL;

    fn request() -> Request {
        let name = Name::new(Namespace::new("test").unwrap(), "n").unwrap();
        let ttl = Duration::from_secs(10);
        Request {
            name_ahead: true,
            ..Request::new(name, Id::draw().unwrap(), FULL, FULL, ttl)
        }
    }

    /// The node of a ticket in the line.
    fn node(request: &Request, permits: NonZeroU32, sequence: i32) -> Ticket {
        let (id, ttl) = (request.id, request.ttl.as_millis());
        let node = format!("{id}-{permits}-{FULL}-{ttl}-00000001-{sequence:010}");
        Ticket::parse(&node).expect("it is a ticket")
    }

    #[test]
    fn the_ticket_right_ahead_is_named_if_the_line_has_both() {
        let (ahead, mine, other) = (request(), request(), request());
        let tickets = [node(&ahead, FULL, 7), node(&mine, FULL, 8)];
        let plain = Terms::default();
        let named = |line: &[Ticket]| right_ahead(&mine, 8, line, &plain);
        assert_eq!(named(&tickets), Some((ahead.id, 7)));

        // Younger tickets, and a number that was of a node that is no ticket.
        let [first, mut second] = tickets.clone();
        assert_eq!(
            named(&[first.clone(), second.clone(), node(&other, FULL, 9)]),
            Some((ahead.id, 7))
        );
        let gap = [node(&ahead, FULL, 5), second.clone()];
        assert_eq!(named(&gap), Some((ahead.id, 5)));

        // Somebody stands in between.
        let between = [node(&ahead, FULL, 6), node(&other, FULL, 7), second.clone()];
        assert_eq!(named(&between), Some((other.id, 7)));

        // A late create of an earlier session has made a second node of the ticket ahead. It is the
        // one right ahead, and not the one that stands.
        let twice = [
            node(&ahead, FULL, 5),
            node(&other, FULL, 6),
            tickets[0].clone(),
            tickets[1].clone(),
        ];
        assert_eq!(named(&twice), Some((ahead.id, 7)));

        // The copy does not have the ticket yet, or the ticket ahead is gone.
        assert_eq!(named(&[first]), None);
        assert_eq!(named(&[second.clone()]), None);

        // The parent was made anew, and the line has another ticket with the number.
        second.id = other.id;
        assert_eq!(named(&[node(&ahead, FULL, 7), second]), None);
    }

    #[test]
    fn no_ticket_is_named_if_either_does_not_want_all() {
        let (ahead, mine) = (request(), request());
        let (one, plain) = (NonZeroU32::MIN, Terms::default());
        let named =
            |ahead: Ticket, mine_is: Ticket| right_ahead(&mine, 8, &[ahead, mine_is], &plain);

        assert_eq!(named(node(&ahead, one, 7), node(&mine, FULL, 8)), None);
        assert_eq!(named(node(&ahead, FULL, 7), node(&mine, one, 8)), None);
    }

    #[test]
    fn no_ticket_is_named_if_nobody_asks_or_the_capacity_is_being_changed() {
        let (ahead, mut mine) = (request(), request());
        let line = [node(&ahead, FULL, 7), node(&mine, FULL, 8)];
        let changing = Terms {
            halts: vec![node(&ahead, FULL, 6)],
            ..Terms::default()
        };
        assert_eq!(right_ahead(&mine, 8, &line, &changing), None);

        mine.name_ahead = false;
        assert_eq!(right_ahead(&mine, 8, &line, &Terms::default()), None);
    }
}
