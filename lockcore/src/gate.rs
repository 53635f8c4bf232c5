//! A connection that is up, and what is in flight on it: how much that may be, whose turn comes
//! next, and whether anything is answered. Opening and replacing connections is in `supervise`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backend::Connection;

/// The verbs of a store, with their gates.
///
/// A store is asked for no more than it carries ([`Capability::in_flight`]). What is beyond that
/// waits here, in order of arrival. So a burst of requests costs the callers time, and never the
/// renewals and proofs of life that share the connection: these pass no gate.
///
/// Releases have a gate of their own. They free what others wait for, so they must not stand behind
/// thousands of enqueues.
///
/// [`Capability::in_flight`]: crate::backend::Capability::in_flight
#[derive(Debug)]
pub(crate) struct Connected {
    connection: Arc<dyn Connection>,
    enqueues: Gate,
    releases: Gate,
    /// How many requests were answered, whatever the answer.
    answers: AtomicU64,
}

/// Lets a number of requests through at a time, each until its [`Pass`] is dropped.
#[derive(Debug)]
struct Gate {
    width: u32,
    /// `None` for a store that takes whatever comes.
    semaphore: Option<Arc<Semaphore>>,
}

/// A request is in flight for as long as this lives.
#[derive(Debug)]
pub(crate) struct Pass {
    /// It was not let through at once, so that time has passed.
    pub(crate) has_waited: bool,
    _permit: Option<OwnedSemaphorePermit>,
}

/// The connection was replaced while a request waited for its turn. Nothing was sent.
#[derive(Debug)]
pub(crate) struct Replaced;

impl Connected {
    pub(crate) fn new(connection: Arc<dyn Connection>, in_flight: u32) -> Self {
        Self {
            connection,
            enqueues: Gate::new(in_flight),
            releases: Gate::new(in_flight),
            answers: AtomicU64::new(0),
        }
    }

    pub(crate) fn verbs(&self) -> &dyn Connection {
        &*self.connection
    }

    /// The store's part, for its [`close`](Connection::close).
    pub(crate) fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// Resolves when one more enqueue may be sent.
    ///
    /// Dropped before that, the place in front of the gate is given up.
    pub(crate) async fn admit_enqueue(&self) -> Result<Pass, Replaced> {
        self.enqueues.pass(1).await
    }

    /// Resolves when the release of so many tickets may be sent, in one request.
    ///
    /// Dropped before that, the place in front of the gate is given up.
    pub(crate) async fn admit_release(&self, tickets: usize) -> Result<Pass, Replaced> {
        self.releases.pass(tickets).await
    }

    /// Nothing is sent on it any more: sends away those who wait in front of the gates.
    pub(crate) fn close(&self) {
        for gate in [&self.enqueues, &self.releases] {
            if let Some(semaphore) = &gate.semaphore {
                semaphore.close();
            }
        }
    }

    /// A request was answered.
    pub(crate) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// How many requests were answered so far. A request that is not answered while this stays the
    /// same says that the connection is dead; if others are answered meanwhile, it is only slow.
    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}

impl Gate {
    fn new(width: u32) -> Self {
        let bounded = width < u32::MAX;
        Self {
            width,
            semaphore: bounded.then(|| Arc::new(Semaphore::new(width.max(1) as usize))),
        }
    }

    async fn pass(&self, requests: usize) -> Result<Pass, Replaced> {
        let pass = |has_waited, _permit| Pass {
            has_waited,
            _permit,
        };
        let Some(semaphore) = &self.semaphore else {
            return Ok(pass(false, None));
        };
        // More than the gate is wide goes alone.
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let requests = requests.clamp(1, self.width);
        // Does not pass those who wait: what becomes free is theirs.
        let at_once = Arc::clone(semaphore).try_acquire_many_owned(requests);
        if let Ok(permit) = at_once {
            return Ok(pass(false, Some(permit)));
        }
        let permit = Arc::clone(semaphore).acquire_many_owned(requests).await;
        permit
            .map(|permit| pass(true, Some(permit)))
            .map_err(|_closed| Replaced)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_gate_lets_through_what_fits_and_the_rest_in_order() {
        let gate = Gate::new(10);
        let mut first = pin!(gate.pass(8));
        let mut large = pin!(gate.pass(100));
        let mut small = pin!(gate.pass(1));
        let Poll::Ready(Ok(pass)) = poll(first.as_mut()) else {
            panic!("the gate was free");
        };
        assert!(poll(large.as_mut()).is_pending());
        assert!(poll(small.as_mut()).is_pending(), "it came later");

        drop(pass);

        let Poll::Ready(Ok(pass)) = poll(large.as_mut()) else {
            panic!("nobody is in front");
        };
        assert!(poll(small.as_mut()).is_pending());
        drop(pass);
        assert!(matches!(poll(small.as_mut()), Poll::Ready(Ok(_))));
    }

    #[test]
    fn a_closed_gate_sends_away_those_who_wait() {
        let gate = Gate::new(1);
        let mut first = pin!(gate.pass(1));
        let mut second = pin!(gate.pass(1));
        let Poll::Ready(Ok(_in_flight)) = poll(first.as_mut()) else {
            panic!("the gate was free");
        };
        assert!(poll(second.as_mut()).is_pending());

        if let Some(semaphore) = &gate.semaphore {
            semaphore.close();
        }

        assert!(matches!(poll(second.as_mut()), Poll::Ready(Err(Replaced))));
    }
}
