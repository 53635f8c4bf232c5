//! A connection that is up, and what is in flight on it: how much that may be, whose turn comes
//! next, and whether anything is answered. Opening and replacing connections is in `supervise`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backend::{Answer, Connection, Enqueued};
use crate::clock::Instant;
use crate::log::guarded;

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
    /// Since when requests have been sent and none was answered, in nanoseconds of the lease clock;
    /// 0 if an answer was the last that happened.
    silent_since: AtomicU64,
}

/// Lets a number of requests through at a time, each until its [`Pass`] is dropped.
///
/// A pass belongs to a future, and a future may stay without ever being polled again, as `select!` over
/// a `&mut future` leaves it. So passes that do not move are [written off](Self::write_off): others
/// go in their place.
#[derive(Debug)]
pub(crate) struct Gate {
    width: u32,
    /// `None` for a store that takes whatever comes.
    semaphore: Option<Arc<Semaphore>>,
    /// How many passes were given or came back so far.
    moves: Arc<AtomicU64>,
    /// Permits that were replaced, and do not come back.
    written_off: Arc<AtomicU64>,
}

/// A request is in flight for as long as this lives.
#[derive(Debug)]
pub(crate) struct Pass {
    /// It was not let through at once, so that time has passed.
    pub(crate) has_waited: bool,
    /// With what the gate is to be told when they come back.
    permit: Option<(OwnedSemaphorePermit, Arc<AtomicU64>, Arc<AtomicU64>)>,
}

/// An enqueue that was sent and has not been answered.
pub(crate) struct Asking {
    pub(crate) answer: Answer<Enqueued>,
    /// It is in flight for as long as somebody waits for its answer.
    pub(crate) _pass: Pass,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let Some((permit, moves, written_off)) = self.permit.take() else {
            return;
        };
        moves.fetch_add(1, Ordering::Relaxed);
        let count = permit.num_permits() as u64;
        let order = Ordering::SeqCst;
        let less = |off: u64| off.checked_sub(count);
        match written_off.fetch_update(order, order, less) {
            Ok(_) => permit.forget(),
            // Wakes the next, whose waker is the user's code.
            Err(_) => guarded(|| drop(permit)),
        }
    }
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
            silent_since: AtomicU64::new(0),
        }
    }

    pub(crate) fn verbs(&self) -> &dyn Connection {
        &*self.connection
    }

    /// The store's part, for its [`close`](Connection::close).
    pub(crate) fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// What enqueues pass, one at a time.
    pub(crate) fn enqueues(&self) -> &Gate {
        &self.enqueues
    }

    /// What releases pass, by their tickets.
    pub(crate) fn releases(&self) -> &Gate {
        &self.releases
    }

    /// Nothing is sent on it any more: sends away those who wait in front of the gates.
    pub(crate) fn close(&self) {
        for gate in [&self.enqueues, &self.releases] {
            if let Some(semaphore) = &gate.semaphore {
                semaphore.close();
            }
        }
    }

    /// A request is sent.
    pub(crate) fn asked(&self, now: Instant) {
        let order = Ordering::Relaxed;
        let _ = (self.silent_since).compare_exchange(0, now.as_nanos(), order, order);
    }

    /// A request was answered, whatever the answer.
    pub(crate) fn answered(&self) {
        self.silent_since.store(0, Ordering::Relaxed);
    }

    /// For how long requests have been sent without any answer. A connection on which one answer is
    /// late while others come is only slow.
    pub(crate) fn silent_for(&self, now: Instant) -> Duration {
        match self.silent_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Instant::from_nanos(since).until(now),
        }
    }
}

impl Gate {
    fn new(width: u32) -> Self {
        let width = width.max(1);
        let bounded = width < u32::MAX;
        Self {
            width,
            semaphore: bounded.then(|| Arc::new(Semaphore::new(width as usize))),
            moves: Arc::default(),
            written_off: Arc::default(),
        }
    }

    /// A pass for so many tickets at once, if nobody is in front.
    pub(crate) fn try_pass(&self, tickets: usize) -> Option<Pass> {
        let Some(semaphore) = &self.semaphore else {
            return Some(Pass {
                has_waited: false,
                permit: None,
            });
        };
        // Does not pass those who wait: what becomes free is theirs.
        let permit = Arc::clone(semaphore).try_acquire_many_owned(self.permits(tickets));
        Some(self.pass(permit.ok()?, false))
    }

    /// A pass for so many tickets when it is their turn.
    ///
    /// Dropped before that, the place in front of the gate is given up.
    pub(crate) async fn wait_for_pass(&self, tickets: usize) -> Result<Pass, Replaced> {
        let Some(semaphore) = &self.semaphore else {
            return Ok(Pass {
                has_waited: true,
                permit: None,
            });
        };
        let permit = Arc::clone(semaphore).acquire_many_owned(self.permits(tickets));
        let permit = permit.await.map_err(|_closed| Replaced)?;
        Ok(self.pass(permit, true))
    }

    /// How many passes were given or came back so far.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Nothing has moved since `moves` was read, for longer than the store may take for an answer:
    /// the futures that have the passes, or a place in front, are not polled. Their passes are made
    /// anew, once.
    pub(crate) fn write_off(&self, moves: u64) {
        let Some(semaphore) = &self.semaphore else {
            return;
        };
        let order = Ordering::SeqCst;
        let first = (self.moves).compare_exchange(moves, moves + 1, order, order);
        if first.is_ok() && !semaphore.is_closed() {
            self.written_off
                .fetch_add(u64::from(self.width), Ordering::SeqCst);
            guarded(|| semaphore.add_permits(self.width as usize));
        }
    }

    /// More than the gate is wide goes alone.
    fn permits(&self, tickets: usize) -> u32 {
        let tickets = u32::try_from(tickets).unwrap_or(u32::MAX);
        tickets.clamp(1, self.width)
    }

    fn pass(&self, permit: OwnedSemaphorePermit, has_waited: bool) -> Pass {
        self.moves.fetch_add(1, Ordering::Relaxed);
        Pass {
            has_waited,
            permit: Some((
                permit,
                Arc::clone(&self.moves),
                Arc::clone(&self.written_off),
            )),
        }
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
        let mut first = pin!(gate.wait_for_pass(8));
        let mut large = pin!(gate.wait_for_pass(100));
        let mut small = pin!(gate.wait_for_pass(1));
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
        let mut first = pin!(gate.wait_for_pass(1));
        let mut second = pin!(gate.wait_for_pass(1));
        let Poll::Ready(Ok(_in_flight)) = poll(first.as_mut()) else {
            panic!("the gate was free");
        };
        assert!(poll(second.as_mut()).is_pending());

        if let Some(semaphore) = &gate.semaphore {
            semaphore.close();
        }

        assert!(matches!(poll(second.as_mut()), Poll::Ready(Err(Replaced))));
    }

    #[test]
    fn passes_that_nobody_gives_back_are_made_anew_once() {
        let gate = Gate::new(2);
        let starved = [gate.try_pass(1), gate.try_pass(1)];
        assert!(starved.iter().all(Option::is_some));
        let mut waits = pin!(gate.wait_for_pass(2));
        assert!(poll(waits.as_mut()).is_pending());
        let moves = gate.moves();

        gate.write_off(moves);
        gate.write_off(moves);

        let Poll::Ready(Ok(pass)) = poll(waits.as_mut()) else {
            panic!("its turn has not come");
        };
        assert!(gate.try_pass(1).is_none(), "made anew twice");
        // Those that come back late are not added to those that were made for them.
        drop(starved);
        assert!(gate.try_pass(1).is_none());
        drop(pass);
        let both = [gate.try_pass(1), gate.try_pass(1)];
        assert!(both.iter().all(Option::is_some) && gate.try_pass(1).is_none());
    }
}
