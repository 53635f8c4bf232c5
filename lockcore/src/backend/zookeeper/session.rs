//! The session that tickets live in: how long it certainly lasts, what this process has in it, and
//! the task that looks after it. `events` follows lines, and `tickets` has the operations.
//!
//! The keeper's runtime drives the session and everything in this module, because the core opens
//! this store's only connection there. For the core, a *connection* is a time in which the session
//! is connected to some server. When a connection breaks, the core opens another one, and gets the
//! same session, with its tickets, as long as the session lives.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use zookeeper_client::{Acls, Client, Error as ZkError, MultiWriteError, SessionState};

use super::config::Settings;
use super::errors::failed;
use super::line::Line;
use super::proof::Proof;
use super::standing::{Ours, State};
use crate::backend::{EventSink, Fault, StoreError};
use crate::clock::{Clock, Instant};
use crate::request::Id;

/// How many probes are sent per session timeout. The client library pings when it has sent nothing
/// for 3/32 of the timeout (3/8 of the time that a server may be silent). The probes are a little
/// more frequent than that, so they replace the pings and cost nothing extra.
const PROBES: u32 = 11;

/// The version argument of a check that accepts any version.
const ANY_VERSION: i32 = -1;

/// A session at the ensemble.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) client: Client,
    /// The session timeout that the client asked for, and the timeout that the server gave.
    pub(super) asked: Duration,
    pub(super) timeout: Duration,
    pub(super) acls: Acls<'static>,
    /// The keeper's runtime.
    pub(super) runtime: Handle,
    state: Mutex<State>,
    up: watch::Sender<Up>,
    /// How many connections of the core use the session.
    attached: AtomicUsize,
}

/// Whether the session can be used.
#[derive(Clone, Debug)]
enum Up {
    Yes,
    No,
    /// The session has ended.
    Over(StoreError),
}

/// Opens a session. The runtime that polls this future also runs the task that looks after the
/// session.
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
            tickets: Ours::default(),
            gone: HashMap::new(),
            lines: HashMap::new(),
            watched: HashMap::new(),
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

/// Follows the session's state, and probes the session. Ends the session when nobody uses it.
/// Returns when the session is over.
async fn look_after(session: Arc<Session>) {
    let mut states = session.client.state_watcher();
    // The state may have changed before the watcher existed.
    match session.client.state() {
        SessionState::SyncConnected => {}
        state => session.changed(state),
    }
    let mut up = session.up.subscribe();
    let mut probes = tokio::time::interval(session.timeout / PROBES);
    probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
    probes.tick().await; // the first tick is due at once, and connecting was the first probe
    while !session.is_over() {
        tokio::select! {
            biased;
            state = states.changed() => session.changed(state),
            // The session was given up.
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

/// Sends one `sync`. If the `sync` is not answered, nothing changes here, and the library's own
/// timeout ends the connection.
async fn probe(session: Arc<Session>) {
    let sent = Clock::BOOT.now();
    match session.client.sync("/").await {
        Ok(()) => session.state().proof.answered(sent, Clock::BOOT.now()),
        Err(error) => tracing::debug!(%error, "probe of the session not answered"),
    }
}

/// Sends one `multi` that only checks that the root exists. Its commit proves that the leader
/// leads. If the root does not exist, or the user has no right to read it, the `multi` is committed
/// all the same. If the `multi` is not answered, nothing changes here, and another check follows
/// the next probe.
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

/// Whether a failed `multi` was committed for this session. It was committed if the leader refused
/// an operation because of a node: the node exists, or does not exist, or the user has no right to
/// it. Two other failures of an operation prove no commit. In these cases the leader does not know
/// the session any more, or knows it at another server.
fn proves_a_commit(error: &MultiWriteError) -> bool {
    match error {
        MultiWriteError::OperationFailed { source, .. } => {
            !matches!(source, ZkError::SessionExpired | ZkError::SessionMoved)
        }
        MultiWriteError::RequestFailed { .. } => false,
    }
}

impl Session {
    /// A request that was sent at this time was committed.
    pub(super) fn committed(&self, sent: Instant) {
        self.state().proof.committed(sent);
    }

    /// The error of a create. If it is certain that nothing was created, this also forgets the id.
    pub(super) fn not_created(&self, id: Id, error: ZkError) -> StoreError {
        let error = failed(error);
        if error.fault() != Fault::Unknown {
            self.state().left(id);
        }
        error
    }

    /// Whether there are tickets whose leases need a commit now.
    fn wants_a_commit(&self) -> bool {
        let state = self.state();
        !state.tickets.is_empty() && state.proof.wants_a_commit(Clock::BOOT.now())
    }

    /// Adds one use of the session. Returns `None` if the session is over.
    pub(super) fn attach(self: Arc<Self>) -> Option<Attached> {
        // The mutex is held, so that `sweep` does not end the session as unused at the same time.
        let state = self.state();
        if self.is_over() {
            return None;
        }
        self.attached.fetch_add(1, Ordering::SeqCst);
        drop(state);
        Some(Attached(self))
    }

    /// Makes the session a connection of the core: waits until it is connected and a server
    /// answers, and reports to `events` from then on. If the future is dropped half-way, nothing
    /// has changed.
    pub(super) async fn resume(self: &Arc<Self>, events: EventSink) -> Result<(), StoreError> {
        let mut up = self.up.subscribe();
        loop {
            match &*up.borrow_and_update() {
                Up::Yes => break,
                Up::Over(error) => return Err(error.clone()),
                Up::No => {}
            }
            // The sender lives in `self`, so this cannot fail.
            let _ = up.changed().await;
        }
        // The connection may be dead although nobody has noticed this yet.
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
        // A reconnect loses events. It loses the watches too, because the library does not set
        // persistent watches again.
        let paths: Vec<String> = state.lines.keys().cloned().collect();
        for path in paths {
            self.follow(&mut state, &path);
        }
        drop(state);
        drop(before);
        Ok(())
    }

    /// The number of this session in the names of its tickets. It is different from the numbers of
    /// most other sessions.
    pub(super) fn tag(&self) -> u32 {
        self.client.session_id().0 as u32
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.up.borrow(), Up::Yes)
    }

    /// Gives the session up if it may have ended. At that time every lease in it is over. The
    /// library would try to continue the session for another two fifths of the timeout, or would
    /// believe a server that is cut off. A new session can be used at once. The old session is
    /// closed, because a server may know it.
    pub(super) fn give_up_if_uncertain(&self) -> bool {
        let now = Clock::BOOT.now();
        let certain = {
            let state = self.state();
            // A standing ticket proves a commit. Without tickets, our last commit may be very old,
            // and that does not matter.
            match state.tickets.any_stands() {
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

    /// Ends the session. The task that looks after it and the tasks that follow its lines end, and
    /// drop their references. When the last reference is dropped, the library closes the session.
    /// The future resolves when the server has acknowledged the close.
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

    /// Refuses requests while the session is disconnected. The library would keep such requests,
    /// and would send them later, when their callers are gone.
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

    /// Notes that the session was disconnected, or is over, or is connected again. A session that
    /// is connected again has been disconnected before, so this is a disturbance too.
    fn changed(&self, to: SessionState) {
        let over =
            |text: &str, fault| Up::Over(StoreError::new(fault, format!("ZooKeeper: {text}")));
        let up = match to {
            SessionState::SyncConnected => Up::Yes,
            SessionState::Disconnected | SessionState::ConnectedReadOnly => Up::No,
            SessionState::AuthFailed => over(
                "the server refuses the credentials; check user and password in the URL",
                Fault::Config,
            ),
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
        // On the next connection, the core again asks for the watches that it needs.
        state.unwatch_all();
        // After a disturbance, every ticket must be checked.
        for standing in state.tickets.all_mut() {
            standing.seen = None;
        }
        // When this is dropped, the core opens another connection. That connection resumes this
        // session, or opens a new one if this session is over.
        let events = state.events.take();
        self.up.send_replace(up);
        drop(state);
        drop(events);
    }

    /// Removes data that is not used any more. If the session itself is not used any more, ends it
    /// and returns `true`.
    fn sweep(self: &Arc<Self>) -> bool {
        let now = Clock::BOOT.now();
        let mut state = self.state();
        state.forget_gone(now);
        let unneeded = |(path, line): &(&String, &Line)| line.is_idle(now) && !state.needs(path);
        let idle = state.lines.iter().filter(unneeded);
        let idle: Vec<String> = idle.map(|(path, _)| path.clone()).collect();
        for path in idle {
            if let Some(mut line) = state.lines.remove(&path) {
                line.stop();
            }
        }
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
        state.unwatch_all();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this mutex. Even after a panic, the maps would be
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One use of the session. If the session has no use, no tickets and no marked ids, it is ended.
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
}
