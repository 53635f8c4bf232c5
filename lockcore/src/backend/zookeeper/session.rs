//! The session that tickets live in: how long it certainly lasts, what this process has in it, and
//! the task that looks after it. Following a line is in `events`, the verbs are in `tickets`.
//!
//! The session and everything here is driven by the keeper's runtime, because the core opens this
//! store's only connection there. A *connection*, as the core knows it, is a time in which the
//! session is connected to some server; when that is over the core asks for another one and gets
//! the same session, with the tickets in it, as long as it lives.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::MissedTickBehavior;
use zookeeper_client::{Acls, Client, Error as ZkError, MultiWriteError, SessionState};

use super::config::Settings;
use super::errors::failed;
use super::layout::Ticket;
use super::line::Line;
use crate::backend::{Events, Fault, StoreError};
use crate::clock::{Clock, Instant};
use crate::request::Id;

/// Probes in a session timeout. The client library pings when it has sent nothing for 3/32 of it (3/8 of
/// the time that a server may be silent); a little more often than that, the probes replace the pings,
/// and cost nothing beyond them.
const PROBES: u32 = 11;

/// Of a node, to a check.
const ANY_VERSION: i32 = -1;

/// Of the session timeout, how old the newest commit may become while there are tickets. The probes are
/// the clock for that, so that it is found to be older at the third after it, as old as the proof by
/// probes is at its best: a lease is as long as it would be without.
const CHECK: u32 = 4;

/// How long a released id is watched for: far longer than a request can sit in a socket's buffer
/// before the server reads it or the connection is reset.
const MARK: Duration = Duration::from_secs(60);

/// Names that are remembered as having a node. Forgetting one costs a request that fails.
const KNOWN_PARENTS: usize = 10_000;

/// A session at the ensemble.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) client: Client,
    /// What was asked for, and what the server gave.
    pub(super) asked: Duration,
    pub(super) timeout: Duration,
    pub(super) acls: Acls<'static>,
    /// The keeper's runtime.
    pub(super) runtime: Handle,
    state: Mutex<State>,
    up: watch::Sender<Up>,
    /// Connections of the core that use it.
    attached: AtomicUsize,
}

/// What this process has in the session.
#[derive(Debug)]
pub(super) struct State {
    /// `None` while disconnected.
    pub(super) events: Option<Arc<Events>>,
    pub(super) tickets: HashMap<Id, Mine>,
    /// Released, and their enqueue may still arrive: whatever bears such an id is deleted.
    pub(super) gone: HashMap<Id, Gone>,
    pub(super) lines: HashMap<String, Line>,
    /// While one is under way, those who wait for the next.
    pub(super) lists: HashMap<String, Asking>,
    /// Parents that exist, as far as we know.
    parents: HashSet<String>,
    pub(super) proof: Proof,
}

/// The tickets of a parent, oldest first; none where there is no parent.
pub(super) type Listed = Result<Arc<[Ticket]>, ZkError>;

/// Those who share a list.
pub(super) type Asking = Vec<oneshot::Sender<Listed>>;

/// A ticket of this process.
#[derive(Clone, Debug)]
pub(super) enum Mine {
    /// A create was sent, first at this time, and its reply has not been heard.
    Asked(Instant),
    Standing(Standing),
}

/// A ticket that is at the store.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    /// The path of its parent, and its own.
    pub(super) parent: String,
    pub(super) path: String,
    pub(super) permits: u32,
    /// The path that it has by now, or will have, if a request to make it smaller was carried out, or is.
    /// There is one at most: the core makes a ticket smaller once, and asks until that is acknowledged.
    pub(super) shrinks_to: Option<String>,
    pub(super) sequence: i32,
    pub(super) ticket: u64,
    /// It holds; that is never taken back.
    pub(super) granted: bool,
    /// When its node was last seen, or something said that it may be time to look.
    pub(super) seen: Option<Instant>,
    /// Its node is gone without our doing.
    pub(super) lost: bool,
    /// Its release was sent.
    pub(super) leaving: bool,
}

impl Standing {
    /// In line, as far as we know.
    pub(super) fn is_waiting(&self) -> bool {
        !self.granted && !self.lost && !self.leaving
    }
}

#[derive(Clone, Debug)]
pub(super) struct Gone {
    pub(super) parent: String,
    until: Instant,
}

/// Whether the session can be used.
#[derive(Clone, Debug)]
enum Up {
    Yes,
    No,
    /// For ever.
    Over(StoreError),
}

/// Until when the session certainly lives: as long as two things say so.
///
/// # What the leader has heard
///
/// The leader ends a session that it has not heard of for the session timeout. A server that is not
/// the leader answers reads and pings by itself and reports who was there with the leader's own
/// pings, every half tick. So an answered ping proves nothing: a server cut off from its leader goes
/// on answering for seconds after the session's nodes are gone.
///
/// A `sync` is answered through the leader, and refused there if the session has ended. That it
/// succeeded says that the session was alive at the leader *then*; when the leader last heard of the
/// session, it does not say. But what it passed on its way says it: requests, and reports of who was
/// there, go from server to leader in one stream. If the answer to an earlier probe was here at
/// least half a tick before this one was sent, a report that includes the earlier probe was before
/// this one in that stream. Hence that leader keeps the session until the *earlier* one's send + the
/// timeout. (On a new connection the same holds: to take the session over the new server had to ask
/// the leader, who noted it, and that was after the earlier probe.)
///
/// The session timeout is at least two ticks, so a quarter of it is at least half a tick.
///
/// # Whether it still led
///
/// A `sync` proves no quorum. A leader whose followers have left answers it until it notices, after
/// `syncLimit` (seen: for 11 s), and by then they may have elected another, which gives each session
/// its full timeout once and then ends it. Only a commit proves that the leader led: it needs the
/// acknowledgement of a majority, and a server that has promised a later leader acknowledges nothing
/// to an earlier one. So when a request of ours was committed, a majority followed that leader *after*
/// the request was sent. Each later leader has a majority too, and one server is in both, so each
/// later leader began after that send, and keeps the session until that send + the timeout at least.
/// An earlier leader did not end the session, or the request would have been refused; and it cannot
/// do so any more.
///
/// Every write is committed, also one that fails for what is or is not there. While tickets stand
/// and nothing else of ours is written, a `multi` that checks a node and changes nothing is.
///
/// # Together
///
/// Whoever ends the session is the leader that our probes have reached, or a later one. Hence it
/// lives until the earlier of both sends + the timeout. Both are times from before the send, on this
/// machine's clock, and both only ever rise; an answer that is late or comes twice proves what it
/// proved when it was sent.
#[derive(Debug)]
pub(super) struct Proof {
    timeout: Duration,
    /// The leader heard of the session at this time or later.
    heard: Instant,
    /// The newest of our requests that were committed was sent at this time.
    committed: Instant,
    /// Probes that were answered, and may not have been reported: sent, answered.
    answered: VecDeque<(Instant, Instant)>,
}

impl Proof {
    /// Creating a session is the leader's doing, and is committed: the first proof needs no second
    /// probe.
    fn new(timeout: Duration, sent: Instant) -> Self {
        Self {
            timeout,
            heard: sent,
            committed: sent,
            answered: VecDeque::new(),
        }
    }

    fn answered(&mut self, sent: Instant, now: Instant) {
        while let Some(&(earlier, answered)) = self.answered.front()
            && answered.after(self.timeout / 4) <= sent
        {
            self.heard = self.heard.max(earlier);
            self.answered.pop_front();
        }
        self.answered.push_back((sent, now));
    }

    /// A request was committed that was sent at this time.
    pub(super) fn committed(&mut self, sent: Instant) {
        self.committed = self.committed.max(sent);
    }

    /// Whether it is time to have something committed.
    fn wants_a_commit(&self, now: Instant) -> bool {
        self.committed.after(self.timeout / CHECK) <= now
    }

    /// For how long from now on it certainly lives.
    pub(super) fn lives_for(&self, now: Instant) -> Duration {
        now.until(self.heard.min(self.committed).after(self.timeout))
    }

    /// The same if the leader still leads, which nobody looks at while there are no tickets.
    pub(super) fn heard_for(&self, now: Instant) -> Duration {
        now.until(self.heard.after(self.timeout))
    }
}

/// Opens a session, and looks after it from the runtime that this is polled in.
pub(super) async fn open(
    settings: &Settings,
    default_ttl: Duration,
) -> Result<Attached, StoreError> {
    let asked = settings.asked(default_ttl);
    let sent = Clock::BOOT.now();
    let client = settings.connect(asked).await?;
    if let Some(chroot) = &settings.chroot {
        let root = client.check_stat("/").await;
        if let Ok(None) = root {
            return Err(StoreError::new(
                Fault::Config,
                format!(
                    "ZooKeeper: {chroot} does not exist; create it, with rights for this client"
                ),
            ));
        }
    }
    let timeout = client.session_timeout();
    let session = Arc::new(Session {
        asked,
        timeout,
        acls: settings.acls(),
        runtime: Handle::current(),
        state: Mutex::new(State {
            events: None,
            tickets: HashMap::new(),
            gone: HashMap::new(),
            lines: HashMap::new(),
            lists: HashMap::new(),
            parents: HashSet::new(),
            proof: Proof::new(timeout, sent),
        }),
        up: watch::Sender::new(Up::Yes),
        attached: AtomicUsize::new(1),
        client,
    });
    tokio::spawn(look_after(Arc::clone(&session)));
    Ok(Attached(session))
}

/// Follows the session's state and probes it. Ends with the session, or ends it when nobody uses it.
async fn look_after(session: Arc<Session>) {
    let mut states = session.client.state_watcher();
    // What happened before the watcher was there.
    match session.client.state() {
        SessionState::SyncConnected => {}
        state => session.changed(state),
    }
    let mut up = session.up.subscribe();
    let mut probes = tokio::time::interval(session.timeout / PROBES);
    probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
    probes.tick().await; // the first is due at once; connecting was one
    while !session.is_over() {
        tokio::select! {
            biased;
            state = states.changed() => session.changed(state),
            // Somebody has given it up.
            _ = up.changed() => {}
            _ = probes.tick() => {
                if session.give_up_if_uncertain() || session.sweep() {
                    break;
                }
                if session.is_up() {
                    tokio::spawn(probe(Arc::clone(&session)));
                    if session.wants_a_commit() {
                        tokio::spawn(check(Arc::clone(&session)));
                    }
                }
            }
        }
    }
    session.stop_following();
}

/// One `sync`. Unanswered, it changes nothing; the library's own timeout ends the connection.
async fn probe(session: Arc<Session>) {
    let sent = Clock::BOOT.now();
    match session.client.sync("/").await {
        Ok(()) => session.state().proof.answered(sent, Clock::BOOT.now()),
        Err(error) => tracing::debug!(%error, "probe of the session not answered"),
    }
}

/// One `multi` that only checks that the root is there, for the proof that the leader leads. One that
/// finds no root, or may not look, is committed like every other. Unanswered, it changes nothing; the next
/// probe is followed by another.
async fn check(session: Arc<Session>) {
    let sent = Clock::BOOT.now();
    let mut writes = session.client.new_multi_writer();
    let checked = match writes.add_check_version("/", ANY_VERSION) {
        Ok(()) => writes.commit().await,
        Err(error) => Err(error.into()),
    };
    match checked.map(drop) {
        Ok(()) => session.committed(sent),
        Err(error) if proves_a_commit(&error) => session.committed(sent),
        Err(error) => {
            tracing::debug!(%error, "nothing was committed for the session");
            if ZkError::from(error) == ZkError::SessionExpired {
                session.changed(SessionState::Expired);
            }
        }
    }
}

/// Whether a `multi` that failed was committed for this session: it was refused for what is there, or is
/// not. That the leader does not know the session any more, or knows it at another server, comes as the
/// failure of one operation too.
fn proves_a_commit(error: &MultiWriteError) -> bool {
    match error {
        MultiWriteError::OperationFailed { source, .. } => {
            !matches!(source, ZkError::SessionExpired | ZkError::SessionMoved)
        }
        MultiWriteError::RequestFailed { .. } => false,
    }
}

impl Session {
    /// A request was committed that was sent at this time.
    pub(super) fn committed(&self, sent: Instant) {
        self.state().proof.committed(sent);
    }

    /// Whether there are tickets, whose leases need it.
    fn wants_a_commit(&self) -> bool {
        let state = self.state();
        !state.tickets.is_empty() && state.proof.wants_a_commit(Clock::BOOT.now())
    }

    /// Uses the session, unless it is over.
    pub(super) fn attach(self: Arc<Self>) -> Option<Attached> {
        // Under the mutex, so that it is not ended at the same time for want of use.
        let state = self.state();
        if self.is_over() {
            return None;
        }
        self.attached.fetch_add(1, Ordering::SeqCst);
        drop(state);
        Some(Attached(self))
    }

    /// Makes it a connection: waits until it is connected and a server answers, and tells `events`
    /// from then on. Dropped half-way, nothing has changed.
    pub(super) async fn resume(self: &Arc<Self>, events: Events) -> Result<(), StoreError> {
        let mut up = self.up.subscribe();
        loop {
            match &*up.borrow_and_update() {
                Up::Yes => break,
                Up::Over(error) => return Err(error.clone()),
                Up::No => {}
            }
            // The sender lives in `self`.
            let _ = up.changed().await;
        }
        // A connection that is up as far as anybody knows may be dead.
        let synced = self.client.sync("/").await;
        synced.map_err(|error| StoreError::new(Fault::Retry, failed(error).to_string()))?;
        let mut state = self.state();
        if !self.is_up() {
            return Err(StoreError::new(
                Fault::Retry,
                "ZooKeeper: disconnected again",
            ));
        }
        let before = state.events.replace(Arc::new(events));
        // Events are lost over a reconnect, and so are the watches themselves: the library's list of
        // those to be set again leaves the persistent ones out.
        let paths: Vec<String> = state.lines.keys().cloned().collect();
        for path in paths {
            self.follow(&mut state, &path);
        }
        drop(state);
        drop(before);
        Ok(())
    }

    /// What tells its tickets from those of most other sessions.
    pub(super) fn tag(&self) -> u32 {
        self.client.session_id().0 as u32
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.up.borrow(), Up::Yes)
    }

    /// Gives the session up when it may have ended: every lease in it is over by then. The library
    /// would go on trying for another two fifths of the timeout, or believe a server that is cut off;
    /// a new session is of use at once. This one is ended, should a server still know it.
    pub(super) fn give_up_if_uncertain(&self) -> bool {
        let now = Clock::BOOT.now();
        let certain = {
            let state = self.state();
            let standing = |mine: &Mine| matches!(mine, Mine::Standing(_));
            // One that stands was committed. Without, our last commit may be as old as it likes.
            match state.tickets.values().any(standing) {
                true => state.proof.lives_for(now),
                false => state.proof.heard_for(now),
            }
        };
        if certain.is_zero() {
            let text = "ZooKeeper: the session may have ended, no server answered for it in time";
            self.disturbed(Up::Over(StoreError::new(Fault::Retry, text)));
        }
        certain.is_zero()
    }

    /// Ends it: whoever looks after it or follows a line in it lets go of it. Resolves when the server has
    /// acknowledged that it is closed, which it is when nobody has it any more.
    pub(super) fn end(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut states = self.client.state_watcher();
        let mut state = self.client.state();
        let text = "ZooKeeper: the session was ended by its client";
        self.disturbed(Up::Over(StoreError::new(Fault::Retry, text)));
        async move {
            while !state.is_terminated() {
                state = states.changed().await;
            }
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(*self.up.borrow(), Up::Over(_))
    }

    /// Refuses requests while disconnected: the library would keep them and send them later, when
    /// nobody waits for them any more.
    pub(super) fn usable(&self) -> Result<(), StoreError> {
        match &*self.up.borrow() {
            Up::Yes => Ok(()),
            Up::No => Err(StoreError::new(
                Fault::Retry,
                "ZooKeeper: not connected at the moment",
            )),
            Up::Over(error) => Err(error.clone()),
        }
    }

    /// The session was disconnected, or connected again (which says that it was disconnected), or
    /// is over.
    fn changed(&self, to: SessionState) {
        let over =
            |text: &str, fault| Up::Over(StoreError::new(fault, format!("ZooKeeper: {text}")));
        let up = match to {
            SessionState::SyncConnected => Up::Yes,
            SessionState::Disconnected | SessionState::ConnectedReadOnly => Up::No,
            SessionState::AuthFailed => over("the server refuses the credentials", Fault::Config),
            SessionState::Expired => over("the session has ended", Fault::Retry),
            SessionState::Closed => over("the session was closed", Fault::Retry),
        };
        self.disturbed(up);
    }

    fn disturbed(&self, up: Up) {
        let mut state = self.state();
        if self.is_over() {
            return;
        }
        for line in state.lines.values_mut() {
            line.stop();
        }
        // Everything is asked after then.
        for mine in state.tickets.values_mut() {
            if let Mine::Standing(standing) = mine {
                standing.seen = None;
            }
        }
        // The core opens another connection when this is dropped, which resumes this session or,
        // when it is over, opens a new one.
        let events = state.events.take();
        self.up.send_replace(up);
        drop(state);
        drop(events);
    }

    /// Lets go of what is not used any more. Returns whether that is the session itself.
    fn sweep(self: &Arc<Self>) -> bool {
        let now = Clock::BOOT.now();
        let mut state = self.state();
        state.gone.retain(|_, gone| gone.until > now);
        let State {
            lines,
            tickets,
            gone,
            ..
        } = &mut *state;
        let waiting = |mine: &Mine, path: &str| match mine {
            Mine::Asked(_) => false,
            Mine::Standing(standing) => !standing.granted && standing.parent == path,
        };
        lines.retain(|path, line| {
            let keep = !line.is_idle(now)
                || tickets.values().any(|mine| waiting(mine, path))
                || gone.values().any(|gone| gone.parent == *path);
            if !keep {
                line.stop();
            }
            keep
        });
        self.follow_again(&mut state);
        let unused = self.attached.load(Ordering::SeqCst) == 0
            && state.tickets.is_empty()
            && state.gone.is_empty();
        if unused {
            let text = "ZooKeeper: the session was not used any more";
            self.up
                .send_replace(Up::Over(StoreError::new(Fault::Retry, text)));
        }
        unused
    }

    fn stop_following(&self) {
        let mut state = self.state();
        for line in state.lines.values_mut() {
            line.stop();
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex; should that change, the maps are still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
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

    /// The store has told of a ticket.
    pub(super) fn stands(&mut self, id: Id, standing: Standing) {
        self.remember_parent(&standing.parent);
        self.tickets.insert(id, Mine::Standing(standing));
    }

    /// Its release is about to be sent: that its node goes is no news.
    pub(super) fn leaves(&mut self, id: Id) {
        if let Some(standing) = self.standing_mut(id) {
            standing.leaving = true;
        }
    }

    /// It holds.
    pub(super) fn granted(&mut self, id: Id) {
        if let Some(standing) = self.standing_mut(id) {
            standing.granted = true;
        }
    }

    /// It is about to be made smaller.
    pub(super) fn shrinks(&mut self, id: Id, path: &str) {
        if let Some(standing) = self.standing_mut(id) {
            standing.shrinks_to = Some(path.to_owned());
        }
    }

    /// It was made smaller.
    pub(super) fn shrunk(&mut self, id: Id, path: String, permits: u32) {
        if let Some(standing) = self.standing_mut(id) {
            standing.path = path;
            standing.permits = permits;
            standing.shrinks_to = None;
        }
    }

    /// It is not at the store any more, or never was.
    pub(super) fn left(&mut self, id: Id) {
        self.tickets.remove(&id);
    }

    /// Whatever bears the id from now on is deleted as soon as it is seen.
    pub(super) fn mark_gone(&mut self, id: Id, parent: &str) {
        let gone = Gone {
            parent: parent.to_owned(),
            until: Clock::BOOT.now().after(MARK),
        };
        self.gone.insert(id, gone);
    }
}

/// A use of the session. While there is none, and nothing is in it, it is ended.
#[derive(Debug)]
pub(super) struct Attached(Arc<Session>);

impl Deref for Attached {
    type Target = Arc<Session>;

    fn deref(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.attached.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn an_answered_probe_proves_the_one_before_it_and_not_itself() {
        let mut proof = Proof::new(T, at(100));
        assert_eq!(proof.heard_for(at(100)), T);

        proof.answered(at(103), at(103));
        assert_eq!(proof.heard_for(at(103)), Duration::from_secs(7));
        proof.answered(at(106), at(106));
        assert_eq!(proof.heard_for(at(106)), Duration::from_secs(7));
    }

    /// The report goes out with the leader's next ping.
    #[test]
    fn a_probe_right_after_another_proves_nothing_of_it() {
        let mut proof = Proof::new(T, at(100));
        proof.answered(at(103), at(103));
        proof.answered(at(104), at(104));
        assert_eq!(proof.heard_for(at(104)), Duration::from_secs(6));

        proof.answered(at(107), at(107));
        assert_eq!(proof.heard_for(at(107)), Duration::from_secs(7));
    }

    /// When the server read it, nobody knows: it may have been just before the answer.
    #[test]
    fn a_probe_that_was_answered_late_was_perhaps_read_late() {
        let mut proof = Proof::new(T, at(100));
        proof.answered(at(101), at(105));
        proof.answered(at(106), at(106));
        assert_eq!(proof.heard_for(at(106)), Duration::from_secs(4));
    }

    /// A leader without followers goes on answering probes.
    #[test]
    fn probes_alone_prove_nothing_beyond_the_last_commit() {
        let mut proof = Proof::new(T, at(100));
        for second in [103, 106, 109] {
            proof.answered(at(second), at(second));
        }
        assert_eq!(proof.lives_for(at(109)), Duration::from_secs(1));
        assert_eq!(proof.heard_for(at(109)), Duration::from_secs(7));

        assert!(proof.wants_a_commit(at(109)));
        proof.committed(at(109));
        proof.committed(at(108)); // whose answer was late
        assert!(!proof.wants_a_commit(at(109)));
        assert_eq!(proof.lives_for(at(109)), Duration::from_secs(7));
    }

    #[test]
    fn a_check_that_is_refused_because_of_its_session_proves_no_commit() {
        let failed = |source| MultiWriteError::OperationFailed { index: 0, source };
        for error in [ZkError::NoNode, ZkError::NoAuth, ZkError::BadVersion] {
            assert!(proves_a_commit(&failed(error)));
        }
        for error in [ZkError::SessionExpired, ZkError::SessionMoved] {
            assert!(!proves_a_commit(&failed(error.clone())));
            assert!(!proves_a_commit(&error.into()));
        }
        assert!(!proves_a_commit(&ZkError::ConnectionLoss.into()));
    }

    #[test]
    fn a_session_that_was_not_heard_of_for_its_timeout_is_over() {
        let proof = Proof::new(T, at(100));
        assert_eq!(proof.lives_for(at(111)), Duration::ZERO);
    }
}
