//! The link to one node. It is opened when the first request for the node comes. A link that breaks
//! is replaced by another.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;

use super::context::Context;
use super::ears::Ears;
use super::slots;
use crate::backend::redis::connection::RedisConnection;
use crate::backend::redis::dial::Part;
use crate::backend::redis::errors::failed;
use crate::backend::redis::opening::without_wake_ups;
use crate::backend::redis::task::Task;
use crate::backend::redis::views::Address;
use crate::backend::{Fault, StoreError};
use crate::clock::{Clock, Instant};

/// If a node could not be reached, no connection to it is tried for this time.
const PAUSE: Duration = Duration::from_millis(100);

/// One try to reach a node, and the connection if the try has succeeded.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) address: Address,
    /// The address as text.
    pub(super) label: Arc<str>,
    link: watch::Receiver<Link>,
    ears: Mutex<Option<Arc<Ears>>>,
    /// Since when the node has answered none of the requests that were sent to it, in nanoseconds
    /// of the lease clock. 0 if no request was sent since the last answer.
    silent_since: AtomicU64,
    /// Whether a question for the time of this node is in flight.
    is_probed: AtomicBool,
    /// Whether slots are being moved to this node. It may have no other slots.
    expects_slots: AtomicBool,
    _task: Task,
}

#[derive(Debug)]
enum Link {
    Opening,
    Up(RedisConnection),
    /// The error, and the time of the next try.
    Down(StoreError, Instant),
}

impl Node {
    pub(super) fn open(context: &Context, address: Address) -> Arc<Self> {
        let (state, link) = watch::channel(Link::Opening);
        let (whole, of) = (Weak::clone(&context.whole), address.clone());
        let opening = connect(context.clone(), address.clone());
        let task = async move {
            let (down, was_up) = match opening.await {
                Ok(connection) => {
                    let ended = connection.driver.ended();
                    state.send_replace(Link::Up(connection));
                    ended.await;
                    let lost = StoreError::new(Fault::Retry, "the connection is lost");
                    (Link::Down(lost, Instant::from_nanos(0)), true)
                }
                Err(error) => {
                    // An operator may correct a mistake at any time, so the next request tries
                    // again at once.
                    let pause = match error.fault() {
                        Fault::Config => Duration::ZERO,
                        _ => PAUSE,
                    };
                    (Link::Down(error, Clock::BOOT.now().after(pause)), false)
                }
            };
            state.send_replace(down);
            if let Some(whole) = whole.upgrade() {
                whole.lost(&of, was_up);
            }
        };
        Arc::new(Self {
            label: address.to_string().into(),
            address,
            link,
            ears: Mutex::default(),
            silent_since: AtomicU64::new(0),
            is_probed: AtomicBool::new(false),
            expects_slots: AtomicBool::new(false),
            _task: Task::spawn(&context.runtime, task),
        })
    }

    /// Returns the connection. Waits until it is open.
    pub(super) async fn link(&self) -> Result<RedisConnection, StoreError> {
        opened(self.link.clone()).await
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.link.borrow(), Link::Up(_))
    }

    /// Whether the next request should try to reach the node again.
    pub(super) fn is_gone(&self) -> bool {
        match &*self.link.borrow() {
            Link::Down(_, again) => *again <= Clock::BOOT.now(),
            Link::Opening | Link::Up(_) => self.link.has_changed().is_err(),
        }
    }

    /// Ends the connections to the node. Requests that are in flight fail.
    pub(super) fn close(&self) {
        if let Link::Up(connection) = &*self.link.borrow() {
            connection.driver.end().abort();
        }
        self.ears().take();
    }

    /// Called before a request is sent.
    pub(super) fn asked(&self) {
        let (now, order) = (Clock::BOOT.now().as_nanos(), Ordering::Relaxed);
        let _ = self.silent_since.compare_exchange(0, now, order, order);
    }

    pub(super) fn answered(&self) {
        self.silent_since.store(0, Ordering::Relaxed);
    }

    /// Begins a probe: the caller asks the node for its time. Returns `false` if another probe is
    /// not over.
    pub(super) fn begin_probe(&self) -> bool {
        !self.is_probed.swap(true, Ordering::AcqRel)
    }

    /// Ends a probe. From here on, a request that is dropped begins another one. So this comes
    /// before the silence is ended: a request that has begun no probe is not counted any more.
    pub(super) fn end_probe(&self, is_answered: bool) {
        self.is_probed.swap(false, Ordering::AcqRel);
        if is_answered {
            self.answered();
        }
    }

    /// Asks the node for its time, and returns whether it has answered. The future does not keep
    /// the connection open.
    pub(super) fn tells_time(&self) -> impl Future<Output = bool> + Send + use<> {
        let link = self.link.clone();
        async move {
            let Ok(mut connection) = opened(link).await.map(|link| link.connection) else {
                return false;
            };
            let question = redis::cmd("TIME");
            let answer = question.query_async::<redis::Value>(&mut connection).await;
            !answer.is_err_and(|error| failed(error).is_broken())
        }
    }

    /// For how long the node has answered none of the requests that were sent to it.
    pub(super) fn silence(&self) -> Duration {
        match self.silent_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Instant::from_nanos(since).until(Clock::BOOT.now()),
        }
    }

    /// Called when another node says that a slot is being moved to this one.
    pub(super) fn will_have_slots(&self) {
        self.expects_slots.store(true, Ordering::Relaxed);
    }

    pub(super) fn expects_slots(&self) -> bool {
        self.expects_slots.load(Ordering::Relaxed)
    }

    /// Whether this client listens at this node for messages in this slot.
    pub(super) fn hears(&self, slot: u16) -> bool {
        let ears = self.ears().clone();
        ears.is_some_and(|ears| ears.hears(slot))
    }

    /// Begins to listen at this node for wake-ups in this slot.
    pub(super) fn listen(&self, context: &Context, slot: u16) -> Result<Arc<Ears>, StoreError> {
        let mut ears = self.ears();
        let open = match &*ears {
            Some(open) if !open.have_ended() => Arc::clone(open),
            _ => {
                let server = context.seeds.access.named(&self.address, Part::Node)?;
                let open = Arc::new(Ears::open(context, self.address.clone(), server));
                *ears = Some(Arc::clone(&open));
                open
            }
        };
        drop(ears);
        open.wish(slot);
        Ok(open)
    }

    fn ears(&self) -> std::sync::MutexGuard<'_, Option<Arc<Ears>>> {
        self.ears.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection, once it is open.
async fn opened(mut link: watch::Receiver<Link>) -> Result<RedisConnection, StoreError> {
    let settled = link.wait_for(|link| !matches!(link, Link::Opening)).await;
    match settled.as_deref() {
        Ok(Link::Up(connection)) => Ok(connection.clone()),
        Ok(Link::Down(error, _)) => Err(error.clone()),
        // The task has ended with its runtime.
        Ok(Link::Opening) | Err(_) => Err(StoreError::new(
            Fault::Retry,
            "the runtime of the connection has ended",
        )),
    }
}

async fn connect(context: Context, address: Address) -> Result<RedisConnection, StoreError> {
    let server = context.seeds.access.named(&address, Part::Node)?;
    let channel = slots::channel(context.receiver, 0);
    let events = Weak::clone(&context.events);
    without_wake_ups(&server, &context.namespace, channel, events).await
}
