//! Connections: one per runtime that uses the client, and the only reconnect loop.
//!
//! A connection is opened *in* the runtime that asks for it, so that its driver shares a thread
//! with the tasks it serves, but it is watched from the keeper's thread. When its runtime ends it
//! is forgotten; the next runtime gets its own.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::Level;

use super::alarms::jittered;
use super::gate::Connected;
use super::links::{Link, State};
use super::shared::Shared;
use crate::backend::{Events, Fault, News, StoreError};
use crate::log::guarded;

/// Between two attempts; the pauses double up to this, and each is jittered in full.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The same while nothing depends on the connection, and somebody listens for its return.
const LONGEST_IDLE_PAUSE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// A connection that broke before this was no good; the pauses go on growing.
const SETTLED: Duration = Duration::from_secs(1);
/// A runtime that has not run an empty task for so long is blocked, and not ending.
const BLOCKED: Duration = Duration::from_millis(10);

/// Has the keeper look after a link that was just made.
pub(crate) fn begin(shared: Arc<Shared>, link: Arc<Link>) {
    let keeper = shared.keeper.clone();
    keeper.spawn(look_after(shared, link));
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
        let (events, closed) = sink(&shared, &link);
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

/// What a connection tells its news to, and what resolves when it has been dropped.
fn sink(shared: &Arc<Shared>, link: &Link) -> (Events, oneshot::Receiver<()>) {
    let (closed, when_closed) = oneshot::channel::<()>();
    let client = Arc::downgrade(shared);
    let tell = move |news| {
        let _goes_with_the_sink = &closed;
        let Some(client) = client.upgrade() else {
            return;
        };
        match news {
            News::Granted(wake) => client.granted(wake),
            News::Recheck(id, after) => client.recheck(id, after),
            News::Gap => client.renew_everything(),
        }
    };
    let events = Events::new(link.receiver, shared.namespace.clone(), tell);
    (events.with_default_ttl(shared.defaults.ttl), when_closed)
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
    use crate::client::calls::Where;
    use crate::client::keeper::Keeper;
    use crate::client::settings::Settings;
    use crate::clock::{Clock, Instant};

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
        while !shared.links.is_empty() {
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
