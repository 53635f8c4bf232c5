//! The connections of one client, one per runtime that uses it, in whatever state they are. `supervise`
//! opens them and opens them again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::gate::Connected;
use crate::backend::{Fault, StoreError};
use crate::log::guarded;

/// The connections of one client.
#[derive(Debug, Default)]
pub(crate) struct Links {
    // A handful of runtimes at most: a scan beats a map.
    list: Mutex<Vec<Arc<Link>>>,
    /// No connection is opened any more.
    ended: AtomicBool,
}

/// The connection of one runtime, in whatever state it is.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) runtime: Handle,
    state: watch::Sender<State>,
    /// See [`Events::receiver`].
    pub(super) receiver: u64,
    /// Tells the supervisor that somebody waits for a connection.
    pub(super) asked: Notify,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Connecting,
    Up(Arc<Connected>),
    Down(StoreError),
    /// Down for a mistake, and somebody has asked since: it may have been mended.
    Asked(StoreError),
    /// No supervisor looks after it any more.
    Closed,
}

/// Why a link gave no connection.
pub(crate) enum NotConnected {
    Failed(StoreError),
    /// The link is over; there may be another by now.
    Closed,
}

impl Links {
    /// The connection of a runtime, if it is up.
    pub(crate) fn up(&self, runtime: &Handle) -> Option<Arc<Connected>> {
        let list = self.list();
        let link = list.iter().find(|link| link.is_of(runtime))?;
        link.up()
    }

    /// The link of a runtime. If there is none it is made, and `open` is told.
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

    /// The end of the client: closes what is up. Runs on the keeper; dropped half-way, what is left
    /// goes with the keeper's runtime.
    pub(crate) async fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let links = std::mem::take(&mut *self.list());
        for link in links {
            if let State::Up(connected) = link.change(State::Closed) {
                let connection = Arc::clone(connected.connection());
                drop(connected); // the store closes it when nobody else has it
                connection.close().await;
            }
        }
    }

    /// An operation has come to its end: notes that the connection answers, or replaces it if it is
    /// of no use any more.
    pub(crate) fn ended<T>(&self, connected: &Connected, outcome: &Result<T, StoreError>) {
        match outcome {
            Err(error) if error.is_broken() => self.replace(connected),
            Ok(_) | Err(_) => connected.answered(),
        }
    }

    /// The connection is broken, or dead without anybody having told us.
    pub(crate) fn replace(&self, connected: &Connected) {
        // Outside of the mutex: this runs wakers, which are users' code.
        let links = self.list().clone();
        for link in links {
            guarded(|| link.replace(connected));
        }
    }

    /// Whether the client is at its end, and no connection is opened any more.
    pub(crate) fn have_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub(super) fn remove(&self, link: &Arc<Link>) {
        self.list().retain(|other| !Arc::ptr_eq(other, link));
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.list().is_empty()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn is_of(&self, runtime: &Handle) -> bool {
        self.runtime.id() == runtime.id()
    }

    fn up(&self) -> Option<Arc<Connected>> {
        match &*self.state.borrow() {
            State::Up(connected) => Some(Arc::clone(connected)),
            _ => None,
        }
    }

    /// Waits for the connection. Fails without waiting on only for a mistake, found after the call.
    pub(crate) async fn connection(&self) -> Result<Arc<Connected>, NotConnected> {
        let mut state = self.state.subscribe();
        self.state.send_if_modified(|state| match state {
            State::Down(mistake) if mistake.fault() == Fault::Config => {
                *state = State::Asked(mistake.clone());
                true
            }
            _ => false,
        });
        // Not kept for later: what was asked for before a break is no reason to hurry after it.
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

    /// Why there is no connection, if there is none and a reason is known.
    pub(crate) fn trouble(&self) -> Option<StoreError> {
        match &*self.state.borrow() {
            State::Down(error) | State::Asked(error) => Some(error.clone()),
            State::Connecting | State::Up(_) | State::Closed => None,
        }
    }

    /// Another connection instead of this one, if it is this one that is up.
    fn replace(&self, connected: &Connected) {
        let is_up =
            |state: &State| matches!(state, State::Up(up) if std::ptr::eq(&**up, connected));
        self.state.send_if_modified(|state| {
            let replaced = is_up(state);
            if replaced {
                *state = State::Connecting;
            }
            replaced
        });
        // Also when it was replaced before: those who wait in front of its gate must not stay there.
        connected.close();
    }

    /// Changes the state, and sends away those who wait in front of the gate of a connection that is
    /// not up any more. Returns the state before.
    pub(super) fn change(&self, to: State) -> State {
        let before = self.state.send_replace(to);
        if let State::Up(connected) = &before {
            connected.close();
        }
        before
    }

    /// Resolves when the connection that was up is not any more.
    ///
    /// The state says so, and not a notification beside it: one that nobody was waiting for would
    /// cost the next connection.
    pub(super) async fn until_replaced(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state.wait_for(|state| !matches!(state, State::Up(_))).await;
    }

    /// Resolves when somebody wants to know about a mistake again.
    pub(super) async fn asked_again(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state
            .wait_for(|state| matches!(state, State::Asked(_)))
            .await;
    }

    /// Somebody waits for it.
    pub(super) fn is_wanted(&self) -> bool {
        self.state.receiver_count() > 0
    }
}
