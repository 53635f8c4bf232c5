//! Connections: one per runtime that uses the client, and the only reconnect loop.
//!
//! A connection is opened *in* the runtime that asks for it, so that its driver shares a thread
//! with the tasks it serves, but it is watched from the keeper's thread. When its runtime ends it
//! is forgotten; the next runtime gets its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::Level;

use crate::backend::{Events, Fault, StoreError};
use crate::gate::Connected;
use crate::log::guarded;
use crate::shared::{Shared, jittered};

/// Between two attempts; the pauses double up to this, and each is jittered in full.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The same while nothing depends on the connection, and somebody listens for its return.
const LONGEST_IDLE_PAUSE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// A connection that broke before this was no good; the pauses go on growing.
const SETTLED: Duration = Duration::from_secs(1);
/// A runtime that has not run an empty task for so long is blocked, and not ending.
const BLOCKED: Duration = Duration::from_millis(10);

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
    runtime: Handle,
    state: watch::Sender<State>,
    /// See [`Events::receiver`].
    receiver: u64,
    /// Tells the supervisor that somebody waits for a connection.
    asked: Notify,
}

#[derive(Clone, Debug)]
enum State {
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

    /// The link of a runtime; opened if there is none.
    pub(crate) fn of(&self, shared: &Arc<Shared>, runtime: &Handle) -> Arc<Link> {
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
        shared
            .keeper
            .spawn(look_after(Arc::clone(shared), Arc::clone(&link)));
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

    fn remove(&self, link: &Arc<Link>) {
        self.list().retain(|other| !Arc::ptr_eq(other, link));
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
    fn change(&self, to: State) -> State {
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
    async fn until_replaced(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state.wait_for(|state| !matches!(state, State::Up(_))).await;
    }

    /// Resolves when somebody wants to know about a mistake again.
    async fn asked_again(&self) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = state
            .wait_for(|state| matches!(state, State::Asked(_)))
            .await;
    }

    /// Somebody waits for it.
    fn is_wanted(&self) -> bool {
        self.state.receiver_count() > 0
    }
}

/// Runs the supervisor of a link to its end. One that panics, in a waker for example, which is the
/// user's code, is started again: without it nobody would reconnect.
async fn look_after(shared: Arc<Shared>, link: Arc<Link>) {
    let mut reconnecting = false;
    loop {
        let supervisor = supervise(Arc::clone(&shared), Arc::clone(&link), reconnecting);
        let supervisor = tokio::spawn(supervisor);
        match supervisor.await {
            Err(error) if error.is_panic() => {}
            // It has come to its end, or the keeper has.
            Ok(()) | Err(_) => return,
        }
        reconnecting = true;
        guarded(|| drop(link.change(State::Connecting)));
        shared.log(Level::WARN, || {
            tracing::warn!("the supervisor of a connection panicked and is started again");
        });
        // A panic at every turn must not keep the thread busy.
        tokio::time::sleep(FIRST_PAUSE).await;
    }
}

/// Keeps one link up as long as its runtime lives and somebody needs it. Runs on the keeper.
async fn supervise(shared: Arc<Shared>, link: Arc<Link>, mut reconnecting: bool) {
    // Dropped with the runtime, whatever the store's driver does.
    let (alive, mut runtime_ended) = oneshot::channel::<()>();
    let sentinel = AbortOnDrop(link.runtime.spawn(async move {
        let _alive = alive;
        std::future::pending::<()>().await;
    }));
    let mut pause = FIRST_PAUSE;
    // Nobody needs the connection; a listener wants to hear that the store is back.
    let mut idle = false;
    while !shared.links.have_ended() {
        let (events, closed) = Events::of_client(&shared, link.receiver);
        let pause_from = match attempt(&shared, &link, events).await {
            Ok(connected) => {
                link.change(State::Up(Arc::new(connected)));
                shared.restored();
                if reconnecting {
                    shared.renew_everything();
                }
                reconnecting = true;
                let up_since = shared.clock.now();
                tokio::select! {
                    biased;
                    _ = &mut runtime_ended => break,
                    _ = closed => {}
                    () = link.until_replaced() => {}
                }
                if shared.links.have_ended() {
                    break;
                }
                link.change(State::Connecting);
                // A runtime that ends takes its connection along, in whatever order: that is no
                // trouble with the store.
                let alive = tokio::time::timeout(BLOCKED, link.runtime.spawn(async {}));
                if let Ok(Err(_ended)) = alive.await {
                    break;
                }
                shared.suspect();
                // From before it is told, so that whoever hears of it and then turns the clock turns it within the pause.
                let now = shared.clock.now();
                shared.suspended(&StoreError::new(Fault::Retry, "the connection is lost"));
                if up_since.until(now) > SETTLED {
                    pause = FIRST_PAUSE;
                }
                now
            }
            Err(Attempt::RuntimeEnded) => break,
            Err(Attempt::Failed(error)) => {
                shared.suspended(&error);
                idle = !link.is_wanted() && !shared.is_busy();
                if idle && !shared.teller.is_heard() {
                    // The next caller who asks starts afresh.
                    break;
                }
                let mistake = error.fault() == Fault::Config;
                link.change(State::Down(error));
                // By itself nothing will be better at the next try, and a password that is offered
                // again and again looks like an attack.
                if mistake {
                    tokio::select! {
                        () = link.asked_again() => {}
                        _ = &mut runtime_ended => break,
                    }
                }
                shared.clock.now()
            }
        };
        // Registered before looking.
        let asked = link.asked.notified();
        if !link.is_wanted() {
            let again = pause_from.after(jittered(pause));
            let _ = shared.by(again, asked).await;
        }
        // Jittered also at first: all clients of a server that restarts come at once.
        if link.is_wanted() {
            // Several attempts within the time that an operation has, so that it does not fail on a
            // server that is back already.
            let again = jittered(pause.min(shared.op_timeout / 4));
            shared.alarm(shared.clock.now().after(again)).await;
        }
        let longest = if idle {
            LONGEST_IDLE_PAUSE
        } else {
            LONGEST_PAUSE
        };
        pause = (pause * 2).min(longest);
    }
    // Off the list before anybody is told, so that a caller who is told finds another.
    shared.links.remove(&link);
    drop(sentinel);
    link.change(State::Closed);
    shared.await_restoration();
}

enum Attempt {
    Failed(StoreError),
    RuntimeEnded,
}

async fn attempt(shared: &Arc<Shared>, link: &Link, events: Events) -> Result<Connected, Attempt> {
    let mut opening = AbortOnDrop(link.runtime.spawn(shared.backend.connect(events)));
    let by = shared.clock.now().after(shared.op_timeout);
    match shared.by(by, &mut opening.0).await {
        Some(Ok(Ok(connection))) => {
            let in_flight = shared.backend.capability().in_flight;
            Ok(Connected::new(connection, in_flight))
        }
        Some(Ok(Err(error))) => Err(Attempt::Failed(error)),
        Some(Err(ended)) if ended.is_cancelled() => Err(Attempt::RuntimeEnded),
        Some(Err(_panic)) => Err(Attempt::Failed(StoreError::new(
            Fault::Config,
            "opening a connection panicked; does the runtime have its I/O driver on (enable_all)?",
        ))),
        None => Err(Attempt::Failed(StoreError::new(
            Fault::Retry,
            format!(
                "no connection to {} within {}{}",
                shared.store(),
                humantime::format_duration(shared.op_timeout),
                shared.backend.silence()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use crate::clock::{Clock, Instant};
    use crate::keeper::Keeper;
    use crate::shared::{Settings, Where};

    /// A service that builds a runtime per request must not collect their connections.
    #[test]
    fn a_link_goes_when_its_runtime_has_ended() {
        let memory = Arc::new(Memory::new(Clock::BOOT));
        let (_keeper, shared) = Keeper::start(memory, Settings::of_tests()).unwrap();
        for _ in 0..3 {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            runtime
                .block_on(shared.connection(Where::Here, Instant::FAR_FUTURE))
                .unwrap();
        }

        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !shared.links.list.lock().unwrap().is_empty() {
            assert!(std::time::Instant::now() < deadline, "links are left");
            std::thread::yield_now();
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_of_no_use_is_not_handed_out_again() {
        let memory = Arc::new(Memory::new(Clock::BOOT));
        let (_keeper, shared) = Keeper::start(memory, Settings::of_tests()).unwrap();
        let connection = || shared.connection(Where::Here, Instant::FAR_FUTURE);
        let (_, first) = connection().await.unwrap();

        let broken: Result<(), _> = Err(StoreError::broken("gone"));
        shared.links.ended(&first, &broken);

        let (_, second) = connection().await.unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
    }
}
