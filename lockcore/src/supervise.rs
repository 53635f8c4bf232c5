//! Connections: one per runtime that uses the client, and the only reconnect loop.
//!
//! A connection is opened *in* the runtime that asks for it, so that its driver shares a thread
//! with the tasks it serves, but it is watched from the keeper's thread. When its runtime ends it
//! is forgotten; the next runtime gets its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;

use crate::backend::{Connection, Fault, StoreError};
use crate::keeper::{Events, Shared, jittered};

/// Between two attempts; the pauses double up to this, and each is jittered in full.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// The connections of one client.
#[derive(Debug, Default)]
pub(crate) struct Links {
    // A handful of runtimes at most: a scan beats a map.
    list: Mutex<Vec<Arc<Link>>>,
}

/// The connection of one runtime, in whatever state it is.
#[derive(Debug)]
pub(crate) struct Link {
    runtime: Handle,
    state: watch::Sender<State>,
    /// See [`Events::receiver`].
    receiver: u64,
    /// Asks the supervisor for another connection.
    replace: Notify,
    /// Tells the supervisor that somebody waits for a connection.
    asked: Notify,
}

#[derive(Clone, Debug)]
enum State {
    Connecting,
    Up(Arc<dyn Connection>),
    Down(StoreError),
}

impl Links {
    /// The link of a runtime; opened if there is none.
    pub(crate) fn of(&self, shared: &Arc<Shared>, runtime: &Handle) -> Arc<Link> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = list.iter().find(|link| link.runtime.id() == runtime.id()) {
            return Arc::clone(link);
        }
        let link = Arc::new(Link {
            runtime: runtime.clone(),
            state: watch::Sender::new(State::Connecting),
            receiver: fastrand::u64(..),
            replace: Notify::new(),
            asked: Notify::new(),
        });
        list.push(Arc::clone(&link));
        drop(list);
        shared
            .keeper
            .spawn(supervise(Arc::clone(shared), Arc::clone(&link)));
        link
    }

    pub(crate) fn clear(&self) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    fn remove(&self, link: &Arc<Link>) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, link));
    }
}

impl Link {
    /// The connection if it is up.
    pub(crate) fn now(&self) -> Option<Arc<dyn Connection>> {
        match &*self.state.borrow() {
            State::Up(connection) => Some(Arc::clone(connection)),
            State::Connecting | State::Down(_) => None,
        }
    }

    /// Waits for the connection. Fails at once only for what waiting cannot mend.
    pub(crate) async fn connection(&self) -> Result<Arc<dyn Connection>, StoreError> {
        if let Some(connection) = self.now() {
            return Ok(connection);
        }
        let mut state = self.state.subscribe();
        self.asked.notify_one();
        loop {
            match &*state.borrow_and_update() {
                State::Up(connection) => return Ok(Arc::clone(connection)),
                State::Down(error) if error.fault() == Fault::Config => return Err(error.clone()),
                State::Connecting | State::Down(_) => {}
            }
            // The sender lives in `self`, so this cannot fail.
            let _ = state.changed().await;
        }
    }

    /// Why there is no connection, if there is none and a reason is known.
    pub(crate) fn trouble(&self) -> Option<StoreError> {
        match &*self.state.borrow() {
            State::Down(error) => Some(error.clone()),
            State::Connecting | State::Up(_) => None,
        }
    }

    /// An operation failed: if its fate is unknown the connection is broken and is replaced.
    pub(crate) fn failed(&self, connection: &Arc<dyn Connection>, error: &StoreError) {
        if error.fault() == Fault::Unknown {
            self.replace_if(|up| Arc::ptr_eq(up, connection));
        }
    }

    /// An operation got no answer in time: the server may be slow, but the connection may as well
    /// be dead without anybody having told us.
    pub(crate) fn timed_out(&self) {
        self.replace_if(|_| true);
    }

    fn replace_if(&self, which: impl Fn(&Arc<dyn Connection>) -> bool) {
        let replaced = self.state.send_if_modified(|state| match state {
            State::Up(up) if which(up) => {
                *state = State::Connecting;
                true
            }
            _ => false,
        });
        if replaced {
            self.replace.notify_one();
        }
    }

    /// Somebody waits for it.
    fn is_wanted(&self) -> bool {
        self.state.receiver_count() > 0
    }
}

/// Keeps one link up as long as its runtime lives and somebody needs it. Runs on the keeper.
async fn supervise(shared: Arc<Shared>, link: Arc<Link>) {
    // Dropped with the runtime, whatever the store's driver does.
    let (alive, mut runtime_ended) = oneshot::channel::<()>();
    let sentinel = AbortOnDrop(link.runtime.spawn(async move {
        let _alive = alive;
        std::future::pending::<()>().await;
    }));
    let mut pause = FIRST_PAUSE;
    let mut reconnecting = false;
    loop {
        let (events, closed) = Events::new(&shared, link.receiver);
        match attempt(&shared, &link, events).await {
            Ok(connection) => {
                link.state.send_replace(State::Up(connection));
                pause = FIRST_PAUSE;
                if reconnecting {
                    tracing::info!("connected to the lock store again");
                    shared.renew_everything();
                }
                reconnecting = true;
                tokio::select! {
                    _ = closed => tracing::info!("connection to the lock store lost"),
                    () = link.replace.notified() => {}
                    _ = &mut runtime_ended => break,
                }
                link.state.send_replace(State::Connecting);
            }
            Err(Attempt::RuntimeEnded) => break,
            Err(Attempt::Failed(error)) => {
                tracing::info!(%error, "cannot connect to the lock store");
                let hopeless = error.fault() == Fault::Config;
                let unwanted = !link.is_wanted() && !shared.is_busy();
                if hopeless || unwanted {
                    // Nobody needs it, or nothing will mend it: the next who asks starts afresh.
                    shared.links.remove(&link);
                    link.state.send_replace(State::Down(error));
                    return;
                }
                link.state.send_replace(State::Down(error));
                if link.is_wanted() {
                    // Several attempts within the time that an operation has, so that it does not
                    // fail on a server that is back already.
                    tokio::time::sleep(jittered(pause.min(shared.op_timeout / 4))).await;
                } else {
                    let _ = tokio::time::timeout(jittered(pause), link.asked.notified()).await;
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    shared.links.remove(&link);
    drop(sentinel);
    link.state.send_replace(State::Down(StoreError::new(
        Fault::Retry,
        "the runtime of this connection has ended",
    )));
}

enum Attempt {
    Failed(StoreError),
    RuntimeEnded,
}

async fn attempt(
    shared: &Arc<Shared>,
    link: &Link,
    events: Events,
) -> Result<Arc<dyn Connection>, Attempt> {
    let mut opening = AbortOnDrop(link.runtime.spawn(shared.backend.connect(events)));
    match tokio::time::timeout(shared.op_timeout, &mut opening.0).await {
        Ok(Ok(outcome)) => outcome.map_err(Attempt::Failed),
        Ok(Err(ended)) if ended.is_cancelled() => Err(Attempt::RuntimeEnded),
        Ok(Err(_panic)) => Err(Attempt::Failed(StoreError::new(
            Fault::Config,
            "opening a connection panicked; does the runtime have its I/O driver on (enable_all)?",
        ))),
        Err(_) => Err(Attempt::Failed(StoreError::new(
            Fault::Retry,
            format!(
                "no connection within {}",
                humantime::format_duration(shared.op_timeout)
            ),
        ))),
    }
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
