//! Connections: one per runtime that uses the client, and the only reconnect loop.
//!
//! A connection is opened *in* the runtime that asks for it, so that its driver runs on the threads
//! of the tasks that it serves. Its supervisor is a task on the keeper's thread. When the runtime
//! ends, the supervisor removes the link. The next runtime gets its own connection.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::Level;

use super::gate::Connected;
use super::links::{Link, RuntimeState, State};
use super::shared::Shared;
use crate::backend::{BoxFuture, EventSink, Fault, News, StoreError};
use crate::clock::Instant;
use crate::log::guarded;
use crate::pauses::jittered;

/// The longest pause between two attempts. The pauses double up to this, each with full jitter.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause while no work depends on the connection, but a listener waits for the news
/// that the store is back.
const LONGEST_IDLE_PAUSE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// A connection that broke within this time counts as a failed attempt, so the pauses keep growing.
const SETTLED: Duration = Duration::from_secs(1);

/// The keeper's connection opens this long after the first connection of a caller. A process that
/// only takes one lock for a moment has ended by then, and does not pay for a second connection.
const BESIDE: Duration = Duration::from_millis(100);

/// Starts the supervisor of a new link, on the keeper.
pub(crate) fn begin(shared: Arc<Shared>, link: Arc<Link>) {
    let keeper = shared.keeper.clone();
    keeper.spawn(look_after(shared, link));
}

/// Runs the supervisor of a link to its end. If the supervisor panics, it is started again, because
/// otherwise nobody would reconnect. It can panic in a waker, for example, which is the user's
/// code.
async fn look_after(shared: Arc<Shared>, link: Arc<Link>) {
    let mut reconnecting = false;
    loop {
        let supervisor = supervise(Arc::clone(&shared), Arc::clone(&link), reconnecting);
        let supervisor = tokio::spawn(supervisor);
        match supervisor.await {
            Err(error) if error.is_panic() => {}
            // The supervisor has ended, or the keeper has.
            Ok(()) | Err(_) => return,
        }
        reconnecting = true;
        guarded(|| drop(link.change(State::Connecting)));
        shared.log(Level::WARN, || {
            tracing::warn!("the supervisor of a connection panicked and is started again");
        });
        // If the supervisor panics each time, this pause keeps it from occupying the thread.
        tokio::time::sleep(FIRST_PAUSE).await;
    }
}

/// Keeps one link up while its runtime lives and somebody needs the link. Runs on the keeper.
async fn supervise(shared: Arc<Shared>, link: Arc<Link>, mut reconnecting: bool) {
    // The sentinel task is dropped together with its runtime, whatever the store's driver does.
    let (alive, mut runtime_ended) = oneshot::channel::<()>();
    let sentinel = AbortOnDrop(link.runtime.spawn(async move {
        let _alive = alive;
        std::future::pending::<()>().await;
    }));
    let mut pause = FIRST_PAUSE;
    // Whether nobody needs the connection, and a listener waits for the news that the store is
    // back.
    let mut idle = false;
    while !shared.links.have_ended() {
        let (events, closed) = sink(&shared, &link);
        let pause_from = match attempt(&shared, &link, events).await {
            Ok(connected) => {
                link.change(State::Up(Arc::new(connected)));
                shared.restored();
                if reconnecting {
                    shared.meter.reconnected();
                    shared.renew_everything();
                }
                reconnecting = true;
                open_beside(&shared);
                let up_since = shared.clock.now();
                let Some(now) = until_lost(&shared, &link, closed, &mut runtime_ended).await else {
                    break;
                };
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
                    // The next caller starts a new supervisor.
                    break;
                }
                let mistake = error.fault() == Fault::Config;
                link.change(State::Down(error));
                // Another attempt would fail in the same way. And a password that is sent again and
                // again looks like an attack.
                if mistake {
                    tokio::select! {
                        () = link.asked_again() => {}
                        _ = &mut runtime_ended => break,
                    }
                }
                shared.clock.now()
            }
        };
        // Registered before the check, so that a caller in between is not missed.
        let asked = link.asked.notified();
        if !link.is_wanted() {
            let again = pause_from.after(jittered(pause));
            let _ = shared.by(again, asked).await;
        }
        // The first pause is jittered too, because all clients of a server that restarts reconnect
        // at the same time.
        if link.is_wanted() {
            // Short enough that several attempts fit into one operation timeout. So an operation
            // does not fail after the server is back.
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
    // Removed from the list before the state changes, because a caller that sees this link closed
    // must not find it again.
    shared.links.remove(&link);
    drop(sentinel);
    link.change(State::Closed);
    shared.await_restoration();
}

/// Waits while the connection is up. Returns when it was lost, or `None` if the runtime or the client
/// has ended.
async fn until_lost(
    shared: &Shared,
    link: &Link,
    closed: oneshot::Receiver<()>,
    runtime_ended: &mut oneshot::Receiver<()>,
) -> Option<Instant> {
    tokio::select! {
        biased;
        _ = runtime_ended => return None,
        _ = closed => {}
        () = link.until_replaced() => {}
    }
    if shared.links.have_ended() {
        return None;
    }
    link.change(State::Connecting);
    // A runtime that ends drops its connection, sometimes before the sentinel. Such a loss is no
    // trouble with the store, so it is not reported.
    if link.runtime_state().await == RuntimeState::Ended {
        return None;
    }
    shared.suspect();
    // Read before the event is sent. A listener may advance a test clock when it gets the event. That
    // advance must fall into the pause, which is counted from here.
    let now = shared.clock.now();
    shared.suspended(&StoreError::new(Fault::Retry, "the connection is lost"));
    Some(now)
}

/// A connection is up, so the keeper's is opened soon, unless this is the keeper's. It is open
/// before the first renewal is due. If it cannot be opened, the client reports that at once, and not
/// only when a lease is at risk.
fn open_beside(shared: &Arc<Shared>) {
    if shared.links.up(&shared.keeper).is_some() {
        return;
    }
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        tokio::time::sleep(BESIDE).await;
        drop(shared.link(&shared.keeper));
    });
}

/// The event sink of a connection, and a future that resolves when that sink has been dropped.
fn sink(shared: &Arc<Shared>, link: &Link) -> (EventSink, oneshot::Receiver<()>) {
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
            News::Wanted(id) => client.wanted(id),
            News::Changed(name) => client.watches.changed(&name),
            News::Gap => client.renew_everything(),
            News::Moved(address) => client.moved(address),
            News::NodeDown { address, reason } => client.node_down(address, reason),
            News::NodeUp(address) => client.node_up(address),
            News::Warning(warning) => client.warn(warning),
        }
    };
    let client = Arc::downgrade(shared);
    let timer = move |after| -> BoxFuture<()> {
        match client.upgrade() {
            Some(client) => Box::pin(client.alarm(client.clock.now().after(after))),
            // The connection ends with the client, so this timer is not needed any more.
            None => Box::pin(std::future::pending()),
        }
    };
    let events = EventSink::new(link.receiver, shared.namespace.clone(), tell);
    let events = events.with_default_ttl(shared.defaults.ttl);
    let events = events.with_op_timeout(shared.op_timeout);
    (events.with_timer(Arc::new(timer)), when_closed)
}

enum Attempt {
    Failed(StoreError),
    RuntimeEnded,
}

async fn attempt(
    shared: &Arc<Shared>,
    link: &Link,
    events: EventSink,
) -> Result<Connected, Attempt> {
    let mut opening = AbortOnDrop(link.runtime.spawn(shared.backend.connect(events)));
    let by = shared.clock.now().after(shared.op_timeout);
    match shared.by(by, &mut opening.0).await {
        Some(Ok(Ok(connection))) => {
            let (in_flight, sessions) = (shared.capability.in_flight, shared.capability.sessions);
            Ok(Connected::new(
                connection,
                in_flight,
                sessions,
                &shared.meter,
            ))
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
    use crate::clock::Clock;

    /// A service may build a runtime for each request. The links of ended runtimes must not pile
    /// up.
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
        while shared.links.are_others(&shared.keeper) {
            assert!(std::time::Instant::now() < deadline, "links are left");
            std::thread::yield_now();
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_of_no_use_is_not_handed_out_again() {
        let memory = Arc::new(Memory::new(Clock::BOOT));
        let (_keeper, shared) = Keeper::start(memory, Settings::of_tests()).unwrap();
        let connection = || shared.connection(Where::Here, Instant::FAR_FUTURE);
        let first = connection().await.unwrap().connected;

        let broken: Result<(), _> = Err(StoreError::broken("gone"));
        shared.links.ended(&first, &broken);

        let second = connection().await.unwrap().connected;
        assert!(!Arc::ptr_eq(&first, &second));
    }
}
