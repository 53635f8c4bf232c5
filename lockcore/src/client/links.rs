//! The connections of one client, one per runtime that uses it, in any state. `supervise` opens
//! them and reopens them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::gate::Connected;
use crate::backend::{Fault, StoreError};
use crate::log::guarded;

/// If a runtime does not run an empty task within this time, the runtime is blocked and not ending.
const BLOCKED: Duration = Duration::from_millis(10);

/// The connections of one client, one per runtime that uses it.
#[derive(Debug, Default)]
pub(crate) struct Links {
    // A scan is faster than a map, because there are only a few runtimes.
    list: Mutex<Vec<Arc<Link>>>,
    /// Whether the client is ending, so that no new connection is opened.
    ended: AtomicBool,
}

/// The connection of one runtime, in any state.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) runtime: Handle,
    state: watch::Sender<State>,
    /// See [`EventSink::receiver`].
    pub(super) receiver: u64,
    /// Tells the supervisor that somebody waits for a connection.
    pub(super) asked: Notify,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Connecting,
    Up(Arc<Connected>),
    Down(StoreError),
    /// Down because of a mistake, and a caller has asked for the connection after that. The mistake
    /// may have been corrected, so the supervisor tries again.
    Asked(StoreError),
    /// The supervisor of this link has ended.
    Closed,
}

impl State {
    fn is_up(&self, connected: &Connected) -> bool {
        matches!(self, Self::Up(up) if std::ptr::eq(&**up, connected))
    }
}

/// What a runtime does with a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuntimeState {
    Runs,
    /// It has not begun the task within [`BLOCKED`], and has not ended.
    Blocked,
    Ended,
}

/// Why a link gave no connection.
pub(crate) enum NotConnected {
    Failed(StoreError),
    /// The link is closed. There may be another one by now.
    Closed,
}

impl Links {
    /// The connection of a runtime, if it is up.
    pub(crate) fn up(&self, runtime: &Handle) -> Option<Arc<Connected>> {
        let list = self.list();
        let link = list.iter().find(|link| link.is_of(runtime))?;
        link.up()
    }

    /// A connection of another runtime than the keeper's that is up, and whose runtime runs tasks.
    /// Takes at most [`BLOCKED`] for each runtime that is blocked.
    pub(crate) async fn lent(&self, keeper: &Handle) -> Option<Arc<Connected>> {
        let links = self.list().clone();
        for link in links.iter().filter(|link| !link.is_of(keeper)) {
            if let Some(connected) = link.up()
                && link.runtime_state().await == RuntimeState::Runs
            {
                return Some(connected);
            }
        }
        None
    }

    /// The link of a runtime. If there is none, one is made and passed to `open`.
    pub(crate) fn of(&self, runtime: &Handle, open: impl FnOnce(Arc<Link>)) -> Arc<Link> {
        let mut list = self.list();
        if let Some(link) = list.iter().find(|link| link.is_of(runtime)) {
            return Arc::clone(link);
        }
        let link = Arc::new(Link {
            runtime: runtime.clone(),
            state: watch::Sender::new(State::Connecting),
            receiver: fastrand::u64(..),
            asked: Notify::new(),
        });
        list.push(Arc::clone(&link));
        drop(list);
        open(Arc::clone(&link));
        link
    }

    /// Closes the connections that are up, at the end of the client. Runs on the keeper. If the
    /// future is dropped before it is done, the remaining connections are closed together with the
    /// keeper's runtime.
    pub(crate) async fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let links = std::mem::take(&mut *self.list());
        for link in links {
            if let State::Up(connected) = link.change(State::Closed) {
                let connection = Arc::clone(connected.connection());
                drop(connected); // the store's connection closes when nobody else has a reference
                connection.close().await;
            }
        }
    }

    /// An operation has ended: notes that the connection answers, or replaces the connection if it
    /// is broken.
    pub(crate) fn ended<T>(&self, connected: &Connected, outcome: &Result<T, StoreError>) {
        match outcome {
            Err(error) if error.is_broken() => self.replace(connected),
            Ok(_) | Err(_) => connected.answers().answered(),
        }
    }

    /// Replaces a connection that is broken, or that does not answer although no error was
    /// reported.
    pub(crate) fn replace(&self, connected: &Connected) {
        // Not under the mutex, because this runs wakers, which are users' code.
        let links = self.list().clone();
        for link in links {
            guarded(|| link.replace(connected));
        }
    }

    /// Whether the runtime that drives a connection runs tasks. If it does not, nobody reads the
    /// store's answers, so their absence says nothing about the store.
    pub(crate) async fn is_driven(&self, connected: &Connected) -> bool {
        let link = self
            .list()
            .iter()
            .find(|link| link.is_up(connected))
            .cloned();
        match link {
            Some(link) => link.runtime_state().await == RuntimeState::Runs,
            None => false, // the connection was replaced
        }
    }

    /// Whether the client is ending, so that no new connection is opened.
    pub(crate) fn have_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub(super) fn remove(&self, link: &Arc<Link>) {
        self.list().retain(|other| !Arc::ptr_eq(other, link));
    }

    /// Whether another runtime than this one has a link.
    #[cfg(test)]
    pub(super) fn are_others(&self, runtime: &Handle) -> bool {
        self.list().iter().any(|link| !link.is_of(runtime))
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn is_of(&self, runtime: &Handle) -> bool {
        self.runtime.id() == runtime.id()
    }

    /// Runs an empty task on the runtime of this connection. Takes at most [`BLOCKED`].
    pub(super) async fn runtime_state(&self) -> RuntimeState {
        match tokio::time::timeout(BLOCKED, self.runtime.spawn(async {})).await {
            Ok(Ok(())) => RuntimeState::Runs,
            Ok(Err(_)) => RuntimeState::Ended,
            Err(_) => RuntimeState::Blocked,
        }
    }

    fn up(&self) -> Option<Arc<Connected>> {
        match &*self.state.borrow() {
            State::Up(connected) => Some(Arc::clone(connected)),
            _ => None,
        }
    }

    /// Waits for the connection. If the store is out of reach, the wait continues. If the
    /// supervisor finds a mistake in the configuration after this call began, the wait ends with
    /// that error.
    pub(crate) async fn connection(&self) -> Result<Arc<Connected>, NotConnected> {
        let mut state = self.state.subscribe();
        self.state.send_if_modified(|state| match state {
            State::Down(mistake) if mistake.fault() == Fault::Config => {
                *state = State::Asked(mistake.clone());
                true
            }
            _ => false,
        });
        // The notification is not stored if the supervisor does not wait for it now. A request from
        // before a break must not shorten the pauses after the break.
        self.asked.notify_waiters();
        loop {
            match &*state.borrow_and_update() {
                State::Up(connected) => return Ok(Arc::clone(connected)),
                State::Down(error) if error.fault() == Fault::Config => {
                    return Err(NotConnected::Failed(error.clone()));
                }
                State::Closed => return Err(NotConnected::Closed),
                State::Connecting | State::Down(_) | State::Asked(_) => {}
            }
            // The sender lives in `self`, so this cannot fail.
            let _ = state.changed().await;
        }
    }

    fn is_up(&self, connected: &Connected) -> bool {
        self.state.borrow().is_up(connected)
    }

    /// Why there is no connection, if there is none and a reason is known.
    pub(crate) fn trouble(&self) -> Option<StoreError> {
        match &*self.state.borrow() {
            State::Down(error) | State::Asked(error) => Some(error.clone()),
            State::Connecting | State::Up(_) | State::Closed => None,
        }
    }

    /// Makes the supervisor open a new connection, if `connected` is the one that is up.
    fn replace(&self, connected: &Connected) {
        self.state.send_if_modified(|state| {
            let replaced = state.is_up(connected);
            if replaced {
                *state = State::Connecting;
            }
            replaced
        });
        // Also if the connection was replaced before, because requests that wait at its gates must
        // fail.
        connected.close();
    }

    /// Changes the state. If a connection was up, requests that wait at its gates fail with
    /// `Replaced`. Returns the previous state.
    pub(super) fn change(&self, to: State) -> State {
        let before = self.state.send_replace(to);
        if let State::Up(connected) = &before {
            connected.close();
        }
        before
    }

    /// Resolves when the connection is not up any more.
    ///
    /// This watches the state instead of a separate notification. A notification could be stored
    /// while nobody waits for it, and would then close the next connection.
    pub(super) async fn until_replaced(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state.wait_for(|state| !matches!(state, State::Up(_))).await;
    }

    /// Resolves when a caller asks for the connection again after a mistake.
    pub(super) async fn asked_again(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state
            .wait_for(|state| matches!(state, State::Asked(_)))
            .await;
    }

    /// Whether a caller waits for the connection.
    pub(super) fn is_wanted(&self) -> bool {
        self.state.receiver_count() > 0
    }
}
